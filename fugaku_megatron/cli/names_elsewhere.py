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

# A name that is in several rows means the first flag that a command has.
EQUIVALENTS = (
    Equivalent("lr", "learning-rate"),
    Equivalent(
        "micro-batch-size",
        "per-device-train-batch-size per-gpu-train-batch-size device-batch-size "
        "train-micro-batch-size-per-gpu",
    ),
    Equivalent("global-batch-size", "train-batch-size total-batch-size effective-batch-size"),
    Equivalent(
        "global-batch-size",
        "gradient-accumulation-steps gradient-accumulation grad-accum-steps "
        "accumulate-grad-batches",
        _ACCUMULATED,
    ),
    Equivalent(
        "eval-micro-batch-size",
        "per-device-eval-batch-size per-gpu-eval-batch-size eval-batch-size",
    ),
    Equivalent(
        "train-iters",
        "max-steps train-steps num-train-steps num-steps total-steps max-iters num-iterations steps",
    ),
    Equivalent("train-iters", "num-train-epochs num-epochs max-epochs epochs", _EPOCH),
    Equivalent("seq-length", "max-seq-length max-seq-len max-length cutoff-len sequence-length"),
    Equivalent("seq-length", "block-size context-length context-size model-max-length ctx-size"),
    Equivalent("max-new-tokens", "max-length max-tokens n-predict num-predict"),
    Equivalent("save", "output-dir out-dir save-dir checkpoint-dir output-path output"),
    Equivalent("output-prefix", "output-dir out-dir output-path output"),
    Equivalent(
        "pretrained-checkpoint",
        "model-name-or-path pretrained-model-name-or-path base-model model-name model-path "
        "model init-from",
        _CONVERTED,
    ),
    Equivalent(
        "load",
        "model-name-or-path base-model model-name model-path model checkpoint ckpt",
        _CONVERTED,
    ),
    Equivalent("load", "resume-from-checkpoint resume resume-from"),
    Equivalent("tokenizer-model", "tokenizer tokenizer-name tokenizer-path tokenizer-name-or-path"),
    Equivalent("input", "dataset dataset-name dataset-path train-file data-path data text-file"),
    Equivalent(
        "data-path", "dataset dataset-name dataset-path train-file train-data data", _TOKENS
    ),
    Equivalent("lr-warmup-iters", "warmup-steps num-warmup-steps warmup-iters lr-warmup-steps"),
    Equivalent("lr-warmup-fraction", "warmup-ratio"),
    Equivalent("lr-decay-style", "lr-scheduler-type lr-scheduler scheduler lr-schedule"),
    Equivalent("lr-decay-iters", "lr-decay-steps"),
    Equivalent("clip-grad", "max-grad-norm grad-clip gradient-clipping gradient-clip-val"),
    Equivalent("optimizer", "optim"),
    Equivalent("adam-eps", "adam-epsilon"),
    Equivalent("log-interval", "logging-steps log-every log-every-n-steps log-freq print-freq"),
    Equivalent("save-interval", "save-steps checkpoint-interval save-every"),
    Equivalent("eval-interval", "eval-steps eval-every"),
    Equivalent("keep-last", "save-total-limit"),
    Equivalent("wandb-project", "report-to use-wandb wandb"),
    Equivalent(
        "otel-enabled",
        "prometheus-textfile",  # of earlier versions
        ", and OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=http://HOST:9090/api/v1/otlp/v1/metrics for Prometheus",
    ),
    Equivalent(
        "recompute-granularity", "gradient-checkpointing activation-checkpointing", ", such as full"
    ),
    Equivalent("bf16", "mixed-precision torch-dtype dtype precision"),
    Equivalent("weights-format", "torch-dtype dtype precision load-in-8bit"),
    Equivalent("lora-base-format", "load-in-8bit", ", such as int8"),
    Equivalent("lora-rank", "lora-r"),
    Equivalent("lora-target", "lora-target-modules target-modules lora-modules"),
    Equivalent("sft", "assistant-only-loss completion-only-loss train-on-inputs"),
    Equivalent("num-layers", "num-hidden-layers n-layer n-layers"),
    Equivalent("hidden-size", "n-embd d-model embed-dim"),
    Equivalent("num-attention-heads", "n-head n-heads num-heads"),
    Equivalent("num-query-groups", "num-key-value-heads n-kv-heads num-kv-heads"),
    Equivalent("ffn-hidden-size", "intermediate-size d-ff"),
    Equivalent("hidden-dropout", "dropout"),
    Equivalent("tensor-model-parallel-size", "tensor-parallel-size tp-size tp"),
    Equivalent("pipeline-model-parallel-size", "pipeline-parallel-size pp-size pp"),
    Equivalent("context-parallel-size", "cp-size cp"),
    Equivalent("expert-model-parallel-size", "expert-parallel-size ep-size ep"),
    Equivalent("zero-stage", "deepspeed fsdp", ", such as 1"),
    Equivalent("temperature", "temp"),
    Equivalent("gguf-type", "outtype"),
    Equivalent("to-gguf", "outfile"),
)


def equivalent(word: str, known: Collection[str]) -> str | None:
    """Return the known flag, or keyword, with the meaning of another program's, and the note."""
    dashes = "--" if word.startswith("-") else ""
    name = word.lstrip("-").replace("_", "-")
    for row in EQUIVALENTS:
        here = f"--{row.flag}" if dashes else row.flag.replace("-", "_")
        if name in row.names.split() and here in known:
            return here + row.note
    return None
