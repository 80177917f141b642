"""The package keeps no state in its modules: what varies is an argument or an attribute of an object. Read from the source.

    no `global` statement, and no assignment to an attribute of a module, class or function of ours, or to `globals()`
    a mutable container at module or class level is a constant: UPPER_CASE, and no code in the package changes it
    an instance of one of our classes at module or class level is immutable: a frozen dataclass, a NamedTuple, an Enum
    no parameter has a mutable default
    functools.cache is for functions of hashable arguments without visible side effects: then the cache changes no result

Left out: the C++ dispatcher and allocator, and changes through another name of the same object.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "fugaku_megatron"
MODULES = sorted(PACKAGE.rglob("*.py"))

DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
CONSTRUCTORS = set("""list dict set bytearray iter fromkeys deque defaultdict OrderedDict Counter ChainMap count cycle array local
    Event Lock RLock Condition Queue SimpleQueue SimpleNamespace StringIO BytesIO WeakKeyDictionary WeakValueDictionary WeakSet
    ContextVar""".split())
CHANGES = set("""append appendleft extend extendleft insert remove pop popleft popitem clear sort reverse update setdefault add
    discard difference_update intersection_update symmetric_difference_update subtract rotate set reset __setitem__ __delitem__
    __setattr__""".split())
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*|__all__")
HASHABLE = set("str int float bool bytes complex None Path tuple frozenset type Literal dtype Fraction".split())
EFFECTS = set("""print setattr delattr exec eval write writelines write_text write_bytes mkdir unlink rmdir rename touch chmod
    putenv seed manual_seed""".split())


@dataclass
class Module:
    """A source file: its tree, and the names that it binds to modules and to names in them."""

    name: str  # fugaku_megatron.run.config
    tree: ast.Module
    modules: dict[str, str] = field(default_factory=dict)  # local name -> module of ours
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)  # local name -> (module of ours, name in it)


def read(name: str, source: str, is_package: bool = False) -> Module:
    module = Module(name, ast.parse(source))
    parts = name.split(".")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                module.imported[alias.asname or alias.name] = (origin, alias.name)
                module.modules[alias.asname or alias.name] = f"{origin}.{alias.name}"
        elif isinstance(node, ast.Import):
            module.modules |= {alias.asname or alias.name: alias.name for alias in node.names}
    return module


@functools.cache
def package() -> dict[str, Module]:
    names = {path: ".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)) for path in MODULES}
    modules = [read(names[path].removesuffix(".__init__"), path.read_text(), path.stem == "__init__") for path in MODULES]
    return {module.name: module for module in modules}


def last_name(node: ast.expr) -> str:
    return ast.unparse(node).split(".")[-1]


def called(node: ast.expr) -> str:
    """The last part of the name that a call calls; empty for other expressions."""
    function = node.func if isinstance(node, ast.Call) else None
    function = function.value if isinstance(function, ast.Subscript) else function  # deque[int]()
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr, int]]:
    """(name, value, line) of the names that statements bind, those inside if, try and with included."""
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                spread = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(names) == len(node.value.elts)
                for name, value in zip(names, node.value.elts if spread else [node.value] * len(names)):
                    if isinstance(name, ast.Name):
                        yield name.id, value, node.lineno
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from assignments(getattr(node, block, []))


def definition(name: str, module: Module, modules: dict[str, Module]) -> ast.ClassDef | ast.FunctionDef | None:
    """The class or function of ours that a name stands for in a module."""
    origin, original = module.imported.get(name, (module.name, name))
    if origin not in modules:
        return None
    defined = (node for node in modules[origin].tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)))
    return next((node for node in defined if node.name == original), None)


def is_immutable(node: ast.AST | None) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    frozen = any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
    return frozen or any(last_name(base) in ("NamedTuple", "Enum", "IntEnum", "StrEnum", "Flag") for base in node.bases)


def is_container(value: ast.expr) -> bool:
    return isinstance(value, DISPLAYS) or called(value) in CONSTRUCTORS


def containers(module: Module) -> set[str]:
    return {name for name, value, _ in assignments(module.tree.body) if is_container(value)}


def bound_by(function: ast.AST) -> set[str]:
    """Names local to a function (or lambda)."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    stores = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stores | {argument.arg for argument in every if argument}


def with_locals(node: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """Every node below, with the names that are local to the functions around it."""
    for child in ast.iter_child_nodes(node):
        inner = local | bound_by(child) if isinstance(child, (ast.FunctionDef, ast.Lambda)) else local
        yield child, inner
        yield from with_locals(child, inner)


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that stand for an object which a node changes: X in X[i] = 1, del X.a, X += ..., X.append(...)."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = [t for target in node.targets for t in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = [node.target]
    for target in targets:
        if isinstance(target, (ast.Subscript, ast.Attribute)):
            yield target.value
        elif isinstance(node, ast.AugAssign):
            yield target
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        yield node.func.value
    if isinstance(node, ast.Call) and called(node) in ("setattr", "delattr") and node.args:
        yield node.args[0]


def objects(expression: ast.expr) -> Iterator[ast.expr]:
    """An expression and what it is taken from: A.b[0], A.b, A; a container is changed with what it holds."""
    yield expression
    while isinstance(expression, (ast.Subscript, ast.Attribute)):
        expression = expression.value
        yield expression


def state_behind(expression: ast.expr, module: Module, modules: dict[str, Module], local: frozenset[str]) -> str | None:
    """The source of an expression if its object outlives calls: a module-level container, module, class, function, globals()."""
    text = ast.unparse(expression)
    if text in ("globals()", "vars()", "cls") or text.endswith(".__class__") or called(expression) == "type":
        return text
    if not isinstance(expression, ast.Name) or expression.id in local:
        return None  # A.b of a module A of ours is seen when A is
    origin, original = module.imported.get(text, (module.name, text))
    is_container = origin in modules and original in containers(modules[origin])
    return text if is_container or module.modules.get(text) in modules or definition(text, module, modules) else None


def mutations(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    for node, local in with_locals(module.tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
        for expression in changed(node):
            names = filter(None, (state_behind(part, module, modules, local) for part in objects(expression)))
            if name := next(names, None):
                yield f"line {node.lineno}: changes {name}"


def mutable_names(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    bodies = [module.tree.body, *(node.body for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))]
    for name, value, line in (assignment for body in bodies for assignment in assignments(body)):
        if is_container(value) and not CONSTANT.fullmatch(name):
            yield f"line {line}: {name} is a mutable container and no constant"
        cls = definition(called(value), module, modules)
        if isinstance(cls, ast.ClassDef) and not is_immutable(cls):
            yield f"line {line}: {name} is an instance of {cls.name}, which can change"


def is_hashable(annotation: ast.expr | None, module: Module, modules: dict[str, Module]) -> bool:
    if annotation is None:
        return False
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        return is_hashable(annotation.left, module, modules) and is_hashable(annotation.right, module, modules)
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        inner = [] if last_name(annotation.value) == "Literal" else inner
        return all(is_hashable(part, module, modules) for part in (annotation.value, *inner))
    if isinstance(annotation, ast.Constant):
        return annotation.value is None or annotation.value is ...
    name = last_name(annotation)
    return name in HASHABLE or is_immutable(definition(name, module, modules))


def cached_functions(module: Module) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
    for parent in ast.walk(module.tree):
        for node in getattr(parent, "body", []) if isinstance(parent, (ast.Module, ast.ClassDef)) else []:
            if isinstance(node, ast.FunctionDef):
                decorators = {last_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
                if decorators & {"cache", "lru_cache"}:
                    yield node, parent if isinstance(parent, ast.ClassDef) else None


def cache_faults(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    for function, owner in cached_functions(module):
        where, a = f"line {function.lineno}: cached {function.name}", function.args
        parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        if owner and parameters[:1] and parameters[0].arg in ("self", "cls"):
            parameters = parameters[1:]
            if not is_immutable(owner):
                yield f"{where}: {owner.name} can change"
        yield from (f"{where}: {p.arg} has no hashable type" for p in parameters if not is_hashable(p.annotation, module, modules))
        names = {p.arg for p in parameters}
        for node in ast.walk(function):
            if isinstance(node, (ast.Yield, ast.YieldFrom)):
                yield f"{where} is a generator"
            elif isinstance(node, ast.Nonlocal) or isinstance(node, ast.Call) and called(node) in EFFECTS:
                yield f"{where}: {ast.unparse(node)} is a side effect"
            for expression in changed(node):
                if any(isinstance(part, ast.Name) and part.id in names for part in objects(expression)):
                    yield f"{where} changes its argument {ast.unparse(expression)}"


def mutable_defaults(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            for value in filter(None, (*node.args.defaults, *node.args.kw_defaults)):
                if is_container(value):
                    yield f"line {value.lineno}: the default {ast.unparse(value)} can change"


def faults(module: Module, modules: dict[str, Module]) -> list[str]:
    return [*mutable_names(module, modules), *mutations(module, modules), *mutable_defaults(module), *cache_faults(module, modules)]


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_keeps_no_state(path):
    name = ".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    assert faults(package()[name], package()) == []


TABLES = read("fugaku_megatron.tables", """
from dataclasses import dataclass
ROWS = {"a": 1}
@dataclass(frozen=True)
class Size:
    n: int
class Counter2:
    def __init__(self): self.n = 0
def helper(): ...
""")


def faults_of(source: str) -> list[str]:
    user = read("fugaku_megatron.user", source)
    return faults(user, {module.name: module for module in (TABLES, user)})


@pytest.mark.parametrize("source", [
    "x = 1\ndef f():\n    global x",
    "cache = {}",
    "names = [n for n in 'ab']",
    "numbers = itertools.count()",
    "from collections import deque\nwaiting, limit = deque(), 3",
    "class A:\n    seen = set()",
    "if True:\n    rows = []",
    "ROWS = {}\ndef f(): ROWS['a'] = 1",
    "ROWS = {}\ndef f(): del ROWS['a']",
    "ROWS = []\ndef f(): ROWS.append(1)",
    "ROWS = {'a': []}\ndef f(): ROWS['a'].append(1)",
    "ROWS = set()\nROWS |= {1}",
    "from .tables import ROWS\ndef f(): ROWS.update(a=1)",
    "from .tables import ROWS as R\ndef f(): R.pop('a')",
    "from . import tables\ndef f(): tables.ROWS['a'] = 2",
    "from . import tables as t\ndef f(): t.limit = 2",
    "import fugaku_megatron.tables as t\ndef f(): setattr(t, 'ROWS', 2)",
    "def f(name): globals()[name] = 1",
    "from .tables import Counter2\nCOUNTER = Counter2()",
    "from .tables import Counter2\ndef f(): Counter2.total = 1",
    "from .tables import helper\ndef f(): helper.calls += 1",
    "class A:\n    @classmethod\n    def f(cls): cls.n = 1",
    "class A:\n    def f(self): type(self).n += 1",
    "def f(rows=[]): ...",
    "@functools.cache\ndef f(x): return x",
    "@cache\ndef f(x: list[int]): return x",
    "@cache\ndef f(x: tuple[list, ...]): return x",
    "@lru_cache(3)\ndef f(x: int): yield x",
    "@cache\ndef f(x: int): print(x)",
    "@cache\ndef f(x: tuple[int, ...]): x.n = 3",
    "from .tables import Counter2\n@cache\ndef f(x: Counter2): return x.n",
    "class A:\n    @cache\n    def f(self): return 1",
])
def test_state_is_seen(source):
    assert len(faults_of(source)) == 1, faults_of(source)


@pytest.mark.parametrize("source", [
    "__all__ = ['f']",
    "ROWS = {'a': 1}\ndef f(): return ROWS['a'], ROWS.get('b'), dict(ROWS)",
    "from .tables import ROWS\ndef f():\n    ROWS = {}\n    ROWS['a'] = 1",
    "from .tables import Size\nSMALL = Size(1)",
    "from .tables import Size\n@cache\ndef f(x: Size | None, *y: tuple[int, ...], z: 'str'): return x",
    "def f():\n    rows = []\n    rows.append(1)",
    "class A:\n    def f(self): self.rows = []; self.rows.append(1)",
    "@dataclass(frozen=True)\nclass A:\n    n: int\n    @cache\n    def f(self): return 1",
    "import os\nos.environ['A'] = 'b'",
])
def test_what_is_no_state_passes(source):
    assert faults_of(source) == []
