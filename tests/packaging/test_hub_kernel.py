"""The folder that the kernels library of Hugging Face loads from disk."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fugaku_megatron
from tools import hub_kernel

pytestmark = pytest.mark.system

X86_64 = hub_kernel.variant_of("x86_64")
AARCH64 = hub_kernel.variant_of("aarch64")
PROGRAM = """
import pathlib, sys
from kernels import get_loaded_kernels, get_local_kernel
import torch

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name in ("fugaku_megatron", "mpi4py", "transformers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
kernel = get_local_kernel(pathlib.Path(sys.argv[1]))
build = sys.modules[f"{kernel.__name__}.fugaku_megatron.torch_backend.build"]
build.load().count(True)
a = torch.full((256, 256), 2.0)
with kernel.enabled(kernels="native"):
    print((a @ a)[0, 0].item())
print([(name, calls, served) for name, calls, served, *_ in build.load().counts()])
print(pathlib.Path(kernel.__file__).parent.name, get_loaded_kernels()[0].metadata.version)
"""


def load(folder: Path, cwd: Path, **variables: str) -> list[str]:
    """Load the kernel in a process that finds the package nowhere else; return the printed lines."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        cwd=cwd,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def folder(wheel, tmp_path) -> Path:
    """The repository of this machine's wheel and of an aarch64 wheel with no library."""
    wheels = tmp_path / "dist"
    wheels.mkdir()
    shutil.copy(wheel, wheels)
    other = wheel.name.replace("linux_x86_64", "manylinux_2_28_aarch64")
    with zipfile.ZipFile(wheels / other, "w") as archive:
        archive.writestr("fugaku_megatron/on_arm.so", b"")
    output = tmp_path / "kernel"
    hub_kernel.write(wheels, output)
    return output


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the other wheel is of aarch64")
def test_each_machine_has_a_variant_and_one_has_all(folder):
    variants = {path.name: path for path in (folder / "build").iterdir()}
    assert set(variants) == {X86_64, AARCH64, "torch-universal"}
    has_arm = {name: bool([*path.rglob("on_arm.so")]) for name, path in variants.items()}
    assert has_arm == {X86_64: False, AARCH64: True, "torch-universal": True}
    metadata = [json.loads((path / "metadata.json").read_text()) for path in variants.values()]
    assert len({row["id"] for row in metadata}) == 3
    assert all(row["id"].isidentifier() for row in metadata)
    assert not [*folder.rglob("*.dist-info")]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the wheel is of x86-64")
def test_kernels_loads_it_without_a_compiler(folder, tmp_path):
    pytest.importorskip("kernels")
    lines = load(folder, tmp_path, CXX="no-compiler")
    assert lines == ["1024.0", "[('mm', 1, 1)]", f"{X86_64} 1"]
    shutil.rmtree(folder / "build" / X86_64)
    assert load(folder, tmp_path, CXX="no-compiler")[-1] == "torch-universal 1"


def test_no_wheel_is_one_line(tmp_path):
    command = [sys.executable, "-m", "tools.hub_kernel", "--wheels", str(tmp_path)]
    done = subprocess.run(command, cwd=hub_kernel.ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    version = fugaku_megatron.__version__
    assert done.stderr.splitlines()[-1].endswith(
        f"no wheel of version {version} in {tmp_path}: run make wheels"
    )
