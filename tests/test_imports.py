"""The import arrows of the house: who may know whom. Imports are read from the source, those inside functions too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fugaku_megatron"
# module or package -> what it may import of ours. A name stands for the module or everything in the package.
ALLOWED = {
    "config": set(),
    "batches": {"config"},
    "recipes": {"config"},
    "accounting": {"config", "batches"},
    "memory": {"accounting", "config"},
    "arguments": {"config", "recipes"},
    "kernels": {"_kernels"},
    "comm": {"comm"},
    "data": {"data", "comm.base", "comm.agreement"},
    "nn": {"nn", "comm", "config", "accounting", "kernels", "memory"},
    "schedule": set(),
    "manifest": set(),
    "shards": set(),
    "checkpoint": {"manifest", "shards", "comm"},
    "metrics": {"log_table"},  # the door of python -m fugaku_megatron.metrics
    "run_log": {"accounting", "arguments", "config", "metrics"},
    "published_row": {"perf.rows"},
    "log_table": {"accounting", "arguments", "config", "perf.table_text", "perf.rows", "plot", "published_row", "run_log"},
    "plot": {"metrics"},
    "runtime": {"kernels"},
    "placement": {"kernels"},
    "profiler": {"accounting", "comm", "kernels"},
    "allocator": {"kernels"},
    "optim": {"kernels", "accounting", "checkpoint", "comm", "config"},
    "step": {"schedule", "comm", "nn"},
    "train": {"checkpoint", "schedule", "accounting", "batches", "comm", "config", "data", "nn", "optim", "step"},
    "dry_run": {"accounting", "batches", "schedule", "comm", "config", "memory", "nn"},
    "session": {"accounting", "allocator", "metrics", "plot", "profiler", "runtime", "train"},
    "pretrain": {"accounting", "allocator", "arguments", "batches", "checkpoint", "comm", "config", "data", "kernels", "metrics",
                 "nn", "optim", "placement", "profiler", "run_log", "runtime", "session", "train"},
    "perf": {"perf", "accounting", "batches", "config", "memory", "recipes", "arguments", "schedule"},
    "jobs": {"jobs", "comm.grid", "config", "arguments", "accounting", "batches", "recipes", "perf"},
    "jobs.slurm": {"jobs", "accounting", "arguments", "config", "memory", "schedule"},
    "perf.calibrate": {"perf", "config", "comm", "kernels", "metrics", "runtime"},
    "perf.host_kernels": {"perf", "accounting", "arguments", "comm", "config", "data", "kernels", "train"},
}
NO_TORCH = {"config", "batches", "recipes", "accounting", "memory", "arguments", "schedule", "manifest", "metrics", "plot",
            "run_log", "published_row", "log_table",
            *(f"perf/{p.stem}" for p in (PACKAGE / "perf").glob("*.py") if p.stem not in ("calibrate", "host_kernels"))}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py")


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports."""
    here = path.relative_to(ROOT).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def ours(path: Path) -> set[str]:
    """Our modules that a file imports, without the package's name: config, comm.base, nn.ops ..."""
    names = {".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in modules()} | {"_kernels"}
    found = {name.removeprefix("fugaku_megatron.") for name in imports(path) if name.startswith("fugaku_megatron.")}
    return found & names


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    room = ".".join(parts) if ".".join(parts) in ALLOWED else parts[0]
    assert room in ALLOWED, f"{room} has no row in ALLOWED: give the new module its place in the house"
    wrong = {name for name in ours(path) if name not in ALLOWED[room] and name.split(".")[0] not in ALLOWED[room]}
    assert not wrong, f"{path.name} must not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("name", sorted(NO_TORCH))
def test_pure_modules_know_no_torch(name):
    on_request = {"torch.utils.tensorboard", "torch.utils.tensorboard.SummaryWriter"}  # metrics, when asked for TensorBoard
    assert not {i for i in imports(PACKAGE / f"{name}.py") if i.split(".")[0] in ("torch", "mpi4py")} - on_request


def test_only_one_file_knows_mpi():
    assert [p.name for p in modules() if any(i.split(".")[0] == "mpi4py" for i in imports(p))] == ["mpi.py"]


def test_kernels_know_nothing_of_ours():
    for source in (ROOT / "kernels_sve").iterdir():
        assert "fugaku_megatron/" not in source.read_text() or source.suffix == ".md", source
