"""Damaged data files, and what is not a file in their place: refused with the file's name, or harmless; never a traceback."""

import json
import os

import pytest

from fugaku_megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from fugaku_megatron.data.input.documents import document_texts, read_documents
from fugaku_megatron.data.input.input_files import input_files
from fugaku_megatron.text.named_files import unreadable
from fugaku_megatron.tokenizers.byte_level_bpe import GPT2BPETokenizer, bytes_to_unicode
from tests.checks.generation import write_tokenizer
from tests.file_damage import OTHER_KINDS, damages, replace
from tests.time_limit import time_limit

pytestmark = pytest.mark.unit

ROUNDS = 250  # damages to each kind of file


def refusals(path, read):
    """Return the number of damages to the file that `read` refuses; each refusal names the file."""
    count = 0
    for content in damages(path.read_bytes(), ROUNDS):
        path.write_bytes(content)
        try:
            with time_limit():
                read()
        except ValueError as error:
            assert path.name in str(error) and len(str(error)) < 800
            count += 1
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


@pytest.mark.parametrize("name", ["chats.jsonl", "texts"])
def test_text_in_place_of_a_dataset(tmp_path, name):
    (tmp_path / "texts").mkdir()
    (tmp_path / "chats.jsonl").write_text('{"text": "a"}')
    remedy = (
        f"--output-prefix of fugaku-megatron preprocess --input .*{name} .of chats, with --chat"
    )
    with pytest.raises(ValueError, match=remedy):
        IndexedDataset(tmp_path / name)


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_dataset_that_is_not_a_file(tmp_path, suffix, kind):
    with IndexedDatasetWriter(tmp_path / "corpus", "uint16") as writer:
        writer.add_document([1, 2, 3])
    data = IndexedDataset(tmp_path / "corpus")
    replace(tmp_path / f"corpus{suffix}", kind)
    with (
        pytest.raises(ValueError, match=rf"corpus\{suffix}: cannot be read \(.*{kind}.*preprocess"),
        time_limit(),
    ):
        IndexedDataset(tmp_path / "corpus")
    if suffix == ".bin":  # also where it is replaced after its index was read
        replace(tmp_path / "corpus.bin", "a FIFO")
        with (
            pytest.raises(ValueError, match=r"corpus\.bin: cannot be read \(it is a FIFO"),
            time_limit(),
        ):
            data[0]


VOCABULARY = {character: i for i, character in enumerate(bytes_to_unicode())}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 200_000,
        '{"a": ' + "7" * 5000 + "}",
        "",
        "\0",
        "nan",
        *(
            json.dumps({**VOCABULARY, "<|endoftext|>": 256, "!": wrong})
            for wrong in (-1, 257, True, None)
        ),
    ],
    ids=lambda text: text[:9],
)
def test_a_vocabulary_that_is_not_one(tmp_path, text):
    write_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text(text)
    with pytest.raises(
        ValueError,
        match=r"--vocab-file .*vocab\.json: (not JSON|expected one JSON object|the ids of)",
    ) as caught:
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert len(str(caught.value)) < 500


def test_a_path_with_a_zero_byte_and_a_missing_permission(tmp_path):
    assert "null" in unreadable("a\0b")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    if not os.access(tmp_path / "secret", os.R_OK):  # root may read everything
        assert unreadable(tmp_path / "secret") == "Permission denied"
