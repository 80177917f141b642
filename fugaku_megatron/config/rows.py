"""Tables of a block's variants: norms, their placement and activations; names of the other choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

Q8_BLOCK = 64  # neighbouring input columns of a weight in eight bits that share a scale


class NormKernel(NamedTuple):
    """A norm in the C++ kernels, over the hidden dimension and over heads.

    bias: has a bias next to the weight
    in_rotary: the rotary kernels norm queries and keys with it
    """

    bias: bool
    in_rotary: bool


class NormPart(NamedTuple):
    """A norm over the hidden dimension.

    layer: "module:class", a subclass of `nn.layers.Norm` imported when a stage is built
    vectors: parameters with h elements each
    statistics: FP32 numbers per row that backward needs in addition to the input
    kernel: of the C++ kernels, which then also norm queries and keys; None: `layer` computes the norm with torch
    gguf: name of the epsilon in GGUF
    megatron: True for a value of Megatron-LM's --normalization
    """

    layer: str
    vectors: int
    statistics: int
    kernel: NormKernel | None = None
    gguf: str = "layer_norm_eps"
    megatron: bool = False


NORMS = {
    "LayerNorm": NormPart(
        layer="fugaku_megatron.nn.layers:LayerNorm",
        vectors=2,
        statistics=2,
        kernel=NormKernel(bias=True, in_rotary=False),
        megatron=True,
    ),
    "RMSNorm": NormPart(
        layer="fugaku_megatron.nn.layers:RMSNorm",
        vectors=1,
        statistics=1,
        kernel=NormKernel(bias=False, in_rotary=True),
        gguf="layer_norm_rms_eps",
        megatron=True,
    ),
    "PlainLayerNorm": NormPart(
        layer="fugaku_megatron.nn.layers:PlainLayerNorm", vectors=0, statistics=2
    ),
    "LayerNormWithoutBias": NormPart(
        layer="fugaku_megatron.nn.layers:LayerNormWithoutBias", vectors=1, statistics=2
    ),
}


class NormPosition(NamedTuple):
    """Norms around attention and around the MLP.

    before: their input is normalised
    after: their output is normalised before it is added to the residual
    """

    before: bool
    after: bool


NORM_PLACEMENTS = {
    "pre": NormPosition(before=True, after=False),
    "post": NormPosition(before=False, after=True),
    "both": NormPosition(before=True, after=True),
}


class ActivationPart(NamedTuple):
    """An activation between an MLP's two matmuls.

    function: "module:name", imported when a stage is built: (pre-activation, settings, parameters) -> value (rows, f), by torch
    gated: the first matmul has two outputs, gates and the values that they multiply
    kernel: name in the C++ kernels; None: torch computes the activation, also between C++ matmuls
    flag: field that selects the activation; None: --activation-func selects it by name
    gelu: True for a GELU, which the MLP has without a flag
    yaml: value of activation_func in Megatron-LM's YAML files
    settings: fields whose values the function takes
    parameters: scalars that each layer trains, and the value at which they start
    """

    function: str
    gated: bool = False
    kernel: str | None = None
    flag: str | None = None
    gelu: bool = False
    yaml: str | None = None
    settings: tuple[str, ...] = ()
    parameters: Mapping[str, float] = MappingProxyType({})


_FUNCTIONS = "fugaku_megatron.nn.ops.activation"
# xIELU's parameters and their softplus in the beginning, whose inverse is log(exp(x) - 1) (Huang and Schlag 2024, arXiv:2411.13010).
XIELU = {"alpha_p": 0.8, "alpha_n": 0.3}
ACTIVATIONS = {
    "swiglu": ActivationPart(
        function=f"{_FUNCTIONS}:swiglu", gated=True, kernel="silu", flag="swiglu", yaml="swiglu"
    ),
    "geglu": ActivationPart(
        function=f"{_FUNCTIONS}:geglu", gated=True, kernel="gelu", flag="geglu"
    ),
    "quick_geglu": ActivationPart(
        function=f"{_FUNCTIONS}:quick_geglu",
        gated=True,
        flag="quick_geglu",
        settings=("activation_func_clamp_value", "glu_linear_offset"),
    ),
    "xielu": ActivationPart(
        function=f"{_FUNCTIONS}:xielu",
        flag="xielu",
        parameters={name: math.log(math.expm1(start)) for name, start in XIELU.items()},
    ),
    "squared_relu": ActivationPart(
        function=f"{_FUNCTIONS}:squared_relu",
        kernel="squared_relu",
        flag="squared_relu",
        yaml="squaredrelu",
    ),
    "gelu": ActivationPart(
        function=f"{_FUNCTIONS}:gelu", kernel="gelu", flag="openai_gelu", gelu=True
    ),
    "gelu_exact": ActivationPart(
        function="torch.nn.functional:gelu",
        kernel="gelu_exact",
        flag="no_bias_gelu_fusion",
        gelu=True,
        yaml="gelu",
    ),
}

# Values of --softmax-type.
VANILLA = "vanilla"
OFF_BY_ONE = "off-by-one"
LEARNABLE = "learnable"

MLP_OF_EXPERTS = "experts"  # in place of an activation, in a layer with experts

# Values of --mask-vocab-padding.
UNRESOLVED = "auto"
MASKED = "yes"
COUNTED = "no"

LEARNED = "learned_absolute"
ROPE = "rope"
YARN = "yarn"
NO_POSITIONS = "none"
POSITION_TYPES = (LEARNED, ROPE, YARN, NO_POSITIONS)

FFN_MULTIPLE = 64  # the default width of a gated MLP is a multiple, as in Megatron-LM
HEAD_MULTIPLE = 4  # the C++ attention kernels take head sizes that are a multiple
