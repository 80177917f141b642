"""Loaded program whose functions can be given other code, and the lines that a layout executes."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "fugaku_megatron"
CALLS = 20  # of a function that are traced; a line that only later calls execute is not seen
Lines = dict[str, list[int]]  # by file


class LinesOfCalls:
    """Tracer of all threads: the lines of the package's functions that were executed, by file."""

    def __init__(self) -> None:
        self.lines: dict[str, set[int]] = {}
        self._calls: Counter[CodeType] = Counter()

    def __enter__(self) -> LinesOfCalls:
        threading.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        threading.settrace(None)  # type: ignore[arg-type]  # Python before 3.12 declares no None

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return None
        self._calls[code] += 1
        if self._calls[code] > CALLS:
            return None
        lines = self.lines.setdefault(code.co_filename[len(str(PACKAGE)) + 1 :], set())

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return local

        return local


class Program:
    """Functions of the package's loaded files. files: names in the package, loaded now"""

    def __init__(self, files: Iterable[str]) -> None:
        for name in sorted(files):
            module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            importlib.import_module(f"{PACKAGE.name}.{module}")
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        self._caches = []
        gc.unfreeze()  # frozen objects are not listed
        for found in gc.get_objects():
            # By type: isinstance would ask proxies of torch for their class, which warns.
            if type(found) is FunctionType:
                code = found.__code__
                key = (code.co_filename, code.co_qualname, code.co_firstlineno)
                self._functions.setdefault(key, []).append(found)
            elif _is_cache_of_the_package(found):
                self._caches.append(found)

    def replace(self, name: str, changed: ast.Module | str) -> int:
        """Give a file's functions the code of a changed source; return how many changed."""
        path = str(PACKAGE / name)
        other = compile(changed, path, "exec", dont_inherit=True)
        count = 0
        for old, new in zip(_functions_in(_original(path)), _functions_in(other), strict=True):
            assert old.co_qualname == new.co_qualname, (old, new)
            if old != new:
                count += self._set_code(path, old, new)
        return count

    def replace_with_original(self, name: str) -> None:
        path = str(PACKAGE / name)
        for code in _functions_in(_original(path)):
            self._set_code(path, code, code)

    def _set_code(self, path: str, old: CodeType, new: CodeType) -> int:
        functions = self._functions.get((path, old.co_qualname, old.co_firstlineno), [])
        for function in functions:
            function.__code__ = new
        for cache in self._caches:
            cache.cache_clear()
        return len(functions)


def _is_cache_of_the_package(found: object) -> bool:
    return type(found) is functools._lru_cache_wrapper and found.__module__.startswith(PACKAGE.name)


def _original(path: str) -> CodeType:
    return compile(Path(path).read_text(), path, "exec", dont_inherit=True)


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of the functions and methods of a module, without functions inside functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x1:  # CO_OPTIMIZED: a function's, not a class's
                yield constant
            else:
                yield from _functions_in(constant)


def loaded_files() -> list[str]:
    """Return the package's loaded files."""
    files = []
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith(str(PACKAGE)) and path.endswith(".py"):
            files.append(path[len(str(PACKAGE)) + 1 :])
    return files
