"""Parallel fields: sizes, pipeline schedule, ZeRO, sequence and context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..pipeline.schedule_names import (
    AUTO,
    INTERLEAVED,
    ONE_F_ONE_B,
    SCHEDULES,
    chunked,
    row,
    splitting_backward,
)
from .fields import (
    Requirement,
    RowNames,
    cached_hash,
    check,
    flag,
    free_option,
    free_optional,
    free_switch,
)
from .rules import CheckedFields

# Values of --cp-comm-type; EITHER is resolved by the program.
P2P = "p2p"
ALLGATHER = "allgather"
A2A = "a2a"
CP_COMM_TYPES = (P2P, ALLGATHER, A2A)
EITHER = "a2a+p2p"

SCHEDULE = "schedule"  # topic
TENSOR_PARALLEL = Requirement("--tensor-model-parallel-size above 1", lambda run: run.tp > 1)


@dataclass(frozen=True, kw_only=True)
class MatrixRanks:
    """Ranks that share matrices: tensor- and expert-parallel sizes."""

    tensor_model_parallel_size: int = free_option(
        1,
        "ranks that share each layer's matrices (TP)",
        aliases=("--model-parallel-size",),
        maximum=2**16,
    )
    expert_model_parallel_size: int = free_option(
        1,
        "ranks with different experts (EP): tokens are dispatched to their experts' ranks and combined "
        "on return; data-parallel ranks, and with a smaller --expert-tensor-parallel-size also tensor-parallel ranks",
        maximum=2**12,
    )
    expert_tensor_parallel_size: int | None = free_optional(
        "ranks that share each expert's matrices (default: the tensor-parallel size, of which it is a divisor)",
        maximum=2**16,
        needs="num_experts",
    )

    @cached_property
    def divides_experts(self) -> bool:
        """True if experts are sharded unlike the other matrices."""
        tp = self.tensor_model_parallel_size
        etp = self.expert_tensor_parallel_size
        return self.expert_model_parallel_size > 1 or etp not in (None, tp)

    @cached_property
    def dividing_flag(self) -> str:
        if self.expert_model_parallel_size > 1:
            return f"--expert-model-parallel-size {self.expert_model_parallel_size}"
        return f"--expert-tensor-parallel-size {self.expert_tensor_parallel_size}"


@cached_hash
@dataclass(frozen=True, kw_only=True)
class ParallelConfig(MatrixRanks, CheckedFields):
    """Parallel layout; the data-parallel size is world size / (TP x PP x CP)."""

    pipeline_model_parallel_size: int = free_option(
        1, "pipeline stages (PP)", aliases=("--pipe-parallel-size",)
    )
    pipeline_split: str = free_option(
        "balanced",
        "layers of each stage, such as 9,3, or of each model chunk in the order of the model, where the first and the last "
        "may be 0; balanced: stages of equal cost, the logits counted; even: equal numbers of layers",
    )
    decoder_first_pipeline_num_layers: int | None = free_optional(
        "layers of the first stage; the others share the rest"
    )
    decoder_last_pipeline_num_layers: int | None = free_optional(
        "layers of the last stage; the others share the rest"
    )
    account_for_embedding_in_pipeline_split: bool = free_switch(
        "count the embedding as a layer, and cut the layers evenly; the first model chunk has one less"
    )
    account_for_loss_in_pipeline_split: bool = free_switch(
        "count the loss as a layer, and cut the layers evenly; the last model chunk has one less"
    )
    pipeline_schedule: str | None = free_optional(
        "order of forwards and backwards: 1f1b; interleaved over several model chunks "
        "per stage; zb-h1 and zbv split backward, so that weight gradients fill idle time; zbv has "
        "two model chunks per stage in a V; auto: the schedule with the least modelled time that fits "
        "into memory (default: interleaved with virtual stages, else 1f1b)",
        choices=RowNames(SCHEDULES, AUTO),
        topic=SCHEDULE,
    )
    num_virtual_stages_per_pipeline_rank: int | None = free_optional(
        "model chunks per stage of an interleaved or zb-h1 schedule", topic=SCHEDULE
    )
    num_layers_per_virtual_pipeline_stage: int | None = free_optional(
        "layers of a model chunk of an interleaved or zb-h1 schedule", topic=SCHEDULE
    )
    zero_bubble_max_pending_backward: int | None = free_optional(
        "micro-batches with postponed weight gradients on a stage of zb-h1 or zbv: a larger number "
        "means less idle time and more memory (default: the number of stages, as 1f1b)",
    )
    context_parallel_size: int = free_option(
        1, "ranks that share each sequence (CP)", maximum=2**16
    )
    cp_comm_type: tuple[str, ...] | None = free_optional(
        "communication of attention between context-parallel ranks, one value or one per layer: p2p, a ring of keys and values, "
        "overlapped with attention; allgather, keys and values of all ranks at once; a2a, sequence blocks for heads; a2a+p2p, the "
        "program chooses (default: p2p if these ranks are on several nodes and attention is not restricted to documents; else a2a "
        "if TP x CP divides the heads, and one of CP and a rank's query groups divides the other; else p2p)",
    )
    sequence_parallel: bool = free_switch(
        "norms, dropout and residuals on 1/TP of the sequence, to save activation memory",
        needs=TENSOR_PARALLEL,
    )
    tp_comm_overlap: bool = free_switch(
        "with --sequence-parallel: send activations in blocks, overlapped with their matmuls",
        needs=TENSOR_PARALLEL,
    )
    zero_stage: int = free_option(
        0,
        "1: shard the optimizer state over data-parallel ranks (ZeRO-1); 2 and 3 of DeepSpeed mean 1: "
        "gradients and weights are not sharded, and training is the same",
        choices=(0, 1, 2, 3),
        switches={"--use-distributed-optimizer": 1},
        range=None,
    )
    overlap_grad_reduce: bool = free_switch(
        "reduce gradients in buckets, overlapped with the backward of earlier layers"
    )
    overlap_param_gather: bool = free_switch(
        "gather ZeRO-1's weight shards in buckets, overlapped with the next forward"
    )
    ddp_bucket_size: int | None = free_optional(
        "minimum elements of a bucket (default: 40,000,000, or 1,000,000 x "
        "data-parallel size if that is more; without data parallelism one layer)",
    )
    grad_reduce_in_bf16: bool = free_switch(
        "send gradients in BF16, half the bytes; accumulate and reduce them in FP32"
    )

    def _derive(self) -> None:
        object.__setattr__(self, "zero_stage", min(self.zero_stage, 1))

    def _check(self) -> None:
        wrong = [
            value for value in self.cp_comm_type or () if value not in (*CP_COMM_TYPES, EITHER)
        ]
        check(
            not wrong,
            f"--cp-comm-type {' '.join(wrong)}: pass {', '.join(CP_COMM_TYPES)} or {EITHER}",
        )
        self._check_schedule()
        check(
            self.zero_stage == 1 or not self.overlap_param_gather,
            f"--overlap-param-gather needs --use-distributed-optimizer, "
            f"and --zero-stage is {self.zero_stage}: pass --zero-stage 1, or leave it out",
        )
        given = self.pipeline_split.split(",")
        numbers = all(part.isdecimal() for part in given) and all(map(int, given[1:-1]))
        check(
            numbers or self.pipeline_split in ("balanced", "even"),
            f"--pipeline-split {self.pipeline_split}: pass the layers of "
            "each stage, such as 9,3, or balanced or even",
        )
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
            value = getattr(self, name)
            check(
                value is None or not numbers,
                f"{flag(name)} {value} and --pipeline-split {self.pipeline_split} exclude each "
                "other: pass one",
            )
            check(
                value is None or self.pipeline_model_parallel_size > 1,
                f"{flag(name)} {value} needs "
                "--pipeline-model-parallel-size above 1: pass it, or leave it out",
            )
        first = self.decoder_first_pipeline_num_layers
        last = self.decoder_last_pipeline_num_layers
        check(
            not self.ends_in_split or not (numbers or first or last),
            f"{self.ends_in_split} cuts the layers evenly: leave it out beside --pipeline-split {self.pipeline_split}, "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
        )

    @cached_property
    def ends_in_split(self) -> str:
        """Flags that count the embedding or the loss as a layer."""
        names = (
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
        return " ".join(flag(name) for name in names if getattr(self, name))

    def _check_schedule(self) -> None:
        pp = self.pipeline_model_parallel_size
        schedule = self.pipeline_schedule
        virtual = {
            "--num-virtual-stages-per-pipeline-rank": self.num_virtual_stages_per_pipeline_rank,
            "--num-layers-per-virtual-pipeline-stage": self.num_layers_per_virtual_pipeline_stage,
        }
        for name, value in virtual.items():
            if value is None:
                continue
            check(
                pp > 1,
                f"{name} {value} needs --pipeline-model-parallel-size above 1, and it is {pp}: raise it, or leave it out",
            )
            check(
                schedule is None or schedule in chunked(),
                f"{name} {value} is for --pipeline-schedule {' and '.join(chunked())}, not "
                f"{schedule}: leave one out",
            )
        check(
            schedule in (None, AUTO) or not row(schedule).needs_chunks or any(virtual.values()),
            f"--pipeline-schedule {schedule} needs --num-virtual-stages-per-pipeline-rank, the "
            "chunks of layers of each stage: pass it, or another schedule",
        )
        pending = self.zero_bubble_max_pending_backward
        check(
            pending is None or schedule in splitting_backward(),
            f"--zero-bubble-max-pending-backward {pending} is for "
            f"--pipeline-schedule {' and '.join(splitting_backward())}, not {schedule or self.schedule}: leave one out",
        )

    @cached_property
    def schedule(self) -> str:
        """Training schedule's name; 1f1b while `auto` is not resolved."""
        if self.pipeline_schedule not in (None, AUTO):
            return self.pipeline_schedule
        virtual = (
            self.num_virtual_stages_per_pipeline_rank or self.num_layers_per_virtual_pipeline_stage
        )
        return INTERLEAVED if virtual else ONE_F_ONE_B
