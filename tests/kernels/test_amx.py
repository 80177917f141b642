"""Target amx on any CPU with AVX512_BF16: its own machine code, with emulated tile instructions (run_amx.cc)."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fugaku_megatron.host import kernels

if platform.machine() != "x86_64":  # where setup.py and its packages need not be installed
    pytest.skip("AMX is of x86-64", allow_module_level=True)

from tests.arm import builds  # noqa: E402

pytestmark = pytest.mark.kernels

needs_targets = pytest.mark.skipif(
    not shutil.which("g++") or "amx_emulated" not in kernels.runnable_targets(emulated=True),
    reason="needs g++ and a CPU with AVX512_BF16",
)


@needs_targets
def test_the_code_for_amx_has_the_bits_of_the_emulated_target(tmp_path):
    built = {row["name"] for row in kernels.targets() if row["compiled"]}
    if "amx" not in built:
        pytest.skip("amx is left out of this build: run make kernels")
    program = builds.Objects(builds.ROOT / "build", arm=False, KERNEL_TARGETS="runnable").link(
        Path(__file__).with_name("run_amx.cc"), tmp_path / "run_amx"
    )
    run = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    products, loads, stores, begun, ended = map(int, re.findall(r"\d+", run.stdout))
    if "amx_bf16" not in Path("/proc/cpuinfo").read_text().split():
        assert min(products, loads, stores) > 1000 and begun == ended > 0
