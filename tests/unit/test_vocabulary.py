"""The vocabulary command: its files encode as the library does."""

import json
import shlex
import sys

import pytest

from fugaku_megatron import cli
from fugaku_megatron.data.indexed import IndexedDataset
from fugaku_megatron.data.tokenizer import GPT2BPETokenizer
from fugaku_megatron.data.vocabulary import train_vocabulary

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the cat and the dog trained on the nodes of the cluster, été 富岳 \n" * 20


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command line in a folder with texts: words -> (exit code, lines on stdout, lines on stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "texts" / "b.txt").write_bytes(b"raw \xff bytes")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": TEXT, "title": "A title"}) + "\n")

    def call(*words):
        code = cli.main([*map(str, words)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


def test_from_text_to_tokens(run, tmp_path):
    code, printed, errors = run("vocabulary", "--input", "texts", "c.jsonl", "--vocab-size", 300, "--output", "my vocabulary")
    assert code == 0 and len(errors) == 1 and "1 plain text file is not UTF-8 (texts/b.txt: 1 byte)" in errors[0]
    assert printed[0] == "wrote my vocabulary/vocab.json and my vocabulary/merges.txt: 300 tokens from 3 files"
    ours = GPT2BPETokenizer("my vocabulary/vocab.json", "my vocabulary/merges.txt")
    assert ours.vocab_size == 300 and ours.eod == 299
    theirs = tokenizers.ByteLevelBPETokenizer.from_file("my vocabulary/vocab.json", "my vocabulary/merges.txt")
    assert ours.encode(TEXT) == theirs.encode(TEXT).ids and len(ours.encode(TEXT)) < len(TEXT) / 2
    first, command = printed[1].split(": ")
    words = shlex.split(command)
    assert len(printed) == 2 and first == "next" and words[0] == "fugaku-megatron"
    code, printed, _ = run(*words[1:])
    data = IndexedDataset("my_data_text_document")
    assert code == 0 and printed[0].endswith(f": 3 documents, {data.num_tokens} tokens")
    assert ours.decode(data[0][:-1]) == TEXT and data[0][-1] == ours.eod


def test_the_same_text_gives_the_same_files_again(run, tmp_path):
    contents = []
    for _ in range(2):
        assert run("vocabulary", "--input", "texts", "--vocab-size", 280, "--output", "v")[0] == 0
        contents.append([(tmp_path / "v" / name).read_bytes() for name in ("vocab.json", "merges.txt")])
    assert contents[0] == contents[1] and sorted(path.name for path in (tmp_path / "v").iterdir()) == ["merges.txt", "vocab.json"]


def test_a_text_that_gives_fewer_tokens(run):
    code, printed, _ = run("vocabulary", "--input", "c.jsonl", "--json-keys", "title", "--output", "v")
    tokens = GPT2BPETokenizer("v/vocab.json", "v/merges.txt").vocab_size
    assert code == 0 and printed[0].endswith(f": {tokens} tokens from 1 file") and 257 <= tokens < 300
    assert printed[1] == "note: the text has no more than these, --vocab-size is 8192"
    assert " --json-keys title " in printed[2]


@pytest.mark.parametrize(("words", "message"), [
    (["--vocab-size", "256"], "--vocab-size is 256: pass a number from 257"),
    (["--vocab-size", "9" * 30], "--vocab-size is 9"),
    (["--output", "c.jsonl"], "--output c.jsonl: exists and is not a folder"),
    (["--output", "c.jsonl/v"], "--output c.jsonl/v: cannot be written (Not a directory)"),
    (["--input", "none"], "--input none: no such file"),
    (["--input", "empty.txt"], "no text to train a vocabulary on"),
    (["--input", "c.jsonl", "--json-keys", "body"], "c.jsonl:1: expected text under key 'body'"),
    (["--input", "deep.jsonl"], "deep.jsonl:1: not a line of JSON"),
])
def test_mistakes(run, tmp_path, words, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    (tmp_path / "texts" / "b.txt").unlink()
    code, printed, errors = run("vocabulary", "--input", "texts", "--output", "v", *words)
    assert code == 2 and printed == [] and len(errors) == 1
    assert errors[0].startswith("fugaku-megatron vocabulary: ") and message in errors[0]
    assert not (tmp_path / "v").exists()


def test_the_function_checks_its_size_too(tmp_path):
    with pytest.raises(ValueError, match="--vocab-size is 256: pass a number from 257"):
        train_vocabulary([TEXT], 256, tmp_path)


def test_without_the_library_one_line_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, errors = run("vocabulary", "--input", "texts", "--output", "v")
    assert code == 2 and errors == ["fugaku-megatron vocabulary: training a vocabulary needs the Python package tokenizers: "
                                    "pip install tokenizers, or this package with its extra [demo]"]
