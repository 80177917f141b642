"""What a run is, for Python: the flags of fugaku-megatron train as keywords. Imports neither torch nor MPI.

config = Config(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, micro_batch_size=1, lr=6e-4)
config = Config.recipe("124m", lr=3e-4)
config = Config.from_flags(["--recipe", "124m", "--lr", "3e-4"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..cli.arguments import build_parser, check_other_flags, checked_run, field_values, run_flags
from ..cli.parser import nearest
from ..config.fields import check
from ..config.run_config import GROUPS, RunConfig


def _with_checkpoint_model(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values, of the model those of the checkpoint in load with use_checkpoint_args."""
    if not values.get("use_checkpoint_args"):
        return values
    from ..run.train_command import with_checkpoint_model

    return with_checkpoint_model(values)


@dataclass(frozen=True, init=False, repr=False)
class Config:
    """A run, complete and checked. Frozen; two configs are equal when their runs are.

    The keywords are the names of the flags of fugaku-megatron train, with underscores (--num-layers is num_layers); the page
    docs/library.md and `fugaku-megatron train --help` list them. The value of any flag is an attribute: `config.hidden_size`.
    run: the values by group. notes: flags that have no effect in this run, each with the reason.

    Raises ValueError, one line with the flag, the value and the remedy: for a keyword that is unknown, a value of another type,
    values that do not go together, and flags that a run needs.
    """

    run: RunConfig
    notes: tuple[str, ...] = field(compare=False)
    base: str | None = field(compare=False)
    given: Mapping[str, Any] = field(compare=False)

    def __init__(self, **flags: Any) -> None:
        self._settle(None, field_values(flags))

    @classmethod
    def recipe(cls, name: str, **flags: Any) -> Config:
        """A published model by its name ("124m", "llama-3.2-1b" ...), with flags that replace values of its recipe."""
        check(isinstance(name, str), f"the name of a recipe is {name!r:.60}: expected str")
        return cls._of(name, field_values(flags))

    @classmethod
    def from_flags(cls, words: Sequence[str]) -> Config:
        """The words of a command line, as fugaku-megatron train reads them."""
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
        """The same run with other values, as if they had been among those that it was made from."""
        return self._of(self.base, {**self.given, **field_values(flags)})

    @classmethod
    def _of(cls, recipe: str | None, values: dict[str, Any], notes: tuple[str, ...] = ()) -> Config:
        config = cls.__new__(cls)
        config._settle(recipe, values, notes)
        return config

    def _settle(
        self, recipe: str | None, values: dict[str, Any], notes: tuple[str, ...] = ()
    ) -> None:
        run, without_effect = checked_run(recipe, _with_checkpoint_model(values))
        for name, value in (
            ("run", run),
            ("notes", notes + without_effect),
            ("base", recipe),
            ("given", values),
        ):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        for group in (
            GROUPS
            if not name.startswith("_") and name not in ("run", "notes", "base", "given")
            else ()
        ):
            if hasattr(values := getattr(self.run, group), name):
                return getattr(values, name)
        raise AttributeError(f"a Config has no {name}" + nearest(name, self._names(), ""))

    @staticmethod
    def _names() -> list[str]:
        return [f.name for config in GROUPS.values() for f in fields(config)]

    def __repr__(self) -> str:
        words = [repr(self.base)] * bool(self.base) + [
            f"{name}={value!r}" for name, value in self.given.items()
        ]
        return f"Config{'.recipe' * bool(self.base)}({', '.join(words)})"
