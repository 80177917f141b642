"""PyTorch's own samples of its operators (op_db) and optimizers (optim_db): with the kernels a call ends as it does without."""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import hypothesis
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from fugaku_megatron.torch_backend import enabled
from tests.checks.torch_backend import counting, serving

pytestmark = pytest.mark.unit

DTYPES = [torch.float32, torch.bfloat16]
# Relative to the largest number of a call: a few units of the last place. PyTorch's second derivatives in BF16 round each intermediate.
TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 2e-2}


class Sampled(NamedTuple):
    """An operator of op_db.

    served: replaced ATen operators that its samples reach
    others: what op_db has of it beside samples: an argument out, a variant in place, wrong inputs
    limits: its gradient at infinity is the limit, where PyTorch returns NaN, so infinite samples are left out
    left: layouts that reach other operators or that stay with PyTorch
    """

    name: str
    served: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    variant: str = ""
    limits: bool = False
    left: tuple[str, ...] = ()


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
LAYER_NORM = ("native_layer_norm", "native_layer_norm_backward")
OPERATORS = (
    Sampled("mm", ("mm",), ("out",)),
    Sampled("addmm", ("mm",), ("out", "in place")),
    Sampled("addmm", ("addmm", "mm"), ("out", "in place"), "decomposed"),
    Sampled("bmm", ("bmm",), ("out",)),
    Sampled("matmul", ("mm", "bmm"), ("out",)),
    Sampled("nn.functional.linear", ("mm", "addmm"), ("out",)),
    Sampled(
        "nn.functional.scaled_dot_product_attention",
        (ATTENTION, f"{ATTENTION}_backward"),
        left=("every second", "transposed", "broadcast"),
    ),
    Sampled("native_layer_norm", LAYER_NORM, ("errors",)),
    Sampled("nn.functional.layer_norm", LAYER_NORM),
    Sampled("nn.functional.rms_norm", ("rms_norm",), ("errors",), left=("negative",)),
    Sampled("nn.functional.gelu", ("gelu", "gelu_backward"), ("out", "errors")),
    Sampled("nn.functional.silu", ("silu", "silu_backward"), ("in place",), limits=True),
    Sampled("nn.functional.embedding", ("embedding_dense_backward",), ("errors",)),
    Sampled("nn.functional.cross_entropy", ("cross_entropy_loss",), left=("negative",)),
)


@functools.cache
def databases():
    """Return PyTorch's op_db and optim_db. Their import changes settings of the process, which are restored."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_optimizers import optim_db

    setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)
    hypothesis.settings.load_profile("default")
    return op_db, optim_db


@pytest.fixture
def info(sampled):
    """Return op_db's row of a test's operator."""
    op_db, _ = databases()
    (info,) = [
        each
        for each in op_db
        if (each.name, each.variant_test_name) == (sampled.name, sampled.variant)
    ]
    return info


# Layouts of a sample's tensors.


def transposed(x):
    return x.mT.contiguous().mT if x.dim() > 1 else x


def unaligned(x):
    """Return a copy whose address is no multiple of 4 bytes, or of 8."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def broadcast(x):
    """Repeat the first column of a floating-point tensor without memory for the repetitions."""
    return x[..., :1].clone().expand(x.shape) if x.dim() and x.is_floating_point() else x


def negative(x):
    """Return the values of x as a view that negates its memory."""
    return torch._neg_view(-x) if x.is_floating_point() else x


def swapped_leading(x):
    """Store the second dimension outside the first one."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 2 else x


def leaves(change):
    """Apply a function of a detached tensor to the tensors of a sample."""

    def of_tensor(x):
        if not isinstance(x, torch.Tensor):
            return x
        return change(x.detach()).detach().requires_grad_(x.requires_grad)

    return lambda sample: [sample.transform(of_tensor)]


def empty(sample):
    """Yield the sample once for each of its sizes, with the dimensions of this size empty."""
    values = (sample.input, sample.args, sample.kwargs)
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    for size in {size for x in tensors for size in x.shape}:

        def without(x, size=size):
            if isinstance(x, torch.Tensor):
                index = [slice(0) if each == size else slice(None) for each in x.shape]
                return x.detach()[tuple(index)].clone().requires_grad_(x.requires_grad)
            return x

        shrunk = sample.transform(without)
        shrunk.args = tuple(
            [0 if each == size else each for each in value]
            if isinstance(value, tuple | list) and all(type(each) is int for each in value)
            else value
            for value in shrunk.args
        )
        yield shrunk


LAYOUTS = {
    "contiguous": lambda sample: [sample],
    "every second": lambda sample: [sample.noncontiguous()],
    "transposed": leaves(transposed),
    "swapped leading": leaves(swapped_leading),
    "unaligned": leaves(unaligned),
    "broadcast": leaves(broadcast),
    "negative": leaves(negative),
    "empty": empty,
}


# What a call ends with.


class Outcome(NamedTuple):
    """Tensors of a call, in turn its inputs, values, gradients and second gradients, up to its error. ends: warnings and error"""

    tensors: list[torch.Tensor]
    ends: str


def attempt(call: Callable[[list[torch.Tensor]], None]) -> Outcome:
    """Run call(tensors), which appends its tensors."""
    tensors: list[torch.Tensor] = []
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call(tensors)
            error = ""
        except Exception as raised:  # any error is to be the same
            error = f"{type(raised).__name__}: {raised}"
    told = [str(each.message) for each in caught if each.category is UserWarning]
    return Outcome(tensors, "\n".join([*told, error]))


def floats(values):
    return [
        x
        for x in pytree.tree_leaves(values)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]


def inputs_of(sample):
    return floats((sample.input, sample.args, sample.kwargs))


def called(function, sample, **options):
    return function(sample.input, *sample.args, **sample.kwargs, **options)


def differentiate(values, inputs, tensors):
    """Append the gradients and second gradients of the values with respect to the inputs that want one.

    The values get random gradients, an expanded one as from a sum, and a negative view; strides are compared with the first alone.
    """
    outputs = [y for y in values if y.requires_grad]
    inputs = [x for x in inputs if x.requires_grad]
    if not outputs or not inputs:
        return
    random = torch.Generator().manual_seed(1)

    def draw(x):
        return torch.randn(x.shape, generator=random).to(x.dtype)

    directions = [draw(y).requires_grad_() for y in outputs]
    expanded = [y.new_ones(()).expand(y.shape) for y in outputs]
    for given in (expanded, [negative(y.detach()) for y in outputs]):
        first = torch.autograd.grad(outputs, inputs, given, allow_unused=True, retain_graph=True)
        tensors += [x.contiguous() for x in first if x is not None]
    first = torch.autograd.grad(outputs, inputs, directions, allow_unused=True, retain_graph=True)
    tensors += [x for x in first if x is not None]
    first = torch.autograd.grad(outputs, inputs, directions, allow_unused=True, create_graph=True)
    first = [x for x in first if x is not None and x.requires_grad]
    tensors += first
    if first:
        second = torch.autograd.grad(
            first, [*inputs, *directions], [draw(x) for x in first], allow_unused=True
        )
        tensors += [x for x in second if x is not None]


def of_sample(function, sample):
    """Return a call of the function with a sample, and its derivatives."""

    def call(tensors):
        inputs = inputs_of(sample)
        values = floats(called(function, sample))
        tensors += [*inputs, *values]
        differentiate(values, inputs, tensors)

    return call


def layout(x):
    """Return shape, dtype and the strides that matter."""
    strides = [stride for size, stride in zip(x.shape, x.stride()) if size > 1]
    return x.shape, x.dtype, strides if x.numel() else None


def largest(tensors):
    """Return the largest finite magnitude, at least 1."""
    finite = [x.detach()[x.detach().isfinite()].double().abs() for x in tensors]
    return max(float(x.max()) if x.numel() else 0.0 for x in (torch.ones(1), *finite))


def assert_same(call, case):
    """Assert that a call ends with the kernels as it does without them."""
    with enabled(False):
        want = attempt(call)
    with serving():
        got = attempt(call)
    assert got.ends == want.ends, case
    assert len(got.tensors) == len(want.tensors), case
    top = largest(want.tensors)
    for number, (ours, torchs) in enumerate(zip(got.tensors, want.tensors, strict=True)):
        where = f"{case}: tensor {number}"
        assert layout(ours) == layout(torchs), where
        tolerance = TOLERANCES.get(ours.dtype, 0.0)
        torch.testing.assert_close(
            ours,
            torchs,
            rtol=tolerance,
            atol=tolerance * top,
            equal_nan=True,
            msg=lambda text, where=where: f"{where}: {text}",
        )


def each_operator(having=""):
    """Run a test for the operators that op_db has a variant of."""
    rows = [row for row in OPERATORS if not having or having in row.others]
    return pytest.mark.parametrize("sampled", rows, ids=lambda row: row.name + row.variant)


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_operator()
def test_the_table_has_what_op_db_has(sampled, info):
    found = {
        "out": info.supports_out,
        "in place": info.inplace_variant is not None,
        "errors": info.error_inputs_func is not None,
    }
    assert sampled.others == tuple(name for name, exists in found.items() if exists)


@each_operator()
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_derivatives(sampled, info, dtype, layout):
    draw = info.reference_inputs if layout == "contiguous" else info.sample_inputs
    if layout == "empty" and "attention" in info.name and torch.__version__.startswith("2.9."):
        pytest.skip("torch 2.9's attention divides by the number of heads, which is 0")
    served = {}
    with counting(served):
        for sample in draw("cpu", dtype, requires_grad=True):
            if sampled.limits and not sample.input.isfinite().all():
                continue
            for changed in LAYOUTS[layout](sample):
                assert_same(of_sample(info, changed), changed.summary())
    is_left = layout in ("empty", *sampled.left)
    assert all(bool(served.get(name)) != is_left for name in sampled.served), served


def in_place(info, sample):
    """Return a call of the operator's in-place variant on a copy with the input's strides, and its derivatives."""

    def call(tensors):
        leaf = sample.input.detach().requires_grad_(sample.input.requires_grad)
        target = leaf.as_strided(leaf.shape, leaf.stride()).clone()
        result = info.inplace_variant(target, *sample.args, **sample.kwargs)
        assert result is target
        tensors.append(result)
        differentiate([result], floats((leaf, sample.args, sample.kwargs)), tensors)

    return call


@each_operator("in place")
@each_dtype
def test_in_place(info, dtype):
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        if sample.broadcasts_input:
            continue
        for layout in LAYOUTS.values():
            for changed in layout(sample):
                assert_same(in_place(info, changed), changed.summary())


# Outputs that a caller passes: functions of the expected value.
OUTPUTS = {
    "same layout": torch.empty_like,
    "every second": lambda y: y.new_empty((*y.shape, 2))[..., 1],
    "transposed": lambda y: transposed(torch.empty_like(y)),
    "unaligned": lambda y: y.new_empty(y.numel() + 1)[1:].view(y.shape),
    "resized": lambda y: y.new_empty(0),
    "wrong shape": lambda y: y.new_empty((*y.shape, 2)),
    "elements in one place": lambda y: y.new_empty(1).expand(y.shape),
    "double": lambda y: torch.empty_like(y, dtype=torch.float64),
    "integer": lambda y: torch.empty_like(y, dtype=torch.int64),
    "wants a gradient": lambda y: torch.empty_like(y).requires_grad_(),
}
# Differences that are no fault of the backend: (operator, output) -> reason.
SKIPPED_OUTPUTS = {
    ("nn.functional.gelu", "transposed"): "torch 2.13 writes a transposed out in the input's order",
}


def into(info, sample, output):
    """Return a call that writes the operator's value to an output."""

    def call(tensors):
        with torch.no_grad():
            value = called(info, sample)
            torch.manual_seed(0)
            out = output(value)
            if not out.requires_grad:
                out.fill_(7)
        address = out.data_ptr()
        result = called(info.op, sample, out=out)
        assert result is out
        tensors += [out.detach(), torch.tensor(out.data_ptr() == address)]

    return call


@each_operator("out")
@each_dtype
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(sampled, info, dtype, kind):
    if reason := SKIPPED_OUTPUTS.get((sampled.name, kind)):
        pytest.skip(reason)
    for sample in info.sample_inputs("cpu", dtype):
        assert_same(into(info, sample, OUTPUTS[kind]), sample.summary())


@pytest.mark.parametrize("sampled", [Sampled("addmm"), Sampled("nn.functional.gelu")])
def test_output_that_is_an_input(info):
    """Only of operators whose values PyTorch defines then."""

    def call(tensors):
        target = sample.input.clone()
        result = info.op(target, *sample.args, **sample.kwargs, out=target)
        tensors.append(result)

    for sample in info.sample_inputs("cpu", torch.float32):
        if not sample.broadcasts_input:
            assert_same(call, sample.summary())


@each_operator("errors")
def test_errors(info):
    for wrong in info.error_inputs("cpu"):
        sample = wrong.sample_input
        assert_same(of_sample(info, sample), sample.summary())
        with serving(), pytest.raises(wrong.error_type, match=wrong.error_regex):
            called(info, sample)


def tangents(sample, wanted):
    """Return the sample with a tangent for each tensor of `wanted`."""
    random = torch.Generator().manual_seed(2)

    def dual(x):
        if not any(x is each for each in wanted):
            return x
        return forward_ad.make_dual(x.detach(), torch.randn(x.shape, generator=random).to(x.dtype))

    parts = (sample.input, sample.args, sample.kwargs)
    return pytree.tree_map_only(torch.Tensor, dual, parts)


def forward_mode(info, sample):
    """Return a call that appends a value's forward-mode derivative in each tensor alone, then in all."""
    inputs = [x for x in inputs_of(sample) if x.requires_grad]

    def call(tensors):
        for wanted in [inputs, *([x] for x in inputs)]:
            with forward_ad.dual_level():
                first, arguments, options = tangents(sample, wanted)
                for y in floats(info(first, *arguments, **options)):
                    tensors += [x for x in forward_ad.unpack_dual(y) if x is not None]

    return call


@each_operator()
@each_dtype
def test_forward_mode(info, dtype):
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        assert_same(forward_mode(info, sample), sample.summary())


def batched(info, sample):
    """Return a call that appends the gradients for a batch of directions, and values and gradients under vmap."""

    def call(tensors):
        inputs = [x for x in inputs_of(sample) if x.requires_grad]
        values = floats(called(info, sample))
        tensors += [*inputs, *values]
        outputs = [y for y in values if y.requires_grad]
        random = torch.Generator().manual_seed(3)
        directions = [torch.randn((2, *y.shape), generator=random).to(y.dtype) for y in outputs]
        first = torch.autograd.grad(
            outputs, inputs, directions, allow_unused=True, is_grads_batched=True
        )
        tensors += [x for x in first if x is not None]

        def value(x):
            return floats(info(x, *sample.args, **sample.kwargs))[0]

        samples = torch.stack([sample.input.detach(), 0.5 * sample.input.detach()])
        tensors.append(torch.vmap(value, randomness="same")(samples).detach())
        if value(samples[0]).is_floating_point():
            slope = torch.func.grad(lambda x: value(x).float().sum())
            tensors.append(torch.vmap(slope, randomness="same")(samples).detach())

    return call


@each_operator()
@each_dtype
def test_batches(sampled, info, dtype):
    if sampled.name == "nn.functional.embedding":
        pytest.skip("op_db passes the weight first, which has no batch")
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        assert_same(batched(info, sample), sample.summary())


@each_operator()
@each_dtype
def test_fake_tensors_have_the_layouts_of_real_ones(info, dtype):
    """torch.compile trusts them."""

    def layouts(sample):
        return [layout(y) for y in floats(called(info, sample))]

    for sample in info.sample_inputs("cpu", dtype):
        with serving(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = layouts(
                sample.transform(
                    lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
                )
            )
        with serving():
            assert layouts(sample) == fake, sample.summary()


@each_operator()
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traces_have_the_operators_of_torch(info):
    sample = next(iter(info.sample_inputs("cpu", torch.float32)))

    def graph():
        def function(x):
            return info(x, *sample.args, **sample.kwargs)

        return str(torch.jit.trace(function, sample.input, check_trace=False).inlined_graph)

    with enabled(False):
        want = graph()
    with serving():
        assert graph() == want


def parameters(dtype):
    """Return parameters of a model: matrices, also a transposed one, a vector, a number and an empty tensor."""
    random = torch.Generator().manual_seed(4)
    shapes = ((5, 7), (3, 2, 4), (9,), (), (0,), (600, 40))
    tensors = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    tensors.append(torch.randn(6, 4, generator=random).to(dtype).t())
    return [torch.nn.Parameter(x) for x in tensors]


def steps(optimizer_class, options, dtype, scaled):
    """Return a call that makes five steps, the third without a gradient of the first parameter."""

    def call(tensors):
        weights = parameters(dtype)
        groups = options.params or [{"params": weights[:3]}, {"params": weights[3:], "lr": 0.02}]
        optimizer = optimizer_class(groups, fused=True, **options.kwargs)
        random = torch.Generator().manual_seed(5)
        if scaled:
            optimizer.grad_scale = torch.tensor(4.0)
        for step in range(5):
            if scaled:
                optimizer.found_inf = torch.tensor(float(step == 2))
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=random).to(dtype)
            if step == 2:
                weights[0].grad = None
            optimizer.step()
        tensors += [weight.detach() for weight in weights]
        for state in optimizer.state.values():
            tensors += [state[name] for name in sorted(state)]

    return call


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "gradient scaler"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_optimizers(name, dtype, scaled):
    (info,) = [each for each in databases()[1] if each.optim_cls.__name__ == name]
    served = {}
    with counting(served):
        for options in info.optim_inputs_func(device="cpu", dtype=dtype):
            for extra in ({}, {"lr": torch.tensor(0.01)}, {"betas": (0.0, 0.5)}, {"eps": 0.0}):
                case = type(options)(options.params, {**options.kwargs, **extra})
                assert_same(steps(info.optim_cls, case, dtype, scaled), (case, scaled))
    if dtype == torch.float32 and not scaled:
        assert served.get(f"_fused_{name.lower()}_")


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_errors_of_optimizers(name):
    (info,) = [each for each in databases()[1] if each.optim_cls.__name__ == name]
    for wrong in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        options = wrong.optimizer_error_input

        def call(tensors, options=options):
            tensors.clear()
            optimizer = info.optim_cls(
                options.params or parameters(torch.float32), **options.kwargs
            )
            optimizer.step()

        assert_same(call, options)
