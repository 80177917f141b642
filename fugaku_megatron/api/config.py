"""A run's config for Python: fugaku-megatron train's flags as keywords. Imports neither torch nor
MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..cli.arguments import build_parser, check_other_flags, checked_run, field_values, run_flags
from ..cli.parser import nearest
from ..config.fields import FieldValues, check
from ..config.run_config import GROUP_OF, RunConfig


def _with_checkpoint_model(values: FieldValues) -> FieldValues:
    if not values.get("use_checkpoint_args"):
        return values
    from ..run.train_command import with_checkpoint_model

    return with_checkpoint_model(values)


@dataclass(frozen=True, init=False, repr=False)
class Config:
    """Config of a run, complete and checked. Frozen; configs are equal if their runs are.

    Keywords are flags of fugaku-megatron train with underscores (--num-layers is num_layers); docs/library.md and
    `fugaku-megatron train --help` list them. Every flag is an attribute: `config.hidden_size`.
    run: values by group. notes: flags without effect in this run, with reasons.

    Raises ValueError, one line with the flag, the value and the remedy, for an unknown keyword, a value of another type, values
    that contradict each other, and missing flags.
    """

    run: RunConfig
    notes: tuple[str, ...] = field(compare=False)
    base: str | None = field(compare=False)
    given: Mapping[str, Any] = field(compare=False)

    def __init__(self, **flags: Any) -> None:
        self._set(None, field_values(flags))

    @classmethod
    def recipe(cls, name: str, **flags: Any) -> Config:
        """Return a published model's config ("124m", "llama-3.2-1b" ...), with flags that replace
        its values.
        """
        check(isinstance(name, str), f"the name of a recipe is {name!r:.60}: expected str")
        return cls._of(name, field_values(flags))

    @classmethod
    def from_flags(cls, words: Sequence[str]) -> Config:
        """Return the config for a command line's words, as fugaku-megatron train reads them."""
        check(
            not isinstance(words, str),
            f"from_flags takes a list of words, not one text: pass {words!r:.60}.split()",
        )
        values = vars(build_parser().parse_args([*words]))
        flags = run_flags(values)
        check(
            not flags.dry_run and flags.world_size is None,
            "--dry-run and --world-size belong to the command fugaku-megatron "
            "train: leave them out",
        )
        config = cls._of(flags.recipe, flags.fields, flags.notes)
        check_other_flags(values, config.run)
        return config

    def replace(self, **flags: Any) -> Config:
        """Return the config with other flags, as if they had been passed at first."""
        return self._of(self.base, {**self.given, **field_values(flags)})

    @classmethod
    def _of(cls, recipe: str | None, values: FieldValues, notes: tuple[str, ...] = ()) -> Config:
        config = cls.__new__(cls)
        config._set(recipe, values, notes)
        return config

    def _set(self, recipe: str | None, values: FieldValues, notes: tuple[str, ...] = ()) -> None:
        run, without_effect = checked_run(recipe, _with_checkpoint_model(values), passed=values)
        object.__setattr__(self, "run", run)
        object.__setattr__(self, "notes", notes + without_effect)
        object.__setattr__(self, "base", recipe)
        object.__setattr__(self, "given", values)

    def __getattr__(self, name: str) -> Any:
        if name in GROUP_OF:
            return self.run.values[name]
        raise AttributeError(f"a Config has no {name}" + nearest(name, GROUP_OF, ""))

    def __repr__(self) -> str:
        words = [f"{name}={value!r}" for name, value in self.given.items()]
        if self.base:
            return f"Config.recipe({', '.join([repr(self.base), *words])})"
        return f"Config({', '.join(words)})"
