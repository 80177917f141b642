#!/usr/bin/env python3
"""The command `fugaku-megatron job` of the checkout: from a recipe and a number of nodes to a job on Fugaku.

    python scripts/submit.py plan --recipe 30b --nodes 6144
    python scripts/submit.py --help
"""

import sys

from fugaku_megatron.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("submit.py", "job"))
