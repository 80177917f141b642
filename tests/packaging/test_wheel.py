"""The wheel is complete, names no folder on the build machine, leaves a site's torch alone and trains without the checkout.

The quick tests build it once from the objects that `make setup` left. The slow ones are `make wheel-test`: `pip install .`
in an empty environment, and this wheel in environments with the oldest, the pinned and the newest torch.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from fugaku_megatron.torch_backend import build
from tests.checks.once import once
from tools import other_torch, wheels

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
PINNED = re.search(r"^torch==(\S+); .*x86_64", (ROOT / "requirements.txt").read_text(), re.M)[1]
OTHERS = re.search(r"^OTHER_TORCH := (.*)", (ROOT / "Makefile").read_text(), re.M)[1].split()
TRAIN = (
    "train --recipe demo --mock-data --train-iters 2 --micro-batch-size 1 --global-batch-size 1"
).split()


def run(command: list[str | Path], folder: Path, **options) -> subprocess.CompletedProcess:
    """A program in `folder`, with nothing around it that would lead to the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory) -> Path:
    """Programs in an environment with the wheel; its path has this environment's packages, but not the checkout."""

    def install(folder: Path) -> None:
        venv.create(folder, symlinks=True)
        site = next(folder.glob("lib/python*/site-packages"))
        # Without its .pth files: one leads to the checkout.
        (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
        python = folder / "bin" / "python"
        run([*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel], folder)

    return once(tmp_path_factory, "installed", install) / "bin"


def names(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    tracked = subprocess.run(
        "git ls-files -co --exclude-standard fugaku_megatron".split(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if tracked.returncode:
        pytest.skip("not a git checkout: what belongs to the package is not known")
    files = {name for name in tracked.stdout.split() if (ROOT / name).exists()}
    assert names(wheel) - libraries(wheel) == files
    kernels = f"fugaku_megatron/_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    dispatch = f"fugaku_megatron/torch_backend/{build.file_name()}"
    assert libraries(wheel) == {kernels, dispatch}


def libraries(wheel: Path) -> set[str]:
    return {name for name in names(wheel) if name.endswith(".so")}


@pytest.fixture
def extensions(wheel, tmp_path) -> list[Path]:
    """The kernels and the dispatch library."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    archive = zipfile.ZipFile(wheel)
    return [Path(archive.extract(name, tmp_path)) for name in sorted(libraries(wheel))]


def test_the_kernels_need_the_systems_libraries_alone(extensions):
    """None of torch, whose files and symbols differ between versions, and no OpenMP runtime beside torch's."""
    extension = extensions[0]
    dynamic = run(["readelf", "--dynamic", "--wide", extension], extension.parent).stdout
    libraries = {name.split(".so")[0] for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)}
    loader = {f"ld-linux-{platform.machine().replace('_', '-')}"}
    assert libraries - loader == {"libstdc++", "libm", "libgcc_s", "libc"}
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic


def test_the_extensions_load_with_the_libraries_of_manylinux_2_28(extensions):
    assert [wheels.newer_symbols(extension) for extension in extensions] == [[], []]


PLAIN_TORCH = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name in ("mpi4py", "psutil", "regex", "transformers", "trl", "peft", "accelerate", "datasets"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
import torch
import fugaku_megatron.torch_backend

assert "site-packages/fugaku_megatron" in fugaku_megatron.torch_backend.__file__
a = torch.full((256, 256), 2.0)
print((a @ a)[0, 0].item())
"""


def test_torch_alone_runs_on_the_kernels_without_a_compiler(bin_folder, tmp_path, monkeypatch):
    """Neither MPI nor transformers, and the library for this torch is in the wheel."""
    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    printed = run([bin_folder / "python", "-c", PLAIN_TORCH], tmp_path).stdout
    assert printed == "1024.0\n"
    assert not [*tmp_path.iterdir()]


@pytest.mark.full
def test_the_wheel_trains_without_the_checkout(bin_folder, tmp_path):
    program = (
        "from importlib.util import find_spec\n"
        "print(*(find_spec(name).origin for name in ('fugaku_megatron', 'torch')))"
    )
    package, torch = run([bin_folder / "python", "-c", program], tmp_path).stdout.split()
    assert Path(package).is_relative_to(bin_folder.parent) and not Path(torch).is_relative_to(
        bin_folder.parent
    )
    quick = "--vocab-size 512 --kernels native".split()
    job = run(
        [bin_folder / "fugaku-megatron", *TRAIN, *quick, "--save", tmp_path / "checkpoint"],
        tmp_path,
    )
    assert " iteration        2/       2 |" in job.stdout
    assert (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").read_text() == "2\n"


@pytest.mark.parametrize(
    "words, answer",
    {
        "--help": "usage: fugaku-megatron COMMAND",
        "tables --document 001": "001",
        "predict --recipe 124m --nodes 4 --machine grace": "(model",
    }.items(),
)
def test_the_wheel_holds_its_data(bin_folder, tmp_path, words, answer):
    assert answer in run([bin_folder / "fugaku-megatron", *words.split()], tmp_path).stdout


@pytest.fixture
def site_with(tmp_path):
    """Make an environment where pip finds packages of these versions, and nothing else."""

    def make(**versions: str) -> Path:
        venv.create(tmp_path / "site", symlinks=True)
        packages = next((tmp_path / "site").glob("lib/python*/site-packages"))
        for name, version in versions.items():
            folder = packages / f"{name}-{version}.dist-info"
            folder.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (folder / "METADATA").write_text(text)
        return tmp_path / "site" / "bin" / "python"

    return make


def would_install(python: Path, wheel: Path) -> subprocess.CompletedProcess:
    """Return pip's report on installing the wheel, without an index of packages and this machine's settings of pip."""
    left_out = ("PIP_", "PYTHONPATH")  # a checkout there would be an installed package
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    environment["PIP_CONFIG_FILE"] = os.devnull
    options = ["install", "--no-index", "--dry-run", "--report", "-", wheel]
    command = [*PIP, "--python", python, *options]
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)


SITE = {"numpy": "1.26.4", "regex": "2024.11.6", "psutil": "5.9"}


def test_pip_leaves_a_sites_packages_alone(wheel, site_with):
    done = would_install(site_with(torch="2.9.1", **SITE), wheel)
    assert done.returncode == 0, done.stderr
    names = [package["metadata"]["name"] for package in json.loads(done.stdout)["install"]]
    assert names == ["fugaku-megatron"]


def test_pip_says_that_a_sites_torch_is_too_old(wheel, site_with):
    done = would_install(site_with(torch="2.8.0", **SITE), wheel)
    assert done.returncode != 0 and "torch>=2.9" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("version", [PINNED, *OTHERS])
def test_the_wheel_trains_with_every_torch(wheel, tmp_path, monkeypatch, version):
    """The torch is there before the wheel, and stays."""
    monkeypatch.setenv("PIP_CONSTRAINT", os.devnull)
    venv.create(tmp_path / "site", with_pip=True, symlinks=True)
    programs = tmp_path / "site" / "bin"
    pip = [programs / "python", *PIP[1:], "install"]
    if version == PINNED:
        run([*pip, f"torch=={version}"], tmp_path, timeout=600)
    else:
        try:
            folders = other_torch.folders(version)
        except other_torch.Unavailable as reason:
            pytest.skip(str(reason))
        packages = next((tmp_path / "site").glob("lib/python*/site-packages"))
        (packages / "torch.pth").write_text("".join(f"{folder}\n" for folder in folders))
    run([*pip, f"{wheel}[mpich]"], tmp_path, timeout=600)
    program = "import torch, numpy; print(torch.__version__.split('+')[0], numpy.__version__)"
    printed = run([programs / "python", "-c", program], tmp_path)
    assert f"{printed.stdout.strip().replace(' ', '/')}/".startswith(f"{version}/")
    smoke = "train --recipe demo --mock-data --vocab-size 512 --train-iters 20 --eval-iters 0"
    command = [programs / "mpiexec", "-n", "2", programs / "fugaku-megatron", *smoke.split()]
    job = run(command, tmp_path, timeout=600)
    assert " iteration       20/      20 |" in job.stdout and "MPICH" in job.stdout


@pytest.mark.slow
def test_pip_install_in_an_empty_environment(tmp_path):
    """With build isolation, from unbuilt sources that are gone before the first run."""
    source = tmp_path / "source"
    environment = tmp_path / "environment"
    left_out = shutil.ignore_patterns(
        "build", "dist", "demo", "bench", "*.so", "*.egg-info", "__pycache__", ".*"
    )
    shutil.copytree(ROOT, source, ignore=left_out)
    venv.create(environment, with_pip=True, symlinks=True)
    python = environment / "bin" / "python"
    program = environment / "bin" / "fugaku-megatron"
    pip = [python, *PIP[1:], "install"]
    run([*pip, "."], source, timeout=3000)
    shutil.rmtree(source)
    job = run([program, *TRAIN], tmp_path)
    assert " iteration        2/       2 |" in job.stdout and "no MPI, 1 rank(s)" in job.stdout
    run([*pip, "fugaku-megatron[mpich]"], tmp_path, timeout=600)
    mpiexec = [environment / "bin" / "mpiexec", "-n", "2", program]
    assert run([*mpiexec, "train", "--help"], tmp_path).stdout.count("usage: ") == 1
    job = run([*mpiexec, *TRAIN[:-1], "2"], tmp_path)
    assert " iteration        2/       2 |" in job.stdout and "MPICH" in job.stdout
