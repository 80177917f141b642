"""The command fugaku-megatron: its table, help and mistakes; each command is tested with its module."""

from __future__ import annotations

import argparse
import re
import sys
from types import SimpleNamespace

import pytest

from fugaku_megatron import __version__
from fugaku_megatron.cli import program as program_module
from fugaku_megatron.cli.parser import Command, Parser
from fugaku_megatron.host import kernels
from tests.processes import run_python

pytestmark = pytest.mark.system


def test_the_page_says_when_to_use_which(command):
    page = command("--help").stdout
    assert page.startswith("usage: fugaku-megatron COMMAND [flags]\n")
    assert "python -m fugaku_megatron COMMAND" in page
    for name, member in program_module.COMMANDS.items():
        assert f"  {name:10}  {member.when}\n" in page
    assert max(map(len, page.splitlines())) <= 120
    assert command("", code=2).stdout == page


COLLECTIONS = """
import gc, sys
from fugaku_megatron.cli import program
during = []
gc.callbacks.append(lambda *_: during.append("torch" in sys.modules and sys.modules["torch"].__spec__._initializing))
code = program.main([*"train --dry-run --mock-data --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 "
                  "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1".split()])
assert code == 0 and "torch" in sys.modules
sys.exit(f"{sum(during)} collections" if any(during) else 0)
"""


def test_training_imports_torch_without_the_garbage_collector():
    run_python("-c", COLLECTIONS)


def help_page(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        sys.exit(program_module.main([*words, "--help"]))
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.unit
@pytest.mark.parametrize("name", program_module.COMMANDS)
def test_every_command_explains_itself(name, capsys):
    page = help_page(capsys, name)
    assert page.startswith(f"usage: fugaku-megatron {name} ")
    assert f"fugaku-megatron {name}" in page[20:]
    for member, command in getattr(program_module.COMMANDS[name].load(), "COMMANDS", {}).items():
        page = help_page(capsys, name, member)
        assert f"\n\n{command.when}\n\n    fugaku-megatron {name} {member} " in page
        assert "takes the parsed flags" not in page


def test_the_flags_of_a_run_stand_in_megatrons_groups(capsys):
    page = help_page(capsys, "train")
    for group in (
        "model",
        "parallel",
        "batch",
        "optimizer",
        "other flags of Megatron-LM and its forks",
    ):
        assert f"\n{group}:\n" in page


@pytest.mark.unit
@pytest.mark.parametrize(
    "words, own",
    {
        "log": "--follow",
        "plan": "--ramp-divisible",
        "predict": "--machine",
        "job plan": "--mode",
        "job render": "--all",
    }.items(),
)
def test_a_command_lists_its_own_flags_and_names_those_of_train_once(words, own, capsys):
    page = help_page(capsys, *words.split())
    usage, _, rest = page.partition("\n\n")
    assert own in usage and "--hidden-size" not in usage
    for foreign in ("--adam-beta1", "accepted from other", "pytest"):
        assert foreign not in rest
    assert rest.count("every flag of fugaku-megatron train") == 1
    assert rest.rstrip().endswith("see fugaku-megatron train --help")
    assert f"\n    fugaku-megatron {words} " in rest and page.count("\n") < 75


def test_the_version_is_one_line_with_the_instruction_set(command, monkeypatch):
    version = f"fugaku-megatron {__version__} (kernels: {kernels.instruction_set()})\n"
    assert command("--version").stdout == version
    monkeypatch.setitem(sys.modules, kernels.__name__, None)  # as where they are not built
    without = rf"fugaku-megatron {__version__} \(kernels: .*kernels.*\)\n"
    assert re.fullmatch(without, command("--version").stdout)


def test_a_command_is_imported_when_it_is_called():
    program = (
        "import sys; from fugaku_megatron.cli import program; program.main(['--help']); program.main(['train', '--num-layer', '2']); "
        "sys.exit(bool({'torch', 'mpi4py', 'numpy', 'fugaku_megatron.planner.plan'} & sys.modules.keys()))"
    )
    run_python("-c", program)


def raising(error: BaseException) -> Command:
    def main(args: argparse.Namespace) -> int:
        raise error

    return Command("never", lambda parser: None, main)


@pytest.mark.parametrize(
    "error, code, text",
    [
        (ValueError("two\n  lines"), 2, "program: two lines\n"),
        (KeyboardInterrupt(), 130, "program: interrupted\n"),
    ],
)
def test_how_a_command_ends(error, code, text, capsys):
    assert program_module.start("program", raising(error), []) == code
    assert capsys.readouterr().err == text


@pytest.mark.unit
@pytest.mark.parametrize(
    "words",
    [
        "verify",
        "job check",
        "predict --recipe demo --nodes 1 --machine",
        "vocabulary --input README.md --vocab-size 300 --output",
    ],
)
def test_a_name_that_is_too_long_is_a_line(command, words):
    refused = command(words, "n" * 300, code=2)
    refused.mistake(": File name too long: correct the path\n")
    assert re.search(r"n(\.json)?: File", refused.stderr)


def test_a_bug_is_no_mistake_of_the_user():
    with pytest.raises(KeyError):
        program_module.start("program", raising(KeyError("lost")), [])


def test_words_for_another_program_are_kept_where_a_command_passes_them_on():
    parser = Parser()
    parser.add_argument("file")
    with pytest.raises(ValueError, match="unknown flag"):
        parser.parse_args("a -- -x b".split())
    parser.set_defaults(passed=[])
    assert parser.parse_args("a -- -x b".split()) == argparse.Namespace(
        file="a", passed=["-x", "b"]
    )
    assert parser.parse_args(["a"]) == argparse.Namespace(file="a", passed=[])


def test_groups_of_commands_hold_commands(capsys):
    group = SimpleNamespace(
        COMMANDS={"end": Command("to end", lambda parser: None, lambda args: 7)},
        __doc__="A group.\nMore.",
    )
    assert program_module.start("program", group, ["end"]) == 7
    assert program_module.start("program", group, ["-h"]) == 0
    assert capsys.readouterr().out == (
        "usage: program COMMAND [flags]\n\nA group.\n\n  end  to end\n\n"
        "Flags of a command: program COMMAND --help\n"
    )


def test_a_picture_goes_with_a_dry_run(tmp_path, command):
    words = "train --recipe demo --mock-data --png"
    command(words, tmp_path / "p.png", code=2).mistake("needs --dry-run")
    command(words, tmp_path / "none" / "p.png", "--dry-run", code=2).mistake("--png")
