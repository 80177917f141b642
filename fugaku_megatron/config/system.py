"""System fields: kernels, clock, memory, sums in FP16."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .fields import (
    BY_RANK,
    cached_hash,
    check,
    course_option,
    course_optional,
    course_switch,
    free_option,
    free_optional,
    free_switch,
)
from .rules import CheckedFields

INT8 = "int8"  # topic of details
_INIT = "pass it to init"  # in a program with a Trainer
FP16_SUM_LENGTH = 64  # half the error of BF16 operands, at 1.7 times FP32's rate (docs/numerics.md)
MAX_FP16_SUM_LENGTH = 65536


@cached_hash
@dataclass(frozen=True, kw_only=True)
class SystemConfig(CheckedFields):
    """Use of the machine."""

    kernels: str = free_option(
        "auto",
        "native: the C++ kernels; torch: torch's kernels; auto: the faster ones for this run's shapes",
        choices=("auto", "native", "torch"),
    )
    fp16_accumulation_chunk: int | None = course_optional(
        "with --fp16, sum this many terms of a linear layer in FP16 before adding in FP32: faster if the CPU has FP16 "
        "arithmetic (A64FX, SVE), less exact (default: sums in FP32)",
        switches={"--fp16-accumulation": FP16_SUM_LENGTH},
        range=None,
    )
    fp32_matmul: str = course_option(
        "ieee",
        "ieee: FP32 matmuls on FP32 units; bf16x3: each operand as three BF16 numbers, in "
        "six BF16 matmuls, as exact as FP32, faster only on AMX",
        choices=("ieee", "bf16x3"),
    )
    int8: bool = course_switch(
        "quantize the operands of linear layers to INT8 in forward and data gradients, with a scale for each row: "
        "the 8-bit format of CPUs, twice as fast as BF16. Weights stay as they are and are quantized once for each step",
    )
    int8_wgrad: bool = course_switch(
        "with --int8, quantize the operands of weight gradients too", topic=INT8
    )
    int8_head: bool = course_switch(
        "with --int8, quantize the operands of the output layer too", topic=INT8
    )
    int8_stochastic_rounding: bool = course_switch(
        "with --int8, round the gradients of layer outputs up or down at random in the quantized matmuls of backward: "
        "their mean is right and their error larger; for studies, no loss was lower with it",
        topic=INT8,
    )
    cache_packed_weights: bool = free_switch(
        "cache the packed weights of the matrix kernels between optimizer steps: "
        "faster with several micro-batches per step, at the cost of two more copies of the weights",
    )
    allocator: str = free_option(
        "tuned",
        "tuned: the process keeps freed tensor memory for reuse; stock: unchanged malloc. A preloaded "
        "allocator (LD_PRELOAD) is used in both cases",
        choices=("tuned", "stock"),
        differs=BY_RANK,
        library=_INIT,
    )
    thread_affinity: str = free_option(
        "auto",
        "pin: one core for each thread, in NUMA order; none: the system places threads; auto: "
        "pin on nodes of several NUMA domains",
        choices=("auto", "pin", "none"),
        differs=BY_RANK,
        library=_INIT,
    )
    cpu_frequency: float | None = free_optional(
        "clock in GHz: set if the system permits; the run is refused if the cores run at another clock",
        differs=BY_RANK,
        library=_INIT,
    )
    hang_timeout_in_secs: float | None = free_optional(
        "seconds without progress before a rank is reported as hung and the job "
        "ends; 0: never (default: 10 times the slowest iteration, or EP times above EP 10, "
        "at least 60; 600 at the start and in a save)",
        range=None,
        library="only the command watches for hangs",
    )

    def _check(self) -> None:
        timeout = self.hang_timeout_in_secs
        chunk = self.fp16_accumulation_chunk
        check(
            timeout is None or timeout == 0 or timeout >= 1,
            f"--hang-timeout-in-secs is {timeout}: pass 1 or more, or 0",
        )
        check(
            chunk is None or 0 < chunk <= MAX_FP16_SUM_LENGTH,
            f"--fp16-accumulation-chunk is {chunk}: pass a number from 1 to {MAX_FP16_SUM_LENGTH}",
        )

    @cached_property
    def int8_matmuls(self) -> str:
        """Words for the matmuls that are quantized; empty without --int8."""
        if not self.int8:
            return ""
        gradients = "all gradients" if self.int8_wgrad else "data gradients"
        return (
            f"forward and {gradients} of linear layers{' and the head' if self.int8_head else ''}"
        )

    @cached_property
    def splits_fp32(self) -> bool:
        """True if FP32 matmul operands are split into three BF16 numbers."""
        return self.fp32_matmul == "bf16x3"
