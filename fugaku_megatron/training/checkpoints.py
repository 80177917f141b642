"""One rank's training state, saved in checkpoints and loaded from them in any layout."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from ..checkpoint.load import Checkpoint, load_shards, open_checkpoint
from ..checkpoint.manifest import Description, Folders
from ..checkpoint.memory_copy import MemoryCopies
from ..checkpoint.node_copy import node_first_steps
from ..checkpoint.save import (
    BackgroundSave,
    CheckLock,
    Snapshot,
    Steps,
    run_steps,
    save_steps,
    write_shards,
)
from ..checkpoint.shards import WEIGHT, Shard, fill_shards
from ..checkpoint.trusted import REPLICAS, Fault, record_fault
from ..comm.agreement import agree, on_root
from ..comm.base import Comm
from ..comm.grid import Groups
from ..config.architecture import architecture, with_block
from ..config.fields import check
from ..config.layout import Layout
from ..config.param_schedule import ParamSchedule
from ..config.run_config import RunConfig
from ..costs.buckets import zero_shards
from ..costs.plan import Plan
from ..costs.stages import virtual_stage_sizes
from ..data.dataset import NEW_ORDER, DataOrder
from ..data.unchanged import Record
from ..nn.model import VOCABULARY, Stage
from ..nn.ops import Ops
from ..optim.optimizer import Optimizer
from ..text.named_files import JsonObject
from .replicas import Difference, Replicas, ReplicasDiffer

# Prefixes of keys in a checkpoint.
WEIGHTS = (WEIGHT,)
MOMENTS = ("exp_avg/", "exp_avg_sq/")


@dataclass
class Progress:
    """A run's position, saved in every checkpoint.

    unscheduled: consumed samples that the schedules do not count, such as of skipped iterations.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    nans: int = 0
    unscheduled: int = 0

    @property
    def scheduled_samples(self) -> int:
        return self.consumed_samples - self.unscheduled


@dataclass(frozen=True)
class ForeignModel:
    """Another program's model, to which adapters belong.

    names, read: see `fill_shards`. carried: directory with tokenizer files.
    """

    directory: Path
    names: Collection[str]
    read: Callable[[str], Tensor]
    carried: Path | None = None
    iteration: None = None


@dataclass
class TrainingState:
    """State of one rank: its stage with weights, its optimizer, and its position in the run.

    tokenizer, data_files: records for checkpoints. order: samples for which the order of the data
        was first made. check_lock: raises ValueError on rank 0 once another job writes into --save.
    """

    plan: Plan
    world: Comm
    groups: Groups
    _: KW_ONLY
    ops: Ops = field(default_factory=Ops.build)
    progress: Progress = field(default_factory=Progress)
    tokenizer: JsonObject | None = None
    order: DataOrder = NEW_ORDER
    data_files: list[Record] = field(default_factory=list)
    check_lock: CheckLock = bool

    def __post_init__(self) -> None:
        self.stage = Stage(self.run, self.groups, self.ops)
        self.optimizer = Optimizer(self.stage, self.run, self.groups, self.ops)
        self.replicas = Replicas(self.optimizer, self.stage, self.groups)
        self.param_schedule = self.plan.param_schedule
        self.folders = Folders(self.world)  # of checkpoints
        self.base: JsonObject = {}  # of adapters: the model that they belong to
        background = self.run.output.save and self.run.output.async_save
        self._snapshot = Snapshot(self._saved_shards()) if background else None

    @property
    def run(self) -> RunConfig:
        return self.plan.config

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    def close(self) -> None:
        """Wait for the weights that the last update gathers."""
        self.optimizer.buckets.await_weights()

    def state(self) -> JsonObject:
        """Return everything but tensors. Random state is the seed and the data position."""
        state = {
            "progress": asdict(self.progress),
            "scaler": self.optimizer.scaler.state(),
            "optimizer_steps": self.optimizer.steps,
            "kernels": self.ops.choice,
            "param_schedule": self.param_schedule.state(),
            "tokenizer": self.tokenizer,
            "data_order": self.order._asdict(),
            "data_files": self.data_files,
            "no_optimizer": self.run.output.no_save_optim,
            REPLICAS: self.replicas.state(self.progress.iteration),
        }
        if self.run.lora.on:
            state["lora"] = self.base
        state["rng"] = {
            "generator": "philox4x32-10",
            "seed": self.run.training.seed,
            "sample": self.progress.consumed_samples,
        }
        return state

    def _description(self) -> Description:
        return Description(
            self.progress.iteration,
            layout_record(self.plan),
            asdict(self.run),
            self.state(),
            self.run.output.keep_last,
            self.run.output.save_retain_interval,
        )

    def _save_steps(self, directory: str, shards: list[Shard], node_first: bool = False) -> Steps:
        local = self.run.output.save_local
        description = self._description()
        if local and node_first:
            return node_first_steps(
                local,
                directory,
                shards,
                description=description,
                folders=self.folders,
                check_lock=self.check_lock,
                wait=self._snapshot is None,
            )
        write = partial(write_shards, self.world.rank, shards)
        return save_steps(
            directory,
            write,
            description=description,
            folders=self.folders,
            check_lock=self.check_lock,
        )

    def _saved_shards(self) -> list[Shard]:
        return self._shards(weights_only=self.run.output.no_save_optim)

    def _shards(self, weights_only: bool, loads: bool = False) -> list[Shard]:
        """Return the records of this rank. loads: also of frozen weights that another rank saves"""
        shards = [
            shard
            for shard in self.optimizer.checkpoint_shards(owned=True)
            if not weights_only or shard.key.startswith(WEIGHTS)
        ]
        if self.run.lora.on:  # a checkpoint has the adapters alone
            return shards
        return shards + self.optimizer.flat.frozen_shards(owned=not loads)

    def find_difference(self) -> Difference | None:
        """Compare replicas, unless the run does not; None if all agree. Collective."""
        if not self.run.numbers.check_weight_hash_across_dp_replicas_interval:
            return None
        return self.replicas.difference(self.progress.iteration)

    def describe_difference(self, found: Difference, directory: str | None) -> str:
        """Record a difference next to the checkpoints in `directory`; return the log's line. Collective."""
        when = f" after iteration {self.progress.iteration}"
        agreed = f", when the {found.kind} agreed"
        trusted = self.replicas.agreed
        if found.suspect_from is not None:
            when = agreed = ""
            trusted = None
        text = f"{found.kind} differ{when}: {found.text}"
        if directory:
            trusted = self.record_fault(directory, text, found.suspect_from).trusted
        advice = (
            "start anew without that node, or from a checkpoint that was saved elsewhere"
            if trusted is None
            else f"continue without that node from a checkpoint of iteration {trusted} or before{agreed}"
        )
        return f"{text}. Nothing is saved: {advice}"

    def check_replicas(self, directory: str | None = None) -> None:
        """Raise ReplicasDiffer if copies of the same state differ. Collective."""
        if found := self.find_difference():
            raise ReplicasDiffer(self.describe_difference(found, directory), found)

    def record_fault(self, directory: str, why: str, suspect_from: int | None) -> Fault:
        """Record the cause of the run's end next to the checkpoints (`checkpoint.trusted`). Collective."""
        iteration = self.progress.iteration
        on_root(self.world, self.check_lock)
        return on_root(self.world, lambda: record_fault(directory, iteration, why, suspect_from))

    def save(self, directory: str) -> None:
        """Write the present iteration's checkpoint. Collective.

        Raise ValueError if a rank cannot write; ReplicasDiffer, before anything is
        written, if copies differ.
        """
        self.check_replicas(directory)
        run_steps(self._save_steps(directory, self._saved_shards()))

    def save_in_background(self, directory: str) -> BackgroundSave:
        """Begin to write a checkpoint from a copy: in memory with --async-save, or else in --save-local. Collective.

        The previous save must be finished. Errors: see `save`.
        """
        self.check_replicas(directory)
        shards = self._saved_shards()
        if self.run.output.async_save and self._snapshot is None:
            self._snapshot = Snapshot(shards)
        copies = self._snapshot.take(shards) if self._snapshot else shards
        return BackgroundSave(self._save_steps(directory, copies, node_first=True))

    def copy_in_background(self, copies: MemoryCopies, directory: str) -> BackgroundSave:
        """Begin to copy the state to the memory of other nodes. Collective.

        The previous copy must be finished. Errors: see `save`.
        """
        self.check_replicas(directory)
        description = self._description()
        state = {**description.state, "no_optimizer": False}
        shards = self._shards(weights_only=False)
        return BackgroundSave(copies.steps(shards, replace(description, state=state)))

    def load(self, source: str | Checkpoint, weights_only: bool = False) -> JsonObject:
        """Resume from a checkpoint in any layout, or from the latest in a directory; return its
        `state`. Collective.

        weights_only: load nothing but weights, of any dtype. Raise ValueError for a checkpoint
        that is damaged, or from another model or program.
        """
        checkpoint = open_checkpoint(source, self.world) if isinstance(source, str) else source
        saved = checkpoint.config["model"] = with_block(checkpoint.config.get("model", {}))
        model = architecture(self.run.model, saved, begins=weights_only)
        wanted = self.run.optimizer
        state = checkpoint.state
        # New rows of the vocabulary begin as those of a new run.
        load_shards(
            checkpoint,
            self._shards(weights_only or wanted.no_load_optim, loads=True),
            self.folders,
            model,
            VOCABULARY,
            converts=WEIGHTS if weights_only else MOMENTS,
        )
        self.optimizer.after_load()
        self.replicas.reset()
        if weights_only:
            return {}
        if not wanted.no_load_optim:
            self.optimizer.scaler.load(state["scaler"])
            self.optimizer.steps = state["optimizer_steps"]
        if wanted.use_checkpoint_opt_param_scheduler:
            check(
                "param_schedule" in state,
                "--use-checkpoint-opt_param-scheduler: the checkpoint in --load "
                f"{checkpoint.directory} holds no schedule of the learning rate: leave the flag out",
            )
            self.param_schedule = ParamSchedule.from_state(state["param_schedule"])
        self.progress = Progress(**state["progress"])
        if wanted.no_load_optim or wanted.no_load_lr_state:
            self.progress.unscheduled = self.progress.consumed_samples
        self.close()
        return state

    def load_base(self, base: Checkpoint | ForeignModel, saved: JsonObject | None = None) -> None:
        """Load the frozen weights to which adapters belong. Collective: the first data-parallel ranks read.

        Raise ValueError if the weights differ from `saved`, their record in the adapters' checkpoint.
        """
        flat = self.optimizer.flat
        if isinstance(base, ForeignModel):
            foreign = base

            def fill(shards: list[Shard]) -> None:
                agree(self.world, lambda: fill_shards(shards, foreign.names, foreign.read))
        else:
            base.config["model"] = with_block(base.config.get("model", {}))
            model = architecture(self.run.model, base.config["model"])
            checkpoint = base

            def fill(shards: list[Shard]) -> None:
                load_shards(checkpoint, shards, self.folders, model, VOCABULARY, converts=WEIGHTS)

        flat.fill_frozen(fill, self.world)
        self.ops.weights_changed(frozen=True)
        found = None
        if not self.run.precision.fp16:
            found = flat.fingerprint(self.run.model.vocab_size or 0, self.groups)
        expected = found if saved is None else saved.get("fingerprint")
        iteration = "" if base.iteration is None else f", iteration {base.iteration},"
        agree(
            self.world,
            lambda: check(
                None in (found, expected) or found == expected,
                f"the model in {base.directory}{iteration} has other weights than the one that "
                "the adapters were trained for, "
                f"{(saved or {}).get('base')}: pass that one as --pretrained-checkpoint",
            ),
            name_rank=False,
        )
        self.base = {
            "base": str(base.directory.absolute()),
            "base_iteration": base.iteration,
            "fingerprint": found,
        }

    def start_from(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        """Load another program's whole weights, and nothing else, as `fill_shards`. Collective.

        Every rank reads its own shards. Raise ValueError if a rank cannot.
        """
        shards = self._shards(weights_only=True, loads=True)
        agree(self.world, lambda: fill_shards(shards, names, read))
        self.optimizer.after_load()
        self.replicas.reset()


def layout_record(plan: Plan) -> dict[str, int | str]:
    """Return the layout as a manifest records it: parallel sizes, layers of stages, ZeRO shards."""
    layout = plan.layout
    record: dict[str, int | str] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
    }
    if layout.cp > 1:
        record["context_parallel_size"] = layout.cp
    return record | {
        "pipeline_split": ",".join(map(str, virtual_stage_sizes(plan.config))),
        "data_parallel_size": layout.dp,
        "zero_shards": zero_shards(plan.config, layout),
    }
