"""Kernels cross-compiled for aarch64 and run under qemu-user at each vector length, without Python on the ARM side.

    python -m pytest tests/arm/test_static.py

Needs aarch64-linux-gnu-g++ (any version) and qemu-aarch64-static; skipped without. The A64FX model of qemu refuses what
the A64FX lacks, so this also shows that no SVE2 or BF16 instruction slipped in.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-g++-12", "aarch64-linux-gnu-g++-14")
CXX = next((name for name in COMPILERS if shutil.which(name)), None)
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")

pytestmark = pytest.mark.skipif(not (CXX and QEMU), reason="needs an aarch64 cross compiler and qemu-user")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The static checker, built by setup.py's own rules for the aarch64 rows."""
    build = tmp_path_factory.mktemp("arm")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        import setup

        for name in ("TARGET_CXX", "CXXFLAGS", "LDFLAGS"):
            patch.delenv(name, raising=False)
        patch.setenv("CXX", CXX)
        compiler = setup.Compiler(build)
    jobs = [job for job in compiler.jobs() if not job[1].name.startswith("bind")]
    for job in jobs:
        compiler.compile(*job, force=True)
    output = build / "check_kernels"
    objects = [str(obj) for _, _, obj in jobs]
    source = ROOT / "tests" / "arm" / "check_kernels.cc"
    command = [CXX, "-std=c++17", "-O1", f"-I{setup.SOURCES}", str(source), *objects, "-fopenmp", "-static"]
    subprocess.run([*command, "-o", str(output)], check=True)
    return output


@pytest.mark.parametrize(
    ("cpu", "target"),
    [
        ("a64fx", "sve512"),
        ("a64fx,sve512=off", "sve256"),
        ("max,sve128=on,sve256=off", "sve128"),
        ("cortex-a57", "portable"),
    ],
)
def test_agrees_with_reference_under_emulation(program, cpu, target):
    run = subprocess.run([QEMU, "-cpu", cpu, str(program)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    agreeing = {line.split()[0] for line in run.stdout.splitlines() if line.endswith("agrees with the reference")}
    # Exactly the build of this vector length: a longer or shorter one would give wrong numbers silently.
    assert agreeing == {"reference", "portable", target}
