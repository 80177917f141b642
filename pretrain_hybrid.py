#!/usr/bin/env python3
"""Megatron-LM's entry point for a HybridModel: the command `fugaku-megatron train` with its flags.

mpiexec -n 2 python pretrain_hybrid.py --hybrid-layer-pattern '*-*-|*-*-' --pipeline-model-parallel-size 2 ...
python pretrain_hybrid.py --help
"""

import sys

from fugaku_megatron.start import signals

if __name__ == "__main__":
    signals.handle_signals("pretrain_hybrid.py", ["train", *sys.argv[1:]])
    from tools import environment

    environment.use("numpy", "torch")
    from fugaku_megatron.cli.program import run_command

    sys.exit(run_command("pretrain_hybrid.py", "train"))
