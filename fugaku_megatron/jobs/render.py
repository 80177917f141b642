"""Job script text: Fugaku's from a job (`job.Job`), and Slurm's for every cluster and model.

A Fugaku script has #PJM directives, values, the common part (pjsub.sh) and the run. Slurm scripts
(scripts/slurm) share a template and slurm.sh. They stage no files: on some hundred nodes Python can
start from the shared file system.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from ..cli.arguments import parse
from ..config.fields import check
from ..costs.plan import Plan
from ..layout_check.shrink import fewest_ranks
from . import limits, torus
from .job import Job
from .script import COMMON

LOCAL_TMP = "50Gi"
# The lines of a script of the checkout that read the common part.
FIND_COMMON = """\
for COMMON in "${FUGAKU_MEGATRON:-$PWD}"{,/../..}/fugaku_megatron/jobs/pjsub.sh; do [ -f "$COMMON" ] && break; COMMON=; done
# shellcheck source-path=SCRIPTDIR source=../../fugaku_megatron/jobs/pjsub.sh
. "${COMMON:?pjsub.sh was not found: submit from the checkout, or pass pjsub -x FUGAKU_MEGATRON=/path/to/the/checkout}"
"""
TRAIN = 'START=supervise train train --save "$SAVE" --load "$SAVE"'
# --kind -> what the script runs after the common part
RUNS = {
    "train": TRAIN,
    "resume": f"# Each step of the chain continues from the last checkpoint, and exits at once if the run is finished.\n{TRAIN}",
    "tcmalloc": """\
# The same iterations with three allocators
[ -f "$TCMALLOC" ] || { echo "TCMALLOC '$TCMALLOC' is not a file: pass pjsub -x TCMALLOC=/path/to/libtcmalloc.so" >&2; exit 2; }
preload=$TCMALLOC
TCMALLOC='' train stock --allocator stock
TCMALLOC=$preload train tcmalloc --allocator stock
TCMALLOC='' train tuned --allocator tuned
echo "table: fugaku-megatron log" "$OUT"/{stock,tcmalloc,tuned}/0/0/stdout.1.0""",
    "frequency": '''\
# A job runs at one clock. For another clock submit this file again with options that replace the directives:
@OTHERS@
CPU_GHZ=${CPU_GHZ:-@GHZ@}
train "clock-$CPU_GHZ" --cpu-frequency "$CPU_GHZ"
echo "table: fugaku-megatron log, this job's $OUT/clock-$CPU_GHZ/0/0/stdout.1.0 and the other jobs'"
echo "its last column has watts and tokens per joule where every node has an energy counter"''',
    "topology": '''\
# Sub-job 0: ranks in node order; 1: the rank map; 2 and 3: the rank map with one all-reduce algorithm for every size
case $PJM_BULKNUM in
    0) MAP= ;;
    2) MPI_OPTIONS+=(-mca coll_select_allreduce_algorithm ring) ;;
    3) MPI_OPTIONS+=(-mca coll_select_allreduce_algorithm trinaryx3) ;;
esac
train "topology-$PJM_BULKNUM"''',
    "report": r'''# Measures the nodes of this job (docs/report.md); FLAGS only stand for a run that fits on them
mkdir -p "$SAVE"
# shellcheck disable=SC2086 # MORE holds several words: further flags of the report
launch report bash -c "$(declare -f local_rank use_local run_rank); run_rank \"\$@\"" run_rank \
    -m fugaku_megatron report --output "$OUT/report.json" --save "$SAVE" ${MORE:-}
echo "text, plots and figures: $OUT/report.txt, report.html, report.json"''',
}
CHECKED_KINDS = ("train", "resume")  # kinds that --check-layout goes with
REPORT_FLAGS = "--recipe 124m --micro-batch-size 1 --train-iters 20 --eval-iters 0"
REPORT_TIME = "00:30:00"
SLURM_REPORT = r"""#!/bin/bash
#SBATCH --job-name=report
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=@RANKS@
#SBATCH --cpus-per-task=@CPUS@
#SBATCH --exclusive
#SBATCH --time=@TIME@
#SBATCH --output=%x.%j.log
# Written by fugaku-megatron job render --report --slurm @CLUSTER@. Pass the site's own options to sbatch: --partition, --account
# @COMMENTS@
set -euo pipefail
HERE=${FUGAKU_MEGATRON:-$SLURM_SUBMIT_DIR}  # the program's folder, on a shared file system
PYTHON=${PYTHON:-$HERE/.venv/bin/python}
PMI=${PMI:-}                                # pmix for Open MPI, pmi2 for MPICH; empty: the site's default
export PYTHONPATH=$HERE${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Further words are flags of the report, such as --save DIR
srun --kill-on-bad-exit=1 --cpu-bind=cores ${PMI:+--mpi="$PMI"} "$PYTHON" -m fugaku_megatron report \
    --output "$SLURM_SUBMIT_DIR/report.$SLURM_JOB_ID.json" "$@"
"""
LEAVE_SECONDS = 300  # so long before the time limit the trainer gets the signal to save and exit
USABLE = 0.8  # share of a node's memory that the model may use; the rest is for MPI, Python and the system
SLURM_TEMPLATE = r"""#!/bin/bash
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
# @COMMENTS@
#
# @LAYOUT@
set -euo pipefail

@FLAGS@
@CHECK@
COMMON=${FUGAKU_MEGATRON:-$SLURM_SUBMIT_DIR}/fugaku_megatron/jobs/slurm.sh
[ -f "$COMMON" ] || { echo "$COMMON was not found: submit from the checkout, or set FUGAKU_MEGATRON to its path" >&2; exit 2; }
# shellcheck source-path=SCRIPTDIR source=../../../fugaku_megatron/jobs/slurm.sh
. "$COMMON"
"""


def flag_lines(flags: Iterable[str]) -> list[str]:
    """Return the array FLAGS, a flag with its values per line.

    Every word is quoted, so that bash expands no `$(command)` or `*`.
    """
    lines: list[str] = []
    for word in flags:
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(f"    {quoted}")
        else:
            lines[-1] += f" {quoted}"
    return ["FLAGS=(", *lines, ")"]


def render(job: Job) -> str:
    """Return the pjsub script: directives, reasons, values and the commands of the job's kind."""
    shape = f"{torus.text(job.shape)}:torus:strict-io" if job.shape else str(job.nodes)
    options = [
        f'-L "node={shape},rscunit=rscunit_ft01,rscgrp={job.resource_group},elapse={limits.clock(job.elapse)}"',
        f'-L "{job.mode.directive}"',
        f'--mpi "proc={job.processes},max-proc-per-node={job.ranks_per_node},rank-map-bychip"',
        *([f"-g {job.group}"] if job.group else []),
        f"-x PJM_LLIO_GFSCACHE={':'.join(job.volumes)}",
        f"--llio localtmp-size={LOCAL_TMP}",
        f"-N {job.name}",
        "-S",
    ]
    options += {
        "resume": ["--step", f'--sparam "jnam={job.name}"'],
        "topology": ["--bulk", '--sparam "0-3"'],
    }.get(job.kind, [])
    other_clocks = "\n".join(
        f'#   {mode.name}: pjsub -g GROUP -L "{mode.directive}" -x CPU_GHZ={mode.ghz:.1f} FILE'
        for mode in limits.MODES.values()
        if mode != job.mode and not mode.refused
    )
    run = RUNS[job.kind].replace("@OTHERS@", other_clocks)
    if job.check_ranks is not None:
        run = f"check_layout {job.check_ranks}  # ends the job if the layout trains differently\n{run}"
    lines = [
        "#!/bin/bash",
        *(f"#PJM {option}" for option in options),
        "#",
        "# Written by fugaku-megatron job render; after an edit: fugaku-megatron job check FILE",
        *(f"# {line}" for why in job.why for line in textwrap.wrap(why, 130)),
        "set -euo pipefail",
        "",
        *values(job),
        "",
        FIND_COMMON,
        run.replace("@GHZ@", f"{job.mode.ghz:.1f}"),
    ]
    return "\n".join(lines) + "\n"


def values(job: Job) -> list[str]:
    """Return the script's bash assignments: sizes, rank map, times in seconds, and FLAGS."""
    lines = [f"NAME={job.name}", f"NODES={job.nodes}", f"RANKS_PER_NODE={job.ranks_per_node}"]
    if job.shape:
        meaning = "node shape, ranks per node, TP, PP"
        if job.layout.cp > 1:
            meaning += ", CP"
        lines += [
            f'RANK_MAP=({torus.text(job.shape)} "$RANKS_PER_NODE" {torus.sizes(job.layout)})  # {meaning}',
            "SPARE_NODES=0  # the rank map uses every node",
        ]
    return [
        *lines,
        f"ELAPSE=${{ELAPSE:-{job.elapse}}}  # seconds, the same as in the directive above",
        f"MARGIN=${{MARGIN:-{limits.MARGIN}}}  # seconds before the end of the job at which the trainer saves and exits",
        *flag_lines(job.flags),
    ]


def self_contained(text: str) -> str:
    """Return the script with the common part inside."""
    return text.replace(FIND_COMMON, COMMON.read_text().removeprefix("#!/bin/bash\n"))


class Recipe(NamedTuple):
    """A model on a cluster. flags: further flags of the trainer"""

    recipe: str
    nodes: int
    tp: int
    pp: int
    flags: str = ""

    @property
    def words(self) -> list[str]:
        parallel = (
            f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}"
        )
        return f"--recipe {self.recipe} {parallel} {self.flags}".split()


class Cluster(NamedTuple):
    """A kind of node. gib: its memory. comments: lines such as modules to load."""

    name: str
    cores: int
    ranks_per_node: int
    gib: int
    comments: tuple[str, ...]
    recipes: tuple[Recipe, ...]


FP32_LARGE = "--recompute-granularity full --zero-stage 1"
BF16 = "--bf16 --zero-stage 1"
BF16_LARGE = "--bf16 --zero-stage 1 --recompute-granularity full"
CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster(
            "a64fx",
            cores=48,
            ranks_per_node=4,
            gib=32,
            comments=(
                "A64FX (Ookami, Deucalion): four core memory groups of 12 cores and 8 GiB, one rank on each",
                "module load gcc openmpi            # names differ between sites, see `module avail`",
            ),
            recipes=(
                Recipe("124m", 16, tp=1, pp=1),
                Recipe("1.3b", 32, tp=4, pp=1, flags=FP32_LARGE),
                Recipe("13b", 96, tp=4, pp=8, flags=FP32_LARGE),
                Recipe("30b", 256, tp=4, pp=32, flags=FP32_LARGE),
            ),
        ),
        Cluster(
            "grace",
            cores=144,
            ranks_per_node=2,
            gib=480,
            comments=(
                "NVIDIA Grace CPU Superchip: two processors of 72 cores, one rank on each",
                "module load gcc openmpi",
            ),
            recipes=(
                Recipe("124m", 4, tp=1, pp=1, flags="--micro-batch-size 4"),
                Recipe("1.3b", 8, tp=1, pp=1, flags=BF16),
                Recipe("13b", 16, tp=2, pp=2, flags=BF16_LARGE),
                Recipe("30b", 32, tp=2, pp=4, flags=BF16_LARGE),
            ),
        ),
        Cluster(
            "x86",
            cores=128,
            ranks_per_node=8,
            gib=256,
            comments=(
                "x86-64, two sockets of 64 cores; for others change --ntasks-per-node x --cpus-per-task, one rank for each NUMA node",
                "module load gcc openmpi            # or the site's MPICH or Intel MPI",
            ),
            recipes=(
                Recipe("124m", 4, tp=1, pp=1, flags="--micro-batch-size 2"),
                Recipe("1.3b", 8, tp=2, pp=1, flags=BF16),
                Recipe("13b", 24, tp=4, pp=4, flags=BF16_LARGE),
                Recipe("30b", 48, tp=8, pp=6, flags=BF16_LARGE),
            ),
        ),
    )
}
SLURM_RECIPES = [recipe.recipe for recipe in CLUSTERS["x86"].recipes]


def fill(template: str, cluster: Cluster, **values: object) -> str:
    values |= {
        "ranks": cluster.ranks_per_node,
        "cpus": cluster.cores // cluster.ranks_per_node,
        "cluster": cluster.name,
        "comments": "\n# ".join(cluster.comments),
    }
    return re.sub("@([A-Z]+)@", lambda mark: str(values[mark[1].lower()]), template)


def render_slurm(cluster: Cluster, job: Recipe, checks_layout: bool = False) -> str:
    """Return the sbatch script. ValueError if the recipe does not fit into the nodes' memory."""
    plan = Plan.of(parse(["--mock-data", *job.words]).run, job.nodes * cluster.ranks_per_node)
    mib = max(stage.total for stage in plan.memory) / 2**20
    usable = USABLE * cluster.gib * 1024 / cluster.ranks_per_node
    check(
        mib <= usable,
        f"{cluster.name}, {job.recipe}: {mib:.0f} MiB per rank (model) are more than the {usable:.0f} that "
        f"each of {cluster.ranks_per_node} ranks on {cluster.gib} GiB can use: raise nodes, TP or PP",
    )
    checked = ""
    if checks_layout:
        ranks = fewest_ranks(plan.config, plan.layout)
        checked = f"CHECK_RANKS=${{CHECK_RANKS:-{ranks}}}  # the fewest that hold a replica; 0: no check\n"
    return fill(
        SLURM_TEMPLATE,
        cluster,
        name=f"gpt_{job.recipe.replace('.', '_')}",
        nodes=job.nodes,
        leave=LEAVE_SECONDS,
        flags="\n".join(flag_lines(job.words)),
        check=checked,
        layout=f"{plan.layout}; {mib:.0f} MiB on the fullest rank (model)",
    )


def slurm_scripts(recipe: str | None = None, checks_layout: bool = False) -> dict[str, str]:
    return {
        f"{cluster.name}/run_{job.recipe}.sbatch": render_slurm(cluster, job, checks_layout)
        for cluster in CLUSTERS.values()
        for job in cluster.recipes
        if recipe in (None, job.recipe)
    }
