"""Every public function that takes or returns a tensor says in its docstring which shape it has.

That is a shape in parentheses, such as (n,) or (s, b, h / t), or the words "any shape". A function takes or returns a tensor if its
annotations name Tensor, or an alias of a type that holds one. A class that has every method of one of our protocols, or inherits
it, need not repeat what the protocol says of them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fugaku_megatron"
ROOMS = ("comm", "data", "checkpoint", "host", "logs", "config", "costs", "pipeline", "perf", "reproduction", "jobs", "calibration",
         "inference", "api")
CHECKED = sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))
SPECIAL = ("__call__", "__getitem__", "__iter__", "__next__")

PARENTHESES = re.compile(r"(?<!\w)\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
DIMENSION = re.compile(r"(?:\d+|\.\.\.|[a-z_][a-z_0-9]*)(?:\s*(?://|[-+*/])\s*(?:\d+|[a-z_][a-z_0-9]*))*")
SYMBOL = re.compile(r"\b[a-z]{1,2}\b|\d|_|\.\.\.")  # s, tp, 2, seq_length: what a dimension has and a word of a sentence has not


def is_shape(text: str) -> bool:
    """Whether the text between parentheses is a shape: "s, b, h / t", "n,", "size * n,"; not "flags, sizes"."""
    dimensions = [part.strip() for part in text.removesuffix(",").split(",")]
    return "," in text and all(DIMENSION.fullmatch(part) for part in dimensions) and any(map(SYMBOL.search, dimensions))


def says_shape(docstring: str | None) -> bool:
    text = " ".join((docstring or "").split())
    return "any shape" in text.lower() or any(is_shape(match[1]) for match in PARENTHESES.finditer(text))


def names_in(node: ast.AST | None) -> set[str]:
    """Names in an annotation, also in one that is a string."""
    names = set()
    for part in ast.walk(node) if node else ():
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute):
            names.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            names |= set(re.findall(r"\w+", part.value))
    return names


def tensor_types(trees: list[ast.Module]) -> set[str]:
    """Tensor, and module-level aliases of types that hold it, such as Batch = tuple[Tensor, Tensor]."""
    assigned = [node for tree in trees for node in tree.body if isinstance(node, ast.Assign)]
    aliases = [node for node in assigned if isinstance(node.value, (ast.Subscript, ast.BinOp)) and "Tensor" in names_in(node.value)]
    return {"Tensor"} | {target.id for node in aliases for target in node.targets if isinstance(target, ast.Name)}


def takes_or_returns(function: ast.FunctionDef, types: set[str]) -> bool:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return bool(types & names_in(function.returns)) or any(types & names_in(a.annotation) for a in every if a)


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in SPECIAL


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [child for child in node.body if isinstance(child, ast.FunctionDef)]


def protocols(trees: list[ast.Module]) -> dict[str, set[str]]:
    """The methods of each of our protocols."""
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return {c.name: {m.name for m in methods(c)} for c in classes if any("Protocol" in names_in(base) for base in c.bases)}


def silent(tree: ast.Module, types: set[str], of_protocols: dict[str, set[str]]) -> Iterator[str]:
    """Names of the public functions and methods of a module that leave a tensor's shape unsaid."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and is_public(node.name) and takes_or_returns(node, types):
            if not says_shape(ast.get_docstring(node)):
                yield node.name
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            names = {method.name for method in methods(node)}
            is_protocol = any("Protocol" in names_in(base) for base in node.bases)
            bases = set().union(*map(names_in, node.bases))
            exempt = set() if is_protocol else set().union(*(protocol for name, protocol in of_protocols.items()
                                                             if protocol <= names or name in bases))
            legend = is_protocol and says_shape(ast.get_docstring(node))
            for method in methods(node):
                if is_public(method.name) and method.name not in exempt and takes_or_returns(method, types):
                    if not (legend or says_shape(ast.get_docstring(method))):
                        yield f"{node.name}.{method.name}"


@functools.cache
def package() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_public_tensor_functions_say_shapes():
    trees = list(package().values())
    types, of_protocols = tensor_types(trees), protocols(trees)
    names = [f"{path.relative_to(PACKAGE)}: {name}" for path in CHECKED for name in silent(package()[path], types, of_protocols)]
    assert not names, "write the shape, as (s, b, h) or 'any shape', into these docstrings"


def test_every_room_exists():
    assert all((PACKAGE / room).is_dir() for room in ROOMS)


@pytest.mark.parametrize("text, expected", [
    ("(n,)", True), ("(s, b, h / t)", True), ("int64 (seq_length + 1,)", True), ("(size * n,)", True), ("(..., h)", True),
    ("Any shape.", True), ("of any\n shape", True), ("`whole` as (size, part_n)", True),
    ("", False), ("a tensor", False), ("(flags, sizes)", False), ("wait(n,)", False), ("(see launch.py)", False), ("(n)", False),
])
def test_what_counts_as_a_shape(text, expected):
    assert says_shape(text) == expected


BAD = '''
Batch = tuple[Tensor, Tensor]
class Comm(Protocol):
    def send(self, x: Tensor) -> None:
        """Send (n,)."""
class Good:
    def send(self, x: Tensor) -> None: ...
class Worse:
    def sent(self, x: "list[Tensor]") -> None: ...
    def _send(self, x: Tensor) -> None: ...
def twice(*, x: Tensor | None) -> int:
    """No word."""
def batches() -> Iterator[Batch]: ...
def fine(x: Tensor) -> torch.Tensor:
    """(s, b) -> (s, b)"""
def no_tensor(x: int) -> int: ...
'''


def test_what_is_left_unsaid_is_seen():
    tree = ast.parse(BAD)
    assert list(silent(tree, tensor_types([tree]), protocols([tree]))) == ["Worse.sent", "twice", "batches"]
