"""Modules and files that docstrings, comments and documents name exist.

A file is named by every word that ends as a source file does and by `<top folder>/...`, and lies next to the file that names
it, below the root or the package, or in kernels_sve. A dotted name in backquotes starts with our package, a package of it or a
module, or with a variable of the file that is called so. A single name in backquotes in a Python file is an identifier that the
project or Python has.
"""

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

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fugaku_megatron"
FOLDERS = ("fugaku_megatron", "benchmarks", "tools", "scripts", "tests", "docs", "kernels_sve")
EXAMPLES = "examples"  # Megatron-LM has a folder of this name as well, which docs/megatron.md names
SOURCES = sorted(p for f in (*FOLDERS, EXAMPLES) for p in (ROOT / f).rglob("*.py")) + [
    ROOT / "setup.py",
    ROOT / "pretrain_gpt.py",
]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
KERNELS = sorted(
    path for path in (ROOT / "kernels_sve").rglob("*") if path.suffix in (".h", ".cc", ".inc")
)
OTHERS = {
    "gpt_dataset.py",
    "preprocess_data.py",
    "malloc.h",
    "mpi.h",
    "pyconfig.h",
    "tokenizers",  # Megatron's, C's, MPI's,
    "convert_hf_to_gguf.py",
}  # llama.cpp's

START, END = r"(?<![\w./:~$<>{}*-])", r"(?![\w/*<{])"
FILE = re.compile(rf"{START}[\w.*-]+(?:/[\w.*-]+)*\.(?:py|md|h|cc|inc)\b{END}")
BELOW = re.compile(rf"{START}(?:{'|'.join(FOLDERS)})/[\w.*/-]*{END}")
OPTION = re.compile(r"--[\w-]+[ =][\w./-]+")  # its value may be a file to be written
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
DOTTED = re.compile(
    r"(?!.*\.(?:py|md|h|cc|inc|json|csv|txt|toml|so|sh|tar)$)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+"
)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@functools.cache
def tokens(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def files() -> frozenset[str]:
    """Paths, relative to the root, of the project's files and of the folders that hold them."""
    below = [
        path
        for folder in (*FOLDERS, EXAMPLES)
        for path in (ROOT / folder, *(ROOT / folder).rglob("*"))
    ]
    return frozenset(
        str(path.relative_to(ROOT))
        for path in (*below, *ROOT.glob("*"))
        if "__pycache__" not in path.parts
    )


@functools.cache
def file_exists(name: str, folder: Path, anywhere: bool) -> bool:
    """Whether a file in `folder` may mean a file of ours, or a folder, by this name, which may be a pattern."""
    if (
        name in OTHERS or name.endswith(".so") or name.startswith("megatron/")
    ):  # built, not kept; Megatron-LM's tree
        return True
    places = [
        os.path.normpath(Path(place, name))
        for place in (folder.relative_to(ROOT), ".", PACKAGE.name, "kernels_sve")
    ]
    places += [f"*/{name}"] * anywhere
    return any(
        place in files() or "*" in place and fnmatch.filter(files(), place) for place in places
    )


def wrong_files(text: str, path: Path) -> Iterator[str]:
    """Names of files in a text that do not exist."""
    text = OPTION.sub(" ", text)
    named = [match[0] for match in FILE.finditer(text)] + [
        match[0].rstrip(".") for match in BELOW.finditer(text)
    ]
    yield from sorted(
        {name for name in named if not file_exists(name, path.parent, path.suffix == ".md")}
    )


@functools.cache
def definitions() -> dict[str, frozenset[str]]:
    """Module, package or file stem -> the names that it defines at its top level and, for a package, its modules."""
    names: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        own = {n.name for n in tree(path).body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
        own |= {
            n.id
            for n in ast.walk(tree(path))
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        for i in range(len(parts)):
            names.setdefault(".".join(parts[i:]), set()).update(own)
            if i < len(parts) - 1:
                names.setdefault(".".join(parts[i:-1]), set()).add(parts[-1])
    return {module: frozenset(defined) for module, defined in names.items()}


@functools.cache
def identifiers() -> frozenset[str]:
    """Every identifier of the sources and the words of their strings of one line; names of Python and of our modules."""
    names = {
        *keyword.kwlist,
        *dir(builtins),
        *OTHERS,
        *(part for module in definitions() for part in module.split(".")),
    }
    for path in SOURCES:
        for token in tokens(path):
            if (
                token.type == tokenize.NAME
                or token.type == tokenize.STRING
                and "\n" not in token.string
            ):
                names |= set(IDENTIFIER.findall(token.string))
    return frozenset(names)


def dotted_exists(name: str, path: Path) -> bool:
    """Whether `a.b.c` names a module and a name in it; True also when its first part is not a module or package of ours."""
    parts = name.split(".")
    if parts[0] != PACKAGE.name and parts[0] not in definitions():
        return True
    longest = max(
        (i for i in range(1, len(parts) + 1) if ".".join(parts[:i]) in definitions()), default=0
    )
    if longest and (
        longest == len(parts) or parts[longest] in definitions()[".".join(parts[:longest])]
    ):
        return True
    return (
        path.suffix == ".py"
        and parts[0] in {token.string for token in tokens(path)}
        and parts[1] in identifiers()
    )


def wrong_names(text: str, path: Path) -> Iterator[str]:
    """Dotted names in backquotes that lead to nothing, and in Python files single names that nothing defines."""
    for quoted in sorted({match[1].removesuffix("()") for match in QUOTED.finditer(text)}):
        if DOTTED.fullmatch(quoted):
            if not dotted_exists(quoted, path):
                yield quoted
        elif IDENTIFIER.fullmatch(quoted) and path.suffix == ".py" and quoted not in identifiers():
            yield quoted


def prose(path: Path) -> str:
    """A document or a C++ file; of a Python file its docstrings and comments."""
    if path.suffix != ".py":
        return path.read_text()
    documented = (
        n
        for n in ast.walk(tree(path))
        if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))
    )
    comments = (token.string for token in tokens(path) if token.type == tokenize.COMMENT)
    return "\n".join([*filter(None, map(ast.get_docstring, documented)), *comments])


def test_what_is_named_exists():
    texts = {path: prose(path) for path in (*DOCUMENTS, *SOURCES, *KERNELS)}
    wrong = {
        str(path.relative_to(ROOT)): [*wrong_files(text, path), *wrong_names(text, path)]
        for path, text in texts.items()
    }
    assert not {path: names for path, names in wrong.items() if names}


def test_the_site_shows_documents_as_they_are_meant_and_readme_is_short():
    """Its Markdown needs an empty line before a list, and shows the backslash of a \\| within code."""
    for path in DOCUMENTS:
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert (
            re.findall(r"^(?!- |  |\n).*\n(- .*)", text, re.MULTILINE)
            == re.findall(r"`[^`\n]*\\\|[^`\n]*`", text)
            == []
        ), path
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


HERE = PACKAGE / "comm" / "grid.py"


def test_wrong_names_are_seen_and_others_are_not():
    wrong = (
        "checkpoint.py (tests/test_nothing.py) docs/absent.md, `comm.no_such_"
        "verb` `grid.Grids` `no_such_"
        "name` "
        "`config.absent()`"
    )
    right = (
        "launch.py, ../cli.py. setup.py `scripts/pjsub` kernels_sve/simd*.h https://a.b/absent.py h / t my.json `None` `a b`, "
        "`comm.grid.Grid` `comm.rank` `torch.absent` <package>/absent.py {name}.py --output docs/figures/absent.png"
    )
    assert len([*wrong_files(wrong, HERE), *wrong_names(wrong, HERE)]) == 7
    assert [*wrong_files(right, HERE), *wrong_names(right, HERE)] == []
