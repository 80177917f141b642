"""Groups of spans that --otel-span-groups names, from megatron/core/telemetry/span_groups.py of Megatron-LM."""

from __future__ import annotations

from .fields import check

# Megatron-LM's groups whose spans a run here does not have.
EMPTY = ("layer", "activation_offload", "trace_region", "inference")

_DEFAULT = ("job", "checkpoint", "evaluate", "first_iteration")
_PER_STEP = (
    *_DEFAULT,
    "model_init",
    "load_checkpoint",
    "step",
    "forward_backward",
    "optimizer",
    "communication",
    "data_loading",
)
_ALL = (*_PER_STEP, "microbatch", *EMPTY)
PRESETS = {"default": _DEFAULT, "per_step": _PER_STEP, "profiling": _ALL, "all": _ALL}


def span_groups(text: str) -> frozenset[str]:
    """Return the groups of comma-separated presets and groups. ValueError for another word."""
    found: set[str] = set()
    for word in text.split(","):
        name = word.strip()
        check(
            name in PRESETS or name in _ALL,
            f"--otel-span-groups {text:.80} has {name!r:.40}: pass {' or '.join(PRESETS)}, "
            f"or groups separated by commas, of {', '.join(_ALL)}",
        )
        found.update(PRESETS.get(name, (name,)))
    return frozenset(found)
