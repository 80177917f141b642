"""Record of a rank's tensors during its iterations, each with its place in the whole tensor, and files of whole tensors.

Hooks on the stage's modules copy outputs and their gradients; weights and their gradients are cut into boxes as a checkpoint's are.
A file has the FP32 tensors of one number format, named by `Point.key`. Shapes: as in `nn`, w width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.shards import Shard
from ..checkpoint.tensor_files import PlainFile, read_header, write_tensors
from ..config.fields import check
from ..config.layer_kinds import MIXERS
from ..config.optimizer import MOMENTS
from ..nn.attention.context_parallel import own_segments, positions
from ..nn.forward_context import Pass
from ..nn.layers import Context
from ..nn.model import WORD_EMBEDDINGS, Chunk
from ..nn.parameter import ModelParameter, parameters_of, scales_of
from ..text.written_files import make_folder
from ..training.trainer import IterationResult, Trainer
from .points import (
    ATTENTION,
    BACKWARD,
    CORE,
    EMBEDDING,
    FINAL_NORM,
    FORWARD,
    GATHERED,
    HEAD_PROJECTIONS,
    INPUT_NORM,
    KINDS,
    LAYER,
    LOCAL,
    LOSS,
    MLP,
    MLP_NORM,
    MOMENT,
    NORM,
    REDUCED,
    SCALE,
    SITES,
    STATE,
    UPDATE,
    USED,
    Communication,
    Point,
    joined,
    site_name,
)
from .shrink import ITERATIONS, OVERFLOWS

Index = tuple[slice | Tensor, ...]
Between = tuple[str | None, str | None]  # communication before a tensor, and before its gradient
FORMATS = ("fp32", "int8_moments", "bf16", "fp16", "int8")
LOADING = "loading of the checkpoint, and broadcasts to the ranks that share tensors"


@dataclass(frozen=True)
class Piece:
    """A rank's share of a tensor.

    shape: of the whole tensor
    index: this rank's elements in it
    values: FP32
    between: communication between this tensor and the tensors that it is computed from; None: none
    copy: pieces of one tensor with equal `copy` add up, in a gradient before its sum
    """

    point: Point
    shape: tuple[int, ...]
    index: Index
    values: Tensor
    between: str | None = None
    copy: int = 0


class Recorder:
    """Recorder of one rank's trainer. `pieces` has every piece recorded so far.

    The update of iteration OVERFLOWS is skipped: gradients of the last rank become Inf before their sum.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.pieces: list[Piece] = []
        self.iteration = trainer.progress.iteration
        self._sample = 0  # of the micro-batch in forward, or recomputed in backward
        self._seen: set[Point] = set()
        self._before: list[Tensor] = []
        self._communication = Communication(trainer.run, trainer.layout, trainer.world.rank)
        for chunk in trainer.stage.chunks:
            self._watch(chunk)
        trainer.optimizer.buckets.before_sum = self._local_gradients
        trainer.before_update = self._reduced_gradients

    # Iterations

    def train(self, iterations: int) -> None:
        """Run and record iterations. Collective."""
        for _ in range(iterations):
            self.iteration += 1
            self._before = [shard.master.float().clone() for shard in self.trainer.optimizer.shards]
            self._finished(self.trainer.train_step())
        self.trainer.optimizer.buckets.await_weights()
        for parameter in self.trainer.optimizer.flat.parameters:
            self._weight(GATHERED, parameter)

    def _finished(self, result: IterationResult) -> None:
        sums = "all-reduces of the squared norm over all ranks"
        self._scalar(LOSS, result.loss, self._communication.loss())
        for depth, loss in enumerate(result.predictions, 1):
            self._scalar(LOSS, loss, self._communication.loss(), f"mtp_{depth}")
        if self.iteration != OVERFLOWS:
            self._scalar(NORM, result.grad_norm, sums)
        self._scalar(STATE, result.skipped, sums, "skipped updates")
        for name, value in state_of(self.trainer).items():
            self._scalar(STATE, value, sums, name)
        for shard, before in zip(self.trainer.optimizer.shards, self._before, strict=True):
            self._values(UPDATE, shard.master.float() - before, shard.start)
            starts = (shard.start, shard.start + shard.orthogonal)
            for which, (name, start) in enumerate(zip(MOMENTS, starts, strict=True)):
                self._values(MOMENT, shard.moment(which), start, prefix=f"{name} ")
                if shard.eight_bit:
                    scales = torch.zeros(len(shard.master))
                    for block in shard.adamw_blocks:
                        own = shard.eight_bit[which].scale_of_elements(block.blocks)
                        scales[block.start : block.end] = own
                    self._values(SCALE, scales, start, prefix=f"{name} ")

    def _values(self, kind: str, values: Tensor, start: int, prefix: str = "") -> None:
        """Record values (n,) of the flat buffer's elements from `start` on."""
        flat = self.trainer.optimizer.flat
        parameters = {p.spec.name: p for p in flat.parameters}
        for shard in flat.shards(kind, values, start, owned=False):
            name = shard.key.split("/", 1)[1]
            spec = parameters[name].spec
            between = None
            if kind == REDUCED:
                tied = parameters[name] is self.trainer.stage.tied_copy
                between = self._communication.gradient_sum(
                    spec.expert, spec.sequence_parallel, tied
                )
            elif kind == SCALE:
                between = self._communication.over_shards(
                    "all-reduce of largest elements", spec.expert
                )
            point = Point(self.iteration, kind, prefix + name)
            self.pieces += pieces_of(shard, point, between)

    def _scalar(self, kind: str, value: float, between: str | None, name: str = "") -> None:
        self.pieces.append(scalar(Point(self.iteration, kind, name), value, between))

    # Activations

    def _watch(self, chunk: Chunk) -> None:
        chunk.register_forward_pre_hook(self._enter)
        if chunk.is_first:
            embedding = chunk.embedding
            embedding.register_forward_pre_hook(self._use_weights)
            between: Between = (self._communication.partial_sum(), None)
            self._watch_tensor(embedding, chunk.context, EMBEDDING, between=between)
        for layer in chunk.all_layers:
            self._watch_layer(layer, chunk.context)
        for module in chunk.predictions:
            module.register_forward_pre_hook(self._use_weights)
        if chunk.is_last:
            norm = chunk.final_layernorm
            norm.register_forward_pre_hook(self._use_weights)
            if chunk.output_weight.spec.name != WORD_EMBEDDINGS:
                norm.register_forward_pre_hook(
                    lambda *_: self._weight(USED, chunk.output_weight, once=True)
                )
            between = (None, self._communication.partial_sum())
            self._watch_tensor(norm, chunk.context, FINAL_NORM, between=between)

    def _watch_layer(self, layer: Any, context: Context) -> None:
        number = layer.layer - 1
        layer.register_forward_pre_hook(self._enter)
        layer.register_forward_pre_hook(self._use_weights)
        attention = layer.self_attention
        outputs = {LAYER: layer}
        inputs = {}
        if attention is not None:
            mixer = MIXERS[context.model.all_layer_kinds[number].mixer]
            *projections, out = (*mixer.replicated, *mixer.linears)
            outputs[ATTENTION] = attention
            for name in projections:
                if hasattr(attention, name):
                    outputs[f"{ATTENTION}.{name}"] = getattr(attention, name)
            inputs[CORE] = getattr(attention, out)
        if layer.mlp is not None:
            outputs[MLP] = layer.mlp
            inputs[MLP_NORM] = layer.mlp
        if layer.input_layernorm is not None:
            outputs[INPUT_NORM] = layer.input_layernorm
        communication = self._communication
        sites = {**outputs, **inputs}
        first = min(sites, key=SITES.index)
        for site, module in sites.items():
            before = communication.forward(number, site)
            if site == first:
                before = joined(communication.stage_border(number, -1), before)
            between = before, communication.backward(number, site)
            self._watch_tensor(
                module,
                context,
                site_name(layer.name, site),
                between=between,
                of_input=site in inputs,
            )

    def _watch_tensor(
        self,
        module: nn.Module,
        context: Context,
        name: str,
        between: Between,
        of_input: bool = False,
    ) -> None:
        """Record a module's output, or its input, in every forward."""

        def hook(_: nn.Module, args: Any, output: Tensor | None = None) -> None:
            self._activation(args[0] if output is None else output, context, name, between)

        if of_input:
            module.register_forward_pre_hook(hook)
        else:
            module.register_forward_hook(hook)

    def _enter(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        (forward_pass,) = (each for each in args if isinstance(each, Pass))
        self._sample = forward_pass.first_sample

    def _activation(self, x: Tensor, context: Context, name: str, between: Between) -> None:
        """Record x (s, b, w), and its gradient in backward.

        A recomputed output may have no values: only the first one is recorded.
        """
        sample = self._sample
        point = Point(self.iteration, FORWARD, name, sample)
        if point not in self._seen:
            self._seen.add(point)
            self._add_activation(point, x, context, between[0])
        if x.requires_grad and torch.is_grad_enabled():
            gradient = Point(self.iteration, BACKWARD, name, sample)
            x.register_hook(lambda dx: self._add_activation(gradient, dx, context, between[1]))

    def _add_activation(
        self, point: Point, x: Tensor, context: Context, between: str | None
    ) -> None:
        width = x.shape[2]
        first = 0
        whole = width
        if point.name.endswith((*HEAD_PROJECTIONS, CORE)):  # of the whole sequence
            segments = own_segments(len(x), context.cp)
            first = context.tp.rank * width
            whole = context.tp.size * width
        else:
            segments = context.segments(x)
        shape = (self.trainer.run.model.seq_length, x.shape[1], whole)
        index = (positions(segments), slice(None), slice(first, first + width))
        self.pieces.append(Piece(point, shape, index, _copied(x), between))

    # Weights

    def _use_weights(self, module: nn.Module, args: Any) -> None:
        for parameter in parameters_of(module):
            self._weight(USED, parameter, once=True)

    def _weight(self, kind: str, parameter: ModelParameter, once: bool = False) -> None:
        point = Point(self.iteration, kind, parameter.spec.name)
        if once and point in self._seen or scales_of(parameter) is not None:
            return
        self._seen.add(point)
        between = self._communication.over_shards(
            "all-gather of updated weights", parameter.spec.expert
        )
        if kind == USED and self.iteration == ITERATIONS:
            between = LOADING
        self._add_parameter(point, parameter, parameter.data, between=between)

    def _add_parameter(
        self,
        point: Point,
        parameter: ModelParameter,
        values: Tensor,
        between: str | None,
        copy: int = 0,
    ) -> None:
        spec = parameter.spec
        index = tuple(slice(o, o + n) for o, n in zip(spec.offset, parameter.shape, strict=True))
        self.pieces.append(Piece(point, spec.shape, index, _copied(values), between, copy))

    def _local_gradients(self, bucket: int, grads: Tensor) -> None:
        """Record this rank's gradients before any sum. bucket: -1 for the tied embedding"""
        if self.iteration == OVERFLOWS:
            if self.trainer.world.rank == self.trainer.world.size - 1:
                grads.fill_(math.inf)
            return
        optimizer = self.trainer.optimizer
        tied = self.trainer.stage.tied_copy
        if bucket < 0:
            own = [p for p in optimizer.flat.parameters if p is tied]
        else:
            start = optimizer.flat.buckets[bucket].start
            end = optimizer.flat.buckets[bucket].end
            own = [p for p, *_ in optimizer.flat.overlaps(start, end) if p is not tied]
        for parameter in own:
            spec = parameter.spec
            replicated = spec.partition_dim is None and not (spec.sequence_parallel or spec.expert)
            copy = self.trainer.groups.tp.rank if replicated else 0
            point = Point(self.iteration, LOCAL, spec.init_name)
            self._add_parameter(point, parameter, parameter.main_grad, between=None, copy=copy)

    def _reduced_gradients(self, consumed: int, loss: float) -> float:
        if self.iteration == OVERFLOWS:
            return loss
        optimizer = self.trainer.optimizer
        gradients = optimizer.reduce_gradients()
        for shard, grads in zip(optimizer.shards, gradients, strict=True):
            self._values(REDUCED, grads, shard.start)
        return loss


def state_of(trainer: Trainer) -> dict[str, float]:
    """Return the optimizer's state apart from tensors, by name."""
    optimizer = trainer.optimizer
    return {"updates": optimizer.steps, "the loss scale": optimizer.scaler.scale}


def scalar(point: Point, value: float, between: str | None) -> Piece:
    return Piece(point, (1,), (slice(0, 1),), torch.tensor([value], dtype=torch.float32), between)


def pieces_of(shard: Shard, point: Point, between: str | None) -> Iterable[Piece]:
    """Yield a checkpoint record's boxes."""
    values = shard.tensor.detach().view(-1)
    for box in shard.piece.boxes():
        piece = _copied(shard.piece.view(values, box))
        yield Piece(point, shard.global_shape, box.slices, piece, between)


def _copied(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32, copy=True)


def assembled(pieces: Iterable[Piece]) -> dict[Point, Tensor]:
    """Return the whole tensors. Gradients before their sum are left out."""
    whole: dict[Point, Tensor] = {}
    for piece in pieces:
        if piece.point.kind != LOCAL:
            target = whole.setdefault(piece.point, torch.zeros(piece.shape))
            target[piece.index] = piece.values
    return whole


def file_of(directory: Path, number_format: str) -> Path:
    return directory / f"{number_format}.safetensors"


def check_record(directory: Path) -> None:
    """Make the directory of --record. Raise ValueError if it has a record, or cannot be made."""
    found = [each for each in FORMATS if file_of(directory, each).exists()]
    check(
        not found,
        f"--record {directory} holds {''.join(found[:1])}.safetensors: pass another directory",
    )
    try:
        make_folder(directory)
    except OSError as error:
        raise ValueError(
            f"--record {directory}: {error.strerror}: pass another directory"
        ) from None


def check_against(directory: Path) -> None:
    """Raise ValueError if the directory of --against has no record."""
    check(
        any(file_of(directory, each).is_file() for each in FORMATS),
        f"--against {directory} holds no record: pass the directory of an earlier --check-layout --record",
    )


def write_record(directory: Path, number_format: str, ranks: Iterable[list[Piece]]) -> None:
    """Write the tensors of one number format. Raise ValueError if that fails."""
    tensors = assembled(chain.from_iterable(ranks))
    named = {point.key: tensor.contiguous() for point, tensor in tensors.items()}
    write_tensors(file_of(directory, number_format), named)


def read_record(directory: Path, number_format: str) -> dict[Point, Tensor]:
    """Return the tensors of one number format in FP32, none if the record has none.

    Raise ValueError for a file that is damaged or has other names.
    """
    path = file_of(directory, number_format)
    if not path.is_file():
        return {}
    content = PlainFile(path, path.stat().st_size)
    return {
        _point(path, key): content.read_tensor(stored).float()
        for key, stored in read_header(content).items()
    }


def _point(path: Path, key: str) -> Point:
    try:
        point = Point.of(key)
    except ValueError:
        point = Point(0, "", "")
    check(
        point.kind in KINDS,
        f"{path}: {key:.80} is not ITERATION/KIND/NAME/SAMPLE with a kind of {', '.join(KINDS)}",
    )
    return point
