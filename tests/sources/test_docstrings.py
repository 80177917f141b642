"""Summary lines of public classes, and of public functions of LONG lines or more, in `fugaku_megatron`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[2] / "fugaku_megatron"
LONG = 12  # lines, from def to the last one
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_definitions(node: ast.AST) -> Iterator[Definition]:
    """Iterate over public classes and functions, and over methods of public classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            yield from public_definitions(child)
        elif not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child)


def lacks_summary(definition: Definition) -> bool:
    lines = definition.end_lineno - definition.lineno + 1
    summarized = isinstance(definition, ast.ClassDef) or lines >= LONG
    return summarized and not ast.get_docstring(definition)


def test_public_classes_and_long_functions_have_a_summary():
    lacking = [
        f"{path.relative_to(PACKAGE.parent)}:{each.lineno} {each.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for each in public_definitions(ast.parse(path.read_text()))
        if lacks_summary(each)
    ]
    assert not lacking, "\n".join(["without a docstring:", *lacking])
