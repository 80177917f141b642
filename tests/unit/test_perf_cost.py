"""The roofline: GEMM shapes, clocks, page faults and their threshold, tiles on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.perf import software
from fugaku_megatron.perf.cost import MMAP_BYTES, Network, Rank
from fugaku_megatron.perf.model import System
from fugaku_megatron.perf.software import Parameters
from fugaku_megatron.perf.work import Product, Work, phases


def rank(machine: str = "a64fx", software: str = "torch1.10", nodes: int = 1, ranks_per_node: int = 1, ghz: float | None = None,
         **values: float) -> Rank:
    system, parameters = System.from_names(machine, software, nodes, ranks_per_node, ghz), Parameters(**values)
    network = Network(machine=system.machine, parameters=parameters, layout=Layout(1, 1, 1, 1), ranks_per_node=ranks_per_node)
    return Rank(machine=system.machine, software=system.software, parameters=parameters, network=network, precision="fp32",
                nodes=nodes, ranks_per_node=ranks_per_node)


def test_a_large_product_nears_the_curve_and_a_small_one_does_not():
    def share(n: int) -> float:
        return 2 * n**3 / rank().seconds(Work(products=(Product(m=n, n=n, k=n),))).gemm / 6.144e12

    assert share(20000) == pytest.approx(0.92, rel=0.03)
    assert share(1050) == pytest.approx(0.46, rel=0.01)


def test_per_cmg_ranks_have_a_better_curve():
    product = Work(products=(Product(m=1024, n=3072, k=768),))
    assert rank(ranks_per_node=4).seconds(product).gemm < 4 * rank().seconds(product).gemm * 0.85


def test_thin_products_lose_by_their_operands_on_a_measured_curve():
    published = rank(software="fugaku_megatron")
    measured = replace(published, machine=replace(published.machine, native={"call_us": 5.0}))

    def seconds(on: Rank, m: int, n: int, k: int) -> float:
        return on.seconds(Work(products=(Product(m=m, n=n, k=k),))).gemm

    thin, square = (256, 4096, 4096), (1625.5, 1625.5, 1625.5)  # as many multiply-adds
    assert seconds(published, *thin) == pytest.approx(seconds(published, *square), rel=1e-3)
    assert seconds(measured, *thin) > 1.1 * seconds(measured, *square)
    assert seconds(measured, *square) == pytest.approx(seconds(published, *square))


def test_native_attention_is_half_a_square_and_forms_scores_again_in_the_backward():
    def seconds(s: int, backward: bool, **values: float) -> float:
        product = Product(m=64, n=s, k=s, count=12, attention=True, backward=backward)
        shares = {"attention_forward": 0.5, "attention_backward": 0.5, **values}
        return rank(software="fugaku_megatron", **shares).seconds(Work(products=(product,))).attention

    assert seconds(1024, False) == pytest.approx(0.5 * 2 * 12 * 64 * 1024**2 / 0.5 / 6.144e12)
    assert seconds(1024, True) == pytest.approx(1.25 * seconds(1024, False))
    assert seconds(1024, False, attention_forward_half=1024.0) == pytest.approx(2 * seconds(1024, False))


def test_dropout_costs_attention_what_the_cycle_model_says():
    """Shares of the peak on 2 and 5 products at d 64: 46 and 53 % with dropout 0.1 in a cycle model of an A64FX core."""
    def seconds(p: float, d: int, phase: str) -> float:
        run = make_run(None, {"num_layers": 1, "num_attention_heads": 12, "hidden_size": 12 * d, "seq_length": 1024,
                              "vocab_size": 512, "micro_batch_size": 1, "attention_dropout": p, "global_batch_size": 1})
        code = software.load("fugaku_megatron")
        only = Work(products=tuple(x for x in phases(run, 1, code)[phase].products if x.attention))
        return rank(software=code.name, **vars(code.fitted.values)).seconds(only).attention

    for phase, products, dropped, whole in (("layer_forward", 2, 0.46, 0.65), ("layer_backward", 5, 0.53, 0.62)):
        flops = products * 2 * 12 * 64 * 1024**2 / 2
        assert flops / seconds(0.1, 64, phase) / 6.144e12 == pytest.approx(dropped, abs=0.01)
        assert flops / seconds(0.0, 64, phase) / 6.144e12 == pytest.approx(whole)
        price = [seconds(0.1, d, phase) - seconds(0.0, d, phase) for d in (64, 128)]
        assert price[0] == pytest.approx(price[1])


@pytest.mark.parametrize("work, field", [(Work(moved=1e9), "elementwise"), (Work(calls=10), "calls"),
                                         (Work(products=(Product(m=512, n=512, k=512),)), "gemm")])
def test_the_clock_gains_its_ratio(work, field):
    slow, fast = (getattr(rank(ghz=ghz, call_us=5).seconds(work), field) for ghz in (2.0, 2.2))
    assert slow / fast == pytest.approx(1.10)


def test_sixteen_bits_gain_only_where_they_are_multiplied_as_such():
    product = Work(products=(Product(m=4096, n=4096, k=4096),))

    def gain(machine: str, software: str) -> float:
        fp32, fp16 = (replace(rank(machine, software, gemm_half=1.0), precision=p).seconds(product).gemm for p in ("fp32", "fp16"))
        return fp32 / fp16

    assert gain("a64fx", "fugaku_megatron") == gain("a64fx", "torch1.10") == 1.0
    assert gain("a100", "megatron-a100") == pytest.approx(16)


def test_only_large_blocks_fault_and_cost_more_where_the_network_registered_them():
    small, large = Work(allocations=((MMAP_BYTES, 5),)), Work(allocations=((10**8, 5),))
    values = {"fault_gbs": 10.0, "unmap_ms": 2.0}
    assert rank(**values).seconds(small).page_faults == 0.0
    assert rank(**values).seconds(large).page_faults == pytest.approx(0.05)
    assert rank(nodes=2, **values).seconds(large).page_faults == pytest.approx(0.05 + 0.01)
    assert rank(software="torch1.7", **values).seconds(large).page_faults == pytest.approx(0.06)
    assert rank(software="torch1.10+tcmalloc", nodes=2, **values).seconds(large).page_faults == 0.0


def test_tiles_waves_and_unaligned_sides_on_a_gpu():
    gpu = replace(rank("a100", "megatron-a100", ranks_per_node=8, gemm_half=1e-9, unaligned=0.1), precision="bf16")
    full = 108 * 256

    def share(m: int, n: int = 128, k: int = 1024) -> float:
        return 2 * m * n * k / gpu.seconds(Work(products=(Product(m=m, n=n, k=k),))).gemm / 312e12

    assert share(full) == pytest.approx(1.0)
    assert share(full + 1) < 0.51 * 0.1 * 1.01  # a second wave for one row, on the slow path
    assert share(full, k=1020) == pytest.approx(0.1)


def test_ranks_of_one_cmg_each_use_all_of_the_memory_and_one_rank_of_a_node_does_not():
    work = Work(moved=1e9)
    spread, alone = rank(ranks_per_node=4).seconds(work).elementwise, rank().seconds(work).elementwise
    assert spread == pytest.approx(alone) == pytest.approx(rank(ranks_per_node=2).seconds(work).elementwise)
    ours = [rank(software="fugaku_megatron", ranks_per_node=n).seconds(work).elementwise for n in (1, 4)]
    assert ours[1] == pytest.approx(4 * ours[0])  # our kernels touch their pages first where they use them
