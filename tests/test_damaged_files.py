"""Damage drawn with a fixed seed to every kind of data file: refused with the file's name, or harmless; never a traceback.

Run: pytest tests/test_damaged_files.py
"""

import json
import random

import pytest

from fugaku_megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from fugaku_megatron.data.inputs import document_texts, input_files, read_documents
from fugaku_megatron.data.tokenizer import GPT2BPETokenizer
from tests.test_generate import write_tokenizer

DAMAGES = 250  # of each kind of file
EXTREMES = [b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7, b"\xff" * 7 + b"\x7f", b"\x01" + b"\0" * 7]


def damaged(content: bytes, rng: random.Random) -> bytes:
    """A bit turned, an end cut off, bytes added, inserted, overwritten by an extreme number or taken out, two bytes swapped."""
    data, i, j = bytearray(content), rng.randrange(len(content)), rng.randrange(len(content))
    noise = rng.randbytes(rng.randrange(1, 40))
    kind = rng.randrange(7)
    if kind == 0:
        data[i] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[i:]
    elif kind == 2:
        data += noise
    elif kind == 3:
        data[i:i] = noise
    elif kind == 4:
        data[i : i + 8] = rng.choice(EXTREMES)
    elif kind == 5:
        del data[i : i + len(noise)]
    else:
        data[i], data[j] = data[j], data[i]
    return bytes(data)


def refusals(path, read, seed=0):
    """How many damages to the file `read` refuses; each refusal names the file. Puts the file back."""
    content, rng, count = path.read_bytes(), random.Random(seed), 0
    for _ in range(DAMAGES):
        path.write_bytes(damaged(content, rng))
        try:
            read()
        except ValueError as error:
            assert path.name in str(error) and len(str(error)) < 800
            count += 1
    path.write_bytes(content)
    return count


def test_an_index_gives_its_sequences_or_none(tmp_path):
    documents = [list(range(3 * n)) for n in range(6)]
    with IndexedDatasetWriter(tmp_path / "corpus", "uint16") as writer:
        for tokens in documents:
            writer.add_document(tokens)

    def read():
        data = IndexedDataset(tmp_path / "corpus")
        assert [data[i].tolist() for i in range(len(data))] == documents

    assert refusals(tmp_path / "corpus.idx", read) > DAMAGES * 0.8


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_vocabularies(tmp_path, name):
    write_tokenizer(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps({**vocabulary, "ab": 257, "abc": 258}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nab c\n")

    def read():
        tokenizer = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
        assert tokenizer.decode(tokenizer.encode("abc à b")) == "abc à b"

    assert refusals(tmp_path / name, read) > DAMAGES / 2


def test_lines_of_json(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(5)))

    def read():
        for document in read_documents(input_files([str(path)], ["text"])):
            assert all(isinstance(text, str) for text in document_texts(document, ["text"]))

    assert refusals(path, read) > DAMAGES / 2
