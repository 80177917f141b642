"""Mutants of a Python file: one small change of its syntax tree each."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass

BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}
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


@dataclass(frozen=True)
class Site:
    """A node that can be changed. number: in the order of ast.walk. choice: of two changes of a number"""

    number: int
    choice: int


@dataclass(frozen=True)
class Mutant:
    """A change of one line. source: of the changed file"""

    line: int
    change: str
    source: str


def sites(source: str, reached: set[int]) -> list[Site]:
    """Return every node that can be changed inside functions that begin at the lines `reached`."""
    tree = ast.parse(source)
    inside: set[int] = set()
    for function in filter(lambda node: isinstance(node, ast.FunctionDef), ast.walk(tree)):
        begin = min([function.lineno, *(each.lineno for each in function.decorator_list)])
        if {begin, function.lineno} & reached:
            inside.update(range(function.lineno, function.end_lineno + 1))
    found = []
    for number, node in enumerate(ast.walk(tree)):
        if getattr(node, "lineno", 0) not in inside:
            continue
        for choice in range(2):
            if _change(copy.copy(node), choice):
                found.append(Site(number, choice))
    return found


def mutant(source: str, site: Site) -> Mutant:
    """Return the file with one node changed."""
    tree = ast.parse(source)
    node = [*ast.walk(tree)][site.number]
    before = _shown(node)
    _change(node, site.choice)
    ast.fix_missing_locations(tree)
    change = f"{before:.60} -> {_shown(node):.60}"
    return Mutant(getattr(node, "lineno", 0), change, ast.unparse(tree))


def _shown(node: ast.AST) -> str:
    """Return a node's text; of an if statement the condition alone."""
    return ast.unparse(node.test if isinstance(node, ast.If) else node)


def _change(node: ast.AST, choice: int) -> bool:
    """Change a node in place. Return False if no change is known for it. choice: 0 or 1"""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1 if choice == 0 else -1
        return True
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
        node.value = ast.copy_location(ast.Constant(None), node.value)
        return True
    return False
