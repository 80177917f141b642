"""Puts another torch and numpy beside those of .venv, into ~/.cache/fugaku_megatron, and prints their folders, to run tests.

    PYTHONPATH=$(python -m tools.other_torch 2.9.1/1.24.0) python -m pytest ...

Most of torch's x86-64 wheels are for CUDA, whose libraries are gigabytes that no test calls. They are left out: one small
library has the symbols that the rest of torch names of them, finds no device, and answers the rest with zeros. The checkouts
of a machine share the folder ($XDG_CACHE_HOME names another than ~/.cache), as they share ccache's objects.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

THIS_PYTHON = ".".join(map(str, sys.version_info[:2]))
UNAVAILABLE = 3  # exit status by which `make test-torch` leaves a version out
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fugaku_megatron"
LEFT_OUT = re.compile(r"torch/share/|torch/lib/\S+\.a$|torch/lib/lib(?!c10_)\S*(cuda|cu|nv)\S*\.so")
# torch 2.15 looks for the CUDA kernels that these replace.
EMPTIED = ("torch/_native/ops/__init__.py",)
# transformers asks before each forward pass, also on a CPU.
APPENDED = {
    "torch/cuda/graphs.py": "\n\ndef is_current_stream_capturing() -> bool:\n    return False\n"
}
CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl|torch_cuda|torch_nv)")
CUDA_SYMBOL = re.compile(r"_Z(N|NK|TIN|TVN)(2at|3c10|4c10d|5torch|3sdp)|(cu|nccl)[A-Z]")

# Beside the folders that PYTHONPATH names, pip would install these for a torch that calls none of them.
CUDA_REQUIREMENT = re.compile(
    r"^Requires-Dist: (nvidia|cuda|triton).*\n", re.MULTILINE | re.IGNORECASE
)

# A constructor makes an object with virtual functions, a type is a class without bases, the number of devices is an error
# (cudaErrorNoDevice), any other function returns zeros.
ASSEMBLY = """
.section .note.GNU-stack,"",@progbits
.local zeros
.comm zeros,65536,64
.text
function: lea zeros(%rip),%rax
ret
no_device: mov $100,%eax
ret
constructor: lea virtual(%rip),%rax
mov %rax,(%rdi)
movq $0,8(%rdi)
movq $0,16(%rdi)
ret
.data
.balign 16
.quad 0, type
virtual: .rept 64
.quad function
.endr
type: .quad _ZTVN10__cxxabiv117__class_type_infoE+16, 1f
1: .asciz "absent"
.balign 16
"""
TYPE = """.globl {0}
.type {0},@object
{0}: .quad _ZTVN10__cxxabiv117__class_type_infoE+16, 1f
.zero 48
1: .asciz "{0}"
.balign 16
"""
FUNCTION = ".globl {0}\n.type {0},@function\n.set {0},{1}\n"


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def absent_symbols(libraries: list[Path]) -> dict[str, set[str]]:
    """Return symbol version -> symbols that only CUDA's libraries define; "FM" for symbols without a version."""
    needed: dict[str, str] = {}
    defined = set()
    for library in libraries:
        for line in output("nm", "--dynamic", library).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind == "U":
                needed[name] = version
            else:
                defined.add(name)
    absent: dict[str, set[str]] = {}
    for name, version in needed.items():
        if version.startswith("libcu") or not version and CUDA_SYMBOL.match(name):
            absent.setdefault(version or "FM", set()).add(name)
    return {version: names - defined for version, names in absent.items()}


def definition(symbol: str) -> str:
    if symbol.startswith(("_ZTI", "_ZTV")):
        return TYPE.format(symbol)
    if symbol == "cudaGetDeviceCount":
        return FUNCTION.format(symbol, "no_device")
    return FUNCTION.format(symbol, "constructor" if "C1E" in symbol else "function")


def replace_cuda(folder: Path) -> None:
    """Link the small library for all of CUDA's that a library in `folder` needs."""
    libraries = list(folder.glob("*.so*"))
    symbols = absent_symbols(libraries)
    if not any(symbols.values()):
        return
    source = folder / "absent.s"
    versions = folder / "absent.map"
    library = folder / "libabsent.so"
    names = sorted(name for each in symbols.values() for name in each)
    source.write_text(ASSEMBLY + "".join(map(definition, names)))
    rows = [f"{key} {{ global: {'; '.join(each)}; }};\n" for key, each in symbols.items() if each]
    versions.write_text("".join(rows))
    flags = ["-shared", "-Wl,-soname,libabsent.so", f"-Wl,--version-script={versions}"]
    output("gcc", *flags, "-o", library, source, "-lstdc++")
    dynamic = "".join(output("readelf", "--dynamic", "--wide", path) for path in libraries)
    for name in sorted(set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))):
        if CUDA_LIBRARY.match(name) and not (folder / name).exists():
            (folder / name).symlink_to(library.name)


class Unavailable(Exception):
    """Reason why this machine cannot have another torch, in one line."""


def download(requirement: str, folder: Path, python: str) -> Path:
    """Download a package's wheel for a version of Python into `folder`. No cap of this machine's pip applies."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--python-version", python]
    done = subprocess.run(
        [*pip, *options, "--dest", folder, requirement],
        env={**os.environ, "PIP_CONSTRAINT": os.devnull},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["failed"])[-1]
        raise Unavailable(f"no {requirement} here: pip: {reason}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract(requirement: str, folder: Path, python: str) -> None:
    """Unpack what runs on a CPU of a package's wheel."""
    with tempfile.TemporaryDirectory(dir=CACHE) as downloaded:
        archive = zipfile.ZipFile(download(requirement, Path(downloaded), python))
        archive.extractall(folder, [x for x in archive.namelist() if not LEFT_OUT.search(x)])


def without_cuda(folder: Path) -> None:
    """Change an unpacked torch so that it needs none of CUDA's libraries."""
    for name in EMPTIED:
        if (folder / name).exists():
            (folder / name).write_text("")
    for name, lines in APPENDED.items():
        with open(folder / name, "a") as module:
            module.write(lines)
    (folder / "torch" / "bin" / "torch_shm_manager").chmod(0o755)
    replace_cuda(folder / "torch" / "lib")
    (metadata,) = folder.glob("torch-*.dist-info/METADATA")
    metadata.write_text(CUDA_REQUIREMENT.sub("", metadata.read_text()))


def place(package: str, version: str, python: str) -> Path:
    """Return the folder of a version as this recipe makes it."""
    replaced = (EMPTIED, APPENDED, ASSEMBLY, TYPE)
    recipe = (LEFT_OUT, CUDA_LIBRARY, CUDA_SYMBOL, CUDA_REQUIREMENT, *replaced, python)
    digest = hashlib.sha256(repr(recipe).encode()).hexdigest()
    return CACHE / f"{package}-{version}-{digest[:8]}"


def unpacked(package: str, version: str, python: str = THIS_PYTHON) -> Path:
    """Return the folder of a version of torch or numpy, made if the cache lacks it."""
    if platform.machine() != "x86_64":
        raise Unavailable(f"no {package} {version} here: tools/other_torch.py is for x86-64")
    folder = place(package, version, python)
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = CACHE / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            extract(f"{package}=={version}", unfinished, python)
            if package == "torch":
                without_cuda(unfinished)
            unfinished.rename(folder)
    return folder


def folders(pair: str) -> list[Path]:
    """Return the folders of a pair torch/numpy such as 2.9.1/1.24.0."""
    return [unpacked(*row) for row in zip(("torch", "numpy"), pair.split("/"))]


def wheel(version: str, python: str) -> Path:
    """Return a wheel of a torch without CUDA's libraries for another Python, made if the cache lacks it."""
    folder = unpacked("torch", version, python)
    tag = f"cp{python.replace('.', '')}"
    path = folder / "wheel" / f"torch-{version}+cpu-{tag}-{tag}-linux_x86_64.whl"
    if path.exists():
        return path
    (old,) = folder.glob("torch-*.dist-info")
    metadata = f"torch-{version}+cpu.dist-info"
    names = []
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with zipfile.ZipFile(unfinished, "w") as archive:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            if file.parent == path.parent or file.name == "RECORD":
                continue
            name = str(file.relative_to(folder)).replace(old.name, metadata)
            names.append(name)
            if file.name == "METADATA" and file.parent == old:
                text = re.sub(
                    r"^Version: .*", f"Version: {version}+cpu", file.read_text(), flags=re.M
                )
                archive.writestr(name, text)
            else:
                archive.write(file, name)
        archive.writestr(f"{metadata}/RECORD", "".join(f"{name},,\n" for name in names))
    unfinished.rename(path)
    return path


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(
            "other_torch: pass one pair torch/numpy, such as 2.9.1/1.24.0, or one version of torch"
        )
    try:
        print(*folders(sys.argv[1]), sep=os.pathsep)
    except Unavailable as reason:
        print(f"other_torch: {reason}", file=sys.stderr)
        sys.exit(UNAVAILABLE)
    except subprocess.CalledProcessError as error:
        words = error.stderr.strip().splitlines() or ["no output"]
        sys.exit(f"other_torch: {error.cmd[0]} failed: {words[-1]}")


if __name__ == "__main__":
    main()
