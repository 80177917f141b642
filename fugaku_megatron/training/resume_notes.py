"""What a run that continues says of how it differs from the run that saved its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoint.load import Checkpoint
from ..config.checks import flag
from ..config.experts_config import BALANCE, CAPACITY
from ..config.groups import MARKING, MUON_FLAGS
from ..config.model_config import ANGLES, UNSETTLED
from ..config.run_config import RunConfig
from ..costs.accounting import padded_vocab_size
from .train import Trainer, layout_record

LAYOUT_SIZES = {"tensor_model_parallel_size": "TP", "pipeline_model_parallel_size": "PP", "context_parallel_size": "CP",
                "data_parallel_size": "DP", "zero_shards": "ZeRO shards"}


# What decides the course of training next to the architecture, by group: a resumed run says where it differs from what was saved.
COURSE = {
    "model": ("seq_length", "mask_vocab_padding", "use_z_loss", "z_loss_strength", "hidden_dropout", "attention_dropout", *BALANCE,
              *CAPACITY),
    "batch": ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    "optimizer": ("optimizer", *MUON_FLAGS, "lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "lr_decay_style",
                  "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples",
                  "lr_warmup_fraction", "lr_decay_tokens", "lr_warmup_tokens", "lr_warmup_init", "lr_wsd_decay_style",
                  "lr_wsd_decay_iters", "lr_wsd_decay_samples",
                  "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
                  "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
    "precision": ("bf16", "fp16", "loss_scale"),
    "training": ("seed",),
    "data": ("data_path", "train_data_path", "valid_data_path", "split", "legacy_split", "mock_data", "sft",
             "sft_truncate", *MARKING),
    "system": ("fp16_accumulation_chunk", "fp32_matmul"),
    "lora": ("lora_alpha", "lora_dropout", "lora_use_rslora"),
}


def differences(run: RunConfig, saved: dict[str, Any]) -> list[str]:
    """The settings that decide the course of training and differ from the saved ones, each as a phrase with its flag."""
    phrases = []
    for group, names in COURSE.items():
        now, before = getattr(run, group), saved.get(group, {})
        for name in names:
            value = getattr(now, name)
            value = list(value) if isinstance(value, tuple) else value  # as JSON has it
            if name in before and before[name] != value:
                phrases.append(f"{flag(name)} is {value}, was {before[name]}")
    return phrases


def mask_note(run: RunConfig, before: str) -> list[str]:
    """Where a run that begins with the weights of a checkpoint counts other rows in the softmax. before: what was saved."""
    now = run.model.mask_vocab_padding
    return [] if now in (before, UNSETTLED) else [
        f"note: --mask-vocab-padding is {now}, and the weights were trained with {before}: the loss starts at another value; leave "
        f"the flag out to keep {before}"]


def angle_note(run: RunConfig, saved: dict[str, Any]) -> list[str]:
    """Where a run that begins with the weights of a checkpoint turns queries and keys by other angles. saved: its model."""
    changed = [f"{flag(name)} is {getattr(run.model, name)}, was {saved[name]}" for name in ANGLES
               if run.model.rotary and name in saved and saved[name] != getattr(run.model, name)]
    return [f"note: positions have other angles than the weights were trained with: {', '.join(changed)}"] if changed else []


def layout_notes(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Another layout than the saved one; what follows the layout is the size of a batch, and of the vocabulary."""
    saved, now = checkpoint.head["layout"], layout_record(trainer.run, trainer.layout)
    names = [name for name in LAYOUT_SIZES if name in saved or name == "context_parallel_size" and name in now]  # recorded above 1
    before, after = (" x ".join(f"{LAYOUT_SIZES[name]} {sizes.get(name, 1)}" for name in names) for sizes in (saved, now))
    notes = [f"note: saved with {before}, continues with {after}"] if before != after else []
    return [*notes, *_batch_note(trainer, saved, checkpoint.config), *vocabulary_note(trainer, saved, checkpoint.config)]


def _batch_note(trainer: Trainer, saved: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Where the global batch size is not given: micro-batch x data-parallel size."""
    batch, own = config["batch"], trainer.layout.global_batch_size(trainer.run)
    size = batch["micro_batch_size"] * saved.get("data_parallel_size", trainer.layout.dp)
    if size == own or trainer.run.batch.global_batch_size or batch["global_batch_size"]:
        return []
    return [f"note: the global batch size is {own}, was {size}, micro-batch x data-parallel size each time: pass "
            f"--global-batch-size {size} to continue with the same curve"]


def vocabulary_note(trainer: Trainer, saved: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Rows beyond the tokens take part in the loss, as in Megatron, unless they are masked: their number changes it a little."""
    model, tp = trainer.run.model, trainer.layout.tp
    multiple = config["model"]["make_vocab_size_divisible_by"]
    rows = padded_vocab_size(replace(model, make_vocab_size_divisible_by=multiple), saved["tensor_model_parallel_size"])
    own = padded_vocab_size(model, tp)
    keep = f"; pass --make-vocab-size-divisible-by {rows // tp} to keep {rows}" * (rows % tp == 0)
    return [] if own == rows or model.masks_padding else [f"note: the padded vocabulary has {own} rows, had {rows}, and those "
                                                          f"beyond the {model.vocab_size} tokens count in the loss{keep}"]
