"""Names that transformers, trl, torchtune, DeepSpeed, nanoGPT and llama.cpp have for a flag of this program."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Equivalent(NamedTuple):
    """A flag, its names in other programs, and a note about another unit or meaning."""

    flag: str
    names: str
    note: str = ""


_EPOCH = ", where an epoch is the number of samples that the start prints, divided by --global-batch-size"
_ACCUMULATED = (
    ", the samples of an iteration: micro-batch x data-parallel size x accumulation steps"
)
_CONVERTED = ", the --save of fugaku-megatron convert --from-hf"
_TOKENS = ", a prefix that fugaku-megatron preprocess wrote"

# Names in other programs -> flag.
PLAIN = {
    "learning-rate": "lr",
    "per-device-train-batch-size per-gpu-train-batch-size device-batch-size train-micro-batch-size-per-gpu": "micro-batch-size",
    "train-batch-size total-batch-size effective-batch-size": "global-batch-size",
    "per-device-eval-batch-size per-gpu-eval-batch-size eval-batch-size": "eval-micro-batch-size",
    "max-steps train-steps num-train-steps num-steps total-steps max-iters num-iterations steps": "train-iters",
    "max-seq-length max-seq-len max-length cutoff-len sequence-length": "seq-length",
    "block-size context-length context-size model-max-length ctx-size": "seq-length",
    "max-length max-tokens n-predict num-predict": "max-new-tokens",
    "output-dir out-dir save-dir checkpoint-dir output-path output": "save",
    "output-dir out-dir output-path output": "output-prefix",
    "resume-from-checkpoint resume resume-from": "load",
    "tokenizer tokenizer-name tokenizer-path tokenizer-name-or-path": "tokenizer-model",
    "dataset dataset-name dataset-path train-file data-path data text-file": "input",
    "warmup-steps num-warmup-steps warmup-iters lr-warmup-steps": "lr-warmup-iters",
    "warmup-ratio": "lr-warmup-fraction",
    "lr-scheduler-type lr-scheduler scheduler lr-schedule": "lr-decay-style",
    "lr-decay-steps": "lr-decay-iters",
    "max-grad-norm grad-clip gradient-clipping gradient-clip-val": "clip-grad",
    "optim": "optimizer",
    "adam-epsilon": "adam-eps",
    "logging-steps log-every log-every-n-steps log-freq print-freq": "log-interval",
    "save-steps checkpoint-interval save-every": "save-interval",
    "eval-steps eval-every": "eval-interval",
    "save-total-limit": "keep-last",
    "report-to use-wandb wandb": "wandb-project",
    "mixed-precision torch-dtype dtype precision": "bf16",
    "torch-dtype dtype precision load-in-8bit": "weights-format",
    "lora-r": "lora-rank",
    "lora-target-modules target-modules lora-modules": "lora-target",
    "assistant-only-loss completion-only-loss train-on-inputs": "sft",
    "num-hidden-layers n-layer n-layers": "num-layers",
    "n-embd d-model embed-dim": "hidden-size",
    "n-head n-heads num-heads": "num-attention-heads",
    "num-key-value-heads n-kv-heads num-kv-heads": "num-query-groups",
    "intermediate-size d-ff": "ffn-hidden-size",
    "dropout": "hidden-dropout",
    "tensor-parallel-size tp-size tp": "tensor-model-parallel-size",
    "pipeline-parallel-size pp-size pp": "pipeline-model-parallel-size",
    "cp-size cp": "context-parallel-size",
    "expert-parallel-size ep-size ep": "expert-model-parallel-size",
    "temp": "temperature",
    "outtype": "gguf-type",
    "outfile": "to-gguf",
}
NOTED = (
    Equivalent(
        "global-batch-size",
        "gradient-accumulation-steps gradient-accumulation grad-accum-steps accumulate-grad-batches",
        _ACCUMULATED,
    ),
    Equivalent("train-iters", "num-train-epochs num-epochs max-epochs epochs", _EPOCH),
    Equivalent(
        "pretrained-checkpoint",
        "model-name-or-path pretrained-model-name-or-path base-model model-name model-path model init-from",
        _CONVERTED,
    ),
    Equivalent(
        "load",
        "model-name-or-path base-model model-name model-path model checkpoint ckpt",
        _CONVERTED,
    ),
    Equivalent(
        "data-path", "dataset dataset-name dataset-path train-file train-data data", _TOKENS
    ),
    Equivalent(
        "otel-enabled",
        "prometheus-textfile",
        ", and OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=http://HOST:9090/api/v1/otlp/v1/metrics for Prometheus",
    ),  # of earlier versions
    Equivalent(
        "recompute-granularity", "gradient-checkpointing activation-checkpointing", ", such as full"
    ),
    Equivalent("lora-base-format", "load-in-8bit", ", such as int8"),
    Equivalent("zero-stage", "deepspeed fsdp", ", such as 1"),
)
# A name that is in several rows means the first flag that a command has.
EQUIVALENTS = (*(Equivalent(flag, names) for names, flag in PLAIN.items()), *NOTED)


def equivalent(word: str, known: Collection[str]) -> str | None:
    """Return the known flag, or keyword, with the meaning of another program's, and the note."""
    dashes = "--" if word.startswith("-") else ""
    name = word.lstrip("-").replace("_", "-")
    for row in EQUIVALENTS:
        here = f"--{row.flag}" if dashes else row.flag.replace("-", "_")
        if name in row.names.split() and here in known:
            return here + row.note
    return None
