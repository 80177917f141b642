"""Loaded program, in which a file's functions can be given other code."""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

PACKAGE = Path(__file__).resolve().parents[3] / "fugaku_megatron"


class Program:
    """Functions of a loaded file, and the caches of the package. file: in the package"""

    def __init__(self, file: str) -> None:
        importlib.import_module(f"{PACKAGE.name}.{file.removesuffix('.py').replace('/', '.')}")
        self._path = PACKAGE / file
        self._functions: dict[tuple[str, int], list[FunctionType]] = {}
        self._caches = []
        gc.unfreeze()  # frozen objects are not listed
        for found in gc.get_objects():
            # By type: isinstance would ask proxies of torch for their class, which warns.
            if type(found) is FunctionType and found.__code__.co_filename == str(self._path):
                code = found.__code__
                key = (code.co_qualname, code.co_firstlineno)
                self._functions.setdefault(key, []).append(found)
            elif type(found) is functools._lru_cache_wrapper:
                if found.__module__.startswith(PACKAGE.name):
                    self._caches.append(found)

    def replace(self, source: str) -> int:
        """Give the functions the code of a changed source; return how many changed."""
        count = 0
        for old, new in zip(self._codes(self._path.read_text()), self._codes(source), strict=True):
            assert old.co_qualname == new.co_qualname, (old, new)
            if old != new:
                count += self._set_code(old, new)
        return count

    def restore(self) -> None:
        for code in self._codes(self._path.read_text()):
            self._set_code(code, code)

    def _codes(self, source: str) -> Iterator[CodeType]:
        return _functions_in(compile(source, str(self._path), "exec", dont_inherit=True))

    def _set_code(self, old: CodeType, new: CodeType) -> int:
        functions = self._functions.get((old.co_qualname, old.co_firstlineno), [])
        for function in functions:
            function.__code__ = new
        for cache in self._caches:
            cache.cache_clear()
        return len(functions)


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of the functions and methods of a module, without functions inside functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x1:  # CO_OPTIMIZED: a function's, not a class's
                yield constant
            else:
                yield from _functions_in(constant)
