"""Resume from a checkpoint: find it, and report settings that differ from the saved ones.

Reading the tensors: `checkpoint.load`.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoint.load import Checkpoint, open_checkpoint
from ..checkpoint.manifest import (
    CARRIED,
    MANIFEST,
    TRACKER,
    join,
    latest_iteration,
    list_iterations,
    torch_dist_iteration,
)
from ..checkpoint.node_copy import newest_everywhere, open_copy, run_name
from ..checkpoint.trusted import FAULT, fault_note, refuse_suspect, suspects
from ..comm.agreement import everywhere, on_root
from ..comm.base import Comm
from ..config.data import MARKING
from ..config.experts import BALANCE, CAPACITY
from ..config.fields import check, flag
from ..config.lora import MATRICES, LoraConfig
from ..config.model import ANGLES, COUNTED, MASKED, UNRESOLVED, ModelConfig
from ..config.optimizer import MUON_FLAGS
from ..config.param_schedule import ParamSchedule
from ..config.run_config import RunConfig
from ..config.sample_rules import MAX_SAMPLE, Skips
from ..costs.accounting import padded_vocab_size
from ..data.dataset import DataOrder
from ..data.unchanged import other_files
from ..observe.history import HISTORY
from ..text.named_files import JsonObject
from ..training.trainer import ForeignModel, Progress, Trainer, layout_record
from .loop import LOSS_CURVE
from .plan import Plan

# Files of a run that ended before its first checkpoint.
OWN_FILES = (HISTORY, LOSS_CURVE, TRACKER, FAULT)


@dataclass(frozen=True)
class Resume:
    """Checkpoint from which a run continues, if any.

    state, config: saved next to the tensors
    finetune: load weights alone; the state is empty
    base: the adapters' model; `checkpoint` itself if the adapters are new
    """

    checkpoint: Checkpoint | None = None
    state: JsonObject = field(default_factory=dict)
    config: JsonObject = field(default_factory=dict)
    finetune: bool = False
    base: Checkpoint | ForeignModel | None = None

    @property
    def iteration(self) -> int | None:
        return None if self.checkpoint is None or self.finetune else self.checkpoint.iteration

    @property
    def progress(self) -> Progress:
        return Progress(**self.state.get("progress", {}))

    @property
    def order(self) -> DataOrder:
        return DataOrder(**(self.state.get("data_order") or {}))


def check_source(load: str, save: str | None) -> None:
    """Raise ValueError for a --load without a checkpoint, unless it is --save and empty or absent."""
    path = Path(load)
    check(
        not (path.is_symlink() and _is_loop(path)),
        f"--load {load} is a symbolic link to itself: pass a directory",
    )
    check(
        not path.exists() or path.is_dir(),
        f"--load {load} is a file: pass the directory that holds iter_... and {TRACKER}",
    )
    check(
        not path.name.startswith("iter_"),
        f"--load {load} is one iteration of a checkpoint: pass its parent {path.parent} and "
        f"--ckpt-step {path.name.removeprefix('iter_').lstrip('0') or 0}",
    )
    own = save is not None and path.resolve() == Path(save).resolve()
    check(
        own,
        f"--load {load} holds no checkpoint ({TRACKER} is not there): correct the directory, or leave --load out to start "
        "anew; only a --load that is also --save may be empty",
    )
    others = [
        p.name for p in path.glob("*") if p.is_file() and not p.name.startswith((".", *OWN_FILES))
    ]
    check(
        not others,
        f"--load {load} holds no checkpoint but other files ({', '.join(sorted(others)[:3])}): pass another "
        "directory, or an empty one to start anew",
    )


def _is_loop(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


OpenBase = Callable[[str, Comm, int | None], Checkpoint | ForeignModel]


def open_pretrained(directory: str, world: Comm, iteration: int | None = None) -> Checkpoint:
    """Open a whole model's checkpoint. Collective. ValueError for another program's directory."""
    known = on_root(world, lambda: any(Path(directory).glob(f"iter_*/{MANIFEST}")))
    with everywhere():
        check(
            known,
            f"--pretrained-checkpoint {directory} holds no checkpoint of this program: write one "
            "with fugaku-megatron "
            f"convert --from-hf (or --from-megatron) {directory} --save NEW, and pass NEW",
        )
    return open_checkpoint(directory, world, iteration)


def find_checkpoint(plan: Plan, world: Comm, open_base: OpenBase = open_pretrained) -> Resume:
    """Open the checkpoint of --load and --ckpt-step, or else of --pretrained-checkpoint.
    Collective.

    Raise ValueError for a --load without a checkpoint, or with weights alone and no
    --finetune. open_base: opens the adapters' model
    """
    run = plan.config
    output = run.output
    directory = output.load
    checkpoint = _resumed(plan, directory, world) if directory else None
    with everywhere():
        _check_kind(run, checkpoint)
        check(
            checkpoint is not None or not output.exit_on_missing_checkpoint,
            f"--load {directory} holds no checkpoint, and "
            "--exit-on-missing-checkpoint ends the run then: correct the directory, or leave the flag out",
        )
    if run.lora.on:
        return _adapting(run, checkpoint, world, open_base)
    if checkpoint is None:
        if not output.pretrained_checkpoint:
            return Resume()
        checkpoint = open_pretrained(output.pretrained_checkpoint, world)
        with everywhere():
            _check_kind(run, checkpoint)
        return _finetune(checkpoint)
    if output.finetune:
        return _finetune(checkpoint)
    with everywhere():
        check(
            not checkpoint.state.get("weights_only"),
            f"--load {directory} holds only weights, which fugaku-megatron convert "
            "wrote: pass --finetune to start from them",
        )
        check(
            not checkpoint.state.get("no_optimizer") or run.optimizer.no_load_optim,
            f"--load {directory} was saved with "
            "--no-save-optim, and holds no optimizer state: pass --no-load-optim to continue, or --finetune to start from its "
            "weights",
        )
    return Resume(checkpoint, checkpoint.state, checkpoint.config)


def _check_kind(run: RunConfig, checkpoint: Checkpoint | None) -> None:
    if checkpoint is None:
        return
    lora = run.lora
    saved = checkpoint.state.get("lora")
    if saved is None and (run.output.finetune or not lora.on):
        return
    where = f"{checkpoint.directory} (iteration {checkpoint.iteration})"
    check(
        saved is not None,
        f"--load {where} holds a whole model, of which --lora-rank {lora.lora_rank} trains adapters: pass "
        "--finetune, or the directory as --pretrained-checkpoint and another --load",
    )
    kept = checkpoint.config["lora"]
    check(
        lora.on,
        f"{where} holds adapters of rank {kept['lora_rank']} and not a model: pass --lora-rank {kept['lora_rank']} to "
        "train them, or merge them with fugaku-megatron convert --load DIR --merge --save NEW",
    )
    differing = [] if kept["lora_rank"] == lora.lora_rank else ["lora_rank"]
    if matrices(LoraConfig(**kept), run.model) != matrices(lora, run.model):
        differing.append("lora_target")
    check(
        not differing,
        f"--load {where} holds other adapters, with "
        + ", ".join(
            f"{flag(name)} {kept[name]} (this run: {getattr(lora, name)})" for name in differing
        )
        + ": pass its values",
    )


def matrices(lora: LoraConfig, model: ModelConfig) -> list[tuple[str, ...]]:
    """Return the matrices with adapters in each linear layer, for any spelling of --lora-target."""
    return [lora.parts(linear, model) for linear in MATRICES]


def _adapting(
    run: RunConfig, checkpoint: Checkpoint | None, world: Comm, open_base: OpenBase
) -> Resume:
    """Open a model alone, or adapters with their model. Collective."""
    output = run.output
    named = output.pretrained_checkpoint
    saved = None if checkpoint is None else checkpoint.state.get("lora")
    if checkpoint is not None and saved is None:  # with --finetune
        with everywhere():
            check(
                not named,
                f"--finetune --load {output.load} and --pretrained-checkpoint {named} "
                "both name the model of new adapters: pass one of them",
            )
        return _finetune(checkpoint, base=checkpoint)
    recorded = saved or {}
    with everywhere():
        check(
            saved is not None or named,
            f"--lora-rank {run.lora.rank} needs the weights of a model: pass its checkpoint as "
            "--pretrained-checkpoint DIR, or --finetune --load DIR",
        )
        check(
            bool(named or "base" in recorded),
            f"--load {output.load} holds adapters and does not name their model: pass its place as "
            "--pretrained-checkpoint DIR",
        )
    directory = named or recorded["base"]
    step = None if named else recorded["base_iteration"]
    known = on_root(world, lambda: Path(directory).is_dir())
    if named:
        problem = (
            f"--pretrained-checkpoint {directory} is not a directory: pass the place of the model"
        )
    else:
        problem = (
            f"--load {output.load} holds adapters of the model in {directory}, which is not there: "
            "pass its place as --pretrained-checkpoint DIR"
        )
    with everywhere():
        check(known or (checkpoint is None and not named), problem)
    base = open_base(directory, world, step)
    with everywhere():
        check(
            isinstance(base, ForeignModel) or "lora" not in base.state,
            f"{directory} holds adapters and not the weights of a model: pass a model's directory as "
            "--pretrained-checkpoint, or merge them with fugaku-megatron convert --load DIR --merge --save NEW",
        )
        check(
            checkpoint is None or output.finetune or not checkpoint.state.get("weights_only"),
            f"--load {output.load} holds only "
            "weights of adapters, which fugaku-megatron convert wrote: pass --finetune to start from them",
        )
    if checkpoint is None:
        if isinstance(base, ForeignModel):
            return Resume(base=base)
        return _finetune(base, base=base)
    if output.finetune:
        return _finetune(checkpoint, base=base)
    return Resume(checkpoint, checkpoint.state, checkpoint.config, base=base)


def resumed_plan(plan: Plan, resume: Resume) -> Plan:
    progress = resume.progress
    plan = replace(plan, config=with_padding(plan.config, resume))
    return plan.resumed(progress.iteration, progress.consumed_samples)


def with_padding(run: RunConfig, resume: Resume) -> RunConfig:
    """Resolve `--mask-vocab-padding auto` to the checkpoint's value."""
    if run.model.mask_vocab_padding != UNRESOLVED:
        return run
    return replace(run, model=replace(run.model, mask_vocab_padding=_saved_padding(resume)))


def _saved_padding(resume: Resume) -> str:
    """Return the checkpoint's --mask-vocab-padding.

    Versions before the flag never masked padding; other programs do.
    """
    saved = resume.config.get("model", {}).get("mask_vocab_padding")
    if saved in (MASKED, COUNTED):
        return str(saved)
    if resume.checkpoint is not None and resume.checkpoint.state.get("weights_only"):
        return MASKED
    return COUNTED


def _finetune(checkpoint: Checkpoint, base: Checkpoint | ForeignModel | None = None) -> Resume:
    return Resume(checkpoint, config=checkpoint.config, finetune=True, base=base)


def _resumed(plan: Plan, directory: str, world: Comm) -> Checkpoint | None:
    """Open the checkpoint in --load, or a newer copy in --save-local; None if --load is empty. Collective."""
    output = plan.config.output
    step = output.ckpt_step
    if step is not None:
        return _megatron_run(plan.config, directory, world, step) or open_checkpoint(
            directory, world, step
        )
    iteration = on_root(world, lambda: _latest(directory, output.save))
    local = output.save_local
    if local:
        copied = _newest_copy(plan, directory, local, world)
        if copied > (iteration or 0):
            on_root(world, lambda: refuse_suspect(directory, copied), f"--load {directory}: ")
            return open_copy(local, world, copied)
    if iteration is None:
        return None
    foreign = _megatron_run(plan.config, directory, world, iteration)
    return foreign or open_checkpoint(directory, world)


def _megatron_run(run: RunConfig, directory: str, world: Comm, iteration: int) -> Checkpoint | None:
    """Open a Megatron-LM run in the format torch_dist, None for another checkpoint. Collective."""

    def read() -> Checkpoint | None:
        if torch_dist_iteration(directory, iteration) is None:
            return None
        # with torch.distributed, which takes a second to load
        from ..convert.megatron_training import open_run

        return open_run(
            Path(directory),
            iteration,
            run.model.vocab_size,
            weights_only=run.output.finetune,
            with_optimizer=not run.optimizer.no_load_optim,
        )

    return on_root(world, read, f"--load {directory}: ")


def _newest_copy(plan: Plan, load: str, local: str, world: Comm) -> int:
    """Return the newest iteration with this run and layout in --save-local, 0 for none. Collective."""
    name = run_name(load, world)
    if name is None:
        return 0
    layout = layout_record(plan.config, plan.layout)
    parallel = asdict(plan.config.parallel)

    def fits(head: JsonObject) -> bool:
        return (head["state"].get("run"), head["layout"], head["config"].get("parallel")) == (
            name,
            layout,
            parallel,
        )

    return newest_everywhere(local, world, fits)


def _latest(directory: str, save: str | None) -> int | None:
    iteration = latest_iteration(directory) if Path(directory).is_dir() else None
    if iteration is None:
        check_source(directory, save)
    return iteration


def resume_training(trainer: Trainer, resume: Resume) -> list[str]:
    """Load the checkpoint; return the log's lines. Collective."""
    if resume.base is None:
        return _resume(trainer, resume)
    saved = None if resume.checkpoint is None else resume.checkpoint.state.get("lora")
    trainer.load_base(resume.base, saved)
    return [*_resume(trainer, resume), *_copies_note(trainer)]


def _copies_note(trainer: Trainer) -> list[str]:
    sharers = trainer.optimizer.flat.frozen_memory[0].sharers
    ranks = trainer.groups.dp.size
    if ranks == 1:
        return []
    if sharers == 1:
        return [
            f"each of the {ranks} ranks with the same weights has its own copy of the frozen ones"
        ]
    return [
        f"{sharers} of the {ranks} ranks with the same weights, those of a node, share one copy of the frozen ones"
    ]


def _resume(trainer: Trainer, resume: Resume) -> list[str]:
    run = trainer.run
    if resume.checkpoint is None:
        if not run.output.load:
            return []
        return [f"no checkpoint in --load {run.output.load}: starting anew"]
    if resume.finetune:
        return _start_from_weights(trainer, resume.checkpoint, resume)
    requested = trainer.param_schedule
    checkpoint = resume.checkpoint
    trainer.load(checkpoint)
    _carry(trainer, checkpoint)
    source = checkpoint.node or run.output.load
    adapting = f", adapters of {resume.base.directory}" if resume.base else ""
    lines = [
        f"resumed from {source} at iteration {trainer.progress.iteration}{adapting}",
        *_fault_note(trainer, checkpoint),
        *_tracker_note(trainer, checkpoint),
    ]
    lines += [
        f"note: {phrase}: the loss curve changes from here on"
        for phrase in differences(run, resume.config)
    ]
    lines += layout_notes(trainer, checkpoint) + _moment_notes(run, resume)
    lines += _order_note(run, resume)
    lines += other_files(resume.state.get("data_files") or (), trainer.data_files)
    return lines + _skip_notes(trainer, resume) + _schedule_note(requested, trainer, resume)


# Fields that decide the number of samples of a run, by group.
LENGTH = {
    "training": ("train_iters", "train_samples", "train_tokens"),
    "batch": ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    "data": ("skip_samples",),
}


def _order_note(run: RunConfig, resume: Resume) -> list[str]:
    if resume.order.train or run.data.mock_data or run.data.sft:
        return []
    changed = differences(run, resume.config, LENGTH)
    if not changed:
        return []
    return [
        f"note: {', '.join(changed)}, and the checkpoint, which an earlier version saved, does not have the order of samples that "
        "the run began with: data that is read several times has the order of this length from here on"
    ]


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
            target.parent.mkdir(parents=True, exist_ok=True)
            copy(source, target)

    on_root(world, carry, f"--save {save}: ")


def _start_from_weights(trainer: Trainer, checkpoint: Checkpoint, resume: Resume) -> list[str]:
    """Load the weights; return the log's lines. Collective."""
    notes = mask_note(trainer.run, _saved_padding(resume))
    if checkpoint is not resume.base:
        trainer.load(checkpoint, weights_only=True)
    _carry(trainer, checkpoint)
    source = f"{checkpoint.directory}, iteration {checkpoint.iteration}"
    what = "new adapters of" if checkpoint is resume.base else "starting from the weights of"
    return [
        f"{what} {source}: iteration 0, a fresh optimizer, data from the start",
        *notes,
        *angle_note(trainer.run, checkpoint.config["model"]),
        *_tracker_note(trainer, checkpoint),
        *vocabulary_note(trainer, checkpoint.head["layout"], checkpoint.config),
    ]


def _fault_note(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Return a line if a machine fault ended an earlier run, and its meaning for the checkpoint. Collective."""
    load = trainer.run.output.load
    note = on_root(trainer.world, lambda: fault_note(load, checkpoint.iteration) if load else None)
    return [] if note is None else [note]


def _tracker_note(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Return a line about complete checkpoints newer than the tracker's. Collective."""
    if trainer.run.output.ckpt_step is not None or checkpoint.node:
        return []
    directory = checkpoint.directory

    def newer_ones() -> list[int]:
        excluded = suspects(directory)
        return [
            number
            for number in list_iterations(directory, after=checkpoint.iteration)
            if number not in excluded
        ]

    newer = on_root(trainer.world, newer_ones)
    if not newer:
        return []
    return [
        f"note: {directory / TRACKER} names iteration {checkpoint.iteration}, and complete checkpoints of iterations "
        f"{join(newer)} are newer: --ckpt-step {newer[-1]} starts from the newest"
    ]


def _skip_notes(trainer: Trainer, resume: Resume) -> list[str]:
    position = trainer.progress.consumed_samples
    now = trainer.skips
    saved = Skips.parse(resume.config.get("data", {}).get("skip_samples"))
    before = saved.between(position, MAX_SAMPLE)
    after = now.between(position, MAX_SAMPLE)
    notes = []
    if before != after:
        notes.append(
            f"note: --skip-samples leaves out {after or 'nothing'} of the samples ahead, was {before or 'nothing'}: the loss curve "
            "changes from there on"
        )
    passed = now.between(0, position)
    if passed and passed != saved.between(0, position):
        notes.append(
            f"note: --skip-samples {passed} lies before sample {position}, where this checkpoint continues: what was "
            "trained of it stays trained; continue from an earlier checkpoint with --ckpt-step to leave it out"
        )
    return notes


def _moment_notes(run: RunConfig, resume: Resume) -> list[str]:
    saved = resume.config.get("optimizer", {})
    names = ["main_params_dtype"]
    if not run.optimizer.no_load_optim:
        names += ["exp_avg_dtype", "exp_avg_sq_dtype"]
    notes = []
    for name in names:
        now = getattr(run.optimizer, name)
        before = saved.get(name, "fp32")
        if now != before:
            change = "rounded to nearest" if now == "bf16" else "taken as they are"
            notes.append(
                f"note: {flag(name)} is {now}, was {before}: the checkpoint's values are {change}"
            )
    return notes


def _schedule_note(requested: ParamSchedule, trainer: Trainer, resume: Resume) -> list[str]:
    state = resume.state.get("param_schedule")
    samples = resume.progress.scheduled_samples
    optimizer = trainer.run.optimizer
    first = f"the schedule of the learning rate begins anew, at {requested.learning_rate(0):.3e}"
    if optimizer.no_load_optim:
        return [f"note: --no-load-optim: moments and loss scale begin anew, and {first}"]
    if optimizer.no_load_lr_state:
        return [f"note: --no-load-lr-state: {first}"]
    saved = ParamSchedule.from_state(state) if state else requested
    now = requested.learning_rate(samples)
    before = saved.learning_rate(samples)
    decays = requested.decays and saved.decays
    same_length = requested.warmup_samples == saved.warmup_samples and (
        requested.decay_samples == saved.decay_samples or not decays
    )
    if optimizer.override_opt_param_scheduler or (now == before and same_length):
        return []
    if optimizer.use_checkpoint_opt_param_scheduler:
        return [
            f"note: --use-checkpoint-opt_param-scheduler: the learning rate continues from the checkpoint's {before:.3e}, not "
            f"from this command line's {now:.3e}"
        ]
    return [
        f"note: the learning rate continues from {now:.3e} instead of {before:.3e}: it decays over {requested.decay_samples:.10g} "
        f"samples, was {saved.decay_samples:.10g}. --use-checkpoint-opt_param-scheduler keeps the checkpoint's schedule, "
        "--override-opt_param-scheduler takes this one without a note"
    ]


LAYOUT_SIZES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "data_parallel_size": "DP",
    "zero_shards": "ZeRO shards",
}


# Fields that decide the course of training besides the architecture, by group: a resumed run reports differences.
COURSE = {
    "model": (
        "seq_length",
        "mask_vocab_padding",
        "use_z_loss",
        "z_loss_strength",
        "hidden_dropout",
        "attention_dropout",
        *BALANCE,
        *CAPACITY,
    ),
    "batch": ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    "optimizer": (
        "optimizer",
        *MUON_FLAGS,
        "lr",
        "min_lr",
        "decoupled_lr",
        "decoupled_min_lr",
        "lr_decay_style",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_fraction",
        "lr_decay_tokens",
        "lr_warmup_tokens",
        "lr_warmup_init",
        "lr_wsd_decay_style",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_samples",
        "weight_decay",
        "start_weight_decay",
        "end_weight_decay",
        "weight_decay_incr_style",
        "clip_grad",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
    ),
    "precision": ("bf16", "fp16", "loss_scale"),
    "training": ("seed",),
    "data": (
        "data_path",
        "train_data_path",
        "valid_data_path",
        "split",
        "legacy_split",
        "mock_data",
        "sft",
        "sft_truncate",
        *MARKING,
    ),
    "system": (
        "fp16_accumulation_chunk",
        "fp32_matmul",
        "int8",
        "int8_wgrad",
        "int8_head",
        "int8_stochastic_rounding",
    ),
    "lora": ("lora_alpha", "lora_dropout", "lora_use_rslora", "lora_base_format"),
}


def differences(
    run: RunConfig, saved: JsonObject, settings: Mapping[str, tuple[str, ...]] = COURSE
) -> list[str]:
    phrases = []
    for group, names in settings.items():
        now = getattr(run, group)
        before = saved.get(group, {})
        for name in names:
            if name not in before:
                continue
            # A manifest has lists for tuples, and Megatron-LM's arguments have tuples.
            value, old = (
                list(value) if isinstance(value, tuple) else value
                for value in (getattr(now, name), before[name])
            )
            if value != old:
                phrases.append(f"{flag(name)} is {value}, was {old}")
    return phrases


def mask_note(run: RunConfig, before: str) -> list[str]:
    """Return a line if a run from saved weights masks other rows of the softmax."""
    now = run.model.mask_vocab_padding
    if now in (before, UNRESOLVED):
        return []
    return [
        f"note: --mask-vocab-padding is {now}, and the weights were trained with {before}: the loss starts at another value; leave "
        f"the flag out to keep {before}"
    ]


def angle_note(run: RunConfig, saved: JsonObject) -> list[str]:
    """Return a line if a run from saved weights rotates queries and keys by other angles."""
    changed = [
        f"{flag(name)} is {getattr(run.model, name)}, was {saved[name]}"
        for name in ANGLES
        if run.model.rotary and name in saved and saved[name] != getattr(run.model, name)
    ]
    if not changed:
        return []
    return [
        f"note: positions have other angles than the weights were trained with: {', '.join(changed)}"
    ]


def layout_notes(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    saved = checkpoint.head["layout"]
    now = layout_record(trainer.run, trainer.layout)
    # The context-parallel size is recorded above 1 only.
    names = [
        name
        for name in LAYOUT_SIZES
        if name in saved or name == "context_parallel_size" and name in now
    ]
    before = _sizes_text(saved, names)
    after = _sizes_text(now, names)
    notes = []
    if before != after:
        notes.append(f"note: saved with {before}, continues with {after}")
    return [
        *notes,
        *_batch_note(trainer, saved, checkpoint.config),
        *vocabulary_note(trainer, saved, checkpoint.config),
    ]


def _sizes_text(sizes: Mapping[str, Any], names: Iterable[str]) -> str:
    return " x ".join(f"{LAYOUT_SIZES[name]} {sizes.get(name, 1)}" for name in names)


def _batch_note(trainer: Trainer, saved: JsonObject, config: JsonObject) -> list[str]:
    batch = config["batch"]
    own = trainer.layout.global_batch_size(trainer.run)
    size = batch["micro_batch_size"] * saved.get("data_parallel_size", trainer.layout.dp)
    if size == own or trainer.run.batch.global_batch_size or batch["global_batch_size"]:
        return []
    return [
        f"note: the global batch size is {own}, was {size}, micro-batch x data-parallel size each time: pass "
        f"--global-batch-size {size} to continue with the same curve"
    ]


def vocabulary_note(trainer: Trainer, saved: JsonObject, config: JsonObject) -> list[str]:
    """Return a line if the padded vocabulary changed: unmasked padding counts in the loss, as in Megatron-LM."""
    model = trainer.run.model
    tp = trainer.layout.tp
    multiple = config["model"]["make_vocab_size_divisible_by"]
    rows = padded_vocab_size(
        replace(model, make_vocab_size_divisible_by=multiple), saved["tensor_model_parallel_size"]
    )
    own = padded_vocab_size(model, tp)
    if own == rows or model.masks_padding:
        return []
    line = (
        f"note: the padded vocabulary has {own} rows, had {rows}, and those "
        f"beyond the {model.vocab_size} tokens count in the loss"
    )
    if rows % tp == 0:
        line += f"; pass --make-vocab-size-divisible-by {rows // tp} to keep {rows}"
    return [line]
