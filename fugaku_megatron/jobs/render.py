"""The text of Fugaku's job scripts: from a job (`job.Job`) to #PJM directives, values, the common part (pjsub.sh) and the run.

Left out: the checks (check.py), Slurm's scripts (slurm.py).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from . import limits, torus
from .job import MARGIN, Job
from .script import COMMON

LOCAL_TMP = "50Gi"
# The lines of a script of the checkout that read the common part.
FIND_COMMON = '''\
for COMMON in "${FUGAKU_MEGATRON:-$PWD}"{,/../..}/fugaku_megatron/jobs/pjsub.sh; do [ -f "$COMMON" ] && break; COMMON=; done
# shellcheck source-path=SCRIPTDIR source=../../fugaku_megatron/jobs/pjsub.sh
. "${COMMON:?pjsub.sh was not found: submit from the checkout, or pass pjsub -x FUGAKU_MEGATRON=/path/to/the/checkout}"
'''
TRAIN = 'START=supervise train train --save "$SAVE" --load "$SAVE"'
# --kind -> what the script runs after the common part
RUNS = {
    "train": TRAIN,
    "resume": f"# Each step of the chain continues from the last checkpoint, and exits at once if the run is finished.\n{TRAIN}",
    "tcmalloc": '''\
# The same iterations with three allocators
[ -f "$TCMALLOC" ] || { echo "TCMALLOC '$TCMALLOC' is not a file: pass pjsub -x TCMALLOC=/path/to/libtcmalloc.so" >&2; exit 2; }
preload=$TCMALLOC
TCMALLOC='' train stock --allocator stock
TCMALLOC=$preload train tcmalloc --allocator stock
TCMALLOC='' train tuned --allocator tuned
echo "table: python -m benchmarks alloc --from-logs" "$OUT"/{stock,tcmalloc,tuned}/0/0/stdout.1.0''',
    "frequency": '''\
# A job runs at one clock. For another clock submit this file again with options that replace the directives:
@OTHERS@
CPU_GHZ=${CPU_GHZ:-@GHZ@}
train "clock-$CPU_GHZ" --cpu-frequency "$CPU_GHZ"
echo "table: python -m benchmarks alloc --from-logs, this job's $OUT/clock-$CPU_GHZ/0/0/stdout.1.0 and the other jobs'"''',
    "topology": '''\
# Sub-job 0: ranks in node order; 1: the rank map; 2 and 3: the rank map with one all-reduce algorithm for every size
case $PJM_BULKNUM in
    0) MAP= ;;
    2) MPI_OPTIONS+=(-mca coll_select_allreduce_algorithm ring) ;;
    3) MPI_OPTIONS+=(-mca coll_select_allreduce_algorithm trinaryx3) ;;
esac
train "topology-$PJM_BULKNUM"''',
}


def flag_lines(flags: Iterable[str]) -> list[str]:
    """pretrain_gpt.py's flags, each on its own line with its values."""
    lines: list[str] = []
    for word in flags:
        if word.startswith("--") or not lines:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return ["FLAGS=(", *lines, ")"]


def directives(job: Job) -> list[str]:
    """The #PJM lines."""
    shape = f"{torus.text(job.shape)}:torus:strict-io" if job.shape else str(job.nodes)
    lines = [f'-L "node={shape},rscunit=rscunit_ft01,rscgrp={job.resource_group},elapse={limits.clock(job.elapse)}"',
             f'-L "{job.mode.directive}"',
             f'--mpi "proc={job.processes},max-proc-per-node={job.ranks_per_node},rank-map-bychip"',
             *([f"-g {job.group}"] if job.group else []),
             f"-x PJM_LLIO_GFSCACHE={':'.join(job.volumes)}", f"--llio localtmp-size={LOCAL_TMP}", f"-N {job.name}", "-S"]
    lines += {"resume": ["--step", f'--sparam "jnam={job.name}"'], "topology": ["--bulk", '--sparam "0-3"']}.get(job.kind, [])
    return [f"#PJM {line}" for line in lines]


def values(job: Job) -> list[str]:
    """The variables that the common part uses."""
    lines = [f"NAME={job.name}", f"NODES={job.nodes}", f"RANKS_PER_NODE={job.ranks_per_node}"]
    if job.shape:
        _, tp, pp = job.layout
        lines += [f'RANK_MAP=({torus.text(job.shape)} "$RANKS_PER_NODE" {tp} {pp})  # node shape, ranks per node, TP, PP',
                  "SPARE_NODES=0  # the rank map uses every node"]
    return [*lines, f"ELAPSE=${{ELAPSE:-{job.elapse}}}  # seconds, the same as in the directive above",
            f"MARGIN=${{MARGIN:-{MARGIN}}}  # seconds before the end of the job at which the trainer saves and exits",
            *flag_lines(job.flags)]


def other_clocks(job: Job) -> str:
    """Comments with the command for each of the other modes that the site accepts."""
    return "\n".join(f'#   {mode.name}: pjsub -g GROUP -L "{mode.directive}" -x CPU_GHZ={mode.ghz:.1f} FILE'
                     for mode in limits.MODES.values() if mode != job.mode and not mode.refused)


def render(job: Job) -> str:
    """The script, which reads the common part from the checkout."""
    run = RUNS[job.kind].replace("@OTHERS@", other_clocks(job)).replace("@GHZ@", f"{job.mode.ghz:.1f}")
    lines = ["#!/bin/bash", *directives(job), "#",
             "# Written by fugaku-megatron job render; after an edit: fugaku-megatron job check FILE",
             *(f"# {line}" for why in job.why for line in textwrap.wrap(why, 130)), "set -euo pipefail", "",
             *values(job), "", FIND_COMMON, run]
    return "\n".join(lines) + "\n"


def self_contained(text: str) -> str:
    """The script with the common part in it, for use without a checkout."""
    return text.replace(FIND_COMMON, COMMON.read_text().removeprefix("#!/bin/bash\n"))
