"""Collectives: size one is free, volume and latency of a ring, sharing of a node's ports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_megatron.config import features
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.perf import machine
from fugaku_megatron.perf.cost import Network
from fugaku_megatron.perf.software import Parameters


def network(layout: Layout, ranks_per_node: int = 1, name: str = "a64fx", **values: float) -> Network:
    return Network(machine=machine.load(name), parameters=Parameters(**values), layout=layout, ranks_per_node=ranks_per_node)


def test_a_group_of_one_is_free():
    assert network(Layout(8, 1, 1, 8)).seconds("all_reduce", "tp", 1 << 20) == 0.0


def test_a_large_all_reduce_is_two_passes_of_a_ring():
    net = network(Layout(4, 4, 1, 1), reduce_gbs=2.0)
    assert net.seconds("all_reduce", "tp", 10**9) == pytest.approx(2 * 3 / 4 / 2.0, rel=1e-3)
    assert net.seconds("reduce_scatter", "tp", 10**9) == pytest.approx(3 / 4 / 2.0, rel=1e-3)


def test_gathering_a_shard_moves_as_much_as_scattering_the_whole():
    net = network(Layout(8, 1, 1, 8), reduce_gbs=1.0)
    assert net.seconds("all_gather", "dp", 1 << 20) == pytest.approx(net.seconds("reduce_scatter", "dp", 8 << 20))


def test_latency_grows_with_the_logarithm():
    few, many = (network(Layout(n, 1, 1, n), reduce_gbs=1.0).seconds("all_reduce", "dp", 4) for n in (1024, 2048))
    assert many / few == pytest.approx(11 / 10, rel=1e-3)


def test_an_unfitted_rate_is_the_machines_own():
    own = machine.load("a64fx").large_allreduce_gbs
    assert network(Layout(512, 1, 1, 512)).seconds("all_reduce", "dp", 10**9) == pytest.approx(1 / own, rel=0.01)


def test_tensor_parallel_ranks_of_a_node_do_not_use_its_ports():
    seconds = [network(Layout(4, 4, 1, 1), ranks_per_node=4, reduce_gbs=rate).seconds("all_reduce", "tp", 10**8) for rate in (1, 6)]
    assert seconds[0] == seconds[1]


def test_a_ring_over_several_ranks_of_a_node_is_as_slow_as_its_slowest_link():
    flat = network(Layout(16, 1, 1, 16), ranks_per_node=4, reduce_gbs=2.0, intra_reduce_gbs=0.5)
    assert flat.seconds("all_reduce", "dp", 10**9) == pytest.approx(2 * 15 / 16 / 0.5, rel=1e-3)
    shared = replace(flat, active=frozenset({features.NODE_SUMS}))  # a group over several nodes does not use it
    assert shared.seconds("all_reduce", "dp", 10**9) == flat.seconds("all_reduce", "dp", 10**9)
    inside_first = replace(flat, active=frozenset({features.TWO_LEVEL_SUMS}))
    assert inside_first.seconds("all_reduce", "dp", 10**9) == pytest.approx(2 * 3 / 4 / 0.5 + 2 * 3 / 4 / 4 / 2, rel=1e-2)


def test_nodes_with_different_numbers_of_ranks_are_not_two_levels():
    uneven = network(Layout(6, 6, 1, 1), ranks_per_node=4, reduce_gbs=2.0)
    active = replace(uneven, active=frozenset({features.TWO_LEVEL_SUMS, features.NODE_SUMS}))
    assert active.seconds("all_reduce", "tp", 10**9) == uneven.seconds("all_reduce", "tp", 10**9)
    even = replace(active, layout=Layout(8, 8, 1, 1))
    assert even.seconds("all_reduce", "tp", 10**9) < uneven.seconds("all_reduce", "tp", 10**9) / 2


def test_shared_memory_takes_the_place_of_mpis_sums_inside_a_node():
    by_mpi = network(Layout(4, 4, 1, 1), ranks_per_node=4)
    shared = replace(by_mpi, active=frozenset({features.NODE_SUMS}))
    ratio = by_mpi.seconds("all_reduce", "tp", 10**9) / shared.seconds("all_reduce", "tp", 10**9)
    assert ratio == pytest.approx(by_mpi.machine.intra_gbs / by_mpi.machine.intra_reduce_gbs, rel=1e-2)


def test_bf16_gradients_of_many_ranks_a_node_are_bound_by_the_all_to_all():
    ring = network(Layout(256, 1, 1, 256), ranks_per_node=4, reduce_gbs=1.2, intra_reduce_gbs=5.0)
    bf16 = replace(ring, active=frozenset({features.GRAD_REDUCE_IN_BF16}))
    assert bf16.seconds("reduce_scatter", "dp", 10**9) == pytest.approx(3 * ring.seconds("reduce_scatter", "dp", 10**9), rel=1e-2)


def test_ranks_of_a_node_share_its_ports():
    alone = network(Layout(16, 8, 2, 1), ranks_per_node=1, name="a100").seconds("send", "pp", 10**9)
    shared = network(Layout(16, 8, 2, 1), ranks_per_node=8, name="a100").seconds("send", "pp", 10**9)
    assert shared == pytest.approx(2 * alone, rel=0.01)
