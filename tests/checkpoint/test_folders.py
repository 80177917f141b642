"""Checkpoints of many ranks: folders, scattered records, memory at 98,304."""

import json
import os
import pickle
import re
import tracemalloc
from collections import Counter

import pytest
import torch

from fugaku_megatron.checkpoint import load as load_module
from fugaku_megatron.checkpoint import manifest as folders_module
from fugaku_megatron.checkpoint.load import open_checkpoint
from fugaku_megatron.checkpoint.manifest import (
    FOLDER_FILES,
    Description,
    Folders,
    all_folders,
    folder_of,
    list_iterations,
    read_head,
    read_manifest,
)
from fugaku_megatron.checkpoint.shards import Shard
from fugaku_megatron.comm.base import SoloComm
from tests.helpers import load_checkpoint, one_error, save_checkpoint
from tests.threads import ThreadWorld
from tests.time_limit import time_limit

pytestmark = pytest.mark.parallel

LAYOUT = {"tensor_model_parallel_size": 1}
RANKS = 9


@pytest.fixture
def few(monkeypatch):
    """Two files in a folder: nine ranks need three levels."""
    monkeypatch.setattr(folders_module, "FOLDER_FILES", 2)
    monkeypatch.setattr(load_module, "FOLDER_FILES", 2)


def shards(rank, values=None):
    """Two elements of one vector, and a scalar that only rank 4 saves."""
    own = torch.tensor([2.0 * rank, 2.0 * rank + 1]) if values is None else torch.full((2,), values)
    parts = [Shard("w", own, (2 * RANKS,), (0,), (2 * RANKS,), 2 * rank)]
    if rank == 4:
        scalar = torch.full((1,), 7.0 if values is None else values)
        parts.append(Shard.whole("s", scalar))
    return parts


def content(rank):
    """Return the values in a rank's `shards`."""
    own = [2.0 * rank, 2.0 * rank + 1]
    return [own, [7.0]] if rank == 4 else [own]


def save(directory, iteration=1, size=RANKS):
    ThreadWorld(size).run(
        lambda comm: save_checkpoint(
            directory, shards(comm.rank), comm, Description(iteration, LAYOUT, {}, {"a": 1})
        )
    )


def load(directory, wanted=shards, size=RANKS):
    def rank(comm):
        targets = wanted(comm.rank, 0.0)
        assert load_checkpoint(directory, targets, comm)[1] == {"a": 1}
        return [shard.tensor.tolist() for shard in targets]

    return ThreadWorld(size).run(rank)


def test_folders_of_many_ranks_hold_few_entries():
    for ranks in (1, 127, 128, 12_288, 16_129, 16_130, 98_304):
        entries = Counter()
        for rank in range(ranks):
            folder = folder_of(rank, ranks)
            entries[folder] += 1
        assert max(entries.values()) <= FOLDER_FILES
        assert list(entries) == list(all_folders(ranks))
        below = Counter(os.path.dirname(folder) for folder in entries if folder)
        top = {folder.split("/")[0] for folder in entries}
        assert max([*below.values(), len(top)]) <= FOLDER_FILES
    assert (
        folder_of(300, 1000) == "ranks_000254"
        and folder_of(16_300, 20_000) == "ranks_016129/ranks_016256"
    )


def test_round_trip_in_folders(few, tmp_path):
    save(tmp_path)
    assert load(tmp_path) == [content(r) for r in range(RANKS)]
    head = read_head(tmp_path, 1)
    assert "files" not in head and head["ranks"] == RANKS and list_iterations(tmp_path) == [1]
    for path, names, files in os.walk(tmp_path / "iter_0000001"):
        assert len(names) + len(files) <= 3, path
    records = [
        record
        for entry in read_manifest(tmp_path, 1)["files"].values()
        for record in entry["shards"]
    ]
    assert sorted(r["flat_start"] for r in records if r["key"] == "w") == list(range(0, 18, 2))


def test_a_rank_gets_the_records_of_its_file_only(few, tmp_path, monkeypatch):
    save(tmp_path)
    read = load_module.read_folder
    folders_read = []
    entries = []
    monkeypatch.setattr(
        load_module,
        "read_folder",
        lambda path, name, head: folders_read.append(name) or read(path, name, head),
    )
    look = load_module.Search.look
    monkeypatch.setattr(
        load_module.Search,
        "look",
        lambda search, name, entry: entries.append(name) or look(search, name, entry),
    )
    load(tmp_path)
    assert sorted(folders_read) == sorted(all_folders(RANKS)), "each by its leader alone"
    assert sorted(entries) == sorted(
        f"{folder_of(rank, RANKS)}/rank_{rank:05d}.safetensors" for rank in range(RANKS)
    )


@pytest.mark.parametrize("size", [2, 12])
def test_shards_in_files_of_other_ranks_are_found(few, tmp_path, size):
    save(tmp_path)
    backwards = [content(8 - r % 9) for r in range(size)]
    assert load(tmp_path, lambda rank, value: shards(8 - rank % 9, value), size) == backwards


def failure(directory):
    return one_error(RANKS, lambda comm: load_checkpoint(directory, shards(comm.rank, 0.0), comm))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("manifest.json", "rank 2: .*/ranks_000002/manifest.json has 5 bytes"),
        ("rank_00003.safetensors", "rank 3: .*has 5 bytes"),
    ],
)
def test_a_damaged_file_in_a_folder_is_named_with_another_iteration(few, tmp_path, name, problem):
    save(tmp_path)
    save(tmp_path, 2)
    (tmp_path / "iter_0000002" / folder_of(2, RANKS) / name).write_text("short")
    message = failure(tmp_path)
    assert re.search(problem, message) and "Complete checkpoints: iterations 1" in message


def test_records_changed_in_a_folder_are_refused(few, tmp_path):
    save(tmp_path)
    path = tmp_path / "iter_0000001" / folder_of(2, RANKS) / "manifest.json"
    path.write_text(path.read_text().replace('"flat_start":6', '"flat_start":7'))
    assert "has CRC-32" in failure(tmp_path)
    for changes in ({"folders": {"../x": {}}}, {"folders": []}, {"ranks": 0}):
        manifest = tmp_path / "iter_0000001" / "manifest.json"
        contents = {**json.loads(manifest.read_text()), **changes, "format_version": 1}
        contents.pop("crc32", None)
        manifest.write_text(json.dumps(contents))
        assert "manifest.json is damaged" in failure(tmp_path)


class Realistic(SoloComm):
    """Gathered objects arrive as copies of their own, as from other processes."""

    def gather_object(self, obj, root=0):
        return (
            [pickle.loads(pickle.dumps(obj)) for _ in range(self.size)]
            if self.rank == root
            else None
        )

    def subgroup(self, ranks):
        return Realistic(ranks.index(self.rank), len(ranks))


def big_shards():
    """Return one rank's shards in the 30B model: a layer's twelve parameters, master weight and two moments each."""
    modules = (
        "input_layernorm self_attention.linear_qkv self_attention.linear_proj "
        "pre_mlp_layernorm mlp.linear_fc1 mlp.linear_fc2"
    ).split()
    names = [
        f"{kind}/decoder.layers.17.{name}.{part}"
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for name in modules
        for part in ("weight", "bias")
    ]
    return [Shard(name, torch.ones(1), (28_672, 7168), (7168, 0), (7168, 7168)) for name in names]


def peak_of_a_save_and_a_load(directory, size):
    comm = Realistic(0, size)
    tracemalloc.start()
    folders = Folders(comm)
    save_checkpoint(
        directory, big_shards(), comm, Description(1, LAYOUT, {}, {"a": 1}), folders=folders
    )
    load_module.load_shards(open_checkpoint(directory, comm), big_shards(), folders)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("size", [12_288, 98_304])
def test_a_rank_of_a_large_job_needs_little_more_than_one_alone(tmp_path, size, monkeypatch):
    monkeypatch.setattr(load_module, "read_folder", first_folder)
    alone = peak_of_a_save_and_a_load(tmp_path / "alone", 1)
    with time_limit():
        among_many = peak_of_a_save_and_a_load(tmp_path / "many", size)
    assert among_many - alone <= 10 << 20
    assert (
        tmp_path / "many" / "iter_0000001" / folder_of(0, size) / "rank_00000.safetensors"
    ).exists()


def first_folder(path, name, head, read=load_module.read_folder):
    """The folder as 127 ranks would have written it: in the dry run all copies of one entry have one name."""
    (entry,) = read(path, name, head).values()
    return {
        f"{name}/rank_{rank:05d}.safetensors": pickle.loads(pickle.dumps(entry))
        for rank in range(FOLDER_FILES)
    }
