"""One side of `benchmarks step` in a process of its own: trains a step on request and reports its time, loss and memory.

    python -m benchmarks.contestant '{"side": "ours", ...}'        started by Contestant, see `Task`

The baselines are plain PyTorch (plain_gpt.py), of GPT-2's block, and Hugging Face's model, of any, in a loop of our own or in trl's
(sft.py). A baseline starts from our trainer's initial weights, reads the same tokens and makes the same update: its losses equal
ours. BF16 uses autocast, as torch's users do. The first answer is {"allocator": ...}. Left out: the pipes (child.py), the order of
the sides' turns (step.py).
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

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.config.fields import check
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.convert.hugging_face.architectures import GPT2
from fugaku_megatron.convert.hugging_face.config_json import architecture_of, config_of
from fugaku_megatron.convert.hugging_face.tensor_mapping import (
    in_their_shape,
    tensor_mappings,
)
from fugaku_megatron.costs.sizes import padded_vocab_size
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.data.prefetcher import Prefetcher
from fugaku_megatron.data.sampler import micro_batches
from fugaku_megatron.host import allocator
from fugaku_megatron.nn.model import Stage
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.optim.flat import initial_values

from . import child, jobs, preloads, sft, shapes
from .disturbance import Settling, multiply_adds
from .plain_gpt import PlainGPT


@dataclass(frozen=True, kw_only=True)
class Task:
    """Training task of a contestant. values: fields of the run that replace the recipe's.

    baseline, compiled, load_in: which baseline, whether torch.compile is applied to it, and the format of its frozen weights (a key
    of sft.LOAD_IN, None: the run's precision); without meaning for our side. preload: libraries.
    """

    side: str
    recipe: str
    values: dict[str, Any]
    threads: int
    baseline: str = "plain"
    compiled: bool = False
    load_in: str | None = None
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
        """Train as `Contestant.step`; peak memory covers both steps."""
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
        self.architecture = architecture_of(self.model, {})
        fields = config_of(self.architecture, self.model, {torch.float32}, {})
        fields |= {
            name: 0.0
            for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop")
            if self.architecture.model_type == "gpt2"
        }
        self.gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields, use_cache=False))

    def take(self, ours: Callable[[str], Tensor]) -> None:
        """Copy our weights, by global name, into its parameters."""
        parts = tensor_mappings(self.architecture, self.model)
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
            parameter.copy_(in_their_shape(ours(part.ours), part, self.model))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy. tokens, labels (b, s) -> ()."""
        return F.cross_entropy(self.gpt(tokens).logits.flatten(0, 1), labels.flatten())


def _plain(run: RunConfig, vocabulary: int) -> nn.Module:
    with torch.device("meta"):
        model = PlainGPT(run.model, vocabulary)
    return model.to_empty(device="cpu")


MODELS: dict[str, Callable[[RunConfig, int], nn.Module]] = {"plain": _plain, "hf": _HuggingFace}
TRL = "trl"
BASELINES = (*MODELS, TRL)


def check_baseline(task: Task) -> None:
    """Raise ValueError when a package or compiler is missing, and for a run that the baseline has not."""
    run = shapes.run_from_json(task.recipe, task.values)
    name = task.baseline
    check(
        name != "plain" or GPT2.fits(run.model),
        "--baseline plain has GPT-2's block, and this model another: pass --baseline hf",
    )
    check(
        name == "plain" or importlib.util.find_spec("transformers") is not None,
        f"--baseline {name}: a package is missing: pip install transformers",
    )
    check(
        name == TRL or not run.lora.on,
        f"--lora-rank {run.lora.lora_rank}: --baseline {name} has no adapters: pass --baseline {TRL}",
    )
    check(
        run.lora.on or task.load_in is None,
        f"--baseline-load-in {task.load_in} is for frozen weights: pass --lora-rank, or leave it out",
    )
    check(
        not run.lora.on or not run.model.num_experts,
        "--lora-rank: the adapters of experts are not compared: pass a recipe without experts",
    )
    if name == TRL:
        sft.check_packages(run.lora.on, task.load_in)
    check(
        not task.compiled or shutil.which("g++") is not None or shutil.which("clang++") is not None,
        "--baseline-compile: torch.compile needs a C++ compiler: install g++, or leave the flag out",
    )


def initial_weights(run: RunConfig) -> Callable[[str], Tensor]:
    """Return the function from the global name of a parameter to its initial value in our trainer."""
    ops = Ops.build()
    layout = Layout.from_run(run, 1)
    stage = Stage(run, Grid(*layout.sizes).groups(SoloComm()), ops)
    meta = {p.spec.name: p for p in stage.parameters()}  # on the meta device

    @lru_cache(
        maxsize=1
    )  # several parameters of theirs are parts of one of ours, one after another
    def ours(name: str) -> Tensor:
        return initial_values(meta[name], run.training.seed, ops.kernels).view(meta[name].shape)

    return ours


def build(name: str, run: RunConfig) -> nn.Module:
    """Build the baseline's model with our initial weights; (tokens (b, s), labels (b, s)) -> loss ()."""
    model = MODELS[name](run, padded_vocab_size(run.model, 1))
    with torch.no_grad():
        model.take(initial_weights(run))
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
        """Train one iteration and return the mean loss."""
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


class Turns:
    """The steps that the parent asks for on standard input, each timed and answered by a record."""

    def __init__(self, answer: child.Answer) -> None:
        self._answer = answer
        self._settling = Settling(multiply_adds)
        self._idle_since = time.process_time()

    def begin(self) -> bool:
        """Wait for a request and for quiet cores, then start the clock. False: the parent has left."""
        if not sys.stdin.readline():
            return False
        self._idle = time.process_time() - self._idle_since
        self._settling.wait()
        self._before = allocator.page_faults()
        self._start = time.perf_counter()
        return True

    def end(self, loss: float) -> None:
        """Stop the clock and answer."""
        taken = time.perf_counter() - self._start
        after = allocator.page_faults()
        self._idle_since = time.process_time()
        self._answer(
            {
                "seconds": taken,
                "loss": loss,
                "minor_faults": after[0] - self._before[0],
                "idle_cpu_seconds": self._idle,
                "system_seconds": after[1] - self._before[1],
                "peak_rss_mib": allocator.peak_memory_mib(),
            }
        )


Train = Callable[[Turns], None]  # trains a step for each request


def in_turn(step: Callable[[], float]) -> Train:
    """Return the training of a side that trains single steps. step: returns its loss."""

    def train(turns: Turns) -> None:
        while turns.begin():
            turns.end(step())

    return train


def _side(task: Task) -> tuple[Train, dict[str, Any]]:
    """Return the training, and facts for the report."""
    run = shapes.run_from_json(task.recipe, task.values)
    if task.side == "ours":
        return _our_side(run)
    torch.set_num_threads(task.threads)
    facts = {"torch": torch.__version__}
    if task.baseline != TRL:
        return in_turn(BaselineTrainer(task.baseline, run, task.compiled).step), facts
    facts |= sft.versions(run.lora.on, task.load_in)
    return sft_baseline(run, task.load_in, task.compiled).train, facts


def sft_baseline(run: RunConfig, load_in: str | None, compiled: bool) -> sft.SFTBaseline:
    """Return trl's trainer with our initial weights."""
    ours = initial_weights(run)
    return sft.SFTBaseline(
        run, lambda: build("hf", run).gpt, ours, load_in=load_in, compiled=compiled
    )


def _our_side(run: RunConfig) -> tuple[Train, dict[str, Any]]:
    from fugaku_megatron.costs.plan import Plan
    from fugaku_megatron.run.assemble import configure_process

    world = SoloComm()
    machine = configure_process(Plan.of(run, world.size), world)
    trainer = shapes.trainer_of(run, world, Grid(1).groups(world))
    return in_turn(lambda: trainer.train_step().loss), {
        "kernels": trainer.ops.choice,
        "allocator": jobs.allocator(machine),
    }


def main(order: dict[str, Any], answer: child.Answer) -> None:
    """Run the process's own end of the pipe."""
    task = Task(**order)
    try:
        train, facts = _side(task)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    loaded = Path("/proc/self/maps").read_text() if task.preload else ""
    for library in task.preload:
        if os.path.realpath(library) not in loaded:
            raise SystemExit(
                f"{library} was to be preloaded and is not: is it a library of this machine?"
            )
    answer({"allocator": allocator.allocator_name(), **facts})
    train(Turns(answer))


if __name__ == "__main__":
    with contextlib.suppress(
        BrokenPipeError, KeyboardInterrupt
    ):  # the parent has left, or is leaving
        main(*child.order())
