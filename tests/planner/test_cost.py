"""Costs of a rank's work, messages and memory: the roofline, counts of FLOPs, collectives, bytes."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.config import features
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.config.run_config import ParallelConfig, RunConfig
from fugaku_megatron.config.training import TrainingConfig
from fugaku_megatron.costs.flops import hardware_flops, model_flops
from fugaku_megatron.costs.layers import layer_records
from fugaku_megatron.costs.records import Collective
from fugaku_megatron.costs.sizes import vocabulary_rows
from fugaku_megatron.costs.stages import stage_records
from fugaku_megatron.planner import machine, model, software, work
from fugaku_megatron.planner.cost import MMAP_BYTES, Network, Rank
from fugaku_megatron.planner.software import Parameters
from fugaku_megatron.planner.system import System
from fugaku_megatron.planner.work import ExpertExchange, Matmul, Work, phases
from tests.llama_models import DELTA_HEADS

pytestmark = pytest.mark.unit


def rank(
    machine: str = "a64fx",
    software: str = "torch1.10",
    nodes: int = 1,
    ranks_per_node: int = 1,
    ghz: float | None = None,
    **values: float,
) -> Rank:
    system = System.from_names(machine, software, nodes, ranks_per_node, ghz)
    parameters = Parameters(**values)
    network = Network(
        machine=system.machine,
        parameters=parameters,
        layout=Layout(1, 1, 1, 1),
        ranks_per_node=ranks_per_node,
    )
    return Rank(
        machine=system.machine,
        software=system.software,
        parameters=parameters,
        network=network,
        precision="fp32",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
    )


def gemm(m: float, n: float, k: float) -> Work:
    return Work(matmuls=(Matmul(m=m, n=n, k=k),))


def test_sizes_of_a_matmul_on_the_curve():
    """A large one nears the peak, a rank per CMG has a better curve, and a thin one loses on a measured curve."""
    for n, share in ((20000, 0.92), (1050, 0.46)):
        assert 2 * n**3 / rank().seconds(gemm(n, n, n)).gemm / 6.144e12 == pytest.approx(
            share, rel=0.03
        )
    layer = gemm(1024, 3072, 768)
    assert rank(ranks_per_node=4).seconds(layer).gemm < 4 * rank().seconds(layer).gemm * 0.85
    published = rank(software="fugaku_megatron")
    measured = replace(published, machine=replace(published.machine, native={"call_us": 5.0}))
    thin = gemm(256, 4096, 4096)
    square = gemm(1625.5, 1625.5, 1625.5)  # as many multiply-adds
    assert published.seconds(thin).gemm == pytest.approx(published.seconds(square).gemm, rel=1e-3)
    assert measured.seconds(thin).gemm > 1.1 * measured.seconds(square).gemm
    assert measured.seconds(square).gemm == pytest.approx(published.seconds(square).gemm)


def test_native_attention_is_half_a_square_and_forms_scores_again_in_the_backward():
    def seconds(s: int, backward: bool, **values: float) -> float:
        matmul = Matmul(m=64, n=s, k=s, count=12, attention=True, backward=backward)
        shares = {"attention_forward": 0.5, "attention_backward": 0.5, **values}
        return rank(software="fugaku_megatron", **shares).seconds(Work(matmuls=(matmul,))).attention

    assert seconds(1024, False) == pytest.approx(0.5 * 2 * 12 * 64 * 1024**2 / 0.5 / 6.144e12)
    assert seconds(1024, True) == pytest.approx(1.25 * seconds(1024, False))
    assert seconds(1024, False, attention_forward_half=1024.0) == pytest.approx(
        2 * seconds(1024, False)
    )


def test_dropout_costs_attention_what_the_cycle_model_says():
    """Shares of the peak on 2 and 5 matmuls at d 64: 46 and 53 % with dropout 0.1 in a cycle model of an A64FX core."""

    def seconds(p: float, d: int, phase: str) -> float:
        run = make_run(
            None,
            {
                "num_layers": 1,
                "num_attention_heads": 12,
                "hidden_size": 12 * d,
                "seq_length": 1024,
                "vocab_size": 512,
                "micro_batch_size": 1,
                "attention_dropout": p,
                "global_batch_size": 1,
            },
        )
        code = software.load("fugaku_megatron")
        only = Work(matmuls=tuple(x for x in phases(run, code)[phase].matmuls if x.attention))
        return rank(software=code.name, **vars(code.fitted.values)).seconds(only).attention

    for phase, matmuls, dropped, whole in (
        ("layer_forward", 2, 0.46, 0.65),
        ("layer_backward", 5, 0.53, 0.62),
    ):
        flops = matmuls * 2 * 12 * 64 * 1024**2 / 2
        assert flops / seconds(0.1, 64, phase) / 6.144e12 == pytest.approx(dropped, abs=0.01)
        assert flops / seconds(0.0, 64, phase) / 6.144e12 == pytest.approx(whole)
        price = [seconds(0.1, d, phase) - seconds(0.0, d, phase) for d in (64, 128)]
        assert price[0] == pytest.approx(price[1])


def test_only_large_blocks_fault_and_cost_more_where_the_network_registered_them():
    small = Work(allocations=((MMAP_BYTES, 5),))
    large = Work(allocations=((10**8, 5),))
    values = {"fault_gbs": 10.0, "unmap_ms": 2.0}
    assert rank(**values).seconds(small).page_faults == 0.0
    assert rank(**values).seconds(large).page_faults == pytest.approx(0.05)
    assert rank(nodes=2, **values).seconds(large).page_faults == pytest.approx(0.05 + 0.01)
    assert rank(software="torch1.7", **values).seconds(large).page_faults == pytest.approx(0.06)
    assert rank(software="torch1.10+tcmalloc", nodes=2, **values).seconds(large).page_faults == 0.0


def test_tiles_waves_and_unaligned_sides_on_a_gpu():
    gpu = replace(
        rank("a100", "megatron-a100", ranks_per_node=8, gemm_half=1e-9, unaligned=0.1),
        precision="bf16",
    )
    full = 108 * 256

    def share(m: int, n: int = 128, k: int = 1024) -> float:
        return 2 * m * n * k / gpu.seconds(gemm(m, n, k)).gemm / 312e12

    assert share(full) == pytest.approx(1.0)
    assert share(full + 1) < 0.51 * 0.1 * 1.01  # a second wave for one row, on the slow path
    assert share(full, k=1020) == pytest.approx(0.1)


def test_clock_and_sixteen_bits():
    for done, field in (
        (Work(moved=1e9), "elementwise"),
        (Work(calls=10), "calls"),
        (gemm(512, 512, 512), "gemm"),
    ):
        slow, fast = (getattr(rank(ghz=ghz, call_us=5).seconds(done), field) for ghz in (2.0, 2.2))
        assert slow / fast == pytest.approx(1.10)
    for name, code, precision, gain in (
        ("a64fx", "fugaku_megatron", "fp16", 1.0),
        ("a64fx", "fugaku_megatron", "bf16", 1.0),
        ("a64fx", "torch1.10", "fp16", 1.0),
        ("a100", "megatron-a100", "fp16", 16),
        ("graviton3", "fugaku_megatron", "bf16", 4),
        ("graviton3", "fugaku_megatron", "fp16", 1.0),
        ("epyc-9655", "fugaku_megatron", "bf16", 2),
    ):
        fp32 = rank(name, code, gemm_half=1.0)
        short = replace(fp32, precision=precision)
        matmul = gemm(4096, 4096, 4096)
        assert fp32.seconds(matmul).gemm / short.seconds(matmul).gemm == pytest.approx(gain)


def test_fp32_matmuls_in_bf16_parts_take_six_of_bf16_or_what_was_measured():
    for name, rate in (
        ("xeon-8480", 149.1 / 18.64 / 6),
        ("graviton3", 4 / 6),
        ("epyc-9655", 2 / 6),
    ):
        plain = rank(name, "fugaku_megatron")
        split = replace(plain, splits_fp32=True)
        done = gemm(4096, 4096, 4096)
        assert plain.seconds(done).gemm / split.seconds(done).gemm == pytest.approx(rate)
        measured = replace(split, parameters=replace(split.parameters, bf16x3=0.3))
        assert plain.seconds(done).gemm / measured.seconds(done).gemm == pytest.approx(0.3)
        attention = Work(matmuls=(Matmul(m=512, n=512, k=64, attention=True),))
        assert split.seconds(attention) == plain.seconds(attention)
    run = make_run("124m", {"fp32_matmul": "bf16x3"})
    with pytest.raises(
        ValueError, match="--fp32-matmul bf16x3 needs BF16 arithmetic, which machine a64fx lacks"
    ):
        model.predict(run, System.from_names("a64fx", "fugaku_megatron", 1))
    foreign = model.predict(run, System.from_names("a64fx", "torch1.10", 1))
    assert any(
        "torch1.10 has no --fp32-matmul: the time is that of a run without it" in line
        for line in foreign.warnings
    )


def test_matmuls_in_int8_take_shares_of_its_peak_and_the_time_to_quantize():
    """The share is FP32's, and operands are read twice and written, unless a curve was measured, which has the first operand."""
    on = rank("a64fx", "fugaku_megatron", elementwise_fraction=0.7)
    n = 2048
    square = Matmul(m=n, n=n, k=n)

    def seconds(rank: Rank, quantized: int) -> float:
        return rank.seconds(Work(matmuls=(replace(square, quantized=quantized),))).gemm

    plain = seconds(on, 0)
    for bytes, element in ((4, on), (2, replace(on, element_bytes=2))):
        once = element.seconds(Work(moved=n * n * (2 * bytes + 1))).elementwise
        assert seconds(element, 1) == pytest.approx(plain / 4 + once)
        assert seconds(element, 2) == pytest.approx(plain / 4 + 2 * once)
    curve = machine.GemmCurve(threads=48, maximum=0.5, half=1e-6, exponent=1.0)
    measured = replace(on, machine=replace(on.machine, int8_curves=(curve,)))
    assert seconds(measured, 0) == plain
    assert seconds(measured, 1) == pytest.approx(2 * n**3 / (0.5 * 24.576e12))
    once = on.seconds(Work(moved=9 * n * n)).elementwise
    assert seconds(measured, 2) == pytest.approx(seconds(measured, 1) + once)


def test_int8_needs_a_rate():
    run = make_run("124m", {"int8": True})
    system = System.from_names("a64fx", "fugaku_megatron", 1)
    host = replace(system.machine, name="host", peak_tflops={"fp32": 1.0, "fp16": 1.0, "bf16": 1.0})
    with pytest.raises(
        ValueError,
        match="--int8 needs the rate of INT8 matmuls, which the description of machine host lacks: calibrate again",
    ):
        model.predict(run, replace(system, machine=host))
    assumed = model.predict(run, system).warnings
    assert any("no rate of INT8 matmuls was measured on a64fx" in line for line in assumed)
    assert not any("INT8" in line for line in model.predict(make_run("124m", {}), system).warnings)
    foreign = model.predict(run, System.from_names("a64fx", "torch1.10", 1))
    assert any("torch1.10 has no --int8" in line for line in foreign.warnings)
    assert not any("no rate of INT8" in line for line in foreign.warnings)


EAGER = software.load("torch1.10")


def flops(counted: work.Work) -> int:
    return sum(2 * p.m * p.n * p.k * p.count * p.times for p in counted.matmuls)


def expected(run: RunConfig, recompute: str | None) -> float:
    """Return the count of costs, with the whole square of attention instead of half of it."""
    model_config = run.model
    square = model_config.num_layers * model_config.seq_length**2 * model_config.hidden_size
    if recompute == "full":
        return hardware_flops(run, 1)
    return model_flops(run, 1) + 6 * square + (4 * square if recompute == "selective" else 0)


def pieces_flops(pieces) -> int:
    return sum(flops(piece) * times for piece, times in pieces)


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("tp, pp, schedule", [(1, 1, None), (4, 3, None), (1, 3, "zbv")])
def test_matmuls_are_the_flops_of_costs(recompute, tp, pp, schedule):
    run = replace(
        RECIPES["124m"](),
        training=TrainingConfig(recompute_granularity=recompute),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            pipeline_schedule=schedule,
        ),
    )
    parts = run.placement.virtual_stages
    works = [model.virtual_stage_work(run, part, EAGER) for part in range(parts)]
    total = tp * sum(
        pieces_flops(forward) + pieces_flops(backward) for forward, backward, _ in works
    )
    assert total == pytest.approx(expected(run, recompute), rel=1e-12)
    linear = sum(r.flops_forward for r in layer_records(run) if r.name != "attention")
    assert sum(pieces_flops(weights) for _, _, weights in works) == run.model.num_layers * linear


DELTA_NETS = {
    "normalization": "RMSNorm",
    "experimental_attention_variant": "gdn",
    **DELTA_HEADS,
}


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize(
    "changes",
    [
        {**DELTA_NETS, "linear_attention_freq": "([1]*8+[0]*4)"},
        {"num_experts": 4, "swiglu": True, "moe_layer_freq": "([0]*4+[1]*8)"},
        {**DELTA_NETS, "layer_types": ",".join(["G", "-", "*-"] * 4)},
    ],
    ids=["gated delta nets", "experts", "layers of one part"],
)
def test_layers_of_each_kind_count_their_own_matmuls(changes, recompute):
    """Stages with other kinds of layers have other times."""
    plain = RECIPES["124m"]()
    run = replace(
        plain,
        model=replace(plain.model, disable_bias_linear=True, **changes),
        parallel=ParallelConfig(pipeline_model_parallel_size=3),
    )
    again = replace(run, training=TrainingConfig(recompute_granularity=recompute))
    totals = []
    for stage in range(3):
        records = stage_records(run, stage)
        forward = sum(r.flops_forward for r in records)
        both = forward + sum(r.flops_backward for r in records)
        works = model.virtual_stage_work(run, stage, EAGER)
        totals.append(pieces_flops(works[0]) + pieces_flops(works[1]))
        assert totals[-1] == pytest.approx(both, rel=1e-3)
        repeated = model.virtual_stage_work(again, stage, EAGER)
        more = pieces_flops(repeated[1]) - pieces_flops(works[1])
        expected = {
            None: 0,
            "full": forward - sum(r.flops_forward for r in records if r.name == "logits"),
            "selective": sum(r.flops_forward for r in records if r.mixes),
        }
        assert more == pytest.approx(expected[recompute], rel=1e-3)
    assert totals[0] != totals[1] or totals[1] != totals[2]


def network(
    layout: Layout, ranks_per_node: int = 1, name: str = "a64fx", **values: float
) -> Network:
    return Network(
        machine=machine.load(name),
        parameters=Parameters(**values),
        layout=layout,
        ranks_per_node=ranks_per_node,
    )


def all_reduce(net: Network, group: str) -> float:
    """Return the seconds of an all-reduce of 1 GB."""
    return net.seconds("all_reduce", group, 10**9)


def test_a_ring():
    """A group of one is free, an all-reduce is two passes, and latency grows with the logarithm of the ranks."""
    assert network(Layout(8, 1, 1, 8)).seconds("all_reduce", "tp", 1 << 20) == 0.0
    net = network(Layout(4, 4, 1, 1), reduce_gbs=2.0)
    assert all_reduce(net, "tp") == pytest.approx(2 * 3 / 4 / 2.0, rel=1e-3)
    assert net.seconds("reduce_scatter", "tp", 10**9) == pytest.approx(3 / 4 / 2.0, rel=1e-3)
    net = network(Layout(8, 1, 1, 8), reduce_gbs=1.0)
    assert net.seconds("all_gather", "dp", 1 << 20) == pytest.approx(
        net.seconds("reduce_scatter", "dp", 8 << 20)
    )
    few, many = (
        network(Layout(n, 1, 1, n), reduce_gbs=1.0).seconds("all_reduce", "dp", 4)
        for n in (1024, 2048)
    )
    assert many / few == pytest.approx(11 / 10, rel=1e-3)
    own = machine.load("a64fx").large_allreduce_gbs
    assert all_reduce(network(Layout(512, 1, 1, 512)), "dp") == pytest.approx(1 / own, rel=0.01)


def test_an_all_reduce_between_neighbouring_nodes_waits_for_the_last_rank():
    """Software whose waits are known has the link's rate there; large reductions keep their own."""
    pair = network(Layout(2, 2, 1, 1), reduce_gbs=1.2, wait_ms=9.0)
    many = network(Layout(20, 20, 1, 1), reduce_gbs=1.2, wait_ms=9.0)
    link = pair.machine.link_gbs * 1e9
    for net, last, sent in ((pair, 2 / 3, 1.0), (many, 20 / 21, 1.9)):
        assert net.seconds("all_reduce", "tp", 10**8) == pytest.approx(
            9e-3 * last + sent * 10**8 / link, rel=0.01
        )
    large = network(Layout(2, 1, 1, 2), reduce_gbs=1.2, wait_ms=9.0)
    assert large.seconds("all_reduce", "dp", 10**8) == pytest.approx(10**8 / 1.2e9, rel=1e-3)
    inside = network(Layout(4, 4, 1, 1), ranks_per_node=4, intra_reduce_gbs=0.5, wait_ms=9.0)
    assert inside.seconds("all_reduce", "tp", 10**8) == pytest.approx(1.5 * 10**8 / 0.5e9, rel=0.1)


def test_the_network_registers_newly_mapped_blocks_of_a_collective():
    def waiting(bytes: int, code: str = "torch1.10", tp: int = 2) -> float:
        one = rank(software=code, nodes=2, register_gbs=2.0, reduce_gbs=1.0)
        net = replace(one.network, layout=Layout(2, tp, 1, 2 // tp))
        sum_of_ranks = Work(collectives=((Collective("all_reduce", "tp", bytes), 1),))
        return replace(one, network=net).seconds(sum_of_ranks).tensor_parallel

    large = 2 * MMAP_BYTES
    kept = waiting(large, "torch1.10+tcmalloc")
    assert waiting(large) - kept == pytest.approx(large / 2e9)
    assert waiting(MMAP_BYTES) == waiting(MMAP_BYTES, "torch1.10+tcmalloc")
    assert waiting(large, tp=1) == 0.0


def test_weight_gradients_are_blocks_of_their_own_sizes():
    """Embedding and head of one stage both make a gradient of the table."""
    run = make_run("1.3b", {"micro_batch_size": 1, "global_batch_size": 8})
    code = software.load("torch1.10")
    gradients = work.weight_gradients(run, 0, Counter(run.model.layer_kinds), code)
    h = run.model.hidden_size
    table = vocabulary_rows(run) * h * 4
    assert gradients.allocations[0] == (table, 2)
    layers = run.model.num_layers
    sizes = Counter()
    for size, times in gradients.allocations[1:]:
        sizes[size] += times
    assert sizes == {4 * 3 * h * h: layers, 4 * h * h: layers, 4 * 4 * h * h: 2 * layers}
    kept = work.weight_gradients(
        run, 0, Counter(run.model.layer_kinds), software.load("fugaku_megatron")
    )
    assert kept.allocations == ()


def test_sums_in_two_levels_and_in_shared_memory():
    uneven = network(Layout(6, 6, 1, 1), ranks_per_node=4, reduce_gbs=2.0)
    active = replace(uneven, active=frozenset({features.TWO_LEVEL_SUMS, features.NODE_SUMS}))
    assert all_reduce(active, "tp") == all_reduce(uneven, "tp")
    even = replace(active, layout=Layout(8, 8, 1, 1))
    assert all_reduce(even, "tp") < all_reduce(uneven, "tp") / 2
    by_mpi = network(Layout(4, 4, 1, 1), ranks_per_node=4)
    shared = replace(by_mpi, active=frozenset({features.NODE_SUMS}))
    ratio = all_reduce(by_mpi, "tp") / all_reduce(shared, "tp")
    assert ratio == pytest.approx(
        by_mpi.machine.intra_gbs / by_mpi.machine.intra_reduce_gbs, rel=1e-2
    )
    ring = network(Layout(256, 1, 1, 256), ranks_per_node=4, reduce_gbs=1.2, intra_reduce_gbs=5.0)
    bf16 = replace(ring, active=frozenset({features.GRAD_REDUCE_IN_BF16}))
    assert bf16.seconds("reduce_scatter", "dp", 10**9) == pytest.approx(
        3 * ring.seconds("reduce_scatter", "dp", 10**9), rel=1e-2
    )


def test_all_to_alls_send_once_for_each_pair_of_nodes():
    """16 nodes of four ranks: 15 messages per node instead of 60 per rank; bytes cross between nodes once in both cases."""
    flat = network(Layout(64, 1, 1, 64, ep=64), ranks_per_node=4)
    levels = replace(flat, active=frozenset({features.TWO_LEVEL_SUMS}))
    latencies = (60 - 15 / 4) * flat.machine.link_alpha_us - 6 * flat.machine.intra_alpha_us
    for size in (64, 64 * 10**6):
        before, after = (each.seconds("all_to_all", "ep", size) for each in (flat, levels))
        copied = (3 / 4 * (1 + 15 / 16) - 3 / 64) * size / (flat.machine.intra_gbs * 1e9)
        assert after - before == pytest.approx(copied - latencies * 1e-6)
    inside = replace(levels, layout=Layout(4, 1, 1, 4, ep=4))
    assert inside.seconds("all_to_all", "ep", 10**6) == inside.messages("all_to_all", "ep", 10**6)


def test_rows_of_experts_are_exposed_at_both_ends():
    """Expose the first dispatch and the last combine of g groups, less half of the shared expert each; inside a node, everything."""
    far = rank(software="fugaku_megatron")
    way = Collective("all_to_all", "ep", 64 * 10**6)
    matmul = Matmul(m=4096, n=4096, k=4096)
    far = replace(
        far,
        network=replace(
            far.network,
            layout=Layout(4, 1, 1, 4, ep=4),
            machine=replace(far.machine, link_alpha_us=0.0, intra_alpha_us=0.0),
        ),
    )
    wire = far.network.seconds("all_to_all", "ep", way.bytes)
    each = far.seconds(Work(matmuls=(matmul,))).gemm

    def waiting(rank: Rank, groups: int, computed: int, around: int = 0) -> float:
        exchange = ExpertExchange(
            there=(way,),
            back=(way,),
            groups=groups,
            overlapped=(replace(matmul, times=computed),),
            around=(replace(matmul, times=around),),
        )
        return rank.seconds(Work(exchanges=((exchange, 1),))).tensor_parallel

    long = math.ceil(4 * wire / each)
    assert waiting(far, 1, long) == pytest.approx(2 * wire) and waiting(
        far, 8, long
    ) == pytest.approx(2 * wire / 8)
    assert waiting(far, 8, long, around=long) == pytest.approx(0, abs=1e-12)
    assert waiting(far, 8, 1) == pytest.approx(2 * wire - each)  # the link takes longer
    near = replace(
        far, network=replace(far.network, ranks_per_node=4, active=frozenset({features.NODE_SUMS}))
    )
    assert waiting(near, 8, long, around=long) == 2 * near.network.seconds(
        "all_to_all", "ep", way.bytes
    )
    # ranks of a node that share no memory
    apart = replace(near, network=replace(near.network, active=frozenset()))
    assert waiting(apart, 8, long, around=long) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("schedule", "hiding"), [("1f1b", 3), ("zb-h1", 2)])
def test_all_rows_of_experts_are_in_one_exchange(schedule, hiding):
    """Have no other all-to-alls among these ranks in a layer; deferred weight gradients overlap nothing."""
    run = make_run(
        "qwen3-30b-a3b",
        {
            "seq_length": 1024,
            "expert_model_parallel_size": 8,
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": schedule,
            "global_batch_size": 8,
            "moe_shared_expert_intermediate_size": 64,
        },
    )
    works = phases(run, software.load("fugaku_megatron"))
    forward, backward = (works[f"layer_{way}"] for way in ("forward", "backward"))
    sent = 1024 * 8 * 4
    for phase in (forward, backward):
        ((exchange, times),) = phase.exchanges
        assert (
            times == 1
            and exchange.groups == 8
            and not any(c.verb == "all_to_all" for c, _ in phase.collectives)
        )
        assert sorted(c.bytes for c in exchange.there) == [sent, sent * 2048] and [
            c.bytes for c in exchange.back
        ] == [sent * 2048]
    assert len(forward.exchanges[0][0].overlapped) == len(forward.exchanges[0][0].around) == 2
    assert len(backward.exchanges[0][0].overlapped) == 2 * (hiding - 1)
