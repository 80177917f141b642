#!/usr/bin/env python3
"""Megatron-LM's entry point for its data files: the command `fugaku-megatron preprocess` with its flags.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod --workers 8
"""

import sys

from fugaku_megatron.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("preprocess_data.py", "preprocess"))
