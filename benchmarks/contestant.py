"""One side of `benchmarks step` in a process of its own: trains a step on request and reports its time, loss and memory.

    python -m benchmarks.contestant '{"side": "ours", ...}'        started by Contestant, see `Task`

The baselines are plain PyTorch (plain_gpt.py), of GPT-2's block, and Hugging Face's model, of any. A baseline starts from our
trainer's initial weights, reads the same tokens and makes the same update: its losses equal ours. BF16 uses autocast, as torch's
users do. The first answer is {"allocator": ...}. Left out: the pipes (child.py), the order of the sides' turns (step.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.config.fields import check
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import ModelConfig, RunConfig
from fugaku_megatron.convert import hugging_face
from fugaku_megatron.convert.architectures import GPT2
from fugaku_megatron.costs import accounting
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.data.sampler import Prefetcher, micro_batches
from fugaku_megatron.host import allocator
from fugaku_megatron.host.timing import seconds
from fugaku_megatron.nn.model import Stage
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.optim.flat import initial_values

from . import child, jobs, preloads, shapes
from .disturbance import Settling, multiply_adds
from .plain_gpt import PlainGPT


@dataclass(frozen=True, kw_only=True)
class Task:
    """Training task of a contestant. values: fields of the run that replace the recipe's.

    baseline, compiled: which baseline, and whether torch.compile is applied to it; without meaning for our side. preload:
    libraries.
    """

    side: str
    recipe: str
    values: dict[str, Any]
    threads: int
    baseline: str = "plain"
    compiled: bool = False
    preload: tuple[str, ...] = ()


class Contestant(child.Child):
    """The parent's end of the pipes."""

    def __init__(self, task: Task) -> None:
        environment = {
            **preloads.environment(*map(Path, task.preload)),
            "OMP_NUM_THREADS": str(task.threads),
        }
        super().__init__(child.python("contestant", asdict(task)), environment, task.side)
        self.ready = self.answer()

    def step(self) -> dict[str, float]:
        """Train one step. {"seconds", "loss", "minor_faults", "system_seconds", "peak_rss_mib", "idle_cpu_seconds"}."""
        return self.ask("step")


class Apart:
    """A contestant whose process ends after every step, so that the other has the memory; a step is the second of its process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.ready = {}

    def step(self) -> dict[str, float]:
        """As `Contestant.step`; peak memory covers both steps."""
        with Contestant(self.task) as contestant:
            self.ready = contestant.ready
            contestant.step()  # the first one makes the optimizer's state and warms up
            return contestant.step()


# Baselines ------------------------------------------------------------------------------------------------------------------------

# The matrices of all experts of a layer, which transformers 5 holds in one tensor each, as we do; files have one for each expert.
FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")


class _HuggingFace(nn.Module):
    """The model of transformers that has the run's block, with our loss: its own would leave out the last label."""

    def __init__(self, run: RunConfig, vocabulary: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        self.model = replace(run.model, vocab_size=vocabulary)
        self.architecture = hugging_face.architecture_of(self.model, {})
        fields = hugging_face.config_of(self.architecture, self.model, {torch.float32}, {})
        fields |= {
            name: 0.0
            for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop")
            if self.architecture.model_type == "gpt2"
        }
        self.gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields, use_cache=False))

    def take(self, ours: Callable[[str], Tensor]) -> None:
        """Copy our weights, by global name, into its parameters."""
        parts = hugging_face.parts(self.architecture, self.model)
        for name, parameter in self.gpt.named_parameters():
            if fused := FUSED.fullmatch(name):
                place = "linear_fc1" if fused[2] == "gate_up_proj" else "linear_fc2"
                parameter.copy_(
                    ours(f"decoder.layers.{fused[1]}.mlp.experts.{place}.weight").view(
                        parameter.shape
                    )
                )
                continue
            part = parts[
                name if name in parts else name.replace(".mlp.", ".block_sparse_moe.")
            ]  # of Mixtral's files
            parameter.copy_(hugging_face.in_their_shape(ours(part.ours), part, self.model))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy. tokens, labels (b, s) -> ()."""
        return F.cross_entropy(self.gpt(tokens).logits.flatten(0, 1), labels.flatten())


def _plain(run: RunConfig, vocabulary: int) -> nn.Module:
    with torch.device("meta"):
        model = PlainGPT(run.model, vocabulary)
    return model.to_empty(device="cpu")


BASELINES: dict[str, Callable[[RunConfig, int], nn.Module]] = {"plain": _plain, "hf": _HuggingFace}


def check_baseline(name: str, compiled: bool, model: ModelConfig) -> None:
    """ValueError when a package or compiler is missing, and for a block that the baseline has not."""
    check(
        name != "plain" or GPT2.fits(model),
        "--baseline plain has GPT-2's block, and this model another: pass --baseline hf",
    )
    check(
        name != "hf" or importlib.util.find_spec("transformers") is not None,
        "--baseline hf: a package is missing: pip install transformers",
    )
    check(
        not compiled or shutil.which("g++") is not None or shutil.which("clang++") is not None,
        "--baseline-compile: torch.compile needs a C++ compiler: install g++, or leave the flag out",
    )


def build(name: str, run: RunConfig) -> nn.Module:
    """The baseline's model with our initial weights; (tokens (b, s), labels (b, s)) -> loss ()."""
    model = BASELINES[name](run, accounting.padded_vocab_size(run.model, 1))
    ops = Ops.build()
    layout = Layout.from_run(run, 1)
    stage = Stage(run, layout, Grid(*layout.sizes).groups(SoloComm()), ops)
    meta = {p.spec.name: p for p in stage.parameters()}  # on the meta device

    @lru_cache(
        maxsize=1
    )  # several parameters of theirs are parts of one of ours, one after another
    def ours(name: str) -> Tensor:
        return initial_values(meta[name], run.training.seed, ops.kernels).view(meta[name].shape)

    with torch.no_grad():
        model.take(ours)
    return model


class BaselineTrainer:
    """Trains a baseline: accumulate micro-batches, clip, fused AdamW."""

    def __init__(self, name: str, run: RunConfig, compiled: bool) -> None:
        self.run = run
        model = build(name, run)
        optimizer = run.optimizer
        groups = [
            {
                "params": [p for p in model.parameters() if p.dim() > 1],
                "weight_decay": optimizer.weight_decay,
            },
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=optimizer.lr,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            fused=True,
        )
        self.parameters = list(model.parameters())
        self.model = torch.compile(model) if compiled else model
        size = run.batch.global_batch_size
        b = run.batch.micro_batch_size
        data = MockDataset(
            run.model.vocab_size,
            run.model.seq_length,
            run.training.train_iters * size,
            run.training.seed,
        )
        self.batches = Prefetcher(micro_batches(data, 0, lambda _: size, b, 0, 1))
        self.microbatches = size // b

    def step(self) -> float:
        """One iteration; the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for samples in itertools.islice(self.batches, self.microbatches):
            tokens, labels = (
                torch.from_numpy(part).t().contiguous() for part in (samples[:-1], samples[1:])
            )
            with torch.autocast("cpu", torch.bfloat16, enabled=self.run.precision.bf16):
                loss = self.model(tokens, labels) / self.microbatches
            loss.backward()
            total += loss.item()
        if self.run.optimizer.clip_grad:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.run.optimizer.clip_grad)
        self.optimizer.step()
        return total


# The process ----------------------------------------------------------------------------------------------------------------------


def run_of(task: Task) -> RunConfig:
    """Its run; JSON has made lists of tuples."""
    return make_run(
        task.recipe,
        {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in task.values.items()
        },
    )


def _side(task: Task) -> tuple[Callable[[], float], dict[str, Any]]:
    """(function that trains a step and returns its loss, facts for the report)."""
    run = run_of(task)
    if task.side != "ours":
        torch.set_num_threads(task.threads)
        return BaselineTrainer(task.baseline, run, task.compiled).step, {"torch": torch.__version__}
    from fugaku_megatron.run import start
    from fugaku_megatron.run.plan import Plan

    world = SoloComm()
    machine = start.configure_process(Plan(run, Layout.from_run(run, world.size)), world)
    trainer = shapes.trainer_of(run, world, Grid(1).groups(world))
    return lambda: trainer.train_step().loss, {
        "kernels": trainer.ops.choice,
        "allocator": jobs.allocator(machine),
    }


def main(order: dict[str, Any], answer: child.Answer) -> None:
    """The process's own end of the pipe."""
    task = Task(**order)
    step, facts = _side(task)
    loaded = Path("/proc/self/maps").read_text() if task.preload else ""
    for library in task.preload:
        if os.path.realpath(library) not in loaded:
            raise SystemExit(
                f"{library} was to be preloaded and is not: is it a library of this machine?"
            )
    answer({"allocator": allocator.allocator_name(), **facts})
    settling = Settling(multiply_adds)
    losses = []
    idle_since = time.process_time()
    for _ in sys.stdin:
        idle = time.process_time() - idle_since
        settling.wait()
        faults = allocator.page_faults()
        taken = seconds(lambda: losses.append(step()))
        after = allocator.page_faults()
        idle_since = time.process_time()
        answer(
            {
                "seconds": taken,
                "loss": losses[-1],
                "minor_faults": after[0] - faults[0],
                "idle_cpu_seconds": idle,
                "system_seconds": after[1] - faults[1],
                "peak_rss_mib": allocator.peak_memory_mib(),
            }
        )


if __name__ == "__main__":
    with contextlib.suppress(
        BrokenPipeError, KeyboardInterrupt
    ):  # the parent has left, or is leaving
        main(*child.order())
