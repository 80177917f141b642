"""Other projects' training scripts: they start, or are refused with true reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fugaku_megatron.cli.arguments import build_parser, parse
from fugaku_megatron.config.megatron_flags import OTHER_FLAGS
from tools import megatron_flags, scripts_start

pytestmark = pytest.mark.system

LIST = Path(__file__).parents[1] / "megatron_scripts.jsonl"
SCRIPTS = list(scripts_start.read(str(LIST)))
# (source, kind) -> scripts that start, and all
TOTALS = {
    ("Fugaku-LLM/DeepSpeedFugaku", "dense"): (6, 6),
    ("NVIDIA/Megatron-LM examples", "dense"): (9, 11),
    ("NVIDIA/Megatron-LM examples", "moe"): (2, 6),
    ("NVIDIA/Megatron-LM functional tests", "dense"): (86, 94),
    ("NVIDIA/Megatron-LM functional tests", "moe"): (30, 31),
    ("llm-jp/scripts", "dense"): (25, 25),
    ("llm-jp/scripts", "moe"): (11, 11),
}
UNSUPPORTED_VALUES = (
    "--expert-",
    "--context-parallel-size",
    "--moe-router-load-balancing-type global_aux_loss",
)


def test_the_totals_are_these_and_every_other_script_gets_true_reasons_in_one_message():
    """Call no flag of Megatron-LM unknown, and refuse experts for unknown or unsupported flags alone."""
    found = [
        scripts_start.Script(s["source"], s["name"], s["kind"], scripts_start.reasons(s["flags"]))
        for s in SCRIPTS
    ]
    assert scripts_start.totals(found) == TOTALS
    head = {
        name
        for title, flags in megatron_flags.scripts().items()
        if "every flag" in title
        for name in flags
    }
    for script in found:
        unknown = {
            word
            for reason in script.reasons
            if reason.startswith("unknown flag")
            for word in re.findall(r"(?<!mean )--[\w-]+", reason.split(": see")[0])
        }
        assert not unknown & head, script
        if script.kind == "moe" and script.reasons and not unknown:
            refused = [name for name, other in OTHER_FLAGS.items() if other.refused]
            assert any(
                reason.startswith((*refused, *UNSUPPORTED_VALUES)) for reason in script.reasons
            ), script


def test_the_llama_3_example_in_bf16_trains_a_shrunk_model(alone, tmp_path, monkeypatch):
    """Its own flags without FP8, with which it is the same run."""
    script = next(s for s in SCRIPTS if s["name"] == "examples/llama/train_llama3_8b_h100_fp8.sh")
    smaller = {
        "--num-layers": "2",
        "--hidden-size": "64",
        "--ffn-hidden-size": "96",
        "--num-attention-heads": "4",
        "--kv-channels": "16",
        "--num-query-groups": "2",
        "--seq-length": "32",
        "--max-position-embeddings": "32",
        "--global-batch-size": "8",
        "--train-samples": "80",
        "--lr-decay-samples": "80",
        "--lr-warmup-samples": "16",
        "--vocab-size": "256",
        "--save": str(tmp_path / "save"),
        "--load": str(tmp_path / "save"),
        "--data-cache-path": str(tmp_path / "cache"),
        "--tensorboard-dir": str(tmp_path / "t"),
        "--eval-iters": "2",
    }
    parser = build_parser()
    plain = [
        (name, smaller.get(name, value))
        for name, value in script["flags"]
        if not name.startswith("--fp8")
    ]
    words = [*scripts_start.words(plain, parser), "--profile-dir", str(tmp_path / "profile")]
    monkeypatch.chdir(tmp_path)
    done = alone(*words)
    assert done.returncode == 0, done.stderr
    losses = [
        float(value) for value in re.findall(r"iteration +\d+/ +10 .*lm loss: (\S+)", done.stdout)
    ]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert parse([*words, "--fp8-format", "hybrid"]).run == parse(words).run
