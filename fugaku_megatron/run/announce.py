"""Log lines at the start of a run: model, data, batch sizes, expected time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..cli.arguments import Arguments
from ..config.layout import Layout
from ..config.param_schedule import ParamSchedule
from ..config.run_config import ParallelConfig, RunConfig
from ..costs import accounting, memory
from ..costs.run_schedule import recompute_name
from ..host.runtime import fma_peak_gflops
from ..observe.energy import short_seconds
from ..observe.run_log import format_run

FMA_SHARE = (
    0.8,
    0.3,
)  # of the FP32 peak of multiply-adds: what a step reaches at best and where little fits the caches


PEAK_ROUNDS = 3


def iteration_line(run: RunConfig, layout: Layout) -> str:
    """How long an iteration will take about, from the FMA peak measured here; communication is left out."""
    flops = accounting.hardware_flops(run, layout.global_batch_size(run)) / layout.world_size
    peak = fma_peak_gflops(PEAK_ROUNDS) * 1e9
    low, high = (short_seconds(flops / peak / share) for share in FMA_SHARE)
    return (
        f"time: about {low} to {high} per iteration, with a log line every {run.output.log_interval} (estimate from "
        f"{peak / 1e9:.0f} GFLOP/s of FP32 multiply-adds in this rank)"
    )


def data_line(train: Any) -> str | None:
    """How often the data is read, from the rank's training set; None where it does not know."""
    epochs = getattr(train, "num_epochs", None)
    if epochs is None:
        return None
    once = "at most once" if epochs == 1 else f"{epochs:,} times (epochs)"
    return f"data: {len(train):,} samples of training read the data {once}"


def validation_line(valid: Any) -> str | None:
    """How much text validation has, from the rank's validation set; None where there is none, or it is random."""
    parts = getattr(valid, "datasets", [valid])
    if not all(hasattr(part, "num_tokens") for part in parts):
        return None
    documents, tokens = (
        sum(getattr(part, name) for part in parts) for name in ("num_documents", "num_tokens")
    )
    return f"data: validation has {documents:,} documents with {tokens:,} tokens"


def skip_line(run: RunConfig, train: Any) -> str | None:
    """What --skip-samples may do to the order of samples, which depends on how many a run of several epochs needs."""
    if (
        not run.data.skip_samples
        or run.training.train_iters is None
        or getattr(train, "num_epochs", 1) == 1
    ):
        return None
    return (
        "note: --skip-samples lengthens a run of --train-iters by the samples left out, and their number decides the order of "
        "data that is read several times: pass --train-samples to keep the order"
    )


def announce(
    arguments: Arguments, run: RunConfig, layout: Layout, machine: str, nodes: int
) -> list[str]:
    """What the log says before the first iteration."""
    size = layout.global_batch_size(run)
    hardware, model = accounting.hardware_flops(run, size), accounting.model_flops(run, size)
    overlaps = ["grad reduce"] * run.parallel.overlap_grad_reduce + [
        "param gather"
    ] * run.parallel.overlap_param_gather
    schedule = ParamSchedule.from_run(run, size)
    return [
        *(f"note: {note}" for note in (*arguments.notes, *schedule.notes(run.training))),
        machine,
        format_run(run, layout, nodes),
        f"world size {layout.world_size}: {layout.words}; "
        f"{run.precision.name}"
        + " with bf16x3 matmuls" * run.system.splits_fp32
        + f", ZeRO stage {run.parallel.zero_stage}, recompute {recompute_name(run)}"
        + ", sequence parallel" * (accounting.sequence_parts(run, layout.tp) > 1)
        + ", overlap: " * bool(overlaps)
        + " and ".join(overlaps),
        f"parameters {accounting.parameters(run):,}, padded vocabulary {accounting.padded_vocab_size(run.model, layout.tp)}"
        + ", padding masked in the loss" * run.model.masks_padding
        + _adapters_text(run),
        f"FLOPs per iteration of {size} samples: {hardware:.4e} hardware (recompute counted; TFLOPs in the log, per rank), "
        f"{model:.4e} model (no recompute, causal attention once); ratio {model / hardware:.3f}",
    ]


def _adapters_text(run: RunConfig) -> str:
    """How many of the parameters adapters have."""
    trained = (
        sum(memory.adapter_parameters(replace(run, parallel=ParallelConfig()), 1))
        if run.lora.on
        else 0
    )
    return f"; trained are {trained:,} of adapters of rank {run.lora.lora_rank}" * run.lora.on
