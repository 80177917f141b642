"""All ranks fail or none."""

import errno

import pytest

from fugaku_megatron.comm import launch
from fugaku_megatron.comm.agreement import agree, describe, on_root
from fugaku_megatron.comm.launcher import ExitCode
from fugaku_megatron.comm.solo import SoloComm
from tests.recording import RecordingComm
from tests.threads import ThreadWorld


def test_every_rank_keeps_its_own_result():
    assert ThreadWorld(3).run(lambda comm: agree(comm, lambda: comm.rank * 10)) == [0, 10, 20]


def test_success_gathers_nothing():
    comm = RecordingComm(SoloComm(5, 98_304))
    assert agree(comm, lambda: "own") == "own" and comm.records == [("all_reduce", 8)]


def test_every_rank_raises_the_first_failing_ranks_message():
    def rank(comm):
        def work():
            if comm.rank in (1, 3):
                raise OSError(28, "No space left on device", f"file_{comm.rank}")

        with pytest.raises(ValueError) as caught:
            agree(comm, work, "saving: ", lambda: " [hint]")
        assert caught.value.everywhere  # run_or_abort then lets rank 0 alone report it
        cause = type(caught.value.__cause__)
        return str(caught.value), cause

    outcomes = ThreadWorld(4).run(rank)
    assert {text for text, _ in outcomes} == {"saving: rank 1: file_1: No space left on device [hint]"}
    assert [cause for _, cause in outcomes] == [type(None), OSError, type(None), OSError]


@pytest.mark.parametrize("number, passes", [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOSPC, False)])
def test_a_file_system_that_fails_is_told_from_a_mistake_on_every_rank(number, passes):
    def write(comm):
        if comm.rank == 1:
            try:
                raise OSError(number, "failed", "a file")
            except OSError as error:
                raise ValueError("a file: failed") from error  # as whoever writes a checkpoint does

    def rank(comm):
        with pytest.raises(ValueError) as caught:
            agree(comm, lambda: write(comm))
        return launch._report(caught.value)[0]

    assert ThreadWorld(3).run(rank) == [ExitCode.STORAGE if passes else ExitCode.USER_ERROR] * 3


def test_only_rank_0_works_and_all_have_its_result():
    worked = []

    def rank(comm):
        return on_root(comm, lambda: worked.append(comm.rank) or "manifest")

    assert ThreadWorld(3).run(rank) == ["manifest"] * 3
    assert worked == [0]


def test_an_error_of_rank_0_reaches_all():
    def rank(comm):
        with pytest.raises(ValueError, match="^KeyError: 'size'$"):
            on_root(comm, lambda: {}["size"])
        return True

    assert ThreadWorld(3).run(rank) == [True] * 3


@pytest.mark.parametrize("error", [ValueError(), AssertionError(), OSError(), RuntimeError("x")])
def test_a_description_is_never_empty(error):
    assert describe(error)
