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

start_words() {  # start_words LABEL RANKS: WORDS are mpiexec's own; output of a thousand ranks to a directory
    mkdir -p "$OUT/$1"
    WORDS=(mpiexec -n "$2" "${MPI_OPTIONS[@]}" ${MAP:+--vcoordfile "$MAP"}
        -stdout-proc "$OUT/$1/%/1000r/stdout" -stderr-proc "$OUT/$1/%/1000r/stderr")
}

launch() {  # launch LABEL COMMAND: on all ranks
    local WORDS label=$1
    shift
    start_words "$label" "$(((NODES + SPARE_NODES) * RANKS_PER_NODE))"
    "${WORDS[@]}" "$@"
}

supervise() {  # supervise LABEL COMMAND: the same, started again after a fault, without nodes that do not answer
    local WORDS label=$1 nodes=() clean=(env -u PYTHONHOME -u PYTHONPATH "LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}")
    shift
    if [ -n "$MAP" ]; then
        nodes=(--hosts "@$MAP" --spare-nodes "$SPARE_NODES" --ranks-per-node "$RANKS_PER_NODE")
        MAP="{map}" start_words "$label" "{ranks}"
        nodes+=(--launcher "${clean[*]@Q} ${WORDS[*]@Q}")
        WORDS=()
    else
        start_words "$label" "$((NODES * RANKS_PER_NODE))"
        WORDS=("${clean[@]}" "${WORDS[@]}")
    fi
    (use_local; exec "$LOCAL/bin/python3" -m fugaku_megatron supervise --max-restarts "$MAX_RESTARTS" "${nodes[@]}" -- \\
        "${WORDS[@]}" "$@")
}'''
NUMBERED = '''
if ((SPARE_NODES)); then  # nodes by their numbers; the last ones are spare
    MAP=$LOCAL/rank_map
    for ((node = 0; node < NODES + SPARE_NODES; node++)); do echo "($node)"; done > "$MAP"
fi'''


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
        spares = "${SPARE_NODES:-0}  # asked for beyond NODES" if job.shape is None else "0  # the map of a torus needs every node"
        lines = [f"NODES={job.nodes}", f"SPARE_NODES={spares}",
                 "JOB=${PJM_SUBJOBID:-${PJM_JOBID:?submit this file: pjsub -g GROUP FILE}}",
                 "LOCAL=${PJM_LOCALTMP:?}/fugaku_megatron", *MPI_OPTIONS.splitlines()]
        if job.kind == "frequency":
            lines.append("CPU_GHZ=${CPU_GHZ:-" + f"{job.mode.ghz:.1f}" + "}")
        lines += ["export PLE_MPI_STD_EMPTYFILE=off  # no files for ranks that print nothing", "MAP="]
        return [*lines, *FUNCTIONS.splitlines()]

    def placement(self, job: Job) -> list[str]:
        """The rank map, written on the first node."""
        if job.shape is None:
            return NUMBERED.strip().splitlines()
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
