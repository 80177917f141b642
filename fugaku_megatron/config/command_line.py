"""What every command line of the project is made of: a parser whose mistakes are one line, commands with a line of help, and files.

A path that cannot be written is refused before the work, and a failure while writing is one line.
Left out: a run's flags (`arguments`), the commands themselves and the report of mistakes (`cli`).
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import itertools
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .checks import Refused, check, flag
from .yaml_file import read_yaml

MAX_MESSAGE = 400  # characters of a mistake that repeats what was given
_FLAG = re.compile("--?[A-Za-z]")  # how a flag begins


@dataclass(frozen=True)
class Command:
    """A command of a command line. when: one line, when to use it; main: takes the parsed flags and returns the exit code."""

    when: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]

    def load(self) -> Command:
        return self


class Parser(argparse.ArgumentParser):
    """Raises ValueError, with one line, for mistakes and for flags that it does not know, instead of printing the usage.

    All mistakes of a command line are raised at once: unknown flags, values that a flag does not take, and what `mistakes_among`
    finds among the parsed values, told whether there are others; without a mistake, `completed` changes the values.
    With set_defaults(passed=[]) the words after "--" are kept there as they are, for another program.
    """

    completed: Callable[[argparse.Namespace], None] | None = None
    mistakes_among: Callable[[Mapping[str, Any], bool], Iterable[str]] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        self._wrong_values: list[str] | None = (
            None  # a list while parse_args collects them; a family's own parser does not
        )

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """A value that the flag does not take is kept for the message, and parsing goes on with None."""
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if self._wrong_values is None or not action.option_strings:
                raise
            self._wrong_values.append(_short(str(error)))
            return None

    def error(self, message: str) -> NoReturn:
        raise ValueError(_short(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Argparse's own ignores an error of standard output, so that --help onto a full disk would not be an error."""
        (file or sys.stderr).write(message)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = (
            words.index("--")
            if "--" in words and self.get_default("passed") is not None
            else len(words)
        )
        wrong: list[str] = []
        self._wrong_values = wrong
        try:
            values, unknown = self.parse_known_args(words[:end], namespace)
        finally:
            self._wrong_values = None
        mistakes = (
            [self._too_many(words[:end], unknown) or self._unknown(unknown)] if unknown else []
        )
        mistakes += wrong
        if self.mistakes_among:
            mistakes += self.mistakes_among(vars(values), bool(mistakes))
        if mistakes:
            raise Refused(mistakes)
        if self.completed:
            self.completed(values)
        if words[end:]:
            values.passed = words[end + 1 :]
        return values

    def _too_many(self, words: Sequence[str], unknown: Sequence[str]) -> str | None:
        """Which flag takes fewer values than follow it, where `unknown` is not a flag but such a value; None elsewhere."""
        known = {option: action for action in self._actions for option in action.option_strings}
        for start, word in enumerate([] if any(map(_FLAG.match, unknown)) else words):
            name, equals, value = word.partition("=")
            nargs = known[name].nargs if name in known else "unknown"
            if nargs not in (None, 0, *range(1, 10)):
                continue
            given = [value] * bool(equals) + [
                *itertools.takewhile(lambda w: not _FLAG.match(w), words[start + 1 :])
            ]
            count = nargs if isinstance(nargs, int) else 1
            if not set(given[count:]) & set(unknown):
                continue
            takes = {0: "no value", 1: "one value"}.get(count, f"{count} values")
            if not count:
                return f"{name} takes {takes}: leave out {given[0]}"
            quoted = (
                f"put them in quotes, {name} '{' '.join(given)}', or "
                if count == 1 and known[name].type is str
                else ""
            )
            more = " ".join(given[count:])
            return f"{name} takes {takes}, and {len(given)} words follow it, {' '.join(given)}: {quoted}leave out {more}"
        return None

    def _unknown(self, words: Sequence[str]) -> str:
        """All unknown flags, or the first word that is not a flag, each with the nearest known flag."""
        flags = [option for action in self._actions for option in action.option_strings]
        wrong = list(dict.fromkeys(filter(_FLAG.match, words))) or [words[0]]
        near = [nearest(word.split("=")[0], flags, "", cutoff=0.7) for word in wrong]
        shown = [
            word + end.replace(": did", " (did").replace("?", "?)")
            for word, end in zip(wrong, near)
        ]
        if len(wrong) == 1:
            return f"unknown flag {wrong[0]}" + (near[0] or ": see --help for those there are")
        return f"unknown flags {', '.join(shown)}: see --help for those there are"


def _short(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ..."


def nearest(word: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The end of a message about an unknown word: the known word nearest to it, or `otherwise` where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f": did you mean {near[0]}?" if near else otherwise


# Files that commands write, and tables ------------------------------------------------------------------------------------------


def check_file(flag: str, file: str | Path | None) -> None:
    """Raises ValueError, one line, when `file`, the value of `flag`, cannot be written. None: the flag was left out."""
    if file is None:
        return
    check(str(file) not in ("", "."), f"{flag} {str(file)!r} is not a name: pass a file")
    try:
        _check_place(flag, file)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ValueError(f"{flag} {file}: {error.strerror}: pass another file") from None


def _check_place(flag: str, file: str | Path) -> None:
    folder = Path(file).absolute().parent
    check(
        "\0" not in str(file),
        f"{flag} {str(file)!r} holds a zero byte, which no name may: pass another file",
    )
    check(
        folder.is_dir(),
        f"{flag} {file}: {folder} is not a directory: make it, or pass another file",
    )
    check(not Path(file).is_dir(), f"{flag} {file} is a directory: pass a file in it")
    check(
        not Path(file).is_fifo(),
        f"{flag} {file} is a FIFO, which would wait for a reader: pass a file",
    )
    writable = os.access(file if Path(file).exists() else folder, os.W_OK)
    check(writable, f"{flag} {file}: no permission to write there: pass another file")


def check_picture(file: str | Path | None) -> None:
    """check_file for --png, which also needs matplotlib."""
    check_file("--png", file)
    check(
        file is None or importlib.util.find_spec("matplotlib") is not None,
        f"--png {file} needs matplotlib: pip install matplotlib, or this package with its extra [log], or leave --png out",
    )


def shown(text: str) -> str:
    """The text with U+FFFD for bytes of a path that are not valid UTF-8, which fonts refuse."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


@contextmanager
def writing(flag: str, file: str | Path) -> Iterator[None]:
    """A block that writes `file`, the value of `flag`: an OSError in it becomes a ValueError of one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{flag} {file}: cannot be written ({error.strerror}); pass another file"
        ) from None


def pipe_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table between pipes, aligned to the right except for the last column."""
    widths = [max(_width(cell) for cell in column) for column in zip(*rows)]
    rule = (
        "| "
        + " | ".join("-" * (width - 1) + ":" for width in widths[:-1])
        + " | "
        + "-" * widths[-1]
        + " |"
    )
    padded = [
        [" " * (w - _width(cell)) + cell for cell, w in zip(row[:-1], widths)]
        + [row[-1].ljust(widths[-1])]
        for row in rows
    ]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    return [lines[0], rule, *lines[1:]]


def _width(cell: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in cell)


# Flags of Megatron-LM and its forks that are not fields of `config`: what each means here, or why it is refused. Scripts written
# for them start unchanged, unless they ask for something that would change the model or be lost. The table is megatron_flags.txt,
# whose first lines say how it is read.

TABLE = Path(__file__).with_name("megatron_flags.txt")
SAVED = "saved"  # the status of arguments that are no flags


@dataclass(frozen=True)
class OtherFlag:
    """A row of the table.

    values: how many follow the flag, as argparse has it. accepted: values that a refused flag may
    have. changes_model: a checkpoint that was saved with it holds another model than its weights say.
    """

    values: int | str
    refused: bool
    meaning: str
    accepted: tuple[str, ...] = ()
    changes_model: bool = False

    def refuses(self, given: Sequence[str]) -> bool:
        """Whether these values of the flag are refused."""
        accepted = [any(_same(value, other) for other in self.accepted) for value in given]
        return self.refused and not (accepted and all(accepted))

    @property
    def note(self) -> str:
        """What the log says where the flag is accepted."""
        return "the value passed is what this program does" if self.refused else self.meaning


def _same(given: str, accepted: str) -> bool:
    try:
        return float(given) == float(accepted)
    except ValueError:
        return given == accepted


def _groups(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield status, meaning and words of each line of words in the table."""
    status, meaning = "", ""
    for line in text.splitlines():
        if line.startswith("  "):
            yield status, meaning, line.split()
        elif not line.startswith("#"):
            status, _, meaning = line.partition(": ")


GROUPS = tuple(_groups(TABLE.read_text(encoding="utf-8")))


def _rows() -> Iterator[tuple[str, OtherFlag]]:
    for status, meaning, words in GROUPS:
        if status == SAVED:
            continue
        for word in words:
            name, takes, value = word.partition("=")
            accepted = (
                ()
                if value.startswith("X") or not takes
                else tuple(value.removesuffix("...").split("|"))
            )
            yield (
                name,
                OtherFlag(
                    (1, "+")[value.endswith("...")] if takes else 0,
                    status in ("refused", "model"),
                    meaning,
                    accepted,
                    status == "model",
                ),
            )


OTHER_FLAGS: dict[str, OtherFlag] = dict(_rows())


def saved_reasons() -> dict[str, tuple[str, ...]]:
    """Return the arguments that Megatron-LM saves, no flag here is named after, and change no model, by the reason."""
    reasons: dict[str, tuple[str, ...]] = {}
    for status, meaning, names in GROUPS:
        if status == SAVED:
            reasons[meaning] = (*reasons.get(meaning, ()), *names)
    return reasons


def saved_arguments() -> frozenset[str]:
    """Return the names in `saved_reasons`."""
    return frozenset(name for names in saved_reasons().values() for name in names)


# --yaml-cfg -----------------------------------------------------------------------------------------------------------------------

# A run's flags from a YAML file in Megatron-LM's layout, as its megatron/training/yaml_arguments.py reads them: the keys of two
# sections, and those next to them, are Megatron-LM's arguments or fields of its TransformerConfig. A key whose value is null or
# empty is as if it were left out.
SECTIONS = ("language_model", "model_parallel")
ACTIVATIONS = {
    "swiglu": "--swiglu",
    "squaredrelu": "--squared-relu",
    "gelu": "--no-bias-gelu-fusion",
}  # its gelu is the exact one
# Keys that have another flag: the flag of a value, and the switch of False.
RENAMED = {
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "num_moe_experts": "--num-experts",
    "fp8": "--fp8-format",
}
SWITCHED_OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "add_position_embedding": "--no-position-embedding",
    "apply_rope_fusion": "--no-rope-fusion",
}
# Keys that activation_func decides, as in Megatron-LM.
OF_THE_ACTIVATION = ("swiglu", "squared_relu", "openai_gelu", "bias_gelu_fusion")
# Keys without a flag here: those that describe what only Megatron-LM's own program has, and those that have to be off.
UNUSED = """gated_linear_unit bias_activation_fusion memory_efficient_layer_norm virtual_pipeline_model_parallel_size
    perform_initialization params_dtype pipeline_dtype autocast_dtype timers tp_comm_atomic_ag tp_comm_atomic_rs
    finalize_model_grads_func grad_scale_func overlap_p2p_comm batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs
    no_sync_func grad_sync_func param_sync_func cpu_offloading_weights cpu_offloading_activations _cpu_offloading_context
    barrier_with_L1_time use_legacy_models bert_binary_head delay_grad_reduce delay_param_gather
    scatter_gather_tensors_in_pipeline retriever_seq_length enable_one_logger""".split()
OFF = """init_method output_layer_init_method moe_token_dropping enable_autocast variable_seq_lengths cpu_offloading
    num_microbatches_with_partial_activation_checkpoints pipeline_model_parallel_split_rank standalone_embedding_stage""".split()
OWN = ("--help", "--recipe", "--dry-run", "--world-size", "--yaml-cfg")  # of a command line alone


def complete_from_yaml(namespace: argparse.Namespace, build_parser: Callable[[], Parser]) -> None:
    """With --yaml-cfg among the parsed values, put the file's flags in place of those of the command line."""
    values = vars(namespace)
    if values["yaml_cfg"] is None:
        return
    parser = build_parser()
    names = {
        action.dest: action.option_strings[0]
        for action in parser._actions
        if action.option_strings[-1] not in OWN
    }
    ignored = [names[dest] for dest in names if values.pop(dest, None) is not None]
    found = _load(values["yaml_cfg"], parser)
    values |= {dest: value for dest, value in found.items() if dest in names}
    note = f"--yaml-cfg {values['yaml_cfg']}: the command line's {', '.join(ignored)} are ignored, as in Megatron-LM"
    values["yaml_notes"] = (note,) if ignored else ()


def _load(path: str, parser: Parser) -> dict[str, Any]:
    """What `parser`, of a run's flags, makes of the file's keys. Raises ValueError with the file and every wrong key."""
    keys = dict(_flattened(path))
    decided = OF_THE_ACTIVATION if any(where.endswith("activation_func") for where in keys) else ()
    known = {
        option: action
        for action in parser._actions
        for option in action.option_strings
        if option not in OWN
    }
    values: dict[str, Any] = {}
    mistakes = []
    for where, value in keys.items():
        key = where.rpartition(".")[2]
        if key in decided or value is None or value == "":
            continue
        try:
            values |= vars(parser.parse_args(_words(key, value, known)))
        except ValueError as error:
            mistakes.append(f"--yaml-cfg {path}: {where}: {error}")
    if mistakes:
        raise Refused(mistakes)
    return values


def _flattened(path: str) -> Iterator[tuple[str, Any]]:
    """Every key with its section, and its value."""
    top = read_yaml(path, "--yaml-cfg")
    seen = set()
    for name, value in top.items():
        inside = isinstance(value, Mapping)
        check(
            not inside or name in SECTIONS,
            f"--yaml-cfg {path}: {name} is a section, and the sections are "
            f"{' and '.join(SECTIONS)}: put its keys at the top",
        )
        for key, given in (value if inside else {name: value}).items():
            check(
                key not in seen,
                f"--yaml-cfg {path}: {key} stands at the top or in a section twice: leave one out",
            )
            seen.add(key)
            yield f"{name}.{key}" if inside else str(key), given


def _words(key: str, value: Any, known: Mapping[str, argparse.Action]) -> list[str]:
    """The words of a command line that a key with this value stands for. Raises ValueError for a key or a value that is wrong."""
    if key == "activation_func":
        check(
            value in ACTIVATIONS,
            f"{value!r:.60} is not an activation: pass {', '.join(ACTIVATIONS)}",
        )
        return [ACTIVATIONS[value]]
    check(
        not isinstance(value, Mapping), "it has keys of its own, and a flag has a value: pass one"
    )
    if key in OFF:
        check(value is False, f"{value!r:.60} is not supported: pass null, or leave the key out")
    if key in (*UNUSED, *OFF):
        return []
    name = RENAMED.get(key, flag(key))
    name = name if name in known else f"--{key}"
    off = [
        SWITCHED_OFF.get(key, ""),
        f"--no-{name[2:]}",
        f"--no-{flag(key)[2:]}",
        f"--disable-{flag(key)[2:]}",
    ]
    off = [option for option in off if option in known]
    check(
        name in known or off,
        "unknown key"
        + nearest(name, known, ": docs/flags.md lists those there are, with - in place of _"),
    )
    if isinstance(value, bool):
        check(
            name not in known or known[name].nargs == 0,
            f"{value} is not a value of {name}: pass one, or null",
        )
        return ([name] if name in known else []) if value else off[:1]
    check(
        name in known and known[name].nargs != 0,
        f"{value!r:.60} is not a value of a switch: pass true, false or null",
    )
    if known[name].nargs is None:
        return [f"{name}={value}"]
    items = value if isinstance(value, list) else str(value).split()
    return [name, *map(str, items)]
