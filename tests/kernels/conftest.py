"""Fixtures: vector targets of this CPU, thread counts, the scalar reference."""

import pytest
import torch

from fugaku_megatron.host import kernels

LEFT_OUT = [
    pytest.param(row["name"], marks=pytest.mark.skip(reason=row["reason"]))
    for row in kernels.targets()
    if row["reason"].startswith("left out")
]  # by KERNEL_TARGETS
VECTOR_TARGETS = [*kernels.runnable_targets(emulated=True), *LEFT_OUT]


# These targets have their own matmuls, and the kernels of another target for everything else.
OWN_GEMM = {"avx2vnni", "avx512vnni"}


def pytest_collection_modifyitems(config, items):
    """Deselect the other targets for --best-target, and kernels that a target takes from another."""
    taken = [
        item
        for item in items
        if not {"gemm", "bench"} & set(item.path.stem.split("_"))
        and OWN_GEMM
        & set(map(str, getattr(getattr(item, "callspec", None), "params", {}).values()))
    ]
    config.hook.pytest_deselected(items=taken)
    items[:] = [item for item in items if item not in taken]
    if config.getoption("--best-target"):
        best = kernels.runnable_targets()[-1]
        used = [
            {"target", "every_target"} & set(getattr(getattr(item, "callspec", None), "params", ()))
            for item in items
        ]
        others = [
            item
            for item, names in zip(items, used)
            if any(item.callspec.params[name] != best for name in names)
        ]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(autouse=True)
def same_numbers():
    """Seed torch, so that torch.randn returns the same numbers in any order of tests."""
    torch.manual_seed(0)


@pytest.fixture(params=VECTOR_TARGETS)
def target(request):
    """Vector target in use, by name."""
    with kernels.target(request.param):
        yield request.param


@pytest.fixture(params=["reference", *VECTOR_TARGETS])
def every_target(request):
    """Target in use, by name: the vector targets and the scalar reference."""
    with kernels.target(request.param):
        yield request.param


@pytest.fixture
def with_threads():
    """kernels.set_num_threads, put back after the test."""
    before = kernels.num_threads()
    yield kernels.set_num_threads
    kernels.set_num_threads(before)


@pytest.fixture
def same_for_any_threads(with_threads):
    """Call f with 1 to 4 threads, compare the bits of its tensors, and return them."""

    def run(f):
        results = []
        for count in (1, 2, 3, 4):
            with_threads(count)
            results.append(f())
        for other in results[1:]:
            assert bits(other) == bits(results[0])
        return results[0]

    return run


def bits(value):
    """Return the bytes of a tensor, number or tuple, so that NaN equals NaN and -0 differs from 0."""
    if isinstance(value, tuple):
        return tuple(bits(part) for part in value)
    return torch.as_tensor(value).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def reference():
    """Calls f with the scalar reference in use."""

    def run(f):
        with kernels.target("reference"):
            return f()

    return run


@pytest.fixture
def guarded():
    """Maker for tensors inside larger buffers, which the test may not change."""
    made = []

    def make(shape, dtype=torch.float32):
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 128,), 77, dtype=dtype)
        made.append((buffer, count))
        return buffer[64 : 64 + count].view(shape)

    yield make
    for buffer, count in made:
        assert bool((buffer[:64] == 77).all()) and bool((buffer[64 + count :] == 77).all()), (
            "wrote outside a tensor"
        )
