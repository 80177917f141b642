"""Flags that a Trainer refuses; all others act as in the command."""

from __future__ import annotations

from typing import Any

from ..config.fields import check, flag
from .config import Config

_PRINT = "print the fields of Step in the loop over steps"
_INIT = "pass it to init"
# A field of the config -> what a program does in its place.
REFUSED = {
    "save": "pass the directory to Trainer.save",
    "save_interval": "call Trainer.save in the loop over steps",
    "save_interval_in_mins": "call Trainer.save in the loop over steps",
    "skip_train": "call Trainer.evaluate without steps",
    "multiple_validation_sets": "evaluate returns one loss: make a Trainer for each set",
    "log_interval": _PRINT,
    "log_live": _PRINT,
    "log_file": _PRINT,
    "log_ranks": "only the command watches the time of every rank",
    "tensorboard_dir": "write the fields of Step with torch.utils.tensorboard",
    "wandb_project": "pass the fields of Step to wandb.log",
    "wandb_exp_name": "pass it to wandb.init",
    "wandb_entity": "pass it to wandb.init",
    "wandb_save_dir": "pass it to wandb.init",
    "otel_enabled": "export the fields of Step with opentelemetry",
    "otel_service_name": "pass it to opentelemetry's Resource",
    "otel_span_groups": "only the command has spans",
    "prometheus_textfile": "write the fields of Step",
    "profile": "only the command profiles",
    "profile_step_start": "only the command profiles",
    "profile_step_end": "only the command profiles",
    "profile_ranks": "only the command profiles",
    "profile_dir": "only the command profiles",
    "allocator": _INIT,
    "thread_affinity": _INIT,
    "cpu_frequency": _INIT,
    "use_flush_denormal": f"{_INIT}, where its name is flush_denormals",
    "hang_timeout_in_secs": "only the command watches for hangs",
}
# Flags whose note "has no effect without" another flag is for the command alone.
_WITHOUT_SAVE = ("keep_last", "save_retain_interval", "no_save_optim", "async_save", "save_local")
_WITHOUT_LOAD = ("no_load_optim", "no_load_lr_state", "finetune")
_OF_DATA = ("split", "legacy_split")


def check_flags(config: Config) -> None:
    """Raise ValueError for a flag without effect on a Trainer, unless None or False."""
    for name, remedy in REFUSED.items():
        value = config.given.get(name)
        asked = value is not None and (value is not False or name == "use_flush_denormal")
        check(not asked, f"{flag(name)} {_words(value)} has no effect on Trainer: {remedy}")


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)


def trainer_notes(config: Config, has_data: bool) -> list[str]:
    acting = [*_WITHOUT_SAVE, *_WITHOUT_LOAD]
    if has_data:
        acting += _OF_DATA
    beginnings = tuple(f"{flag(name)} has no effect without " for name in acting)
    return [note for note in config.notes if not note.startswith(beginnings)]
