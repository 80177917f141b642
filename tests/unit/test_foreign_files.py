"""Files that other programs wrote, in tests/foreign next to the scripts that wrote them."""

import json
from pathlib import Path

import pytest

import fugaku_megatron as fm
from fugaku_megatron import cli

FOREIGN = Path(__file__).resolve().parents[1] / "foreign"


@pytest.mark.parametrize("name", ["gpt2", "llama_tp2"])
def test_megatron_core_s_checkpoints_are_read(name, tmp_path):
    """Its `.metadata` holds the pickled save plan; the second checkpoint is of two ranks."""
    source = FOREIGN / "torch_dist" / name
    command = ["convert", "--from-megatron", str(source), "--save", str(tmp_path / "ours")]
    assert cli.main(command) == 0
    expected = json.loads((source / "expected.json").read_text())
    logits = fm.load(tmp_path / "ours").logits(expected["ids"])[-1].tolist()
    assert logits == pytest.approx(expected["logits_of_the_last_token"], abs=1e-4)
