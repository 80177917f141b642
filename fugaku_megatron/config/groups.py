"""The groups of a run's fields that say how ranks share the model, how it is optimized, its data, and checks of its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline.parts import AUTO, CHUNKED, INTERLEAVED, ONE_F_ONE_B, SPLITS_BACKWARD
from ..pipeline.parts import NAMES as SCHEDULES
from .checks import (
    check,
    check_choices,
    check_fraction,
    check_numbers,
    check_positive,
    flag,
    hashed_once,
    opt,
)
from .experts_config import ExpertRanks
from .sample_rules import Skips

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


DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
MOMENT_BLOCK = 256  # elements that share a scale in int8
MOMENT_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": 1 + 4 / MOMENT_BLOCK,
}  # of an element, by the formats that are built
MUON = ("muon", "dist_muon")
MUON_COEFFICIENTS = {
    "quintic": 5,
    "simple": 1,
}  # of the Newton-Schulz iteration, and how many steps have their own
MUON_FLAGS = (
    "muon_momentum",
    "muon_nesterov",
    "muon_no_split_qkv",
    "muon_scale_mode",
    "muon_extra_scale_factor",
    "muon_coefficient_type",
    "muon_num_ns_steps",
    "muon_tp_mode",
)
MOMENT_DTYPES = (*MOMENT_BYTES, "fp16", "fp8")  # Megatron-LM's
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


@hashed_once
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or Muon, clipping, learning-rate and weight-decay schedule."""

    optimizer: str = opt(
        "adam",
        "adam: AdamW for all weights; muon: orthogonal updates of matrices, and AdamW for embeddings, the "
        "logits' weight, biases and norms; dist_muon: the same with --use-distributed-optimizer",
        choices=("adam", *MUON),
    )
    muon_momentum: float = opt(0.9, "decay of Muon's momentum")
    muon_nesterov: bool = opt(
        False, "Muon looks one step of its momentum ahead", aliases=("--muon-use-nesterov",)
    )
    muon_no_split_qkv: bool = opt(
        False, "queries, keys and values of a layer are one matrix for Muon"
    )
    muon_scale_mode: str = opt(
        "spectral",
        "factor of Muon's orthogonal update: spectral, the root of the longer side; "
        "unit_rms_norm, the root of rows over columns; shape_scaling, that and at least 1",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = opt(
        1.0, "another factor; 0.2 with spectral makes updates as large as AdamW's"
    )
    muon_coefficient_type: str = opt(
        "quintic",
        "coefficients of the Newton-Schulz iteration",
        choices=tuple(MUON_COEFFICIENTS),
    )
    muon_num_ns_steps: int = opt(
        5,
        "steps of the Newton-Schulz iteration, with quintic at most 5 or a multiple of 5, whose "
        "coefficients begin again after five steps",
    )
    muon_tp_mode: str = opt(
        "duplicated",
        "duplicated: whole matrices, gathered from tensor-parallel ranks, so that the update "
        "does not depend on the layout; blockwise: each rank's part is a matrix, as is Megatron-LM's default",
        choices=("duplicated", "blockwise"),
    )
    lr: float = opt(1e-4, "peak learning rate")
    min_lr: float = opt(0.0, "the learning rate never falls below this after warm-up")
    decoupled_lr: float | None = opt(
        None,
        "peak learning rate of the word embedding and of the logits' weight (default: --lr)",
        type=float,
    )
    decoupled_min_lr: float | None = opt(
        None, "what theirs never falls below after warm-up (default: --min-lr)", type=float
    )
    lr_decay_style: str = opt("linear", "shape of the decay", choices=DECAY_STYLES)
    lr_decay_iters: int | None = opt(
        None, "iterations until --min-lr (default: --train-iters)", type=int
    )
    lr_decay_samples: int | None = opt(
        None, "samples until --min-lr (default: --train-samples)", type=int, maximum=2**40
    )
    lr_warmup_iters: int = opt(0, "iterations of linear warm-up", aliases=("--warmup-iters",))
    lr_warmup_samples: int = opt(0, "samples of linear warm-up", maximum=2**40)
    lr_warmup_fraction: float | None = opt(
        None, "warm-up as a fraction of the decay length", type=float
    )
    lr_decay_tokens: float | None = opt(
        None, "tokens until --min-lr (default: --train-tokens)", type=float
    )
    lr_warmup_tokens: float = opt(0.0, "tokens of linear warm-up")
    lr_warmup_init: float = opt(0.0, "learning rate at which the warm-up begins")
    lr_wsd_decay_style: str = opt(
        "exponential", "shape of the decay at the end of --lr-decay-style WSD", choices=WSD_STYLES
    )
    lr_wsd_decay_iters: int | None = opt(None, "iterations of that decay", type=int)
    lr_wsd_decay_samples: int | None = opt(None, "samples of that decay", type=int, maximum=2**40)
    weight_decay: float = opt(0.01, "decoupled weight decay, on matrices only")
    start_weight_decay: float | None = opt(
        None, "weight decay at the start (default: --weight-decay)", type=float
    )
    end_weight_decay: float | None = opt(
        None, "weight decay at the end (default: --weight-decay)", type=float
    )
    weight_decay_incr_style: str = opt(
        "constant", "path between the two", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = opt(1.0, "largest global gradient norm; 0: no clipping")
    adam_beta1: float = opt(0.9, "decay of the first moment")
    adam_beta2: float = opt(0.999, "decay of the second moment")
    adam_eps: float = opt(1e-8, "added to the root of the second moment")
    use_precision_aware_optimizer: bool = opt(
        False, "store AdamW's moments in the formats of --exp-avg-dtype and --exp-avg-sq-dtype"
    )
    main_params_dtype: str = opt(
        "fp32",
        "bf16: no FP32 master weights; AdamW updates in FP32 and rounds each weight to BF16 up or "
        "down at random so that its mean is right; with --bf16",
        choices=("fp32", "bf16"),
    )
    exp_avg_dtype: str = opt(
        "fp32",
        "with --use-precision-aware-optimizer, the format in which the first moment is stored: fp32, "
        "bf16, or int8 with a scale for each block of at most 256, rounded to nearest; AdamW computes in FP32",
        choices=MOMENT_DTYPES,
    )
    exp_avg_sq_dtype: str = opt(
        "fp32",
        "the same of the second moment, rounded up or down at random so that its mean is right, the "
        "same in every layout",
        choices=MOMENT_DTYPES,
    )
    override_opt_param_scheduler: bool = opt(
        False,
        "on resuming, learning rate and weight decay follow this command line; the "
        "default, too, which notes what differs from the checkpoint",
        aliases=("--override-opt_param-scheduler", "--override-lr-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = opt(
        False,
        "on resuming, learning rate and weight decay follow the checkpoint's "
        "schedule, whatever this command line says",
        aliases=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"),
    )
    no_load_lr_state: bool = opt(
        False, "on resuming, learning rate and weight decay begin their schedule anew"
    )
    no_load_optim: bool = opt(
        False, "on resuming, load the weights only: moments, loss scale and schedule begin anew"
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(
            self,
            "lr",
            "decoupled_lr",
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_decay_tokens",
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
            "adam_eps",
            "muon_num_ns_steps",
            "muon_extra_scale_factor",
        )
        check_fraction(self, "adam_beta1", "adam_beta2", "muon_momentum")
        for name in (
            "min_lr",
            "decoupled_min_lr",
            "weight_decay",
            "clip_grad",
            "lr_warmup_iters",
            "lr_warmup_samples",
            "lr_warmup_tokens",
            "lr_warmup_init",
        ):
            check(
                (getattr(self, name) or 0) >= 0,
                f"{flag(name)} is {getattr(self, name)}: pass 0 or more",
            )
        check_choices(self)
        self._check_learning_rate()
        self._check_weight_decay()
        self._check_moments()
        self._check_coefficients()
        keeps, anew = (
            self.use_checkpoint_opt_param_scheduler,
            self.no_load_lr_state or self.no_load_optim,
        )
        check(
            not (self.override_opt_param_scheduler and keeps),
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other: pass one",
        )
        check(
            not (anew and keeps),
            "--use-checkpoint-opt_param-scheduler goes with neither --no-load-lr-state nor "
            "--no-load-optim, which begin the schedule anew: leave it out",
        )

    def _check_learning_rate(self) -> None:
        for name in ("min_lr", "lr_warmup_init"):
            check(
                getattr(self, name) <= self.lr,
                f"{flag(name)} {getattr(self, name)} is above --lr {self.lr}: lower it",
            )
        lowest = max(
            self.lr_warmup_init,
            self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr,
        )
        check(
            self.decoupled_lr is None or lowest <= self.decoupled_lr,
            f"--decoupled-lr {self.decoupled_lr} is below {lowest}, "
            "the larger of --lr-warmup-init and of --decoupled-min-lr, by default --min-lr: raise it, or lower that",
        )
        self._check_one("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
        self._check_one("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens")
        if not self.lr_warmup_tokens:  # which win over a fraction, as in the forks that have them
            self._check_one("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
        self._check_one("lr_wsd_decay_iters", "lr_wsd_decay_samples")
        check(
            self.lr_warmup_fraction is None or 0 <= self.lr_warmup_fraction <= 1,
            f"--lr-warmup-fraction is {self.lr_warmup_fraction}: pass a number from 0 to 1",
        )
        check(
            self.lr_decay_style != "WSD" or self.lr_wsd_decay_iters or self.lr_wsd_decay_samples,
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples, the length of its decay: pass one",
        )

    def _check_coefficients(self) -> None:
        count = MUON_COEFFICIENTS[self.muon_coefficient_type]
        steps = self.muon_num_ns_steps
        check(
            steps <= count or steps % count == 0,
            f"--muon-num-ns-steps {steps}: the {count} coefficients of --muon-coefficient-type "
            f"{self.muon_coefficient_type} would begin again and not end, which leaves singular values near 0.1 and not 1: "
            f"pass {steps // count * count} or {(steps // count + 1) * count}",
        )

    def _check_moments(self) -> None:
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            value = getattr(self, name)
            check(
                value in MOMENT_BYTES,
                f"{flag(name)} {value}: moments lie below the range of {value.upper()}, and the scale of "
                "each tensor that it needs is not supported: pass int8, bf16 or fp32",
            )
            check(
                value == "fp32" or self.use_precision_aware_optimizer,
                f"{flag(name)} {value} needs "
                "--use-precision-aware-optimizer, as in Megatron-LM: pass it, or fp32",
            )
        check(
            (self.exp_avg_dtype == "int8") == (self.exp_avg_sq_dtype == "int8"),
            f"--exp-avg-dtype {self.exp_avg_dtype} and "
            f"--exp-avg-sq-dtype {self.exp_avg_sq_dtype}: int8 is supported for both moments together only: pass it twice",
        )
        check(
            self.exp_avg_dtype != "int8" or not self.muon,
            f"--exp-avg-dtype int8 is supported with AdamW, not with --optimizer "
            f"{self.optimizer}: pass bf16",
        )

    @property
    def muon(self) -> bool:
        """Whether matrices are updated by Muon."""
        return self.optimizer in MUON

    @property
    def moment_bytes(self) -> float:
        """Of both of AdamW's moments of one parameter."""
        return MOMENT_BYTES[self.exp_avg_dtype] + MOMENT_BYTES[self.exp_avg_sq_dtype]

    def _check_one(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name)]
        check(len(given) <= 1, f"{' and '.join(map(flag, given))} exclude each other: pass one")

    def _check_weight_decay(self) -> None:
        for name in ("start_weight_decay", "end_weight_decay"):
            value = getattr(self, name)
            check(value is None or value >= 0, f"{flag(name)} is {value}: pass 0 or more")
            check(
                value is None or self.weight_decay_incr_style != "constant",
                f"{flag(name)} {value} has no effect with "
                "--weight-decay-incr-style constant: pass linear or cosine, or only --weight-decay",
            )
        start = self.weight_decay if self.start_weight_decay is None else self.start_weight_decay
        end = self.weight_decay if self.end_weight_decay is None else self.end_weight_decay
        check(
            start <= end,
            f"--end-weight-decay {end} is below --start-weight-decay {start}: the weight decay only grows, as in Megatron-LM; "
            "raise it",
        )


SENTENCEPIECE_TYPES = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "JapaneseSentencePiece",
)
TIKTOKEN = "TikTokenizer"


MARKING = (
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
)  # what needs the token that ends a document


@hashed_once
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokens and tokenizer."""

    data_path: tuple[str, ...] | None = opt(
        None,
        "prefix of .bin/.idx, or weight prefix weight prefix ...; prefixes without weights are read once, by their lengths",
        type=str,
        nargs="+",
    )
    train_data_path: tuple[str, ...] | None = opt(
        None, "as --data-path, all of it for training", type=str, nargs="+"
    )
    valid_data_path: tuple[str, ...] | None = opt(
        None, "as --data-path, all of it for validation", type=str, nargs="+"
    )
    data_args_path: str | None = opt(None, "file that holds the words of --data-path", type=str)
    per_split_data_args_path: str | None = opt(
        None,
        "JSON file that holds the words of --train-data-path as train, and of "
        "--valid-data-path as valid",
        type=str,
    )
    split: str = opt("969,30,1", "documents of --data-path for training, validation and test")
    legacy_split: bool = opt(
        False, "round --split as Megatron-LM did before Megatron-core 0.5, to continue such a run"
    )
    data_cache_path: str | None = opt(
        None,
        "folder for the index of --data-path (default: next to the data, where it is large)",
        type=str,
    )
    mock_data: bool = opt(False, "random tokens instead of --data-path")
    reset_position_ids: bool = opt(False, "positions count from the beginning of each document")
    reset_attention_mask: bool = opt(False, "a token attends to tokens of its own document alone")
    eod_mask_loss: bool = opt(
        False, "the loss leaves out what is predicted from the token that ends a document"
    )
    mean_document_length: int | None = opt(
        None,
        "tokens of a document, for the times and FLOPs that are estimated of a run with "
        "--reset-attention-mask (default: as many as --seq-length)",
        type=int,
    )
    skip_samples: tuple[str, ...] | None = opt(
        None,
        "samples that training leaves out, as FIRST:END ..., END not included; they "
        "count as consumed",
        type=str,
        nargs="+",
    )
    tokenizer_type: str = opt(
        "GPT2BPETokenizer",
        "tokenizer of --data-path: GPT2BPETokenizer, HuggingFaceTokenizer, "
        "SentencePieceTokenizer, Llama2Tokenizer, JapaneseSentencePiece, TikTokenizer or NullTokenizer; "
        "if no file of one is named, that of the model that the run starts from is used",
    )
    vocab_file: str | None = opt(
        None, "vocab.json of the tokenizer, or a SentencePiece model", type=str
    )
    merge_file: str | None = opt(None, "merges.txt of the tokenizer", type=str)
    tokenizer_model: str | None = opt(
        None,
        "folder of HuggingFaceTokenizer, .model file of SentencePiece, or .json file of "
        "TikTokenizer",
        type=str,
    )
    tiktoken_pattern: str = opt(
        "v2", "how TikTokenizer cuts a text into pieces", choices=("v1", "v2")
    )
    tiktoken_num_special_tokens: int = opt(1000, "tokens of TikTokenizer that stand for no text")
    sft: bool = opt(
        False,
        "--data-path are chats that fugaku-megatron preprocess --chat wrote: whole chats share a sample, each "
        "with positions and attention of its own, and the loss is that of the assistant's tokens",
    )
    sft_truncate: bool = opt(False, "cut chats of more tokens than a sample has")

    def __post_init__(self) -> None:
        check_numbers(self)
        check(
            self.tokenizer_type in SENTENCEPIECE_TYPES
            or (self.vocab_file is None) == (self.merge_file is None),
            f"--vocab-file is {self.vocab_file} and --merge-file is {self.merge_file}: pass both or neither",
        )
        Skips.parse(self.skip_samples)
        check_positive(self, "mean_document_length")
        check(
            self.mean_document_length is None or self.masks_attention,
            f"--mean-document-length {self.mean_document_length} is "
            "for runs whose attention ends with a document: pass --reset-attention-mask, or leave it out",
        )
        names = (
            "mock_data",
            "data_path",
            "train_data_path",
            "data_args_path",
            "per_split_data_args_path",
        )
        sources = [flag(name) for name in names if getattr(self, name)]
        check(len(sources) < 2, f"{' and '.join(sources)} exclude each other: pass one")
        check(
            self.train_data_path or not self.valid_data_path,
            "--valid-data-path goes with --train-data-path: pass both",
        )
        check(
            not (self.sft and self.mock_data),
            "--sft reads chats, and --mock-data are random tokens: pass --data-path",
        )
        check(
            not (self.sft and self.eod_mask_loss),
            "--sft counts what the assistant wrote, and --eod-mask-loss leaves out what "
            "follows the end of a text: leave one out",
        )

    @property
    def marks_documents(self) -> str:
        """The flags that need the token that ends a document; empty where there are none, and for chats, whose files have marks."""
        return "" if self.sft else " ".join(flag(name) for name in MARKING if getattr(self, name))

    @property
    def marked(self) -> bool:
        """Whether samples come with marks (`data.marks`)."""
        return self.sft or bool(self.marks_documents)

    @property
    def masks_attention(self) -> bool:
        """Whether attention ends with a document."""
        return self.sft or self.reset_attention_mask

    @property
    def restarts_positions(self) -> bool:
        """Whether positions begin anew with a document."""
        return self.sft or self.reset_position_ids

    @property
    def has_tokenizer(self) -> bool:
        """Whether the flags say which tokenizer it is, and not only of which kind."""
        return bool(
            self.vocab_file or self.tokenizer_model or self.tokenizer_type == "NullTokenizer"
        )

    @property
    def files(self) -> tuple[str, ...] | None:
        """What names the files of the training data; None where there are none."""
        listed = self.data_args_path or self.per_split_data_args_path
        return self.data_path or self.train_data_path or ((listed,) if listed else None)

    @property
    def cuts_chats(self) -> bool | None:
        """Whether a chat that is too long is cut, and not refused; None where the data are not chats."""
        return self.sft_truncate if self.sft else None

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """Each flag that names data, with its value."""
        given = {
            flag(name): getattr(self, name)
            for name in ("data_path", "train_data_path", "valid_data_path")
        }
        return {name: value for name, value in given.items() if value}


COMPARISON_INTERVAL = 100  # iterations


@hashed_once
@dataclass(frozen=True, kw_only=True)
class NumbersConfig:
    """Checks of what the machine computes. Apart from the comparison of replicas they cost nothing
    without their flags.
    """

    check_weight_hash_across_dp_replicas_interval: int | None = opt(
        COMPARISON_INTERVAL,
        "iterations between comparisons of all that several ranks hold alike, bit by bit: weights "
        "and, without --zero-stage 1, "
        "optimizer states of data-parallel replicas, what tensor-parallel ranks do not split, tied "
        "embeddings. They are "
        "compared before every save, too. 0: never",
        type=int,
    )
    rerun_on_spike: bool = opt(
        False,
        "repeat an iteration whose loss is a spike, Inf or NaN before its update, and tell a broken "
        "machine (other bits) from a bad batch (the same bits)",
        aliases=("--check-for-spiky-loss",),
    )
    loss_spike_deviations: float = opt(
        6.0,
        "a loss is a spike above the median of the last 50 by more than this many standard "
        "deviations, and by 1 %",
    )
    abft: tuple[str, ...] | None = opt(
        None,
        "layers whose matmuls are checked by checksums, with their experts: numbers from 0, or "
        "all, which includes the "
        "logits and Muon. Attention's own matmuls and routers are not checked. A rank whose "
        "matmuls are wrong in three "
        "iterations of 100 ends the run",
        type=str,
        nargs="+",
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(self, "loss_spike_deviations")
        name = "check_weight_hash_across_dp_replicas_interval"
        if getattr(self, name) is None:  # as saved by earlier versions
            object.__setattr__(self, name, COMPARISON_INTERVAL)
        value = getattr(self, name)
        check(value >= 0, f"{flag(name)} is {value}: pass 0 or more")
        wrong = next(
            (
                layer
                for layer in self.abft or ()
                if layer != "all" and not (layer.isascii() and layer.isdecimal())
            ),
            None,
        )
        check(wrong is None, f"--abft {wrong}: pass numbers of layers, from 0, or all")
