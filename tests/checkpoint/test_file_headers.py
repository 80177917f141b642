"""Headers of checkpoint files that only their checksum would betray, and pickled code in the place of every file that is read.

A header is changed and the file's entry made anew, so that reading goes as far as the header itself: it is refused in one line or
leads to bytes inside the file, in memory of at most four times the file's size.
"""

import json
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file

from fugaku_megatron.checkpoint.manifest import read_head
from fugaku_megatron.checkpoint.schema import BlockChecksums
from fugaku_megatron.checkpoint.tensor_files import BlockFile, read_header, write_tensors
from fugaku_megatron.data.indexed import IndexedDataset
from fugaku_megatron.observe.export.history import read_history
from fugaku_megatron.observe.log.rank_table import read
from fugaku_megatron.planner.machine import load
from fugaku_megatron.tokenizers.tokenizer import TokenizerFlags
from tests.file_damage import damages
from tests.time_limit import time_limit

pytestmark = pytest.mark.unit

TENSORS = {
    "a": torch.arange(60_000.0),
    "b": torch.ones(8, 6),
    "c": torch.zeros(3, dtype=torch.int64),
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.just([]),
    st.just({}),
    st.sampled_from(
        [10**400, -1, 0, 2**63, 240_000, "F32", [2**62, 2**62], [8, 6], [0, 192], [[1]], [1.5, 2]]
    ),
)
SETTINGS = settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def opened(path: Path, content: bytes) -> dict:
    """Read the header of a file of this content, with an entry that fits the content."""
    path.write_bytes(content)
    checksums = BlockChecksums()
    checksums.add(memoryview(content))
    with BlockFile(path, checksums.record()) as file:
        return read_header(file)


def refused_or_inside(path: Path, content: bytes) -> None:
    tracemalloc.start()
    try:
        with time_limit():
            stored = opened(path, content)
        assert all(
            0 <= t.start <= t.start + t.numel * t.dtype.itemsize <= len(content)
            for t in stored.values()
        )
    except ValueError as error:
        assert path.name in str(error) and "\n" not in str(error), error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 * len(content), (peak, len(content))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("headers") / "rank_00000.safetensors"
    write_tensors(path, TENSORS)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert {name: t.numel for name, t in opened(path, content).items()} == {
        "a": 60_000,
        "b": 48,
        "c": 3,
    }
    return path, json.loads(content[8 : 8 + length]), content[8 + length :]


def put_together(header: bytes, values: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + values


@SETTINGS
@given(
    name=st.sampled_from(list(TENSORS)),
    field=st.sampled_from(["dtype", "shape", "data_offsets", None]),
    value=VALUES,
    removed=st.booleans(),
)
def test_a_changed_field_is_refused_or_stays_inside(written, name, field, value, removed):
    path, header, values = written
    changed = json.loads(json.dumps(header))
    owner, key = (changed, name) if field is None else (changed[name], field)
    if removed:
        del owner[key]
    else:
        owner[key] = value
    refused_or_inside(path, put_together(json.dumps(changed).encode(), values))


@SETTINGS
@given(
    header=st.one_of(
        st.binary(max_size=60),
        st.text(max_size=60).map(str.encode),
        VALUES.map(lambda v: json.dumps(v).encode()),
        st.just(b"[" * 20_000),
        st.just(b'{"a":' * 5_000),
    ),
    length=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
)
def test_any_header_and_any_length_of_it(written, header, length):
    path, _, values = written
    refused_or_inside(path, put_together(header, values, length))


@pytest.mark.parametrize(
    "content", [b"", b"abc", (2**63).to_bytes(8, "little"), put_together(b"[]", b"")]
)
def test_a_file_without_a_header_is_refused(written, content):
    with pytest.raises(ValueError, match="rank_00000.safetensors is not a valid safetensors file"):
        opened(written[0], content)


def test_damaged_headers_are_refused_or_stay_inside(written):
    path, header, values = written
    whole = json.dumps(header).encode()
    for damaged in damages(whole, 300):
        refused_or_inside(path, put_together(damaged, values, len(whole)))


@pytest.mark.parametrize(
    "text", ["[" + "{}," * 1_500_000 + "{}]", '{"a":[' + "[]," * 1_500_000 + "[]]}"]
)
def test_a_file_that_is_all_header_is_refused_before_it_takes_memory(written, text):
    refused_or_inside(written[0], put_together(text.encode(), b""))


@pytest.mark.parametrize(
    ("shift", "added"), [(-24, 0), (0, 8), (8, 8)], ids=["overlapping", "trailing bytes", "a hole"]
)
def test_places_that_the_safetensors_library_refuses_are_refused(written, shift, added):
    path, header, values = written
    places = [place + shift for place in header["b"]["data_offsets"]]  # of the last tensor
    changed = {**header, "b": {**header["b"], "data_offsets": places}}
    content = put_together(json.dumps(changed).encode(), values + bytes(added))
    with pytest.raises(ValueError, match="not a valid safetensors file: its header is damaged"):
        opened(path, content)
    with pytest.raises(SafetensorError):
        load_file(path)


# Pickled code -----------------------------------------------------------------------------------------------------------------


class Payload:
    """Unpickling makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


READERS = {
    "tracker": ("iter_0000001/manifest.json", lambda folder: read_head(folder, 1)),
    "tensors": (
        "rank.safetensors",
        lambda folder: opened(
            folder / "rank.safetensors", (folder / "rank.safetensors").read_bytes()
        ),
    ),
    "index": ("data.idx", lambda folder: IndexedDataset(folder / "data")),
    "vocabulary": (
        "vocab.json",
        lambda folder: TokenizerFlags(
            "GPT2BPETokenizer", str(folder / "vocab.json"), str(folder / "vocab.json")
        ).build(),
    ),
    "history": ("history.jsonl", lambda folder: read_history(folder / "history.jsonl")),
    "ranks": ("ranks.jsonl", lambda folder: read(folder / "ranks.jsonl")),
    "machine": ("machine.json", lambda folder: load(str(folder / "machine.json"))),
}


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize("name", READERS)
def test_nothing_read_from_disk_is_unpickled(tmp_path, name, protocol):
    file, reader = READERS[name]
    marker = tmp_path / "made"
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    content = pickle.dumps(Payload(marker), protocol)
    path.write_bytes(content * 3)
    (tmp_path / "data.bin").write_bytes(content)
    try:
        reader(tmp_path)
    except ValueError as error:
        assert "\n" not in str(error)
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists(), "the payload works"
