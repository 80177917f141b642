"""The choice between the backend's kernels and PyTorch's, and the features of PyTorch around it."""

import importlib
import threading
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from fugaku_megatron import torch_backend
from fugaku_megatron.torch_backend import build, operators

pytestmark = pytest.mark.unit

SIDE = 128  # of matrices whose product is served
KINDS = ("torch", "native", "auto")
DISPATCH = build.load()


def matrix():
    return torch.randn(SIDE, SIDE)


def served(name="mm"):
    """Return (calls, served calls) of an operator."""
    for row in DISPATCH.counts():
        if row[0] == name:
            return row[1:3]
    return (0, 0)


@pytest.fixture
def counted():
    """Count every call inside a test; give a function that returns the counts since then."""
    DISPATCH.count(True)
    before = served()
    yield lambda: tuple(now - then for now, then in zip(served(), before))
    DISPATCH.count(False)


def test_kernels_are_chosen_by_name():
    for kernels in KINDS:
        with torch_backend.enabled(kernels=kernels):
            assert DISPATCH.in_use() == kernels
    with torch_backend.enabled(False):
        assert DISPATCH.in_use() == "torch"
    assert DISPATCH.in_use() == "auto"
    with pytest.raises(ValueError, match="expected one of auto, native, torch, got fast"):
        torch_backend.use("fast")


def test_small_calls_and_other_types_are_not_served(counted):
    small = torch.randn(32, 32)
    with torch_backend.enabled(kernels="native"):
        small @ small
        matrix().double() @ matrix().double()
        assert counted() == (2, 0)
        matrix() @ matrix()
        assert counted() == (3, 1)


def test_a_second_import_changes_nothing():
    with torch_backend.enabled(kernels="native"):
        importlib.reload(torch_backend)
        assert DISPATCH.in_use() == "native"
    assert build.load() is DISPATCH


def test_the_first_calls_of_a_shape_run_on_both_sides(counted):
    """Auto: one warm-up and three timed calls of each; later calls on the faster side."""
    a = torch.randn(SIDE + 1, SIDE)
    b = torch.randn(SIDE, SIDE + 3)
    with torch_backend.enabled():
        for _ in range(8):
            a @ b
        assert counted() == (8, 4)
        for _ in range(5):
            a @ b
        assert counted()[1] in (4, 9)


@contextmanager
def mm_served_by(serve):
    """Replace the function that serves matrix products inside the block."""
    family = operators.FAMILIES[0]
    DISPATCH.set("mm", serve, family.smallest)
    try:
        yield
    finally:
        DISPATCH.set("mm", family.serve["mm"], family.smallest)


def test_refused_calls_leave_the_choice(counted):
    """A shape that `serve` refuses once is PyTorch's."""
    calls = []

    def refuse(*arguments):
        calls.append(arguments)
        return NotImplemented

    a = torch.randn(SIDE + 5, SIDE)
    with mm_served_by(refuse), torch_backend.enabled():
        for _ in range(12):
            a @ a.t()
    assert len(calls) == 1
    assert counted() == (12, 0)


def test_an_error_of_a_kernel_is_raised_where_the_operator_is_called():
    def fail(*arguments):
        raise ZeroDivisionError("a kernel's error")

    with mm_served_by(fail), torch_backend.enabled(kernels="native"):
        with pytest.raises(ZeroDivisionError, match="a kernel's error"):
            matrix() @ matrix()
        weight = matrix().requires_grad_()
        with pytest.raises(ZeroDivisionError):
            torch.linalg.multi_dot([weight, matrix(), matrix()])


def test_native_and_deterministic_programs_have_one_kernel(counted):
    a = torch.randn(SIDE + 7, SIDE)
    torch.use_deterministic_algorithms(True)
    try:
        with torch_backend.enabled():
            bits = [a @ a.t() for _ in range(9)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert counted() == (9, 9)
    assert all(torch.equal(each, bits[0]) for each in bits)


def gradients(dtype=torch.float32):
    """Return a loss of an MLP and its gradients."""
    torch.manual_seed(5)
    layers = torch.nn.Sequential(
        torch.nn.Linear(SIDE, 2 * SIDE), torch.nn.GELU(), torch.nn.Linear(2 * SIDE, SIDE)
    )
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = layers(matrix()).square().mean()
    loss.backward()
    return [loss.detach(), *(each.grad for each in layers.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_and_autocast(dtype):
    with torch_backend.enabled(kernels="native"):
        ours = gradients(dtype)
    with torch_backend.enabled(False):
        expected = gradients(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip(ours, expected):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.abs().max())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode, counted):
    weight = torch.nn.Parameter(matrix())
    with torch_backend.enabled(kernels="native"), mode():
        product = matrix() @ weight
    assert not product.requires_grad
    assert counted() == (1, 1)


def test_fake_tensors_and_default_devices(counted):
    with torch_backend.enabled(kernels="native"):
        with FakeTensorMode():
            assert (torch.empty(SIDE, SIDE) @ torch.empty(SIDE, SIDE)).shape == (SIDE, SIDE)
        assert counted() == (0, 0)
        a = matrix()
        with torch.device("meta"):
            assert (a @ a).device.type == "cpu"
        assert counted() == (1, 1)


def test_modes_of_a_program_see_its_own_calls():
    class Names(TorchFunctionMode):
        def __init__(self):
            self.names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    a = matrix()
    with torch_backend.enabled(kernels="native"), Names() as names:
        torch.mm(a, a)
    assert names.names == ["mm"]


def test_the_profiler_names_the_operator():
    a = matrix()
    with torch_backend.enabled(kernels="native"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            a @ a
    assert "aten::mm" in {event.key for event in profile.key_averages()}


def test_threads_share_the_choice(counted):
    a = torch.randn(SIDE + 9, SIDE)
    with torch_backend.enabled(False):
        expected = a.double() @ a.t().double()
    wrong = []

    def multiply():
        for _ in range(20):
            if not torch.allclose((a @ a.t()).double(), expected, rtol=1e-4, atol=1e-3):
                wrong.append(1)

    with torch_backend.enabled():
        threads = [threading.Thread(target=multiply) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert not wrong
    assert counted()[0] == 80


class Products(Dataset):
    """Samples that a worker of a DataLoader computes."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        a = torch.full((SIDE, SIDE), float(index))
        return (a @ a)[0, 0], torch.tensor(served()[1])


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader(start):
    """Both kinds of workers compute; a spawned one serves if the data set's module imports the backend."""
    with torch_backend.enabled(kernels="native"):
        matrix() @ matrix()
        loader = DataLoader(Products(), num_workers=2, multiprocessing_context=start)
        values = [value.item() for value, _ in loader]
    assert values == [0.0, float(SIDE)]
