"""Environment variables of Megatron-LM's telemetry, in place of the flags --otel-*.

Sources: docs/user-guide/observability/configuration.md and _set_telemetry in megatron/training/global_vars.py of Megatron-LM: each
variable has the prefix MEGATRON_OTEL, or else NEMO_LENS, and a flag has precedence.
"""

from __future__ import annotations

import os

from ..config.fields import FieldValues

PREFIXES = ("MEGATRON_OTEL", "NEMO_LENS")
_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")
# Variable -> values that are what this program does.
_ONE_WAY = {
    "RANK_STRATEGY": ("single_rank",),
    "EXPORT_RANK": ("0",),
    "SAMPLING_STRATEGY": (),
    "TRACES_ENABLED": _ON,
    "METRICS_ENABLED": _ON,
    "LOGS_ENABLED": _OFF,
    "EXPORTER": ("otlp",),
}


def _variable(name: str) -> tuple[str, str] | None:
    for prefix in PREFIXES:
        value = os.environ.get(f"{prefix}_{name}", "").strip()
        if value:
            return f"{prefix}_{name}", value
    return None


def with_otel_variables(fields: FieldValues) -> tuple[FieldValues, tuple[str, ...]]:
    """Return field values completed from variables, and a note on each variable without effect, or raise ValueError."""
    found = dict(fields)
    enabled = _variable("ENABLED")
    if enabled is not None and enabled[1].lower() not in (*_ON, *_OFF):
        raise ValueError(f"{enabled[0]} is {enabled[1]!r:.40}: set it to 1 or 0, or unset it")
    if enabled is not None and enabled[1].lower() in _ON:
        found["otel_enabled"] = True
    if not found.get("otel_enabled"):
        return found, ()
    groups = _variable("SPAN_GROUPS")
    if groups is not None:
        found.setdefault("otel_span_groups", groups[1])
    given = {name: _variable(name) for name in _ONE_WAY}
    notes = [
        f"{each[0]} {each[1]:.40} has no effect: rank 0 exports figures and spans by OTLP"
        for name, each in given.items()
        if each is not None and each[1].lower() not in _ONE_WAY[name]
    ]
    return found, tuple(notes)
