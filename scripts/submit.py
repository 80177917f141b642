#!/usr/bin/env python3
"""From a recipe and a number of nodes to a job on Fugaku. Times and memory it prints are modelled.

    python scripts/submit.py plan --recipe 30b --nodes 6144              what it decides, and why
    python scripts/submit.py render --recipe 124m --nodes 256 -o FILE    the script (to standard output without -o)
    python scripts/submit.py check FILE [-g GROUP]                       every mistake, with the line to change
    python scripts/submit.py submit FILE -g GROUP [--steps 5]            check, then pjsub; --steps: a chain of step jobs

The group can also come from FUGAKU_GROUP. Test: pytest tests/test_jobs_submit.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fugaku_megatron.jobs.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
