"""Fields that say how ranks share the model: parallel sizes, pipeline schedule, sequence and context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline.schedule_names import AUTO, CHUNKED, INTERLEAVED, ONE_F_ONE_B, SPLITS_BACKWARD
from ..pipeline.schedule_names import NAMES as SCHEDULES
from .experts import ExpertRanks
from .fields import (
    check,
    check_choices,
    check_numbers,
    check_positive,
    flag,
    hashed_once,
    opt,
)

# What ranks of a sequence send each other for attention (--cp-comm-type), and where the program chooses.
P2P, ALLGATHER, A2A = CONTEXT_WAYS = ("p2p", "allgather", "a2a")


EITHER = "a2a+p2p"


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ExpertRanks):
    """How ranks share the model; data-parallel size is what remains of the world."""

    pipeline_model_parallel_size: int = opt(
        1, "stages the layers are cut into (PP)", aliases=("--pipe-parallel-size",)
    )
    pipeline_split: str = opt(
        "balanced",
        "layers of each stage, such as 9,3; balanced: stages of equal cost, the logits counted; "
        "even: equal numbers of layers",
    )
    decoder_first_pipeline_num_layers: int | None = opt(
        None, "layers of the first stage; the others share the rest", type=int
    )
    decoder_last_pipeline_num_layers: int | None = opt(
        None, "layers of the last stage; the others share the rest", type=int
    )
    pipeline_schedule: str | None = opt(
        None,
        "order of forwards and backwards: 1f1b; interleaved over several chunks of layers "
        "per stage; zb-h1 and zbv split backward, so that weight gradients fill idle time; zbv has "
        "two chunks per stage in a V; auto: the one with the least modelled time that fits "
        "into memory (default: interleaved with virtual stages, else 1f1b)",
        type=str,
        choices=(*SCHEDULES, AUTO),
    )
    num_virtual_stages_per_pipeline_rank: int | None = opt(
        None, "chunks of layers per stage of an interleaved or zb-h1 schedule", type=int
    )
    num_layers_per_virtual_pipeline_stage: int | None = opt(
        None, "layers of a chunk of an interleaved or zb-h1 schedule", type=int
    )
    zero_bubble_max_pending_backward: int | None = opt(
        None,
        "micro-batches that a stage of zb-h1 or zbv may hold whose weight "
        "gradients are not there: more of them leave less idle time and take more "
        "memory (default: the number of stages, as 1f1b)",
        type=int,
    )
    context_parallel_size: int = opt(1, "ranks that share each sequence (CP)", maximum=2**16)
    cp_comm_type: tuple[str, ...] | None = opt(
        None,
        "what ranks of a sequence send each other for attention, one value or one for each layer: p2p, keys and values from "
        "rank to rank while attention is computed; allgather, keys and values of all ranks at once; a2a, rows for heads; a2a+p2p "
        "leaves the choice to the program (default: p2p where these ranks are on several nodes and attention does not end with a "
        "document; else a2a where TP x CP divides the heads, and CP and a rank's query groups divide one another; else p2p)",
        type=str,
        nargs="+",
    )
    sequence_parallel: bool = opt(
        False, "norms, dropout and residuals on 1/TP of the sequence: activations take less memory"
    )
    tp_comm_overlap: bool = opt(
        False,
        "with --sequence-parallel: send activations in blocks, overlapped with the matmuls that "
        "read or write them",
    )
    zero_stage: int = opt(
        0,
        "1: shard the optimizer state over data-parallel ranks (ZeRO-1); 2 and 3 of DeepSpeed are taken as 1: "
        "gradients and weights stay whole, and training is the same",
        choices=(0, 1, 2, 3),
        switches={"--use-distributed-optimizer": 1},
    )
    overlap_grad_reduce: bool = opt(
        False, "reduce gradients in buckets, each while backward goes on with the layers before it"
    )
    overlap_param_gather: bool = opt(
        False, "gather the weights of ZeRO-1's shards in buckets, while the next forward runs"
    )
    ddp_bucket_size: int | None = opt(
        None,
        "elements that a bucket has at least (default: 40,000,000, or 1,000,000 x "
        "data-parallel size if that is more; without data parallelism one layer)",
        type=int,
    )
    grad_reduce_in_bf16: bool = opt(
        False,
        "gradients are sent in BF16, half the bytes; they are accumulated and reduced in FP32",
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(
            self,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "context_parallel_size",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
            "expert_tensor_parallel_size",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "zero_bubble_max_pending_backward",
            "ddp_bucket_size",
        )
        check_choices(self)
        wrong = [value for value in self.cp_comm_type or () if value not in (*CONTEXT_WAYS, EITHER)]
        check(
            not wrong,
            f"--cp-comm-type {' '.join(wrong)}: pass {', '.join(CONTEXT_WAYS)} or {EITHER}",
        )
        object.__setattr__(self, "zero_stage", min(self.zero_stage, 1))
        self._check_schedule()
        self._check_expert_ranks(self.sequence_parallel)
        check(
            self.sequence_parallel or not self.tp_comm_overlap,
            "--tp-comm-overlap needs --sequence-parallel: pass both",
        )
        check(
            self.overlap_grad_reduce or not self.overlap_param_gather,
            "--overlap-param-gather needs --overlap-grad-reduce: pass both",
        )
        check(
            self.zero_stage == 1 or not self.overlap_param_gather,
            f"--overlap-param-gather needs --use-distributed-optimizer, "
            f"and --zero-stage is {self.zero_stage}: pass --zero-stage 1, or leave it out",
        )
        numbers = all(part.isdecimal() and int(part) for part in self.pipeline_split.split(","))
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

    def _check_schedule(self) -> None:
        pp, schedule = self.pipeline_model_parallel_size, self.pipeline_schedule
        given = {
            flag(name): getattr(self, name)
            for name in (
                "num_virtual_stages_per_pipeline_rank",
                "num_layers_per_virtual_pipeline_stage",
            )
            if getattr(self, name)
        }
        for name, value in given.items():
            check(
                pp > 1,
                f"{name} {value} needs --pipeline-model-parallel-size above 1, and it is {pp}: raise it, or leave it out",
            )
            check(
                schedule in (None, *CHUNKED),
                f"{name} {value} is for --pipeline-schedule {' and '.join(CHUNKED)}, not "
                f"{schedule}: leave one out",
            )
        check(len(given) < 2, f"{' and '.join(given)} exclude each other: pass one")
        check(
            schedule != INTERLEAVED or given,
            "--pipeline-schedule interleaved needs --num-virtual-stages-per-pipeline-rank, the "
            "chunks of layers of each stage: pass it, or another schedule",
        )
        pending = self.zero_bubble_max_pending_backward
        check(
            pending is None or schedule in SPLITS_BACKWARD,
            f"--zero-bubble-max-pending-backward {pending} is for "
            f"--pipeline-schedule {' and '.join(SPLITS_BACKWARD)}, not {schedule or self.schedule}: leave one out",
        )

    @property
    def schedule(self) -> str:
        """The name of the schedule of training; 1f1b as long as it is not chosen."""
        virtual = (
            self.num_virtual_stages_per_pipeline_rank or self.num_layers_per_virtual_pipeline_stage
        )
        chosen = None if self.pipeline_schedule == AUTO else self.pipeline_schedule
        return chosen or (INTERLEAVED if virtual else ONE_F_ONE_B)
