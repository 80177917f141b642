#!/usr/bin/env python3
"""Megatron-LM's entry point: the command `fugaku-megatron train` with its flags.

mpiexec -n 512 python pretrain_gpt.py --recipe 124m --data-path text_document --vocab-file vocab.json --merge-file merges.txt
python pretrain_gpt.py --help
"""

import sys

from fugaku_megatron.start import signals

if __name__ == "__main__":
    signals.handle_signals("pretrain_gpt.py", ["train", *sys.argv[1:]])
    from tools import environment

    environment.use("numpy", "torch")
    from fugaku_megatron.cli.program import run_command

    sys.exit(run_command("pretrain_gpt.py", "train"))
