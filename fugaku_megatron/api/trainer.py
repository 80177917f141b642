"""Training from Python: the trainer of fugaku-megatron train, with the loop left to the caller.

trainer = Trainer(Config.recipe("demo", vocab_size=512, train_iters=100), data=arrays)
for step in trainer.steps():
    print(step.iteration, step.loss)
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..checkpoint.load import open_checkpoint
from ..checkpoint.shards import check_model
from ..comm import launcher
from ..comm.agreement import everywhere, find_nodes, on_root
from ..comm.base import Comm, SoloComm
from ..comm.grid import Grid
from ..comm.launch import end_job_with_exceptions
from ..comm.launch import init as start_mpi
from ..comm.node import share_groups
from ..config import batches
from ..config.batches import ParamSchedule
from ..config.checks import check, flag
from ..config.layout import Layout
from ..config.model_config import architecture
from ..config.run_config import NumbersConfig, OutputConfig, RunConfig
from ..convert.convert_command import open_weights, own_checkpoint
from ..data.dataset import NEW_ORDER, DataOrder, Dataset, Documents, TokenArrays
from ..data.unchanged import records
from ..host import kernels, runtime
from ..host.observed import Phases
from ..training import pretrain, train
from ..training.observers import Heartbeats, Observers
from ..training.rank_watch import check_memory
from ..training.resume import Resume, with_padding
from ..training.start_choices import choose_kernels, read_tokenizer, settle, with_vocabulary
from ..watchdog.heartbeat import Heartbeat
from .config import Config

Source = str | os.PathLike[str] | Sequence[Any] | Documents
NO_END = 2**31 - 1  # iterations of a run whose length is not known yet
# Flags of the command's own loop and process.
LOOP = (
    {f.name for f in fields(OutputConfig)} - {"keep_last", "log_num_zeros_in_grad"}
    | {f.name for f in fields(NumbersConfig)}
    | {"exit_interval", "exit_duration_in_mins", "eval_interval", "skip_train"}
)
PROCESS = {"allocator", "thread_affinity", "cpu_frequency", "use_flush_denormal"}


@dataclass(frozen=True)
class Step:
    """One iteration, equal on every rank.

    iteration: its number, from 1. loss: mean over tokens that count, before the update. grad_norm: before clipping. skipped: the
    gradients held an Inf or NaN, and no update was made. consumed_samples, consumed_tokens: since the beginning of the run.
    """

    iteration: int
    loss: float
    grad_norm: float
    learning_rate: float
    consumed_samples: int
    consumed_tokens: int
    seconds: float
    skipped: bool
    loss_scale: float
    global_batch_size: int


class Trainer:
    """A run on the ranks of `world`: alone, or one of those that mpiexec started, each with the same calls.

    data: a prefix of .bin/.idx files, or what --data-path takes as a list: prefixes, or weights and prefixes in turn. Or documents:
    a sequence, or a map-style data set of torch, whose items are one-dimensional arrays of token ids (of numpy or torch, or lists);
    they are read as if they had been written to such files. Every rank passes the same data. Without it the config's data flags
    count. valid: the same for `evaluate`. All documents of `data` are for training, unless the config has a split and `valid` is
    not given.

    Raises ValueError, one line, for a config that does not fit these ranks, and for data that cannot be read. Flags that belong to
    the command's loop have no effect here; a warning names them.
    """

    def __init__(
        self, config: Config, data: Source | None = None, valid: Source | None = None
    ) -> None:
        check(isinstance(config, Config), f"config is a {type(config).__name__}: expected Config")
        self.config, self._world = config, world()
        self._length_given = any(
            (config.train_iters is not None, config.train_samples, config.train_tokens)
        )
        self._arrays: dict[str, TokenArrays] = {}
        self._end: int | None = None  # iterations of the run, where that is known
        with everywhere():
            self._warn(() if data is None else ("--split ", "--legacy-split "))
            run = self._with_data(config.run, data, valid)
            self._tokenizer = read_tokenizer(run, self._world)
            self._run = with_vocabulary(run, self._tokenizer)
            pretrain.check_early(self._with_length(NO_END), self._world.size)
        self._build()
        self._trainer.tokenizer = self._tokenizer

    # Building ---------------------------------------------------------------------------------------------------------------------

    def _warn(self, effective: tuple[str, ...]) -> None:
        """Name the flags without effect. effective: beginnings of the config's notes that do not hold."""
        notes = [note for note in self.config.notes if not note.startswith(effective)]
        for names, remedy in ((LOOP, "the loop is the caller's"), (PROCESS, "pass it to init")):
            notes += [
                f"{flag(name)} has no effect on Trainer: {remedy}"
                for name in self.config.given
                if name in names
            ]
        for note in notes if self._world.rank == 0 else ():
            warnings.warn(note, stacklevel=3)

    def _with_data(self, run: RunConfig, data: Source | None, valid: Source | None) -> RunConfig:
        """The run with `data` and `valid` as its data flags."""
        if data is None:
            check(
                valid is None,
                "valid was passed without data: pass both, or the data flags in the config",
            )
            check(
                run.data.mock_data or run.data.files is not None,
                "there is no data: pass data to Trainer, or data_path or mock_data to Config",
            )
            return run
        check(
            run.data.files is None and not run.data.mock_data,
            "data was passed to Trainer, and the config names data as well: pass one of them",
        )
        if valid is None and "split" in self.config.given:
            return replace(run, data=replace(run.data, data_path=self._named("data", data)))
        return replace(
            run,
            data=replace(
                run.data,
                train_data_path=self._named("data", data),
                valid_data_path=None if valid is None else self._named("valid", valid),
            ),
        )

    def _named(self, name: str, source: Source) -> tuple[str, ...]:
        """The words of a data flag: prefixes, or a name that stands for documents in memory."""
        if isinstance(source, (str, os.PathLike)):
            return (os.fspath(source),)
        if isinstance(source, (list, tuple)) and any(
            isinstance(item, (str, os.PathLike)) for item in source
        ):
            return tuple(str(item) for item in source)
        check(
            hasattr(source, "__len__") and hasattr(source, "__getitem__"),
            f"{name} is a {type(source).__name__}: pass a prefix "
            "of .bin/.idx files, a sequence of arrays of token ids, or a map-style data set of torch",
        )
        check(len(source) > 0, f"{name} is empty: pass at least one document")
        self._arrays[f"<{name}>"] = TokenArrays(source, f"<{name}>")
        return (f"<{name}>",)

    def _with_length(self, iterations: int) -> RunConfig:
        """The run of so many iterations, unless its config says how many."""
        if self._length_given:
            return self._run
        return replace(self._run, training=replace(self._run.training, train_iters=iterations))

    def _build(self, saved: dict[str, str] | None = None) -> None:
        """The trainer of this rank, its data opened. saved: the kernels of the checkpoint that it goes on from. Collective."""
        world, layout, nodes = (
            self._world,
            Layout.from_run(self._run, self._world.size),
            find_nodes(self._world),
        )
        with everywhere():
            run, _ = settle(self._with_length(1), layout, world, nodes)
            check_memory(run, layout, world, nodes)
        self._run = replace(
            run, training=replace(run.training, train_iters=self._run.training.train_iters)
        )
        self._groups = share_groups(Grid(*layout.sizes).groups(world), kernels)
        self._readers = pretrain.find_reader_group(run, self._groups, nodes)
        needed = self._samples_needed(layout, train.Progress()) if self._length_given else 1
        valid_samples = pretrain.samples_to_validate(run, layout, 1)
        data = self._open(needed, valid_samples, NEW_ORDER)
        self._opened = self._length_opened(data[0])
        self._opened_order = needed if self._length_given else None
        choice = choose_kernels(run, layout, world, saved)
        observers = Observers(
            Phases(), Heartbeats(Heartbeat(), Grid(*layout.sizes), world.rank), None
        )
        self._trainer = pretrain.build_trainer(
            self._with_length(NO_END),
            world,
            self._groups,
            data,
            choice.backends,
            observers,
            self._readers,
        )
        self._trainer.order = DataOrder(self._opened_order, valid_samples)
        self._trainer.data_files = on_root(world, lambda: records(data))
        self._valid_sizes = pretrain.valid_sizes(run, layout, data[1], world)
        if self._length_given:
            self._end = pretrain.run_length(self._run, layout, train.Progress())[0]

    def _open(self, samples: int, valid_samples: int | None, order: DataOrder) -> pretrain.Data:
        return pretrain.open_data(
            self._run,
            self._groups,
            (samples, valid_samples),
            self._readers,
            self._arrays,
            self._tokenizer,
            order,
        )

    def _length_opened(self, dataset: Dataset | None) -> int:
        """Return the samples of the training data that is open, on every rank. Collective."""
        own = torch.tensor(0 if dataset is None else len(dataset))
        return int(self._world.all_reduce(own, "max"))

    def _samples_needed(self, layout: Layout, progress: train.Progress) -> int:
        run = self._with_length(self._end or 0)
        _, end = pretrain.run_length(run, layout, progress)
        return batches.requested_samples(run, layout.global_batch_size(run), end)

    # Training ---------------------------------------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Iterations that are done."""
        return self._trainer.progress.iteration

    @property
    def rank(self) -> int:
        """Of this process among those of the job, from 0."""
        return self._world.rank

    def steps(self, count: int | None = None) -> Iterator[Step]:
        """The next `count` iterations, each made when it is asked for; None: up to the end of the run. Collective.

        The config says how long the run is (train_iters, train_samples or train_tokens), and ValueError is raised for more. Without
        them every call makes the run `count` iterations longer; then only a constant learning rate, or one whose decay has a length
        of its own (lr_decay_iters), can go on after the first call, because the first one has decayed to its end.
        """
        check(
            count is None or isinstance(count, int) and count >= 0,
            f"steps({count!r:.40}): pass a number of iterations",
        )
        with everywhere():
            return self._steps(self._prepare(count))

    def _prepare(self, count: int | None) -> int:
        """Make the run long enough, and its data; the iteration at which these steps end."""
        trainer, end = self._trainer, self._end if count is None else self.iteration + count
        if end is None or count is None and not self._length_given:
            raise ValueError(
                "steps() goes to the end of the run, which is not known: pass a number to steps, or train_iters to "
                "Config"
            )
        if not self._length_given:
            self._lengthen(end)
        check(
            self._end is None or end <= self._end,
            f"steps({count}) after iteration {self.iteration} goes beyond the {self._end} "
            "iterations of the run: ask for fewer, or pass a larger train_iters to Config",
        )
        needed = self._samples_needed(trainer.layout, trainer.progress)
        order = trainer.order = trainer.order.or_else(needed, None)
        if needed > self._opened or order.train != self._opened_order:
            trainer.close()
            trainer.check_data()  # the files are opened anew
            trainer.train = self._open(needed, 0, order)[0]
            self._opened = self._length_opened(trainer.train)
            self._opened_order = order.train
        return end

    def _lengthen(self, end: int) -> None:
        """A run without a length goes on to iteration `end`."""
        if self._end is not None and end <= self._end:
            return
        optimizer = self._run.optimizer
        own = optimizer.lr_decay_style == "constant" or bool(
            optimizer.lr_decay_iters or optimizer.lr_decay_tokens
        )
        check(
            self._end is None or own,
            f"the learning rate decays ({optimizer.lr_decay_style}) over the {self._end} iterations of "
            "the first steps(): pass Config train_iters, or lr_decay_style constant",
        )
        trainer, run = self._trainer, self._with_length(end)
        trainer.param_schedule = ParamSchedule.from_run(run, trainer.layout.global_batch_size(run))
        trainer.run, self._end = run, end

    def _steps(self, end: int) -> Iterator[Step]:
        try:
            while self.iteration < end and not self._asked_to_stop():
                yield self._step()
        except GeneratorExit:  # the caller's loop was left
            self._trainer.close()
            raise
        self._trainer.close()

    def _step(self) -> Step:
        result, progress = self._trainer.train_step(), self._trainer.progress
        return Step(
            progress.iteration,
            result.loss,
            result.grad_norm,
            result.learning_rate,
            progress.consumed_samples,
            progress.consumed_samples * self._run.model.seq_length,
            result.seconds,
            result.skipped,
            result.loss_scale,
            result.global_batch_size,
        )

    def _asked_to_stop(self) -> bool:
        """Whether a signal that `init` waits for came on any rank."""
        return bool(self._world.all_reduce(torch.tensor(int(stop_requested())), "max"))

    def evaluate(self) -> float:
        """Mean loss over the first eval_iters batches of the validation data, with full_validation over all. Collective."""
        run, sizes = self._run, self._valid_sizes
        with everywhere():
            check(
                bool(sizes),
                "there is no validation data: pass valid, or a split or valid_data_path in the config",
            )
            check(
                run.training.eval_iters > 0 or run.training.full_validation,
                "--eval-iters is 0: pass a number above 0",
            )
            check(
                not run.training.multiple_validation_sets,
                "multiple_validation_sets has several losses, and evaluate returns "
                "one: leave it out",
            )
        self._trainer.check_data()
        ((first, iterations),) = self._trainer.layout.evaluated(run, sizes, 0)
        return self._trainer.evaluate(self._trainer.valid, first, iterations)

    # Checkpoints ------------------------------------------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a checkpoint that `load`, fugaku_megatron.load and all commands take. Collective."""
        self._trainer.check_data()
        self._trainer.save(os.fspath(directory))

    def load(
        self,
        directory: str | os.PathLike[str],
        weights_only: bool = False,
        ckpt_step: int | None = None,
    ) -> None:
        """Go on from the latest checkpoint of a directory, or from that of `ckpt_step`, or start from weights. Collective.

        A checkpoint of this program may have any layout, and brings optimizer, schedules and the position in the data with it.
        weights_only: nothing but its weights, for a run that begins anew. A directory of Hugging Face or of Megatron-LM, and a
        converted checkpoint, have weights alone. ValueError on every rank for what is missing, damaged or of another architecture.
        """
        path = os.fspath(directory)
        if own := on_root(self._world, lambda: own_checkpoint(path, ckpt_step)):
            found = open_checkpoint(own[0], self._world, own[1])
            weights_only = weights_only or found.state.get("weights_only", False)
            self._begin_from(
                Resume(found, {} if weights_only else found.state, found.config, weights_only)
            )
            self._trainer.load(found, weights_only)
            if not weights_only:
                self._trainer.order = Resume(found, found.state).order
            return
        with everywhere():
            weights = open_weights(path, ckpt_step, self._run.model.vocab_size)
            saved = architecture(weights.model)
            check_model(saved, architecture(self._run.model, saved), Path(path))
        self._begin_from(
            Resume(config={"model": {"mask_vocab_padding": weights.model.mask_vocab_padding}})
        )
        self._trainer.start_from(weights.dtypes, weights.read)

    def _begin_from(self, resume: Resume) -> None:
        """Build the trainer again where what is loaded has other kernels, or masks the padding of the vocabulary. Collective."""
        run, saved, trainer = (
            with_padding(self._run, resume),
            resume.state.get("kernels"),
            self._trainer,
        )
        other = run.system.kernels == "auto" and saved not in (None, trainer.ops.choice)
        if not other and run.model.masks_padding == self._run.model.masks_padding:
            return
        trainer.close()
        self._run = run
        self._build(saved)
        self._trainer.tokenizer = trainer.tokenizer

    def close(self) -> None:
        """Stop reading ahead."""
        self._trainer.close()


T = TypeVar("T")
_signals: list[launcher.StopSignals] = []  # of `init`, at most one


@functools.cache
def world() -> Comm:
    """All ranks: those that a launcher such as mpiexec started, or this process alone, which then imports no MPI.

    With several ranks MPI starts here, on a thread of its own, and from then on an exception that nobody catches prints its
    traceback and ends all ranks, because the others would wait for this one for ever.
    """
    if launcher.processes()[1] == 1:
        return SoloComm()
    comm = start_mpi()
    end_job_with_exceptions(comm)
    return comm


def init(
    *,
    allocator: str = "tuned",
    thread_affinity: str = "auto",
    cpu_frequency: float | None = None,
    flush_denormals: bool = True,
    reserve_core: bool = False,
    stop_signals: bool = False,
) -> str:
    """Set up this process as the command train does; returns lines about the machine. Collective: every rank calls it.

    Call it before the first model, if at all. These are all of its effects, and each lasts as long as the process:

    allocator: "tuned" sets malloc's thresholds (mallopt) and gives torch's large CPU tensors an arena that keeps its pages; "stock"
    leaves both as they are. A preloaded allocator stays in either case.
    threads: the number of torch's and the kernels' threads becomes OMP_NUM_THREADS, or else this rank's share of the cores.
    thread_affinity: "pin" binds each thread to a core, "auto" does so on nodes of several NUMA domains, "none" does not.
    flush_denormals: all threads, torch's operations among them, take denormal numbers as zero.
    cpu_frequency: the clock in GHz, set where the system permits it; ValueError where the cores run at another.
    reserve_core: with several ranks, leave a core to the thread that calls MPI.
    stop_signals: a first SIGINT, SIGTERM or SIGUSR1 lets `Trainer.steps` end after the iteration that is under way, on all ranks;
    a second one ends the process. Only on the main thread.

    Without a call to `init` none of this is touched.
    """
    line = runtime.init(
        world(),
        allocator=allocator,
        thread_affinity=thread_affinity,
        cpu_frequency=cpu_frequency,
        flush_denormals=flush_denormals,
        reserve_core=reserve_core,
    )
    if stop_signals and not _signals:
        _signals.append(launcher.StopSignals().__enter__())
    return line


def on_first_rank(work: Callable[[], T]) -> T:
    """Run `work` on the first rank alone; its result, which can be pickled, on all ranks, once it is there. Collective.

    Where it raises, every rank raises ValueError with its message.
    """
    return on_root(world(), work)


def stop_requested() -> bool:
    """Whether a signal asked this rank to stop."""
    return any(signals.stop_requested for signals in _signals)
