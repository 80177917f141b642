"""The lock of a --save: refused to a second job, taken over from a dead one, checked by one that stood still."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fugaku_megatron.checkpoint import lock
from fugaku_megatron.checkpoint.lock import LOCK, Lock, Owner, hold
from fugaku_megatron.checkpoint.manifest import TRACKER, Description, Folders, read_manifest
from fugaku_megatron.checkpoint.save import run_steps, save_steps, write_shards
from fugaku_megatron.checkpoint.shards import Shard
from fugaku_megatron.comm.base import SoloComm
from tests.helpers import one_error, save_checkpoint
from tests.threads import ThreadWorld
from tests.time_limit import time_limit

pytestmark = pytest.mark.parallel

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
        owner = replace(
            Owner.from_this_process(),
            host="node7",
            kernel="another",
            process=77,
            token="theirs",
            **changes,
        )
        (tmp_path / LOCK).write_text(json.dumps(asdict(owner)))
        return tmp_path / LOCK

    return write


def leave_dead(folder):
    """Write the lock of a job on this host that has ended: a later process has its number."""
    dead = replace(Owner.from_this_process(), created=0.0, token="dead")
    (folder / LOCK).write_text(json.dumps(asdict(dead)))


@pytest.fixture
def clock(monkeypatch):
    """The locks' clock. Time passes only while a lock sleeps."""
    clock = SimpleNamespace(
        now=0.0, monotonic=lambda: clock.now, time=time.time, strftime=time.strftime
    )
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(lock, "time", clock)
    return clock


def test_a_second_job_is_refused_with_host_process_and_time_until_the_first_ends(tmp_path):
    first = Lock(tmp_path / "new")
    with pytest.raises(ValueError) as raised:
        Lock(tmp_path / "new")
    owner = first.owner
    assert str(raised.value) == (
        f"--save {tmp_path}/new is in use by another job: process {os.getpid()} on {owner.host} since "
        f"{owner.since}: wait for its end, or pass another --save"
    )
    first.release()
    Lock(tmp_path / "new").release()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.system
def test_a_killed_job_on_this_host_leaves_no_obstacle(tmp_path):
    job = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert job.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"in use by another job: process {job.pid} on"):
        Lock(tmp_path)
    job.kill()
    job.wait()
    Lock(tmp_path, alive=lambda: pytest.fail("it waits for a sign of life")).release()
    assert not (tmp_path / LOCK).exists()


def test_who_waits_for_another_jobs_sign_of_life_says_so_and_gives_signs_of_its_own(
    tmp_path, elsewhere, clock, capsys
):
    elsewhere()
    signs = []
    Lock(tmp_path, beat=5.0, patience=10.0, alive=lambda: signs.append(clock.now)).release()
    assert signs == [0.5 * count for count in range(1, 21)]
    assert capsys.readouterr().out.startswith(
        f"note: --save {tmp_path} has the lock of another job (process 77 on node7 since "
    )


def test_a_job_on_another_node_is_refused_to_while_it_renews_its_time_stamp(
    tmp_path, elsewhere, clock
):
    path = elsewhere()

    def renew():
        if clock.now >= lock.BEAT:
            os.utime(path, (clock.now, clock.now))

    with pytest.raises(ValueError, match="process 77 on node7 since"):
        Lock(tmp_path, alive=renew)
    assert clock.now == lock.BEAT
    taken = Lock(tmp_path)
    assert clock.now == lock.BEAT + lock.PATIENCE
    assert json.loads(path.read_text())["token"] == taken.owner.token
    taken.release()


def test_who_was_suspended_looks_once_more_before_it_takes_over(tmp_path, elsewhere, clock):
    path = elsewhere()

    def suspended():
        os.utime(path, (1e9, 1e9))
        return 1e9

    clock.monotonic = lambda: setattr(clock, "monotonic", suspended) or 0.0
    with pytest.raises(ValueError, match="process 77 on node7 since"):
        Lock(tmp_path)


IMPOSSIBLE = (
    b'{"host": "node7", "kernel": "a", "process": "77", "created": 0.0, "since": "", "token": ""}'
)


@pytest.mark.parametrize("text", [b"", b"[1]", b"\xff\x00", b"[" * 100_000, IMPOSSIBLE])
def test_a_file_that_tells_nothing_and_is_not_renewed_is_replaced_after_a_beat_and_a_half(
    tmp_path, text, clock, capsys
):
    (tmp_path / LOCK).write_bytes(text)
    Lock(tmp_path).release()
    assert list(tmp_path.iterdir()) == [] and clock.now == 15.0
    assert capsys.readouterr().out == (
        f"note: --save {tmp_path} has a .lock that is empty or damaged: waiting up to 15 s for a "
        "sign of life, then it is replaced\n"
    )


def test_a_file_that_tells_nothing_and_is_renewed_is_refused(tmp_path, clock):
    held = Lock(tmp_path, beat=0.05)
    held.path.write_text("")

    def next_sign():
        before = held.path.stat().st_mtime_ns
        while held.path.stat().st_mtime_ns == before:
            time.sleep(0.01)

    with (
        time_limit(),
        pytest.raises(ValueError, match="in use by another job: .lock does not say which"),
    ):
        Lock(tmp_path, beat=0.2, alive=next_sign)
    held.release()


def test_releasing_leaves_the_lock_of_a_job_that_took_over(tmp_path, elsewhere):
    held = Lock(tmp_path)
    path = elsewhere()
    held.release()
    assert json.loads(path.read_text())["token"] == "theirs"


def test_a_job_whose_lock_was_taken_over_is_told_so(tmp_path, elsewhere):
    held = Lock(tmp_path)
    held.check()
    elsewhere()
    with pytest.raises(ValueError) as raised:
        held.check()
    assert str(raised.value).startswith(
        f"--save {tmp_path}: this job stood still, and its lock was taken over by another job (process 77 on node7 since "
    )
    held.release()
    held.check()


def test_a_job_that_renews_its_lock_ends_when_it_has_lost_it(tmp_path, elsewhere, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: raised.append(failed.exc_value))
    held = Lock(tmp_path, beat=0.02)
    path = elsewhere()
    os.utime(path, (1e9, 1e9))
    with time_limit():
        while not raised:
            time.sleep(0.01)
    assert "its lock was taken over by another job" in str(raised[0])
    assert path.stat().st_mtime == 1e9, "not renewed"
    held.release()


def test_a_renewal_follows_no_link(tmp_path):
    """A link planted at the lock's name keeps the time stamp of its target."""
    target = tmp_path / "target"
    held = Lock(tmp_path, beat=0.02)
    target.write_bytes((tmp_path / LOCK).read_bytes())
    os.utime(target, (1, 1))
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).symlink_to(target)
    time.sleep(0.2)
    assert target.stat().st_mtime == 1
    held.release()


def test_a_missing_lock_is_created_again_unless_the_job_stood_still(tmp_path, clock):
    held = Lock(tmp_path)
    clock.now += lock.PATIENCE - 1
    held.path.unlink()
    held.check()
    assert json.loads(held.path.read_text())["token"] == held.owner.token
    held.path.unlink()
    clock.now += lock.PATIENCE
    with pytest.raises(ValueError, match="taken over by another job \\(a job that has ended\\)"):
        held.check()
    assert not held.path.exists()
    held.release()


CHECKS = (0, 3, 5, 6)  # of the lock that pass: two checkpoints are there at the start
STEPS = ("before", "before its name", "before the tracker", "before old ones go")


@pytest.mark.parametrize("step", range(len(STEPS)), ids=STEPS)
def test_a_save_without_the_lock_changes_nothing(step, tmp_path):
    """The lock is lost between two steps of a save, and the other job has begun a save of the same iteration."""
    for iteration in (10, 20):
        save_checkpoint(tmp_path, shards(), SoloComm(), description(iteration))
    theirs = tmp_path / "0123abcd.iter_0000030.tmp"
    checks = []

    def check_lock():
        checks.append(len(checks))
        if len(checks) > CHECKS[step]:
            raise ValueError("lost")

    def rank(comm):
        folders = Folders(comm)
        write = partial(write_shards, comm.rank, shards() if comm.rank else [])
        check = check_lock if comm.rank == 0 else bool
        steps = save_steps(tmp_path, write, description(30), folders, check)
        work = next(steps)
        try:
            while True:
                comm.barrier()
                theirs.mkdir(exist_ok=True)
                comm.barrier()
                work = steps.send(work)
        except StopIteration:
            pass

    error = one_error(2, rank)
    assert error.endswith("lost") and theirs.is_dir() == (step > 0)
    names = {path.name for path in tmp_path.iterdir() if path.name.startswith("iter_")}
    published = {"iter_0000030"} if step > 1 else set()
    assert names == {"iter_0000010", "iter_0000020"} | published
    assert (tmp_path / TRACKER).read_text() == ("30\n" if step > 2 else "20\n")
    assert [path.name for path in tmp_path.glob("*iter_*.tmp")] == ([theirs.name] if step else [])


def test_a_save_of_an_iteration_that_another_job_has_saved_by_now_leaves_it(tmp_path):
    """The save stops between the check of its lock and its name, until the other job has saved."""
    write = partial(write_shards, 0, shards())
    checks = []

    def check_lock():
        checks.append(len(checks))
        if len(checks) > 2:
            raise ValueError("lost")
        if len(checks) == 2:
            save_checkpoint(tmp_path, shards(), SoloComm(), description(10))

    with pytest.raises(ValueError, match="lost"):
        run_steps(save_steps(tmp_path, write, description(10), Folders(SoloComm()), check_lock))
    assert [path.name for path in tmp_path.glob("*iter_*")] == ["iter_0000010"]
    read_manifest(tmp_path, 10)


def shards():
    return [Shard.whole("weights", torch.ones(4))]


def description(iteration):
    return Description(iteration, {}, {}, {}, keep=1 if iteration == 30 else None)


def test_of_many_that_start_at_once_or_take_over_one_wins(tmp_path):
    for dead in (False, True):
        if dead:
            leave_dead(tmp_path)
        start = threading.Barrier(8)
        won = []

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


@pytest.mark.parametrize("ahead", [0.0, 86400.0])
def test_the_guard_of_a_takeover_that_died_is_removed_after_a_note(tmp_path, ahead, clock, capsys):
    """Its time stamp may be of a clock that is ahead."""
    leave_dead(tmp_path)
    guard = tmp_path / f"{LOCK}.takeover"
    guard.touch()
    os.utime(guard, (time.time() + ahead,) * 2)
    Lock(tmp_path).release()
    assert list(tmp_path.iterdir()) == [] and 60 < clock.now < 63
    assert capsys.readouterr().out == (
        f"note: --save {tmp_path} has .lock.takeover of a job that takes its lock over: waiting up to 60 s, then it is removed\n"
    )


def test_a_guard_that_is_a_folder_is_named(tmp_path, clock):
    leave_dead(tmp_path)
    (tmp_path / f"{LOCK}.takeover").mkdir()
    with pytest.raises(ValueError, match=r"--save .* is not writable: .*\.lock\.takeover: "):
        Lock(tmp_path)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_signal_ends_the_wait_on_every_rank(tmp_path, elsewhere, clock, guarded, capsys):
    elsewhere()
    if guarded:
        leave_dead(tmp_path)
        (tmp_path / f"{LOCK}.takeover").touch()

    def rank(comm):
        with pytest.raises(SystemExit) as ended, hold(tmp_path, comm, lambda: clock.now > 3):
            pytest.fail("the lock is held")
        return ended.value.code

    assert ThreadWorld(2).run(rank) == [0, 0] and clock.now < 6
    assert "leaving before the first iteration: a signal asked to stop" in capsys.readouterr().out


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
    with (
        time_limit(),
        pytest.raises(
            ValueError, match=f"--save {tmp_path}: .lock in it is not a regular file: remove it"
        ),
    ):
        Lock(tmp_path)
