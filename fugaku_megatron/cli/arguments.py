"""A run's command line: Megatron-LM's flags, generated from the fields in `config`, over an
optional recipe.

Other flags of Megatron-LM and its forks are accepted with a note or refused with a reason; an
unknown flag is refused with the nearest known one.
"""

from __future__ import annotations

import argparse
import numbers
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ..config.experts import ExpertFields
from ..config.fields import (
    Declaration,
    FieldValues,
    as_tuples,
    check,
    check_type,
    declarations,
    flag,
    flag_words,
    shortened,
)
from ..config.hybrid import HybridFields, hybrid_notes, with_layers
from ..config.megatron_flags import OTHER_FLAGS, OtherFlag
from ..config.model import ModelConfig
from ..config.parallel import MatrixRanks
from ..config.pipeline_layout import PipelineLayoutFields, with_stages
from ..config.recipes import RECIPES
from ..config.rows import HEAD_MULTIPLE
from ..config.run_config import GROUP_OF, GROUPS, RunConfig, all_flags, run_of
from ..text.foreign_models import conversion, is_hugging_face
from .otel_variables import PREFIXES, with_otel_variables
from .parser import Parser, add_field, nearest
from .yaml_flags import complete_from_yaml

MODEL_FLAGS = "model.flags"  # file of a converted model: words of train's command line
_OTHER = "other "  # prefix of parsed flags that are not fields of config

# Group -> flags that `_spelled_out` replaces by fields.
SPELLINGS = {
    "model": declarations(HybridFields),
    "parallel": declarations(PipelineLayoutFields),
}
_SPELLED = {declared.name for spelling in SPELLINGS.values() for declared in spelling}

# Fields that --help lists last in their groups.
_LAST = {f.name for config in (ExpertFields, MatrixRanks) for f in fields(config)}


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Parsed flags, not yet checked as a run. fields: values by field name."""

    recipe: str | None
    fields: FieldValues
    dry_run: bool
    world_size: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Arguments(RunFlags):
    """Checked command line: the flags, and the run that they describe."""

    run: RunConfig


def build_parser() -> Parser:
    """Build a parser. A flag that is not passed leaves no attribute, so that a recipe's value
    stays.
    """
    parser = Parser()
    add_flags(parser)
    return parser


def add_train_flags(
    parser: argparse.ArgumentParser, meaning: str = "they describe the run"
) -> None:
    """Add a run's flags; --help refers to train, with their `meaning`, in the last line."""
    own = len(parser._actions)
    groups = len(parser._action_groups)
    add_flags(parser)
    for action in parser._actions[own:]:
        action.help = argparse.SUPPRESS
    for group in parser._action_groups[groups:]:
        group.description = None  # argparse omits a group without flags and description
    parser.epilog = f"and every flag of fugaku-megatron train, such as --recipe; {meaning}: see fugaku-megatron train --help"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of a training run, by config class, and hidden flags of Megatron-LM's forks."""
    parser.add_argument("--recipe", help=f"start from a published size: {', '.join(RECIPES)}")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build and print the run's plan in one process, train nothing",
    )
    parser.add_argument("--world-size", type=int, help="ranks to assume in a --dry-run")
    parser.add_argument(
        "--yaml-cfg",
        metavar="FILE",
        help="YAML file with the flags, in Megatron-LM's layout; as there, the other "
        "flags of a run on the command line are then ignored, apart from those above",
    )
    groups = {
        name: parser.add_argument_group(name, config.__doc__) for name, config in GROUPS.items()
    }
    ordered = {
        name: sorted(declarations(config), key=lambda each: each.name in _LAST)
        for name, config in GROUPS.items()
    }
    for name, of_group in ordered.items():
        for declared in (*of_group, *SPELLINGS.get(name, ())):
            add_field(groups[name], declared)
    groups["training"].add_argument(
        "--activations-checkpoint-method",
        dest="recompute_method",
        choices=("uniform", "block"),
        action=_FullRecompute,
        default=argparse.SUPPRESS,
        help="the same as --recompute-granularity full --recompute-method",
    )
    parser.add_argument_group(
        "other flags of Megatron-LM and its forks",
        "docs/megatron.md lists them all: flags without effect are accepted with a note, "
        "the others are refused with the reason.",
    )
    for name, other in OTHER_FLAGS.items():
        kind: FieldValues = {"nargs": other.values} if other.values else {"action": "store_true"}
        parser.add_argument(
            name, dest=_OTHER + name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kind
        )
    if isinstance(parser, Parser):
        parser.mistakes_among = _mistakes
        parser.completed = _complete


def _complete(namespace: argparse.Namespace) -> None:
    if namespace.yaml_cfg is not None:
        complete_from_yaml(namespace, build_parser())


class _FullRecompute(argparse.Action):
    """Megatron-LM's former flag, which also switches full recompute on."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        namespace.recompute_method = values
        namespace.recompute_granularity = "full"


def _from_recipe(name: str | None) -> FieldValues:
    if name is None:
        return {}
    if name.lower() not in RECIPES:
        known = ", ".join(RECIPES)
        raise ValueError(
            f"--recipe {name:.60} is unknown: pass one of {known}"
            + nearest(name, RECIPES, "", cutoff=0.3)
        )
    return RECIPES[name.lower()]().values


def make_run(recipe: str | None, values: FieldValues) -> RunConfig:
    """Build a RunConfig from a recipe's name and field values that override it.

    Raises ValueError for values that the config refuses, and for missing required fields, all at
    once.
    """
    values = _spelled_out(values)
    dropped = {name for each in all_flags() if each.name in values for name in each.drops}
    kept = {name: value for name, value in _from_recipe(recipe).items() if name not in dropped}
    missing = _missing(kept | values)
    check(not missing, f"{', '.join(missing)} must be passed{_source_of_flags(missing, values)}")
    return run_of(kept | values)


def _source_of_flags(missing: Sequence[str], values: FieldValues) -> str:
    """Return the end of a message about missing flags: the place of a named model's flags, else the recipes."""
    for name in ("pretrained_checkpoint", "load"):
        directory = values.get(name) or ""
        file = Path(directory) / MODEL_FLAGS
        if directory and file.is_file():
            known = file.read_text(encoding="utf-8", errors="replace").split()
            rest = ", ".join(each for each in missing if each not in known)
            others = f"; pass {rest} too" if rest else ""
            return f": {flag(name)} {directory} has those of its model in {file}: add $(cat {file}){others}"
        if directory and is_hugging_face(directory):
            return (
                f": {flag(name)} {directory} holds a model of Hugging Face: {conversion(directory)}, "
                f"with $(cat NEW/{MODEL_FLAGS})"
            )
    own = ""
    if values.get("load"):
        own = " --use-checkpoint-args, for those of the checkpoint in --load, or"
    return f", or{own} a --recipe that sets them: {', '.join(RECIPES)}"


def _missing(values: FieldValues) -> list[str]:
    return [
        flag(each.name)
        for each in all_flags()
        if each.default is MISSING and each.name not in values
    ]


def model_flags(model: ModelConfig) -> list[str]:
    """Return this model's command-line words, without --seq-length."""
    words = []
    for field in fields(ModelConfig):
        value = getattr(model, field.name)
        if field.name == "seq_length" or value is None or value == field.default:
            continue
        words += flag_words(field.name, value)
    return words


def parse(argv: Sequence[str]) -> Arguments:
    return interpret(vars(build_parser().parse_args(argv)))


def run_flags(values: FieldValues) -> RunFlags:
    notes = tuple(f"{name}: {other.note}" for name, other, _ in _others(values))
    return RunFlags(
        recipe=values["recipe"],
        fields=_fields(values),
        dry_run=values["dry_run"],
        world_size=values["world_size"],
        notes=values.get("yaml_notes", ()) + notes,
    )


def _others(values: Mapping[str, Any]) -> Iterator[tuple[str, OtherFlag, Any]]:
    """Yield the name, the row and the value of each parsed flag that is not a field of `config`."""
    for dest, value in values.items():
        if dest.startswith(_OTHER):
            name = dest.removeprefix(_OTHER)
            yield name, OTHER_FLAGS[name], value


def _fields(values: Mapping[str, Any]) -> FieldValues:
    return {
        name: value
        for name, value in as_tuples(values).items()
        if name in GROUP_OF or name in _SPELLED
    }


def _mistakes(values: Mapping[str, Any], others: bool) -> Iterator[str]:
    """Yield the reasons why flags are refused; if any, or `others`, also an error of the run
    without them.
    """
    refused: dict[str, list[str]] = {}  # by reason
    for name, other, words in _others(values):
        if other.refuses(words if isinstance(words, list) else (), values):
            shown = f"{name} {' '.join(words)}" if other.accepted else name
            refused.setdefault(other.meaning, []).append(shown)
    for meaning, names in refused.items():
        yield f"{', '.join(names):.200}: {meaning}"
    recipe = values["recipe"]
    if not (refused or others) or (recipe and recipe.lower() not in RECIPES):
        return
    given = {name: value for name, value in _fields(values).items() if value is not None}
    try:
        if not _missing(_from_recipe(recipe) | _spelled_out(given)):
            checked_run(recipe, given)
    except ValueError as error:
        yield str(error)


def interpret(values: FieldValues, passed: Collection[str] | None = None) -> Arguments:
    """Build a run from parsed values. Raises ValueError with one line for a user's mistake.

    passed: fields that notes may mention, if a checkpoint has set others; None: all
    """
    flags = run_flags(values)
    check(
        flags.world_size is None or flags.dry_run,
        f"--world-size {flags.world_size} goes with --dry-run; a real run takes it from mpiexec -n",
    )
    check(
        flags.world_size is None or flags.world_size > 0,
        f"--world-size is {flags.world_size}: pass a number above 0",
    )
    fields = flags.fields
    variable_notes: tuple[str, ...] = ()
    if any(name.startswith(PREFIXES) for name in os.environ):
        fields, variable_notes = with_otel_variables(fields)
    run, notes = checked_run(flags.recipe, fields, passed)
    check_other_flags(values, run)
    notes = flags.notes + variable_notes + notes
    return Arguments(**{**vars(flags), "fields": fields, "notes": notes}, run=run)


def check_other_flags(values: FieldValues, run: RunConfig) -> None:
    for name, other, _ in _others(values):
        if other.condition is not None:
            check(other.condition.is_met(run), f"{name}: {other.condition.text}")


def _spelled_out(values: FieldValues) -> FieldValues:
    return values if _SPELLED.isdisjoint(values) else with_stages(with_layers(values))


def checked_run(
    recipe: str | None, values: FieldValues, passed: Collection[str] | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run, and a note for each value in `passed` without effect.

    Raises ValueError as `make_run`, and for a head size that the kernels do not support.
    """
    run = make_run(recipe, values)
    sizes = f"--kv-channels is {run.model.kv_channels}, by default hidden size / attention heads"
    if run.model.multi_latent_attention:
        sizes = (
            f"--qk-head-dim + --qk-pos-emb-head-dim is {run.model.kv_channels}, and "
            f"--v-head-dim {run.model.v_head_dim}"
        )
    check(
        run.model.kernels_take_heads or run.system.kernels == "torch",
        f"{sizes}, and the C++ kernels take multiples of {HEAD_MULTIPLE}: pass one, or --kernels torch",
    )
    mentioned = values if passed is None else passed
    notes = [
        f"{flag(each.name)} has no effect without {need.text}"
        for each in all_flags()
        for need in each.needs
        if each.name in values and each.name in mentioned and not need.is_met(run)
    ]
    if "hybrid_layer_pattern" in values:
        notes = hybrid_notes(values, run.model) + notes
    if values.get("lr_warmup_tokens") and values.get("lr_warmup_fraction"):
        notes.append("--lr-warmup-fraction has no effect with --lr-warmup-tokens, which wins")
    if (stage := values.get("zero_stage") or 0) > 1:
        notes.append(
            f"--zero-stage {stage}: gradients and weights stay whole on every rank, as with 1: training is the same, and "
            "takes more memory"
        )
    return run, tuple(notes)


# Python keywords


def _keywords() -> dict[str, tuple[Declaration, Any]]:
    """Return keyword -> its field, and for a switch the value that it sets."""
    found: dict[str, tuple[Declaration, Any]] = {}
    for group in (*map(declarations, GROUPS.values()), *SPELLINGS.values()):
        for declared in group:
            values = {**declared.switches, **dict.fromkeys(declared.flags)}
            for name, value in values.items():
                found[name.removeprefix("--").replace("-", "_")] = (declared, value)
    return found


def field_values(keywords: FieldValues) -> FieldValues:
    """Convert keywords named after flags to field values by name.

    Raises ValueError for an unknown keyword or a wrong type.
    """
    known = _keywords()
    values: FieldValues = {}
    for name, given in keywords.items():
        if name not in known:
            remedy = nearest(name, known, ": fugaku-megatron train --help lists the flags")
            raise ValueError(shortened(f"unknown keyword {name}{remedy}"))
        declared, switched = known[name]
        if switched is None:
            values[declared.name] = _typed(declared, name, given)
            continue
        check(isinstance(given, bool), f"{name} ({flag(name)}) is {given!r:.60}: expected bool")
        if given:
            values[declared.name] = switched
    return values


def _typed(declared: Declaration, name: str, given: Any) -> Any:
    plain = _plain(given)
    if declared.nargs == "+" and isinstance(plain, str):
        plain = (plain,)
    try:
        check_type(declared, plain)
    except ValueError:
        raise ValueError(
            f"{name} ({flag(name)}) is {given!r:.60}: expected {declared.type}"
        ) from None
    if isinstance(plain, int) and declared.type.startswith("float"):
        return float(plain)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value
