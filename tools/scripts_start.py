"""Which training scripts of others start here, and all reasons of each one that does not.

    python -m tools.scripts_start FILE.jsonl

Each line of the file is a script: {"source", "name", "kind", "flags": [[flag, value], ...]}. A value that is null, which a
variable of the script's shell had, becomes a plausible value of the flag's type, and files that are not there do not count. A
script starts when `fugaku-megatron train` builds its run and plans it (--dry-run) at a world size that fits the layout.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fugaku_megatron.cli.arguments import Arguments, interpret
from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.batches import sizes_of
from fugaku_megatron.config.fields import Refused
from fugaku_megatron.config.recipes import GPT2_VOCABULARY
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.run import train_command
from fugaku_megatron.run.checks import check_early
from fugaku_megatron.run.dry_run import report
from fugaku_megatron.run.tokenizer import read_tokenizer, with_vocabulary

# Values that a script's shell did not tell, by the end of the flag's name, the first that fits; others are 1.
PLAUSIBLE = {
    "--num-layers": "24",
    "--hidden-size": "1024",
    "--num-attention-heads": "16",
    "--seq-length": "2048",
    "--max-position-embeddings": "2048",
    "--global-batch-size": "256",
    "warmup-iters": "10",
    "warmup-samples": "1000",
    "warmup-tokens": "1e6",
    "-iters": "1000000",
    "-samples": "100000000",
    "-tokens": "1e12",
    "-interval": "1000",
    "--min-lr": "1e-6",
    "-lr": "1e-4",
}
FILES = ("vocab_file", "merge_file", "tokenizer_model")
MICROBATCHES = 4  # of a pipeline stage, at least, in the layout that is planned


@dataclass(frozen=True)
class Script:
    """A line of the file. reasons: why it does not start; none where it starts."""

    source: str
    name: str
    kind: str
    reasons: tuple[str, ...]


# Flags that exclude each other, of which a script has one in each branch of its shell, and the list has both: the first is taken.
BRANCHES = (("--mock-data", "--data-path"),)


def words(flags: Sequence[Sequence[str | None]], parser: Parser) -> Iterator[str]:
    """Yield the command line that these flags with their values are."""
    known = {option: action for action in parser._actions for option in action.option_strings}
    given = {name for name, _ in flags}
    left_out = {second for first, second in BRANCHES if first in given}
    for name, value in flags:
        if name in left_out:
            continue
        yield name
        action = known.get(name)
        if action is None or action.nargs == 0:
            continue
        text = (value or "").split(" #")[0].strip() or plausible(name, action)
        values = [text] if action.nargs is None else shlex.split(text)
        yield from values
        if isinstance(action.nargs, int):  # of several values the list has the first
            yield from values[-1:] * (action.nargs - len(values))


def plausible(name: str, action: argparse.Action) -> str:
    """Return a value of the flag's type."""
    if action.choices:
        return str(next(iter(action.choices)))
    otherwise = (
        name.strip("-") if action.type in (None, str) else "1"
    )  # files and folders of different names
    return next((value for end, value in PLAUSIBLE.items() if name.endswith(end)), otherwise)


def world_size(run: RunConfig) -> int:
    """Return the number of ranks that fit the layout and the batch, as many data-parallel ones as leave each stage some micro-batches."""
    parallel = run.parallel
    each = run.batch.micro_batch_size
    stages = parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    tp = parallel.tensor_model_parallel_size
    of_experts = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or tp)
    least = math.lcm(of_experts, tp) // tp  # data-parallel ranks that the experts need
    count = max(1, math.gcd(*sizes_of(run, run.batch.global_batch_size or each).sizes()) // each)
    fitting = (
        dp
        for dp in range(count // (MICROBATCHES * stages), 1, -1)
        if count % (dp * stages) == 0 and dp % least == 0
    )
    return next(fitting, least) * stages * tp


def vocabulary(run: RunConfig) -> RunConfig:
    """Return the run with its vocabulary; GPT-2's size where the tokenizer's files are not there."""
    missing = [
        file for name in FILES if (file := getattr(run.data, name)) and not Path(file).exists()
    ]
    try:
        tokenizer = read_tokenizer(run, SoloComm())
        if tokenizer or run.model.vocab_size:
            return with_vocabulary(run, tokenizer)
    except ValueError as error:
        if not any(f" {file}: " in str(error) for file in missing):
            raise
    return with_vocabulary(
        run,
        {
            "vocab_size": min(
                run.model.vocab_size or GPT2_VOCABULARY, run.model.padded_vocab_size or 2**30
            )
        },
    )


@functools.cache
def train_parser() -> Parser:
    """Return the parser of `train`."""
    parser = Parser()
    train_command.add_arguments(parser)
    return parser


def plan(flags: Sequence[Sequence[str | None]]) -> Arguments:
    """Return what `train --dry-run` does with these flags. ValueError, or Refused, as it does."""
    parser = train_parser()
    arguments = interpret(vars(parser.parse_args([*words(flags, parser)])))
    run = vocabulary(arguments.run)
    if not run.data.files:  # a part of a script, to which its user adds the data and the length
        run = replace(run, data=replace(run.data, mock_data=True))
    if not (run.training.train_iters or run.training.train_samples or run.training.train_tokens):
        run = replace(run, training=replace(run.training, train_iters=int(PLAUSIBLE["-iters"])))
    check_early(run, world_size(run))
    report(run, world_size(run))
    return arguments


def reasons(flags: Sequence[Sequence[str | None]]) -> tuple[str, ...]:
    """Return the reasons why a script with these flags does not start; none if the script starts."""
    try:
        plan(flags)
    except Refused as error:
        return error.lines
    except ValueError as error:
        return (str(error),)
    return ()


def read(path: str) -> Iterator[dict[str, Any]]:
    """Yield the scripts of a file. ValueError for one that is not of this form."""
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            script = json.loads(line)
            yield {name: script[name] for name in ("source", "name", "kind", "flags")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a list of scripts, one JSON object a line ({error}): pass one as "
            "tests/megatron_scripts.jsonl"
        ) from None


def totals(scripts: Iterable[Script]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (source, kind) -> scripts that start, and all of them."""
    counts: dict[tuple[str, str], Counter[bool]] = {}
    for script in scripts:
        counts.setdefault((script.source, script.kind), Counter())[not script.reasons] += 1
    return {key: (count[True], count.total()) for key, count in sorted(counts.items())}


def main() -> int:
    """Report every script of a file and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="JSON lines, a script each")
    scripts = []
    try:
        for line in read(parser.parse_args().file):
            script = Script(line["source"], line["name"], line["kind"], reasons(line["flags"]))
            print(
                f"{script.source} {script.name} ({script.kind}):",
                *(["starts"] if not script.reasons else []),
                *(f"\n  {reason}" for reason in script.reasons),
                flush=True,
            )
            scripts.append(script)
    except ValueError as error:
        print(f"scripts_start: {error}", file=sys.stderr)
        return 2
    for (source, kind), (starting, count) in totals(scripts).items():
        print(f"{source}, {kind}: {starting} of {count} start")
    return 0


if __name__ == "__main__":
    sys.exit(main())
