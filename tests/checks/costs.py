"""Formulas of costs/ against the trainer: parameters, FLOPs, traffic and saved bytes."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs import memory, mlp
from fugaku_megatron.costs.buckets import gradient_collectives
from fugaku_megatron.costs.layers import last_recomputed_records
from fugaku_megatron.costs.records import Collective
from fugaku_megatron.costs.stages import (
    end_records,
    quantized_elements,
    stage_layers,
    stage_parameters,
    stage_records,
    virtual_stage_recompute_groups,
)
from fugaku_megatron.host import kernel_costs, kernels
from fugaku_megatron.host.observed import Observed
from fugaku_megatron.nn.forward_context import Pass, Prediction
from fugaku_megatron.nn.ops import FAMILIES, Ops
from fugaku_megatron.planner import model, software
from fugaku_megatron.run.kernel_choice import build_ops
from tests.helpers import build_trainer, grid_groups, make_trainer, mock
from tests.matmuls import MATMULS
from tests.recording import record
from tests.threads import ThreadWorld


def check_parameters(run: RunConfig, world: int) -> None:
    held = ThreadWorld(world).run(
        lambda comm: sum(p.numel() for p in make_trainer(comm, run).stage.parameters())
    )
    layout = Layout.from_run(run, world)
    assert held == [
        stage_parameters(run, rank // (layout.tp * layout.cp) % layout.pp) for rank in range(world)
    ]


def forward_pass(run: RunConfig, tokens: Tensor) -> Pass:
    """Return the pass of a training micro-batch whose MTP modules read its tokens (rows, b)."""
    return Pass(
        first_sample=0,
        recompute=run.training.recompute_granularity,
        predictions=(Prediction(tokens, tokens, tokens.numel()),) * run.model.predictions,
    )


def addmm_flops(out, a, b, **_) -> int:
    return 2 * a[0] * a[1] * b[1]


def check_flops(run: RunConfig) -> None:
    """Compare FLOPs with torch's counter, for one sample forward and backward."""
    trainer = make_trainer(
        SoloComm(), run, Ops.build("torch")
    )  # torch counts the FLOPs of its own kernels only
    tokens = torch.zeros(16, 1, dtype=torch.int64)
    # torch knows addmm, not its in-place form, by which weight gradients are accumulated
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops})
    with (
        counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # torch counts no FLOPs in its flash kernel for CPUs
        loss = trainer.stage.chunks[0](tokens, tokens, forward_pass(run, tokens))
    forward = counter.get_total_flops()
    with counter:
        loss.backward()
    records = stage_records(run, 0)
    assert (forward, counter.get_total_flops()) == (
        sum(r.flops_forward for r in records),
        sum(r.flops_backward for r in records),
    )


def check_quantized(run: RunConfig) -> None:
    """Compare the FLOPs in INT8 and the quantized weights of an iteration with the model's, on one rank."""
    computed = {True: 0.0, False: 0.0}  # by INT8 or not
    packed = 0

    def observe(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        nonlocal packed
        is_int8 = kwargs.get("int8", False)
        if name == "pack_weight":
            packed += args[0].numel() * is_int8
        else:
            computed[is_int8] += kernel_costs.flops(name, *args)
        return function(*args, **kwargs)

    library = Observed(kernels, (*MATMULS, "pack_weight"), observe)
    ops = build_ops(run, dict.fromkeys(FAMILIES, "native"), library)
    trainer = make_trainer(SoloComm(), run, ops)
    trainer.train_step()
    trainer.close()
    layout = Layout.from_run(run, 1)
    forward, backward, _ = model.virtual_stage_work(run, 0, software.load(software.THIS_PROJECT))
    microbatches = layout.microbatches(run, layout.global_batch_size(run))
    modelled = {True: 0.0, False: 0.0}
    for piece, times in (*forward, *backward):
        for p in piece.matmuls:
            if not p.attention:
                flops = 2 * p.m * p.n * p.k * p.times * times * microbatches
                modelled[p.quantized > 0] += flops
    modelled_weights = memory.INT8_COPIES * quantized_elements(run, 0)
    records = stage_records(run, 0)
    if run.lora.on:  # nothing below the first layer is trained
        first = next(r for r in records if r.name == "linear_qkv")
        adapter = next(r for r in records if r.name == "linear_qkv_lora_A")
        modelled[True] -= microbatches * first.flops_forward
        modelled[False] -= microbatches * adapter.flops_forward
        modelled_weights -= first.gemm[1] * first.gemm[2]
    assert computed[True] == modelled[True] and computed[True] > 0
    assert packed == modelled_weights
    torchs = sum(
        r.flops_forward + r.flops_backward for r in records if r.name in ("router", "shared_gate")
    )
    assert computed[False] == modelled[False] - microbatches * torchs


def by_blocks(run, collectives: tuple[Collective, ...]) -> list[Collective]:
    """Return the messages that replace a layer's collectives with --tp-comm-overlap, with the bytes that reach other ranks."""
    if not run.parallel.tp_comm_overlap:
        return list(collectives)
    tp = run.parallel.tensor_model_parallel_size
    bytes = {
        "all_gather": lambda c: (tp - 1) * c.bytes,
        "reduce_scatter": lambda c: c.bytes // tp * (tp - 1),
    }
    return [
        Collective(verb, "tp", bytes[c.verb](c)) for c in collectives for verb in ("send", "recv")
    ]


def expected_traffic(run, layout, stage: int) -> dict[tuple[str, str], int]:
    """Return an iteration's bytes per (verb, group), except the few bytes for norms and losses."""
    expected: dict[tuple[str, str], int] = {}
    microbatches = layout.microbatches(run, layout.global_batch_size(run))
    ends = [
        r
        for virtual_stage in run.placement.virtual_stages_of[stage]
        for r in end_records(run, virtual_stage)
    ]
    per_microbatch = []
    for r in stage_records(run, stage):
        collectives = (*r.forward, *r.backward)
        per_microbatch += collectives if r in ends else by_blocks(run, collectives)
    if run.training.recompute_granularity == "full":  # groups of one layer
        again = [c for r in last_recomputed_records(run) for c in by_blocks(run, r.forward)]
        per_microbatch += again * sum(map(len, stage_layers(run, stage)))
    for c in per_microbatch * microbatches + gradient_collectives(run, layout, stage):
        expected[c.verb, c.group] = expected.get((c.verb, c.group), 0) + c.bytes
    sends = (stage > 0) + (stage < layout.pp - 1)
    if sends:
        expected["send", "pp"] = expected["recv", "pp"] = sends * microbatches * run.residual_bytes
    return expected


def tallies(run: RunConfig, world: int) -> list[dict[tuple[str, str], tuple[int, int]]]:
    """Return every rank's (calls, bytes) in an iteration by (group, verb)."""

    def traffic(comm: Comm):
        torch.set_num_threads(1)
        groups = record(grid_groups(comm, run))
        trainer = build_trainer(run, comm, mock(run), groups=groups)
        trainer.train_step()
        trainer.close()
        return groups.tp.tally()

    return ThreadWorld(world).run(traffic)


def check_bytes(run: RunConfig, world: int, stages: Collection[int] | None = None) -> None:
    """Compare an iteration's traffic with accounting, on every rank or on some stages."""
    layout = Layout.from_run(run, world)
    loads = (
        run.model.num_layers * (run.model.num_experts + 2) * 8 if run.model.num_experts else 0
    )  # tokens of each
    small = 64 + loads  # bytes: norms, counts and losses
    for rank, tally in enumerate(tallies(run, world)):
        measured = {(verb, group): bytes for (group, verb), (calls, bytes) in tally.items()}
        stage = rank // (layout.tp * layout.cp) % layout.pp
        for key, bytes in (
            expected_traffic(run, layout, stage).items()
            if stages is None or stage in stages
            else ()
        ):
            assert bytes <= measured[key] <= bytes + small, (rank, key, bytes, measured[key])


def held_bytes(world: Comm, run: RunConfig) -> int:
    """Return the bytes that autograd keeps on this rank from a micro-batch's forward to its backward."""
    trainer = make_trainer(world, run)
    tokens = torch.zeros(
        run.model.seq_length // run.parallel.context_parallel_size,
        run.batch.micro_batch_size,
        dtype=torch.int64,
    )
    flat = trainer.optimizer.flat
    saved = {}
    weights = {
        values.untyped_storage().data_ptr()
        for values in (flat.values, *(memory.values for memory in flat.frozen_memory))
    }

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.dtype != torch.int64:
            saved[storage.data_ptr()] = (
                storage  # holding it keeps its address from being used again
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = trainer.stage.chunks[0](tokens, tokens, forward_pass(run, tokens))
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


def check_kept(run: RunConfig) -> None:
    tp = run.parallel.tensor_model_parallel_size
    cp = run.parallel.context_parallel_size
    groups = virtual_stage_recompute_groups(run, 0)
    own = range(len(run.model.all_layer_kinds))
    layers = memory.layers_kept_bytes(run, own, groups)[0]
    outside = sum(
        r.saved_bytes
        for virtual_stage in run.placement.virtual_stages_of[0]
        for r in end_records(run, virtual_stage)
    )
    if (
        run.model.num_experts and run.training.recompute_granularity != "full"
    ):  # of int64, which `held_bytes` leaves out
        layers -= (
            run.model.num_layers
            * run.tokens_per_microbatch
            * run.model.moe_router_topk
            * mlp.NUMBER_BYTES
        )
    for held in ThreadWorld(tp * cp).run(held_bytes, run):
        assert held == pytest.approx(layers + outside, rel=0.02)
