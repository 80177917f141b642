"""Fields of the process and its machine: kernels, clock, memory, sums in FP16."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import (
    check,
    check_choices,
    check_numbers,
    check_positive,
    hashed_once,
    opt,
)

FP16_CHUNK, MAX_FP16_CHUNK = (
    64,
    65536,
)  # 64: half the error of BF16 operands, at 1.7 times FP32's rate (docs/numerics.md)


@hashed_once
@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """How the machine is used."""

    kernels: str = opt(
        "auto",
        "native: the C++ kernels; torch: torch's own; auto: whichever is faster on this run's shapes",
        choices=("auto", "native", "torch"),
    )
    fp16_accumulation_chunk: int | None = opt(
        None,
        "with --fp16, sum this many terms of a linear layer in FP16 before adding in FP32: faster where the CPU has FP16 "
        "arithmetic (A64FX, SVE), less exact (default: sums in FP32)",
        type=int,
        switches={"--fp16-accumulation": FP16_CHUNK},
    )
    fp32_matmul: str = opt(
        "ieee",
        "ieee: FP32 matmuls on FP32 units; bf16x3: each operand as three BF16 numbers, multiplied by "
        "six BF16 matmuls, as exact as FP32, faster on AMX only",
        choices=("ieee", "bf16x3"),
    )
    cache_packed_weights: bool = opt(
        False,
        "keep weights packed for the matrix kernels from one optimizer step to the next: "
        "faster with several micro-batches per step, at two more copies of the weights",
    )
    allocator: str = opt(
        "tuned",
        "tuned: tensors in memory that stays with the process; stock: malloc as it is. A preloaded "
        "allocator (LD_PRELOAD) is used in either case",
        choices=("tuned", "stock"),
    )
    thread_affinity: str = opt(
        "auto",
        "pin: one core for each thread, in NUMA order; none: the system places threads; auto: "
        "pin on nodes of several NUMA domains",
        choices=("auto", "pin", "none"),
    )
    cpu_frequency: float | None = opt(
        None,
        "the clock in GHz that the run is meant for: set where the system lets us, and "
        "refused when the cores run at another",
        type=float,
    )
    hang_timeout_in_secs: float | None = opt(
        None,
        "a rank that does not move for so many seconds is named as stuck, and the job "
        "ends; 0: never (default: 10 times the slowest iteration, or EP times above EP 10, "
        "at least 60; 600 at the start and in a save)",
        type=float,
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_choices(self)
        check_positive(self, "cpu_frequency")
        timeout, chunk = self.hang_timeout_in_secs, self.fp16_accumulation_chunk
        check(
            timeout is None or timeout == 0 or timeout >= 1,
            f"--hang-timeout-in-secs is {timeout}: pass 1 or more, or 0",
        )
        check(
            chunk is None or 0 < chunk <= MAX_FP16_CHUNK,
            f"--fp16-accumulation-chunk is {chunk}: pass a number from 1 to {MAX_FP16_CHUNK}",
        )

    @property
    def splits_fp32(self) -> bool:
        """Whether FP32 operands of matmuls are multiplied as BF16 parts."""
        return self.fp32_matmul == "bf16x3"
