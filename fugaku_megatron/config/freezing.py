"""Freezing fields: parts of the model that keep their weights while the others are trained.

Source: for --freeze-all-layers Megatron-LM, which trains nothing and still reads data and logs losses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from .fields import cached_hash, check, course_optional, course_switch
from .model import ModelConfig
from .rules import CheckedFields

EMBEDDING = "embedding"
LAYERS = "layers"
EXPERTS = "experts"
HEAD = "head"
# A part -> names of its parameters; an embedding's tied logits are the embedding.
PARTS = {
    EMBEDDING: re.compile(r"embedding\."),
    LAYERS: re.compile(r"decoder\.layers\."),
    EXPERTS: re.compile(r"decoder\.layers\.\d+\.mlp\.experts\."),
    HEAD: re.compile(r"decoder\.final_layernorm\.|output_layer\."),
}


@cached_hash
@dataclass(frozen=True, kw_only=True)
class FreezingConfig(CheckedFields):
    """Parts of the model that are not trained."""

    freeze: tuple[str, ...] | None = course_optional(
        "parts that keep their weights, one or more: embedding (words and positions, and logits tied to them), "
        "layers (all of them), experts (routed ones), head (final norm, and logits that are not tied)",
        choices=tuple(PARTS),
    )
    freeze_first_layers: int | None = course_optional(
        "layers at the beginning of the model that keep their weights"
    )
    freeze_all_layers: bool = course_switch(
        "keep all weights: iterations read data and compute losses, and nothing is trained"
    )

    def _check(self) -> None:
        names = self.freeze or ()
        check(
            len(set(names)) == len(names),
            f"--freeze {' '.join(names)} names a part twice: leave one out",
        )
        check(
            not self.freeze_all_layers or not (names or self.freeze_first_layers),
            "--freeze-all-layers freezes every part: leave out --freeze and --freeze-first-layers",
        )
        check(
            LAYERS not in names or not (EXPERTS in names or self.freeze_first_layers),
            "--freeze layers freezes every layer with its experts: leave out experts and "
            "--freeze-first-layers",
        )

    @cached_property
    def on(self) -> bool:
        return bool(self.freeze or self.freeze_first_layers or self.freeze_all_layers)

    def has(self, part: str) -> bool:
        """Return True if a whole part is frozen."""
        return self.freeze_all_layers or part in (self.freeze or ())

    def first_layers(self, model: ModelConfig) -> int:
        """Return the number of layers at the model's beginning that are frozen."""
        return model.num_layers if self.has(LAYERS) else self.freeze_first_layers or 0

    def holds(self, name: str, model: ModelConfig) -> bool:
        """Return True if a parameter is frozen. name: in the whole model, of a tied copy the embedding's"""
        if self.freeze_all_layers or not self.on:
            return self.on
        if any(self.has(part) and names.match(name) for part, names in PARTS.items()):
            return True
        number = re.match(r"decoder\.layers\.(\d+)\.", name)
        return number is not None and int(number[1]) < self.first_layers(model)

    def same_parts(self, other: FreezingConfig, model: ModelConfig) -> bool:
        """Return True if both freeze the same parts of a model."""
        whole = all(self.has(part) == other.has(part) for part in (EMBEDDING, EXPERTS, HEAD))
        return whole and self.first_layers(model) == other.first_layers(model)

    @cached_property
    def text(self) -> str:
        """Flags that freeze these parts, for messages."""
        if self.freeze_all_layers:
            return "--freeze-all-layers"
        words = []
        if self.freeze:
            words.append(f"--freeze {' '.join(self.freeze)}")
        if self.freeze_first_layers:
            words.append(f"--freeze-first-layers {self.freeze_first_layers}")
        return " ".join(words) or "no frozen weights"

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError for a part or layer that the model does not have, or if nothing is left to train."""
        first = self.freeze_first_layers or 0
        check(
            first <= model.num_layers,
            f"--freeze-first-layers {first} is more than --num-layers {model.num_layers}: pass at "
            "most that",
        )
        check(
            EXPERTS not in (self.freeze or ()) or model.num_experts,
            "--freeze experts: the model has no experts: leave it out, or pass --num-experts",
        )
        check(
            self.freeze_all_layers or not all(map(self.has, (EMBEDDING, LAYERS, HEAD))),
            f"--freeze {' '.join(self.freeze or ())} leaves nothing to train: leave a part out, or "
            "pass --freeze-all-layers for losses alone",
        )
