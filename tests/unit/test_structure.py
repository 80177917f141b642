"""The size of functions and files: what is short is read, what is long is skipped."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for place in ("fugaku_megatron", "benchmarks", "tools", "scripts", "examples", "setup.py", "pretrain_gpt.py")
                 for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py")))


def function_lengths() -> dict[str, int]:
    """"path:name:line" -> lines, docstring included."""
    return {f"{path.relative_to(ROOT)}:{node.name}:{node.lineno}": node.end_lineno - node.lineno + 1
            for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_functions_are_short():
    lengths = function_lengths()
    assert sorted(lengths.values())[len(lengths) * 9 // 10] <= 15, "nine of ten have at most 15 lines"
    assert not {name: lines for name, lines in lengths.items() if lines > 50}


def test_files_are_read_in_one_sitting():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: lines for name, lines in lengths.items() if lines > 360}
