"""The Slurm scripts of scripts/slurm: one template, one row per cluster and per model; slurm.sh is their common part.

    fugaku-megatron job slurm scripts/slurm     writes them again, one folder per cluster

The layouts are written down here. Rendering checks that their modelled memory fits into the nodes. The scripts do not stage files,
because on some hundred nodes Python can start from the shared file system. Left out: choosing layouts (fugaku-megatron plan).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.arguments import parse
from ..config.checks import check
from ..config.layout import Layout
from ..costs import memory, run_schedule
from .render import flag_lines

LEAVE_SECONDS = 300  # so long before the time limit the trainer gets the signal to save and exit
USABLE = 0.8  # share of a node's memory that the model may use; the rest is for MPI, Python and the system


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A kind of node. gib: memory of a node. comments: for the script, such as modules to load."""

    name: str
    cores: int
    ranks_per_node: int
    gib: int
    comments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model on a cluster."""

    recipe: str
    nodes: int
    tp: int
    pp: int
    flags: tuple[str, ...] = ()


CLUSTERS = (
    Cluster(name="a64fx", cores=48, ranks_per_node=4, gib=32, comments=(
        "A64FX (Ookami, Deucalion): four core memory groups of 12 cores and 8 GiB, one rank on each",
        "module load gcc openmpi            # names differ between sites, see `module avail`")),
    Cluster(name="grace", cores=144, ranks_per_node=2, gib=480, comments=(
        "NVIDIA Grace CPU Superchip: two processors of 72 cores, one rank on each",
        "module load gcc openmpi")),
    Cluster(name="x86", cores=128, ranks_per_node=8, gib=256, comments=(
        "x86-64, two sockets of 64 cores; for others change --ntasks-per-node x --cpus-per-task, one rank for each NUMA node",
        "module load gcc openmpi            # or the site's MPICH or Intel MPI")),
)
RECIPES = {
    "a64fx": (Recipe(recipe="124m", nodes=16, tp=1, pp=1),
              Recipe(recipe="1.3b", nodes=32, tp=4, pp=1, flags=("--recompute-granularity", "full", "--zero-stage", "1")),
              Recipe(recipe="13b", nodes=96, tp=4, pp=8, flags=("--recompute-granularity", "full", "--zero-stage", "1")),
              Recipe(recipe="30b", nodes=256, tp=4, pp=32, flags=("--recompute-granularity", "full", "--zero-stage", "1"))),
    "grace": (Recipe(recipe="124m", nodes=4, tp=1, pp=1, flags=("--micro-batch-size", "4")),
              Recipe(recipe="1.3b", nodes=8, tp=1, pp=1, flags=("--bf16", "--zero-stage", "1")),
              Recipe(recipe="13b", nodes=16, tp=2, pp=2, flags=("--bf16", "--zero-stage", "1", "--recompute-granularity", "full")),
              Recipe(recipe="30b", nodes=32, tp=2, pp=4, flags=("--bf16", "--zero-stage", "1", "--recompute-granularity", "full"))),
    "x86": (Recipe(recipe="124m", nodes=4, tp=1, pp=1, flags=("--micro-batch-size", "2")),
            Recipe(recipe="1.3b", nodes=8, tp=2, pp=1, flags=("--bf16", "--zero-stage", "1")),
            Recipe(recipe="13b", nodes=24, tp=4, pp=4, flags=("--bf16", "--zero-stage", "1", "--recompute-granularity", "full")),
            Recipe(recipe="30b", nodes=48, tp=8, pp=6, flags=("--bf16", "--zero-stage", "1", "--recompute-granularity", "full"))),
}

TEMPLATE = r'''#!/bin/bash
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=@RANKS@
#SBATCH --cpus-per-task=@CPUS@
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@@LEAVE@
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=%x.%j.log
# Written by fugaku-megatron job slurm scripts/slurm. Pass the site's own options to sbatch: --partition, --account
#
@COMMENTS@
#
# @LAYOUT@
set -euo pipefail

@FLAGS@

COMMON=${FUGAKU_MEGATRON:-$SLURM_SUBMIT_DIR}/fugaku_megatron/jobs/slurm.sh
[ -f "$COMMON" ] || { echo "$COMMON was not found: submit from the checkout, or set FUGAKU_MEGATRON to its path" >&2; exit 2; }
# shellcheck source-path=SCRIPTDIR source=../../../fugaku_megatron/jobs/slurm.sh
. "$COMMON"
'''


def flags(job: Recipe) -> tuple[str, ...]:
    """pretrain_gpt.py's flags, without paths."""
    return ("--recipe", job.recipe, "--tensor-model-parallel-size", str(job.tp), "--pipeline-model-parallel-size", str(job.pp),
            *job.flags)


def memory_mib(cluster: Cluster, job: Recipe) -> tuple[Layout, float]:
    """Layout, and MiB of the fullest rank (model). Raises ValueError for a recipe that does not fit on the cluster."""
    run = parse(["--mock-data", *flags(job)]).run
    layout = Layout.from_run(run, job.nodes * cluster.ranks_per_node)
    batches = layout.microbatches(run, layout.global_batch_size(run))
    mib = max(memory.stage_memory(run, layout, stage, run_schedule.of_run(run, batches).held(stage)).total
               for stage in range(job.pp)) / 2**20
    usable = USABLE * cluster.gib * 1024 / cluster.ranks_per_node
    check(mib <= usable, f"{cluster.name}, {job.recipe}: {mib:.0f} MiB per rank (model) are more than the {usable:.0f} that "
          f"each of {cluster.ranks_per_node} ranks on {cluster.gib} GiB can use: raise nodes, TP or PP")
    return layout, mib


def render(cluster: Cluster, job: Recipe) -> str:
    """The script. Raises ValueError for a recipe that does not fit on the cluster."""
    layout, mib = memory_mib(cluster, job)
    filled = {"NAME": f"gpt_{job.recipe.replace('.', '_')}", "NODES": job.nodes, "RANKS": cluster.ranks_per_node,
              "CPUS": cluster.cores // cluster.ranks_per_node, "LEAVE": LEAVE_SECONDS, "FLAGS": "\n".join(flag_lines(flags(job))),
              "COMMENTS": "\n".join(f"# {line}" for line in cluster.comments),
              "LAYOUT": f"DP {layout.dp} x TP {layout.tp} x PP {layout.pp}; {mib:.0f} MiB on the fullest rank (model)"}
    text = TEMPLATE
    for mark, value in filled.items():
        text = text.replace(f"@{mark}@", str(value))
    return text


def scripts() -> dict[str, str]:
    """Path under scripts/slurm -> text, of every cluster and model."""
    return {f"{cluster.name}/run_{job.recipe}.sbatch": render(cluster, job)
            for cluster in CLUSTERS for job in RECIPES[cluster.name]}
