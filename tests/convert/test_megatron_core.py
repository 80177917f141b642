"""Checkpoints of megatron-core itself, read, written and continued.

tests/foreign/megatron_core.py runs in an environment with requirements-megatron-core.txt, which is made
in build/ and kept there: megatron-core 0.19.2 with Python 3.12, 0.16.1 with Python 3.11.
"""

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fugaku_megatron as fm
from fugaku_megatron.cli import program
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.architecture import architecture
from fugaku_megatron.config.model import ModelConfig
from fugaku_megatron.convert.megatron.delta_net import is_shifted, joined_parts, parts_of
from fugaku_megatron.convert.megatron.integrity import INTEGRITY
from fugaku_megatron.convert.megatron.names import their_name
from fugaku_megatron.convert.open_weights import open_weights
from fugaku_megatron.run.checkpoint_source import with_padding
from fugaku_megatron.run.resume import resume_training
from tests.helpers import find_checkpoint, make_trainer, small_run, whole_tensors

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/foreign/megatron_core.py"
PATTERNS = {
    "hybrid": "*-*-",
    "hybrid_parts": "**-",
    "hybrid_experts": "*E*E",
    "hybrid_delta": "G-*-",
}
# version of Python -> models
CASES = {
    "3.12": (
        "dense",
        "llama",
        "experts",
        "shared",
        "delta",
        "latent",
        "mtp",
        "latent_mtp",
        *PATTERNS,
    ),
    "3.11": ("dense", "llama", "experts", "shared"),
}

pytestmark = [pytest.mark.system, pytest.mark.slow]


@functools.cache
def environment(version: str) -> Path:
    """Return the Python of an environment with megatron-core."""
    found = shutil.which(f"python{version}")
    folder = ROOT / "build" / f"megatron-core-{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        if found is None:
            pytest.skip(f"no python{version}")
        subprocess.run([found, "-m", "venv", folder], check=True)
        requirements = ROOT / "requirements-megatron-core.txt"
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True)
    return python


def theirs(version: str, action: str, folder: Path, *names: str) -> None:
    command = [environment(version), "-W", "ignore", SCRIPT, action, folder, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def expected(folder: Path, file: str = "expected.pt") -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / file, weights_only=False)
    return found


def convert(*words: object) -> None:
    assert program.main(["convert", *map(str, words)]) == 0


@pytest.mark.parametrize("common", ["file", "object"])
@pytest.mark.parametrize("version", CASES)
def test_megatron_core_and_this_program_read_each_other(version, common, tmp_path):
    """Logits agree, and tensors that came back are the same."""
    if (version, common) == ("3.11", "object"):
        pytest.skip("megatron-core 0.16 reads only common.pt")
    names = CASES[version]
    theirs(version, "save", tmp_path / "theirs", *names)
    for name in names:
        source = tmp_path / "theirs" / name
        saved = expected(source)
        assert (source / "iter_0000010" / INTEGRITY).exists() == (version == "3.12")
        logits = fm.load(source).logits(saved["ids"].tolist())
        torch.testing.assert_close(logits, saved["logits"], rtol=1e-4, atol=1e-4)
        flags = (
            "--ckpt-format torch_dist --transformer-impl local --make-vocab-size-divisible-by 64"
        )
        words = [*flags.split(), "--common-state", common]
        if name in PATTERNS:
            words += ["--hybrid-layer-pattern", PATTERNS[name]]
        convert("--from-megatron", source, "--to-megatron", tmp_path / "ours" / name, *words)
    theirs(version, "load", tmp_path / "ours", *names)  # strictly
    for name in names:
        before = expected(tmp_path / "theirs" / name)
        after = expected(tmp_path / "ours" / name, "loaded.pt")
        assert before["weights"].keys() == after["weights"].keys()
        for key, tensor in before["weights"].items():
            # The norm of a gated delta net is 1 more here, and FP32 rounds the sum.
            digits = 6e-8 if key.endswith(".out_norm.weight") else 0.0
            torch.testing.assert_close(after["weights"][key], tensor, rtol=0, atol=digits)
        torch.testing.assert_close(after["logits"], before["logits"], rtol=0, atol=1e-6)


class Samples:
    """Samples of the script, as a dataset."""

    def __init__(self, samples: torch.Tensor) -> None:
        self.samples = samples.flatten(0, 1).numpy().astype(np.int64)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@pytest.mark.parametrize("version", CASES)
def test_a_run_of_megatron_core_continues(version, tmp_path):
    """Five updates equal those of torch.optim.AdamW from the same state."""
    trained = ("dense", "llama", "experts", "delta", "latent", "mtp", "latent_mtp")
    names = [name for name in trained if name in CASES[version]]
    theirs(version, "train", tmp_path, *names)
    for name in names:
        folder = tmp_path / name
        found = expected(folder)
        model = architecture(open_weights(str(folder)).model)
        run = small_run(
            **{
                **model,
                "seq_length": 32,
                "make_vocab_size_divisible_by": 64,
                "load": str(folder),
                "micro_batch_size": 4,
                "global_batch_size": 4,
                "train_iters": 8,
                "lr": 1e-3,
                "min_lr": 1e-4,
                "lr_decay_style": "cosine",
                "lr_warmup_iters": 2,
                "weight_decay": 0.1,
                "adam_eps": 1e-4,
                "clip_grad": 1.0,
                "mtp_loss_scaling_factor": 0.6 if model["mtp_num_layers"] else 0.1,
                "moe_router_bias_update_rate": 1e-30,  # torch.optim.AdamW does not balance experts
            }
        )
        resume = find_checkpoint(run, SoloComm())
        data = Samples(found["samples"])
        trainer = make_trainer(SoloComm(), with_padding(run, resume), data=(data, data))
        lines = resume_training(trainer, resume)
        assert lines[0] == f"resumed from {folder} at iteration 3"
        results = [trainer.train_step() for _ in range(5)]
        weights = whole_tensors(trainer, "weight")
        trainer.close()
        for result, losses in zip(results, found["losses"], strict=True):
            assert [result.loss, *result.predictions] == pytest.approx(losses, rel=1e-5)
        check_weights(weights, found["weights"], trainer.run.model)


def check_weights(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], model: ModelConfig
) -> None:
    """Compare with a local GPTModel's parameters."""
    compared = 0
    for name, tensor in ours.items():
        if name.endswith(".expert_bias"):  # no parameter there
            continue
        key = their_name(name, {}).replace(".transformer_layer.", ".mtp_model_layer.")
        if ".mlp.experts." in name:
            place, linear, _ = key.rsplit(".", 2)
            experts = range(len(tensor))
            keys = [f"{place}.local_experts.{expert}.{linear}.weight" for expert in experts]
            value = torch.stack([theirs[key] for key in keys])
            compared += len(keys)
        else:
            value = theirs[key]
            compared += 1
        if parts := parts_of(name):
            sizes = [model.linear_num_key_heads * size for size in model.key_head_parts]
            value = joined_parts(value.split(sizes[: len(parts)]), model)
        if is_shifted(name, model):
            value = value + 1
        torch.testing.assert_close(tensor, value.view(tensor.shape), rtol=1e-6, atol=1e-6)
    assert compared == len(theirs)
