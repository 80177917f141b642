"""The lock of a --save: refused to a second job, taken over from a dead one."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from fugaku_megatron.checkpoint import lock
from fugaku_megatron.checkpoint.lock import LOCK, Lock, Owner, hold
from fugaku_megatron.comm.base import SoloComm
from tests.threads import ThreadWorld
from tests.time_limit import time_limit

HOLDER = """
import sys, time
from pathlib import Path
from fugaku_megatron.checkpoint.lock import Lock
Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def elsewhere(tmp_path):
    """Writes a lock as a job on another node would leave it; returns its file."""
    def write(**changes):
        owner = replace(Owner.from_this_process(), host="node7", kernel="another", process=77, token="theirs", **changes)
        (tmp_path / LOCK).write_text(json.dumps(asdict(owner)))
        return tmp_path / LOCK
    return write


def _quick(directory):
    return Lock(directory, beat=0.05, patience=0.3)


def test_a_second_job_is_refused_with_host_process_and_time_until_the_first_ends(tmp_path):
    first = Lock(tmp_path / "new")
    with pytest.raises(ValueError) as raised:
        Lock(tmp_path / "new")
    owner = first.owner
    assert str(raised.value) == (f"--save {tmp_path}/new is in use by another job: process {os.getpid()} on {owner.host} since "
                                 f"{owner.since}: wait for its end, or pass another --save")
    first.release()
    Lock(tmp_path / "new").release()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.system
def test_a_killed_job_on_this_host_leaves_no_obstacle(tmp_path):
    job = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"in use by another job: process {job.pid} on"):
        Lock(tmp_path)
    job.kill()
    job.wait()
    begin = time.monotonic()
    Lock(tmp_path).release()
    assert time.monotonic() - begin < 5 and not (tmp_path / LOCK).exists()


def test_who_waits_for_another_jobs_sign_of_life_says_so_and_gives_signs_of_its_own(tmp_path, elsewhere, capsys):
    elsewhere()
    signs = []
    Lock(tmp_path, beat=0.05, patience=0.1, alive=lambda: signs.append(time.monotonic())).release()
    assert len(signs) >= 5
    assert capsys.readouterr().out.startswith(f"note: --save {tmp_path} has the lock of another job (process 77 on node7 since ")


def test_a_job_on_another_node_is_refused_to_while_it_renews_its_time_stamp(tmp_path, elsewhere):
    path, stop = elsewhere(), threading.Event()

    def renew():
        while not stop.wait(0.05):
            os.utime(path)

    beating = threading.Thread(target=renew)
    beating.start()
    with pytest.raises(ValueError, match="process 77 on node7 since"):
        _quick(tmp_path)
    stop.set()
    beating.join()
    taken = _quick(tmp_path)
    assert json.loads(path.read_text())["token"] == taken.owner.token
    taken.release()


IMPOSSIBLE = json.dumps({"host": "node7", "kernel": "another", "process": "77", "created": 0.0, "since": "", "token": ""})


@pytest.mark.parametrize("text", [b"", b"[1]", b"\xff\x00", b"[" * 100_000, IMPOSSIBLE.encode()])
def test_a_file_that_tells_nothing_and_is_not_renewed_is_replaced_after_a_beat_and_a_half(tmp_path, text, capsys):
    (tmp_path / LOCK).write_bytes(text)
    with time_limit():
        Lock(tmp_path, beat=0.1, patience=100.0).release()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == (f"note: --save {tmp_path} has a .lock that is empty or damaged: waiting up to 0.15 s for a "
                                       "sign of life, then it is replaced\n")


def test_a_file_that_tells_nothing_and_is_renewed_is_refused(tmp_path):
    held = Lock(tmp_path, beat=0.05)
    held.path.write_text("")
    with pytest.raises(ValueError, match="in use by another job: .lock does not say which"):
        Lock(tmp_path, beat=0.2)
    held.release()


def test_releasing_leaves_the_lock_of_a_job_that_took_over(tmp_path, elsewhere):
    held = Lock(tmp_path)
    path = elsewhere()
    held.release()
    assert json.loads(path.read_text())["token"] == "theirs"


def test_of_many_that_start_at_once_or_take_over_one_wins(tmp_path):
    dead = replace(Owner.from_this_process(), created=0.0, token="dead")  # a later process has its number
    for text in (None, json.dumps(asdict(dead))):
        if text:
            (tmp_path / LOCK).write_text(text)
        start, won = threading.Barrier(8), []

        def take(start=start, won=won):
            start.wait()
            try:
                won.append(Lock(tmp_path))
            except ValueError as error:
                assert "in use by another job" in str(error)

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        won[0].release()
        assert list(tmp_path.iterdir()) == []


def test_without_hard_links_the_file_is_created_exclusively(tmp_path, monkeypatch):
    def refuse(*paths):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(lock.os, "link", refuse)
    held = Lock(tmp_path)
    with pytest.raises(ValueError, match="in use by another job"):
        Lock(tmp_path)
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_every_rank_is_refused_and_the_block_releases(tmp_path):
    def rank(comm):
        with hold(tmp_path, comm):
            comm.barrier()
            held = (tmp_path / LOCK).exists()
            comm.barrier()
            return held

    assert ThreadWorld(2).run(rank) == [True, True] and not (tmp_path / LOCK).exists()
    with hold(tmp_path, SoloComm()), pytest.raises(ValueError, match="in use by another job"):
        ThreadWorld(2).run(rank)
    with hold(None, SoloComm()):
        assert not (tmp_path / LOCK).exists()


def test_a_directory_that_takes_no_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--save .*/file/sub is not writable: "):
        Lock(tmp_path / "file" / "sub")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, make):
    make(tmp_path / LOCK)
    with time_limit(), pytest.raises(ValueError, match=f"--save {tmp_path}: .lock in it is not a regular file: remove it"):
        Lock(tmp_path)
