"""Which package, a folder or module of `fugaku_megatron`, may import which: from the source, imports inside functions too."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fugaku_megatron"
# package -> the packages that it may import, all of which stand above its own row
MAY_IMPORT: dict[str, set[str]] = {
    "_kernels": set(),
    "start": set(),
    "text": set(),
    "comm": {"start"},
    "pipeline": set(),
    "config": {"text", "pipeline"},
    "cli": {"start", "config"},
    "costs": {"pipeline", "config"},
    "data": {"text", "comm"},
    "host": {"_kernels", "text", "comm"},
    "checkpoint": {"comm"},
    "nn": {"comm", "config", "costs", "host"},
    "optim": {"comm", "config", "costs", "checkpoint", "nn"},
    "training": {
        "start",
        "comm",
        "pipeline",
        "config",
        "costs",
        "data",
        "checkpoint",
        "nn",
        "optim",
    },
    "observe": {
        "start",
        "text",
        "comm",
        "pipeline",
        "config",
        "cli",
        "costs",
        "data",
        "host",
        "nn",
        "optim",
        "training",
    },
    "planner": {"text", "pipeline", "config", "cli", "costs", "observe"},
    "jobs": {"start", "text", "comm", "config", "cli", "costs", "checkpoint", "planner"},
    "run": {
        "start",
        "text",
        "comm",
        "pipeline",
        "config",
        "cli",
        "costs",
        "data",
        "host",
        "checkpoint",
        "nn",
        "training",
        "observe",
        "planner",
    },
    "calibration": {"comm", "config", "cli", "costs", "data", "host", "training", "planner"},
    "report": {
        "start",
        "text",
        "comm",
        "config",
        "cli",
        "costs",
        "data",
        "host",
        "nn",
        "training",
        "planner",
        "calibration",
    },
    "inference": {"text", "comm", "config", "cli", "costs", "data", "host", "checkpoint", "nn"},
    "convert": {
        "start",
        "text",
        "comm",
        "config",
        "cli",
        "costs",
        "data",
        "host",
        "checkpoint",
        "nn",
    },
    "api": {
        "start",
        "comm",
        "config",
        "cli",
        "data",
        "host",
        "checkpoint",
        "training",
        "observe",
        "run",
        "inference",
        "convert",
    },
    "reproduction": {"text", "config", "cli", "costs", "observe", "planner"},
    "__main__": {"cli"},
}
WITHOUT_TORCH = (
    "start",
    "text",
    "config",
    "cli",
    "costs",
    "pipeline",
    "planner",
    "jobs",
    "reproduction",
)  # answer in a second, anywhere


def module_name(path: Path, package: Path) -> str:
    """config.run_config for config/run_config.py of the package."""
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")


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
    """Return the `imports` within the package, without its name: run.config, comm.base, nn.ops.Ops ..."""
    prefix = f"{package.name}."
    return {name.removeprefix(prefix) for name in imports(path, package) if name.startswith(prefix)}


def modules() -> list[Path]:
    """Return the package's modules, and its subpackages that have code of their own."""
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return sorted(path for path in paths if path.stat().st_size)


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
    }  # observe.metrics_writer, when asked for TensorBoard
    with_mpi = []
    for path in modules():
        found = imports(path, PACKAGE)
        if top(module_name(path, PACKAGE)) in WITHOUT_TORCH:
            assert not {i for i in found if i.split(".")[0] in ("torch", "mpi4py")} - on_request, (
                path
            )
        with_mpi += [path.name] * any(i.split(".")[0] == "mpi4py" for i in found)
    assert with_mpi == ["mpi.py"]


def test_the_planner_and_the_supervisor_load_neither_torch_nor_mpi():
    names = [f"fugaku_megatron.{module_name(path, PACKAGE)}" for path in modules()]
    planning = [
        name
        for name in names
        if name.split(".")[1] in WITHOUT_TORCH
        and not name.startswith("fugaku_megatron.jobs.")  # the grid of process groups
    ]
    planning += ["fugaku_megatron.jobs.supervise", "fugaku_megatron.run.plan"]
    code = f"import sys, {', '.join(planning)}; print({{'torch', 'mpi4py'}} & {{*sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr


def test_kernels_know_nothing_of_ours():
    for source in (ROOT / "kernels_sve").rglob("*.*"):
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
