#!/usr/bin/env python3
"""The command `fugaku-megatron job` of the checkout: from a recipe and a number of nodes to a job on Fugaku.

python scripts/submit.py plan --recipe 30b --nodes 6144
python scripts/submit.py --help
"""

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # the checkout, also where the package is not installed
from tools import environment  # noqa: E402

if __name__ == "__main__":
    environment.use("numpy")
    from fugaku_megatron.cli.program import run_command

    sys.exit(run_command("submit.py", "job"))
