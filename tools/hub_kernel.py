"""Writes dist/kernel/, a kernel repository of the Hugging Face `kernels` library, from the wheels in dist/.

    make hub-kernel          (or: python -m tools.hub_kernel [--wheels DIST] [--output DIST/kernel])

A variant in build/ is a package that the library loads by its path: one for the pinned torch of each machine, which needs no compiler, and
torch-universal with the libraries of all wheels, which compiles the dispatch library for any other torch. The wheels of one version
for several Pythons share a variant.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

import fugaku_megatron

ROOT = Path(__file__).resolve().parents[1]
NAME = "fugaku-megatron"
UNIVERSAL = "torch-universal"
VERSION = 1  # of the kernel's interface: the branch v1 of its repository
INIT = '''"""ATen's operators on the CPU, in FP32 and BF16, run on this package's kernels from the import on."""

from .fugaku_megatron.torch_backend import enabled, use
from .fugaku_megatron.torch_backend.accelerate import accelerate, restore

__all__ = ["accelerate", "enabled", "restore", "use"]
'''
CARD = f"""---
library_name: kernels
license: apache-2.0
tags:
- kernels
---

# {NAME}

PyTorch programs on the CPU (x86-64 with AVX2 or AVX-512, aarch64 with SVE). Loading the kernel replaces operators of ATen in FP32 and BF16:

```python
from kernels import get_kernel

kernel = get_kernel("ORGANIZATION/{NAME}", version={VERSION}, trust_remote_code=True)
model = kernel.accelerate(model)  # a model of transformers; operators alone need no call
with kernel.enabled(False):
    ...  # PyTorch's kernels
```

It needs torch 2.9 or newer and NumPy. A torch without a variant of its own needs g++: a small library is compiled at the first import.
"""


class NoWheels(Exception):
    """Wheels that are missing, in one line."""


def pinned_torch(machine: str) -> str:
    """Return the version of torch in requirements.txt for a machine, for example "2.13"."""
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line.startswith("torch=="):
            requirement = Requirement(line)
            if requirement.marker and requirement.marker.evaluate({"platform_machine": machine}):
                (specifier,) = requirement.specifier
                return ".".join(specifier.version.split(".")[:2])
    raise ValueError(f"requirements.txt has no torch for {machine}")


def machine_of(wheel: Path) -> str:
    """Return the machine type at the end of a wheel's platform tag."""
    tags = parse_wheel_filename(wheel.name)[3]
    (platform,) = {tag.platform for tag in tags}
    return "x86_64" if platform.endswith("x86_64") else platform.rpartition("_")[2]


def variant_of(machine: str) -> str:
    """Return the name of a machine's variant for its pinned torch."""
    return f"torch{pinned_torch(machine).replace('.', '')}-cxx11-cpu-{machine}-linux"


def write_variant(folder: Path, wheels: Iterable[Path]) -> None:
    """Write a variant with the package of the wheels."""
    digest = hashlib.sha256()
    for wheel in sorted(wheels):
        archive = zipfile.ZipFile(wheel)
        digest.update(wheel.read_bytes())
        names = [name for name in archive.namelist() if name.startswith("fugaku_megatron/")]
        archive.extractall(folder, names)
    (folder / "__init__.py").write_text(INIT)
    identity = f"_{NAME}_{folder.name}_{digest.hexdigest()[:12]}"
    metadata = {
        "name": NAME,
        "id": identity.replace("-", "_"),
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def write(wheels: Path, output: Path) -> None:
    """Write the repository from the wheels of this version in a folder. NoWheels if there are none."""
    chosen = sorted(wheels.glob(f"fugaku_megatron-{fugaku_megatron.__version__}-*.whl"))
    if not chosen:
        raise NoWheels(
            f"no wheel of version {fugaku_megatron.__version__} in {wheels}: run make wheels"
        )
    shutil.rmtree(output, ignore_errors=True)
    variants = {UNIVERSAL: chosen}
    for wheel in chosen:
        variants.setdefault(variant_of(machine_of(wheel)), []).append(wheel)
    for name, its_wheels in variants.items():
        folder = output / "build" / name
        folder.mkdir(parents=True)
        write_variant(folder, its_wheels)
    (output / "README.md").write_text(CARD)
    shutil.copy(ROOT / "LICENSE", output)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="hub_kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="folder with the wheels")
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "kernel")
    options = parser.parse_args()
    try:
        write(options.wheels, options.output)
    except NoWheels as reason:
        parser.error(str(reason))
    for variant in sorted(path.name for path in (options.output / "build").iterdir()):
        print(f"{options.output}/build/{variant}")


if __name__ == "__main__":
    main()
