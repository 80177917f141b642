"""Find and check the checkpoint that a run resumes from or starts with."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..checkpoint.load import Checkpoint, open_checkpoint
from ..checkpoint.manifest import (
    MANIFEST,
    TRACKER,
    iteration_path,
    latest_iteration,
    release_path,
    torch_dist_iteration,
)
from ..checkpoint.node_copy import newest_everywhere, open_copy, run_name
from ..checkpoint.trusted import FAULT, refuse_suspect
from ..comm.agreement import everywhere, on_root
from ..comm.base import Comm
from ..config.fields import as_tuples, check, flag
from ..config.freezing import FreezingConfig
from ..config.lora import MATRICES, LoraConfig
from ..config.model import ModelConfig
from ..config.rows import COUNTED, MASKED, UNRESOLVED
from ..config.run_config import RunConfig
from ..costs.plan import Plan
from ..costs.sizes import padded_vocab_size
from ..data.dataset import DataOrder
from ..observe.export.history import HISTORY
from ..observe.export.hours import HOURS
from ..text.foreign_models import hub_note, is_hugging_face, no_checkpoint
from ..text.named_files import JsonObject
from ..training.checkpoints import ForeignModel, Progress
from .loop import LOSS_CURVE
from .memory_copies import InMemory, fits_layout

OpenBase = Callable[[str, Comm, int | None], Checkpoint | ForeignModel]

# Fields that decide the rows of a padded vocabulary, next to the layout.
PADDING = ("make_vocab_size_divisible_by", "padded_vocab_size")

# Files of a run that ended before its first checkpoint.
OWN_FILES = (HISTORY, HOURS, LOSS_CURVE, TRACKER, FAULT)


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
    def source(self) -> str:
        """The flag with the checkpoint's place, or nothing for a new run."""
        if self.checkpoint is None or self.finetune:
            return ""
        return self.checkpoint.flag if self.checkpoint.node else "--load"

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
    check(
        not is_hugging_face(path),
        f"--load {load} {no_checkpoint(load)} as --pretrained-checkpoint",
    )
    own = save is not None and path.resolve() == Path(save).resolve()
    check(
        own,
        f"--load {load} holds no checkpoint ({TRACKER} is not there): correct the directory, or leave --load out to start "
        f"anew; only a --load that is also --save may be empty{hub_note(load)}",
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


def open_pretrained(directory: str, world: Comm, iteration: int | None = None) -> Checkpoint:
    """Open a whole model's checkpoint. Collective. ValueError for another program's directory."""
    known = on_root(world, lambda: any(Path(directory).glob(f"iter_*/{MANIFEST}")))
    with everywhere():
        check(
            known,
            f"--pretrained-checkpoint {directory} holds no checkpoint of this program: write one "
            "with fugaku-megatron "
            f"convert --from-hf (or --from-megatron) {directory} --save NEW, and pass NEW{hub_note(directory)}",
        )
    return open_checkpoint(directory, world, iteration)


def find_checkpoint(
    plan: Plan,
    world: Comm,
    open_base: OpenBase = open_pretrained,
    memory: InMemory | None = None,
) -> Resume:
    """Open the checkpoint of --load and --ckpt-step, or else of --pretrained-checkpoint.
    Collective.

    Raise ValueError for a --load without a checkpoint, or with weights alone and no
    --finetune. open_base: opens the adapters' model. memory: copies that may be newer
    """
    run = plan.config
    output = run.output
    directory = output.load
    checkpoint = _resumed(plan, directory, world, memory) if directory else None
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
        _check_freezing(run, checkpoint)
    return Resume(checkpoint, checkpoint.state, checkpoint.config)


def _check_freezing(run: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise ValueError if a checkpoint has moments of other weights than those that the run trains."""
    saved = FreezingConfig(**as_tuples(checkpoint.config.get("freezing", {})))
    if saved.same_parts(run.freezing, run.model):
        return
    raise ValueError(
        f"--load {checkpoint.directory} (iteration {checkpoint.iteration}) was trained with {saved.text} (this run: "
        f"{run.freezing.text}): pass the same, or --finetune to start from its weights"
    )


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
    """Resolve `--mask-vocab-padding auto`: a resumed run counts padding as before while its rows are the same."""
    model = run.model
    if model.mask_vocab_padding != UNRESOLVED:
        return run
    mask = MASKED
    if resume.iteration is not None and counts_padding(resume.config):
        assert resume.checkpoint is not None
        if saved_rows(model, resume.checkpoint) == padded_vocab_size(model, run.tp):
            mask = COUNTED
    return replace(run, model=replace(model, mask_vocab_padding=mask))


def counts_padding(config: JsonObject) -> bool:
    """Return True if padding counted in the loss of a saved run, as always before --mask-vocab-padding."""
    saved = config.get("model", {}).get("mask_vocab_padding", COUNTED)
    return bool(saved == COUNTED)


def saved_rows(model: ModelConfig, checkpoint: Checkpoint) -> int:
    """Return the padded vocabulary of the saved run."""
    saved = checkpoint.config["model"]
    padding = {name: saved[name] for name in PADDING if name in saved}
    tp = checkpoint.head["layout"]["tensor_model_parallel_size"]
    return padded_vocab_size(replace(model, **padding), tp)


def _finetune(checkpoint: Checkpoint, base: Checkpoint | ForeignModel | None = None) -> Resume:
    return Resume(checkpoint, config=checkpoint.config, finetune=True, base=base)


def _resumed(plan: Plan, directory: str, world: Comm, memory: InMemory | None) -> Checkpoint | None:
    """Open the checkpoint in --load, or a newer copy on the nodes; None if --load is empty. Collective."""
    output = plan.config.output
    step = output.ckpt_step
    if step is not None:
        return _megatron_run(plan.config, directory, world, step) or open_checkpoint(
            directory, world, step
        )
    if output.finetune and on_root(world, lambda: release_path(directory)):
        return _megatron_run(plan.config, directory, world, None)
    iteration = on_root(world, lambda: _latest(directory, output.save))
    local = output.save_local
    copied = 0  # the newest iteration with this run and layout in --save-local
    if local and (name := run_name(directory, world)) is not None:
        copied = newest_everywhere(local, world, fits_layout(plan, name))
    if memory is not None and memory.found.iteration > max(copied, iteration or 0):
        number = memory.found.iteration
        on_root(world, lambda: refuse_suspect(directory, number), f"--load {directory}: ")
        if checkpoint := memory.open(world):
            return checkpoint
    if local and copied > (iteration or 0):
        on_root(world, lambda: refuse_suspect(directory, copied), f"--load {directory}: ")
        return open_copy(local, world, copied)
    if iteration is None:
        return None
    foreign = _megatron_run(plan.config, directory, world, iteration)
    return foreign or open_checkpoint(directory, world)


def _megatron_run(
    run: RunConfig, directory: str, world: Comm, iteration: int | None
) -> Checkpoint | None:
    """Open a Megatron-LM run in the format torch_dist, None for another checkpoint. Collective.

    iteration: None: weights that a converter released
    """

    def read() -> Checkpoint | None:
        path = release_path(directory)
        if iteration is not None:
            path = None
            if torch_dist_iteration(directory, iteration) is not None:
                path = iteration_path(Path(directory), iteration)
        if path is None:
            return None
        # with torch.distributed, which takes a second to load
        from ..convert.megatron.training import open_run

        return open_run(
            path,
            iteration or 0,
            run.model.vocab_size,
            ignored=run.output.ignore_saved_arguments or (),
            weights_only=run.output.finetune,
            with_optimizer=not run.optimizer.no_load_optim,
        )

    return on_root(world, read, f"--load {directory}: ")


def _latest(directory: str, save: str | None) -> int | None:
    iteration = latest_iteration(directory) if Path(directory).is_dir() else None
    if iteration is None:
        check_source(directory, save)
    return iteration
