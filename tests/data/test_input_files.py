"""Input files of any name: JSON over lines or a line each, found by content; what is not text, and what --skip-invalid leaves out."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
import zlib

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.data.input import json_values
from fugaku_megatron.data.input.documents import Place, Skipped, read_documents
from fugaku_megatron.data.input.input_files import input_files
from fugaku_megatron.data.input.json_values import values
from fugaku_megatron.data.input.tables import CHAT

pytestmark = pytest.mark.unit

TEXTS = ["1 2", "3 \u65e5\n", "5"]
RECORDS = [{"text": text, "n": {"a": [2, 3]}} for text in TEXTS]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
ARRAY = json.dumps(RECORDS, indent=2, ensure_ascii=False).encode()
PRETTY = "\n".join(json.dumps(record, indent=2) for record in RECORDS).encode()
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def read(path, **more):
    return [*read_documents(input_files([str(path)], ["text"]), **more)]


def run(source, prefix, *more):
    words = ["preprocess", "--input", str(source), "--output-prefix", str(prefix)]
    return program.main([*words, "--workers", "1", *NULL, *more])


def refused(capsys, source, prefix, *more) -> str:
    """Return the one line of a refused run."""
    assert run(source, prefix, *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("content", [LINES, ARRAY, PRETTY], ids=["lines", "array", "objects"])
@pytest.mark.parametrize(
    "name",
    "a.json a.jsonl a.ndjson a.jsonlines a.JSONL A.Json part-00000 a.00003 a.txt a.JSON.GZ a.ndjson.gz part-1.gz".split(),
)
@pytest.mark.parametrize(
    "change", [bytes, lambda c: b"\xef\xbb\xbf" + c, lambda c: c.replace(b"\n", b"\r\n")]
)
def test_json_of_any_name_is_read_as_objects(tmp_path, name, content, change):
    content = change(content)
    (tmp_path / name).write_bytes(
        gzip.compress(content) if name.lower().endswith("gz") else content
    )
    assert [json.loads(d.raw.decode("utf-8-sig")) for d in read(tmp_path / name)] == RECORDS


def test_compressed_files_and_tables_are_known_by_their_content(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    zstandard = pytest.importorskip("zstandard")
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "table")
    (tmp_path / "t.PARQUET").write_bytes((tmp_path / "table").read_bytes())
    (tmp_path / "z.jsonl.ZST").write_bytes(zstandard.ZstdCompressor().compress(LINES))
    (tmp_path / "z").write_bytes(zstandard.ZstdCompressor().compress(ARRAY))
    for name in ("g", "g.jsonl", "g.txt"):
        (tmp_path / name).write_bytes(gzip.compress(LINES))
    (tmp_path / "z.json").write_bytes((tmp_path / "z").read_bytes())
    (tmp_path / "t.jsonl").write_bytes((tmp_path / "table").read_bytes())
    for file in tmp_path.iterdir():
        assert [json.loads(d.raw)["text"] for d in read(file)] == TEXTS, file


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.txt", "{one} and two\n"),
        ("a.md", "[1] a reference\n[2] another\n"),
        ("a", "{\n  int i;\n}\n"),
        ("a.txt", '{"text": "an example"}\nis a line of JSON.\n'),
        ("a.ipynb", '{\n "cells": [],\n "nbformat": 4\n}\n'),
        ("a.txt", '["a", "b"]\n'),
        ("a", "[{a}]"),
        ("a", "\n \n"),
        ("a", '"a"'),
    ],
)
def test_plain_text_stays_plain_text(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert [(d.line, d.raw.decode()) for d in read(tmp_path / name)] == [(0, text)]


def test_an_array_is_read_as_a_stream_from_any_place(tmp_path, monkeypatch):
    records = [{"text": str(i) * (i % 50), "list": [i, '\\"][']} for i in range(500)]
    text = json.dumps(records, indent=1).encode()
    for size in (7, 1000):
        blocks = [(text[at : at + size], at + size) for at in range(0, len(text), size)]
        found = [*values("a", blocks)]
        assert [json.loads(raw) for _, raw, _ in found] == records
        assert [number for number, _, _ in found] == [*range(1, len(found) + 1)]
    (tmp_path / "a.json").write_bytes(text)
    rest = read(tmp_path / "a.json", start=Place(0, 490))
    assert [json.loads(d.raw) for d in rest] == records[490:]
    assert rest[0].where == f"{tmp_path}/a.json: JSON object 491"


def test_a_long_first_line_is_still_json(tmp_path, monkeypatch):
    record = {"text": "x" * 200_000}
    (tmp_path / "part-00000").write_text(json.dumps(record) + "\n" + json.dumps(record))
    assert len(read(tmp_path / "part-00000")) == 2


@pytest.mark.parametrize(
    "text, message",
    [
        ('[\n{"text": "1"},\n{"text": "2"},\n]', "a.json:4: not JSON: a comma before ]"),
        (
            '[\n{"text": "1"}\n{"text": "2"}]',
            "a.json:3: not JSON: expected , or ] after an element",
        ),
        ('[\n{"text": "1"},\n', "a.json:3: not JSON: Expecting value"),
        ('[\n{"text": "1"}]\nx', "a.json:3: not JSON: Expecting value"),
        ('[\n{"text": "1"},\n{"text": "2}]', "a.json:3: not JSON: Unterminated string"),
        ('{\n"text": "1"\n},\n{\n"text": "2"\n}', "a.json:3: not JSON: Expecting value"),
        ('[["1"]]', "a.json: JSON object 1: expected a JSON object"),
        ('[{"txt": "1"}]', "a.json: JSON object 1: expected text under key 'text'"),
        ('{"text": "1"},\n{"text": "2"}', "a.json:1: not a line of JSON: Extra data"),
        ('{"text": "1"}{"text": "2"}', "a.json:1: not a line of JSON: Extra data"),
        ('{"text": "1"}\n{"text": "2"', "a.json:2: not a line of JSON"),
    ],
)
def test_json_that_is_wrong_is_refused_with_its_line(tmp_path, capsys, text, message):
    (tmp_path / "a.json").write_text(text)
    assert message in refused(capsys, tmp_path / "a.json", tmp_path / "o")
    assert not (tmp_path / "o_text_document.bin").exists()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.json.gz", "a"])
@pytest.mark.parametrize(
    "content, reason",
    [
        (POINTER, "it is a Git LFS pointer: run git lfs pull"),
        ("\ufeff".encode("utf-16-le") + LINES.decode().encode("utf-16-le"), "UTF-16"),
        (b"\0\1\2", "zero byte"),
        (bz2.compress(LINES), "is compressed by bzip2: unpack it"),
        (lzma.compress(LINES), "is compressed by xz: unpack it"),
    ],
)
def test_what_is_not_text_is_one_line(tmp_path, capsys, name, content, reason):
    (tmp_path / name).write_bytes(content)
    said = refused(capsys, tmp_path / name, tmp_path / "o")
    known = name.endswith((".parquet", ".gz")) and content != POINTER
    assert (reason in said or known) and "--skip-invalid" in said


def test_files_and_lines_that_cannot_be_read_are_left_out_and_counted(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("1 2")
    (folder / "b.png").write_bytes(b"\x89PNG\0\0")
    (folder / "late").write_bytes(b"1 " * 5000 + b"\0")
    (folder / "p.jsonl").write_bytes(POINTER)
    (folder / "c.jsonl").write_text('{"text": "3"}\n{"text": 4}\nnothing\n{"text": "5"}\n')
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "6"}\n' * 9)[:-4])
    said = refused(capsys, folder, tmp_path / "o")
    assert "b.png is not text" in said and "--skip-invalid leaves such files out" in said
    assert run(folder, tmp_path / "o", "--skip-invalid") == 0
    said = capsys.readouterr()
    assert "3 documents" in said.out
    assert "--skip-invalid left out 4 files and 2 documents (" in said.err
    assert "b.png is not text" in said.err and ", ...)" in said.err


def compressed(suffix, blocks):
    """Compress blocks of bytes without all of them in memory."""
    if suffix == ".gz":
        packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    else:
        packer = pytest.importorskip("zstandard").ZstdCompressor().compressobj()
    return b"".join([*map(packer.compress, blocks), packer.flush()])


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.jsonl", '{"text": "1"}\n{"text": "%s"}\n', "line 2 is "),
        ("a.json", '[\n{"text":\n"1"},\n{"text":\n"%s"}]', "a JSON object at line 4 is "),
        ("a.txt", "%s", "is "),
    ],
)
def test_a_document_has_at_most_so_many_bytes(tmp_path, capsys, name, text, where, suffix):
    content = (text % ("1 " * 500)).encode()
    path = tmp_path / (name + suffix)
    path.write_bytes(compressed(suffix, [content]) if suffix else content)
    limit = 1000 if name == "a.txt" else 1012
    said = refused(capsys, path, tmp_path / "o", "--max-document-bytes", str(limit - 1))
    assert f"--input {path}: {where}longer than {limit - 1} bytes" in said
    assert "--max-document-bytes" in said
    assert run(path, tmp_path / "o", "--max-document-bytes", str(limit)) == 0


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_line_that_fills_the_memory_is_refused_before(tmp_path, suffix):
    """The file has a line of 256 MiB."""
    block = b"1 " * 2**19
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compressed(suffix, [b'{"text": "', *[block] * 2**8]))
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"line 1 is longer than {2**23} bytes"):
        [*read_documents([str(path)], largest=2**23)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**28


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", '{"_data_files": [{"x": 1}]}', "state.json: None is no file in its folder"),
        (
            "state.json",
            '{"_data_files": [{"filename": "../secret.arrow"}]}',
            "state.json: '../secret.arrow' is no file in its folder",
        ),
        ("state.json", '{"_data_files": {"a": 1}}', "state.json: is not an object with a list"),
        ("state.json", "[1]", "state.json: is not an object with a list '_data_files'"),
        ("state.json", "[" * 10**5, "state.json: is not JSON"),
        ("state.json", b"\xff", "state.json: not UTF-8 text"),
        ("dataset_dict.json", '{"splits": 5}', "is not an object with a list 'splits'"),
        ("dataset_dict.json", "[1]", "is not an object with a list 'splits'"),
        ("dataset_dict.json", "nothing", "dataset_dict.json: is not JSON"),
    ],
)
def test_a_damaged_folder_of_datasets_is_one_line(tmp_path, capsys, name, content, message):
    folder = tmp_path / "saved"
    folder.mkdir()
    (tmp_path / "secret.arrow").write_bytes(b"")
    (folder / "a.arrow").write_bytes(b"")
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused(capsys, folder, tmp_path / "o")


def test_a_folder_of_which_nothing_can_be_read_is_refused(tmp_path, capsys):
    (tmp_path / "b.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "c.jsonl").write_text("nothing\n")
    for name in ("b.png", "c.jsonl"):
        assert run(tmp_path / name, tmp_path / "o", "--skip-invalid") == 2
        assert "no text in it; warning: --skip-invalid left out 1" in capsys.readouterr().err


def test_chats_of_a_folder_are_its_json(tmp_path, capsys):
    (tmp_path / "README.md").write_text("about these chats")
    (tmp_path / "a.json").write_text('[\n{"messages": []}]')
    found = input_files([str(tmp_path)], ["text"], CHAT, Skipped(False))
    assert [*map(str, found)] == [str(tmp_path / "a.json")]
    assert "1 plain text files in it are not read" in capsys.readouterr().err


def test_a_number_at_the_end_of_a_block_is_whole():
    assert [raw for _, raw, _ in values("a", [(b"1", 1), (b"2", 2), (b" 3", 4)])] == [b"12", b"3"]
    assert json_values.json_layout(b"", False, "", ["text"]) is None
