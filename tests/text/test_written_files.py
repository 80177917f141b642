"""Links that another user planted where this program writes: never followed, whatever the name."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

import fugaku_megatron
from fugaku_megatron.checkpoint import manifest
from fugaku_megatron.cli import program
from fugaku_megatron.cli.output_files import check_file
from fugaku_megatron.data.indexed import IndexedDatasetWriter
from fugaku_megatron.observe.export.history import History
from fugaku_megatron.observe.log.screen import append
from fugaku_megatron.report.record import write_atomically
from fugaku_megatron.text import written_files
from fugaku_megatron.text.table import write_csv
from fugaku_megatron.tokenizers.tokenizer import NullTokenizer, write_identity
from tests.checks.generation import write_tokenizer

pytestmark = pytest.mark.unit

OTHER = 65534  # a user
PRECIOUS = "precious"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "96"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make links of another user")


@pytest.fixture
def shared(tmp_path):
    """Return a directory in which everybody may write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def victim(tmp_path):
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text(PRECIOUS)
    (folder / "journal.json").write_text(PRECIOUS)
    yield folder
    assert sorted(path.name for path in folder.iterdir()) == ["file", "journal.json"]
    assert {path.read_text() for path in folder.iterdir()} == {PRECIOUS}


def plant(link: Path, target: Path, owner: int = OTHER) -> None:
    link.symlink_to(target)
    if os.geteuid() == 0:
        os.chown(link, owner, owner, follow_symlinks=False)


def preprocess(tmp_path: Path, prefix: Path) -> int:
    (tmp_path / "n.jsonl").write_text('{"text": "1 2 3"}\n')
    source = ["--input", str(tmp_path / "n.jsonl"), "--output-prefix", str(prefix)]
    return program.main(["preprocess", *NULL, *source])


def test_a_link_in_place_of_the_unfinished_folder_is_refused(tmp_path, shared, victim, capsys):
    plant(shared / "c.unfinished", victim)
    assert preprocess(tmp_path, shared / "c") == 2
    said = capsys.readouterr().err
    assert "c.unfinished" in said and "is a link or another user's" in said
    assert said.count("\n") == 1


@as_root
def test_an_unfinished_folder_of_another_user_is_refused(tmp_path, shared, victim, capsys):
    (shared / "c.unfinished").mkdir()
    plant(shared / "c.unfinished" / "0.tokens", victim / "file")
    os.chown(shared / "c.unfinished", OTHER, OTHER)
    assert preprocess(tmp_path, shared / "c") == 2
    assert "is a link or another user's" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["0.tokens", "0.lengths", "lock", "journal.json.new"])
def test_a_link_in_the_unfinished_folder_is_not_followed(tmp_path, shared, victim, name):
    (shared / "c.unfinished").mkdir()
    plant(shared / "c.unfinished" / name, victim / "file")
    assert preprocess(tmp_path, shared / "c") == (2 if name == "lock" else 0)


CHOSEN = [  # files with names that the program chooses: the link's name, and a write
    (
        "c_text_document.bin",
        lambda folder: preprocess(folder.parent, folder / "c"),
    ),
    ("c_text_document.tokenizer.json", lambda folder: preprocess(folder.parent, folder / "c")),
    ("c.tokenizer.json", lambda folder: write_identity(str(folder / "c"), NullTokenizer(8))),
    (
        "c.bin.tmpPROCESS",
        lambda folder: IndexedDatasetWriter(folder / "c", "uint16").discard(),
    ),
    ("a.csv.tmp", lambda folder: write_csv(folder / "a.csv", ["a"], [{"a": 1}])),
    ("h.jsonl", lambda folder: History(folder / "h.jsonl", 0).close()),
    ("h.jsonl.tmp", lambda folder: History(folder / "h.jsonl", 0).close()),
    ("report.json", lambda folder: write_atomically(folder / "report.json", "{}")),
    ("manifest.json", lambda folder: manifest.write_text(folder / "manifest.json", "{}")),
    (".run", lambda folder: manifest.write_text(folder / ".run", "1")),
]


@pytest.mark.parametrize(("name", "write"), CHOSEN, ids=[name for name, _ in CHOSEN])
@pytest.mark.parametrize("target", ["file", "missing"])
def test_a_link_at_a_chosen_name_is_not_followed(shared, victim, name, write, target):
    name = name.replace("PROCESS", str(os.getpid()))
    plant(shared / name, victim / target)
    try:
        write(shared)
    except (ValueError, OSError) as error:
        assert name in str(error)
    assert not (victim / "missing").exists()


NAMED = [  # files that the user names
    lambda file: append(file, "a line"),
    lambda file: check_file("--log-file", file),
]


@as_root
@pytest.mark.parametrize("write", NAMED)
def test_a_named_file_may_be_a_link_of_the_user_alone(shared, victim, write, tmp_path):
    plant(shared / "foreign", victim / "file")
    with pytest.raises((PermissionError, ValueError), match="is a link of another user"):
        write(shared / "foreign")
    plant(shared / "own", tmp_path / "target", owner=os.geteuid())
    write(shared / "own")
    os.lchown(shared / "own", 1, 1)
    shared.chmod(0o755)
    write(shared / "own")


@as_root
def test_a_folder_behind_the_link_of_another_user_is_refused(shared, victim, tmp_path):
    plant(shared / "save", victim)
    for folder in (shared / "save", shared / "save" / "rank_00000"):
        with pytest.raises(PermissionError, match="is a link of another user"):
            written_files.make_folder(folder)
    plant(shared / "own", tmp_path / "mine", owner=os.geteuid())
    (tmp_path / "mine").mkdir()
    written_files.make_folder(shared / "own" / "more")


@as_root
def test_a_vocabulary_is_not_written_behind_a_link(tmp_path, shared, victim, capsys):
    write_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text("one two three one two three " * 9)
    plant(shared / "v", victim)
    words = ["--input", str(tmp_path / "text.txt"), "--vocab-size", "260"]
    assert program.main(["vocabulary", *words, "--output", str(shared / "v")]) == 2
    assert "is a link of another user" in capsys.readouterr().err
    (shared / "w").mkdir()
    plant(shared / "w" / "vocab.json.tmp", victim / "file")
    assert program.main(["vocabulary", *words, "--output", str(shared / "w")]) == 0
    assert len(json.loads((shared / "w" / "vocab.json").read_text())) == 260


# Modules that open files for writing without an opener, and the reason.
WITHOUT_OPENER = {
    "checkpoint/lock.py": "links a file with a random name, or creates exclusively",
    "convert": "writes into the directory that new_directory creates with a random name",
    "host/runtime.py": "writes into /sys",
    "jobs/supervise.py": "writes into a directory of tempfile",
    "start/environment.py": "opens /dev/null",
    "text/written_files.py": "has the openers",
}


def _writes(call: ast.Call) -> bool:
    """Return True for a call that opens a file for writing without an opener, or makes a folder that may exist."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    words = {word.arg: word.value for word in call.keywords}
    if name in ("write_bytes", "savetxt", "tofile", "makedirs"):
        return True
    if name == "write_text":
        return isinstance(call.func, ast.Attribute) and len(call.args) == 1
    if name == "mkdir":
        return "exist_ok" in words
    modes = [
        value.value
        for value in (*call.args, words.get("mode"))
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    ]
    is_written = any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes)
    return name == "open" and is_written and "opener" not in words


def test_every_file_is_written_by_an_opener():
    package = Path(fugaku_megatron.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _writes(node):
                found.add(path.relative_to(package).as_posix())
    rest = {name for name in found if not name.startswith(tuple(WITHOUT_OPENER))}
    assert not rest, "pass opener=new_file, no_link or named_file of text/written_files.py"
