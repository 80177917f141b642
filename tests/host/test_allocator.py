"""The malloc in use, the tensor arena and its reuse."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fugaku_megatron.host import allocator
from tests.processes import run_python

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
MAPS = "7f0-7f1 r-xp 00000000 08:01 12 {}\n7f2-7f3 r-xp 00000000 08:01 13 /usr/lib64/libc-2.28.so\n"


@pytest.mark.parametrize(
    "library, name",
    {
        "/opt/lib/libtcmalloc.so.4.5.3": "tcmalloc",
        "/opt/lib/libtcmalloc_minimal.so.4": "tcmalloc",
        "/usr/lib/libjemalloc.so.2": "jemalloc",
        "/usr/lib/libmimalloc.so.2.1": "mimalloc",
        "/opt/FJSVxos/mmm/lib64/libmpg.so.1": "libmpg",
        "/opt/FJSVxos/mmm/lib64/libmpg.so.1\n1-2 r-xp 0 08:01 9 /lib/libtcmalloc.so": "tcmalloc",
    }.items(),
)
def test_allocators_are_known_by_their_library(library, name):
    assert allocator.allocator_name(MAPS.format(library)) == name


@pytest.mark.parametrize(
    "library", ["/home/libtcmalloc.so/data.txt", "/usr/lib/libmpgraph.so.1", "[heap]"]
)
def test_other_libraries_are_no_allocator(library):
    assert allocator.allocator_name(MAPS.format(library)) not in allocator._LIBRARIES.values()


def test_the_allocator_of_this_process_is_glibc_with_its_version():
    if "LD_PRELOAD" in os.environ or not os.path.exists("/proc/self/maps"):
        pytest.skip("another allocator may be preloaded")
    assert allocator.allocator_name().split()[0] == "glibc" and "." in allocator.allocator_name()


CHILD = """
import json, random, sys, threading
import torch
from fugaku_megatron.host import allocator, kernels
line = allocator.tune(sys.argv[1])
torch.set_num_threads(1)

def step(seed):
    live, order = {}, random.Random(seed)
    for i in range(60):
        live[i] = torch.full((order.randrange(1, 1 << 20),), float(i))
        if i % 3 == 2:
            j = order.choice(sorted(live))
            assert bool((live.pop(j) == j).all())
    assert all(bool((t == i).all()) for i, t in live.items())

step(0)
faults = allocator.page_faults()[0]
step(0)
faults = allocator.page_faults()[0] - faults
threads = [threading.Thread(target=step, args=(i,)) for i in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
a, b = torch.ones(1 << 20), torch.ones(3 << 20)
stats = kernels.arena_stats()
grown = torch.zeros(10).resize_(1 << 20)  # from malloc into the arena
print(json.dumps({"line": line, "faults": faults, "stats": stats, "apart": a.data_ptr() % 4096 != b.data_ptr() % 4096}))
"""


def child(mode):
    return json.loads(run_python("-c", CHILD, mode).stdout)


def test_a_second_step_faults_no_pages_in():
    tuned, stock = (child(mode) for mode in ("tuned", "stock"))
    assert "tuned" in tuned["line"] and "stock" in stock["line"]
    assert tuned["faults"] < 200 < 2000 < stock["faults"]
    stats = tuned["stats"]
    assert stats["fallbacks"] == 0 and 16 << 20 <= stats["in_use"]
    assert stats["in_use"] <= stats["peak"] <= stats["touched"] <= stats["reserved"]
    assert tuned["apart"], "two tensors begin at the same offset in their pages"
    assert stock["stats"]["reserved"] == 0


def test_few_addresses_are_enough_to_go_on():
    """A range that is too small is used up; malloc serves the rest."""
    code = (
        "import torch; from fugaku_megatron.host import kernels; assert not kernels.use_arena(64 << 20);"
        "a = [torch.full((1 << 20,), float(i)) for i in range(24)];"
        "assert all(bool((t == i).all()) for i, t in enumerate(a)); print(kernels.arena_stats()['fallbacks'])"
    )
    assert int(run_python("-c", code).stdout) >= 8


LAYOUT = """
#include <c10/core/Allocator.h>
#include "arena/torch_allocator.h"
#define SAME(x) static_assert(x, "torch_allocator.h differs from torch's headers")
using fm::torch_abi::DataPtr;
struct Ours : fm::torch_abi::Allocator {
  DataPtr allocate(size_t) override { return {nullptr, {nullptr, nullptr}}; }
  fm::torch_abi::Deleter raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}
};
struct Theirs : c10::Allocator {
  c10::DataPtr allocate(size_t) override { return {}; }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}
};
SAME(sizeof(DataPtr) == sizeof(c10::DataPtr) && alignof(DataPtr) == alignof(c10::DataPtr));
SAME(sizeof(Ours) == sizeof(Theirs) && (std::is_same_v<fm::torch_abi::Deleter, c10::DeleterFnPtr>));
SAME(static_cast<int>(c10::DeviceType::CPU) == 0);
"""


def test_the_allocator_has_the_layout_of_torchs_headers(tmp_path):
    """The order of the virtual functions and torch's own pointers are compared by use_arena."""
    include = Path(torch.__file__).parent / "include"
    if not include.exists() or shutil.which("g++") is None:
        pytest.skip("needs torch's headers and g++")
    source = tmp_path / "layout.cc"
    source.write_text(LAYOUT)
    flags = ["-std=c++20", "-fsyntax-only", "-I", ROOT / "kernels_sve", "-isystem", include]
    subprocess.run(["g++", *flags, source], check=True)


def test_an_allocator_of_another_layout_is_not_replaced(monkeypatch):
    reason = "this torch has another c10::Allocator than 2.9 to 2.15"
    monkeypatch.setattr(allocator.kernels, "use_arena", lambda bytes: reason)
    monkeypatch.setattr(allocator, "allocator_name", lambda: "glibc 2.36")
    monkeypatch.setattr(allocator, "_mallopt", lambda *values: None)
    assert allocator.tune("tuned") == f"glibc 2.36, heap tuned; no tensor arena: {reason}"


def test_a_preloaded_allocator_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator, "allocator_name", lambda: "tcmalloc")
    assert allocator.tune("tuned") == "tcmalloc (preloaded: --allocator tuned is off)"
    assert allocator.tune("stock") == "tcmalloc"
