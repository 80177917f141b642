"""Our kernels in the places that transformers offers for them: `accelerate(model)`, undone by `restore(model)`.

A row of SEAMS replaces one kind of part: forwards of modules, names of implementations in configs, functions of modeling files.
What was there before is noted with the model.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import nn

from . import (
    attention_interface,
    delta_rule,
    experts,
    logits,
    rms_norms,
    transformers_names,
    trl_head,
)

NOTES = "_fugaku_notes"
Model = TypeVar("Model", bound=nn.Module)


class Note(NamedTuple):
    """An attribute before it was replaced.

    owner: a module of the model, a config, or the name of a Python module, because a copied model copies its notes
    before: the attribute in a list, or an empty list if only the owner's class had it. Of a shared function always transformers' own.
    """

    owner: Any
    name: str
    before: list[Any]

    @staticmethod
    def replacing(owner: Any, name: str, value: Any) -> Note:
        """Set the attribute."""
        scope = vars(sys.modules[owner] if isinstance(owner, str) else owner)
        note = Note(owner, name, [scope[name]] if name in scope else [])
        scope[name] = value
        return note

    def undo(self) -> None:
        scope = vars(sys.modules[self.owner] if isinstance(self.owner, str) else self.owner)
        del scope[self.name]
        scope.update(zip([self.name], self.before))


class Outcome(NamedTuple):
    """What a seam replaced and left, in words."""

    notes: list[Note]
    replaced: str
    left: set[str] = set()  # noqa: RUF012  # never changed


def _models(model: nn.Module) -> Iterator[Any]:
    """Yield transformers' models within a model."""
    from transformers import PreTrainedModel

    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _attention(model: nn.Module) -> Outcome:
    notes = []
    left = set()
    for module in _models(model):
        name = module.config._attn_implementation
        if name == attention_interface.NAME:
            continue
        if name in ("sdpa", "eager") and module._can_set_attn_implementation():
            attribute = "_attn_implementation_internal"
            notes.append(Note.replacing(module.config, attribute, attention_interface.NAME))
        else:
            left.add(f"attention {name}")
    return Outcome(notes, "attention", left)


def _experts(model: nn.Module) -> Outcome:
    notes = []
    for module in _models(model):
        attribute = "_experts_implementation_internal"
        has_experts = any(hasattr(each, "_is_expert_parallel") for each in module.modules())
        if has_experts and getattr(module.config, attribute, experts.NAME) != experts.NAME:
            notes.append(Note.replacing(module.config, attribute, experts.NAME))
    return Outcome(notes, "experts")


def _forward(module: nn.Module, forward: Callable[..., Any]) -> Note:
    return Note.replacing(module, "forward", types.MethodType(forward, module))


def _norms(model: nn.Module) -> Outcome:
    norms = [each for each in model.modules() if rms_norms.is_norm(each)]
    forwards = [rms_norms.native_forward(each) for each in norms]
    found = [(each, forward) for each, forward in zip(norms, forwards) if forward is not None]
    left = {type(each).__name__ for each, forward in zip(norms, forwards) if forward is None}
    notes = [_forward(each, forward) for each, forward in found]
    return Outcome(notes, f"{len(notes)} RMS norms", left)


def _output_layers(model: nn.Module) -> Outcome:
    heads = {id(head): head for each in _models(model) if (head := each.get_output_embeddings())}
    plain = [head for head in heads.values() if type(head) is nn.Linear]
    left = {f"output layer {type(head).__name__}" for head in heads.values() if head not in plain}
    return Outcome([_forward(head, logits.lazy_linear) for head in plain], "output layer", left)


def _shared(file: str, name: str, replacement: Callable[..., Any]) -> Note:
    """Replace a name of a Python module, perhaps again for another model, by replacement(what was there first)."""
    scope = vars(sys.modules[file])
    original = getattr(scope[name], "original", scope[name])
    value = replacement(original)
    value.original = original
    scope[name] = value
    return Note(file, name, [original])


def _delta_rules(model: nn.Module) -> Outcome:
    notes = []
    for file in sorted({type(each).__module__ for each in model.modules()}):
        scope = vars(sys.modules[file])
        if "torch_chunk_gated_delta_rule" not in scope:
            continue
        for name, function in delta_rule.FUNCTIONS.items():
            if name in scope:
                notes.append(_shared(file, name, partial(partial, function)))
    return Outcome(notes, "gated delta rule and convolution")


def _trl(model: nn.Module) -> Outcome:
    file = trl_head.MODULE
    if file not in sys.modules or not hasattr(sys.modules[file], "_ChunkedLogProbFunction"):
        return Outcome([], "")
    notes = [
        _shared(file, "_ChunkedLogProbFunction", trl_head.LogProbFunction),
        _shared(file, "_use_triton", partial(partial, trl_head.leaves_out_rows)),
    ]
    return Outcome(notes, "trl's log-probabilities")


SEAMS = (_attention, _norms, _delta_rules, _experts, _output_layers, _trl)


def accelerate(model: Model, say: Callable[[str], object] | None = None) -> Model:
    """Let a model of transformers compute with our kernels, also one within peft's or sentence-transformers'. Return the model.

    Functions of modeling files and of trl are shared: they are replaced for all models, until a model is restored.

    say: receives the line on replaced and other parts instead of standard error
    Raise ValueError if no part is a model of transformers.
    """
    if not any(_models(model)):
        raise ValueError(f"accelerate: {type(model).__name__} contains no model of transformers")
    restore(model)
    transformers_names.register()
    outcomes = [seam(model) for seam in SEAMS]
    setattr(model, NOTES, [note for outcome in outcomes for note in outcome.notes])
    replaced = ", ".join(each.replaced for each in outcomes if each.notes) or "nothing"
    left = ", ".join(sorted(set().union(*(each.left for each in outcomes))))
    say = say or partial(print, file=sys.stderr)
    say(f"accelerate: replaced {replaced}{f'; left {left}' if left else ''}")
    return model


def restore(model: nn.Module) -> None:
    """Undo `accelerate`."""
    for note in reversed(vars(model).pop(NOTES, [])):
        note.undo()
