"""Audits of right ranks that are processes of MPI, over layouts, formats, threads and both MPIs: none may find a difference."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from pathlib import Path

from fugaku_megatron.config.fields import check
from tests.campaigns.faults import jobs
from tests.mpi import launch

RANKS = 4
ITERATIONS = 50  # of a job, each audited
LAYOUTS = (
    "",
    "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather",
    "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --zero-stage 1",
)
FORMATS = ("", "--bf16", "--bf16 --int8", "--fp16", "--kernels torch")
THREADS = (1, 2)


def audit_right_jobs(count: int) -> str:
    """Return a line about `count` audits at least, of each rank and iteration, under every installed MPI."""
    mpis = [mpi for mpi in (launch.mpich(), launch.openmpi()) if mpi is not None]
    check(mpis, launch.MISSING["mpich"])
    begin = time.monotonic()
    audits = dict.fromkeys([mpi.name for mpi in mpis], 0)
    alarms: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        data = jobs.write_data(Path(folder))
        kinds = [*itertools.product(LAYOUTS, FORMATS, THREADS)]
        random.Random(1).shuffle(kinds)  # few of them mix all
        for layout, form, threads in itertools.cycle(kinds):
            if min(audits.values()) >= count:
                break
            flags = (
                f"--data-path {data} --train-iters {ITERATIONS} --audit-interval 1 {layout} {form}"
            )
            words = [*jobs.MODEL, *flags.split()]
            for mpi in mpis:
                job = mpi.run(RANKS, jobs.PROGRAM, *words, code=None, OMP_NUM_THREADS=str(threads))
                audits[mpi.name] += RANKS * ITERATIONS
                if job.returncode:
                    said = [line for line in job.stdout.splitlines() if "results of" in line]
                    alarms.append(f"{mpi.name}, {flags}, {threads} threads: {said or job.stderr}")
            print(f"{audits}, {len(alarms)} alarms", flush=True)
    counts = ", ".join(f"{number} under {name}" for name, number in audits.items())
    seconds = time.monotonic() - begin
    lines = [f"audits of right processes: {counts}; {len(alarms)} alarms ({seconds:.0f} s)"]
    return "\n".join([*lines, *alarms])
