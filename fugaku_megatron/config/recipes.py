"""Recipes: published models as runs without the parallel layout, from `recipes.json`.

A row there has flags, and inherits the flags of its `like`; `model`: the flags of a recipe's model alone. Rows with `about` are
recipes. 124M and 30B are runs of the benchmark tables. Recipes with a repository's name follow its config.json on huggingface.co. If
no paper states batch size and learning rate, they are GPT-3's for that size (Brown et al. 2020, table 2.1).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from ..text.named_files import JsonObject
from .fields import FieldValues, as_tuples
from .model import ModelConfig
from .run_config import RunConfig, run_of

GPT2_VOCABULARY = 50257
_FILE = Path(__file__).with_name("recipes.json")
_ROWS: dict[str, JsonObject] = json.loads(_FILE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Recipe:
    """A published model; a call returns its run. about: the model, its source and the source of its training"""

    name: str
    about: str

    def __call__(self) -> RunConfig:
        return run_of(_flags(self.name))


def _flags(name: str) -> FieldValues:
    row = dict(_ROWS[name])
    values: FieldValues = {}
    if published := row.pop("model", None):
        own = {f.name for f in fields(ModelConfig)}
        values |= {flag: value for flag, value in _flags(published).items() if flag in own}
    if like := row.pop("like", None):
        values |= _flags(like)
    row.pop("about", None)
    return values | as_tuples(row)


RECIPES = {name: Recipe(name, row["about"]) for name, row in _ROWS.items() if "about" in row}
