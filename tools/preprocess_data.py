#!/usr/bin/env python3
"""Megatron-LM's entry point for its data files: the command `fugaku-megatron preprocess` with its flags.

python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod --workers 8
"""

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # the checkout, also where the package is not installed
from tools import environment  # noqa: E402

if __name__ == "__main__":
    environment.use("numpy", "torch", "regex")
    from fugaku_megatron.cli.program import run_command

    sys.exit(run_command("preprocess_data.py", "preprocess"))
