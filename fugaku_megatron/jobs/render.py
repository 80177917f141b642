"""The template of Fugaku's job scripts: from a job (`job.Job`) and a scheduler's own lines (`Scheduler`) to the text of a script.

A script stages one archive (interpreter, packages, program, data) on every node's own storage, starts one process per rank bound to
its NUMA nodes, and trains. Left out: the checks (check.py), Slurm's scripts, which stage nothing (slurm.py).
Test: pytest tests/test_jobs_submit.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Protocol

from . import pjsub
from .job import MARGIN, Job


class Scheduler(Protocol):
    """What a batch system adds to a script; `pjsub.Pjsub` is one. Every method returns lines of the script."""

    def directives(self, job: Job) -> list[str]:
        """The comments at the top that the scheduler reads."""

    def setup(self, job: Job) -> list[str]:
        """Bash: NODES, JOB, LOCAL (a directory on each node), and functions: share_archive, forget_archive, launch, supervise."""

    def placement(self, job: Job) -> list[str]:
        """Bash, after staging: what launch needs to put ranks on nodes."""


PJSUB: Scheduler = pjsub.Pjsub()

PATHS = '''
# Paths; each can be given from outside (pjsub -x NAME=value)
ARCHIVE=${ARCHIVE:-$PWD/fugaku_megatron.tar}    # scripts/build.sh writes it: interpreter, packages, program and data
DATA=${DATA:-mock}                              # prefix of .bin/.idx under data/ of the archive; mock: random tokens
TOKENIZER=${TOKENIZER:-}                        # file or folder of --tokenizer-model under data/; empty: vocab.json and merges.txt
SAVE=${SAVE:-$PWD/checkpoints/@NAME@}
OUT=${OUT:-$PWD/output/@NAME@.$JOB}
TCMALLOC=${TCMALLOC:-}                          # a libtcmalloc.so to preload; without one the trainer keeps its memory itself
ELAPSE=${ELAPSE:-@ELAPSE@}                      # seconds of the job, as the directive above says
MARGIN=${MARGIN:-@MARGIN@}                      # seconds before its end in which the trainer saves and leaves
MAX_RESTARTS=${MAX_RESTARTS:-5}                 # after a fault, inside this job
'''

STAGING = '''
local_rank() { echo "${OMPI_COMM_WORLD_LOCAL_RANK:-${PLE_RANK_ON_NODE:-${MPI_LOCALRANKID:-${SLURM_LOCALID:-0}}}}"; }

stage_node() {  # one rank of each node unpacks; nobody else opens the archive
    [ "$(local_rank)" = 0 ] || return 0
    mkdir -p "$LOCAL"
    tar -xf "$ARCHIVE" -C "$LOCAL"
}

use_local() {  # what was unpacked, and nothing that thousands of nodes share
    export PYTHONHOME=$LOCAL PYTHONPATH=$LOCAL/app:$LOCAL/site PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
    export LD_LIBRARY_PATH=/lib64:$LOCAL/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export XDG_CACHE_HOME=$LOCAL/cache MPLCONFIGDIR=$LOCAL/cache TORCHINDUCTOR_CACHE_DIR=$LOCAL/cache
    export XOS_MMM_L_PAGING_POLICY=demand:demand:demand  # pages where their thread runs, not all on one CMG
    export FLIB_CNTL_BARRIER_ERR=FALSE                   # Python starts threads that Fujitsu's runtime does not expect
}

run_rank() {  # one rank: bound to its share of the NUMA nodes that compute; those of assistant cores are much smaller
    local node cpus most=0 nodes=() bind=() preload=${LD_PRELOAD:-} each first
    for node in /sys/devices/system/node/node[0-9]*; do
        cpus=("$node"/cpu[0-9]*)
        ((${#cpus[@]} > most)) && most=${#cpus[@]}
    done
    for node in /sys/devices/system/node/node[0-9]*; do
        cpus=("$node"/cpu[0-9]*)
        ((2 * ${#cpus[@]} >= most)) && nodes+=("${node##*node}")
    done
    if command -v numactl >/dev/null && ((${#nodes[@]} % RANKS_PER_NODE == 0)); then
        each=$((${#nodes[@]} / RANKS_PER_NODE))
        first=$((($(local_rank) % RANKS_PER_NODE) * each))
        bind=("${nodes[@]:first:each}")
        bind=(numactl "--cpunodebind=$(IFS=,; echo "${bind[*]}")" "--membind=$(IFS=,; echo "${bind[*]}")")
    fi
    use_local
    if [ -n "$TCMALLOC" ]; then  # first, before what was preloaded already
        preload=$TCMALLOC${preload:+:$preload}
        export XOS_MMM_L_HPAGE_TYPE=none  # libmpg's malloc would take tcmalloc's place
    fi
    exec "${bind[@]}" env ${preload:+LD_PRELOAD="$preload"} "$LOCAL/bin/python3" "$@"
}

export LOCAL ARCHIVE TCMALLOC RANKS_PER_NODE

if [ "$DATA" = mock ]; then
    DATA_FLAGS=(--mock-data)
elif [ -n "$TOKENIZER" ]; then
    DATA_FLAGS=(--data-path "$LOCAL/data/$DATA" --tokenizer-model "$LOCAL/data/$TOKENIZER")
else
    DATA_FLAGS=(--data-path "$LOCAL/data/$DATA" --vocab-file "$LOCAL/data/vocab.json" --merge-file "$LOCAL/data/merges.txt")
fi

minutes_left() { awk "BEGIN {m = ($ELAPSE - $SECONDS - $MARGIN) / 60; print (m > 0.01 ? m : 0.01)}"; }  # at least one iteration

train() {  # train LABEL [flags]: one run on all ranks
    local label=$1
    shift
    ${START:-launch} "$label" bash -c "$(declare -f local_rank use_local run_rank); run_rank \\"\\$@\\"" run_rank \\
        "$LOCAL/app/pretrain_gpt.py" \\
        "${FLAGS[@]}" "${DATA_FLAGS[@]}" --exit-duration-in-mins "$(minutes_left)" "$@"
}

echo "staging $ARCHIVE on $NODES nodes"
share_archive
trap forget_archive EXIT
launch stage bash -c "$(declare -f local_rank stage_node); stage_node"
'''

RUNS = {
    "train": '''
START=supervise train train --save "$SAVE" --load "$SAVE"
''',
    "resume": '''
# Each step of the chain continues from the last checkpoint; one that finds the run finished leaves at once.
START=supervise train train --save "$SAVE" --load "$SAVE"
''',
    "tcmalloc": '''
# The same iterations with three allocators
[ -f "$TCMALLOC" ] || { echo "TCMALLOC '$TCMALLOC' is no file: give pjsub -x TCMALLOC=/path/to/libtcmalloc.so" >&2; exit 2; }
preload=$TCMALLOC
TCMALLOC='' train stock --allocator stock
TCMALLOC=$preload train tcmalloc --allocator stock
TCMALLOC='' train tuned --allocator tuned
echo "table: python -m benchmarks alloc --from-logs" "$OUT"/{stock,tcmalloc,tuned}/0/0/stdout.1.0
''',
    "frequency": '''
# A job has one clock. For the others submit this file again, the options given replace the directives:
@OTHERS@
train "clock-$CPU_GHZ" --cpu-frequency "$CPU_GHZ"
echo "table: python -m benchmarks alloc --from-logs, this job's $OUT/clock-$CPU_GHZ/0/0/stdout.1.0 and the others'"
''',
    "topology": '''
# Sub-job 0: ranks in node order; 1: the rank map; 2 and 3: the map with one all-reduce algorithm for everything
case $PJM_BULKNUM in
    0) MAP= ;;
    2) MPI_OPTIONS+=(-mca coll_select_allreduce_algorithm ring) ;;
    3) MPI_OPTIONS+=(-mca coll_select_allreduce_algorithm trinaryx3) ;;
esac
train "topology-$PJM_BULKNUM"
''',
}


def flag_lines(flags: Iterable[str]) -> list[str]:
    """pretrain_gpt.py's flags, one with its values to a line."""
    lines: list[str] = []
    for word in flags:
        if word.startswith("--") or not lines:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return ["FLAGS=(", *lines, ")"]


def _filled(text: str, job: Job) -> str:
    replaced = {"@NAME@": job.name, "@ELAPSE@": str(job.elapse), "@MARGIN@": str(MARGIN), "@OTHERS@": pjsub.other_clocks(job)}
    for mark, value in replaced.items():
        text = text.replace(mark, value)
    return text.strip("\n")


def render(job: Job, scheduler: Scheduler = PJSUB) -> str:
    """The script."""
    lines = ["#!/bin/bash", *scheduler.directives(job), "#",
             "# Written by fugaku-megatron job render; after an edit: fugaku-megatron job check FILE",
             *(f"# {line}" for why in job.why for line in textwrap.wrap(why, 130)), "set -euo pipefail", "",
             f"RANKS_PER_NODE={job.ranks_per_node}", *flag_lines(job.flags), "",
             *scheduler.setup(job), "", _filled(PATHS, job), "", _filled(STAGING, job), *scheduler.placement(job), "",
             _filled(RUNS[job.kind], job)]
    return "\n".join(lines) + "\n"
