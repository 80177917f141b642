"""Growing ECC counters are named with their node and module."""

from __future__ import annotations

import pytest

from fugaku_megatron.comm.agreement import Nodes
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.observe.resources import memory_errors
from fugaku_megatron.observe.resources.memory_errors import MemoryErrors, read_counters

pytestmark = pytest.mark.unit


def write(root, name: str, text: str) -> None:
    path = root / "mc" / "mc0" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_growing_counter_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "c12")
    monkeypatch.setattr(memory_errors, "EDAC", tmp_path)
    write(tmp_path, "ce_count", "7\n")
    write(tmp_path, "ue_count", "0\n")
    write(tmp_path, "ce_noinfo_count", "0\n")
    write(tmp_path, "dimm3/dimm_ce_count", "7\n")
    write(tmp_path, "dimm4/dimm_ce_count", "none\n")
    said: list[tuple[int, str]] = []
    world = SoloComm()
    errors = MemoryErrors(world, Nodes(world, 1, 0), lambda *line: said.append(line))
    errors.finish_interval(10)
    assert said == []
    write(tmp_path, "ce_count", "9\n")
    write(tmp_path, "dimm3/dimm_ce_count", "9\n")
    errors.finish_interval(20)
    errors.finish_interval(30)
    ((iteration, text),) = said
    assert iteration == 20 and text.startswith(
        "memory errors grow on node c12: mc/mc0/ce_count by 2 to 9, mc/mc0/dimm3/dimm_ce_count by 2 to 9 ("
    )


def test_a_machine_without_counters_reports_nothing(tmp_path):
    assert read_counters(tmp_path / "absent") == {}
