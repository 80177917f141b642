"""Heartbeats: other processes read a rank's phase, and no file is left."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from itertools import repeat

import pytest

from fugaku_megatron.observe.hang import heartbeat
from fugaku_megatron.observe.hang.heartbeat import (
    Heartbeat,
    Node,
    decode,
    lives,
    node_folder,
    remove_dead,
)
from fugaku_megatron.report.record import private_words

pytestmark = pytest.mark.system


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "MEMORY", str(tmp_path))
    for name in (*heartbeat.JOBS, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_others_read_what_a_rank_does(memory):
    heart = Heartbeat(node_folder(), 7)
    heart.introduce(7, 20.0)
    node = Node(heart.folder)
    with heart.iteration(12):
        before = heart.enter("forward of micro-batch 3")
        (beat,) = node.read()
        assert (beat.rank, beat.process, beat.limit) == (7, os.getpid(), 20.0)
        assert beat.what == "forward of micro-batch 3, iteration 12"
        assert beat.training and not beat.waits
        heart.wait(True)
        (later,) = node.read()
        assert later.waits and later.moved >= beat.moved and later.number == beat.number + 1
        heart.wait(False)
        heart.enter(before)
        assert node.read()[0].what == "iteration 12"
    with heart.phase("save of iteration 12"):
        assert (node.read()[0].what, node.read()[0].training) == ("save of iteration 12", False)
    assert node.read()[0].what == "start"
    heart.close()
    assert node.read() == [] and not list(memory.iterdir())


def test_what_a_heartbeat_says_is_cut_to_its_place():
    heart = Heartbeat()
    heart.enter("".join(repeat("é", heartbeat.TEXT)))
    assert decode(heart._memory).what == "é" * (heartbeat.TEXT // 2)
    assert decode(bytes(heartbeat.PAGE)) is None


def test_ranks_meet_in_one_folder(memory):
    heart = Heartbeat(node_folder(), 3)
    folder = memory / "other"
    folder.mkdir(mode=0o700)
    old = heart.folder
    heart.move(folder)
    heart.enter("save")
    assert [beat.what for beat in Node(folder).read()] == ["save"] and not old.exists()


def test_a_start_has_a_folder_of_its_own(memory, monkeypatch):
    by_parent = node_folder()
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-node-7@1")
    first = node_folder()
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-node-7@2")
    assert len({by_parent, first, node_folder()}) == 3 and first.parent == memory


def test_a_user_number_without_an_entry_in_passwd_is_enough(memory, monkeypatch):
    """Run as in containers started with docker --user 12345."""

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    heart = Heartbeat(node_folder(), 0)
    assert heart.folder.parent == memory
    heart.close()
    assert os.getcwd() in private_words()


@pytest.fixture
def precious(tmp_path_factory):
    """Make a read-only file in a read-only folder."""
    file = tmp_path_factory.mktemp("others") / str(os.getpid())
    file.write_text("precious")
    yield file
    assert file.read_text() == "precious"


def test_a_link_in_the_place_of_the_folder_is_not_followed(memory, precious):
    taken = node_folder()
    taken.rmdir()
    taken.symlink_to(precious.parent)
    heart = Heartbeat(node_folder(), 0)
    assert heart.folder not in (taken, precious.parent) and heart.folder.parent == memory
    assert stat.S_IMODE(heart.folder.stat().st_mode) == 0o700
    heart.move(taken)
    assert heart.folder != taken, "nor is a rank's file moved through it"
    heart.close()
    remove_dead()
    assert taken.is_symlink()


def test_a_folder_that_others_may_enter_is_not_used(memory, precious):
    taken = node_folder()
    (taken / str(os.getpid())).symlink_to(precious)
    taken.chmod(0o755)
    heart = Heartbeat(node_folder(), 0)
    assert heart.folder != taken
    heart.close()
    remove_dead()
    assert [*taken.iterdir()], "it is not emptied either"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")
def test_a_folder_of_another_user_is_not_used(memory):
    taken = node_folder()
    os.chown(taken, 65534, 65534)
    heart = Heartbeat(node_folder(), 0)
    assert heart.folder != taken and heart.folder.stat().st_uid == os.geteuid()
    heart.close()


def test_a_file_is_not_opened_through_a_link(memory, precious):
    """Leave a heartbeat with the same number in a private folder; its link's target is not written."""
    folder = node_folder()
    (folder / str(os.getpid())).symlink_to(precious)
    heart = Heartbeat(folder, 0)
    assert not heart.file.is_symlink()
    heart.close()


def test_folders_of_killed_jobs_are_removed(memory):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = memory / f"{heartbeat.prefix().rsplit('/', 1)[1]}0123"
    left.mkdir(mode=0o700)
    (left / str(dead.pid)).touch()
    heart = Heartbeat(node_folder(), 0)
    remove_dead()
    assert not left.exists() and heart.file.exists() and lives(os.getpid()) and not lives(dead.pid)
    heart.close()
