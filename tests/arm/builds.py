"""Tools for the ARM tests: cross compiler, emulator, the folder .arm/ from `make arm-env`, and skips with their reasons."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import setup
from tools import arm_env

ROOT = Path(__file__).resolve().parents[2]

CXX = arm_env.CXX
QEMU = "qemu-aarch64-static"
PYTHON = arm_env.ARM / "python"
EXTENSION = ROOT / "fugaku_megatron" / "_kernels.cpython-311-aarch64-linux-gnu.so"
MPIRUN = "mpirun.openmpi"


def absent() -> str:
    """Why there is no ARM Python with the extension, or nothing."""
    if not arm_env.ready():
        return f"no ARM environment: {arm_env.why_not()}"
    return "" if EXTENSION.exists() else f"no {EXTENSION.name}: make arm-ext"


needs_compiler = pytest.mark.skipif(
    not (shutil.which(CXX) and shutil.which(QEMU)), reason=f"needs {CXX} and {QEMU}"
)
needs_python = pytest.mark.skipif(bool(absent()), reason=absent())


class Objects:
    """The extension's objects without Python, by setup.py's rules; `make arm-ext` and `make kernels` share them."""

    def __init__(self, build: Path, arm: bool = True, **variables: str) -> None:
        changes = (
            {"CXX": CXX, **(arm_env.extension_environment() if arm_env.ready() else {})}
            if arm
            else {"CXX": "g++"}
        )
        compiler = setup.Compiler(build, {**changes, **variables})
        jobs = compiler.kernel_jobs()
        for job in jobs:
            compiler.compile(*job, force=False)
        self.cxx = compiler.cxx
        self.paths = [str(obj) for _, _, obj in jobs]

    def link(self, source: Path, output: Path, *flags: str) -> Path:
        command = [
            *self.cxx,
            "-std=c++17",
            "-O1",
            f"-I{setup.SOURCES}",
            str(source),
            *self.paths,
            "-fopenmp",
            *flags,
        ]
        subprocess.run([*command, "-o", str(output)], check=True)
        return output


EMULATION_SECONDS = (
    400  # of one checker; some hosts emulate an A64FX ten times more slowly than others
)


def emulate(
    cpu: str, program: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program's run under qemu-user; `environment` is the emulated program's and the emulator's."""
    variables = {
        "OMP_WAIT_POLICY": "passive",
        **environment,
    }  # as in the wrapper of tools/arm_env.py
    command = [
        "env",
        *(f"{k}={v}" for k, v in variables.items()),
        QEMU,
        "-cpu",
        cpu,
        str(program),
        *arguments,
    ]
    return run_or_skip(command, EMULATION_SECONDS, capture_output=True, text=True)


def run_or_skip(
    command: list[str], seconds: int, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Call subprocess.run; skip the test if the emulated machine does not end in time."""
    try:
        return subprocess.run(command, timeout=seconds, **options)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the emulated machine did not end within {seconds} s on this host")
