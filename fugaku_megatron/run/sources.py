"""Sources of a run besides its flags: weights, documents in memory, and a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..convert.weights import Weights
from ..data.token_arrays import TokenArrays
from ..text.named_files import JsonObject
from .checkpoint_source import Resume
from .memory_copies import InMemory


@dataclass(frozen=True)
class Sources:
    """Data and weights of a run.

    resume: this program's checkpoints; weights: another program's whole model.
    carried: directory with the model's tokenizer files.
    tokenizer: identity of the run's tokenizer.
    arrays: documents in memory, by their names in the data flags.
    memory: copies on the nodes, from which `resume` may be.
    samples: training and validation samples to open, None for every validation sample once; without them the plan's.
    """

    resume: Resume = field(default_factory=Resume)
    weights: Weights | None = None
    carried: Path | None = None
    tokenizer: JsonObject | None = None
    arrays: Mapping[str, TokenArrays] = field(default_factory=dict)
    memory: InMemory | None = None
    samples: tuple[int, int | None] | None = None

    @property
    def found(self) -> bool:
        """True if the run starts from weights."""
        return bool(self.weights or self.resume.checkpoint or self.resume.base)
