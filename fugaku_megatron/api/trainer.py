"""Training from Python: fugaku-megatron train's trainer, with the loop left to the caller."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from ..checkpoint.manifest import CARRIED
from ..checkpoint.save import BackgroundSave, check_writable
from ..comm.agreement import everywhere, find_nodes, on_root
from ..comm.base import Comm, SoloComm
from ..comm.job import end_job_with_exceptions
from ..comm.job import init as start_mpi
from ..config.decay_shapes import SHAPES
from ..config.fields import FieldValues, check, flag
from ..config.run_config import RunConfig
from ..convert.hugging_face.carried_files import carry
from ..costs.plan import Length, Plan
from ..data.dataset import Dataset
from ..data.token_arrays import Documents, TokenArrays
from ..host import runtime
from ..observe.numbers.audit import watch_numbers
from ..observe.resources.memory_watch import check_memory
from ..run.assemble import StartLog, assemble, load_weights, resolve_start
from ..run.checkpoint_source import Resume, resumed_plan, with_padding
from ..run.checks import check_run
from ..run.data import open_data
from ..run.resume import carry_files
from ..run.sources import Sources
from ..run.tokenizer import tokenizer_notes
from ..start import environment
from ..start import signals as signals_module
from ..text.named_files import StrPath
from ..training import trainer as trainer_module
from ..training.replicas import ReplicasDiffer as ReplicasDiffer
from .chats import chat_arrays
from .config import Config
from .flags import check_flags, trainer_notes
from .sources import find_in, find_sources

Source = StrPath | Sequence[Any] | Documents
NO_END = 2**31 - 1  # iterations of a run whose length is not known yet
PACKAGE = __name__.partition(".")[0] + "."
WARNING = "warning: "  # the beginning of a line of the log about a likely mistake
NOTE = "note: "  # the beginning of a line of the log that names what a user may not expect


@dataclass(frozen=True)
class Step:
    """Iteration with figures that are equal on every rank.

    iteration: number, from 1.
    loss: mean over counted tokens before the update, with the z-loss of use_z_loss.
    grad_norm: before clipping.
    skipped: no update was made, because gradients had an Inf or NaN.
    consumed_samples, consumed_tokens: since the beginning of the run.
    num_zeros: zero gradient elements, with log_num_zeros_in_grad.
    params_norm: after the update, with log_params_norm.
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
    num_zeros: float | None = None
    params_norm: float | None = None


class Trainer:
    """A run on the ranks of `world`. Ranks that mpiexec started make the same calls with the same data.

    data: a prefix of .bin/.idx files, or a list as of --data-path: prefixes, or weights and prefixes
    in turn. Or documents, a sequence or a map-style data set of torch: one-dimensional arrays of
    token ids (numpy, torch or lists). With sft in the config documents are chats: objects as
    `fugaku-megatron preprocess --chat` reads them, rendered by the config's tokenizer, or pairs of
    token ids and flags of those that are trained. None: the config's data flags.
    valid: the same for `evaluate`. Without it and without a split all documents are for training.

    The run begins with the config's load and pretrained_checkpoint, as in the command; `load` does
    the same later.

    Raises ValueError for a config that does not fit these ranks, for data and
    checkpoints that cannot be read, and for flags on which only the command acts.
    """

    def __init__(
        self, config: Config, data: Source | None = None, valid: Source | None = None
    ) -> None:
        check(isinstance(config, Config), f"config is a {type(config).__name__}: expected Config")
        self.config = config
        self._world = world()
        self._nodes = find_nodes(self._world)
        self._arrays: dict[str, TokenArrays] = {}
        self._end: int | None = None  # iterations of the run, where that is known
        self._saving: BackgroundSave | None = None
        self._stepping = False
        self._trained = False
        self._log = StartLog(note=self._note)
        lengths = (config.train_iters is not None, config.train_samples, config.train_tokens)
        with everywhere():
            check_flags(config)
            run = self._with_data(config.run, data, valid)
        checked = run
        if not any(lengths):
            checked = replace(run, training=replace(run.training, train_iters=NO_END))
        plan, lines = check_run(checked, self._world, self._arrays)
        plan = replace(plan, open_ended=not any(lengths)).lasting(1)
        self._warn(*trainer_notes(config, data is not None), *lines)
        if local := run.output.save_local:
            ranks = (self._world.rank,) if self._nodes.leads else ()
            check_writable(local, self._world, "--save-local", ranks=ranks)
        self._timer = runtime.ExitTimer(run.training.exit_duration_in_mins)
        find = partial(find_sources, known=Sources(arrays=self._arrays), world=self._world)
        self._assemble(*resolve_start(plan, self._world, self._nodes, find))

    # Building ---------------------------------------------------------------------------------------------------------------------

    @property
    def _run(self) -> RunConfig:
        return self._trainer.run

    def _warn(self, *notes: str) -> None:
        if self._world.rank > 0:
            return
        level = 0
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(PACKAGE):
            level += 1
            frame = frame.f_back
        for note in notes:
            said = note.removeprefix(NOTE).removeprefix(WARNING)
            warnings.warn(said, stacklevel=level + 1)

    def _note(self, *lines: str) -> None:
        """Warn of the lines of a start that name what a user may not expect."""
        arrays = [repr(f"<{name}>") for name in ("data", "valid")]
        noted = [line for line in lines if line.startswith((NOTE, WARNING))]
        self._warn(*(line for line in noted if not any(name in line for name in arrays)))

    def _with_data(self, run: RunConfig, data: Source | None, valid: Source | None) -> RunConfig:
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
        splits = [name for name in ("split", "legacy_split") if self.config.given.get(name)]
        check(
            valid is None or not splits,
            f"{' '.join(map(flag, splits))} divides data into training and validation data, and "
            "valid was passed to Trainer: "
            "pass one of them",
        )
        given: FieldValues = {
            "data_path" if splits else "train_data_path": self._named("data", data)
        }
        if valid is not None:
            given["valid_data_path"] = self._named("valid", valid)
        return replace(run, data=replace(run.data, **given))

    def _named(self, name: str, source: Source) -> tuple[str, ...]:
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
        named = f"<{name}>"
        if self.config.sft:
            self._arrays[named] = chat_arrays(source, named, self.config.run, self._warn)
        else:
            self._arrays[named] = TokenArrays(source, named)
        return (named,)

    def _assemble(self, plan: Plan, sources: Sources) -> None:
        """Build this rank's trainer, open its data, and load its weights. Collective.

        plan: an open-ended one lasts one iteration
        """
        resume = sources.resume
        with everywhere():
            check_memory(plan, self._world, self._nodes)
        resumed = resumed_plan(plan, resume)
        train_samples = 1
        if not plan.open_ended:
            train_samples = resumed.length.train_samples
            self._end = resumed.length.iterations
        self._evaluations = 1
        if "eval_interval" in self.config.given:
            self._evaluations = max(1, resumed.evaluations(self._end or 0))
        valid_samples = resumed.valid_samples(self._evaluations)
        sources = replace(sources, samples=(train_samples, valid_samples))
        assembly = assemble(
            resumed.lasting(NO_END), self._world, self._nodes, sources=sources, log=self._log
        )
        trainer = assembly.trainer
        watched = watch_numbers(trainer, lambda _, line: self._warn(line))
        self._note(*filter(None, [watched]))
        self._trainer = trainer
        self._assembly = assembly
        self._opened = self._length_opened(trainer.train)
        self._opened_order = resume.order.train or (None if plan.open_ended else train_samples)
        if resume.iteration is None:
            trainer.order = resume.order.or_else(self._opened_order, valid_samples)
        self._begin(plan, sources)

    def _begin(self, plan: Plan, sources: Sources) -> None:
        """Note what the loaded weights decide."""
        keeps = self._run.optimizer.use_checkpoint_opt_param_scheduler
        self._scheduled = keeps and sources.resume.iteration is not None
        self._plan = plan
        self._sources = replace(sources, resume=Resume(), weights=None)
        self._weightless = self._run.lora.on and not sources.found
        if not plan.open_ended:
            self._end = self._length().iterations

    def _check_weights(self) -> None:
        with everywhere():
            check(
                not self._weightless,
                f"--lora-rank {self._run.lora.lora_rank} trains adapters of a model that was not "
                "loaded: pass "
                "pretrained_checkpoint to Config, or call Trainer.load before",
            )

    def _length_opened(self, dataset: Dataset | None) -> int:
        """Return the open training data's samples. Collective."""
        own = torch.tensor(0 if dataset is None else len(dataset))
        return int(self._world.all_reduce(own, "max"))

    def _length(self) -> Length:
        progress = self._trainer.progress
        plan = self._trainer.plan.lasting(self._end or 0)
        return plan.resumed(progress.iteration, progress.consumed_samples).length

    # Training ---------------------------------------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Number of finished iterations."""
        return self._trainer.progress.iteration

    @property
    def rank(self) -> int:
        """Rank of this process in the job, from 0."""
        return self._world.rank

    def steps(self, count: int | None = None) -> Iterator[Step]:
        """Iterate over the next `count` iterations; None: up to the end of the run. Collective.

        The config sets the run's length (train_iters, train_samples or train_tokens); ValueError is raised for more. Without a
        length every call makes the run `count` iterations longer. A second call then needs a constant learning rate or a decay
        length (lr_decay_iters), because the rate decays to its end in the first call.
        """
        check(
            count is None or isinstance(count, int) and count >= 0,
            f"steps({count!r:.40}): pass a number of iterations",
        )
        with everywhere():
            self._check_weights()
            return self._steps(self._prepare(count))

    def _prepare(self, count: int | None) -> int:
        """Extend run and data for `count` steps; return the last iteration."""
        trainer = self._trainer
        end = self._end if count is None else self.iteration + count
        if end is None or count is None and self._plan.open_ended:
            raise ValueError(
                "steps() goes to the end of the run, which is not known: pass a number to steps, or train_iters to "
                "Config"
            )
        if self._plan.open_ended:
            self._lengthen(end)
        check(
            self._end is None or end <= self._end,
            f"steps({count}) after iteration {self.iteration} goes beyond the {self._end} "
            "iterations of the run: ask for fewer, or pass a larger train_iters to Config",
        )
        needed = self._length().train_samples
        order = trainer.order = trainer.order.or_else(needed, None)
        if needed > self._opened or order.train != self._opened_order:
            trainer.close()
            trainer.check_data()  # the files are opened anew
            resume = Resume(state={"data_order": order._asdict()})
            sources = replace(self._sources, resume=resume, samples=(needed, 0))
            assembly = self._assembly
            trainer.train = open_data(trainer.plan, assembly.groups, sources, assembly.readers)[0]
            self._opened = self._length_opened(trainer.train)
            self._opened_order = order.train
        return end

    def _lengthen(self, end: int) -> None:
        if self._end is not None and end <= self._end:
            return
        optimizer = self._run.optimizer
        own = not SHAPES[optimizer.lr_decay_style].decays or bool(
            optimizer.lr_decay_iters or optimizer.lr_decay_tokens
        )
        check(
            self._end is None or own,
            f"the learning rate decays ({optimizer.lr_decay_style}) over the {self._end} iterations of "
            "the first steps(): pass Config train_iters, or lr_decay_style constant",
        )
        trainer = self._trainer
        trainer.plan = trainer.plan.lasting(end)
        if not self._scheduled:
            trainer.param_schedule = trainer.plan.param_schedule
        self._end = end

    def _steps(self, end: int) -> Iterator[Step]:
        interval = self._run.training.exit_interval
        self._stepping = True
        try:
            while self.iteration < end and not self._asked_to_stop():
                yield self._step()
                if interval and self.iteration % interval == 0:
                    break
        except GeneratorExit:
            # The caller left the loop, perhaps by an exception of this rank alone.
            self._trainer.close()
            raise
        finally:
            self._stepping = False
        self.close()

    def _step(self) -> Step:
        result = self._trainer.train_step()
        progress = self._trainer.progress
        output = self._run.output
        optimizer = self._trainer.optimizer
        self._trained = True
        if result.nothing_counted:
            self._warn(trainer_module.uncounted_line(progress.iteration, result))
        interval = self._run.numbers.check_weight_hash_across_dp_replicas_interval
        if interval and progress.iteration % interval == 0:
            self._trainer.check_replicas()
        return Step(
            iteration=progress.iteration,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_samples * self._run.model.seq_length,
            seconds=result.seconds,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            global_batch_size=result.global_batch_size,
            num_zeros=result.num_zeros if output.log_num_zeros_in_grad else None,
            params_norm=optimizer.params_norm() if output.log_params_norm else None,
        )

    def _asked_to_stop(self) -> bool:
        """Return True on every rank after a signal or timeout; advance a save."""
        writes = self._saving is not None and not self._saving.done
        late = self._timer.expired and self._trained
        flags = [stop_requested() or late, writes]
        ends, writing = self._world.all_reduce(torch.tensor(flags).int(), "max").tolist()
        if self._saving is not None and not writing and self._saving.advance():
            self._saved()
        return bool(ends)

    def evaluate(self, number: int = 0) -> float:
        """Return the mean loss over eval_iters batches of validation data, or all. Collective.

        number: of the evaluation, from 0; each evaluation has its own batches. A run with a length and eval_interval has as many
        evaluations as in the command, any other run has one.
        """
        run = self._run
        sizes = self._assembly.valid_sizes
        with everywhere():
            self._check_weights()
            check(
                0 <= number < self._evaluations,
                f"evaluate({number}): the run has evaluations 0 to {self._evaluations - 1}: pass "
                "one of these, or eval_interval and the length of the run to Config",
            )
            check(
                bool(sizes),
                "there is no validation data: pass valid, or a split or valid_data_path in the config",
            )
            check(
                run.training.eval_iters > 0 or run.training.full_validation,
                "--eval-iters is 0: pass a number above 0",
            )
        self._trainer.check_data()
        ((first, iterations),) = self._trainer.layout.evaluated(run, sizes, number)
        return self._trainer.evaluate(self._trainer.valid, first, iterations)

    # Checkpoints ------------------------------------------------------------------------------------------------------------------

    def save(self, directory: StrPath) -> None:
        """Write a checkpoint for `load`, fugaku_megatron.load and all commands. Collective.

        Raise ReplicasDiffer on every rank, before anything is written, if copies of the same weights or moments differ: a node is
        faulty. check_weight_hash_across_dp_replicas_interval=0 disables the comparison.

        With async_save or save_local, a save inside the loop over `steps` ends during training; the next save, the end of the loop
        and `close` wait for it.
        """
        self._check_weights()
        self._trainer.check_data()
        self._finish_save()
        path = os.fspath(directory)
        output = self._run.output
        source = self._sources.carried
        if source is not None:  # the model's tokenizer files
            copy = shutil.copytree if source.name == CARRIED else carry
            carry_files(source, path, self._world, copy)
        if not (output.async_save or output.save_local):
            self._trainer.save(path)
            return
        self._saving = self._trainer.save_in_background(path)
        atexit.register(self._finish_save)  # on all ranks: an exception of one ends the job before
        if not self._stepping:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for a background save. Collective."""
        if self._saving is not None:
            saving = self._saving
            self._saved()
            saving.finish()

    def _saved(self) -> None:
        self._saving = None
        atexit.unregister(self._finish_save)

    def load(
        self,
        directory: StrPath,
        weights_only: bool = False,
        ckpt_step: int | None = None,
    ) -> None:
        """Resume from the latest checkpoint in a directory or from `ckpt_step`, or start from weights. Collective.

        A checkpoint of this program may have any layout, and restores optimizer, schedules and data position too, as a run of
        Megatron-LM in the format torch_dist does; its other directories, Hugging Face's and converted checkpoints have weights
        alone. In a run of adapters, a checkpoint of adapters is loaded with its model, or with pretrained_checkpoint; a model
        starts new adapters.
        weights_only: load nothing but weights, as with finetune in the config.
        Raise ValueError on every rank for files that are missing, damaged or of another architecture.
        """
        self._finish_save()
        plan, sources = find_in(
            self._plan,
            os.fspath(directory),
            self._sources,
            self._world,
            ckpt_step=ckpt_step,
            weights_only=weights_only,
        )
        resume = sources.resume
        trainer = self._trainer
        self._weightless = self._run.lora.on
        if self._needs_other(plan, resume):
            trainer.close()
            self._assemble(plan, sources)
            return
        trainer.plan = replace(trainer.plan, config=replace(trainer.run, output=plan.config.output))
        saved = resume.state.get("tokenizer")
        self._note(*tokenizer_notes(trainer.run, sources.tokenizer, saved, self._world))
        load_weights(trainer, sources, self._log)
        if resume.iteration is not None:
            trainer.order = resume.order
        self._begin(plan, sources)

    def _needs_other(self, plan: Plan, resume: Resume) -> bool:
        """Return True if the weights need another trainer: after training, or for other kernels or padding."""
        run = with_padding(plan.config, resume)
        saved = resume.state.get("kernels")
        trainer = self._trainer
        other = run.system.kernels == "auto" and saved not in (None, trainer.ops.choice)
        begins = resume.iteration is None or run.optimizer.no_load_optim
        used = begins and trainer.progress.iteration > 0
        return other or used or run.model.masks_padding != trainer.run.model.masks_padding

    def close(self) -> None:
        """Stop reading ahead, and wait for a save in the background. Collective."""
        self._finish_save()
        self._trainer.close()


T = TypeVar("T")
_signals: list[signals_module.StopSignals] = []  # of `init`, at most one


@functools.cache
def world() -> Comm:
    """Return all ranks that a launcher such as mpiexec started, or this process alone, without MPI.

    With several ranks MPI starts here, on a thread of its own. From then on an uncaught exception prints its traceback and ends
    all ranks, because the others would wait for ever.
    """
    environment.check_launcher()
    if environment.processes()[1] == 1:
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
    """Set up this process as the command train does; return lines about the machine. Collective.

    Optional; before the first model. Torch and the kernels get OMP_NUM_THREADS threads, or else this rank's share of the cores.
    All effects last as long as the process, and nothing is changed without this call:

    allocator: "tuned" sets malloc's thresholds (mallopt) and allocates torch's large CPU tensors in an arena that keeps its pages;
    "stock" changes neither. A preloaded allocator stays in both cases.
    thread_affinity: "pin" binds each thread to a core, "auto" does so on nodes of several NUMA domains, "none" does not.
    flush_denormals: treat denormal numbers as zero on all threads, in torch's operations too.
    cpu_frequency: clock in GHz, set if the system permits it; ValueError if the cores run at another.
    reserve_core: with several ranks, leave a core to the thread that calls MPI.
    stop_signals: on a first SIGINT, SIGTERM or SIGUSR1 `Trainer.steps` ends after the present iteration, on all ranks; a second one
    ends the process. Only on the main thread.
    """
    line = runtime.init(
        world(),
        runtime.ProcessSettings(
            allocator, thread_affinity, cpu_frequency, flush_denormals, reserve_core
        ),
    )
    if stop_signals and not _signals:
        _signals.append(signals_module.StopSignals().__enter__())
    return line


def on_first_rank(work: Callable[[], T]) -> T:
    """Run `work` on the first rank alone, and return its result, which must be picklable, on all ranks. Collective.

    If `work` raises, every rank raises ValueError with its message.
    """
    return on_root(world(), work)


def stop_requested() -> bool:
    """Return True after a signal asked this rank to stop."""
    return any(signals.stop_requested for signals in _signals)
