"""Operations with low-rank adapters (`nn.adapters`)."""

from __future__ import annotations

from dataclasses import replace

from ..config.layer_kinds import (
    FC1,
    FC2,
    column_parallel,
    input_projections,
    replicated,
    row_parallel,
)
from ..config.run_config import RunConfig
from .records import MatmulCollectives, Record, Records, linear


def with_adapters(run: RunConfig, records: Records) -> Records:
    """Add the adapters of a run to the records, whose weights are then frozen."""
    return tuple(
        each for record in records for each in (frozen(run, record), *_adapters(run, record))
    )


def frozen(run: RunConfig, record: Record) -> Record:
    """Return a record without weight gradients; without an adapter no input is saved."""
    matmul = record.gemm is not None and record.parameters > 0 or record.is_head
    saved = record.saved_bytes
    if record.name in input_projections() and not run.lora.parts(record.name, run.model):
        saved = 0
    if record.name == FC1 and run.lora.parts(FC2, run.model) and not run.lora.parts(FC1, run.model):
        saved = 0
    gathers = _linear_name(record) in column_parallel()  # only for the weight gradient
    backward = record.backward[-1:] if gathers else record.backward
    return replace(
        record,
        replicated=0,
        of_heads=0,
        divided=0,
        saved_bytes=saved,
        backward=backward,
        frozen=matmul,
        flops_backward=record.flops_forward if matmul else record.flops_backward,
    )


def _linear_name(record: Record) -> str:
    return record.name.replace("shared_", "linear_")


def _adapters(run: RunConfig, record: Record) -> Records:
    name = _linear_name(record)
    rank = run.lora.rank
    matrices = run.lora.parts(name, run.model)
    if not matrices or record.gemm is None:
        return ()
    rows, outputs, inputs = record.gemm
    width = len(matrices) * rank
    is_row_parallel = name in row_parallel()
    if record.grouped:
        down = linear(f"{name}_lora_A", (rows, width, inputs))
        up = linear(f"{name}_lora_B", (rows, outputs, width))
        return (
            _expert_adapter(run, record, down, width * inputs, not is_row_parallel),
            _expert_adapter(run, record, up, outputs * rank, is_row_parallel),
        )
    saved = rows * width * run.element_bytes
    around = MatmulCollectives.from_run(run, saved)
    shards = run.sequence_shards
    if is_row_parallel:
        down = around.row(f"{name}_lora_A", (rows, width, inputs))
        up = linear(
            f"{name}_lora_B",
            (rows // shards, outputs, width),
            saved_bytes=saved // shards,
            replicated=outputs * rank,
        )
    elif name in replicated():
        down = linear(f"{name}_lora_A", (rows, width, inputs), replicated=width * inputs)
        up = linear(
            f"{name}_lora_B",
            (rows, outputs, width),
            saved_bytes=saved,
            replicated=outputs * rank,
        )
    else:
        down = linear(
            f"{name}_lora_A",
            (rows // shards, width, inputs),
            forward=around.into,
            backward=around.into_backward[-1:],
            replicated=width * inputs,
        )
        up = linear(f"{name}_lora_B", (rows, outputs, width), saved_bytes=saved)
    return replace(down, adapts=True), replace(up, parameters=outputs * rank, adapts=True)


def _expert_adapter(
    run: RunConfig, experts: Record, matmul: Record, elements: int, whole: bool
) -> Record:
    """Return an expert adapter's matmul for all experts.

    whole: ranks that share an expert all have the matrix.
    """
    count = experts.gemm_count
    divided = bool(experts.divided)
    size = elements * count
    is_shared = not divided or run.etp > 1
    replicated = size if whole and is_shared else 0
    return replace(
        matmul,
        gemm_count=count,
        grouped=True,
        parameters=size,
        divided=size if divided else 0,
        replicated=replicated,
        of_heads=replicated,
        flops_forward=matmul.flops_forward * count,
        flops_backward=matmul.flops_backward * count,
        adapts=True,
    )
