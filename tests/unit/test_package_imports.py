"""The import arrows of the house: which room may know which. Imports are read from the source, those inside functions too.

A room is a package of `fugaku_megatron`, or a module that stands beside them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fugaku_megatron"
# room -> the rooms that it may import, in the order in which the house stands: every room only knows rooms above its own row.
ARROWS: dict[str, set[str]] = {
    "_kernels": set(),
    "environment": set(),  # used by the scripts of a checkout
    "comm": set(),
    "pipeline": set(),
    "config": {"pipeline"},
    "costs": {"pipeline", "config"},
    "data": {"comm"},
    "host": {"comm", "_kernels"},
    "logs": {"pipeline", "config", "costs"},
    "perf": {"pipeline", "config", "costs", "logs"},
    "checkpoint": {"comm"},
    "nn": {"comm", "config", "costs", "host"},
    "watchdog": {"comm"},
    "jobs": {"comm", "config", "costs", "perf", "checkpoint"},
    "training": {"comm", "pipeline", "config", "costs", "data", "host", "logs", "perf", "checkpoint", "nn", "watchdog"},
    "calibration": {"comm", "config", "costs", "data", "host", "perf", "training"},
    "inference": {"comm", "config", "costs", "data", "host", "checkpoint", "nn"},
    "convert": {"comm", "config", "costs", "host", "checkpoint", "nn"},
    "api": {"comm", "config", "data", "host", "checkpoint", "watchdog", "training", "inference", "convert"},
    "reproduction": {"config", "costs", "logs", "perf"},
    "cli": {"comm", "config"},  # and every command by its name, when it is called
    "__main__": {"cli"},
}
WITHOUT_TORCH = ("config", "costs", "pipeline", "logs", "perf", "jobs", "reproduction")  # answer in a second, anywhere


def module_name(path: Path, package: Path) -> str:
    """config.run_config for config/run_config.py of the package."""
    return ".".join(path.relative_to(package).with_suffix("").parts)


def imports(path: Path, package: Path) -> set[str]:
    """Absolute dotted names of everything a file of the package imports, modules and names in them alike."""
    here = (package.name, *path.relative_to(package).with_suffix("").parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def own_imports(path: Path, package: Path) -> set[str]:
    """Those of `imports` that lie in the package, without its name: run.config, comm.base, nn.ops.Ops ..."""
    prefix = f"{package.name}."
    return {name.removeprefix(prefix) for name in imports(path, package) if name.startswith(prefix)}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py")


def name_of(path: Path) -> str:
    """config.run_config for fugaku_megatron/config/run_config.py."""
    return module_name(path, PACKAGE)


def ours(path: Path) -> set[str]:
    """Our modules that a file imports, without the package's name: run.config, comm.base, nn.ops ..."""
    return own_imports(path, PACKAGE) & {*map(name_of, modules()), "_kernels"}


def room(name: str) -> str:
    return name.split(".")[0]


def test_arrows():
    wrong = {}
    for path in modules():
        own = room(name_of(path))
        assert own in ARROWS, f"{own} has no row in ARROWS: give the new room its place in the house"
        wrong[name_of(path)] = {name for name in ours(path) if room(name) not in ARROWS[own] | {own}}
    assert not {name: imported for name, imported in wrong.items() if imported}, "must not be imported"


def test_every_arrow_is_used():
    drawn = {(room(name_of(path)), room(name)) for path in modules() for name in ours(path)}
    assert {(a, b) for a, targets in ARROWS.items() for b in targets} == {(a, b) for a, b in drawn if a != b}


def test_rooms_stand_in_order():
    rooms = list(ARROWS)
    assert all(rooms.index(b) < rooms.index(a) for a, targets in ARROWS.items() for b in targets)


def graph_of(package: Path) -> dict[str, set[str]]:
    """What every module of a package imports of the package."""
    paths = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    names = {module_name(path, package) for path in paths}
    return {module_name(path, package): own_imports(path, package) & names for path in paths}


@pytest.mark.parametrize("package", [PACKAGE, ROOT / "benchmarks"], ids=lambda package: package.name)
def test_no_module_imports_itself_through_others(package):
    graph = graph_of(package)
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail[trail.index(name):], name))}"
        if name not in done:
            for other in graph.get(name, ()):
                walk(other, (*trail, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_rooms_without_torch():
    on_request = {"torch.utils.tensorboard", "torch.utils.tensorboard.SummaryWriter"}  # logs.metrics, when asked for TensorBoard
    for path in modules():
        if room(name_of(path)) in WITHOUT_TORCH:
            assert not {i for i in imports(path, PACKAGE) if i.split(".")[0] in ("torch", "mpi4py")} - on_request, path


def test_only_one_file_knows_mpi():
    assert [p.name for p in modules() if any(i.split(".")[0] == "mpi4py" for i in imports(p, PACKAGE))] == ["mpi.py"]


def test_kernels_know_nothing_of_ours():
    for source in (ROOT / "kernels_sve").iterdir():
        assert "fugaku_megatron/" not in source.read_text() or source.suffix == ".md", source


def test_the_table_of_the_documentation_is_this_one():
    """docs/architecture.md has a row for each package, with what it may import, in the same order or another one."""
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \|.*\| ([^|]*)\|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    documented = {name: set(re.findall(r"`(\w+)`", imported)) for name, imported in rows}
    assert documented == {name: targets - {"_kernels"} for name, targets in ARROWS.items() if name not in ("_kernels", "__main__")}
