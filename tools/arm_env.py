"""Makes .arm/: an A64FX to test on, on any x86-64 Debian 12: cross compiler, emulator, ARM Python with torch, Open MPI.

    make arm-env                           (or: python -m tools.arm_env; a second call finds everything and ends at once)
    make arm-ext                           (or: python -m tools.arm_env extension; also cross-builds the C++ libraries for it)
    .arm/python -c "import torch"          ARM Python under qemu-user, which refuses what an A64FX lacks
    QEMU_CPU=max .arm/python ...           another CPU

Four parts, each with a stamp of its own, so that a call after a failure continues where the last one ended:
host (apt packages of this machine), sysroot (arm64 Debian packages, unpacked and not installed), site (aarch64 wheels),
python (the wrapper, and bytecode for the two before). Left out: chroots, binfmt and speed, because emulated times mean nothing.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARM = ROOT / ".arm"
PYTHON = "3.11"  # Debian 12's, and the one that the wheels and the extension are for
CXX = "aarch64-linux-gnu-g++-12"
HOST_PACKAGES = {
    CXX: "g++-12-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
    "mpirun.openmpi": "openmpi-bin",
}
CODEGEN_PACKAGES = {"clang++-19": "clang-19", "llvm-mca-19": "llvm-19", "ld.lld-19": "lld-19"}
ROOT_PACKAGES = (
    f"python{PYTHON}-minimal",
    f"libpython{PYTHON}-stdlib",
    f"libpython{PYTHON}-dev",
    "libgomp1",
    "libstdc++6",
    "zlib1g",
    "libopenmpi3",
)
OURS = (
    "torch",
    "numpy",
    "pybind11",
    "regex",
    "psutil",
    "safetensors",
    "tqdm",
    "pytest",
)  # as pinned in requirements*.txt
# What those need. Named one by one: pip would evaluate torch's conditions for this machine and fetch x86's CUDA packages.
THEIRS = (
    "mpi4py==4.1.2",
    "typing_extensions==4.16.0",
    "filelock==4.2.11",
    "sympy==1.14.0",
    "mpmath==1.3.0",
    "networkx==3.6.1",
    "jinja2==3.1.6",
    "markupsafe==3.0.4",
    "fsspec==2026.9.0",
    "pluggy==1.7.0",
    "iniconfig==2.3.1",
    "packaging==26.3",
    "pygments==2.21.0",
)
PLATFORMS = (
    "manylinux2014_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux_2_27_aarch64",
    "manylinux_2_28_aarch64",
)
IMPORTED = (f"sysroot/usr/lib/python{PYTHON}", "site")  # folders of what emulated Python imports

WRAPPER = f"""#!/bin/sh
# ARM Python under qemu-user as an A64FX; QEMU_CPU names another CPU. Made by tools/arm_env.py.
here=$(cd "$(dirname "$0")" && pwd)
export QEMU_CPU="${{QEMU_CPU:-a64fx}}" QEMU_LD_PREFIX="$here/sysroot" PYTHONPATH="$here/site${{PYTHONPATH:+:$PYTHONPATH}}"
# mpi4py is to load Debian's Open MPI; the emulator has no process_vm_readv, with which ranks would read each other.
export MPI4PY_MPIABI=openmpi OMPI_MCA_btl_vader_single_copy_mechanism=none
# A waiting thread leaves its core, because OpenMP's active waiting takes longer than the work under emulation.
export OMP_WAIT_POLICY="${{OMP_WAIT_POLICY:-passive}}"
exec qemu-aarch64-static "$here/sysroot/usr/bin/python{PYTHON}" "$@"
"""
SITECUSTOMIZE = '''"""Lets subprocesses find ARM Python: this machine cannot start the emulated file itself."""

import sys
from pathlib import Path

sys.executable = str(Path(__file__).resolve().parents[1] / "python")
'''


class Unavailable(Exception):
    """Why there can be no ARM environment here, in one line."""


def run(what: str, command: list[str], **options) -> str:
    """Return standard output of a command. Unavailable with the error line if the command fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options
    )
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise Unavailable(
            f"{what} failed: {next((x for x in lines if x.startswith(('E:', 'ERROR'))), (lines or ['?'])[-1])}"
        )
    return done.stdout


def missing(packages: dict[str, str]) -> list[str]:
    return [package for program, package in packages.items() if not shutil.which(program)]


def install(packages: list[str]) -> None:
    """Install host packages by apt."""
    if not shutil.which("apt-get"):
        raise Unavailable(f"no apt here, and the machine lacks {', '.join(packages)}")
    if os.geteuid():
        raise Unavailable(
            f"not root, and the machine lacks {', '.join(packages)}: apt-get install {' '.join(packages)}"
        )
    apt = ["apt-get", "-qq", "-y", "-o", "DPkg::Lock::Timeout=300"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get update", [*apt, "update"], env=environment)
    run("apt-get install", [*apt, "install", "--no-install-recommends", *packages], env=environment)


def make_host() -> None:
    """Install the cross compiler, the emulator and mpirun; for the codegen gate Clang and llvm-mca, which may be absent."""
    if needed := missing(HOST_PACKAGES):
        install(needed)
    if optional := missing(CODEGEN_PACKAGES):
        try:
            install(optional)
        except Unavailable as reason:
            print(
                f"arm-env: make arm-codegen will run without {', '.join(optional)}: {reason}",
                flush=True,
            )


def make_root(folder: Path) -> None:
    """Make an arm64 root file system: apt with its state in `folder`, then unpacked packages."""
    if not shutil.which("apt-get"):
        raise Unavailable("no apt here to fetch arm64 packages with")
    private = folder.with_suffix(".apt")
    for name in ("lists/partial", "cache/archives/partial"):
        (private / name).mkdir(parents=True, exist_ok=True)
    (private / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State::lists": private / "lists",
        "Dir::State::status": private / "status",
        "Dir::Cache": private / "cache",
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
    }
    apt = ["apt-get", "-qq", "-y", *(f"-o{name}={value}" for name, value in settings.items())]
    run("apt-get update for arm64", [*apt, "update"])
    archives = private / "cache" / "archives"
    run(
        "apt-get install --download-only for arm64",
        [*apt, "install", "--download-only", *ROOT_PACKAGES],
    )
    run(
        "apt-get download for arm64", [*apt, "download", "libopenmpi-dev"], cwd=archives
    )  # headers alone
    for package in sorted(archives.glob("*.deb")):
        run(f"unpacking {package.name}", ["dpkg-deb", "-x", str(package), str(folder)])
    shutil.rmtree(private)


def pinned() -> list[str]:
    """Return OURS with the versions of requirements*.txt for aarch64."""
    from packaging.requirements import Requirement

    chosen = {}
    for line in "\n".join(
        (ROOT / f"requirements{part}.txt").read_text() for part in ("", "-test")
    ).splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            if not requirement.marker or requirement.marker.evaluate(
                {"platform_machine": "aarch64", "python_version": PYTHON}
            ):
                chosen[requirement.name] = f"{requirement.name}{requirement.specifier}"
    return [chosen[name] for name in OURS]


def make_site(folder: Path) -> None:
    """Install the aarch64 wheels."""
    options = [
        "--no-deps",
        "--no-compile",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        PYTHON,
    ]
    abis = [f"--abi={abi}" for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none")]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        str(folder),
    ]
    run("pip install for aarch64", [*pip, *options, *abis, *platforms, *pinned(), *THEIRS])
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)


def make_python(path: Path) -> None:
    """Write the wrapper and try it out; compile bytecode, which takes an emulated Python long."""
    for folder in IMPORTED:
        compileall.compile_dir(path.parent / folder, quiet=2, workers=0)
    path.write_text(WRAPPER)
    path.chmod(0o755)
    machine = run(
        "emulated Python", [str(path), "-c", "import platform, numpy; print(platform.machine())"]
    ).strip()
    if machine != "aarch64":
        raise Unavailable(f"the emulated Python says it runs on {machine}")


def digest(recipe: str) -> str:
    return hashlib.sha256(recipe.encode()).hexdigest()


def prepare(name: str, recipe: str, make: Callable[[Path], None]) -> None:
    """Make one part of .arm/ anew, then its stamp."""
    target = ARM / name
    stamp = ARM / f"{name}.stamp"
    print(f"arm-env: making .arm/{name} ...", end="", flush=True)
    begin = time.monotonic()
    stamp.unlink(missing_ok=True)
    for old in (target, ARM / f"{name}.apt"):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    try:
        make(target)
    except BaseException:
        print(flush=True)
        raise
    stamp.write_text(digest(recipe))
    print(f" {time.monotonic() - begin:.0f} s", flush=True)


def extension_environment() -> dict[str, str]:
    """Return the variables with which setup.py builds the extension for ARM.

    Its commands run in ROOT: paths from there let checkouts share objects by ccache.
    """
    arm = ARM.relative_to(ROOT)
    headers = arm / "sysroot" / "usr" / "include"
    includes = (headers / f"python{PYTHON}", arm / "site" / "pybind11" / "include")
    # The root's other headers come last: the cross compiler has its own C library, but not pyconfig.h.
    flags = " ".join([*(f"-isystem {path}" for path in includes), f"-idirafter {headers}"])
    return {
        "CXX": CXX,
        "CXXFLAGS": flags,
    }


def build_extension() -> int:
    """Build the kernels and the dispatch library for ARM by the cross compiler, next to this machine's own."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, **extension_environment()})
    return built.returncode or build_dispatch_library()


def build_dispatch_library() -> int:
    """Let emulated Python compile the library for its torch. Its compiler is this machine's cross compiler."""
    compiler = f"{CXX} -idirafter {ARM / 'sysroot' / 'usr' / 'include'}"
    program = "from fugaku_megatron.torch_backend import build; build.library()"
    return subprocess.run(
        [str(ARM / "python"), "-c", program],
        cwd=ROOT,
        env={**os.environ, "CXX": compiler, "PYTHONPATH": str(ROOT)},
    ).returncode


def make_all() -> None:
    """Make every part whose recipe changed. Unavailable under another Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if version != PYTHON:
        raise Unavailable(f"it needs Python {PYTHON}, as Debian 12 has it; this is {version}")
    if needed := missing(HOST_PACKAGES):
        print(
            f"arm-env: installing {' '.join(needed)} and what the codegen gate needs ...",
            flush=True,
        )
        make_host()
    for name, (recipe, make) in parts().items():
        if not stamped(name, recipe):
            prepare(name, recipe, make)


def parts() -> dict[str, tuple[str, Callable[[Path], None]]]:
    """Return each part of .arm/ with its recipe and the function that makes it."""
    site = repr((pinned(), THEIRS, PLATFORMS, SITECUSTOMIZE))
    return {
        "sysroot": (repr(ROOT_PACKAGES), make_root),
        "site": (site, make_site),
        "python": (repr((WRAPPER, IMPORTED)), make_python),
    }


def stamped(name: str, recipe: str) -> bool:
    """Return whether this part was made by this recipe."""
    stamp = ARM / f"{name}.stamp"
    return (ARM / name).exists() and stamp.exists() and stamp.read_text() == digest(recipe)


def ready() -> bool:
    """Return whether .arm/ is there, whole and up to date."""
    return not missing(HOST_PACKAGES) and all(
        stamped(name, recipe) for name, (recipe, _) in parts().items()
    )


def why_not() -> str:
    """Return the reason of the last attempt that failed, for tests to name."""
    reason = ARM / "unavailable"
    return reason.read_text() if reason.exists() else "make arm-env"


def main() -> int:
    """Make the environment and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="arm_env", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="?", choices=("extension",), help="also cross-build the C++ libraries"
    )
    part = parser.parse_args().part
    ARM.mkdir(exist_ok=True)
    (ARM / "unavailable").unlink(missing_ok=True)
    try:
        make_all()
        return build_extension() if part else 0
    except Unavailable as reason:
        (ARM / "unavailable").write_text(str(reason))
        print(f"arm-env: no ARM environment here: {reason}", flush=True)
        return 3


if __name__ == "__main__":
    sys.exit(main())
