"""Legacy checkpoints of Megatron-LM, without optimizer states: a file per rank.

DIR/latest_checkpointed_iteration.txt     an iteration, or "release"
DIR/iter_0000100/mp_rank_01[_002][_003]/model_optim_rng.pt
                                          tensor-parallel rank 1 [of stage 2] [with experts of rank 3]:
                                          "args", "checkpoint_version", "model" or "model0" ...
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checkpoint.manifest import RELEASE, TRACKER
from ...config.fields import check
from ...config.model import ModelConfig
from ...costs.sizes import round_up
from ...nn.model import OUTPUT, VOCABULARY, WORD_EMBEDDINGS
from ...nn.parameter import ParameterSpec
from ...text.written_files import write_text
from ..weights import Weights, at_layer, check_elements, check_rest, layer_of, specs, widest
from .arguments import VERSION, arguments_of, by_name, checked_model, pattern_of
from .dist import padded
from .names import fused_norms, our_name, their_name
from .pickles import load_pickled, save_pickled

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
# An expert's matrix: SequentialMLP's, TEGroupedMLP's, GroupedMLP's with all experts of a rank.
_SEQUENTIAL = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.weight(\d+)")
_TOGETHER = re.compile(r"(.*\.mlp\.experts)\.weight([12])")

Names = dict[str, Tensor]  # our names, of a rank's part of a chunk


class Ranks(NamedTuple):
    """Numbers of ranks: tensor-parallel, pipeline stages, expert-parallel."""

    tp: int
    pp: int
    ep: int


def open_legacy(path: Path, vocab_size: int | None, ignored: Collection[str] = ()) -> Weights:
    """Open an iteration directory, or raise ValueError."""
    files = {}
    for folder in sorted(path.glob("mp_rank_*")):
        match = _RANK.fullmatch(folder.name)
        if match is None:
            raise ValueError(f"{folder} is no folder of a rank: expected mp_rank_00[_000][_000]")
        files[tuple(int(number) for number in match.groups() if number)] = folder / FILE
    check(
        len({len(numbers) for numbers in files}) == 1,
        f"{path} has folders of different layouts, such as {path.name}/{folder.name}",
    )
    first = load_pickled(next(iter(files.values())))
    check(
        "args" in first, f"{path} holds no arguments of Megatron-LM: it was saved before version 2"
    )
    given = by_name(first["args"])
    check(
        pattern_of(given) is None,
        f"{path} is a HybridModel in the legacy format, which is not supported: save it as torch_dist",
    )
    ranks = _ranks(path, files, given.get("expert_model_parallel_size") or 1)
    tp = given.get("tensor_model_parallel_size", ranks.tp)
    check(
        ranks.ep == 1 or given.get("expert_tensor_parallel_size") in (None, tp),
        f"{path} has other tensor-parallel ranks for experts than for the rest: save it as torch_dist",
    )
    version = float(first.get("checkpoint_version", 0))
    chunks = list(_chunks(path, files, ranks))
    rows = sum(len(rank.get(WORD_EMBEDDINGS, ())) for rank in chunks[0][: ranks.tp])
    model = checked_model(path, given, rows, vocab_size, ignored)
    for part in _absent(model):
        raise ValueError(
            f"{path} has {part} in the legacy format, which is not supported: save it as torch_dist"
        )
    reader = _LegacyReader(path, model, version, specs(model), _numbered(chunks), ranks)
    reader.check()
    return Weights(
        model,
        {name: widest(part.dtype for part in reader.parts[name]) for name in reader.specs},
        reader,
    )


def _absent(model: ModelConfig) -> Iterator[str]:
    """Yield the parts of a model that are converted in the format torch_dist alone."""
    if model.has_delta_nets:
        yield "gated delta nets"
    if model.multi_latent_attention:
        yield "layers with latent attention"
    if model.predictions:
        yield "MTP modules"


Files = dict[tuple[int, ...], Path]  # of numbers in a folder's name


def _ranks(path: Path, files: Files, ep: int) -> Ranks:
    """Return the numbers of ranks, of which folder names have those above 1."""
    sizes = [1 + max(numbers) for numbers in zip(*files, strict=True)]
    tp = sizes.pop(0)
    if ep > 1 and sizes:
        ep = sizes.pop()
    ranks = Ranks(tp, sizes[0] if sizes else 1, ep)
    for p, t, e in itertools.product(range(ranks.pp), range(tp), range(ranks.ep)):
        check(
            _folder(files, (t, p, e), ranks) in files,
            f"{path} has no file of pipeline stage and tensor-parallel rank {(p, t)}, of {ranks.pp} x "
            f"{tp}" + (f", with experts {e} of {ranks.ep}" if ranks.ep > 1 else ""),
        )
    return ranks


def _folder(files: Files, rank: tuple[int, int, int], ranks: Ranks) -> tuple[int, ...]:
    """Return the numbers in the folder name of (tensor-parallel, stage, expert) rank."""
    t, p, e = rank
    length = len(next(iter(files)))
    if length == 3:
        return t, p, e
    if length == 2:
        return (t, e) if ranks.ep > 1 and ranks.pp == 1 else (t, p)
    return (t,)


def _chunks(path: Path, files: Files, ranks: Ranks) -> Iterator[list[Names]]:
    """Yield every model chunk as the parts of its ranks, tensor-parallel ranks innermost."""
    stages = [
        [
            load_pickled(files[_folder(files, (t, p, e), ranks)])
            for e in range(ranks.ep)
            for t in range(ranks.tp)
        ]
        for p in range(ranks.pp)
    ]
    keys = [key for key in stages[0][0] if re.fullmatch(r"model\d*", key)]
    check(bool(keys), f"{path} holds no model")
    for key in sorted(keys, key=lambda key: int(key[5:] or 0)):
        for members in stages:
            check(
                all(isinstance(rank.get(key), dict) for rank in members),
                f"{path}: a rank holds no {key}",
            )
            yield [_with_experts(dict(_named(rank[key]))) for rank in members]


def _named(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _named(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and (name := our_name(prefix + key)):
            yield name, value


def _with_experts(names: Names) -> Names:
    """Return a rank's tensors with its experts together, (experts, rows, columns) each."""
    own: Names = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in names.items():
        if match := _SEQUENTIAL.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        elif match := _GROUPED.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[2]}.weight", {})[int(match[3])] = tensor
        elif match := _TOGETHER.fullmatch(name):
            own[f"{match[1]}.linear_fc{match[2]}.weight"] = tensor
        else:
            own[name] = tensor
    for name, numbered in experts.items():
        check(
            sorted(numbered) == list(range(len(numbered))),
            f"{name} has experts {sorted(numbered)}, and some before the last are missing",
        )
        own[name] = torch.stack([numbered[expert] for expert in range(len(numbered))])
    return own


def _numbered(chunks: list[list[Names]]) -> dict[str, list[Tensor]]:
    """Return global name -> parts of all ranks, layers numbered over all model chunks."""
    parts: dict[str, list[Tensor]] = {}
    before = 0
    for chunk in chunks:
        for name in chunk[0]:
            whole = at_layer(name, before + (layer_of(name) or 0))
            parts.setdefault(whole, [rank[name] for rank in chunk if name in rank])
        layers = (layer_of(name) for name in chunk[0])
        before += max((1 + layer for layer in layers if layer is not None), default=0)
    return parts


@dataclass(frozen=True)
class _LegacyReader:
    """Reader that joins the parts of all ranks.

    parts: of tensor-parallel ranks, once for each expert-parallel rank
    """

    path: Path
    model: ModelConfig
    version: float
    specs: dict[str, ParameterSpec]
    parts: dict[str, list[Tensor]]
    ranks: Ranks

    def check(self) -> None:
        for name, spec in self.specs.items():
            check(name in self.parts, f"{self.path} holds no {name}")
            used = self._used(name)
            check_elements(self.path, spec, sum(part.numel() for part in used))
        check_rest(
            self.path, set(self.parts) - set(self.specs) - ({OUTPUT} if self.model.tied else set())
        )

    def _used(self, name: str) -> list[Tensor]:
        """Return the parts that the whole tensor consists of."""
        parts = self.parts[name]
        if ".mlp.experts." in name:
            return parts
        return parts[: self.ranks.tp if self.specs[name].partition_dim is not None else 1]

    def __call__(self, name: str) -> Tensor:
        spec = self.specs[name]
        parts = self._used(name)
        if spec.partition_dim is None:
            return parts[0].contiguous()
        if name in VOCABULARY:
            return torch.cat(parts)[: spec.shape[0]].contiguous()
        if ".mlp.experts." in name:
            return self._experts(spec, parts)
        shape = list(spec.shape)
        shape[spec.partition_dim] //= len(parts)
        if ".linear_qkv." in name:
            parts = [self._by_head(part) for part in parts]
        return torch.cat([part.reshape(shape) for part in parts], spec.partition_dim)

    def _experts(self, spec: ParameterSpec, parts: list[Tensor]) -> Tensor:
        """Join experts: tensor-parallel ranks first, then ranks with different experts."""
        assert spec.partition_dim is not None, "experts are divided"
        shape = list(spec.shape)
        shape[0] //= self.ranks.ep
        shape[spec.partition_dim] //= self.ranks.tp
        own = [self._of_experts(part, shape) for part in parts]
        groups = [own[first : first + self.ranks.tp] for first in range(0, len(own), self.ranks.tp)]
        return torch.cat([torch.cat(group, spec.partition_dim) for group in groups])

    @staticmethod
    def _of_experts(part: Tensor, shape: list[int]) -> Tensor:
        """Return a rank's experts; GroupedMLP has them transposed, in a matrix of all."""
        if part.dim() == 3:
            return part.reshape(shape)
        experts, *rows, columns = shape
        return part.view(experts, columns, -1).transpose(1, 2).reshape(shape)

    def _by_head(self, part: Tensor) -> Tensor:
        """Return a rank's queries, keys and values per head, as versions since 2 have them."""
        heads = part.shape[0] // (3 * self.model.kv_channels)
        d = self.model.kv_channels
        if self.version >= 2:
            return part
        if self.version >= 1:
            return part.view(heads, d, 3, -1).transpose(1, 2).reshape(part.shape)
        return part.view(3, heads, d, -1).transpose(0, 1).reshape(part.shape)


@dataclass(frozen=True)
class LegacyFormat:
    """Names and layout of a written checkpoint.

    transformer_engine: use the names of its layers and its grouped experts
    multiple: pad the vocabulary to a multiple of this x tp
    """

    transformer_engine: bool
    multiple: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def folder(self, tp: int, pp: int, ep: int) -> str:
        name = f"mp_rank_{tp:02d}"
        if self.pp > 1:
            name += f"_{pp:03d}"
        return f"{name}_{ep:03d}" if self.ep > 1 else name


def save_legacy(weights: Weights, directory: Path, form: LegacyFormat) -> None:
    """Write the weights as a release checkpoint, one rank's shard at a time.

    Raise ValueError if sizes do not divide.
    """
    check(
        weights.model.layer_types is None,
        f"--layer-types {weights.model.layer_types!r:.60}: only HybridModel has these layers, whose checkpoints are torch_dist: "
        "pass --ckpt-format torch_dist",
    )
    for part in _absent(weights.model):
        raise ValueError(
            f"--ckpt-format torch does not have {part}, which are converted as torch_dist: pass --ckpt-format torch_dist"
        )
    model = replace(weights.model, make_vocab_size_divisible_by=form.multiple)
    weights = replace(weights, model=model)
    for name, value, size in (
        ("attention heads", model.num_attention_heads, form.tp),
        ("query groups", model.query_groups, form.tp),
        ("MLP width", model.ffn_hidden_size, form.tp),
        ("width of experts", model.moe_ffn_hidden_size or 0, form.tp),
        ("width of the shared expert", model.moe_shared_expert_intermediate_size or 0, form.tp),
        ("layers", model.num_layers, form.pp),
        ("experts", model.num_experts or 1, form.ep),
    ):
        check(
            value % size == 0,
            f"{value} {name} are not divisible by {size} ranks: change --tensor-model-parallel-size, "
            "--pipeline-model-parallel-size or --expert-model-parallel-size",
        )
    for stage, expert, rank in itertools.product(range(form.pp), range(form.ep), range(form.tp)):
        folder = directory / RELEASE / form.folder(rank, stage, expert)
        folder.mkdir(parents=True)
        contents = _RankWriter(weights, form, rank, stage, expert).contents()
        with open(folder / FILE, "wb") as stream:
            save_pickled(contents, stream)
    write_text(directory / TRACKER, RELEASE)


@dataclass(frozen=True)
class _RankWriter:
    weights: Weights
    form: LegacyFormat
    rank: int
    stage: int
    expert: int

    def contents(self) -> dict[str, Any]:
        model = self.weights.model
        form = self.form
        assert model.vocab_size is not None, "weights say it"
        rows = round_up(model.vocab_size, form.multiple * form.tp)
        state: Names = {}
        for name, spec in specs(model).items():
            if (local := self._name_on_stage(name)) is not None:
                part = self._part(self.weights.read(name), spec, rows)
                state.update(self._spelled(local, layer_of(name), part))
        if model.tied and self.stage == form.pp - 1 > 0:
            spec = specs(model)[WORD_EMBEDDINGS]
            state[OUTPUT] = self._part(self.weights.read(WORD_EMBEDDINGS), spec, rows)
        args = arguments_of(model, rows, next(iter(self.weights.dtypes.values())), form.tp, form.pp)
        args.expert_model_parallel_size = form.ep
        args.moe_grouped_gemm = form.transformer_engine and model.num_experts is not None
        return {"args": args, "checkpoint_version": VERSION, "iteration": 0, "model": state}

    def _name_on_stage(self, name: str) -> str | None:
        layer = layer_of(name)
        stages = self.form.pp
        each = self.weights.model.num_layers // stages
        if layer is None:
            first = name.startswith("embedding.")
            return name if self.stage == (0 if first else stages - 1) else None
        if layer // each != self.stage:
            return None
        return at_layer(name, layer % each)

    def _spelled(self, name: str, layer: int | None, part: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a tensor, or each of a rank's experts, with Megatron-LM's name."""
        fused: dict[str, str] = {}
        if self.form.transformer_engine and layer is not None:
            layer_kind = self.weights.model.layer_kinds[layer]
            fused = fused_norms(layer_kind, engine=True, experts_apart=True)
        theirs = their_name(name, fused)
        if ".mlp.experts." not in theirs:
            yield theirs, part
            return
        place, linear, kind = theirs.rsplit(".", 2)
        for number, expert in enumerate(part):
            own = f"{place}.local_experts.{number}.{linear}.{kind}"
            if self.form.transformer_engine:
                own = f"{place}.{linear}.{kind}{number}"
            yield own, expert.clone()

    def _part(self, whole: Tensor, spec: ParameterSpec, rows: int) -> Tensor:
        """Copy this rank's shard. rows: of the vocabulary"""
        if spec.name in VOCABULARY:
            whole = padded(whole, rows)
        dim = int(".mlp.experts." in spec.name)
        if dim:
            whole = whole.chunk(self.form.ep)[self.expert]
        if spec.partition_dim is not None:
            whole = whole.chunk(self.form.tp, spec.partition_dim)[self.rank]
        if ".linear_fc1." in spec.name and spec.partition_dim == dim + 1:
            whole = whole.flatten(dim, dim + 1)
        return whole.clone(memory_format=torch.contiguous_format)
