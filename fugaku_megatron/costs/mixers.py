"""Costs of a layer's mixer: the interface between a row of `MIXERS` and the formulas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import NamedTuple

from ..config.layer_kinds import MIXERS, LayerKind, replicated, row_parallel
from ..config.model import ModelConfig
from ..config.run_config import RunConfig
from .records import MatmulCollectives, Record, Records, linear

Matrices = list[tuple[int, int, int]]  # (how many, rows, columns)
Shapes = dict[str, tuple[int, int]]  # linear layer -> (outputs, inputs)
Segments = list[tuple[int, int]]  # (how many a rank holds, elements of each)


class Elementwise(NamedTuple):
    """Operations without a record: bytes read and written, calls, (bytes per tensor, tensors) allocated."""

    moved: float = 0.0
    calls: int = 0
    allocations: tuple[tuple[int, int], ...] = ()


class MixerCosts(ABC):
    """Costs on one rank for one micro-batch."""

    @abstractmethod
    def records(self, run: RunConfig, cp_comm_type: str, kind: LayerKind | None) -> Records:
        """Return the operations. kind: None: `typical_layer`, with the mean visible share of all layers"""

    @abstractmethod
    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the linear layers with their sizes in the whole model; the last is the output projection."""

    def projection(
        self, run: RunConfig, name: str, bias: bool = False, saved_bytes: int = 0
    ) -> Record:
        """Return the matmul of one of `shapes` on a rank. saved_bytes: of its input"""
        outputs, inputs = self.shapes(run.model)[name]
        rows = run.tokens_per_microbatch
        if name in replicated():
            gemm = (rows // run.sequence_shards, outputs, inputs)
            return linear(name, gemm, saved_bytes=saved_bytes, replicated=outputs * inputs)
        if name in row_parallel():
            gemm = (rows, outputs, inputs // run.tp)
            whole = outputs if bias else 0  # every tensor-parallel rank has it
            around = MatmulCollectives.from_run(run)
            return around.row(name, gemm, bias=whole, replicated=whole, saved_bytes=saved_bytes)
        own = outputs // run.tp
        around = MatmulCollectives.from_run(run, rows * inputs * run.element_bytes)
        own_bias = own if bias else 0
        return around.column(name, (rows, own, inputs), bias=own_bias, saved_bytes=saved_bytes)

    def tensors(self, run: RunConfig) -> dict[str, int]:
        """Return the bytes between the projections: of the first result, the last argument, and scores."""
        rows = run.tokens_per_microbatch * run.element_bytes
        (outputs, _), *_, (_, inputs) = self.shapes(run.model).values()
        return {"qkv": rows * outputs // run.tp, "context": rows * inputs // run.tp, "scores": 0}

    def elementwise(self, run: RunConfig, sizes: Mapping[str, int], kind: LayerKind) -> Elementwise:
        """Return the forward work that `records` leave out. sizes: of `tensors`"""
        return Elementwise()

    def recomputed_bytes(self, run: RunConfig, kind: LayerKind) -> int:
        """Return the bytes that the run's selective recompute does not save."""
        return 0

    def weight_input_bytes(self, run: RunConfig) -> int:
        """Return the bytes kept between the halves of a split backward."""
        sizes = self.tensors(run)
        return 2 * run.activation_bytes + sizes["qkv"] + sizes["context"]

    def cache_bytes(self, run: RunConfig, samples: int, positions: int, kind: LayerKind) -> int:
        """Return the bytes that generation keeps."""
        return 0

    def matrices(self, run: RunConfig) -> Matrices:
        """Return the matrices that Muon orthogonalizes and ranks share: the linear layers' weights."""
        shapes = self.shapes(run.model)
        return [(1, *shape) for name, shape in shapes.items() if name not in replicated()]

    def vectors(self, run: RunConfig) -> Segments:
        """Return the segments of parameters other than the linear layers' weights."""
        return []


def mixer_costs(mixer: str) -> MixerCosts:
    costs: type[MixerCosts] = resolve_name(MIXERS[mixer].costs)
    return costs()


def cache_bytes(run: RunConfig, samples: int, positions: int, kinds: Sequence[LayerKind]) -> int:
    return sum(
        mixer_costs(kind.mixer).cache_bytes(run, samples, positions, kind)
        for kind in kinds
        if kind.mixer is not None
    )
