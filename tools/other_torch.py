"""Puts another torch beside the one of .venv, into .torch/VERSION, to run tests with it.

    PYTHONPATH=.torch/2.9.1 python -m pytest ...            after: python -m tools.other_torch 2.9.1

Most of torch's x86-64 wheels are for CUDA, whose libraries are gigabytes that no test calls. They are left out: one small
library has the symbols that the rest of torch names of them. Where torch calls it at its start, it answers with zeros.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".torch"
LEFT_OUT = re.compile(
    r"torch/(include|share)/|torch/lib/\S+\.a$|torch/lib/lib(?!c10_)\S*(cuda|cu|nv)\S*\.so"
)
# torch 2.15 looks for the CUDA kernels that these replace.
EMPTIED = ("torch/_native/ops/__init__.py",)
CUDA_LIBRARY = re.compile(r"lib(cu|nv|torch_cuda|torch_nv)")
CUDA_SYMBOL = re.compile(r"_Z(N|NK|TIN|TVN)(2at|3c10|4c10d|5torch|3sdp)|cu[A-Z]")

# A constructor makes an object with virtual functions, a type is a class without bases, any other function returns zeros.
ASSEMBLY = """
.section .note.GNU-stack,"",@progbits
.local zeros
.comm zeros,65536,64
.text
function: lea zeros(%rip),%rax
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
    return FUNCTION.format(symbol, "constructor" if "C1E" in symbol else "function")


def replace_cuda(folder: Path) -> None:
    """Link the small library for all of CUDA's that a library in `folder` needs."""
    libraries = list(folder.glob("*.so*"))
    symbols = absent_symbols(libraries)
    if not symbols:
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


def make(version: str, folder: Path) -> None:
    """Download torch's wheel and unpack what runs on a CPU. No cap of this machine's pip applies."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    with tempfile.TemporaryDirectory(dir=FOLDER) as downloaded:
        subprocess.run(
            [*pip, "--no-deps", "--dest", downloaded, f"torch=={version}"],
            check=True,
            env={**os.environ, "PIP_CONSTRAINT": os.devnull},
        )
        (wheel,) = Path(downloaded).glob("*.whl")
        archive = zipfile.ZipFile(wheel)
        archive.extractall(folder, [x for x in archive.namelist() if not LEFT_OUT.search(x)])
    for name in EMPTIED:
        if (folder / name).exists():
            (folder / name).write_text("")
    (folder / "torch" / "bin" / "torch_shm_manager").chmod(0o755)
    replace_cuda(folder / "torch" / "lib")


def main() -> None:
    if platform.machine() != "x86_64" or len(sys.argv) != 2:
        sys.exit("other_torch: pass one version of torch, such as 2.9.1, on x86-64")
    folder = FOLDER / sys.argv[1]
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        make(sys.argv[1], unfinished)
    except subprocess.CalledProcessError as error:
        words = (error.stderr or "").strip().splitlines() or ["see above"]
        sys.exit(f"other_torch: {error.cmd[0]} failed: {words[-1]}")
    unfinished.rename(folder)


if __name__ == "__main__":
    main()
