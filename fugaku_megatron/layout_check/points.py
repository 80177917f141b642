"""Points of an iteration at which tensors are compared, in the order of execution, and the communication before each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..comm.grid import Grid
from ..config.layer_kinds import head_projections, replicated
from ..config.layout import Layout
from ..config.parallel import A2A, ALLGATHER
from ..config.rows import MLP_OF_EXPERTS
from ..config.run_config import RunConfig
from ..costs.stages import stage_layers
from .shrink import ITERATIONS

# Kinds of tensors.
USED = "weight used"
FORWARD = "output"
LOSS = "loss"
BACKWARD = "gradient"
LOCAL = "weight gradient before its sum"
REDUCED = "weight gradient"
NORM = "gradient norm"
STATE = "state"
SCALE = "moment's scale"
MOMENT = "moment"
UPDATE = "update"
GATHERED = "weight after the update"
CHECKPOINT = "checkpoint"
LOADED = "loaded checkpoint"
OF_ACTIVATIONS = (FORWARD, BACKWARD)
_BACKWARDS = (BACKWARD, LOCAL, REDUCED)

# Modules whose outputs are recorded, named as in Megatron-core.
EMBEDDING = "embedding"
INPUT_NORM = "input_layernorm"
CORE = "self_attention.core_attention"
ATTENTION = "self_attention"
MLP_NORM = "pre_mlp_layernorm"
MLP = "mlp"
LAYER = ""
FINAL_NORM = "decoder.final_layernorm"
# Modules of the mixers' projections besides their output projections.
NARROW_PROJECTIONS = tuple(f"{ATTENTION}.{name}" for name in replicated())
HEAD_PROJECTIONS = tuple(dict.fromkeys(f"{ATTENTION}.{name}" for name in head_projections()))
SITES = (INPUT_NORM, *NARROW_PROJECTIONS, *HEAD_PROJECTIONS, CORE, ATTENTION, MLP_NORM, MLP, LAYER)

# Kinds in the order in which an iteration makes them -> what such a tensor is computed from, see `neighbour`.
KINDS = {
    USED: "the weights of the update before",
    FORWARD: "the tokens",
    LOSS: f"the output of {FINAL_NORM}",
    BACKWARD: "the loss",
    LOCAL: "the gradients of activations",
    REDUCED: "the weight gradients of every rank",
    NORM: "the weight gradients",
    STATE: "the gradient norm",
    SCALE: "the weight gradients and their norm",
    MOMENT: "the weight gradients and their norm",
    UPDATE: "the moments",
    GATHERED: "the update",
    CHECKPOINT: "the weights and moments in memory",
    LOADED: "the checkpoint",
}

# Iteration -> the origin of its weights, if not the update before.
SOURCES = {1: "the seed", ITERATIONS: "the loaded checkpoint"}

GROUPS = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "dp": "data-parallel",
    "ep": "expert-parallel",
    "etp": "expert-tensor-parallel",
    "edp": "expert-data-parallel",
    "embedding": "first-and-last-stage",
}


class Point(NamedTuple):
    """A tensor of the run. sample: first sample of the micro-batch; 0 for tensors of the whole iteration"""

    iteration: int
    kind: str
    name: str
    sample: int = 0

    @property
    def key(self) -> str:
        return f"{self.iteration}/{self.kind}/{self.name}/{self.sample}"

    @staticmethod
    def of(key: str) -> Point:
        """Invert `key`. Raise ValueError for other text."""
        iteration, kind, rest = key.split("/", 2)
        name, sample = rest.rsplit("/", 1)
        return Point(int(iteration), kind, name, int(sample))

    @property
    def reduced(self) -> Point:
        """The weight gradient after its sum."""
        return self._replace(kind=REDUCED)

    @property
    def order(self) -> tuple[int, int, int, int, str]:
        """Sort key: the order of execution."""
        place = _place(self.name)
        if self.kind in _BACKWARDS:
            place = -place
        return self.iteration, [*KINDS].index(self.kind), place, self.sample, self.name

    def __str__(self) -> str:
        text = f"{self.kind} of {self.name}" if self.name else self.kind
        if self.kind in OF_ACTIVATIONS:
            text += f", micro-batch from sample {self.sample}"
        return f"{text}, iteration {self.iteration}"


def site_name(layer: str, site: str) -> str:
    """layer: `TransformerLayer.name`"""
    return f"{layer}.{site}".removesuffix(".")


_FINAL_PLACE = 10**6  # of the final norm, in the order of modules


def _place(name: str) -> int:
    found = re.search(r"(decoder|mtp)\.layers\.(\d+)(?:\.transformer_layer)?(?:\.(.*))?$", name)
    width = len(SITES) + 1
    if found is None:
        if EMBEDDING in name:
            return 0
        return _FINAL_PLACE
    first = 1 if found[1] == "decoder" else _FINAL_PLACE + 1
    inside = found[3] or LAYER
    site = len(SITES) - 1
    if inside in SITES:
        site = SITES.index(inside)
    elif inside.startswith((ATTENTION, INPUT_NORM)):
        site = SITES.index(ATTENTION)
    elif inside:
        site = SITES.index(MLP)
    return first + int(found[2]) * width + site


def neighbour(point: Point, outputs: Iterable[str]) -> str:
    """Describe the tensor that the point's tensor is computed from. outputs: names of recorded modules"""
    names = sorted(outputs, key=_place)
    if point.kind == FORWARD and point.name != names[0]:
        return f"the output of {names[names.index(point.name) - 1]}"
    if point.kind == BACKWARD and point.name != names[-1]:
        return f"the gradient of {names[names.index(point.name) + 1]}"
    if point.kind == USED and point.iteration in SOURCES:
        return SOURCES[point.iteration]
    return KINDS[point.kind]


@dataclass(frozen=True)
class Communication:
    """Communication of one rank before each point, in words."""

    run: RunConfig
    layout: Layout
    rank: int

    @property
    def ranks(self) -> dict[str, list[int]]:
        return Grid(*self.layout.sizes).ranks(self.rank)

    def over(self, verb: str, group: str) -> str | None:
        """Describe a collective, or return None if the group is one rank."""
        members = self.ranks.get(group, ())
        if len(members) < 2:
            return None
        return f"{verb} over the {GROUPS[group]} ranks {' '.join(map(str, members))}"

    def gather(self) -> str | None:
        """Describe the communication of rows before matmuls that shard columns; in backward after those that shard rows."""
        return self.over("all-gather", "tp") if self.run.parallel.sequence_parallel else None

    def partial_sum(self) -> str | None:
        """Describe the sum after matmuls that shard rows; in backward before those that shard columns."""
        verb = "reduce-scatter" if self.run.parallel.sequence_parallel else "all-reduce"
        return self.over(verb, "tp")

    def over_shards(self, verb: str, expert: bool) -> str | None:
        """Describe a collective of ZeRO-1, or return None without the optimizer's shards."""
        if not self.run.parallel.zero_stage:
            return None
        return self.over(verb, "edp" if expert else "dp")

    def _attention(self, layer: int) -> str | None:
        if self.layout.cp == 1:
            return None
        verbs = {A2A: "all-to-all of heads", ALLGATHER: "all-gather of keys and values"}
        verb = verbs.get(self.run.cp_comm_types[layer], "ring of keys and values")
        return self.over(verb, "cp")

    def stage_border(self, layer: int, step: int) -> str | None:
        """Describe the message between this rank's layer, from 0, and the next (1) or previous (-1) layer."""
        other = layer + step
        grid = Grid(*self.layout.sizes)
        dp, own, tp = grid.coords(self.rank)
        for stage in range(self.layout.pp):
            if any(other in layers for layers in stage_layers(self.run, stage)):
                if stage == own:
                    return None
                sender = grid.rank(dp, stage, tp)
                return (
                    f"message from rank {sender} (stage {stage}) to rank {self.rank} (stage {own})"
                )
        return None

    def forward(self, layer: int, site: str) -> str | None:
        """Describe the communication before an output, inside a layer. layer: from 0"""
        return {
            **dict.fromkeys(HEAD_PROJECTIONS, self.gather()),
            CORE: self._attention(layer),
            ATTENTION: self.partial_sum(),
            MLP: self._mlp(layer),
        }.get(site)

    def backward(self, layer: int, site: str) -> str | None:
        """Describe the communication before an output's gradient. layer: from 0"""
        if site == LAYER:
            if layer == len(self.run.model.all_layer_kinds) - 1:
                return None
            return self.stage_border(layer, 1)
        return {
            **dict.fromkeys(HEAD_PROJECTIONS, self._attention(layer)),
            **dict.fromkeys(NARROW_PROJECTIONS, self.partial_sum()),
            MLP_NORM: self._mlp(layer),
            CORE: self.gather(),
            INPUT_NORM: self.partial_sum(),
        }.get(site)

    def _mlp(self, layer: int) -> str | None:
        has_experts = self.run.model.all_layer_kinds[layer].mlp == MLP_OF_EXPERTS
        if has_experts and self.run.parallel.divides_experts:
            return joined(
                self.over("all-to-all of tokens", "ep"),
                self.over("all-gather and reduce-scatter of rows", "etp"),
            )
        return joined(self.gather(), self.partial_sum())

    def loss(self) -> str | None:
        """Describe the communication between the final norm and the mean loss."""
        return joined(
            self.gather(),
            self.over("all-reduce of the softmax", "tp"),
            self.over("all-reduce of the mean", "dp"),
        )

    def gradient_sum(self, expert: bool, partial: bool, tied: bool) -> str | None:
        """Describe a weight gradient's sums. partial: see `ParameterSpec.sequence_parallel`"""
        verb = "reduce-scatter" if self.run.parallel.zero_stage else "all-reduce"
        parts = []
        if partial:
            parts.append(self.over("all-reduce", "tp"))
        parts.append(self.over(verb, "edp" if expert else "dp"))
        if tied:
            parts.append(self.over("all-reduce of the tied embedding's gradient", "embedding"))
        return joined(*parts)


def joined(*texts: str | None) -> str | None:
    return ", then ".join(text for text in texts if text) or None
