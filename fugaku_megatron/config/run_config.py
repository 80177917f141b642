"""What a run is: frozen dataclasses, one help text per field, checked as soon as they are built.

`arguments` makes Megatron-LM's flags out of these fields (num_layers -> --num-layers) and `recipes` returns filled-in ones.
Left out: anything that needs the world size (`layout.Layout`) or touches the disk.
Errors: ValueError naming the flag, the value and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .data import DataConfig
from .faults import NumbersConfig
from .fields import (
    check,
    hashed_once,
)
from .lora import DROPOUT_COLUMNS, LoraConfig
from .model import ModelConfig
from .optimizer import OptimizerConfig
from .output import OutputConfig
from .parallel import ParallelConfig
from .precision import PrecisionConfig
from .system import SystemConfig
from .training import RECOMPUTE, BatchConfig, TrainingConfig

OWN_OF_A_RANK = (
    *RECOMPUTE,
    "save_local",
    "log_file",
    "log_ranks",
    "tensorboard_dir",
    "wandb_save_dir",
    "profile_dir",
    "data_cache_path",
    "allocator",
    "thread_affinity",
    "cpu_frequency",
)


@hashed_once
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, complete. Checks what spans two groups."""

    model: ModelConfig
    batch: BatchConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    output: OutputConfig = OutputConfig()
    system: SystemConfig = SystemConfig()
    numbers: NumbersConfig = NumbersConfig()
    lora: LoraConfig = LoraConfig()

    def __post_init__(self) -> None:
        samples, optimizer = self.training.train_samples is not None, self.optimizer
        check(
            not samples
            or not (
                optimizer.lr_decay_iters
                or optimizer.lr_warmup_iters
                or optimizer.lr_wsd_decay_iters
            ),
            "--train-samples goes with --lr-decay-samples and --lr-warmup-samples: leave out --lr- flags that count iterations",
        )
        check(
            samples
            or not (
                optimizer.lr_decay_samples
                or optimizer.lr_warmup_samples
                or optimizer.lr_wsd_decay_samples
            ),
            "--lr-decay-samples and --lr-warmup-samples go with --train-samples: pass it, or the -iters flags",
        )
        chunk, kernels = self.system.fp16_accumulation_chunk, self.system.kernels
        check(
            chunk is None or self.precision.fp16,
            f"--fp16-accumulation-chunk {chunk} is for --fp16, and this run is "
            f"{self.precision.name}: pass --fp16, or leave it out",
        )
        splits, precision, experts = (
            self.system.splits_fp32,
            self.precision.name,
            self.model.num_experts,
        )
        check(
            not splits or precision == "fp32",
            f"--fp32-matmul bf16x3 is for FP32, and this run is {precision}: leave it out",
        )
        check(
            not splits or experts is None,
            f"--fp32-matmul bf16x3 is not supported with --num-experts {experts}: leave it out",
        )
        native = "--fp32-matmul bf16x3" if splits else f"--fp16-accumulation-chunk {chunk}"
        check(
            (chunk is None and not splits) or kernels != "torch",
            f"{native} is for the C++ kernels, and --kernels is torch: "
            "pass native or auto, or leave it out",
        )
        self._check_divided_experts()
        fits = (
            self.precision.bf16 and optimizer.use_precision_aware_optimizer and not optimizer.muon
        )
        check(
            fits or optimizer.main_params_dtype == "fp32",
            "--main-params-dtype bf16 is for AdamW with --bf16 and "
            "--use-precision-aware-optimizer: pass them, or fp32",
        )
        layers, count = self.numbers.abft or (), self.model.num_layers
        beyond = next((layer for layer in layers if layer != "all" and int(layer) >= count), None)
        check(
            beyond is None,
            f"--abft {beyond}: the model has layers 0 to {count - 1}: pass some of them, or all",
        )
        check(
            not layers or (kernels != "torch" and chunk is None),
            "--abft is for the C++ kernels with sums in FP32: leave out "
            "--kernels torch and --fp16-accumulation-chunk, or leave --abft out",
        )
        self._check_lora()

    def _check_lora(self) -> None:
        output = self.output
        check(  # adapters of --load may have another model than the one that they name
            not (output.finetune and output.pretrained_checkpoint) or self.lora.on,
            "--finetune and --pretrained-checkpoint exclude each other: pass "
            "--finetune with --load for one start, or --pretrained-checkpoint for a run that "
            "goes on from its own --load",
        )
        self.lora.check_model(self.model)
        given = f"--lora-rank {self.lora.lora_rank}"
        check(
            not self.lora.on or not self.parallel.tp_comm_overlap,
            f"{given} is not supported with --tp-comm-overlap: leave one of them out",
        )
        check(
            not self.lora.on or not self.numbers.abft,
            f"{given} is not supported with --abft: leave one of them out",
        )
        check(
            not self.lora.on or not self.optimizer.muon,
            f"{given} is not supported with --optimizer {self.optimizer.optimizer}: pass adam",
        )
        tp = self.parallel.tensor_model_parallel_size
        whole = all(
            size // tp % DROPOUT_COLUMNS == 0
            for size in (self.model.context_width, self.model.ffn_hidden_size)
        )
        check(
            not self.lora.on or not self.lora.lora_dropout or whole,
            f"--lora-dropout {self.lora.lora_dropout} needs multiples "
            f"of {DROPOUT_COLUMNS} columns of attention and of the MLP on every tensor-parallel rank, which "
            f"--tensor-model-parallel-size {tp} does not leave: change one of them",
        )

    @property
    def masters(self) -> bool:
        """Whether a rank holds an FP32 copy of the weights that it updates."""
        return self.precision.name != "fp32" and self.optimizer.main_params_dtype == "fp32"

    def _check_divided_experts(self) -> None:
        parallel, divided = self.parallel, self.parallel.divides_experts
        check(
            self.model.num_experts or not divided,
            f"{parallel.dividing_flag} needs --num-experts: leave it out",
        )
        check(
            not divided or not self.optimizer.muon,
            f"{parallel.dividing_flag} is supported with AdamW, not with --optimizer "
            "muon: leave one of them out",
        )


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "precision": PrecisionConfig,
    "training": TrainingConfig,
    "data": DataConfig,
    "output": OutputConfig,
    "system": SystemConfig,
    "numbers": NumbersConfig,
    "lora": LoraConfig,
}


def saved_run(manifest: dict[str, Any], sizes: tuple[int, int] | None = None) -> RunConfig:
    """The run that wrote the checkpoint, one sample at a time. sizes: (tensor, pipeline) parallel; None: its own layout."""
    groups = {}
    for name, config in GROUPS.items():
        values = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in manifest["config"].get(name, {}).items()
        }
        if name == "batch":
            values = {"micro_batch_size": 1}
        if name == "model":  # a part of the loss in training alone
            values["use_z_loss"] = False
        if name == "training":  # numbers of layers to recompute belong to that layout
            values["recompute_part_layers"] = None
        if name == "parallel" and sizes:
            values = dict(
                zip(("tensor_model_parallel_size", "pipeline_model_parallel_size"), sizes)
            )
        if (
            name == "parallel"
        ):  # a prompt of any length is not cut into parts or sent to replicas; the weights are the same
            values |= {
                "sequence_parallel": False,
                "tp_comm_overlap": False,
                "expert_model_parallel_size": 1,
                "expert_tensor_parallel_size": None,
            }
        groups[name] = config(**values)
    return RunConfig(**groups)
