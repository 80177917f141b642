"""Properties in which the layers of a model differ, and the patterns of flags that set them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from .fields import check, flag

MAX_PATTERN = 4096  # layers
LAYERS = "kinds of layers"  # topic of flags that spell them

ATTENTION = "attention"
MULTI_LATENT_ATTENTION = "multi_latent_attention"
GATED_DELTA_NET = "gated_delta_net"

# Linear layers of a layer, as in Megatron-LM.
QKV = "linear_qkv"
PROJ = "linear_proj"
FC1 = "linear_fc1"
FC2 = "linear_fc2"
IN_PROJ = "in_proj"
OUT_PROJ = "out_proj"
EH_PROJ = "eh_proj"  # of an MTP module
Q_PROJ = "linear_q_proj"
Q_DOWN = "linear_q_down_proj"
Q_UP = "linear_q_up_proj"
KV_DOWN = "linear_kv_down_proj"
KV_UP = "linear_kv_up_proj"
UP_PROJECTIONS = (Q_PROJ, Q_UP, KV_UP)  # to the heads of latent attention


class MixerPart(NamedTuple):
    """A part of a layer that mixes tokens of a sequence.

    layer: "module:class" with the module of a layer, built as `layer(name, layer number, context)`
    symbol: letter in --hybrid-layer-pattern and --layer-types
    linears: linear layers whose outputs tensor-parallel ranks share, then the output projection; `costs` says which ones a model has
    costs: "module:class", a `costs.mixers.MixerCosts`
    replicated: linear layers that every tensor-parallel rank has
    softmax: softmax attention, with a window, rope and a cache of keys and values
    stateful, norms: modules with a state in Transformer Engine, always or with --qk-layernorm
    fused: norm -> linear layer with whose name Megatron-LM saves the norm
    fused_locally: Megatron-LM's layers without Transformer Engine save `fused` norms, and the MLP's, with these names too
    """

    layer: str
    symbol: str
    linears: tuple[str, ...]
    costs: str
    replicated: tuple[str, ...] = ()
    softmax: bool = False
    stateful: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    fused: Mapping[str, str] = MappingProxyType({})
    fused_locally: bool = True


MIXERS = {
    ATTENTION: MixerPart(
        layer="fugaku_megatron.nn.attention.self_attention:SelfAttention",
        symbol="*",
        linears=(QKV, PROJ),
        softmax=True,
        stateful=("core_attention",),
        norms=("q_layernorm", "k_layernorm"),
        fused={"input_layernorm": QKV},
        costs="fugaku_megatron.costs.attention:AttentionCosts",
    ),
    MULTI_LATENT_ATTENTION: MixerPart(
        layer="fugaku_megatron.nn.attention.multi_latent_attention:MultiLatentAttention",
        symbol="+",
        linears=(*UP_PROJECTIONS, PROJ),
        replicated=(Q_DOWN, KV_DOWN),
        softmax=True,
        stateful=("core_attention",),
        fused={"self_attention.q_layernorm": Q_UP, "self_attention.kv_layernorm": KV_UP},
        fused_locally=False,
        costs="fugaku_megatron.costs.multi_latent_attention:LatentAttentionCosts",
    ),
    GATED_DELTA_NET: MixerPart(
        layer="fugaku_megatron.nn.delta_net:GatedDeltaNet",
        symbol="G",
        linears=(IN_PROJ, OUT_PROJ),
        stateful=("out_norm",),
        fused={"input_layernorm": IN_PROJ},
        costs="fugaku_megatron.costs.delta_net:DeltaNetCosts",
    ),
}


def replicated() -> tuple[str, ...]:
    """Return the linear layers that every tensor-parallel rank has."""
    return tuple(name for row in MIXERS.values() for name in row.replicated)


def head_projections() -> tuple[str, ...]:
    """Return the linear layers of mixers whose outputs tensor-parallel ranks share."""
    return tuple(name for row in MIXERS.values() for name in row.linears[:-1])


def input_projections() -> tuple[str, ...]:
    """Return the linear layers of mixers besides their output projections."""
    return (*head_projections(), *replicated())


def column_parallel() -> tuple[str, ...]:
    """Return the linear layers whose outputs tensor-parallel ranks share."""
    return (*head_projections(), FC1, EH_PROJ)


def row_parallel() -> tuple[str, ...]:
    """Return the linear layers whose inputs tensor-parallel ranks share."""
    return (*(row.linears[-1] for row in MIXERS.values()), FC2)


# Symbols of the MLPs of a layer.
DENSE_SYMBOL = "-"
EXPERTS_SYMBOL = "E"
MLP_SYMBOLS = (DENSE_SYMBOL, EXPERTS_SYMBOL)

# Keys of `ModelConfig.ropes`.
GLOBAL = "global"
LOCAL = "local"


class LayerKind(NamedTuple):
    """One layer of a model.

    mixer: key in `MIXERS`; None: the layer has an MLP alone
    mlp: key in `ACTIVATIONS`, or MLP_OF_EXPERTS; None: the layer has a mixer alone
    window: tokens that a token attends to, including itself; None: all before it
    rope: key in `ModelConfig.ropes`; None: queries and keys are not rotated
    predicts: the layer belongs to an MTP module
    """

    mixer: str | None
    mlp: str | None
    window: int | None
    rope: str | None
    predicts: bool = False

    @property
    def has_softmax(self) -> bool:
        """True for a layer with softmax attention."""
        return self.mixer is not None and MIXERS[self.mixer].softmax


def layer_symbols(text: str, layers: int) -> tuple[str, ...]:
    """Return the symbols of each layer in --layer-types, or raise ValueError."""
    mixers = [row.symbol for row in MIXERS.values()]
    known = {*mixers, *MLP_SYMBOLS, *(mixer + mlp for mixer in mixers for mlp in MLP_SYMBOLS)}
    found = tuple(text.split(","))
    wrong = [symbols for symbols in found if symbols not in known]
    check(
        not wrong,
        f"--layer-types {text!r:.60} has {(wrong or [''])[0]!r:.20}: pass {' or '.join(mixers)}, - or E, or "
        "one of each, for every layer, separated by commas",
    )
    check(
        len(found) == layers,
        f"--layer-types {text!r:.60} has {len(found)} layers, and --num-layers is {layers}: change one",
    )
    return found


def layer_pattern(name: str, text: str, layers: int) -> int | tuple[bool, ...]:
    """Return the number N or the list of 0 and 1 in a field. Raises ValueError for other text."""
    mistake = f"{flag(name)} {text!r:.60}: pass a number above 0, or a list of 0 and 1, such as ([0]*1+[1]*23)"
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(mistake) from None
    if isinstance(found, int):
        check(found > 0, mistake)
        return found
    check(all(x in (0, 1) for x in found), mistake)
    check(
        len(found) == layers,
        f"{flag(name)} {text:.60} has {len(found)} layers, and --num-layers is {layers}: change one",
    )
    return tuple(map(bool, found))


# Field -> True for a layer, from 0, that a number N in the field marks.
MARKED: dict[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda layer, n: layer % n == 0,
    "window_attn_skip_freq": lambda layer, n: (layer + 1) % n != 0,
    "linear_attention_freq": lambda layer, n: (layer + 1) % n != 0,
    "no_rope_freq": lambda layer, n: (layer + 1) % n == 0,
}


@lru_cache(maxsize=64)
def marked_layers(name: str, text: str, layers: int) -> tuple[bool, ...]:
    """Return True for each layer that a field marks with a number or a list, or raise ValueError."""
    found = layer_pattern(name, text, layers)
    if isinstance(found, int):
        return tuple(MARKED[name](layer, found) for layer in range(layers))
    return found


def _value(node: ast.expr) -> int | Sequence[int]:
    """Evaluate integers, integer lists, and their sums and repetitions. Raises ValueError for other
    code.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        numbers = [_value(element) for element in node.elts]
        if all(isinstance(number, int) for number in numbers):
            return [number for number in numbers if isinstance(number, int)]
    if isinstance(node, ast.BinOp):
        combined = _combined(node.op, _value(node.left), _value(node.right))
        if combined is not None:
            return combined
    raise ValueError(ast.dump(node))


def _combined(
    operator: ast.operator, left: int | Sequence[int], right: int | Sequence[int]
) -> int | list[int] | None:
    """Return the sum of two numbers or lists, or the repetition of a list; None if it is neither or too long."""
    if isinstance(left, int):
        left, right = right, left
    if isinstance(left, int):
        if isinstance(operator, ast.Add) and isinstance(right, int):
            return left + right
        return None
    if isinstance(right, int):
        if isinstance(operator, ast.Mult) and 0 <= len(left) * right <= MAX_PATTERN:
            return list(left) * right
    elif isinstance(operator, ast.Add) and len(left) + len(right) <= MAX_PATTERN:
        return [*left, *right]
    return None
