"""PyTorch's MKL at the full width of a CPU's vectors, where it would take a narrower path because the CPU is not Intel's.

MKL asks its own function mkl_serv_intel_cpu_true who made the CPU. A preloaded library answers that it is Intel's, and the path
then follows what the CPU can do. A program that is measured against torch is measured against this one: on an AMD EPYC with
AVX-512 its FP32 products are two to three times as fast. Left out: oneDNN, which makes torch's BF16 products and asks for
features alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fugaku_megatron.config.checks import check

from . import preloads

SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
WIDTHS, BOTH, NAME = ("full", "shipped"), "both", "mkl_full_width.so"


def add_argument(parser: argparse.ArgumentParser, whose: str, both: bool = False) -> None:
    """The option that chooses. whose: "torch's", or of which of two programs. both: the family can measure both in one run."""
    parser.add_argument("--mkl", default="full", choices=(*WIDTHS, *[BOTH] * both), help=f"{whose} MKL: with the CPU's full "
                        "vectors, also where it is not Intel's, or as torch ships it" + (", or both in turn" if both else "")
                        + " (default: %(default)s)")


def narrowed(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether MKL takes a narrower path here: an x86-64 CPU that is not Intel's."""
    return platform.machine() == "x86_64" and "GenuineIntel" not in cpuinfo.read_text()


def library() -> Path:
    """The library to preload, built where it is not there yet. ValueError without a C compiler."""
    path = Path(tempfile.gettempdir()) / f"fugaku_megatron.{os.getuid()}" / NAME
    if not path.exists():
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        check(compiler is not None, "torch's MKL at full width needs a C compiler: install gcc, or give --mkl shipped")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-O1", "-o", new, "-"], input=SOURCE, text=True, check=True)
        os.replace(new, path)
    return path


def preload(width: str) -> list[Path]:
    """What a process preloads for that width of WIDTHS; BOTH: the full one."""
    return [library()] if width != "shipped" and narrowed() else []


def environment(width: str) -> dict[str, str]:
    """This process's environment with MKL at that width; what else is preloaded stays."""
    others = [Path(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if path and not path.endswith(NAME)]
    return preloads.environment(*others, *preload(width))


def width() -> str:
    """This process's own, of WIDTHS."""
    return "shipped" if narrowed() and NAME not in os.environ.get("LD_PRELOAD", "") else "full"


def start_again(wanted: str) -> None:
    """Start this process again with the library preloaded, where it is not and the width asks for it."""
    if wanted != "shipped" and width() == "shipped":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment(wanted))
