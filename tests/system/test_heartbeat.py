"""A heartbeat says to other processes what a rank does, and leaves no file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fugaku_megatron.watchdog import heartbeat
from fugaku_megatron.watchdog.heartbeat import (
    Heartbeat,
    Node,
    decode,
    lives,
    node_folder,
    remove_dead,
)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "MEMORY", str(tmp_path))
    for name in (*heartbeat.JOBS, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_others_read_what_a_rank_does(memory):
    heart = Heartbeat(node_folder(), 7, 20.0)
    node = Node(heart.folder)
    with heart.iteration(12):
        before = heart.enter("forward of micro-batch 3")
        (beat,) = node.read()
        assert (beat.rank, beat.process, beat.limit, beat.what) == (
            7,
            os.getpid(),
            20.0,
            "forward of micro-batch 3, iteration 12",
        )
        assert beat.training and not beat.waits
        heart.wait(True)
        (later,) = node.read()
        assert later.waits and later.moved >= beat.moved and later.number == beat.number + 1
        heart.wait(False)
        heart.leave(before)
        assert node.read()[0].what == "iteration 12"
    with heart.phase("save of iteration 12"):
        assert (node.read()[0].what, node.read()[0].training) == ("save of iteration 12", False)
    assert node.read()[0].what == "start"
    heart.close()
    assert node.read() == [] and not list(memory.iterdir())


def test_what_a_heartbeat_says_is_cut_to_its_place():
    heart = Heartbeat()
    heart.enter("é" * heartbeat.TEXT)
    assert heart.beat().what == "é" * (heartbeat.TEXT // 2)
    assert decode(bytes(heartbeat.PAGE)) is None


def test_ranks_meet_in_one_folder(memory):
    heart, folder = Heartbeat(node_folder(), 3), memory / "other"
    folder.mkdir()
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


def test_folders_of_killed_jobs_are_removed(memory):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = memory / f"{heartbeat.prefix().rsplit('/', 1)[1]}0123"
    left.mkdir()
    (left / str(dead.pid)).touch()
    heart = Heartbeat(node_folder(), 0)
    remove_dead()
    assert not left.exists() and heart.file.exists() and lives(os.getpid()) and not lives(dead.pid)
    heart.close()
