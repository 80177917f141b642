"""The Slurm scripts of scripts/slurm: one template, one row per cluster and per model.

    fugaku-megatron job slurm scripts/slurm     writes them again, one folder per cluster

The layouts are written down here and checked against accounting when they are rendered; memory in the scripts is modelled. They
stage nothing: on some hundred nodes Python starts from the shared file system. Left out: choosing layouts
(fugaku-megatron plan). Test: pytest tests/test_slurm.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .. import schedule
from ..run import memory
from ..run.arguments import parse
from ..run.checks import check
from ..run.layout import Layout
from .render import flag_lines

LEAVE_SECONDS = 300  # before the limit the trainer is told to save and leave
USABLE = 0.8  # share of a node's memory that the model may fill: the rest is for MPI, Python and the system


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A kind of node. gib: memory of a node. comments: of the script, such as modules to load."""

    name: str
    cores: int
    ranks_per_node: int
    gib: int
    comments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model on a cluster. The micro-batch is of one rank."""

    recipe: str
    nodes: int
    tp: int
    pp: int
    flags: tuple[str, ...] = ()


CLUSTERS = (
    Cluster(name="a64fx", cores=48, ranks_per_node=4, gib=32, comments=(
        "A64FX (Ookami, Deucalion): four core memory groups of 12 cores and 8 GiB, a rank on each",
        "module load gcc openmpi            # names differ, see `module avail`")),
    Cluster(name="grace", cores=144, ranks_per_node=2, gib=480, comments=(
        "NVIDIA Grace CPU Superchip: two processors of 72 cores, a rank on each",
        "module load gcc openmpi")),
    Cluster(name="x86", cores=128, ranks_per_node=8, gib=256, comments=(
        "x86-64, two sockets of 64 cores; for others change --ntasks-per-node x --cpus-per-task, a rank for each NUMA node",
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
# Written by fugaku-megatron job slurm scripts/slurm. The site's own, as options of sbatch: --partition, --account
#
@COMMENTS@
#
# @LAYOUT@
# Given from outside (sbatch --export=ALL,NAME=value): what is below with ${NAME:-...}. docs/clusters.md says how to build.
set -euo pipefail

HERE=${FUGAKU_MEGATRON:-$SLURM_SUBMIT_DIR}    # the program's folder, on a shared file system
PYTHON=${PYTHON:-$HERE/.venv/bin/python}
LAUNCHER=${LAUNCHER:-srun}                    # srun, or mpiexec of an MPI that was built with Slurm's support
PMI=${PMI:-}                                  # of srun: pmix for Open MPI, pmi2 for MPICH; empty: the site's default
DATA=${DATA:-mock}                            # prefix of .bin/.idx, with VOCAB and MERGES or TOKENIZER; mock: random tokens
TOKENIZER=${TOKENIZER:-}                      # file or folder of --tokenizer-model, with --tokenizer-type among the flags
SAVE=${SAVE:-$SLURM_SUBMIT_DIR/checkpoints/$SLURM_JOB_NAME}
SPARE_NODES=${SPARE_NODES:-0}                 # of --nodes, unused until another one fails
MAX_RESTARTS=${MAX_RESTARTS:-5}               # after a fault, inside this job
export PYTHONPATH=$HERE${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK=$OMP_NUM_THREADS    # srun does not take it over from sbatch since Slurm 22.05

if [ ! -f "$HERE/pretrain_gpt.py" ] || ! command -v "$PYTHON" >/dev/null; then
    echo "no program in $HERE, or no $PYTHON: submit from its folder after make setup, or give FUGAKU_MEGATRON and PYTHON" >&2
    exit 2
fi
case $LAUNCHER in
    srun) LAUNCH="srun --nodes={nodes} --nodelist={hosts} --ntasks={ranks} --kill-on-bad-exit=1 --cpu-bind=cores"
        LAUNCH+=${PMI:+" --mpi=$PMI"} ;;
    *) LAUNCH="$LAUNCHER -n {ranks} --host {slots}" ;;
esac
if [ "$DATA" = mock ]; then
    DATA_FLAGS=(--mock-data)
elif [ -n "$TOKENIZER" ]; then
    DATA_FLAGS=(--data-path "$DATA" --tokenizer-model "$TOKENIZER")
else
    DATA_FLAGS=(--data-path "$DATA" --vocab-file "${VOCAB:?give VOCAB, the vocab.json of DATA}"
        --merge-file "${MERGES:?give MERGES, the merges.txt of DATA}")
fi
@FLAGS@

# After a fault the run starts again from SAVE: on a spare node, else on fewer with the same global batch.
# Before the limit Slurm signals this shell; the trainer saves after its iteration and leaves, and the job goes back into the queue
# under its number, to resume from SAVE. A job that leaves by itself has reached its end and is not started again.
leaving=0
trainer=
trap 'leaving=1; kill -USR1 "$trainer" 2>/dev/null || true' USR1
trap 'kill -TERM "$trainer" 2>/dev/null || true' TERM
"$PYTHON" -m fugaku_megatron supervise --max-restarts "$MAX_RESTARTS" --spare-nodes "$SPARE_NODES" \
    --hosts "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)" \
    --ranks-per-node "$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))" --launcher "$LAUNCH" -- \
    "$PYTHON" "$HERE/pretrain_gpt.py" "${FLAGS[@]}" "${DATA_FLAGS[@]}" --save "$SAVE" --load "$SAVE" "$@" &
trainer=$!
code=0
wait "$trainer" || code=$?
while kill -0 "$trainer" 2>/dev/null; do  # a signal ends wait before the trainer has saved
    code=0
    wait "$trainer" || code=$?
done
if [ "$leaving" = 1 ] && [ "$code" = 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
'''


def flags(job: Recipe) -> tuple[str, ...]:
    """pretrain_gpt.py's flags, without paths."""
    return ("--recipe", job.recipe, "--tensor-model-parallel-size", str(job.tp), "--pipeline-model-parallel-size", str(job.pp),
            *job.flags)


def memory_mib(cluster: Cluster, job: Recipe) -> tuple[Layout, float]:
    """Layout, and MiB of the fullest rank (model). Raises ValueError for a recipe that does not run on the cluster."""
    run = parse(["--mock-data", *flags(job)]).run
    layout = Layout.from_run(run, job.nodes * cluster.ranks_per_node)
    batches = layout.microbatches(run, layout.global_batch_size(run))
    mib = max(memory.stage_memory(run, layout, stage, schedule.of_run(run, batches).held(stage)).total
               for stage in range(job.pp)) / 2**20
    room = USABLE * cluster.gib * 1024 / cluster.ranks_per_node
    check(mib <= room, f"{cluster.name}, {job.recipe}: {mib:.0f} MiB per rank (model) are more than the {room:.0f} that "
          f"{cluster.ranks_per_node} ranks on {cluster.gib} GiB have: give more nodes, TP or PP")
    return layout, mib


def render(cluster: Cluster, job: Recipe) -> str:
    """The script. Raises ValueError for a recipe that does not run on the cluster."""
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


def write_scripts(directory: Path) -> None:
    """Write all scripts under `directory`."""
    for path, text in scripts().items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o755)
