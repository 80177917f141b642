"""This program's checkpoints, read, and written without optimizer state for --finetune:

DIR/iter_0000000/part_00003.safetensors     a layer's weights (several above 124 layers), or the rest
DIR/hugging_face/                           the model's tokenizer and configurations
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.manifest import (
    CARRIED,
    FOLDER_FILES,
    Description,
    Files,
    iteration_path,
    read_manifest,
)
from ..checkpoint.save import save_alone
from ..checkpoint.schema import Entry, Manifest
from ..checkpoint.shards import WEIGHT, Search, Shard, check_model, read_shards
from ..checkpoint.tensor_files import write_tensors
from ..checkpoint.trusted import iteration_to_load
from ..config.architecture import architecture
from ..config.fields import check
from ..config.run_config import saved_run
from ..nn.adapters import FINGERPRINTS, bits_number
from ..nn.model import VOCABULARY
from ..text.foreign_models import no_checkpoint
from ..text.named_files import about
from .weights import Adapters, Shapes, Weights, adapter_shapes, layer_of, shapes, specs

BASE_FLAG = "--pretrained-checkpoint"  # the model that adapters belong to
_LAYOUT = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "data_parallel_size": 1,
    "zero_shards": 1,
}

OpenBase = Callable[[str, int | None], Weights]


@dataclass(frozen=True)
class _Reader:
    path: Path
    shapes: Shapes
    dtypes: dict[str, torch.dtype]
    files: dict[str, Files]

    def __call__(self, name: str) -> Tensor:
        key = WEIGHT + name
        tensor = torch.zeros(self.shapes[name], dtype=self.dtypes[name])
        search = Search([Shard.whole(key, tensor)], VOCABULARY)
        for file, entry in self.files[key].items():
            search.look(file, entry)
        for file, work in search.plan(self.path).items():
            read_shards(self.path / file, work)
        return tensor


def open_own(
    directory: str,
    iteration: int | None = None,
    base: str | None = None,
    open_base: OpenBase | None = None,
) -> Weights:
    """Open the latest checkpoint in `directory`, or `iteration`.

    base: the adapters' model, in place of the recorded directory
    open_base: opens a model in any format (default: `open_own`)

    Raise ValueError if the checkpoint is missing or damaged.
    """
    with about(f"--load {directory}"):
        found = iteration_to_load(directory) if iteration is None else iteration
        if found is None:
            raise ValueError(no_checkpoint(directory, f"pass --from-hf {directory}"))
        manifest = read_manifest(directory, found)
        run = saved_run(manifest, (1, 1))
        modules = manifest["config"]["model"].get("mtp_num_layers")
        model = replace(run.model, mtp_num_layers=modules)
        adapts = manifest["state"].get("lora")
        path = iteration_path(Path(directory), found)
        if adapts is not None:
            lora = _reader(path, manifest, adapter_shapes(model, run.lora))
            weights = _open_base(adapts, base, open_base or open_own)
            saved = asdict(weights.model)
            check_model(saved, architecture(model, saved), Path(base or adapts["base"]))
            adapters = Adapters(run.lora, weights.model, lambda name: lora(name).float(), adapts)
            return adapters.added_to(replace(weights, config=manifest["config"]))
        check(base is None, f"holds a whole model: leave {BASE_FLAG} {base} out")
        read = _reader(path, manifest, shapes(model))
    carried = Path(directory) / CARRIED
    return Weights(
        model,
        read.dtypes,
        read,
        carried if carried.is_dir() else None,
        manifest["config"],
    )


def _open_base(adapts: dict[str, Any], named: str | None, open_base: OpenBase) -> Weights:
    """Open the model that adapters name, or the `named` one, which must have equal weights."""
    recorded = adapts.get("base")
    directory = named or recorded
    if directory is None:
        raise ValueError(
            f"holds adapters and does not name their model: pass its place as {BASE_FLAG}"
        )
    check(
        Path(directory).is_dir(),
        f"{BASE_FLAG} {directory} is not a directory: pass the place of the model"
        if named
        else f"holds adapters of the model in {directory}, which is not there: pass its place as "
        f"{BASE_FLAG}",
    )
    weights = open_base(directory, None if named else adapts["base_iteration"])
    weights = weights.without_predictions()
    check(
        weights.adapters is None,
        f"{directory} holds adapters and not the weights of a model: pass the model's directory "
        f"as {BASE_FLAG}",
    )
    expected = adapts.get("fingerprint")
    check(
        named is None or expected is None or fingerprint(weights) == expected,
        f"{BASE_FLAG} {directory} has other weights than the model that the adapters were "
        "trained for, "
        f"{recorded}: pass that one",
    )
    return weights


def fingerprint(weights: Weights) -> int:
    counted = (name for name, spec in specs(weights.model).items() if spec.counted)
    return sum(bits_number(name, weights.read(name)) for name in counted) % FINGERPRINTS


def _reader(path: Path, manifest: Manifest, wanted: Shapes) -> _Reader:
    files: dict[str, Files] = defaultdict(lambda: defaultdict(lambda: {"shards": []}))
    dtypes: dict[str, torch.dtype] = {}
    for file, entry in manifest["files"].items():
        for record in entry["shards"]:
            place = files[record["key"]][file]
            place.update({**entry, "shards": [*place["shards"], record]})
            dtypes[record["key"]] = getattr(torch, record["dtype"])
    lacking = next((name for name in wanted if WEIGHT + name not in files), None)
    check(lacking is None, f"{path} has no {WEIGHT}{lacking}")
    return _Reader(path, wanted, {name: dtypes[WEIGHT + name] for name in wanted}, files)


def save_own(weights: Weights, directory: Path, adapters: Adapters | None = None) -> None:
    """Write a checkpoint at iteration 0 into a new directory. adapters: write these instead."""
    config = {
        "model": {**asdict(weights.model), "make_vocab_size_divisible_by": 1},
        "precision": asdict(weights.precision),
    }
    state = {
        "progress": {"iteration": 0, "consumed_samples": 0},
        "scaler": {},
        "optimizer_steps": 0,
        "weights_only": True,
    }
    if adapters is not None:
        config["lora"] = asdict(adapters.lora)
        state["lora"] = dict(adapters.base)
        like = {
            name: torch.empty(shape, device="meta")
            for name, shape in adapter_shapes(weights.model, adapters.lora).items()
        }
        weights = replace(weights, dtypes=dict.fromkeys(like, torch.float32), read=adapters.read)
    else:
        like = weights.like()
    layout: dict[str, int | str] = {**_LAYOUT, "pipeline_split": str(weights.model.num_layers)}
    save_alone(
        directory,
        lambda path: dict(_write_parts(weights, like, path)),
        Description(0, layout, config, state),
    )


def _write_parts(
    weights: Weights, like: dict[str, Tensor], path: Path
) -> Iterator[tuple[str, Entry]]:
    parts: dict[int, dict[str, Tensor]] = defaultdict(dict)
    layers = weights.model.num_layers
    for name, tensor in like.items():
        layer = layer_of(name)
        each = -(-layers // (FOLDER_FILES - 2))
        parts[0 if layer is None else 1 + layer // each][WEIGHT + name] = tensor
    for number, part in parts.items():
        file = f"part_{number:05d}.safetensors"
        entry = write_tensors(
            path / file, part, values=lambda key: weights.read(key.removeprefix(WEIGHT))
        )
        records = [Shard.whole(key, tensor).record() for key, tensor in part.items()]
        yield file, {**entry, "shards": records}
