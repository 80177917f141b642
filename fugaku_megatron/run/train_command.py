"""Train a GPT over MPI with Megatron-LM's flags.

    mpiexec -n 512 fugaku-megatron train --recipe 124m --data-path text_document --vocab-file vocab.json --merge-file merges.txt
    fugaku-megatron train --recipe 30b --tensor-model-parallel-size 4 --pipeline-model-parallel-size 48 \
        --dry-run --world-size 12288

`python pretrain_gpt.py` of the checkout takes the same flags. Mistakes among the flags end the job before MPI starts.
"""

from __future__ import annotations

import argparse
import atexit
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.manifest import holds_megatron, latest_iteration, read_head
from ..cli.arguments import Arguments, add_flags, interpret
from ..cli.output_files import check_picture
from ..config.architecture import ARCHITECTURE, with_block
from ..config.fields import FieldValues, check
from ..config.hybrid import with_layers
from ..observe.hang.watchdog import HangSettings, Watchdog
from ..start import environment

if TYPE_CHECKING:
    from ..comm.base import Comm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the training flags, and flags of the dry run and the layout check."""
    parser.usage = "%(prog)s [flags]"  # the list of flags would fill the first screen
    add = parser.add_argument
    add(
        "--png",
        metavar="FILE",
        help="picture of a --dry-run's pipeline over time (needs matplotlib)",
    )
    add(
        "--sys-root",
        metavar="DIR",
        help="with --dry-run: print which cores the ranks of a node compute on, one "
        "rank for each NUMA domain, of the machine whose /sys tree was copied into DIR, or of this one (/)",
    )
    add(
        "--check-layout",
        action="store_true",
        help="train a few narrow layers with random tokens in the run's layout and on one rank, compare every tensor, and stop",
    )
    add(
        "--record",
        type=Path,
        metavar="DIR",
        help="with --check-layout: write the layout's tensors into DIR",
    )
    add(
        "--against",
        type=Path,
        metavar="DIR",
        help="with --check-layout: compare with the tensors that --record wrote into DIR, on another machine, "
        "with another MPI or other kernels, not with one rank",
    )
    add_flags(parser)


def main(args: argparse.Namespace) -> int:
    """Train, or do the dry run or layout check that the flags select; return the exit code."""
    arguments = interpret(with_checkpoint_model(vars(args)), passed=vars(args))
    check(
        args.png is None or arguments.dry_run,
        f"--png {args.png} needs --dry-run: pass both, or --profile for the picture of a real run",
    )
    check(
        args.sys_root is None or arguments.dry_run,
        f"--sys-root {args.sys_root} needs --dry-run: pass both; a real run prints "
        "the mapping of its own nodes",
    )
    if args.png is not None:
        check_picture(args.png)
    check(
        not (args.check_layout and arguments.dry_run),
        "--check-layout runs the layout, and --dry-run runs nothing: pass one of them",
    )
    for name in ("record", "against"):
        directory = getattr(args, name)
        check(
            directory is None or args.check_layout,
            f"--{name} {directory} needs --check-layout: pass both, or leave it out",
        )
    if args.check_layout:
        _run(lambda world: _check_layout(arguments, world, args.record, args.against))
    elif arguments.dry_run:
        _run(
            lambda world: print_plan(arguments, world, png=args.png, sys_root=args.sys_root),
            alone=environment.processes()[1] == 1,
        )
    else:
        _train(arguments)
    return 0


def _run(
    work: Callable[[Comm], object], waits: Callable[[bool], object] = bool, alone: bool = False
) -> None:
    """Run `work` over MPI, or in this process without MPI."""
    with environment.uncollected():
        from ..comm.base import SoloComm
        from ..comm.job import run_or_abort

    run_or_abort(work, SoloComm() if alone else None, waits)


DROPOUT = ("attention_dropout", "hidden_dropout")  # which Megatron-LM takes with the architecture
LENGTH = "seq_length"  # which the command line may change


def with_checkpoint_model(values: FieldValues) -> FieldValues:
    """Return parsed flags, with --use-checkpoint-args the checkpoint's model flags from --load, if
    it exists.

    As Megatron-LM's load_args_from_checkpoint (megatron/training/checkpointing.py). Every process
    reads the manifest.
    """
    load = values.get("load")
    step = values.get("ckpt_step")
    if not (values.get("use_checkpoint_args") and load and Path(load).is_dir()):
        return dict(values)
    if holds_megatron(load):
        saved = _megatron_model(load, step, values)
    else:
        iteration = latest_iteration(load) if step is None else step
        if iteration is None:
            return dict(values)
        saved = with_block(read_head(load, iteration)["config"].get("model", {}))
    kept = {name: value for name, value in with_layers(values).items() if name not in ARCHITECTURE}
    names = [name for name in (*ARCHITECTURE, *DROPOUT) if saved.get(name) is not None]
    if values.get(LENGTH) is None:
        names.append(LENGTH)
    return kept | {name: saved[name] for name in names}


def _megatron_model(load: str, step: int | None, values: FieldValues) -> FieldValues:
    """Return the model that a checkpoint of Megatron-LM describes; with a tokenizer's files its vocabulary."""
    from ..convert.open_weights import open_megatron  # with torch

    vocab_size = values.get("vocab_size")
    source = "--use-checkpoint-args --load"
    ignored = values.get("ignore_saved_arguments") or ()
    saved = asdict(open_megatron(load, step, vocab_size, ignored, source).model)
    if vocab_size is None and any(values.get(name) for name in ("vocab_file", "tokenizer_model")):
        del saved["vocab_size"]
    return saved


def _train(arguments: Arguments) -> None:
    environment.check_limits()  # heartbeats are in the memory that MPI needs
    # Before anything that may hang: torch, MPI, files.
    run = arguments.run
    output = run.output
    settings = HangSettings(
        run.system.hang_timeout_in_secs,
        Path(output.log_file).parent if output.log_file else Path(output.save or "."),
        output.log_file,
        run.ep,
    )
    watchdog = Watchdog.start(settings)
    atexit.register(watchdog.close)

    def pretrain(world: Comm) -> None:
        from . import pretrain  # with torch

        pretrain.pretrain(arguments, world, watchdog)

    _run(pretrain, waits=watchdog.heart.wait)


def _check_layout(
    arguments: Arguments, world: Comm, record: Path | None, against: Path | None
) -> None:
    from ..layout_check.check import Files
    from .check_layout import check_run_layout

    check_run_layout(arguments.run, world, Files(record=record, against=against))


def print_plan(
    arguments: Arguments, world: Comm, png: str | None = None, sys_root: str | None = None
) -> None:
    """Print --dry-run's plan, and draw it into `png`, on rank 0. Collective."""
    from ..comm.agreement import everywhere
    from .dry_run import report
    from .tokenizer import resolve_vocabulary

    run, _ = resolve_vocabulary(arguments.run, world)
    with everywhere():
        picture = png if world.rank == 0 else None
        text = report(run, arguments.world_size or world.size, picture, sys_root)
    if world.rank == 0:
        print(*(f"note: {note}" for note in arguments.notes), text, sep="\n")
