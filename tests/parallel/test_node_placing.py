"""The watchdogs of made-up nodes learn their ranks, their folder and where the node above listens."""

from __future__ import annotations

from fugaku_megatron.comm.agreement import find_nodes
from fugaku_megatron.training.placing import place
from fugaku_megatron.watchdog.heartbeat import Heartbeat
from fugaku_megatron.watchdog.watch import HangSettings, Watchdog
from tests.threads import ThreadWorld


def test_ranks_learn_their_node_and_the_one_above(tmp_path):
    def placed(world):
        watchdog = Watchdog(Heartbeat(tmp_path / f"alone{world.rank}"), HangSettings(1000.0, tmp_path, None))
        place(watchdog, world, find_nodes(world, f"node{world.rank // 3}"))
        beat, own = watchdog.heart.beat(), watchdog.link._socket.getsockname()
        world.barrier()
        watchdog.close()
        return beat.rank, watchdog.local, watchdog.link.number, watchdog.link.parents, own, watchdog.link.token

    ranks = ThreadWorld(7).run(placed)
    assert [rank for rank, *_ in ranks] == list(range(7))
    assert [local for _, local, *_ in ranks] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3 + [(6,)]
    listening = [own for *_, own, _ in ranks[:2]]
    assert [(number, parents) for _, _, number, parents, *_ in ranks] == [(0, [])] * 3 + [(1, listening)] * 3 + [(2, listening)]
    assert len({token for *_, token in ranks}) == 1


def test_one_node_needs_no_socket(tmp_path):
    def placed(world):
        watchdog = Watchdog(Heartbeat(tmp_path / "all"), HangSettings(1000.0, tmp_path, None))
        place(watchdog, world, find_nodes(world))
        world.barrier()
        watchdog.close()
        return watchdog.link

    assert ThreadWorld(2).run(placed) == [None, None]
