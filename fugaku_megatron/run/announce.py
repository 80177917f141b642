"""Log lines at a run's start: model, data, batch sizes, expected time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..config.run_config import RunConfig
from ..costs.buckets import unit_elements
from ..costs.memory import frozen_elements
from ..costs.plan import Plan
from ..costs.run_schedule import recompute_name
from ..costs.sizes import vocabulary_text
from ..costs.stages import model_parameters
from ..host.machine import fma_peak_gflops
from ..observe.log.run_log import format_run

# Share of the FP32 peak of multiply-adds that an iteration reaches: at best, and if little fits the caches.
FMA_SHARE = (0.8, 0.3)
PEAK_ROUNDS = 3


def iteration_line(plan: Plan) -> str:
    """Estimate an iteration's time from the FMA peak measured here, without communication."""
    flops = plan.flops.hardware / plan.layout.world_size
    peak = fma_peak_gflops(PEAK_ROUNDS) * 1e9
    low, high = (
        f"{seconds:.2g} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        for seconds in (flops / peak / share for share in FMA_SHARE)
    )
    return (
        f"time: about {low} to {high} per iteration, with a log line every {plan.log_interval} (estimate from "
        f"{peak / 1e9:.0f} GFLOP/s of FP32 multiply-adds in this rank)"
    )


def data_line(train: Any) -> str | None:
    epochs = getattr(train, "num_epochs", None)
    if epochs is None:
        return None
    once = "at most once" if epochs == 1 else f"{epochs:,} times (epochs)"
    return f"data: {len(train):,} samples of training read the data {once}"


def validation_line(valid: Any) -> str | None:
    sets = getattr(valid, "datasets", [valid])
    if not all(hasattr(each, "num_tokens") for each in sets):
        return None
    documents = sum(each.num_documents for each in sets)
    tokens = sum(each.num_tokens for each in sets)
    return f"data: validation has {documents:,} documents with {tokens:,} tokens"


def skip_line(run: RunConfig, train: Any) -> str | None:
    """Return a note if --skip-samples may change the sample order, as over several epochs."""
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


def announce(notes: Iterable[str], plan: Plan, machine: str, nodes: int) -> list[str]:
    """Return the log's first lines: notes, machine, layout, parameters and FLOPs."""
    run = plan.config
    notes = (*notes, *plan.param_schedule.notes(run.training))
    parameters = f"parameters {model_parameters(run):,}, {vocabulary_text(run)}"
    if run.lora.on:
        trained = sum(unit_elements(run.on_one_rank, 0).values())
        parameters += f"; trained are {trained:,} of adapters of rank {run.lora.lora_rank}"
        if run.lora.base_in_int8:
            parameters += ", frozen linear layers in INT8"
    if run.freezing.on:
        frozen = frozen_elements(run.on_one_rank, 0)
        parameters += f"; trained are {model_parameters(run) - frozen:,}, and the others are frozen"
    return [
        *(f"note: {note}" for note in notes),
        machine,
        format_run(run, plan.layout, nodes),
        _layout_text(plan),
        parameters,
        f"FLOPs per iteration of {plan.global_batch_size} samples: {plan.flops.hardware:.4e} hardware (recompute counted; "
        f"TFLOPs in the log, per rank), {plan.flops.model:.4e} model (no recompute, causal attention once); "
        f"ratio {plan.flops.model / plan.flops.hardware:.3f}",
    ]


def _layout_text(plan: Plan) -> str:
    run = plan.config
    precision = run.precision.name
    if run.system.splits_fp32:
        precision += " with bf16x3 matmuls"
    if run.system.int8:
        precision += f" with {run.system.int8_matmuls} in INT8"
    text = (
        f"world size {plan.layout.world_size}: {plan.layout.words}; {precision}, "
        f"ZeRO stage {run.parallel.zero_stage}, recompute {recompute_name(run)}"
    )
    if run.sequence_shards > 1:
        text += ", sequence parallel"
    overlaps = []
    if run.parallel.overlap_grad_reduce:
        overlaps.append("grad reduce")
    if run.parallel.overlap_param_gather:
        overlaps.append("param gather")
    if overlaps:
        text += f", overlap: {' and '.join(overlaps)}"
    return text
