#!/usr/bin/env python3
"""Megatron-LM's entry point: the command `fugaku-megatron train` with its flags.

mpiexec -n 512 python pretrain_gpt.py --recipe 124m --data-path text_document --vocab-file vocab.json --merge-file merges.txt
python pretrain_gpt.py --help
"""

import sys

from fugaku_megatron.comm import launcher

if __name__ == "__main__":
    launcher.handle_signals("pretrain_gpt.py", ["train", *sys.argv[1:]])
    from tools import environment

    environment.use("numpy", "torch")
    from fugaku_megatron.cli import run_command

    sys.exit(run_command("pretrain_gpt.py", "train"))
