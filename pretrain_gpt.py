#!/usr/bin/env python3
r"""Train a GPT over MPI with Megatron-LM's flags.

    mpiexec -n 512 python pretrain_gpt.py --recipe 124m --data-path text_document --vocab-file vocab.json --merge-file merges.txt
    python pretrain_gpt.py --recipe 30b --tensor-model-parallel-size 4 --pipeline-model-parallel-size 48 \
        --dry-run --world-size 12288
    python pretrain_gpt.py --help
"""

import sys

from fugaku_megatron.comm.agreement import everywhere
from fugaku_megatron.comm.launch import run_or_abort
from fugaku_megatron.run.arguments import Arguments, parse


def main(world) -> None:
    with everywhere():
        arguments = parse(sys.argv[1:])
    if arguments.dry_run:
        return print_plan(arguments, world)
    from fugaku_megatron.training.pretrain import pretrain

    pretrain(arguments, world)


def print_plan(arguments: Arguments, world) -> None:
    from fugaku_megatron.training.dry_run import report
    from fugaku_megatron.training.pretrain import with_vocabulary

    with everywhere():
        text = report(with_vocabulary(arguments.run, world), arguments.world_size or world.size)
    if world.rank == 0:
        print(*(f"note: {note}" for note in arguments.notes), text, sep="\n")


if __name__ == "__main__":
    run_or_abort(main)
