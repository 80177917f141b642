"""Docstrings say the shapes of tensors: (n,), (s, b, h / t), or the words "any shape"."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DESCRIBED = (
    "comm",
    "data",
    "checkpoint",
    "host",
    "logs",
    "config",
    "costs",
    "pipeline",
    "perf",
    "reproduction",
    "jobs",
    "calibration",
    "inference",
    "api",
)
PARENTHESES = re.compile(r"(?<!\w)\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
DIMENSION = re.compile(
    r"(?:\d+|\.\.\.|[a-z_][a-z_0-9]*)(?:\s*(?://|[-+*/])\s*(?:\d+|[a-z_][a-z_0-9]*))*"
)
SYMBOL = re.compile(
    r"\b[a-z]{1,2}\b|\d|_|\.\.\."
)  # s, tp, 2, seq_length: what a dimension has and a word of a sentence has not


def is_shape(text: str) -> bool:
    """Whether the text between parentheses is a shape: "s, b, h / t", "n,", "size * n,"; not "flags, sizes"."""
    dimensions = [part.strip() for part in text.removesuffix(",").split(",")]
    return (
        "," in text
        and all(DIMENSION.fullmatch(part) for part in dimensions)
        and any(map(SYMBOL.search, dimensions))
    )


def says_shape(docstring: str | None) -> bool:
    text = " ".join((docstring or "").split())
    return "any shape" in text.lower() or any(
        is_shape(match[1]) for match in PARENTHESES.finditer(text)
    )


def names_in(node: ast.AST | None) -> set[str]:
    """Names in an annotation, also in one that is a string."""
    return set(re.findall(r"\w+", ast.unparse(node))) if node else set()


def tensor_functions(node: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Public functions whose annotations name Tensor, or Batch, which is of tensors."""
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and (
            not function.name.startswith("_") or function.name == "__call__"
        ):
            given = [
                argument.annotation
                for argument in ast.walk(function.args)
                if isinstance(argument, ast.arg)
            ]
            if {"Tensor", "Batch"} & set().union(*map(names_in, [function.returns, *given])):
                yield function


def test_public_tensor_functions_say_shapes():
    """A class that has the methods of a protocol need not repeat what the protocol says of them."""
    files = [
        file for package in DESCRIBED for file in (ROOT / "fugaku_megatron" / package).rglob("*.py")
    ]
    trees = {file: ast.parse(file.read_text()) for file in files}
    classes = {
        file: [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for file, tree in trees.items()
    }
    told = {
        method.name
        for node in itertools.chain(*classes.values())
        if "Protocol" in set().union(*map(names_in, node.bases))
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }
    silent = []
    for file, tree in trees.items():
        for node in (tree, *(node for node in classes[file] if not node.name.startswith("_"))):
            silent += [
                f"{file.name}: {function.name}"
                for function in tensor_functions(node)
                if not says_shape(ast.get_docstring(function))
                and (node is tree or function.name not in told)
            ]
    assert not silent, "write the shape, as (s, b, h) or 'any shape', into these docstrings"
