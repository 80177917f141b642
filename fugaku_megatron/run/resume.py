"""Resume training from a checkpoint, or start from its weights, with notes on what differs from the saved run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.load import Checkpoint
from ..checkpoint.manifest import CARRIED, TRACKER, join, list_iterations
from ..checkpoint.memory_copy import FLAG
from ..checkpoint.trusted import fault_note, suspects
from ..comm.agreement import on_root
from ..comm.base import Comm
from ..config.architecture import ANGLES
from ..config.fields import Meaning, flag
from ..config.param_schedule import ParamSchedule
from ..config.rows import COUNTED, MASKED
from ..config.run_config import GROUP_OF, RunConfig, all_flags
from ..config.sample_rules import MAX_SAMPLE, Skips
from ..costs.sizes import padded_vocab_size, vocabulary_padding
from ..data.unchanged import other_files
from ..text.named_files import JsonObject
from ..text.written_files import make_folder
from ..training.checkpoints import layout_record
from ..training.trainer import Trainer
from .checkpoint_source import Resume, counts_padding, saved_rows


def resume_training(trainer: Trainer, resume: Resume) -> list[str]:
    """Load the checkpoint; return the log's lines. Collective."""
    return [*_load(trainer, resume)]


def _load(trainer: Trainer, resume: Resume) -> Iterator[str]:
    checkpoint = resume.checkpoint
    if resume.base is not None:
        saved = None if checkpoint is None else checkpoint.state.get("lora")
        trainer.load_base(resume.base, saved)
    if checkpoint is None:
        if trainer.run.output.load:
            yield f"no checkpoint in --load {trainer.run.output.load}: starting anew"
    elif resume.finetune:
        yield from _start_from_weights(trainer, checkpoint, resume)
    else:
        yield from _resume(trainer, checkpoint, resume)
    sharers = trainer.optimizer.flat.frozen_memory[0].sharers if resume.base is not None else 0
    ranks = trainer.groups.dp.size
    if ranks > 1 and sharers == 1:
        yield f"each of the {ranks} ranks with the same weights has its own copy of the frozen ones"
    elif ranks > 1 and sharers:
        yield f"{sharers} of the {ranks} ranks with the same weights, those of a node, share one copy of the frozen ones"


def _resume(trainer: Trainer, checkpoint: Checkpoint, resume: Resume) -> Iterator[str]:
    run = trainer.run
    requested = trainer.param_schedule
    trainer.load(checkpoint)
    _carry(trainer, checkpoint)
    source = checkpoint.node or run.output.load
    if checkpoint.flag == FLAG:
        source = f"copies in memory ({FLAG})"
    adapting = f", adapters of {resume.base.directory}" if resume.base else ""
    yield f"resumed from {source} at iteration {trainer.progress.iteration}{adapting}"
    load = run.output.load
    # of a machine fault that ended an earlier run
    fault = on_root(trainer.world, lambda: fault_note(load, checkpoint.iteration) if load else None)
    yield from filter(None, [fault])
    yield from tracker_note(trainer, checkpoint)
    yield from checkpoint.head.get("notes", ())
    for phrase in differences(run, resume.config):
        yield f"note: {phrase}: the loss curve changes from here on"
    yield from layout_notes(trainer, checkpoint)
    yield from moment_notes(run, resume)
    if not (resume.order.train or run.data.mock_data or run.data.sft):
        if changed := differences(run, resume.config, lambda meaning: meaning.length):
            yield (
                f"note: {', '.join(changed)}, and the checkpoint, which an earlier version saved, does not have the order of samples "
                "that the run began with: data that is read several times has the order of this length from here on"
            )
    yield from other_files(resume.state.get("data_files") or (), trainer.data_files)
    yield from skip_notes(trainer, resume)
    yield from schedule_note(requested, trainer, resume)


def _carry(trainer: Trainer, checkpoint: Checkpoint) -> None:
    save = trainer.run.output.save
    if save:
        carry_files(checkpoint.directory / CARRIED, save, trainer.world)


def carry_files(
    source: Path, save: str, world: Comm, copy: Callable[[Path, Path], object] = shutil.copytree
) -> None:
    """Copy a model's tokenizer files to a checkpoint directory that has none. Collective.

    copy: from `source`, a directory, to a directory that does not exist
    """
    target = Path(save) / CARRIED

    def carry() -> None:
        if source.is_dir() and not target.exists():
            make_folder(target.parent)
            copy(source, target)

    on_root(world, carry, f"--save {save}: ")


def _start_from_weights(trainer: Trainer, checkpoint: Checkpoint, resume: Resume) -> Iterator[str]:
    """Load the weights; yield the log's lines. Collective."""
    if checkpoint is not resume.base:
        trainer.load(checkpoint, weights_only=True)
    _carry(trainer, checkpoint)
    source = f"{checkpoint.directory}, iteration {checkpoint.iteration}"
    what = "new adapters of" if checkpoint is resume.base else "starting from the weights of"
    yield f"{what} {source}: iteration 0, a fresh optimizer, data from the start"
    yield from mask_notes(trainer.run, checkpoint)
    model = trainer.run.model
    saved = checkpoint.config["model"]
    changed = [
        f"{flag(name)} is {getattr(model, name)}, was {saved[name]}"
        for name in ANGLES
        if model.rotary and name in saved and saved[name] != getattr(model, name)
    ]
    if changed:
        yield f"note: positions have other angles than the weights were trained with: {', '.join(changed)}"
    yield from tracker_note(trainer, checkpoint)


def tracker_note(trainer: Trainer, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line about complete checkpoints newer than the tracker's. Collective."""
    if trainer.run.output.ckpt_step is not None or checkpoint.node:
        return
    directory = checkpoint.directory

    def newer_ones() -> list[int]:
        excluded = suspects(directory)
        found = list_iterations(directory, after=checkpoint.iteration)
        return [number for number in found if number not in excluded]

    if newer := on_root(trainer.world, newer_ones):
        yield (
            f"note: {directory / TRACKER} names iteration {checkpoint.iteration}, and complete checkpoints of iterations "
            f"{join(newer)} are newer: --ckpt-step {newer[-1]} starts from the newest"
        )


def skip_notes(trainer: Trainer, resume: Resume) -> Iterator[str]:
    """Yield notes if --skip-samples differs from the saved run, ahead or in samples passed."""
    position = trainer.progress.consumed_samples
    now = trainer.plan.skips
    saved = Skips.parse(resume.config.get("data", {}).get("skip_samples"))
    before = saved.between(position, MAX_SAMPLE)
    after = now.between(position, MAX_SAMPLE)
    if before != after:
        yield (
            f"note: --skip-samples leaves out {after or 'nothing'} of the samples ahead, was {before or 'nothing'}: the loss curve "
            "changes from there on"
        )
    passed = now.between(0, position)
    if passed and passed != saved.between(0, position):
        yield (
            f"note: --skip-samples {passed} lies before sample {position}, where this checkpoint continues: what was "
            "trained of it stays trained; continue from an earlier checkpoint with --ckpt-step to leave it out"
        )


def moment_notes(run: RunConfig, resume: Resume) -> Iterator[str]:
    """Yield notes on master weights and moments that change format."""
    saved = resume.config.get("optimizer", {})
    names = ["main_params_dtype"]
    if not run.optimizer.no_load_optim:
        names += ["exp_avg_dtype", "exp_avg_sq_dtype"]
    for name in names:
        now = getattr(run.optimizer, name)
        before = saved.get(name, "fp32")
        if now != before:
            change = "rounded to nearest" if now == "bf16" else "taken as they are"
            yield f"note: {flag(name)} is {now}, was {before}: the checkpoint's values are {change}"


def schedule_note(requested: ParamSchedule, trainer: Trainer, resume: Resume) -> Iterator[str]:
    """Yield a note if the learning-rate schedule restarts or differs from the saved schedule."""
    state = resume.state.get("param_schedule")
    if state and trainer.plan.open_ended:  # the length is not known yet
        names = ("warmup_samples", "decay_samples", "total_samples", "wsd_samples")
        length = {name: state[name] for name in names if name in state}
        requested = replace(requested, **length)
    samples = resume.progress.scheduled_samples
    optimizer = trainer.run.optimizer
    first = f"the schedule of the learning rate begins anew, at {requested.learning_rate(0):.3e}"
    if optimizer.no_load_optim:
        yield f"note: --no-load-optim: moments and loss scale begin anew, and {first}"
        return
    if optimizer.no_load_lr_state:
        yield f"note: --no-load-lr-state: {first}"
        return
    saved = ParamSchedule.from_state(state) if state else requested
    now = requested.learning_rate(samples)
    before = saved.learning_rate(samples)
    decays = requested.decays and saved.decays
    same_length = requested.warmup_samples == saved.warmup_samples and (
        requested.decay_samples == saved.decay_samples or not decays
    )
    if optimizer.override_opt_param_scheduler or (now == before and same_length):
        return
    if optimizer.use_checkpoint_opt_param_scheduler:
        yield (
            f"note: --use-checkpoint-opt_param-scheduler: the learning rate continues from the checkpoint's {before:.3e}, not "
            f"from this command line's {now:.3e}"
        )
        return
    yield (
        f"note: the learning rate continues from {now:.3e} instead of {before:.3e}: it decays over {requested.decay_samples:.10g} "
        f"samples, was {saved.decay_samples:.10g}. --use-checkpoint-opt_param-scheduler keeps the checkpoint's schedule, "
        "--override-opt_param-scheduler takes this one without a note"
    )


LAYOUT_SIZES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "data_parallel_size": "DP",
    "zero_shards": "ZeRO shards",
}


def differences(
    run: RunConfig,
    saved: JsonObject,
    decides: Callable[[Meaning], bool] = lambda meaning: meaning.course,
) -> list[str]:
    """Return a phrase for each flag that differs from the saved config. decides: meanings to compare"""
    phrases = []
    for each in all_flags():
        before = saved.get(GROUP_OF[each.name], {})
        if each.name not in before or not decides(each.meaning):
            continue
        # A manifest has lists for tuples, and Megatron-LM's arguments have tuples.
        value, old = (
            list(value) if isinstance(value, tuple) else value
            for value in (run.values[each.name], before[each.name])
        )
        if value != old:
            phrases.append(f"{flag(each.name)} is {value}, was {old}")
    return phrases


def mask_notes(run: RunConfig, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the lines about the softmax of a run that starts from saved weights."""
    masks = run.model.masks_padding
    if not masks:
        yield from padding_note(run, checkpoint)
    masked = not counts_padding(checkpoint.config)
    converted = checkpoint.state.get("weights_only")  # without padding rows
    if masks == masked or converted or not vocabulary_padding(run):
        return
    now = MASKED if masks else COUNTED
    before = MASKED if masked else COUNTED
    yield (
        f"note: --mask-vocab-padding is {now}, and was {before} in the run that saved the weights: the loss starts "
        f"at another value; pass {before} to keep its sums"
    )


def layout_notes(trainer: Trainer, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield notes on changes of parallel sizes, batches and vocabulary padding."""
    saved = checkpoint.head["layout"]
    now = layout_record(trainer.plan)
    # The context-parallel size is recorded above 1 only.
    names = [
        name
        for name in LAYOUT_SIZES
        if name in saved or name == "context_parallel_size" and name in now
    ]
    before = _sizes_text(saved, names)
    after = _sizes_text(now, names)
    if before != after:
        yield f"note: saved with {before}, continues with {after}"
    batch = checkpoint.config["batch"]
    own = trainer.plan.global_batch_size
    size = batch["micro_batch_size"] * saved.get("data_parallel_size", trainer.layout.dp)
    given = trainer.run.batch.global_batch_size or batch["global_batch_size"]
    if size != own and not given:
        yield (
            f"note: the global batch size is {own}, was {size}, micro-batch x data-parallel size each time: pass "
            f"--global-batch-size {size} to continue with the same curve"
        )
    yield from padding_note(trainer.run, checkpoint)


def _sizes_text(sizes: Mapping[str, Any], names: Iterable[str]) -> str:
    return " x ".join(f"{LAYOUT_SIZES[name]} {sizes.get(name, 1)}" for name in names)


def padding_note(run: RunConfig, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line if padding rows count in the loss of a run or of the one that it resumes."""
    rows = saved_rows(run.model, checkpoint)
    own = padded_vocab_size(run.model, run.tp)
    counted = counts_padding(checkpoint.config)
    counts = not run.model.masks_padding
    if own == rows:
        padding = vocabulary_padding(run)
        if counts and counted and padding:
            yield (
                f"note: the {padding} padding rows of the vocabulary count in the loss, as in the saved run; --mask-vocab-padding yes "
                "excludes them"
            )
        return
    if not (counts or counted):
        return
    change = "count" if counts else "no longer count"
    line = (
        f"note: the padded vocabulary has {own} rows, had {rows}, and those beyond the {run.model.vocab_size} tokens {change} in "
        "the loss"
    )
    if rows % run.tp == 0:
        remedy = f"--make-vocab-size-divisible-by {rows // run.tp}"
        if run.model.padded_vocab_size:
            remedy = f"--padded-vocab-size {rows}"
        line += f"; pass {remedy} to keep {rows}"
    yield line
