"""Run configuration: frozen dataclasses, checked when they are built.

`cli.arguments` turns the fields into Megatron-LM's flags (num_layers -> --num-layers).
Errors: ValueError with flag, value and remedy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import get_type_hints

from ..pipeline.placement import Placement, placement_of
from ..pipeline.schedule_names import SCHEDULES
from .data import DataConfig
from .faults import NumbersConfig
from .fields import (
    Declaration,
    FieldValues,
    as_tuples,
    cached_hash,
    check,
    declarations,
    flag,
    of_topic,
)
from .freezing import EMBEDDING, FreezingConfig
from .lora import DROPOUT_COLUMNS, LoraConfig
from .model import ModelConfig
from .optimizer import OptimizerConfig
from .output import OutputConfig
from .parallel import A2A, EITHER, P2P, ParallelConfig
from .precision import PrecisionConfig
from .rows import Q8_BLOCK
from .system import INT8, SystemConfig
from .training import BatchConfig, TrainingConfig

ONE_RANK = ParallelConfig()


@cached_hash
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All flags of a run, by group; construction checks rules between groups."""

    model: ModelConfig
    parallel: ParallelConfig = ONE_RANK
    batch: BatchConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    output: OutputConfig = OutputConfig()
    system: SystemConfig = SystemConfig()
    numbers: NumbersConfig = NumbersConfig()
    lora: LoraConfig = LoraConfig()
    freezing: FreezingConfig = FreezingConfig()

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_kernels()
        self._derive_expert_ranks()
        self._check_divided_experts()
        self._check_lora()
        self._check_freezing()

    def _check_lengths(self) -> None:
        optimizer = self.optimizer
        by_samples = self.training.train_samples is not None
        in_iters = (
            optimizer.lr_decay_iters or optimizer.lr_warmup_iters or optimizer.lr_wsd_decay_iters
        )
        in_samples = (
            optimizer.lr_decay_samples
            or optimizer.lr_warmup_samples
            or optimizer.lr_wsd_decay_samples
        )
        check(
            not by_samples or not in_iters,
            "--train-samples goes with --lr-decay-samples and --lr-warmup-samples: leave out --lr- flags that count iterations",
        )
        check(
            by_samples or not in_samples,
            "--lr-decay-samples and --lr-warmup-samples go with --train-samples: pass it, or the -iters flags",
        )

    def _check_kernels(self) -> None:
        chunk = self.system.fp16_accumulation_chunk
        splits = self.system.splits_fp32
        precision = self.precision.name
        experts = self.model.num_experts
        optimizer = self.optimizer
        check(
            chunk is None or precision == "fp16",
            f"--fp16-accumulation-chunk {chunk} is for --fp16, and this run is "
            f"{precision}: pass --fp16, or leave it out",
        )
        if splits:
            check(
                precision == "fp32",
                f"--fp32-matmul bf16x3 is for FP32, and this run is {precision}: leave it out",
            )
            check(
                experts is None,
                f"--fp32-matmul bf16x3 is not supported with --num-experts {experts}: leave it out",
            )
        self._check_int8()
        native = {
            "--fp32-matmul bf16x3": splits,
            "--int8": self.system.int8,
            f"--lora-base-format {self.lora.lora_base_format}": self.lora.base_in_int8,
            f"--fp16-accumulation-chunk {chunk}": chunk is not None,
        }
        given = next((name for name, is_given in native.items() if is_given), None)
        check(
            given is None or self.system.kernels != "torch",
            f"{given} is for the C++ kernels, and --kernels is torch: "
            "pass native or auto, or leave it out",
        )
        fits = precision == "bf16" and optimizer.use_precision_aware_optimizer and optimizer.adamw
        check(
            fits or optimizer.main_params_dtype == "fp32",
            "--main-params-dtype bf16 is for AdamW with --bf16 and "
            "--use-precision-aware-optimizer: pass them, or fp32",
        )

    def _check_int8(self) -> None:
        system = self.system
        parts = [flag(name) for name in of_topic(SystemConfig, INT8) if getattr(system, name)]
        check(
            system.int8 or not parts,
            f"{''.join(parts[:1])} is for --int8: pass --int8 too, or leave it out",
        )
        if not system.int8:
            return
        others = {
            "--fp32-matmul bf16x3": system.splits_fp32,
            "--fp16-accumulation-chunk": system.fp16_accumulation_chunk is not None,
        }
        for other, given in others.items():
            check(not given, f"--int8 does not work with {other}: leave one of them out")

    def _check_lora(self) -> None:
        output = self.output
        # Adapters in --load may have another model than the one that they name.
        check(
            not (output.finetune and output.pretrained_checkpoint) or self.lora.on,
            "--finetune and --pretrained-checkpoint exclude each other: pass "
            "--finetune with --load for one start, or --pretrained-checkpoint for a run that "
            "resumes from its own --load",
        )
        self.lora.check_model(self.model)
        if not self.lora.on:
            return
        given = f"--lora-rank {self.lora.lora_rank}"
        check(
            not self.parallel.tp_comm_overlap,
            f"{given} is not supported with --tp-comm-overlap: leave one of them out",
        )
        check(
            not self.optimizer.muon,
            f"{given} is not supported with --optimizer {self.optimizer.optimizer}: pass adam",
        )
        check(
            not self.model.predictions,
            f"{given} is not supported with --mtp-num-layers {self.model.mtp_num_layers}: leave one "
            "of them out",
        )
        tp = self.tp
        widths = [self.model.context_width, self.model.ffn_hidden_size]
        if self.model.has_delta_nets:
            widths.append(self.model.delta_values)
        whole = all(size // tp % DROPOUT_COLUMNS == 0 for size in widths)
        check(
            not self.lora.lora_dropout or whole,
            f"--lora-dropout {self.lora.lora_dropout} needs multiples "
            f"of {DROPOUT_COLUMNS} columns of attention and of the MLP on every tensor-parallel rank, which "
            f"--tensor-model-parallel-size {tp} does not leave: change one of them",
        )

        self._check_int8_base()

    def _check_freezing(self) -> None:
        freezing = self.freezing
        if not freezing.on:
            return
        freezing.check_model(self.model)
        check(
            not self.lora.on,
            f"--lora-rank {self.lora.lora_rank} trains adapters alone: leave out --freeze, "
            "--freeze-first-layers and --freeze-all-layers",
        )
        predictions = self.model.mtp_num_layers
        check(
            freezing.freeze_all_layers or not self.model.predictions,
            f"--freeze is not supported with --mtp-num-layers {predictions}: leave one of them out",
        )

    def _check_int8_base(self) -> None:
        """Blocks with one scale must not depend on the layout."""
        if not self.lora.base_in_int8:
            return
        model = self.model
        tp = self.tp
        etp = self.etp
        dense = model.ffn_hidden_size if model.activation in model.mlps else None
        experts = model.moe_ffn_hidden_size if model.num_experts else None
        shared = model.moe_shared_expert_intermediate_size
        of_tp = "--tensor-model-parallel-size"
        divided = (
            *((width, tp, of_tp) for width in (model.context_width, dense, shared)),
            (experts, etp, "--expert-tensor-parallel-size"),
            (model.delta_values if model.has_delta_nets else None, tp, of_tp),
        )
        for width, ranks, name in divided:
            check(
                not width or ranks == 1 or width // ranks % Q8_BLOCK == 0,
                f"--lora-base-format int8 needs multiples of {Q8_BLOCK} input columns on every rank, which "
                f"{name} {ranks} does not leave of {width}: change one of them",
            )

    @cached_property
    def values(self) -> FieldValues:
        return {
            field.name: getattr(getattr(self, group), field.name)
            for group, config in GROUPS.items()
            for field in fields(config)
        }

    @cached_property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.parallel.tensor_model_parallel_size

    @cached_property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return self.parallel.pipeline_model_parallel_size

    @cached_property
    def cp(self) -> int:
        """Context-parallel size."""
        return self.parallel.context_parallel_size

    @cached_property
    def ep(self) -> int:
        """Expert-parallel size."""
        return self.parallel.expert_model_parallel_size

    @cached_property
    def etp(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.parallel.expert_tensor_parallel_size or self.tp

    @cached_property
    def on_one_rank(self) -> RunConfig:
        """The same run without parallelism."""
        if self.parallel == ONE_RANK:
            return self
        return replace(self, parallel=ONE_RANK)

    @cached_property
    def placement(self) -> Placement:
        parallel = self.parallel
        pp = self.pp
        chunks = SCHEDULES[parallel.schedule].chunks or 1
        if per_chunk := parallel.num_layers_per_virtual_pipeline_stage:
            chunks = max(1, self.model.num_layers // (per_chunk * pp))
        elif given := parallel.num_virtual_stages_per_pipeline_rank:
            chunks = given
        return placement_of(parallel.schedule, pp, chunks)

    @cached_property
    def cp_comm_types(self) -> tuple[str, ...]:
        """Communication types of context parallelism, by layer, and then of the MTP modules."""
        model = self.model
        tp = self.tp
        cp = self.cp
        groups = model.query_groups // tp
        divides_heads = (
            model.num_attention_heads % (tp * cp) == 0 and not model.qk_layernorm_all_heads
        )
        divides_groups = groups % cp == 0 or cp % max(1, groups) == 0
        automatic = A2A if divides_heads and divides_groups else P2P
        given = self.parallel.cp_comm_type or (EITHER,)
        types = tuple(automatic if name == EITHER else name for name in given)
        if len(types) == 1:
            types *= model.num_layers
        return types + types[-1:] * model.predictions

    @cached_property
    def typical_cp_comm_type(self) -> str:
        return max(self.cp_comm_types, key=self.cp_comm_types.count)

    @cached_property
    def tokens_per_microbatch(self) -> int:
        """Tokens s b / c of a micro-batch on each of c context-parallel ranks."""
        return self.model.seq_length * self.batch.micro_batch_size // self.cp

    @cached_property
    def element_bytes(self) -> int:
        return 4 if self.precision.name == "fp32" else 2

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes of (s, b, h) on one rank."""
        return self.tokens_per_microbatch * self.model.hidden_size * self.element_bytes

    @cached_property
    def sequence_shards(self) -> int:
        """Tensor-parallel ranks that shard the sequence between matmuls."""
        return self.tp if self.parallel.sequence_parallel else 1

    @cached_property
    def residual_bytes(self) -> int:
        """Bytes of (s, b, h) or its sequence shard."""
        return self.activation_bytes // self.sequence_shards

    @cached_property
    def has_frozen_weights(self) -> bool:
        return self.lora.on or self.freezing.on

    @cached_property
    def frozen_layers(self) -> int:
        """Layers at the model's beginning without a trained parameter."""
        return self.freezing.first_layers(self.model)

    @cached_property
    def layers_without_backward(self) -> int:
        """Layers at the model's beginning with nothing trained in or below them."""
        return self.frozen_layers if self.freezing.has(EMBEDDING) else 0

    @cached_property
    def freezes_embedding(self) -> bool:
        return self.lora.on or self.freezing.has(EMBEDDING)

    @cached_property
    def masters(self) -> bool:
        return self.precision.name != "fp32" and self.optimizer.main_params_dtype == "fp32"

    def _derive_expert_ranks(self) -> None:
        if self.model.num_experts is None and self.parallel.expert_tensor_parallel_size:
            parallel = replace(self.parallel, expert_tensor_parallel_size=None)
            object.__setattr__(self, "parallel", parallel)

    def _check_divided_experts(self) -> None:
        parallel = self.parallel
        if not parallel.divides_experts:
            return
        tp = self.tp
        check(
            self.model.num_experts,
            f"{parallel.dividing_flag} needs --num-experts: leave it out",
        )
        check(
            tp % self.etp == 0,
            f"--expert-tensor-parallel-size {self.etp} is not supported: pass a divisor of "
            f"--tensor-model-parallel-size, which is {tp}",
        )
        check(
            tp == 1 or parallel.sequence_parallel,
            f"{parallel.dividing_flag} with --tensor-model-parallel-size "
            f"{tp} needs --sequence-parallel, so that every rank sends other tokens: pass it",
        )


GROUPS: dict[str, type] = get_type_hints(RunConfig)

# A field -> its group in RunConfig.
GROUP_OF = {field.name: group for group, config in GROUPS.items() for field in fields(config)}


def all_flags() -> tuple[Declaration, ...]:
    """Return all flags of a run."""
    return tuple(each for config in GROUPS.values() for each in declarations(config))


def run_of(values: FieldValues) -> RunConfig:
    """Return the run with these flags, by name. Raises ValueError for values that contradict each other."""
    assert values.keys() <= GROUP_OF.keys(), f"no such fields: {values.keys() - GROUP_OF.keys()}"
    groups: dict[str, FieldValues] = {}
    for name, value in values.items():
        groups.setdefault(GROUP_OF[name], {})[name] = value
    return RunConfig(**{group: GROUPS[group](**flags) for group, flags in groups.items()})


def saved_run(manifest: FieldValues, sizes: tuple[int, int] | None = None) -> RunConfig:
    """Return a checkpoint's run for inference with single samples.

    sizes: tensor- and pipeline-parallel sizes; None: as in the checkpoint
    """
    groups: dict[str, FieldValues] = {}
    for name in GROUPS:
        groups[name] = as_tuples(manifest["config"].get(name, {}))
    groups["batch"] = {"micro_batch_size": 1}
    groups["model"]["use_z_loss"] = False  # in training only, as MTP modules
    groups["model"]["mtp_num_layers"] = None
    groups["training"]["recompute_part_layers"] = None  # depends on the layout
    if sizes:
        tp, pp = sizes
        groups["parallel"] = {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
        }
    # A prompt of any length is neither sharded nor dispatched to replicas; the weights are the same.
    groups["parallel"] |= {
        "sequence_parallel": False,
        "tp_comm_overlap": False,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
    }
    return RunConfig(**{name: config(**groups[name]) for name, config in GROUPS.items()})
