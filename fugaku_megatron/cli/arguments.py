"""The command line: Megatron-LM's flags, generated from the fields of `config`, over an optional recipe.

Flags that CPU forks of Megatron carry (compatibility flags) are accepted with a line that says what they mean here; unknown ones
are refused with the nearest known one. Left out: what the flags mean (see `config`).
"""

from __future__ import annotations

import argparse
import numbers
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import partial
from typing import Any

from ..config.experts import EXPERTS, ExpertRanks
from ..config.fields import check, check_kind, flag, flag_words
from ..config.megatron_flags import OTHER_FLAGS
from ..config.model import (
    HEAD_MULTIPLE,
    ModelConfig,
)
from ..config.recipes import RECIPES
from ..config.rules import NEEDS, WINS
from ..config.run_config import GROUPS, RunConfig
from .parser import Parser, nearest
from .yaml_flags import complete_from_yaml

_OTHER = "other "  # prefix of flags that are not fields of config among the parsed values


# Other flags that mean something in some runs alone: in which, and why they are refused elsewhere.
_GOES_WITH: dict[str, tuple[Callable[[RunConfig], bool], str]] = {
    "--no-position-embedding": (
        lambda run: run.model.rotary,
        "it goes with rope, as in Megatron-LM: pass "
        "--position-embedding-type rope, or none for no positions at all",
    ),
    "--no-pipeline-parallel": (
        lambda run: run.parallel.pipeline_model_parallel_size == 1,
        "--pipeline-model-parallel-size is above 1: leave one of them out",
    ),
    **{
        name: (
            lambda run: run.model.num_experts is None,
            "this variant of experts is not supported: leave it out",
        )
        for name in (
            "--moe-input-jitter-eps",
            "--moe-latent-size",
            "--moe-apply-probs-on-input",
            "--moe-router-force-load-balancing",
            "--moe-router-force-biased",
            "--moe-use-upcycling",
            "--moe-router-quantile-balancing-ema",
            "--moe-mlp-glu-interleave-size",
            "--moe-shared-expert-glu-interleave-size",
            "--moe-expert-rank-capacity-factor",
            "--moe-enable-routing-replay",
            "--moe-routing-trace-path",
        )
    },
}

_GROUP_OF = {
    f.name: group for group, config in GROUPS.items() for f in fields(config)
}  # a field -> its group in RunConfig


_OF_EXPERTS = {
    *EXPERTS,
    *(f.name for f in fields(ExpertRanks)),
}  # which --help names last in their groups


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What the command line says beyond the run itself."""

    run: RunConfig
    recipe: str | None
    dry_run: bool
    world_size: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """What the flags of `add_flags` say, before they make a run. fields: values of `config`'s fields, by name."""

    recipe: str | None
    fields: dict[str, Any]
    dry_run: bool
    world_size: int | None
    notes: tuple[str, ...]


def _field_type(field: Field) -> type:
    names = {"int": int, "float": float, "str": str, "bool": bool}
    return field.metadata.get("type") or names[str(field.type)]


def _add_field(group: argparse._ArgumentGroup, field: Field) -> None:
    meta, help = field.metadata, field.metadata["help"]
    if field.default not in (MISSING, None) and _field_type(field) is not bool:
        default = (
            " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        )
        help += f" (default: {default})"
    help = help.replace("%", "%%")
    names = (flag(field.name), *meta.get("aliases", ()))
    if _field_type(field) is bool:
        action = (
            argparse.BooleanOptionalAction if field.default else "store_true"
        )  # what is on by default gets a --no- flag
        group.add_argument(
            *names, dest=field.name, action=action, default=argparse.SUPPRESS, help=help
        )
    else:
        group.add_argument(
            *names,
            dest=field.name,
            type=_field_type(field),
            nargs=meta.get("nargs"),
            help=help,
            choices=meta.get("choices"),
            default=argparse.SUPPRESS,
        )
    for name, value in meta.get("switches", {}).items():
        group.add_argument(
            name,
            dest=field.name,
            action="store_const",
            const=value,
            default=argparse.SUPPRESS,
            help=f"the same as {flag(field.name)} {value}",
        )


def build_parser() -> Parser:
    """A parser of a run's flags alone. A flag that is not passed leaves no attribute, so that a recipe's value stays."""
    parser = Parser()
    add_flags(parser)
    return parser


def add_train_flags(
    parser: argparse.ArgumentParser, meaning: str = "they describe the run"
) -> None:
    """`add_flags` for other commands than train: --help names a run's flags in its last line, which says their `meaning`."""
    own, groups = len(parser._actions), len(parser._action_groups)
    add_flags(parser)
    for action in parser._actions[own:]:
        action.help = argparse.SUPPRESS
    for group in parser._action_groups[groups:]:
        group.description = (
            None  # with neither flags nor a description to show, argparse leaves a group out
        )
    parser.epilog = f"and every flag of fugaku-megatron train, such as --recipe; {meaning}: see fugaku-megatron train --help"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of a run, for all commands that speak of one; `interpret` and `run_flags` read what was parsed."""
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
    for name, config in GROUPS.items():
        for field in sorted(fields(config), key=lambda field: field.name in _OF_EXPERTS):
            _add_field(groups[name], field)
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
        "docs/megatron.md lists them all: those that change "
        "nothing here are accepted with a note, the others are refused with the reason.",
    )
    for name, other in OTHER_FLAGS.items():
        kind: dict[str, Any] = {"nargs": other.values} if other.values else {"action": "store_true"}
        parser.add_argument(
            name, dest=_OTHER + name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kind
        )
    if isinstance(parser, Parser):
        parser.mistakes_among = _mistakes
        parser.completed = partial(complete_from_yaml, build_parser=build_parser)


class _FullRecompute(argparse.Action):
    """Megatron's former flag, whose method also switched recompute of whole layers on."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        namespace.recompute_method, namespace.recompute_granularity = values, "full"


def _from_recipe(name: str | None) -> dict[str, dict[str, Any]]:
    if name is None:
        return {group: {} for group in GROUPS}
    if name.lower() not in RECIPES:
        known = ", ".join(RECIPES)
        raise ValueError(
            f"--recipe {name:.60} is unknown: pass one of {known}"
            + nearest(name, RECIPES, "", cutoff=0.3)
        )
    run = RECIPES[name.lower()]()
    return {
        group: {f.name: getattr(getattr(run, group), f.name) for f in fields(config)}
        for group, config in GROUPS.items()
    }


# Values of a recipe that a flag replaces: setting the key drops the recipe's value of the others.
_DERIVED: dict[str, tuple[str, ...]] = {
    "hidden_size": ("ffn_hidden_size", "kv_channels"),
    "num_attention_heads": ("kv_channels",),
    "seq_length": ("max_position_embeddings",),
    "lr": ("min_lr",),
    "step_batch_size_schedule": ("global_batch_size",),
    "train_samples": ("train_iters", "lr_decay_iters", "lr_warmup_iters"),
    "train_tokens": ("train_iters", "lr_decay_iters", "lr_warmup_iters"),
    "train_iters": ("train_samples", "lr_decay_samples", "lr_warmup_samples"),
    "lr_decay_tokens": ("lr_decay_iters", "lr_decay_samples"),
    "lr_warmup_tokens": ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    "lr_warmup_iters": ("lr_warmup_fraction", "lr_warmup_samples"),
    "lr_warmup_samples": ("lr_warmup_fraction", "lr_warmup_iters"),
    "lr_warmup_fraction": ("lr_warmup_iters", "lr_warmup_samples"),
}


def make_run(recipe: str | None, values: dict[str, Any]) -> RunConfig:
    """A RunConfig from a recipe's name (or None) and field values that override it.

    Raises ValueError for values that the config refuses and, naming all at once, for required fields that neither sets.
    """
    groups = _from_recipe(recipe)
    assert values.keys() <= _GROUP_OF.keys(), f"no such fields: {values.keys() - _GROUP_OF.keys()}"
    for dropped in (name for key in values for name in _DERIVED.get(key, ())):
        groups[_GROUP_OF[dropped]].pop(dropped, None)
    for name, value in values.items():
        groups[_GROUP_OF[name]][name] = value
    missing = _missing(groups, {})
    check(
        not missing,
        f"{', '.join(missing)} must be passed, or a --recipe that sets them: {', '.join(RECIPES)}",
    )
    return RunConfig(**{group: config(**groups[group]) for group, config in GROUPS.items()})


def _missing(groups: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any]) -> list[str]:
    """The required flags that neither the groups' values nor `values` contain."""
    return [
        flag(f.name)
        for group, config in GROUPS.items()
        for f in fields(config)
        if f.default is MISSING and f.name not in groups[group] and f.name not in values
    ]


def model_flags(model: ModelConfig) -> list[str]:
    """The words of a command line that make this model; --seq-length, which is a run's choice, is not among them."""
    words = []
    for field in fields(ModelConfig):
        value = getattr(model, field.name)
        if field.name == "seq_length" or value is None or value == field.default:
            continue
        words += flag_words(field.name, value)
    return words


def parse(argv: Sequence[str]) -> Arguments:
    """Read a command line of a run's flags alone. Raises ValueError with one line for a user's mistake."""
    return interpret(vars(build_parser().parse_args(argv)))


def run_flags(values: Mapping[str, Any]) -> RunFlags:
    """The part of parsed values that `add_flags` added; what a command's own flags said is left out."""
    others = [name.removeprefix(_OTHER) for name in values if name.startswith(_OTHER)]
    notes = tuple(f"{name}: {OTHER_FLAGS[name].note}" for name in others)
    notes = values.get("yaml_notes", ()) + notes
    return RunFlags(
        recipe=values["recipe"],
        fields=_fields(values),
        dry_run=values["dry_run"],
        world_size=values["world_size"],
        notes=notes,
    )


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(v) if isinstance(v, list) else v
        for name, v in values.items()
        if name in _GROUP_OF
    }


def _mistakes(values: Mapping[str, Any], others: bool) -> Iterator[str]:
    """Why flags, or their values, are refused; where some are, or `others`, also what is wrong with the run of the rest."""
    refused, given = (
        [*_refused(values)],
        {name: value for name, value in _fields(values).items() if value is not None},
    )
    yield from refused
    if (refused or others) and not (values["recipe"] and values["recipe"].lower() not in RECIPES):
        if not _missing(_from_recipe(values["recipe"]), given):
            try:
                checked_run(values["recipe"], given)
            except ValueError as error:
                yield str(error)


def _refused(values: Mapping[str, Any]) -> Iterator[str]:
    for dest, given in values.items():
        name = dest.removeprefix(_OTHER)
        if dest.startswith(_OTHER) and OTHER_FLAGS[name].refuses(
            given if isinstance(given, list) else ()
        ):
            shown = f"{name} {' '.join(given)}" if OTHER_FLAGS[name].accepted else name
            yield f"{shown:.200}: {OTHER_FLAGS[name].meaning}"


def interpret(values: Mapping[str, Any], passed: Collection[str] | None = None) -> Arguments:
    """The parsed values of `add_flags` as a run. Raises ValueError with one line for a user's mistake.

    passed: fields that notes may be about, where a checkpoint has set others; None: all of `values`.
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
    run, notes = checked_run(flags.recipe, flags.fields, passed)
    check_other_flags(values, run)
    return Arguments(
        run=run,
        recipe=flags.recipe,
        dry_run=flags.dry_run,
        world_size=flags.world_size,
        notes=flags.notes + notes,
    )


def check_other_flags(values: Mapping[str, Any], run: RunConfig) -> None:
    """Raise ValueError for a flag of Megatron-LM that means something in other runs than this one.

    values: as parsed.
    """
    for name, (fits, reason) in _GOES_WITH.items():
        check(_OTHER + name not in values or fits(run), f"{name}: {reason}")


def checked_run(
    recipe: str | None, values: dict[str, Any], passed: Collection[str] | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """The run of `make_run`, and a note for each of the given values, if `passed` has it, that has no effect in it.

    Raises ValueError as `make_run` does, and for heads that the run's kernels do not take.
    """
    run = make_run(recipe, values)
    check(
        run.model.kernels_take_heads or run.system.kernels == "torch",
        f"--kv-channels is {run.model.kv_channels}, by default "
        f"hidden size / attention heads, and the C++ kernels take multiples of {HEAD_MULTIPLE}: pass one, or --kernels torch",
    )
    notes = [
        f"{flag(name)} has no effect without {needed}"
        for needed, has, names in NEEDS
        if not has(run)
        for name in names
        if name in values and (passed is None or name in passed)
    ]
    notes += [
        f"{flag(loser)} has no effect with {flag(winner)}, which wins"
        for winner, loser in WINS
        if values.get(winner) and values.get(loser)
    ]
    if (stage := values.get("zero_stage") or 0) > 1:
        notes.append(
            f"--zero-stage {stage}: gradients and weights stay whole on every rank, as with 1: training is the same, and "
            "takes more memory"
        )
    return run, tuple(notes)


# Keywords of Python -------------------------------------------------------------------------------------------------------------


def _keyword(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _keywords() -> dict[str, tuple[Field, Any]]:
    """Every name of a flag as a keyword -> its field, and for a switch the value that it sets."""
    found: dict[str, tuple[Field, Any]] = {}
    for field in (field for config in GROUPS.values() for field in fields(config)):
        found |= {
            _keyword(name): (field, value)
            for name, value in field.metadata.get("switches", {}).items()
        }
        found |= {
            _keyword(name): (field, None)
            for name in (flag(field.name), *field.metadata.get("aliases", ()))
        }
    return found


def field_values(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `config`'s fields, by name, from keywords that have the names of a run's flags.

    Raises ValueError, one line, for a keyword that is unknown and for a value of another type than the flag's.
    """
    known, values = _keywords(), {}
    for name, given in keywords.items():
        check(
            name in known,
            f"unknown keyword {name}"
            + nearest(name, known, ": fugaku-megatron train --help lists the flags"),
        )
        field, switched = known[name]
        if switched is None:
            values[field.name] = _typed(field, name, given)
            continue
        check(isinstance(given, bool), f"{name} ({flag(name)}) is {given!r:.60}: expected bool")
        if given:
            values[field.name] = switched
    return values


def _typed(field: Field, name: str, given: Any) -> Any:
    """A given value as the field has it: a path as str, a list as tuple, numpy's numbers as Python's."""
    several, plain = str(field.type).startswith("tuple"), _plain(given)
    if several and isinstance(plain, str) and field.metadata.get("nargs") == "+":
        plain = (plain,)
    try:
        check_kind(field, plain)
    except ValueError:
        raise ValueError(f"{name} ({flag(name)}) is {given!r:.60}: expected {field.type}") from None
    return (
        float(plain)
        if isinstance(plain, int) and not isinstance(plain, bool) and "float" in str(field.type)
        else plain
    )


def _plain(value: Any) -> Any:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value
