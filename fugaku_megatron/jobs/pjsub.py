"""Fugaku's batch system: #PJM directives of a job, and how a script stages and starts there.

Left out: the common body (render.py), submitting (command.py). Test: pytest tests/test_jobs_submit.py
"""

from __future__ import annotations

from . import limits, torus
from .job import Job

LOCAL_TMP = "50Gi"
MPI_OPTIONS = '''MPI_OPTIONS=(
    -mca common_tofu_use_memory_pool 1   # memory registered with Tofu is kept, not registered for every message
    -mca coll_base_reduce_commute_safe 1 # sums in one fixed order: the same bits in every run
)
# All-reduce algorithm: Fujitsu MPI chooses by size and box. To force one: -mca coll_select_allreduce_algorithm ring|trinaryx3'''

FUNCTIONS = '''
share_archive() { llio_transfer "$ARCHIVE"; }  # a copy on every storage node: no file is opened by thousands of compute nodes
forget_archive() { llio_transfer --purge "$ARCHIVE"; }

launch() {  # launch LABEL COMMAND: on all ranks; output of a thousand ranks to a directory
    local label=$1
    shift
    mkdir -p "$OUT/$label"
    mpiexec -n "$((NODES * RANKS_PER_NODE))" "${MPI_OPTIONS[@]}" ${MAP:+--vcoordfile "$MAP"} \\
        -stdout-proc "$OUT/$label/%/1000r/stdout" -stderr-proc "$OUT/$label/%/1000r/stderr" "$@"
}'''


class Pjsub:
    """`render.Scheduler` for pjsub."""

    def directives(self, job: Job) -> list[str]:
        shape = f"{torus.text(job.shape)}:torus:strict-io" if job.shape else str(job.nodes)
        states = ",".join(f"{name}={value}" for name, value in job.mode.states.items())
        lines = [f'-L "node={shape},rscunit=rscunit_ft01,rscgrp={job.resource_group},elapse={limits.clock(job.elapse)}"',
                 f'-L "{states}"',
                 f'--mpi "proc={job.processes},max-proc-per-node={job.ranks_per_node},rank-map-bychip"',
                 *([f"-g {job.group}"] if job.group else []),
                 f"-x PJM_LLIO_GFSCACHE={':'.join(job.volumes)}", f"--llio localtmp-size={LOCAL_TMP}", f"-N {job.name}", "-S"]
        lines += {"resume": ["--step", f'--sparam "jnam={job.name}"'], "topology": ["--bulk", '--sparam "0-3"']}.get(job.kind, [])
        return [f"#PJM {line}" for line in lines]

    def setup(self, job: Job) -> list[str]:
        lines = [f"NODES={job.nodes}", "JOB=${PJM_SUBJOBID:-${PJM_JOBID:?submit this file: pjsub -g GROUP FILE}}",
                 "LOCAL=${PJM_LOCALTMP:?}/fugaku_megatron", *MPI_OPTIONS.splitlines()]
        if job.kind == "frequency":
            lines.append("CPU_GHZ=${CPU_GHZ:-" + f"{job.mode.ghz:.1f}" + "}")
        lines += ["export PLE_MPI_STD_EMPTYFILE=off  # no files for ranks that print nothing", "MAP="]
        return [*lines, *FUNCTIONS.splitlines()]

    def placement(self, job: Job) -> list[str]:
        """The rank map, written on the first node."""
        if job.shape is None:
            return []
        _, tp, pp = job.layout
        return ["MAP=$LOCAL/rank_map", "# tensor-parallel groups inside a node or a 2x3x2 unit, the replicas of a stage in a box",
                f'(use_local; "$LOCAL/bin/python3" -m fugaku_megatron.jobs.torus {torus.text(job.shape)} "$RANKS_PER_NODE" '
                f'{tp} {pp}) > "$MAP"']


def other_clocks(job: Job) -> str:
    """Comments: the command for each of the other modes the site takes."""
    lines = []
    for mode in limits.MODES.values():
        if mode != job.mode and not mode.refused:
            states = ",".join(f"{name}={value}" for name, value in mode.states.items())
            lines.append(f'#   {mode.name}: pjsub -g GROUP -L "{states}" -x CPU_GHZ={mode.ghz:.1f} FILE')
    return "\n".join(lines)
