"""The dispatch library: compiled from dispatch.cc for the installed torch, which has no stable C++ ABI.

A library's name has the hashes of its source and of torch, and Python's version. It is looked for next to this file and in
the user's cache, compiled into the first of the two folders that can be written, and takes half a minute once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, cast

import torch

from ..text.written_files import make_folder, make_private

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "dispatch.cc"
OLDEST_TORCH = (2, 9)
NAME = f"{__package__}._dispatch"
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
PREFIX_MAP = "-ffile-prefix-map="
# The folders of the source, torch and Python's headers have these names in a library, so that all folders make the same bytes.
FOLDER_NAMES = ("fugaku_megatron/torch_backend", "torch", "python")
LIBRARIES = ["-ltorch_cpu", "-lc10", "-ltorch_python"]

Counts = tuple[str, int, int, float, float]


class Dispatch(Protocol):
    """Functions of dispatch.cc."""

    def install(self) -> bool: ...
    def set(self, name: str, serve: Callable[..., object], smallest: int) -> None: ...
    def exchange_smallest(self, name: str, smallest: int) -> int: ...
    def use(self, kernels: str) -> None: ...
    def in_use(self) -> str: ...
    def count(self, on: bool) -> None: ...
    def counts(self) -> list[Counts]: ...


def load() -> Dispatch:
    """Return the library of this process, compiled if none fits. Raises ImportError, one line."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, library())
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[NAME] = module
    return cast(Dispatch, sys.modules[NAME])


def library() -> Path:
    """Return the path of the library for the installed torch, after compiling it if it is missing."""
    version = tuple(int(each) for each in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        raise ImportError(
            f"torch {torch.__version__} is too old for fugaku_megatron.torch_backend: install torch 2.9 or newer"
        )
    path = HERE / file_name()
    if path.exists():
        return path
    if not os.access(HERE, os.W_OK):
        path = _cache() / path.name
    with _locked(path.parent):
        if not path.exists():
            _compile(path)
            _delete_stale()
    return path


def file_name() -> str:
    """Return the name of the library for this source, torch and Python."""
    torch_key = _key(torch.__version__, torch.version.git_version)
    return f"{_source_name()}_{torch_key}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _source_name() -> str:
    return f"_dispatch_{_key(SOURCE.read_bytes(), FLAGS, FOLDER_NAMES)}"


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _delete_stale() -> None:
    """Delete the libraries of other sources next to this file."""
    for path in HERE.glob("_dispatch_*.so"):
        if not path.name.startswith(_source_name()):
            path.unlink(missing_ok=True)


def _cache() -> Path:
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "fugaku_megatron"
        make_folder(caches)
        make_private(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        raise ImportError(
            f"fugaku_megatron.torch_backend: no place for its library: {error}; name a folder by XDG_CACHE_HOME"
        ) from None
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let the ranks of a node compile once. File systems without locks compile as often as there are ranks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def command(output: str) -> list[str]:
    """Return the compiler's command line. The process has the libraries of torch, so no path to them is stored."""
    # Without links: GCC names a system header by its real path if that is shorter.
    root = Path(torch.__file__).resolve().parent
    headers = Path(sysconfig.get_paths()["include"]).resolve()
    includes = [root / "include", root / "include/torch/csrc/api/include", headers]
    folders = zip((SOURCE.parent, root, headers), FOLDER_NAMES)
    return [
        *shlex.split(os.environ.get("CXX", "g++")),
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        "-DTORCH_EXTENSION_NAME=_dispatch",
        *(f"-isystem{each}" for each in includes),
        *(f"{PREFIX_MAP}{folder}={name}" for folder, name in folders),
        str(SOURCE),
        "-o",
        output,
        f"-L{root / 'lib'}",
        *LIBRARIES,
    ]


def _compile(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = os.path.join(folder, path.name)
        arguments = command(built)
        try:
            subprocess.run(arguments, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise ImportError(
                f"fugaku_megatron.torch_backend is compiled for torch {torch.__version__} at its first import, and "
                f"{arguments[0]} is missing: install g++, or name a C++20 compiler by CXX"
            ) from None
        except subprocess.CalledProcessError as error:
            lines = str(error.stderr).splitlines()
            reasons = [line for line in lines if "error" in line] or lines[-1:] or ["no message"]
            raise ImportError(
                f"fugaku_megatron.torch_backend: {arguments[0]} cannot compile {SOURCE}: {reasons[0]}; "
                "name another C++20 compiler by CXX"
            ) from None
        os.replace(built, path)
