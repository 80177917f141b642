"""Collective errors, objects of rank 0, ranks of a node, and the watchdog's order."""

import errno

import pytest

from fugaku_megatron.comm import agreement, job
from fugaku_megatron.comm.agreement import agree, describe, find_nodes, on_root, scatter_object
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.observe.hang.heartbeat import Heartbeat, decode
from fugaku_megatron.observe.hang.watchdog import HangSettings, Watchdog
from fugaku_megatron.observe.observers import place
from fugaku_megatron.run.checks import check_same_run
from fugaku_megatron.start.exit_codes import ExitCode
from tests.helpers import one_error, small_run, train
from tests.recording import RecordingComm
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


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
    assert {text for text, _ in outcomes} == {
        "saving: rank 1: file_1: No space left on device [hint]"
    }
    assert [cause for _, cause in outcomes] == [type(None), OSError, type(None), OSError]


@pytest.mark.parametrize("number, passes", [(errno.EIO, True), (errno.ENOSPC, False)])
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
        return job._report(caught.value)[0]

    assert ThreadWorld(3).run(rank) == [ExitCode.STORAGE if passes else ExitCode.USER_ERROR] * 3


def test_only_rank_0_works_and_all_have_its_result():
    worked = []

    def rank(comm):
        return on_root(comm, lambda: worked.append(comm.rank) or "manifest")

    assert ThreadWorld(3).run(rank) == ["manifest"] * 3
    assert worked == [0]


def test_an_error_of_rank_0_reaches_all():
    assert one_error(3, lambda comm: on_root(comm, lambda: {}["size"])) == "KeyError: 'size'"


@pytest.mark.parametrize("error", [ValueError(), AssertionError(), OSError(), RuntimeError("x")])
def test_a_description_is_never_empty(error):
    assert describe(error)


@pytest.mark.parametrize("size", [1, 5])
def test_every_rank_gets_its_own_object(size):
    def rank(comm):
        return [
            scatter_object(comm, [f"{i} for {r}" for r in range(size)] if comm.rank == 0 else None)
            for i in range(3)
        ]

    assert ThreadWorld(size).run(rank) == [
        [f"{i} for {rank}" for i in range(3)] for rank in range(size)
    ]
    assert (
        scatter_object(SoloComm(3, 8), None) is None
        and scatter_object(SoloComm(0, 8), list("abcdefgh")) == "a"
    )


def found(names):
    def rank(world):
        nodes = find_nodes(world, names[world.rank])
        return nodes.ranks.all_gather_object(world.rank), nodes.number, nodes.count, nodes.leads

    return ThreadWorld(len(names)).run(rank)


def test_ranks_of_one_name_form_a_node_in_the_order_of_the_world():
    here = ([0, 2, 3], 0, 2)
    there = ([1, 4], 1, 2)
    assert found(["b", "a", "b", "b", "a"]) == [
        (*here, True),
        (*there, True),
        (*here, False),
        (*here, False),
        (*there, False),
    ]


def test_names_of_one_checksum_are_told_apart(monkeypatch):
    monkeypatch.setattr(agreement.zlib, "crc32", lambda name: 7)
    assert [ranks for ranks, *_ in found(["b", "a", "b"])] == [[0, 2], [1], [0, 2]]


def test_ranks_learn_their_node_and_the_one_above(tmp_path):
    def placed(world):
        watchdog = Watchdog(
            Heartbeat(tmp_path / f"alone{world.rank}"), HangSettings(1000.0, tmp_path, None)
        )
        place(watchdog, world, find_nodes(world, f"node{world.rank // 3}"))
        beat = decode(watchdog.heart._memory)
        own = watchdog.link._socket.getsockname()
        world.barrier()
        watchdog.close()
        return (
            beat.rank,
            watchdog.local,
            watchdog.link.number,
            watchdog.link.parents,
            own,
            watchdog.link.token,
        )

    ranks = ThreadWorld(7).run(placed)
    assert [rank for rank, *_ in ranks] == list(range(7))
    assert [local for _, local, *_ in ranks] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3 + [(6,)]
    listening = [own for *_, own, _ in ranks[:2]]
    assert [(number, parents) for _, _, number, parents, *_ in ranks] == [(0, [])] * 3 + [
        (1, listening)
    ] * 3 + [(2, listening)]
    assert len({token for *_, token in ranks}) == 1


def test_one_node_needs_no_socket(tmp_path):
    def placed(world):
        watchdog = Watchdog(Heartbeat(tmp_path / "all"), HangSettings(1000.0, tmp_path, None))
        place(watchdog, world, find_nodes(world))
        world.barrier()
        watchdog.close()
        return watchdog.link

    assert ThreadWorld(2).run(placed) == [None, None]


# The same command line ---------------------------------------------------------------------------------------------------------

FULL = {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_model_parallel_size": 4},
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    ],
)
def test_stages_that_recompute_differently_train_as_without(layout):
    plain = small_run(**layout)

    def work(comm, second):
        run = small_run(**layout, **(second if comm.rank >= 2 else {}))
        assert len(check_same_run(run, comm)) == bool(second)
        return [(r.loss, r.grad_norm) for r in train(comm, run, 3)]

    assert plain.training.recompute_granularity is None
    assert ThreadWorld(4).run(work, FULL)[0] == ThreadWorld(4).run(work, {})[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lr": 2e-3},
            "--lr is 0.001 on 3 ranks (0, 1, 3), 0.002 on rank 2: pass every rank the same command line, apart from",
        ),
        ({"lr": 2e-3, **FULL}, "--lr is 0.001 on 3 ranks (0, 1, 3), 0.002 on rank 2: pass"),
        ({"window_size": "3,0"}, "--window-size is None on 3 ranks (0, 1, 3), 3,0 on rank 2: pass"),
        (
            FULL,
            "--recompute-granularity is full on rank 0, None on rank 1 of the tensor-parallel group that begins with rank 2: pass",
        ),
        ({"save_local": "/node2", "thread_affinity": "none", "log_file": "l2"}, None),
        ({}, None),
    ],
)
def test_other_differences_end_the_job_in_one_line_on_every_rank(changes, message):
    def work(comm):
        run = small_run(tensor_model_parallel_size=2, **(changes if comm.rank == 2 else {}))
        try:
            return check_same_run(run, comm)
        except ValueError as error:
            assert error.everywhere and "\n" not in str(error)
            return str(error)

    found = ThreadWorld(4).run(work)
    assert found == [found[0]] * 4
    assert found[0] == [] if message is None else found[0].startswith(message)


def test_agreement_is_one_small_reduction():
    comm = RecordingComm(SoloComm(5, 98_304))
    assert check_same_run(small_run(), comm) == [] and comm.records == [("all_reduce", 16)] * 2
