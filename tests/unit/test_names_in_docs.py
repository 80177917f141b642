"""Modules and files that docstrings, comments and documents name exist.

    files         every word that ends as a source file does, and `<top folder>/...` with or without an ending
    tests         every path after "pytest"
    dotted names  in backquotes, whose first part is our package, a room or a module: the module, and the name in it
    names         in backquotes in a docstring: an identifier of the file, a module or room, or a name or attribute of the package

A dotted name may also be an attribute of a variable that is called like a module: then the file has that variable, and some code
reads the attribute. A path stands for a file beside the one that names it, below the root or the package, or for a C++ source; in a
document for any file whose path ends so.
"""

from __future__ import annotations

import ast
import builtins
import fnmatch
import functools
import io
import keyword
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fugaku_megatron"
FOLDERS = ("fugaku_megatron", "benchmarks", "tools", "scripts", "tests", "docs", "kernels_sve")
EXAMPLES = "examples"  # Megatron-LM has a folder of this name as well, which docs/megatron.md names
SOURCES = sorted(p for f in (*FOLDERS, EXAMPLES) for p in (ROOT / f).rglob("*.py")) + [ROOT / "setup.py", ROOT / "pretrain_gpt.py"]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
KERNELS = sorted(path for path in (ROOT / "kernels_sve").rglob("*") if path.suffix in (".h", ".cc", ".inc"))
OTHERS = {"gpt_dataset.py", "preprocess_data.py", "malloc.h", "mpi.h", "pyconfig.h", "tokenizers"}  # Megatron's, C's, MPI's ...

START, END = r"(?<![\w./:~$<>{}*-])", r"(?![\w/*<{])"
FILE = re.compile(rf"{START}[\w.*-]+(?:/[\w.*-]+)*\.(?:py|md|h|cc|inc)\b{END}")
BELOW = re.compile(rf"{START}(?:{'|'.join(FOLDERS)})/[\w.*/-]*{END}")
OPTION = re.compile(r"--[\w-]+[ =][\w./-]+")  # its value may be a file to be written
PYTEST = re.compile(r"\bpytest((?:[ ]+[\w.-]+/[\w./:-]*)+)")
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
DOTTED = re.compile(r"(?!.*\.(?:py|md|h|cc|inc|json|csv|txt|toml|so|sh|tar)$)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def comments(path: Path) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return "\n".join(token.string for token in tokens if token.type == tokenize.COMMENT)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def docstrings(path: Path) -> str:
    documented = (n for n in ast.walk(tree(path)) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)))
    return "\n".join(filter(None, map(ast.get_docstring, documented)))


def prose(path: Path) -> str:
    return f"{docstrings(path)}\n{comments(path)}" if path.suffix == ".py" else path.read_text()


@functools.cache
def files() -> frozenset[str]:
    """Paths, relative to the root, of the project's files and of the folders that hold them."""
    below = [path for folder in (*FOLDERS, EXAMPLES) for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    return frozenset(str(path.relative_to(ROOT)) for path in (*below, *ROOT.glob("*")) if "__pycache__" not in path.parts)


def file_exists(name: str, path: Path) -> bool:
    """Whether `path` may mean a file of ours, or a folder, by this name, which may be a pattern."""
    if name in OTHERS or name.endswith(".so") or name.startswith("megatron/"):  # built, not kept; Megatron-LM's tree
        return True
    places = [path.parent.relative_to(ROOT), ".", PACKAGE.name, "kernels_sve", *["*"] * (path.suffix == ".md")]
    return any(fnmatch.filter(files(), os.path.normpath(Path(place, name))) for place in places)


def wrong_files(text: str, path: Path) -> Iterator[str]:
    """Names of files in a text that do not exist."""
    text = OPTION.sub(" ", text)
    named = [match[0] for match in FILE.finditer(text)] + [match[0].rstrip(".") for match in BELOW.finditer(text)]
    named += [word.split("::")[0].rstrip(".:") for match in PYTEST.finditer(text) for word in match[1].split()]
    yield from sorted({name for name in named if not file_exists(name, path)})


@functools.cache
def definitions() -> dict[str, frozenset[str]]:
    """Module, room or file stem -> the names that it defines at its top level and, for a room, its modules."""
    names: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        own = {n.name for n in tree(path).body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
        own |= {n.id for n in ast.walk(tree(path)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for i in range(len(parts)):
            names.setdefault(".".join(parts[i:]), set()).update(own)
            if i < len(parts) - 1:
                names.setdefault(".".join(parts[i:-1]), set()).add(parts[-1])
    return {module: frozenset(defined) for module, defined in names.items()}


@functools.cache
def identifiers(path: Path) -> frozenset[str]:
    """Every identifier of a file: names, arguments, attributes, definitions, and the words of its strings of one line."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        names |= {value for value in (getattr(node, name, None) for name in ("id", "arg", "attr", "name", "module", "asname"))
                  if isinstance(value, str)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.count("\n"):
            names |= set(IDENTIFIER.findall(node.value))
    return frozenset(names)


@functools.cache
def known() -> frozenset[str]:
    """Names of Python, of our modules, of the classes, functions and methods of the package, and of attributes."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(tree(path)))
    defined = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    modules = {part for module in definitions() for part in module.split(".")}
    return frozenset(defined | modules | attributes() | {*keyword.kwlist, *dir(builtins), *OTHERS})


@functools.cache
def attributes() -> frozenset[str]:
    return frozenset(node.attr for path in SOURCES for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute))


def dotted_exists(name: str, path: Path) -> bool:
    """Whether `a.b.c` names a module and a name in it; True also when its first part is no module or room of ours."""
    parts = name.split(".")
    if parts[0] != PACKAGE.name and parts[0] not in definitions():
        return True
    longest = max((i for i in range(1, len(parts) + 1) if ".".join(parts[:i]) in definitions()), default=0)
    if longest and (longest == len(parts) or parts[longest] in definitions()[".".join(parts[:longest])]):
        return True
    return path.suffix == ".py" and parts[0] in identifiers(path) and parts[1] in attributes()


def wrong_names(text: str, path: Path) -> Iterator[str]:
    """Dotted names in backquotes that lead to nothing, and in Python files single names that nothing defines."""
    for quoted in sorted({match[1].removesuffix("()") for match in QUOTED.finditer(text)}):
        if DOTTED.fullmatch(quoted):
            if not dotted_exists(quoted, path):
                yield quoted
        elif IDENTIFIER.fullmatch(quoted) and path.suffix == ".py" and quoted not in identifiers(path) | known():
            yield quoted


def test_what_is_named_exists():
    texts = {path: prose(path) for path in (*DOCUMENTS, *SOURCES, *KERNELS)}
    wrong = {str(path.relative_to(ROOT)): [*wrong_files(text, path), *wrong_names(text, path)] for path, text in texts.items()}
    assert not {path: names for path, names in wrong.items() if names}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_site_shows_a_document_as_it_is_meant(path):
    """Its Markdown needs an empty line before a list, and shows the backslash of a \\| within code."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(?!- |  |\n).*\n(- .*)", text, re.MULTILINE) == []
    assert re.findall(r"`[^`\n]*\\\|[^`\n]*`", text) == []


def test_readme_is_short():
    """Explanations belong in docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


HERE = PACKAGE / "comm" / "grid.py"


@pytest.mark.parametrize("text", [
    "see checkpoint.py", "`comm/wire.py`", "as in (tests/test_nothing.py)",
    "Test: pytest tests/parallel/test_grid.py tests/test_nothing.py",
    "Test: pytest tests/nothing", "`tools/absent/`", "docs/absent.md,", "kernels_sve/absent*.h", "`local.RecordingComm`",
    "`comm.wire`", "`fugaku_megatron.comm.grid.Grids`", "`grid.Grids`", "`optim.FlatParameters`", "`no_such_name`",
    "`config.absent()`",
])
def test_names_that_lead_nowhere_are_seen(text):
    assert len([*wrong_files(text, HERE), *wrong_names(text, HERE)]) == 1


@pytest.mark.parametrize("text", [
    "see launch.py, grid.py, ../cli.py.", "`config/run_config.py` and setup.py",
    "Test: pytest tests/parallel/test_grid.py tests/system/mpi",
    "`scripts/pjsub`", "docs/*.md", "kernels_sve/simd*.h, or gemm.h", "Megatron's gpt_dataset.py", "https://a.b/absent.py",
    "h / t, and/or",
    "write my.json or run.csv", "`comm.grid.Grid`, `solo.SoloComm`, `grid`, `fugaku_megatron.config`",
    "`world_size`, `None`, `with`",
    "`comm.rank` of a variable", "`torch.absent`, `a b`, `--flag`",
    "<room>/absent.py and {name}.py", "fugaku_megatron/_kernels.*.so", "--output docs/figures/absent.png",
])
def test_what_exists_or_is_no_name_of_ours_passes(text):
    assert [*wrong_files(text, HERE), *wrong_names(text, HERE)] == []
