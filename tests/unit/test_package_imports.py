"""Which package, a folder or module of `fugaku_megatron`, may import which: from the source, imports inside functions too."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fugaku_megatron"
# package -> the packages that it may import, all of which stand above its own row
MAY_IMPORT: dict[str, set[str]] = {
    "_kernels": set(),
    "named_files": set(),
    "comm": set(),
    "pipeline": set(),
    "config": {"named_files", "pipeline"},
    "costs": {"pipeline", "config"},
    "data": {"named_files", "comm"},
    "host": {"comm", "_kernels"},
    "logs": {"named_files", "pipeline", "config", "costs"},
    "perf": {"named_files", "pipeline", "config", "costs", "logs"},
    "checkpoint": {"comm"},
    "nn": {"comm", "config", "costs", "host"},
    "watchdog": {"comm"},
    "jobs": {"named_files", "comm", "config", "costs", "perf", "checkpoint"},
    "training": {
        "comm",
        "pipeline",
        "config",
        "costs",
        "data",
        "host",
        "logs",
        "perf",
        "checkpoint",
        "nn",
        "watchdog",
    },
    "calibration": {"comm", "config", "costs", "data", "host", "perf", "training"},
    "report": {
        "named_files",
        "comm",
        "config",
        "costs",
        "data",
        "host",
        "perf",
        "nn",
        "training",
        "calibration",
    },
    "inference": {"named_files", "comm", "config", "costs", "data", "host", "checkpoint", "nn"},
    "convert": {"named_files", "comm", "config", "costs", "data", "host", "checkpoint", "nn"},
    "api": {
        "comm",
        "config",
        "data",
        "host",
        "checkpoint",
        "watchdog",
        "training",
        "inference",
        "convert",
    },
    "reproduction": {"config", "costs", "logs", "perf"},
    "cli": {"comm", "config"},  # and every command by its name, when it is called
    "__main__": {"cli"},
}
WITHOUT_TORCH = (
    "config",
    "costs",
    "pipeline",
    "logs",
    "perf",
    "jobs",
    "reproduction",
)  # answer in a second, anywhere


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


def top(name: str) -> str:
    return name.split(".")[0]


def test_imports_are_those_of_the_table():
    """Each one of the table is used as well, and all go up in it."""
    ours, made = {*(module_name(path, PACKAGE) for path in modules()), "_kernels"}, set()
    for path in modules():
        own = top(module_name(path, PACKAGE))
        imported = {top(name) for name in own_imports(path, PACKAGE) & ours} - {own}
        assert own in MAY_IMPORT, (
            f"{own} has no row in MAY_IMPORT: add one below the packages that it imports"
        )
        assert imported <= MAY_IMPORT[own], (
            f"{path} must not import {sorted(imported - MAY_IMPORT[own])}"
        )
        made |= {(own, other) for other in imported}
    assert made == {(own, other) for own, others in MAY_IMPORT.items() for other in others}
    order = list(MAY_IMPORT)
    assert all(order.index(other) < order.index(own) for own, other in made)


@pytest.mark.parametrize(
    "package", [PACKAGE, ROOT / "benchmarks"], ids=lambda package: package.name
)
def test_no_module_imports_itself_through_others(package):
    paths = {
        module_name(path, package): path
        for path in package.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: own_imports(path, package) & paths.keys() for name, path in paths.items()}
    TopologicalSorter(graph).prepare()  # or CycleError, which names the modules


def test_torch_and_mpi_are_imported_where_they_may_be():
    on_request = {
        "torch.utils.tensorboard",
        "torch.utils.tensorboard.SummaryWriter",
    }  # logs.metrics, when asked for TensorBoard
    with_mpi = []
    for path in modules():
        found = imports(path, PACKAGE)
        if top(module_name(path, PACKAGE)) in WITHOUT_TORCH:
            assert not {i for i in found if i.split(".")[0] in ("torch", "mpi4py")} - on_request, (
                path
            )
        with_mpi += [path.name] * any(i.split(".")[0] == "mpi4py" for i in found)
    assert with_mpi == ["mpi.py"]


def test_kernels_know_nothing_of_ours():
    for source in (ROOT / "kernels_sve").iterdir():
        assert "fugaku_megatron/" not in source.read_text() or source.suffix == ".md", source


def test_the_table_of_the_documentation_is_this_one():
    """docs/architecture.md has a row for each package, with what it may import, in the same order or another one."""
    rows = re.findall(
        r"^\| `(\w+)(?:/|\.py)` \|.*\| ([^|]*)\|$",
        (ROOT / "docs" / "architecture.md").read_text(),
        re.MULTILINE,
    )
    documented = {name: set(re.findall(r"`(\w+)`", imported)) for name, imported in rows}
    ours = {
        name: targets - {"_kernels"}
        for name, targets in MAY_IMPORT.items()
        if name not in ("_kernels", "__main__")
    }
    assert documented == ours
