"""Training state of Megatron-LM's torch_dist checkpoints: a run of Megatron-LM continues here.

Moments and FP32 weights are tensors with the keys of their weights behind optimizer.state.exp_avg.,
exp_avg_sq. and fp32_param. The common state has steps, loss scale, scheduler and arguments.

Sources: megatron/training/checkpointing.py, megatron/core/optimizer (distrib_optimizer.py, optimizer.py,
    grad_scaler.py), megatron/core/optimizer_param_scheduler.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.load import Checkpoint, Foreign
from ...config.fields import check, check_type, declarations
from ...config.optimizer import MOMENTS, OptimizerConfig
from ...config.param_schedule import ParamSchedule
from ...config.precision import PrecisionConfig
from ...config.rows import COUNTED
from ...config.run_config import GROUPS
from ...text.named_files import JsonObject
from .dist import STATE, DistReader, LayerKey, dist_reader

Saved = Mapping[str, Any]  # by Megatron-LM's names
_MASTER = "fp32_param"
_OPTIMIZER = re.compile(
    r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_.*"
)
# Groups of the run's config that a resumed run compares.
_COMPARED = ("batch", "optimizer", "precision", "training")
# Names of the schedule's values: theirs -> ours.
_SCHEDULE = {
    "max_lr": "lr",
    "min_lr": "min_lr",
    "lr_decay_style": "lr_decay_style",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "wd_incr_style": "weight_decay_incr_style",
}


def open_run(
    path: Path,
    iteration: int,
    vocab_size: int | None,
    *,
    ignored: Collection[str] = (),
    weights_only: bool = False,
    with_optimizer: bool = True,
) -> Checkpoint:
    """Open an iteration as a checkpoint to resume from, or raise ValueError.

    path: of the iteration
    vocab_size: number of tokens
    ignored: saved arguments that do not change the model
    weights_only: read no state, for a run that begins
    with_optimizer: require moments, too
    """
    reader, common = dist_reader(path, vocab_size, ignored)
    reader.files.integrity.verify_all()
    given = common["args"]
    moments = {
        (match[1], match[2]): key
        for key in reader.files.tensors
        if (match := STATE.fullmatch(key)) is not None
    }
    tensors = _TrainingReader(reader, moments)
    optimizer = {}
    if with_optimizer and not weights_only:
        optimizer = tensors.optimizer_state(common)
        tensors.check()
    notes: list[str] = []
    rows = reader.files.shape(reader.places("embedding.word_embeddings.weight")[0].key)[0]
    tp = given.get("tensor_model_parallel_size") or 1
    config = {group: dict(_values(group, given)) for group in _COMPARED}
    config["model"] = {
        **asdict(reader.model),
        "mask_vocab_padding": COUNTED,
        "make_vocab_size_divisible_by": rows // tp,
    }
    state = {} if weights_only else _state(path, iteration, common, given, optimizer)
    if optimizer and iteration and not state["optimizer_steps"] and tensors.has_moments():
        state["optimizer_steps"] = iteration
        notes.append(
            f"note: {path}: the optimizer's step is 0 next to moments that are not 0, as an offloaded optimizer saves them: "
            f"AdamW's bias correction continues from step {iteration}"
        )
    head = {
        "iteration": iteration,
        "layout": _layout(given),
        "config": config,
        "state": state,
        "notes": notes,
    }
    names = tensors.names()
    return Checkpoint(path.parent, path, iteration, head, foreign=Foreign(names, tensors))


@dataclass(frozen=True)
class _TrainingReader:
    """Reader of whole tensors by our key, FP32, with all rows of the vocabulary.

    moments: (state, key of the weight) -> key
    """

    weights: DistReader
    moments: dict[tuple[str, str], str]

    def names(self) -> frozenset[str]:
        names = set(self.weights.specs)
        for kind in MOMENTS:
            names |= {f"{kind}/{name}" for name in self.weights.specs if self._found(kind, name)}
        return frozenset(names)

    def _found(self, kind: str, name: str) -> bool:
        if self.weights.specs[name].balances:
            return True
        return all((kind, place.key) in self.moments for place in self.weights.places(name))

    def check(self) -> None:
        """Raise ValueError if a moment is missing."""
        files = self.weights.files
        for kind in MOMENTS:
            for name in self.weights.specs:
                check(
                    self._found(kind, name),
                    f"{files.path} holds no {kind} of {name} that every layout can read: save it with "
                    "--dist-ckpt-optim-fully-reshardable, or pass --no-load-optim",
                )

    def has_moments(self) -> bool:
        """Return True if a moment is not 0. The smallest are read first, so that one is read as a rule."""
        specs = self.weights.specs.values()
        names = [spec.name for spec in sorted(specs, key=lambda spec: math.prod(spec.shape))]
        return any(bool(self(f"{kind}/{name}").any()) for name in names for kind in MOMENTS)

    def __call__(self, key: str) -> Tensor:
        kind, _, name = key.rpartition("/")
        spec = self.weights.specs[name]
        if kind and spec.balances:
            return torch.zeros(spec.shape)
        parts = [self._part(kind or _MASTER, place) for place in self.weights.places(name)]
        return (
            self.weights.joined(name, parts) if kind else self.weights.weight(name, parts).float()
        )

    def _part(self, kind: str, place: LayerKey) -> Tensor:
        files = self.weights.files
        key = self.moments.get((kind, place.key))
        if key is None:
            return files.tensor(*place).float()
        shape = files.shape(place.key)
        if len(files.shape(key)) == len(shape) + 1:
            return files.flattened(key, shape, place.layer).float()
        check(
            files.shape(key) == shape,
            f"{files.path}: {key} has shape {list(files.shape(key))}, and its weight {list(shape)}",
        )
        return files.tensor(key, place.layer).float()

    def optimizer_state(self, common: Saved) -> JsonObject:
        """Return the optimizer's state apart from tensors, which may be objects of ranks."""
        files = self.weights.files
        keys = [index.fqn for index in files.places if _OPTIMIZER.fullmatch(index.fqn)]
        return {
            "common": common.get("optimizer"),
            "objects": [files.object(key) for key in keys],
        }


def _found(state: Any, name: str) -> Iterator[Any]:
    """Yield every value of that name in nested dictionaries and lists."""
    values: Any = ()
    if isinstance(state, dict):
        if name in state:
            yield state[name]
        values = state.values()
    elif isinstance(state, list | tuple):
        values = state
    for value in values:
        yield from _found(value, name)


def _values(group: str, given: Saved) -> Iterator[tuple[str, Any]]:
    """Yield the saved arguments with the name and type of a field."""
    for each in declarations(GROUPS[group]):
        value = given.get(each.name)
        if value is None or each.follows and value == given.get(each.follows):
            continue
        try:
            check_type(each, value)
        except ValueError:
            continue
        yield each.name, value


def _layout(given: Saved) -> JsonObject:
    names = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 1,
    }
    return {name: given.get(name) or default for name, default in names.items()}


def _state(
    path: Path,
    iteration: int,
    common: Saved,
    given: Saved,
    optimizer: Saved,
) -> JsonObject:
    consumed = _count(path, "consumed_train_samples", given.get("consumed_train_samples"))
    scheduler = common.get("opt_param_scheduler") or {}
    counted = _count(path, "num_steps", scheduler.get("num_steps", consumed))
    check(
        counted <= consumed,
        f"{path}: the scheduler counted {counted} samples, and the run consumed {consumed}",
    )
    state: JsonObject = {
        "progress": {
            "iteration": iteration,
            "consumed_samples": consumed,
            "unscheduled": consumed - counted,
        },
        "scaler": {},
        "optimizer_steps": 0,
    }
    if scheduler:
        state["param_schedule"] = _schedule(scheduler, given).state()
    if optimizer:
        found = {int(step) for name in ("step", "common_step") for step in _found(optimizer, name)}
        check(
            len(found) == 1,
            f"{path}: the optimizer's step is {sorted(found) or 'not there'}, not one number: pass "
            "--no-load-optim",
        )
        state["optimizer_steps"] = found.pop()
        state["scaler"] = _scaler(optimizer, given)
    return state


def _count(path: Path, name: str, value: Any) -> int:
    right = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    check(right, f"{path}: {name} is {value!r:.40}, not a number of samples")
    return int(value)


def _scaler(optimizer: Saved, given: Saved) -> dict[str, float]:
    hysteresis = given.get("hysteresis") or PrecisionConfig().hysteresis
    found = next(_found(optimizer, "grad_scaler"), None)
    saved: Saved = found or {}
    return {
        "scale": float(saved.get("scale", 1.0)),
        "good_steps": int(saved.get("growth_tracker", 0)),
        "hysteresis": int(saved.get("hysteresis_tracker", hysteresis)),
    }


def _schedule(scheduler: Saved, given: Saved) -> ParamSchedule:
    """Return the schedule, whose lengths are in samples in both programs."""
    config = OptimizerConfig(**dict(_values("optimizer", given)))
    changes = {
        ours: scheduler[theirs]
        for theirs, ours in _SCHEDULE.items()
        if scheduler.get(theirs) is not None
    }
    if changes.get("weight_decay_incr_style") == "constant":
        changes["weight_decay"] = changes.pop("end_weight_decay", config.weight_decay)
        changes.pop("start_weight_decay", None)
    wsd = given.get("lr_wsd_decay_samples")
    if wsd is None:
        wsd = (given.get("lr_wsd_decay_iters") or 0) * (given.get("global_batch_size") or 0)
    return ParamSchedule(
        replace(config, **changes),
        warmup_samples=scheduler.get("lr_warmup_steps", 0),
        decay_samples=scheduler.get("lr_decay_steps", 0),
        total_samples=scheduler.get("wd_incr_steps", 0),
        wsd_samples=wsd,
    )
