"""The baseline trl of `benchmarks step`: losses of SFTTrainer with our weights, tokens and adapters, and bitsandbytes' formats.

Needs requirements-trl.txt, which make test-slow installs.
"""

from __future__ import annotations

import contextlib

import pytest

from benchmarks import contestant
from fugaku_megatron.comm.base import SoloComm
from tests.checks.benchmarks import result
from tests.helpers import make_trainer, small_run
from tests.llama_models import FAMILIES as BLOCKS

for package in ("trl", "peft", "bitsandbytes"):
    pytest.importorskip(package, reason=f"no {package}: pip install -r requirements-trl.txt")
pytestmark = [pytest.mark.system, pytest.mark.slow]

STEPS = 5
LORA = {"lora_rank": 4, "lora_alpha": 16.0}
GPT2_LORA = {**LORA, "lora_target": "linear_qkv,linear_proj,linear_fc1,linear_fc2"}


class Requests:
    """A fixed number of steps, and their losses."""

    def __init__(self) -> None:
        self.losses = []

    def begin(self) -> bool:
        return len(self.losses) < STEPS

    def end(self, loss: float) -> None:
        self.losses.append(loss)


def run_of(**flags):
    return small_run(
        lr_decay_style="constant",
        lr=3e-3,
        train_iters=STEPS + 1,
        weight_decay=0.1,
        clip_grad=0.5,
        global_batch_size=8,
        init_method_std=0.1,
        **flags,
    )


def their_losses(run, load_in=None) -> list[float]:
    requests = Requests()
    with contextlib.closing(contestant.sft_baseline(run, load_in, compiled=False)) as baseline:
        baseline.train(requests)
    assert not baseline.trainer.model.is_gradient_checkpointing
    return requests.losses


def our_losses(run) -> list[float]:
    with contextlib.closing(make_trainer(SoloComm(), run)) as trainer:
        count = STEPS * run.batch.global_batch_size
        model = run.model
        trainer.train = contestant.MockDataset(
            model.vocab_size, model.seq_length, count, run.training.seed
        )
        return [trainer.train_step().loss for _ in range(STEPS)]


@pytest.mark.parametrize(
    "flags",
    [{}, GPT2_LORA, BLOCKS["qwen2"], {**BLOCKS["qwen2"], **LORA}],
    ids=["gpt2", "gpt2 lora", "qwen2", "qwen2 lora"],
)
def test_trl_trains_with_our_losses(flags):
    run = run_of(**flags)
    theirs = their_losses(run)
    assert theirs == pytest.approx(our_losses(run), rel=2e-5)
    assert theirs[-1] < theirs[0]


@pytest.mark.parametrize("load_in", ["8bit", "4bit"])
def test_weights_of_bitsandbytes_train_nearly_as_ours(load_in):
    """Quantization changes the losses; adapters train all the same."""
    run = run_of(**BLOCKS["qwen2"], **LORA, bf16=True)
    ours = our_losses(run)
    theirs = their_losses(run, load_in)
    assert theirs != ours and theirs == pytest.approx(ours, rel=2e-2)


def test_the_step_against_trl(tmp_path):
    flags = "--recipe qwen2.5-0.5b --num-layers 1 --vocab-size 512 --seq-length 32 --rounds 1"
    command = (
        f"step {flags} --baseline trl --lora-rank 4 --lora-base-format int8 --baseline-load-in 8bit"
    )
    measured, printed = result(tmp_path / "step.json", f"{command} --dtype bf16")
    baseline = measured["baseline"]
    assert baseline["trl"] and baseline["peft"] and baseline["bitsandbytes"]
    assert (baseline["name"], baseline["load_in"], measured["lora_rank"]) == ("trl", "8bit", 4)
    assert measured["ratio"] == pytest.approx(baseline["seconds"] / measured["ours"]["seconds"])
    assert measured["lora_base_format"] == "int8"
    assert measured["ours"]["label"] == "ours, LoRA on int8"
    assert "x as fast as trl 8bit LoRA 4, MKL" in printed
