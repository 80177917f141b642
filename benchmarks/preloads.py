"""Other memory allocators by name: where the system has them, and which package installs them.

Left out: which allocator a process really uses (fugaku_megatron/host/allocator.py).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from fugaku_megatron.config.checks import check

# name -> Debian and Ubuntu package, sonames in the order of preference
LIBRARIES = {"tcmalloc": ("libgoogle-perftools4", ("libtcmalloc.so", "libtcmalloc_minimal.so")),
             "jemalloc": ("libjemalloc2", ("libjemalloc.so",)),
             "mimalloc": ("libmimalloc2.0", ("libmimalloc.so",))}


def find(name: str) -> Path | None:
    """The library's path, from the loader's cache and LD_LIBRARY_PATH; None when the system has none."""
    cache = _cache()
    for soname in LIBRARIES[name][1]:
        places = [Path(folder) / file for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder
                  for file in sorted(os.listdir(folder) if os.path.isdir(folder) else []) if _is(file, soname)]
        places += [path for path in cache if _is(path.name, soname)]
        if places:
            return places[0]
    return None


def _is(file: str, soname: str) -> bool:
    return re.fullmatch(re.escape(soname) + r"(\.\d+)*", file) is not None


def _cache() -> list[Path]:
    """The libraries in ldconfig's cache."""
    for program in ("ldconfig", "/sbin/ldconfig"):
        try:
            text = subprocess.run([program, "-p"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        return [Path(path) for path in re.findall(r"=> (\S+)$", text, re.MULTILINE)]
    return []


def missing(name: str) -> str:
    """One line that names the missing library and its package."""
    return f"{name}: no {LIBRARIES[name][1][0]} on this system: apt-get install {LIBRARIES[name][0]}"


def resolve(name: str) -> Path:
    """The path of a library that `name` names (tcmalloc) or is the path of. ValueError when there is none."""
    if name in LIBRARIES:
        path = find(name)
        check(path is not None, missing(name))
        return path
    check(Path(name).is_file(), f"{name} is no file: give a library's path, or one of {', '.join(LIBRARIES)}")
    return Path(name).resolve()


def environment(*preload: Path | None) -> dict[str, str]:
    """This process's environment with exactly those libraries preloaded; None: none."""
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    libraries = ":".join(str(path) for path in preload if path is not None)
    return {**variables, "LD_PRELOAD": libraries} if libraries else variables
