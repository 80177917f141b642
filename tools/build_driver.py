"""Builds build/kernel_driver-<machine>: one static program without Python that runs one kernel (tools/kernel_driver/main.cc).

    make driver          this machine's                make arm-driver      an A64FX's, cross-built
    build/kernel_driver-aarch64 gemm_nt 96 128 256 --repeat 5

    python -m tools.build_driver [aarch64]

CXX, TARGET_CXX and the rest of the environment are setup.py's, and so are the objects: what was built before is used again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setup
from tools import arm_env

ROOT = Path(__file__).resolve().parents[1]


def cross_environment() -> dict[str, str]:
    """Return the variables of a build for ARM: as in make arm-ext, to share its objects, or the compiler alone."""
    return arm_env.extension_environment() if arm_env.ready() else {"CXX": arm_env.CXX}


def build(folder: Path, variables: Mapping[str, str]) -> Path:
    """Compile what has changed and link. CalledProcessError after the compiler's own words."""
    compiler = setup.Compiler(folder, variables)
    jobs = compiler.kernel_jobs()
    for source in sorted((ROOT / "tools" / "kernel_driver").glob("*.cc")):
        command = [*compiler.cxx, *setup.COMMON_FLAGS, f"-I{setup.SOURCES}"]
        jobs.append((command, source, compiler.objects / f"driver_{source.stem}.o"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: compiler.compile(*job, force=False), jobs))
    output = folder / f"kernel_driver-{compiler.machine}"
    subprocess.run(
        [
            *compiler.cxx,
            *(str(obj) for _, _, obj in jobs),
            "-fopenmp",
            "-static",
            "-o",
            str(output),
        ],
        check=True,
    )
    return output


if __name__ == "__main__":
    changes = cross_environment() if sys.argv[1:] == ["aarch64"] else {}
    try:
        print(build(ROOT / "build", {**os.environ, **changes}))
    except subprocess.CalledProcessError:
        sys.exit("build_driver: the compiler failed, see above")
