"""GPT training on CPU clusters with Megatron-LM's flags, from text to a job's log. Also: python -m fugaku_megatron COMMAND

    fugaku-megatron --help                 which command to use when
    fugaku-megatron COMMAND --help         the flags of a command
    fugaku-megatron --version              the version, and the instruction set of the kernels

A command is a module with add_arguments(parser) and main(args) -> exit code, imported on demand; a command group has COMMANDS.
A user's mistake (ValueError) is one line and exit code 2, also under mpiexec -n N; after MPI has started, see comm/job.py.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .. import __version__
from ..config.fields import Refused
from ..start import environment, exit_codes, signals
from ..start.exit_codes import ExitCode
from .parser import Command, Parser, nearest

PACKAGE = __package__.partition(".")[0]
PROGRAM = "fugaku-megatron"
HELP = ("-h", "--help")


class ModuleCommand(NamedTuple):
    """A command in a module. when: one line of help. prints_text: standard output is a model's text."""

    module: str
    when: str
    prints_text: bool = False

    def load(self) -> Any:
        if self.prints_text:
            environment.print_as_is()
        with environment.uncollected():
            return importlib.import_module(f"{PACKAGE}.{self.module}")


COMMANDS = {
    "train": ModuleCommand(
        "run.train_command",
        "train a GPT: mpiexec -n N fugaku-megatron train ...; --dry-run plans it",
    ),
    "vocabulary": ModuleCommand(
        "data.preprocessing.vocabulary",
        "before preprocess: train vocab.json and merges.txt on your own text",
    ),
    "preprocess": ModuleCommand(
        "data.preprocessing.preprocess",
        "before training: turn text into Megatron's .bin/.idx files of tokens",
    ),
    "verify": ModuleCommand(
        "checkpoint.verify",
        "before a long job or after a fault: check every byte of saved checkpoints",
    ),
    "convert": ModuleCommand(
        "convert.convert_command", "weights from and to Hugging Face and Megatron-LM"
    ),
    "generate": ModuleCommand(
        "inference.generate",
        "after training: continue a text with a checkpoint",
        prints_text=True,
    ),
    "evaluate": ModuleCommand(
        "inference.evaluate", "after training: perplexity of a text or chats with a checkpoint"
    ),
    "log": ModuleCommand(
        "observe.log.log_command", "during and after a run: its log as a table, CSV and picture"
    ),
    "plan": ModuleCommand(
        "planner.plan",
        "before asking for nodes: search the fastest parallel layout for a model (modelled)",
    ),
    "predict": ModuleCommand(
        "planner.predict", "the layout is known: seconds, TFLOPs and memory of that run (modelled)"
    ),
    "job": ModuleCommand(
        "jobs.job_command", "nodes of a cluster: plan, render, check and submit job scripts"
    ),
    "supervise": ModuleCommand(
        "jobs.supervise",
        "in a job: start the run, and restart it after a fault without the failed node",
    ),
    "report": ModuleCommand(
        "report.report_command",
        "is this machine good for training? measure it, and send the figures to others",
    ),
    "calibrate": ModuleCommand(
        "calibration.calibrate_command",
        "a machine that plan and predict do not know: measure this host for them",
    ),
    "tables": ModuleCommand(
        "reproduction.tables",
        "the published benchmark tables: printed, corrected, recomputed and modelled",
    ),
}


def help_page(program: str, purpose: str, commands: Mapping[str, Any]) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {command.when}" for name, command in commands.items()]
    flags = f"Flags of a command: {program} COMMAND --help"
    return "\n".join([f"usage: {program} COMMAND [flags]", "", purpose, "", *lines, "", flags])


def guarded(program: str, work: Callable[[], int]) -> int:
    """Return `work`'s exit code; a user's mistake is one line on stderr and code 2, an interrupt
    code 130.
    """
    try:
        return _flushed(work)
    except ValueError as error:
        exit_codes.report_everywhere(f"{program}: {_message(error)}")
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        exit_codes.report_everywhere(f"{program}: interrupted")
        return ExitCode.INTERRUPTED
    except (MemoryError, ImportError, OSError, RuntimeError) as error:
        if line := exit_codes.memory_error(error):
            print(f"{program}: rank {environment.rank()}: {line}", file=sys.stderr, flush=True)
            return exit_codes.leave_alone(ExitCode.FAILED)
        if line := exit_codes.path_error(error):
            exit_codes.report_everywhere(f"{program}: {line}")
            return ExitCode.USER_ERROR
        line = exit_codes.output_error(error)
        if line is None:
            raise
        if line:
            exit_codes.report_everywhere(f"{program}: {line}")
        exit_codes.close_output()
        return ExitCode.OUTPUT


def _message(error: ValueError) -> str:
    mistakes = error.lines if isinstance(error, Refused) else (str(error),)
    lines = [" ".join(line.split()) for line in mistakes]
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join([f"{len(lines)} flags are refused:", *lines])


def _flushed(work: Callable[[], int]) -> int:
    """Run `work` and flush standard output, also after SystemExit as in --help."""
    try:
        return work()
    finally:
        if not isinstance(sys.exc_info()[1], OSError):
            sys.stdout.flush()


def start(program: str, command: Any, words: Sequence[str], examples: Sequence[str] = ()) -> int:
    """Run a command or group, and return the exit code.

    examples: lines of --help, for a command without a docstring
    """
    if hasattr(command, "COMMANDS"):
        return guarded(program, lambda: _start_one_of(program, command, words))
    return guarded(program, lambda: command.main(_parsed(program, command, words, examples)))


def _start_one_of(program: str, group: Any, words: Sequence[str]) -> int:
    if not words or words[0] in HELP:
        with _one_process_prints():
            print(help_page(program, group.__doc__.splitlines()[0], group.COMMANDS))
        return ExitCode.FINISHED if words else ExitCode.USER_ERROR
    environment.check_environment()
    name = words[0]
    names = list(group.COMMANDS)
    if name not in names:
        known = nearest(name, names, f": pass {' or '.join(names)}")
        raise ValueError(f"command {name} is unknown{known}")
    examples = [
        line
        for line in group.__doc__.splitlines()
        if line.startswith("    ") and f" {name} " in line
    ]
    return start(f"{program} {name}", group.COMMANDS[name].load(), words[1:], examples)


def _parsed(program: str, command: Any, words: Sequence[str], examples: Sequence[str]) -> Any:
    description = command.__doc__
    if isinstance(command, Command):
        description = "\n".join([command.when, "", *examples])
    parser = Parser(prog=program, description=description)
    command.add_arguments(parser)
    with _one_process_prints():
        return parser.parse_args(words)


@contextlib.contextmanager
def _one_process_prints() -> Iterator[None]:
    if environment.rank() == 0:
        yield
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            yield


def _print_version() -> int:
    try:
        kernels = importlib.import_module(f"{PACKAGE}.host.kernels").instruction_set()
    except ImportError as error:
        kernels = str(error)
    with _one_process_prints():
        print(f"{PROGRAM} {__version__} (kernels: {kernels})")
    return ExitCode.FINISHED


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        environment.open_streams()
        signals.handle_signals(PROGRAM, words)
    if words == ["--version"]:
        return guarded(PROGRAM, _print_version)
    return start(PROGRAM, sys.modules[__name__], words)


def run_command(program: str, name: str) -> int:
    def work() -> int:
        environment.check_environment()
        return start(program, COMMANDS[name].load(), sys.argv[1:])

    environment.open_streams()
    signals.handle_signals(program, [name, *sys.argv[1:]])
    return guarded(program, work)
