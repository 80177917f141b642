"""Damage drawn with a fixed seed to every kind of data file: refused with the file's name, or harmless; never a traceback."""

import json
import random

import pytest

from fugaku_megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from fugaku_megatron.data.inputs import document_texts, input_files, read_documents
from fugaku_megatron.data.tokenizer import GPT2BPETokenizer
from tests.file_damage import DAMAGES, damaged
from tests.parallel.test_generate import write_tokenizer
from tests.time_limit import time_limit

ROUNDS = 250  # damages to each kind of file


def draw(content: bytes, rng: random.Random) -> bytes:
    """Any damage, anywhere."""
    return damaged(content, rng.choice(DAMAGES), rng.randrange(len(content)), rng.randrange(len(content)),
                   rng.randbytes(rng.randrange(1, 40)))


def refusals(path, read, seed=0):
    """How many damages to the file `read` refuses; each refusal names the file. Puts the file back."""
    content, rng, count = path.read_bytes(), random.Random(seed), 0
    for _ in range(ROUNDS):
        path.write_bytes(draw(content, rng))
        try:
            with time_limit():
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

    assert refusals(tmp_path / "corpus.idx", read) > ROUNDS * 0.8


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_vocabularies(tmp_path, name):
    write_tokenizer(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps({**vocabulary, "ab": 257, "abc": 258}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nab c\n")

    def read():
        tokenizer = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
        assert tokenizer.decode(tokenizer.encode("abc à b")) == "abc à b"

    assert refusals(tmp_path / name, read) > ROUNDS / 2


def test_lines_of_json(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(5)))

    def read():
        for document in read_documents(input_files([str(path)], ["text"])):
            assert all(isinstance(text, str) for text in document_texts(document, ["text"]))

    assert refusals(path, read) > ROUNDS / 2
