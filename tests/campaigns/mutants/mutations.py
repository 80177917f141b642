"""Mutants of a Python file: one small change of its syntax tree each."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
COMPARISONS = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
BOOLEAN = {ast.And: ast.Or, ast.Or: ast.And}
CHOICES = 2  # changes of one node, at most


@dataclass(frozen=True)
class Site:
    """A node that can be changed. number: in the order of ast.walk. choice: of several changes of the node"""

    number: int
    choice: int
    line: int


@dataclass(frozen=True)
class Mutant:
    """A change of one line. tree: of the changed file, with the original's line numbers"""

    line: int
    change: str
    tree: ast.Module


def sites(source: str) -> list[Site]:
    """Return every node in the bodies of functions that can be changed."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in _body(function)
    }
    found = []
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in inside:
            continue
        for choice in range(CHOICES):
            if _change(copy.copy(node), choice):
                found.append(Site(number, choice, getattr(node, "lineno", 0)))
    return found


def _body(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function's statements without annotations and error messages."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Raise, ast.Assert)):
            continue
        yield node
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.AnnAssign):
            children = iter([child for child in (node.value,) if child is not None])
        waiting += children


def mutant(source: str, site: Site) -> Mutant:
    """Return the file with one node changed."""
    tree = ast.parse(source)
    node = [*ast.walk(tree)][site.number]
    before = _shown(node)
    _change(node, site.choice)
    ast.fix_missing_locations(tree)
    return Mutant(site.line, f"{before:.60} -> {_shown(node):.60}", tree)


def _shown(node: ast.AST) -> str:
    """Return a node's text; of an if statement the condition alone."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test)
    return ast.unparse(node).replace("\n", " ")


def _change(node: ast.AST, choice: int) -> bool:
    """Change a node in place. Return False if no change is known for it. choice: less than `CHOICES`"""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1 if choice == 0 else -1
        return True
    if isinstance(node, ast.Call) and (node.keywords or len(node.args) > 1):
        return _change_arguments(node, choice)
    if choice:
        return False
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        node.op = BINARY[type(node.op)]()
        return True
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        node.ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        return True
    if isinstance(node, ast.BoolOp):
        node.op = BOOLEAN[type(node.op)]()
        return True
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        node.value = not node.value
        return True
    if isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        # The call stays in the code as unreachable, so that the function has the same closure.
        node.value = ast.IfExp(ast.Constant(False), node.value, ast.Constant(None))
        return True
    return False


def _change_arguments(node: ast.Call, choice: int) -> bool:
    """Swap the first two arguments, or leave out the last argument with a name."""
    if choice == 0 and len(node.args) > 1:
        node.args = [node.args[1], node.args[0], *node.args[2:]]
        return not any(isinstance(each, ast.Starred) for each in node.args[:2])
    if choice == 1 and node.keywords:
        node.keywords = node.keywords[:-1]
        return True
    return False
