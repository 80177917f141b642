"""The scripts in scripts/pjsub, each with the options that render it.

    fugaku-megatron job render --all scripts/pjsub     writes them again

Test: pytest tests/test_jobs_submit.py
"""

from __future__ import annotations

import shlex

from . import options, render

SHORT = "--train-iters 20 --eval-iters 0 --elapse 01:00:00"
SCRIPTS = {
    "run_124m.sh": "--recipe 124m --nodes 256",
    "run_1.3b.sh": "--recipe 1.3b --nodes 384 --micro-batch-size 1",
    "run_13b.sh": "--recipe 13b --nodes 1152 --micro-batch-size 1",
    "run_30b.sh": "--recipe 30b --nodes 6144 --micro-batch-size 1",
    "resume.sh": "--recipe 124m --nodes 64 --kind resume --name gpt_124m_chain",
    "compare_tcmalloc.sh": f"--recipe 124m --nodes 16 --ranks-per-node 1 --tensor-model-parallel-size 1 --micro-batch-size 1 "
                           f"--pipeline-model-parallel-size 1 --kind tcmalloc --name compare_tcmalloc {SHORT}",
    "compare_frequency.sh": f"--recipe 124m --nodes 16 --kind frequency --name compare_frequency {SHORT}",
    # with tensor parallelism, whose sums a rank map is for, though the model finds a faster layout without
    "sweep_topology.sh": "--recipe 30b --nodes 384 --micro-batch-size 1 --ranks-per-node 4 --tensor-model-parallel-size 8 "
                         "--kind topology --name sweep_topology --train-iters 10 --eval-iters 0 --elapse 03:00:00",
}


def text(name: str) -> str:
    """The script as it is rendered."""
    return render.render(options.job_from_words(shlex.split(SCRIPTS[name])))
