"""Train a small model in every parallel layout that fits the world, as a program:

    mpiexec -n 4 python tests/mpi/layouts.py 2 FOLDER

The number counts iterations. Ranks wait for each other in FOLDER, empty at first. All train alone, which gives the expected
losses and gradients; then parts of the world train together. Prints one line per layout; fails on the first difference.
See tests/training/test_layouts_mpi.py.
"""

import sys
import time
from pathlib import Path

import torch

from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.comm.job import describe, run_or_abort
from fugaku_megatron.comm.node import share_groups
from fugaku_megatron.host import kernels
from fugaku_megatron.nn.ops import Ops
from tests.helpers import build_trainer, grid_groups, mock, small_run, whole_tensors

SIZES = {
    "pp4": (4, 1, 4),
    "tp2pp2": (4, 2, 2),
    "pp2dp2": (4, 1, 2),
    "dp4": (4, 1, 1),
    "tp2pp2dp2": (8, 2, 2),
}
# tests/training/test_layouts.py has them all, on threads; what needs a group has no effect in a layout without it
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000}
ALL_AT_ONCE = {
    "recompute_granularity": "full",
    "zero_stage": 1,
    "sequence_parallel": True,
    **OVERLAP,
}
EXCHANGED = {**ALL_AT_ONCE, "tp_comm_overlap": True}
VARIANTS = ({}, {"node": 8, **ALL_AT_ONCE})
NODES = {
    "dp4": ({"node": 2}, {"node": 2, **ALL_AT_ONCE})
}  # variants of a layout whose groups span nodes
SCHEDULES = tuple(
    {"node": 8, "zero_stage": 1, **OVERLAP, **flags}
    for flags in (
        {"num_virtual_stages_per_pipeline_rank": 2},
        {"pipeline_schedule": "zb-h1", "num_virtual_stages_per_pipeline_rank": 2},
        {"pipeline_schedule": "zbv"},
    )
)


EXPERTS = {
    "num_experts": 8,
    "swiglu": True,
    "disable_bias_linear": True,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": (0.1,),
    "moe_shared_expert_intermediate_size": 20,
}
ZERO = {"zero_stage": 1, **OVERLAP}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# (ranks, flags) of divided experts: rows by MPI, in memory of a node, and of nodes with two ranks each
DIVIDED = tuple(
    (4, {"expert_model_parallel_size": 4, "node": node, **ZERO}) for node in (0, 2, 8)
) + (
    (4, {"expert_model_parallel_size": 2, **SEQUENCE, "node": 8}),
    (
        4,
        {
            "expert_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zbv",
            "node": 8,
            **ZERO,
        },
    ),
    (8, {"expert_model_parallel_size": 8, **ZERO}),
    (8, {"expert_model_parallel_size": 8, "node": 8, **ZERO}),
    (
        8,
        {
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "node": 4,
            **SEQUENCE,
            **ZERO,
        },
    ),
)


# A job of four ranks tries one variant of each kind, a job of eight ranks all of them.
FEW = {
    "pp4": VARIANTS[1:],
    "tp2pp2": (EXCHANGED,),
    "pp2dp2": ({}, SCHEDULES[2]),
    "dp4": NODES["dp4"][:1],
}
FEW_DIVIDED = (DIVIDED[0], DIVIDED[1], DIVIDED[4])


def layouts(world_size: int) -> list[tuple[str, dict]]:
    """Return name and flags for every layout that fits."""
    found = []
    for name, (ranks, _, _) in SIZES.items():
        tried = list(NODES.get(name, VARIANTS))
        if name == "tp2pp2":
            tried.append(EXCHANGED)
        if name == "pp2dp2":
            tried += SCHEDULES
        if world_size == 4:
            tried = FEW.get(name, ())
        found += [(name, flags) for flags in tried if ranks <= world_size]
    return found


def divided(world_size: int) -> list[tuple[int, dict]]:
    """Return ranks and flags for every layout with divided experts that fits."""
    tried = FEW_DIVIDED if world_size == 4 else DIVIDED
    return [(ranks, flags) for ranks, flags in tried if ranks <= world_size]


def train(
    world: Comm, iterations: int, node: int = 0, **changes
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return losses and gradient norms (iterations, 2), and the first iteration's gradients.

    node: ranks that share a made-up node and its memory; 0: none do.
    """
    run = small_run(**changes)
    groups = grid_groups(world, run)
    groups = share_groups(groups, kernels, world.rank // node) if node else groups
    trainer = build_trainer(run, world, mock(run), mock(run, 8), groups=groups, ops=Ops.build())
    results = []
    gradients = {}
    for i in range(iterations):
        results.append(trainer.train_step())
        gradients = (
            gradients or whole_tensors(trainer, "grad")
            if i == 0 and not trainer.optimizer.sharded
            else gradients
        )
    trainer.close()
    return torch.tensor([(r.loss, r.grad_norm) for r in results], dtype=torch.float64), gradients


def compare(result, expected) -> float:
    """Return the largest relative difference between losses and norms; allow 1e-5, also for gradients."""
    difference = ((result[0] - expected[0]).abs() / expected[0]).max().item()
    assert difference <= 1e-5, difference
    for name, gradient in result[1].items():
        reference = expected[1].get(name, expected[1]["embedding.word_embeddings.weight"])
        assert (gradient - reference).abs().max() <= 1e-5 * reference.abs().max(), name
    return difference


def rest(world: Comm, folder: Path) -> None:
    """Until all ranks are here. Asleep: in MPI's own calls those that wait would take the cores from those that train."""
    folder.mkdir(exist_ok=True)
    (folder / str(world.rank)).touch()
    while len(list(folder.iterdir())) < world.size:
        time.sleep(0.02)


def main(world: Comm) -> None:
    torch.set_num_threads(1)
    iterations = int(sys.argv[1])
    folder = Path(sys.argv[2])
    alone = train(SoloComm(), iterations)
    for number, (name, flags) in enumerate(layouts(world.size)):
        ranks, tp, pp = SIZES[name]
        rest(world, folder / f"{name} {number}")
        part = world.split(0 if world.rank < ranks else 1, world.rank)
        if world.rank < ranks:
            result = train(
                part,
                iterations,
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                **flags,
            )
            difference = compare(result, alone)
            if world.rank == 0:
                print(f"ok {name} {flags} {difference:.1e}", flush=True)
    alone = train(SoloComm(), iterations, **EXPERTS)
    for number, (ranks, flags) in enumerate(divided(world.size)):
        rest(world, folder / f"experts {number}")
        part = world.split(0 if world.rank < ranks else 1, world.rank)
        if world.rank < ranks:
            difference = compare(train(part, iterations, **EXPERTS, **flags), alone)
            if world.rank == 0:
                print(f"ok experts {flags} {difference:.1e}", flush=True)
    rest(world, folder / "end")
    if world.rank == 0:
        print(describe(world))


if __name__ == "__main__":
    run_or_abort(main)
    sys.exit(0)
