"""Builds the wheels for x86-64 and aarch64 (manylinux_2_28) into dist/, for this Python's version.

    make wheels

The wheel of the other machine type is made by the cross compiler of `make arm-env`. The kernels link nothing of torch. A wheel
also has the dispatch library for the torch of requirements.txt, so that this torch needs no compiler. Both kinds of library have what
glibc 2.28 lacks; a symbol that is newer all the same is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import setup
from tools import arm_env

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "manylinux_2_28"
NEWEST = {  # of AlmaLinux 8: glibc 2.28, and libstdc++ and libgcc_s of GCC 8
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 25),
    "CXXABI": (1, 3, 11),
    "GCC": (7, 0, 0),
}


def newer_symbols(library: Path) -> list[str]:
    """Return the symbols that a library needs in a version above NEWEST or of another library, by readelf."""
    command = ["readelf", "--symbols", "--wide", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    newer = []
    for symbol, name, version in re.findall(r" UND (\w+)@(\w+?)_([\d.]+)", lines):
        numbers = tuple(map(int, version.split(".")))
        if name not in NEWEST or numbers > NEWEST[name]:
            newer.append(f"{symbol}@{name}_{version}")
    return sorted(set(newer))


def build(machine: str, variables: dict[str, str], folder: Path) -> Path:
    """Build a wheel in `folder`. SystemExit when its extension needs newer libraries than PLATFORM has."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
    options = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([*pip, *options], check=True, env={**os.environ, **variables})
    (wheel,) = folder.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    libraries = [name for name in archive.namelist() if name.endswith(".so")]
    if len(libraries) != 2:
        raise SystemExit(
            f"wheels: expected the kernels and one dispatch library for {machine}, got {libraries}: run make wheels"
        )
    for library in libraries:
        if newer := newer_symbols(Path(archive.extract(library, folder))):
            raise SystemExit(f"wheels: {library} needs {', '.join(newer)}, newer than {PLATFORM}")
    tag = ["tags", "--remove", "--platform-tag", f"{PLATFORM}_{machine}", str(wheel)]
    done = subprocess.run(
        [sys.executable, "-m", "wheel", *tag], check=True, capture_output=True, text=True
    )
    return folder / done.stdout.strip()


def main() -> None:
    output = ROOT / "dist"
    output.mkdir(exist_ok=True)
    os.environ["SOURCE_DATE_EPOCH"] = str(
        setup.source_date()
    )  # also of the list that `wheel tags` writes
    machines = {"x86_64": {"CXX": "g++"}, "aarch64": arm_env.extension_environment()}
    for machine, variables in machines.items():
        with tempfile.TemporaryDirectory() as folder:
            wheel = build(machine, variables, Path(folder))
            shutil.move(wheel, output / wheel.name)
            print(f"dist/{wheel.name}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"wheels: {' '.join(map(str, error.cmd))[:200]} failed, see above")
