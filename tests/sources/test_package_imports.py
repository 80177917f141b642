"""Imports between the packages of `fugaku_megatron`, also inside functions, against the table of docs/architecture.md."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fugaku_megatron"
# package -> the packages that it may import, all of which are above its own row
MAY_IMPORT: dict[str, set[str]] = {
    name: set(re.findall(r"`(\w+)`", imported))
    for name, imported in re.findall(
        r"^\| `(\w+)/` \|.*\| ([^|]*)\|$",
        (ROOT / "docs" / "architecture.md").read_text(),
        re.MULTILINE,
    )
}
# Packages that answer in a second, anywhere
WITHOUT_TORCH = "start text config cli costs pipeline planner jobs reproduction".split()


def module_name(path: Path, package: Path) -> str:
    """Return config.run_config for config/run_config.py of the package."""
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")


def own_imports(path: Path, package: Path) -> set[str]:
    """Return a file's imports within its package, modules and names alike: run.config, comm.base, nn.ops.Ops ..."""
    here = (package.name, *path.relative_to(package).with_suffix("").parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    prefix = f"{package.name}."
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def modules() -> list[Path]:
    """Return the package's modules, and its subpackages that have code of their own."""
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return sorted(path for path in paths if path.stat().st_size)


def top(name: str) -> str:
    return name.split(".")[0]


def test_imports_are_those_of_the_table():
    ours = {module_name(path, PACKAGE) for path in modules()}
    made: dict[str, set[str]] = {name: set() for name in MAY_IMPORT}
    for path in modules():
        own = top(module_name(path, PACKAGE))
        if own == "__main__":
            continue
        assert own in MAY_IMPORT, f"{own} has no row: add one below the packages that it imports"
        imported = {top(name) for name in own_imports(path, PACKAGE) & ours} - {own}
        assert imported <= MAY_IMPORT[own], f"{path} imports {sorted(imported - MAY_IMPORT[own])}"
        made[own] |= imported
    assert made == MAY_IMPORT, "an entry that no module uses"
    order = list(MAY_IMPORT)
    for own, others in made.items():
        assert all(order.index(other) < order.index(own) for other in others), own


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


def test_the_planner_and_the_supervisor_load_neither_torch_nor_mpi():
    names = [f"fugaku_megatron.{module_name(path, PACKAGE)}" for path in modules()]
    planning = [
        name
        for name in names
        if name.split(".")[1] in WITHOUT_TORCH
        and not name.startswith("fugaku_megatron.jobs.")  # the grid of process groups
    ]
    planning += ["fugaku_megatron.jobs.supervise", "fugaku_megatron.costs.plan"]
    code = f"import sys, {', '.join(planning)}; print({{'torch', 'mpi4py'}} & {{*sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
