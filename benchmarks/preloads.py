"""Libraries that a process preloads: memory allocators by name, and one that opens MKL's full width.

MKL asks its own function mkl_serv_intel_cpu_true who made the CPU, and takes a narrower path where it is not Intel's. The library
built here answers that it is, and the path then follows what the CPU can do: on an AMD EPYC with AVX-512 torch's FP32 matmuls
become two to three times as fast. A program that is measured against torch is measured against this one. Left out: oneDNN, which
runs torch's BF16 matmuls and asks for features alone; which allocator a process really uses (fugaku_megatron/host/allocator.py).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fugaku_megatron.config.fields import check
from fugaku_megatron.text.written_files import make_private

# name -> Debian and Ubuntu package, sonames in the order of preference
LIBRARIES = {
    "tcmalloc": ("libgoogle-perftools4", ("libtcmalloc.so", "libtcmalloc_minimal.so")),
    "jemalloc": ("libjemalloc2", ("libjemalloc.so",)),
    "mimalloc": ("libmimalloc2.0", ("libmimalloc.so",)),
}
MKL_SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
MKL_NAME = "mkl_full_width.so"
WIDTHS = ("full", "shipped")
BOTH = "both"


def find(name: str) -> Path | None:
    """Return the allocator's path, from LD_LIBRARY_PATH and the loader's cache; None when the system has none."""
    folders = [
        folder
        for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":")
        if os.path.isdir(folder)
    ]
    places = [
        *(Path(folder) / file for folder in folders for file in sorted(os.listdir(folder))),
        *_cache(),
    ]
    patterns = [re.escape(soname) + r"(\.\d+)*" for soname in LIBRARIES[name][1]]
    return next(
        (path for pattern in patterns for path in places if re.fullmatch(pattern, path.name)), None
    )


def _cache() -> list[Path]:
    """Return the libraries in ldconfig's cache."""
    for program in ("ldconfig", "/sbin/ldconfig"):
        try:
            text = subprocess.run(
                [program, "-p"], capture_output=True, text=True, check=True
            ).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        return [Path(path) for path in re.findall(r"=> (\S+)$", text, re.MULTILINE)]
    return []


def missing(name: str) -> str:
    """Return one line that names the missing library and its package, or nothing when the allocator is there or needs no library."""
    if name not in LIBRARIES or find(name) is not None:
        return ""
    return (
        f"{name}: no {LIBRARIES[name][1][0]} on this system: apt-get install {LIBRARIES[name][0]}"
    )


def resolve(name: str) -> Path:
    """Return the path of a library that `name` names (tcmalloc) or is the path of. ValueError when there is none."""
    if name in LIBRARIES:
        check(not missing(name), missing(name))
        return find(name)
    check(
        Path(name).is_file(),
        f"{name} is not a file: pass a library's path, or one of {', '.join(LIBRARIES)}",
    )
    return Path(name).resolve()


def environment(*preload: Path | None) -> dict[str, str]:
    """Return this process's environment with exactly those libraries preloaded; None: none."""
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    libraries = ":".join(str(path) for path in preload if path is not None)
    return {**variables, "LD_PRELOAD": libraries} if libraries else variables


def add_mkl(parser: argparse.ArgumentParser, whose: str, both: bool = False) -> None:
    """Add the option for MKL's width. whose: "torch's", or of which program. both: the family can measure both in one run."""
    parser.add_argument(
        "--mkl",
        default="full",
        choices=(*WIDTHS, BOTH) if both else WIDTHS,
        help=f"{whose} MKL: with the CPU's full "
        "vectors, also where it is not Intel's, or as torch ships it"
        + (", or both in turn" if both else "")
        + " (default: %(default)s)",
    )


def narrowed(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether MKL takes a narrower path here: an x86-64 CPU that is not Intel's."""
    return platform.machine() == "x86_64" and "GenuineIntel" not in cpuinfo.read_text()


def mkl_library() -> Path:
    """Return the library to preload; build it if it is not there yet. ValueError without a C compiler."""
    path = Path(tempfile.gettempdir()) / f"fugaku_megatron.{os.getuid()}" / MKL_NAME
    make_private(path.parent)  # a library that another user put there would be loaded
    if not path.exists():
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        check(
            compiler is not None,
            "torch's MKL at full width needs a C compiler: install gcc, or pass --mkl shipped",
        )
        new = path.with_name(f"{path.name}.{os.getpid()}")
        subprocess.run(
            [compiler, "-x", "c", "-shared", "-fPIC", "-O1", "-o", new, "-"],
            input=MKL_SOURCE,
            text=True,
            check=True,
        )
        os.replace(new, path)
    return path


def mkl_preload(width: str) -> list[Path]:
    """Return the libraries that a process preloads for that width of WIDTHS; BOTH: the full one."""
    return [mkl_library()] if width != "shipped" and narrowed() else []


def mkl_environment(width: str) -> dict[str, str]:
    """Return this process's environment with MKL at that width; what else is preloaded stays."""
    others = [
        Path(path)
        for path in os.environ.get("LD_PRELOAD", "").split(":")
        if path and not path.endswith(MKL_NAME)
    ]
    return environment(*others, *mkl_preload(width))


def mkl_width() -> str:
    """Return this process's width, of WIDTHS."""
    return "shipped" if narrowed() and MKL_NAME not in os.environ.get("LD_PRELOAD", "") else "full"


def start_again(wanted: str) -> None:
    """Start this process again with the library preloaded, where it is not and the width asks for it."""
    if wanted != "shipped" and mkl_width() == "shipped":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], mkl_environment(wanted))
