"""Weights from which a Trainer starts: a checkpoint, any program's model, or the adapters' model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ..checkpoint.load import Checkpoint
from ..checkpoint.manifest import (
    CARRIED,
    existing_iteration,
    own_checkpoint,
    read_head,
    torch_dist_iteration,
)
from ..checkpoint.shards import check_model
from ..comm.agreement import everywhere, on_root
from ..comm.base import Comm
from ..config.architecture import architecture
from ..config.fields import check
from ..config.run_config import RunConfig
from ..convert.open_weights import open_weights
from ..convert.weights import Weights
from ..costs.plan import Plan
from ..run.checkpoint_source import Resume, find_checkpoint, open_pretrained
from ..run.sources import Sources
from ..text.named_files import JsonObject
from ..training.checkpoints import ForeignModel


def find_sources(plan: Plan, known: Sources, world: Comm) -> tuple[Plan, Sources]:
    """Add the weights of --load, or else of --pretrained-checkpoint, to a run's other sources. Collective.

    Raise ValueError on every rank.
    """
    output = plan.config.output
    if output.load is not None:
        return find_in(plan, output.load, known, world, ckpt_step=output.ckpt_step)
    if output.pretrained_checkpoint is None:
        return plan, known
    if plan.config.lora.on:
        return _resumed(plan, known, world)
    return find_in(plan, output.pretrained_checkpoint, known, world, weights_only=True)


def find_in(
    plan: Plan,
    directory: str,
    known: Sources,
    world: Comm,
    ckpt_step: int | None = None,
    weights_only: bool = False,
) -> tuple[Plan, Sources]:
    """Find the weights in this program's, Hugging Face's or Megatron-LM's directory. Collective.

    Return the plan whose output flags name the directory, and the `known` sources with the weights.
    weights_only: as --finetune; other and converted weights are always loaded so. Raise ValueError
    on every rank.
    """
    run = plan.config
    own = on_root(world, lambda: own_checkpoint(directory, ckpt_step))
    if own is None:
        begins = weights_only or run.output.finetune or run.lora.on
        iteration = (
            None if begins else on_root(world, lambda: torch_dist_iteration(directory, ckpt_step))
        )
        if iteration is None:
            with everywhere():
                weights = _open_foreign(run, directory, ckpt_step)
            if not run.lora.on:
                return plan, replace(known, weights=weights, carried=weights.carried)
            resume = Resume(base=_foreign_model(directory, weights))
            return plan, replace(known, resume=resume, carried=None)
        output = replace(run.output, load=directory, ckpt_step=iteration)
        return _resumed(replace(plan, config=replace(run, output=output)), known, world)
    step = own[1]
    state = on_root(world, lambda: _state(own[0], step))
    finetune = weights_only or run.output.finetune or bool(state.get("weights_only"))
    base = run.output.pretrained_checkpoint
    if not run.lora.on or "lora" not in state:
        base = None  # the directory holds a model itself
    output = replace(
        run.output, load=own[0], ckpt_step=step, finetune=finetune, pretrained_checkpoint=base
    )
    return _resumed(replace(plan, config=replace(run, output=output)), known, world)


def _state(directory: str, iteration: int | None) -> JsonObject:
    found = existing_iteration(directory) if iteration is None else iteration
    check(found is not None, f"--load {directory} holds no checkpoint")
    assert found is not None
    state: JsonObject = read_head(directory, found)["state"]
    return state


def _resumed(plan: Plan, known: Sources, world: Comm) -> tuple[Plan, Sources]:
    resume = find_checkpoint(plan, world, partial(_open_base, plan.config))
    source = resume.checkpoint or resume.base
    carried = source.carried if isinstance(source, ForeignModel) else None
    if isinstance(source, Checkpoint):
        carried = source.directory / CARRIED
    return plan, replace(known, resume=resume, carried=carried)


def _open_base(
    run: RunConfig, directory: str, world: Comm, iteration: int | None
) -> Checkpoint | ForeignModel:
    own = on_root(world, lambda: own_checkpoint(directory, iteration))
    if own is not None:
        return open_pretrained(own[0], world, own[1])
    with everywhere():
        return _foreign_model(directory, _open_foreign(run, directory, iteration))


def _open_foreign(run: RunConfig, directory: str, iteration: int | None) -> Weights:
    ignored = run.output.ignore_saved_arguments or ()
    weights = open_weights(directory, iteration, run.model.vocab_size, ignored=ignored)
    if run.lora.on:
        weights = weights.without_predictions()
    saved = architecture(weights.model)
    check_model(saved, architecture(run.model, saved, begins=True), Path(directory))
    return weights


def _foreign_model(directory: str, weights: Weights) -> ForeignModel:
    return ForeignModel(Path(directory), weights.dtypes, weights.read, weights.carried)
