"""Build the package and its C++ extension fugaku_megatron._kernels.

    python setup.py build_ext --inplace          (incremental; --force rebuilds everything)
    pip install .   pip wheel .                  (one library for every torch: it links none)

TARGETS below is the one table of instruction sets: target.cc is compiled once per family of kernels and per row that this machine
type can hold, into a namespace of the row, with the row's flags; every other file is compiled for the baseline. The choice
between rows is made at run time (kernels_sve/dispatch.cc). The library carries source_hash(), so that the tests can refuse a
library of other sources. An object is compiled again when its command or the content of a file that it includes has changed.
Checkouts on one machine share objects by ccache, if it is installed.

Environment: KERNEL_TARGETS, rows of TARGETS separated by commas, for a build without the others, or `native`, the fastest row of
this CPU and the portable one, or `runnable`, all rows that the tests can run on this CPU; CXX (default g++); TARGET_CXX for the
families alone, for example clang++, which schedules the SVE loops better; CXXFLAGS; LDFLAGS. A cross build is one whose CXX names
another machine; it needs CXXFLAGS with the Python and pybind11 headers of that machine. SOURCE_DATE_EPOCH, the date of every file
of an archive (default: the commit's). The same sources, compiler and packages make the same bytes in every folder.
Left out: Windows and macOS.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "kernels_sve"
EXTENSION = SOURCES / "extension"  # what a static program without Python leaves out
COMMON_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
TARGET_FLAGS = [
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-unused-function",
]
GCC_FLAGS = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # its own AVX-512 headers trip them
GCC_SVE_FLAGS = [
    "-fno-schedule-insns"
]  # its scheduler brings FMAs of one accumulator too close together

PREFIX_MAP = "-ffile-prefix-map="  # folders of this machine by other names in objects


@dataclass(frozen=True)
class Target:
    """One instruction set. `requires` are the features that dispatch.cc looks for in the running CPU. Tiles: tuning.h.

    `base` is a target with the same vectors, whose families it takes but its `own`. Of these a target with matrix tiles takes
    whatever is not bfloat16 from its base too.
    """

    name: str
    machine: str  # x86_64, aarch64 or any
    flags: tuple[str, ...]
    vector_bytes: int
    requires: tuple[str, ...] = ()
    base: str = ""
    own: tuple[str, ...] = ()


TILE_FAMILIES = ("gemm", "attention", "bench")
BYTE_DOT_FAMILIES = ("gemm", "bench")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
AVX512_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl")
AVX512BF16 = (*AVX512, "-mavx512bf16", "-mavx512vnni")
AVX512BF16_FEATURES = (*AVX512_FEATURES, "avx512bf16", "avx512vnni")
SVE = "-march=armv8.2-a+sve"

# Ordered from the slowest to the fastest: the last row that the CPU can run is the default. A name in EMULATED is for tests alone.
TARGETS = (
    Target("portable", "any", (), 16),
    Target("avx2", "x86_64", AVX2, 32, ("avx2", "fma", "f16c")),
    Target(
        "avx2vnni",
        "x86_64",
        (*AVX2, "-mavxvnni"),
        32,
        ("avx2", "fma", "f16c", "avxvnni"),
        base="avx2",
        own=BYTE_DOT_FAMILIES,
    ),
    Target("avx512", "x86_64", AVX512, 64, AVX512_FEATURES),
    Target(
        "avx512vnni",
        "x86_64",
        (*AVX512, "-mavx512vnni"),
        64,
        (*AVX512_FEATURES, "avx512vnni"),
        base="avx512",
        own=BYTE_DOT_FAMILIES,
    ),
    Target("avx512bf16", "x86_64", AVX512BF16, 64, AVX512BF16_FEATURES),
    Target(
        "amx_emulated",
        "x86_64",
        (*AVX512BF16, "-DFM_EMULATED_TILES"),
        64,
        AVX512BF16_FEATURES,
        base="avx512bf16",
        own=TILE_FAMILIES,
    ),
    Target(
        "amx",
        "x86_64",
        (*AVX512BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        64,
        (*AVX512BF16_FEATURES, "amx_tile", "amx_bf16", "amx_int8", "amx_state"),
        base="avx512bf16",
        own=TILE_FAMILIES,
    ),
    Target("sve128", "aarch64", (SVE, "-msve-vector-bits=128"), 16, ("sve",)),
    Target("sve256", "aarch64", (SVE, "-msve-vector-bits=256"), 32, ("sve",)),
    Target(
        "sve128bf16",
        "aarch64",
        (f"{SVE}+bf16+dotprod+i8mm", "-msve-vector-bits=128"),
        16,
        ("sve", "bf16", "i8mm"),
    ),
    Target(
        "sve256bf16",
        "aarch64",
        (f"{SVE}+bf16+i8mm", "-msve-vector-bits=256"),
        32,
        ("sve", "svebf16", "svei8mm"),
    ),
    Target("sve512", "aarch64", ("-mcpu=a64fx", "-msve-vector-bits=512"), 64, ("sve",)),
)

NATIVE, RUNNABLE = "native", "runnable"  # as KERNEL_TARGETS
EMULATED = "_emulated"  # end of the names of rows for tests alone
SLOWEST = ("rowwise", "attention")  # families that compile longest, first in jobs()


# Prints for each argument "bytes feature feature ..." whether this CPU has the features.
PROBE = """
#include "cpu_features.h"
#include <cstdio>
#include <sstream>
int main(int count, char** rows) {
  for (int i = 1; i < count; ++i) {
    std::istringstream words(rows[i]);
    int bytes = 0;
    words >> bytes;
    bool runs = true;
    for (std::string feature; words >> feature;) runs = runs && fm::cpu::has_feature(feature, bytes);
    std::printf("%d\\n", runs);
  }
}
"""


def families() -> list[str]:
    """Return the families of kernels.inc: the slowest to compile first, then in its order."""
    rows = re.findall(r"FM_KERNEL\(\w+, (\w+), \"", (SOURCES / "kernels.inc").read_text())
    return list(dict.fromkeys((*SLOWEST, *rows)))


def family_header(family: str) -> str:
    """Return the path of a family's header inside kernels_sve, for example gemm/gemm.h."""
    (header,) = SOURCES.rglob(f"{family}.h")
    return str(header.relative_to(SOURCES))


def source_hash() -> str:
    """Return the SHA-256 of all that the kernels are made from: the files of kernels_sve, TARGETS and the flags above."""
    digest = hashlib.sha256(
        repr((TARGETS, COMMON_FLAGS, TARGET_FLAGS, GCC_FLAGS, GCC_SVE_FLAGS)).encode()
    )
    for path in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(
            str(path.relative_to(SOURCES)).encode()
            + b"\0"
            + hashlib.sha256(path.read_bytes()).digest()
        )
    return digest.hexdigest()


def hash_in(library: Path) -> str:
    """Return the source_hash() of the sources that a library was built from; empty for a library that has none."""
    found = re.search(rb"fugaku_megatron kernel sources ([0-9a-f]{64})", library.read_bytes())
    return found[1].decode() if found else ""


class Compiler:
    """The commands of one build: which compiler, which flags for which file, where the objects go.

    `variables` are the environment variables of the module's text, by default this process's.
    """

    def __init__(self, build_dir: Path, variables: Mapping[str, str] = os.environ) -> None:
        self.variables = variables
        self.cxx = shlex.split(variables.get("CXX", "g++"))
        self.target_cxx = shlex.split(variables.get("TARGET_CXX", "")) or self.cxx
        self.user_flags = shlex.split(variables.get("CXXFLAGS", ""))
        self.machine = self.output("-dumpmachine").split("-")[0]
        self.cross = self.machine != platform.machine()
        self.objects = build_dir / f"kernels-{self.machine}"
        self.objects.mkdir(parents=True, exist_ok=True)
        self.probed: list[Target] = []  # answer of runnable(), which compiles a program
        self.hash = (
            source_hash()
        )  # before anything is compiled: an edit during the build makes the library an old one

    def output(self, flag: str) -> str:
        return subprocess.run(
            [*self.cxx, flag], check=True, capture_output=True, text=True
        ).stdout.strip()

    def targets(self) -> list[Target]:
        """Return the rows to build. SystemExit when KERNEL_TARGETS names something else."""
        known = [t for t in TARGETS if t.machine in ("any", self.machine)]
        wanted = self.variables.get("KERNEL_TARGETS", "")
        if wanted in (NATIVE, RUNNABLE):
            if self.cross:
                return known
            runnable = self.runnable(known)
            return native(runnable) if wanted == NATIVE else tested(known, runnable)
        names = [name for name in wanted.split(",") if name]
        if unknown := set(names) - {t.name for t in known}:
            raise SystemExit(
                f"setup.py: KERNEL_TARGETS names {', '.join(sorted(unknown))}; this machine has "
                f"{', '.join(t.name for t in known)}"
            )
        return [t for t in known if not names or t.name in names]

    def runnable(self, known: list[Target]) -> list[Target]:
        """Return the rows that this CPU can run."""
        if self.probed:
            return self.probed
        probe = self.objects / "probe"
        command = [*self.cxx, "-std=c++17", "-x", "c++", "-I", str(SOURCES), "-o", str(probe), "-"]
        subprocess.run(command, input=PROBE, text=True, check=True)
        rows = [f"{target.vector_bytes} {' '.join(target.requires)}" for target in known]
        answers = subprocess.run([probe, *rows], check=True, capture_output=True, text=True)
        self.probed = [
            target for target, answer in zip(known, answers.stdout.split()) if answer == "1"
        ]
        return self.probed

    def includes(self) -> list[str]:
        if self.cross:
            return []
        import pybind11

        folders = {"pybind11": pybind11.get_include(), "python": sysconfig.get_path("include")}
        return [
            word
            for name, folder in folders.items()
            for word in ("-isystem", folder, f"{PREFIX_MAP}{folder}={name}")
        ]

    def remedy(self) -> str:
        """Return what a machine lacks that compiles for itself without Python's headers, or an empty text."""
        folder = Path(sysconfig.get_path("include"))
        if self.cross or (folder / "Python.h").exists():
            return ""
        return f"; {folder} has no Python.h: install Python's headers (Debian: python3-dev, RHEL: python3-devel)"

    def dispatch_macros(self) -> list[str]:
        """Return for dispatch.cc the hash, and the table as FM_ROW(name, vector bytes, machine, features), built or not.

        The machine is empty in a row that this machine type could hold and KERNEL_TARGETS leaves out.
        """

        def row(t: Target) -> str:
            machine = t.machine if t in built or t.machine not in ("any", self.machine) else ""
            return f'FM_ROW({t.name},{t.vector_bytes},"{machine}","{" ".join(t.requires)}")'

        built = self.targets()
        others = " ".join(row(t) for t in TARGETS if t not in built)
        return [
            f'-DFM_SOURCE_HASH="{self.hash}"',
            f"-DFM_BUILT_ROWS={' '.join(map(row, built))}",
            f"-DFM_OTHER_ROWS={others}",
        ]

    def target_command(self, target: Target, family: str) -> list[str]:
        """Return the command that compiles a family of kernels for a row of the table."""
        base = [f"-DFM_BASE={target.base}"] if target.base else []
        gcc = (
            []
            if "clang" in self.target_cxx[0]
            else GCC_FLAGS + GCC_SVE_FLAGS * (target.machine == "aarch64")
        )
        macros = [
            f"-DFM_TARGET={target.name}",
            f"-DFM_VECTOR_BYTES={target.vector_bytes}",
            f'-DFM_HEADER="{family_header(family)}"',
            f"-DFM_IS_{family}=,,,",
        ]
        return [*self.target_cxx, *COMMON_FLAGS, *TARGET_FLAGS, *target.flags, *gcc, *macros, *base]

    def table_command(self, target: Target) -> list[str]:
        """Return the command that compiles the table of a row's kernels for the baseline."""
        own = (
            [f"-DFM_BASE={target.base}", *(f"-DFM_IS_{family}=,,," for family in target.own)]
            if target.base
            else []
        )
        return [*self.cxx, *COMMON_FLAGS, f"-DFM_TARGET={target.name}", *own]

    def units(self) -> list[tuple[Target, str]]:
        """Return (row, family) of every unit of kernels: the families of a row, or of its base, and then its own."""
        rows = {t.name: t for t in TARGETS}
        whole = dict.fromkeys(rows[t.base] if t.base else t for t in self.targets())
        return [
            (t, family)
            for family in families()
            for t in (*whole, *(t for t in self.targets() if family in t.own))
        ]

    def target_jobs(self) -> list[tuple[list[str], Path, Path]]:
        """Return every family for the rows that have it, then the tables of the rows' kernels, which belong to the baseline."""
        source = SOURCES / "target.cc"
        units = [
            (
                self.target_command(target, family),
                source,
                self.objects / f"target_{target.name}_{family}.o",
            )
            for target, family in self.units()
        ]
        tables = [
            (self.table_command(target), source, self.objects / f"table_{target.name}.o")
            for target in self.targets()
        ]
        return units + tables

    def bindings(self) -> tuple[list[str], Path, Path]:
        """Return the job of module.cc with every *_bind.cc before it: each alone would compile pybind11, seven times the work."""
        included = [
            flag
            for source in sorted(SOURCES.rglob("*_bind.cc"))
            for flag in ("-include", from_root(source))
        ]
        flags = [*COMMON_FLAGS, "-O1"]  # it checks arguments; -O3 compiles a quarter longer
        command = [*self.cxx, *flags, *self.includes(), *included]
        return command, EXTENSION / "module.cc", self.objects / "module.o"

    def jobs(self) -> list[tuple[list[str], Path, Path]]:
        """Return (command, source, object) of every file, the slowest first."""
        return [self.bindings(), *self.kernel_jobs(), *self.library_jobs()]

    def library_jobs(self) -> list[tuple[list[str], Path, Path]]:
        """Return the jobs of a shared library alone: OpenMP of the process, old versions of system libraries."""
        command = [*self.cxx, *COMMON_FLAGS]
        return [
            (command, EXTENSION / f"{name}.cc", self.objects / f"{name}.o")
            for name in ("old_libraries", "openmp")
        ]

    def kernel_jobs(self) -> list[tuple[list[str], Path, Path]]:
        """Return the jobs of the kernels and their dispatch, which a static program links as well."""
        jobs = self.target_jobs()
        for source in sorted(SOURCES.rglob("*.cc")):
            if source.name == "target.cc" or source.parent == EXTENSION:
                continue
            if source.stem.endswith("_bind"):
                continue
            flags = [
                *self.cxx,
                *COMMON_FLAGS,
                *(self.dispatch_macros() if source.name == "dispatch.cc" else []),
            ]
            if source.name == "parallel.cc":
                flags.append("-fopenmp")
            if source.stem.endswith("reference"):
                # A reference rounds like the formula it states. GCC 12 for AArch64 crashes on vectors of attention's sums.
                flags += ["-ffp-contract=off", "-fno-tree-vectorize"]
            jobs.append((flags, source, self.objects / f"{source.stem}.o"))
        return jobs

    def compile(self, command: list[str], source: Path, obj: Path, force: bool) -> None:
        """Compile unless the stamp next to the object says that it is of this command and of the same files."""
        command = [
            *command,
            *self.user_flags,
            f"-I{from_root(SOURCES)}",
            "-MMD",
            "-c",
            from_root(source),
            "-o",
            from_root(obj),
        ]
        stamp = obj.with_suffix(".cmd")
        is_current = obj.exists() and stamp.exists() and stamp.read_text() == stamp_of(command, obj)
        if is_current and not force:
            return
        stamp.unlink(missing_ok=True)
        began = time.time()
        # With -g an object names its folder, and -ffile-prefix-map makes that folder the same everywhere.
        variables = {**os.environ, "CCACHE_NOHASHDIR": "1"}
        mapped = [*self.ccache, *command, f"{PREFIX_MAP}{ROOT}=."]
        subprocess.run(mapped, check=True, cwd=ROOT, env=variables)
        if all(
            (ROOT / path).stat().st_mtime < began for path in inputs(obj)
        ):  # not edited meanwhile
            stamp.write_text(stamp_of(command, obj))

    @cached_property
    def ccache(self) -> list[str]:
        """The word before a command, if ccache is installed and works: it needs a folder that this user can write."""
        if not shutil.which("ccache"):
            return []
        source = self.objects / "ccache.cc"
        source.write_text("")
        command = ["ccache", *self.cxx, "-c", source, "-o", source.with_suffix(".o")]
        works = subprocess.run(command, capture_output=True).returncode == 0
        return ["ccache"] if works else []

    def link(self, objects: list[Path], output: Path) -> None:
        """Link the objects into a shared library."""
        output.parent.mkdir(parents=True, exist_ok=True)
        flags = shlex.split(self.variables.get("LDFLAGS", ""))
        command = [
            *self.cxx,
            "-shared",
            "-Wl,--build-id=sha1",  # of the content
            *map(from_root, objects),
            *flags,
            "-o",
            str(output),
        ]
        subprocess.run(command, check=True, cwd=ROOT)

    def record(self) -> dict[str, object]:
        """Return the compilers, and the command of every object without the folders of this machine."""
        compilers = {shlex.join(cxx): version_of(cxx) for cxx in (self.cxx, self.target_cxx)}
        objects = {
            obj.name: {
                "source": from_root(source),
                "command": shlex.join(without_folders([*command, *self.user_flags])),
            }
            for command, source, obj in self.jobs()
        }
        return {
            "source_hash": self.hash,
            "machine": self.machine,
            "targets": [target.name for target in self.targets()],
            "compilers": compilers,
            "ldflags": self.variables.get("LDFLAGS", ""),
            "objects": dict(sorted(objects.items())),
        }

    def pybind11_version(self) -> str:
        """Return the version of the pybind11 whose headers the library is made from."""
        command = shlex.join([*self.bindings()[0], *self.user_flags])
        folders = re.findall(r"(?:-isystem |-I)(\S+)", command)
        headers = [ROOT / folder / "pybind11" / "detail" / "common.h" for folder in folders]
        text = next((each.read_text() for each in headers if each.exists()), "")
        macro = r"#\s*define PYBIND11_VERSION_(?:MAJOR|MINOR|PATCH|MICRO)\s+(\w+)"
        return ".".join(re.findall(macro, text)[:3]) or "unknown"


def native(runnable: list[Target]) -> list[Target]:
    """Return the fastest row that is not emulated, and the portable one for other CPUs."""
    portable, *others = (t for t in runnable if not t.name.endswith(EMULATED))
    return [portable, *others[-1:]]


def tested(known: list[Target], runnable: list[Target]) -> list[Target]:
    """Return the runnable rows, and those whose code a test runs on emulated instructions."""
    names = {t.name.removesuffix(EMULATED) for t in runnable}
    return [t for t in known if t in runnable or t.name in names]


def version_of(cxx: list[str]) -> str:
    """Return the first line that a compiler prints about itself."""
    printed = subprocess.run([*cxx, "--version"], check=True, capture_output=True, text=True)
    return printed.stdout.splitlines()[0]


def without_folders(command: list[str]) -> list[str]:
    """Return a command with the names of -ffile-prefix-map in place of the folders, and ROOT as `.`."""
    maps = [word.removeprefix(PREFIX_MAP) for word in command if word.startswith(PREFIX_MAP)]
    names = dict(each.rsplit("=", 1) for each in [*maps, f"{ROOT}=."])
    kept = [word for word in command if not word.startswith(PREFIX_MAP)]
    for folder, name in names.items():
        kept = [word.replace(folder, name) for word in kept]
    return kept


def from_root(path: Path) -> str:
    """Return the path as a command in ROOT names it, so that a copy of build/ serves another checkout."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def inputs(obj: Path) -> list[str]:
    """Return the files that an object is made from, of the list that the compiler wrote; none without a list."""
    depfile = obj.with_suffix(".d")
    return (
        depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        if depfile.exists()
        else []
    )


def stamp_of(command: list[str], obj: Path) -> str:
    """Return the command and the digests of its inputs, by which an object is up to date: copies have other dates."""
    paths = [ROOT / path for path in inputs(obj)]
    digests = [
        hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "absent"
        for path in paths
    ]
    return "\n".join([*command, *digests])


def extension_suffix() -> str:
    """Return the end of an extension's file name: this Python, and the machine that the compiler builds for."""
    machine = Compiler(ROOT / "build").machine
    return str(sysconfig.get_config_var("EXT_SUFFIX")).replace(platform.machine(), machine)


def source_date() -> int:
    """Return the date of an archive's files, in seconds since 1970: SOURCE_DATE_EPOCH, else the commit's, else 1980."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        if not given.isdigit():
            raise SystemExit(
                f"setup.py: SOURCE_DATE_EPOCH is {given!r}; it must be seconds since 1970"
            )
        return int(given)
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "log", "-1", "--format=%ct"]
        dated = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if dated.returncode == 0:
            return int(dated.stdout)
    return int(datetime(1980, 1, 1, tzinfo=timezone.utc).timestamp())  # a zip archive's earliest


def fixed_mode(path: Path) -> int:
    """Return the permissions of a file in an archive, whatever the umask of the checkout was."""
    is_program = path.stat().st_mode & 0o100
    return 0o755 if is_program else 0o644


def bill_of_materials(name: str, version: str, compiler: Compiler) -> dict[str, object]:
    """Return what a wheel contains besides its own sources, as a CycloneDX document (PEP 770)."""

    def component(name: str, version: str, license_id: str) -> dict[str, object]:
        purl = f"pkg:pypi/{name}@{version}"
        licenses = [{"license": {"id": license_id}}]
        row = {"type": "library", "bom-ref": purl, "name": name, "version": version}
        return {**row, "purl": purl, "licenses": licenses}

    package = component(name, version, "Apache-2.0")
    headers = component("pybind11", compiler.pybind11_version(), "BSD-3-Clause")
    compilers = dict.fromkeys((compiler.cxx[0], compiler.target_cxx[0]))
    tools = [
        {"type": "application", "name": Path(each).name, "version": version_of([each])}
        for each in compilers
    ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(source_date(), timezone.utc).isoformat(),
            "tools": {"components": tools},
            "component": package,
        },
        "components": [headers],
        "dependencies": [
            {"ref": package["bom-ref"], "dependsOn": [headers["bom-ref"]]},
            {"ref": headers["bom-ref"]},
        ],
    }


class Wheel(bdist_wheel):
    """Wheel with KERNELS.json and a bill of materials, and with the same bytes from every build of its sources."""

    def write_wheelfile(self, wheelfile_base: str, *arguments: str) -> None:
        """Write the files of .dist-info that the build knows, and fix the permissions of all files."""
        super().write_wheelfile(wheelfile_base, *arguments)
        compiler = Compiler(ROOT / "build")
        name = self.distribution.get_name()
        bill = bill_of_materials(name, self.distribution.get_version(), compiler)
        documents = {"KERNELS.json": compiler.record(), f"sboms/{name}.cdx.json": bill}
        for file, document in documents.items():
            path = Path(wheelfile_base) / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(document, indent=1) + "\n")
        for path in Path(self.bdist_dir).rglob("*"):
            if path.is_file():
                path.chmod(fixed_mode(path))


class SourceArchive(sdist):
    """Source archive with its files in order, and with fixed dates, permissions and owners."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **options):  # type: ignore[no-untyped-def]
        """Write BASE_NAME.tar.gz of the files below `base_dir`; other formats as setuptools does."""
        if format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, **options)
        date = source_date()
        output = Path(f"{base_name}.tar.gz")
        output.parent.mkdir(parents=True, exist_ok=True)
        with (
            output.open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=date) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in sorted(path for path in Path(base_dir).rglob("*") if path.is_file()):
                member = tarfile.TarInfo(str(path))
                member.size = path.stat().st_size
                member.mtime = date
                member.mode = fixed_mode(path)
                with path.open("rb") as content:
                    archive.addfile(member, content)
        return str(output)


class BuildModules(build_py):
    """Copy of the package in an empty folder: what an earlier build left there, a module removed since, is no part of a wheel.

    Neither is a dispatch library of torch_backend/build.py for another machine or Python.
    """

    def run(self) -> None:
        if self.editable_mode:
            return super().run()
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        for library in Path(self.build_lib).rglob("_dispatch_*.so"):
            if not library.name.endswith(extension_suffix()):
                library.unlink()


class BuildKernels(build_ext):
    """Build of the extension: the objects of Compiler.jobs() in parallel, then the library."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the name for this Python, with the machine that the compiler builds for."""
        return fullname.replace(".", os.sep) + extension_suffix()

    def build_extension(self, ext: Extension) -> None:
        """Compile what has changed in parallel and link. SystemExit when the compiler fails."""
        compiler = Compiler(ROOT / "build")
        jobs = compiler.jobs()
        try:
            with ThreadPoolExecutor(self.parallel or os.cpu_count() or 1) as pool:
                compiled = pool.map(lambda job: compiler.compile(*job, force=self.force), jobs)
                show_progress(compiled, len(jobs))
            compiler.link([obj for _, _, obj in jobs], Path(self.get_ext_fullpath(ext.name)))
        except subprocess.CalledProcessError as error:
            command = shlex.join(map(str, error.cmd))[:200]
            raise SystemExit(
                f"setup.py: {command} ... failed, see above{compiler.remedy()}"
            ) from None


def show_progress(results: Iterable[None], count: int) -> None:
    """Wait for all results and count them, on one line of a terminal and every ten elsewhere."""
    is_terminal = sys.stdout.isatty()
    for number, _ in enumerate(results, start=1):
        if is_terminal:
            print(f"\rcompiling kernels: {number} of {count}", end="", flush=True)
        elif number % 10 == 0 or number == count:
            print(f"compiling kernels: {number} of {count}", flush=True)
    if is_terminal:
        print()


if __name__ == "__main__":
    os.environ["SOURCE_DATE_EPOCH"] = str(source_date())  # for the wheel's writer and the compiler
    setup(
        ext_modules=[Extension("fugaku_megatron._kernels", sources=[])],
        cmdclass={
            "bdist_wheel": Wheel,
            "build_ext": BuildKernels,
            "build_py": BuildModules,
            "sdist": SourceArchive,
        },
    )
