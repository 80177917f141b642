"""Gradient buckets: sizes, memory, reduction and gathering; overlap changes no bit."""

from dataclasses import replace

import pytest
import torch

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.comm.base import Comm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs import run_schedule
from fugaku_megatron.costs.buckets import (
    bucket_elements,
    bucket_minimum,
    bucket_ranges,
    unit_elements,
)
from fugaku_megatron.costs.memory import stage_memory
from fugaku_megatron.host.observed import Observed
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.optim import flat
from fugaku_megatron.pipeline.instructions import InFlight
from tests.checks.instruction_lists import custom, shuffled
from tests.helpers import (
    DROPOUT,
    OVERLAP,
    PP2,
    build_trainer,
    dry_trainer,
    grid_groups,
    make_trainer,
    mock,
    parse_layout,
    run_layout,
    small_run,
)
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

BUCKETS = {"overlap_grad_reduce": True, "ddp_bucket_size": 20_000}  # a layer has 12,704 elements
BOTH = {**OVERLAP, **BUCKETS}


@pytest.mark.parametrize(
    ("units", "minimum", "tied", "buckets"),
    [
        ([1, 5, 5, 3], 6, False, [[0, 1], [2, 3]]),
        ([1, 5, 5, 3], 7, False, [[0, 1, 2], [3]]),
        ([1, 5, 5, 3], 1, False, [[0], [1], [2], [3]]),
        ([1, 5, 5, 3], 100, False, [[0, 1, 2, 3]]),
        ([1, 5, 5, 3], 100, True, [[0, 1, 2], [3]]),
        ([1, 5, 5, 3], 6, True, [[0, 1], [2], [3]]),
        ([4], 1, True, [[0]]),
    ],
)
def test_a_bucket_is_as_few_units_as_reach_the_minimum(units, minimum, tied, buckets):
    assert [list(bucket) for bucket in bucket_ranges(units, minimum, tied)] == buckets


def test_the_smallest_bucket_is_megatrons():
    """Cut 124M, with 7.1 M parameters in a layer and 39.4 M in the embeddings."""
    assert (
        bucket_minimum(small_run(), 8) == 40_000_000
        and bucket_minimum(small_run(), 64) == 64_000_000
    )
    assert [bucket_minimum(small_run(ddp_bucket_size=5), ranks) for ranks in (1, 64)] == [5, 5]
    assert bucket_minimum(small_run(), 1) == 1, (
        "nothing is reduced: each unit's gradients get their own memory"
    )
    run = make_run(
        "124m",
        {"overlap_grad_reduce": True, "make_vocab_size_divisible_by": 128, "vocab_size": 50257},
    )
    assert [round(n / 1e6, 1) for n in bucket_elements(run, Layout.from_run(run, 8), 0)] == [
        42.5,
        42.5,
        39.4,
    ]


@pytest.mark.parametrize(
    "layout",
    [
        "tp1",
        "overlap_grad_reduce ddp_bucket_size=20000",
        "pp2 overlap_grad_reduce ddp_bucket_size=20000",
        "pp4",
        "tp2 pp2 dp2 overlap_grad_reduce ddp_bucket_size=20000",
    ],
)
def test_buckets_lie_where_the_formula_says(layout):
    ranks, flags = parse_layout(layout)
    for rank in range(ranks):
        trainer = dry_trainer(rank, ranks, **flags)
        run = trainer.run
        buffer = trainer.optimizer.flat
        stage = trainer.groups.pp.rank
        assert [b.end - b.start for b in buffer.buckets] == bucket_elements(
            run, trainer.layout, stage
        )
        assert [sum(p.numel() for p in unit) for unit in flat.stage_units(trainer.stage)] == list(
            unit_elements(run, stage).values()
        )
        names = [
            [
                p.spec.name
                for p, start in zip(buffer.parameters, buffer.starts)
                if b.start <= start < b.end
            ]
            for b in buffer.buckets
        ]
        if (
            "ddp_bucket_size" in layout
            and trainer.layout.pp > 1
            and (trainer.stage.first or trainer.stage.last)
        ):
            assert names[-1] == [trainer.stage.tied_copy.spec.name], (
                "the tied embedding waits for the other stage alone"
            )
        layers = [[int(n.split(".")[2]) for n in bucket if ".layers." in n] for bucket in names]
        assert all(min(a) > max(b) for a, b in zip(layers, layers[1:]) if a and b), (
            "the last layers come first"
        )


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [({}, BUCKETS), (BOTH, {}), (BUCKETS, {**BOTH, "ddp_bucket_size": 1})],
    ids=["one-many", "many-one", "many-more"],
)
def test_a_checkpoint_loads_whatever_the_buckets_were(saved, loaded, tmp_path):
    """Load ZeRO-1 shards from several ranks' files. Shards are cut inside buckets."""

    def save_and_load(world) -> None:
        run = {
            "zero_stage": 1,
            "bf16": True,
            "tensor_model_parallel_size": 2,
            "max_position_embeddings": 512,
            "clip_grad": 0.0,
        }
        trainers = [
            make_trainer(world, small_run(**(run | changes))) for changes in (saved, loaded)
        ]
        trainers[0].train_step()
        trainers[0].save(str(tmp_path))
        trainers[1].load(str(tmp_path))
        losses = [[trainer.train_step().loss for _ in range(2)] for trainer in trainers]
        assert losses[0] == losses[1]
        for trainer in trainers:
            trainer.close()

    ThreadWorld(4).run(save_and_load)


# Overlap ------------------------------------------------------------------------------------------------------------------------


def checked(comm: Comm) -> Observed:
    """Return a communicator that checks that tensors do not change while they are summed."""
    summed = {"iall_reduce": 0, "ireduce_scatter": 1}  # place among the arguments

    def observe(verb, call, args, kwargs):
        return Watched(call(*args, **kwargs), args[summed[verb]])

    return Observed(comm, tuple(summed), observe)


class Watched:
    """A handle that checks its tensor. A ThreadComm writes results in `wait`; before, only a late gradient changes the tensor."""

    def __init__(self, handle, tensor: torch.Tensor) -> None:
        self.handle = handle
        self.tensor = tensor
        self.before = tensor.clone()

    def wait(self) -> None:
        if self.before is not None:
            assert torch.equal(self.tensor, self.before), (
                "a gradient was written after its reduction had started"
            )
        self.before = None
        self.handle.wait()


def started_early(world, run, backend: str, make=run_schedule.build_schedule) -> tuple[int, int]:
    """Return the buckets reduced during backward, and the buckets that could be, in two iterations."""
    torch.set_num_threads(1)
    groups = grid_groups(world, run)
    groups = replace(groups, dp=checked(groups.dp), embedding=checked(groups.embedding))
    trainer = build_trainer(
        run, world, mock(run), groups=groups, ops=Ops.build(backend), make_schedule=make
    )
    buckets = trainer.optimizer.buckets
    seen = []
    reduce = buckets.reduce
    buckets.reduce = lambda: (seen.append(len(buckets._sums)), reduce())[1]
    for _ in range(2):
        trainer.train_step()
    trainer.close()
    last = len(unit_elements(run, groups.pp.rank)) - 1
    assert len(seen) == 2 and seen[0] == seen[1], "reduced once in each iteration"
    at_the_end = {last, last - 1} if trainer.stage.first and not trainer.stage.last else {last}
    if not trainer.stage.first and not trainer.stage.last:
        at_the_end = set()
    return seen[0], sum(
        not at_the_end & set(bucket.units) for bucket in trainer.optimizer.flat.buckets
    )


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("torch", "zero full recompute_num_layers=3"),
        ("native", "pp2 full"),
        ("torch", "tp2 dp2 selective"),
        ("native", "tp2 pp2 dp2 zero full recompute_method=block"),
    ],
)
def test_no_gradient_is_written_after_its_reduction_started(backend, layout):
    flags = {**BUCKETS, **DROPOUT, "num_layers": 8}
    for early, possible in run_layout(layout, started_early, flags, backend):
        assert early == possible > 0, "what can be reduced next to the last backward is"


def test_a_bucket_waits_for_its_last_micro_batch_in_any_schedule():
    """Run forwards and backwards in random orders, so that the last backward is not the last micro-batch's."""
    run = small_run(**PP2, **BUCKETS, **DROPOUT, num_layers=8)
    for early, possible in ThreadWorld(4).run(started_early, run, "native", custom(shuffled)):
        assert early == possible > 0


def test_gathers_are_under_way_until_their_weights_are_needed():
    def check(world) -> None:
        trainer = make_trainer(world, small_run(**BOTH))
        buckets = trainer.optimizer.buckets
        order = []
        trainer.train_step()
        last = len(trainer.optimizer.flat.buckets) - 1
        assert list(buckets._gathers) == list(range(last, -1, -1)), (
            "all of them, the first needed first"
        )
        for unit in (*trainer.stage.layers, trainer.stage.last.final_layernorm):
            unit.register_forward_pre_hook(lambda module, args: order.append(len(buckets._gathers)))
        trainer.train_step()
        layers = trainer.run.model.num_layers
        assert order[: layers + 1] == [1, 1, 0, 0, 0], (
            "when a layer runs, only what later ones need is under way"
        )
        trainer.close()
        assert not buckets._gathers

    ThreadWorld(2).run(check)


def test_copies_in_bf16_are_in_the_memory_model():
    runs = [small_run(**BUCKETS, grad_reduce_in_bf16=wire) for wire in (False, True)]
    plain, more = (
        stage_memory(run, Layout.from_run(run, 2), 0, [InFlight((1,), (0,))]) for run in runs
    )
    assert (more.gradients, more.total - plain.total) == (
        plain.gradients * 3 // 2,
        plain.gradients // 2,
    )
