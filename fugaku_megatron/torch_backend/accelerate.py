"""Our kernels in the places that transformers offers for them: `accelerate(model)`, undone by `restore(model)`.

A function of SEAMS replaces one kind of part: forwards of modules, names of implementations in configs, functions of modeling files.
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

UNDO = "_fugaku_undo"
OLDEST = "4.57"  # of the versions of transformers whose models were compared
Model = TypeVar("Model", bound=nn.Module)


class Outcome(NamedTuple):
    """Calls that undo a seam's replacements, and what it replaced and left, in words."""

    undo: list[partial[None]]
    replaced: str
    left: set[str]


def _models(model: nn.Module) -> Iterator[Any]:
    """Yield transformers' models within a model."""
    from transformers import PreTrainedModel

    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _replace(owner: Any, name: str, value: object) -> partial[None]:
    """Set an attribute. Return what undoes it, which a copied model copies."""
    undo = partial(delattr, owner, name)
    if name in vars(owner):
        undo = partial(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)
    return undo


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> partial[None]:
    return _replace(module, "forward", types.MethodType(forward, module))


def _set_global(file: str, name: str, value: object) -> None:
    setattr(sys.modules[file], name, value)


def _replace_shared(file: str, name: str, replacement: Callable[[Any], Any]) -> partial[None]:
    """Replace a name of a Python module, perhaps again for another model, by replacement(what was there first)."""
    before = getattr(sys.modules[file], name)
    original = getattr(before, "original", before)
    value = replacement(original)
    value.original = original
    _set_global(file, name, value)
    return partial(_set_global, file, name, original)


def _attention(model: nn.Module) -> Outcome:
    undo = []
    left = set()
    for module in _models(model):
        name = module.config._attn_implementation
        # A model with torch's attention is eager only if its user wants the probabilities.
        replaced = "sdpa" if module._supports_sdpa else "eager"
        if name == replaced and module._can_set_attn_implementation():
            attribute = "_attn_implementation_internal"
            undo.append(_replace(module.config, attribute, attention_interface.NAME))
        elif name != attention_interface.NAME:
            left.add(f"attention {name}")
    return Outcome(undo, "attention", left)


def _experts(model: nn.Module) -> Outcome:
    undo = [
        _replace(module.config, "_experts_implementation_internal", experts.NAME)
        for module in _models(model)
        if any(hasattr(each, "_is_expert_parallel") for each in module.modules())
    ]
    return Outcome(undo, "experts", set())


def _norms(model: nn.Module) -> Outcome:
    undo = []
    left = set()
    for module in filter(rms_norms.is_norm, model.modules()):
        forward = rms_norms.native_forward(module)
        if forward is None:
            left.add(type(module).__name__)
        else:
            undo.append(_replace_forward(module, forward))
    return Outcome(undo, f"{len(undo)} RMS norms", left)


def _output_layers(model: nn.Module) -> Outcome:
    heads = {each.get_output_embeddings() for each in _models(model)} - {None}
    undo = []
    left = set()
    for head in heads:
        if type(head) is nn.Linear:
            undo.append(_replace_forward(head, logits.lazy_linear))
        else:
            left.add(f"output layer {type(head).__name__}")
    return Outcome(undo, "output layer", left)


def _delta_rules(model: nn.Module) -> Outcome:
    undo = [
        _replace_shared(file, name, partial(partial, function))
        for file in sorted({type(each).__module__ for each in model.modules()})
        for name, function in delta_rule.FUNCTIONS.items()
        if delta_rule.MARK in vars(sys.modules[file])
    ]
    return Outcome(undo, "gated delta rule and convolution", set())


def _trl(model: nn.Module) -> Outcome:
    name = "trl's log-probabilities"
    file = trl_head.MODULE
    found = getattr(sys.modules.get(file), "_ChunkedLogProbFunction", None)
    if found is None:
        return Outcome([], name, set())
    if not trl_head.is_known(getattr(found, "original", found)):
        return Outcome([], name, {name})
    undo = [
        _replace_shared(file, "_ChunkedLogProbFunction", trl_head.LogProbFunction),
        _replace_shared(file, "_use_triton", partial(partial, trl_head.leaves_out_rows)),
    ]
    return Outcome(undo, name, set())


SEAMS = (_attention, _norms, _delta_rules, _experts, _output_layers, _trl)


def accelerate(model: Model, say: Callable[[str], object] | None = None) -> Model:
    """Let a model of transformers compute with our kernels, also one within peft's or sentence-transformers'. Return the model.

    Functions of modeling files and of trl are shared: they are replaced for all models, until a model is restored.

    say: receives the line on replaced and other parts instead of standard error
    Raise ValueError if no part is a model of transformers, or for an old version of it.
    """
    parts = list(_models(model))
    if not parts:
        raise ValueError(f"accelerate: {type(model).__name__} contains no model of transformers")
    if not hasattr(parts[0], "_can_set_attn_implementation"):
        version = sys.modules["transformers"].__version__
        raise ValueError(
            f"accelerate: transformers {version} is too old: install {OLDEST} or newer"
        )
    restore(model)
    transformers_names.register()
    outcomes = [seam(model) for seam in SEAMS]
    setattr(model, UNDO, [undo for outcome in outcomes for undo in outcome.undo])
    replaced = ", ".join(each.replaced for each in outcomes if each.undo) or "nothing"
    left = ", ".join(sorted(set().union(*(each.left for each in outcomes))))
    say = say or partial(print, file=sys.stderr)
    say(f"accelerate: replaced {replaced}{f'; left {left}' if left else ''}")
    return model


def restore(model: nn.Module) -> None:
    """Undo `accelerate`."""
    for undo in reversed(vars(model).pop(UNDO, [])):
        undo()
