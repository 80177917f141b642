"""`make setup` and its MPI: after a failed MPI=system the previous MPI works, and the next set-up repairs the rest.

The quick tests run the Makefile with a Python that only records its calls. The slow ones set up a real environment and
train: with a compiler wrapper that lacks MPI's header, and with Debian's Open MPI and MPICH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "Makefile",
    "requirements.txt",
    "requirements-mpi.txt",
    "requirements-test.txt",
    "setup.py",
    "pyproject.toml",
    "scripts/system_mpi.sh",
    "fugaku_megatron/torch_backend/dispatch.cc",
    "fugaku_megatron/torch_backend/build.py",
)
# pip wheel leaves a wheel, installing mpich an mpiexec, uninstalling it none; FAILS names the word of a call that fails, WAITS one
# that ends only when the packages of the tests are there.
PYTHON = """#!/bin/bash
echo "$*" >>calls
if [ -n "${FAILS:-}" ] && [[ "$*" == *"$FAILS"* ]]; then echo "it fails" >&2; exit 1; fi
if [ -n "${WAITS:-}" ] && [[ "$*" == *"$WAITS"* ]]; then
    for i in {1..900}; do [ -e packages ] && break; read -rt 0.1 <>pause; done
    [ -e packages ] || exit 1
fi
case "$*" in
    *requirements-test.txt*) touch packages ;;
    *" wheel "*) while [ "$1" != --wheel-dir ]; do shift; done; touch "$2/mpi4py-4.1.2-none-any.whl" ;;
    *install*--constraint*mpich*) touch .venv/bin/mpiexec ;;
    *" uninstall "*) rm -f .venv/bin/mpiexec ;;
esac
"""
WRAPPERS = {
    "lame": "#!/bin/sh\necho 'opal_init failed' >&2\nexit 1\n",
    "broken": "#!/bin/sh\ncase \"$*\" in *empty.c*) exit 0 ;; esac\necho 'mpi.h: No such file' >&2\nexit 1\n",
    # Open MPI's wrapper adds its include folders only if a file is named.
    "working": "#!/bin/sh\ncase \"$*\" in *.c*) ;; *) echo 'mpi.h: No such file' >&2; exit 1 ;; esac\n",
}


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A folder with the Makefile and an environment with MPICH from `make setup`."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    executable(tmp_path / ".venv/bin/python", PYTHON)
    executable(
        tmp_path / ".venv/bin/mpicc", WRAPPERS["working"]
    )  # MPICH's wheel brings one, which is not the machine's
    (tmp_path / ".venv/stamps").mkdir()
    (tmp_path / ".venv/stamps/venv").touch()
    assert make(tmp_path).returncode == 0
    (tmp_path / "calls").unlink()
    return tmp_path


def make(
    folder: Path, *words: str, goal: str = "setup", mpicc: str | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """Run `make setup` or another goal in an activated environment, with the named kind of mpicc."""
    machine = folder / "machine"
    machine.mkdir(exist_ok=True)
    if mpicc:
        executable(machine / "mpicc", WRAPPERS[mpicc])
    for name in (
        "bash",
        "sh",
        "make",
        "sed",
        "dirname",
        "basename",
        "mktemp",
        "rm",
        "touch",
        "cat",
        "mkdir",
    ):
        if not (machine / name).exists():
            (machine / name).symlink_to(shutil.which(name))
    path = f"{folder / '.venv/bin'}:{machine}"
    return subprocess.run(
        [shutil.which("make"), goal, *words],
        cwd=folder,
        text=True,
        capture_output=True,
        env={"PATH": path, "HOME": str(folder), **environment},
    )


def calls(folder: Path) -> str:
    return (folder / "calls").read_text() if (folder / "calls").exists() else ""


def stamp(folder: Path) -> str:
    return " ".join(path.name for path in (folder / ".venv/stamps").glob("mpi-*"))


@pytest.mark.parametrize(
    ("mpicc", "fails", "message"),
    [
        (None, "", "no mpicc is on the PATH: load the module of your MPI, or install"),
        ("lame", "", "mpicc does not compile an empty file, see above (Open MPI 5 needs HOME"),
        ("broken", "", "mpicc does not find mpi.h: load the module of your MPI, or install"),
        ("working", " wheel ", "mpi4py cannot be built with"),
        (
            "working",
            "import mpi4py",
            "does not load, see above: is the MPI's library folder in LD_LIBRARY_PATH?",
        ),
    ],
)
def test_a_system_mpi_that_fails_leaves_mpich(checkout, mpicc, fails, message):
    done = make(checkout, "MPI=system", mpicc=mpicc, FAILS=fails)
    told = [line for line in done.stderr.splitlines() if line.startswith("MPI=system: ")]
    assert done.returncode == 2 and len(told) == 1 and message in told[0]
    assert (checkout / ".venv/bin/mpiexec").exists() and stamp(checkout) == "mpi-mpich"
    assert "uninstall" not in calls(checkout) and "--force-reinstall" not in calls(checkout)
    assert "is up to date" in make(checkout).stdout  # and that is right: MPICH works


def test_a_system_mpi_replaces_mpich_once_its_mpi4py_loads(checkout):
    assert make(checkout, "MPI=system", mpicc="working").returncode == 0
    order = [
        calls(checkout).find(words)
        for words in (" wheel ", "--target", "import mpi4py", "--force-reinstall", "uninstall")
    ]
    assert order == sorted(order) and order[0] >= 0
    assert stamp(checkout) == "mpi-system" and not (checkout / ".venv/bin/mpiexec").exists()
    assert "is up to date" in make(checkout).stdout  # the choice stays until another is made
    assert make(checkout, "MPI=mpich").returncode == 0
    assert stamp(checkout) == "mpi-mpich" and (checkout / ".venv/bin/mpiexec").exists()


@pytest.mark.parametrize("fails", ["--force-reinstall", "uninstall"])
def test_what_an_interrupted_change_leaves_is_put_right(checkout, fails):
    assert make(checkout, "MPI=system", mpicc="working", FAILS=fails).returncode == 2
    assert stamp(checkout) == ""
    assert make(checkout).returncode == 0
    assert stamp(checkout) == "mpi-mpich" and calls(checkout).rstrip().count("mpi4py mpich") == 1


def test_a_missing_mpiexec_is_installed_again(checkout):
    (checkout / ".venv/bin/mpiexec").unlink()
    assert make(checkout).returncode == 0
    assert "mpi4py mpich" in calls(checkout) and (checkout / ".venv/bin/mpiexec").exists()


class Clone:
    """A fresh clone, and an environment without this one's folder, in which `bin` comes first on the PATH."""

    def __init__(self, folder: Path) -> None:
        subprocess.run(["git", "clone", "--quiet", ROOT, folder / "clone"], check=True)
        self.folder = folder / "clone"
        self.bin = folder / "bin"
        own = str(Path(sys.executable).parent)
        others = [path for path in os.environ["PATH"].split(os.pathsep) if path != own]
        root_may_start_ranks = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        self.environment = {
            **os.environ,
            **root_may_start_ranks,
            "PATH": os.pathsep.join([str(self.bin), *others]),
        }
        self.environment.pop("PYTHONPATH", None)

    def make(self, *words: str) -> subprocess.CompletedProcess:
        """Run make with the words in the clone."""
        return subprocess.run(
            ["make", *words],
            cwd=self.folder,
            env=self.environment,
            text=True,
            capture_output=True,
        )


@pytest.mark.slow
def test_training_works_after_a_broken_mpicc(tmp_path):
    """`make setup MPI=system` with an mpicc that lacks the header, then `make train` with a few iterations."""
    clone = Clone(tmp_path)
    executable(clone.bin / "mpicc", WRAPPERS["broken"])
    broken = clone.make("setup", "MPI=system")
    assert broken.returncode == 2 and "mpicc does not find mpi.h" in broken.stderr
    trained = clone.make("train", "TRAIN_FLAGS=--train-iters 4")
    assert trained.returncode == 0, trained.stderr[-4000:]
    again = clone.make("setup", "MPI=system")
    assert again.returncode == 2
    assert clone.make("train", "TRAIN_FLAGS=--train-iters 4").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mpi", "library", "packages"),
    [
        ("openmpi", "Open MPI", "libopenmpi-dev and openmpi-bin"),
        ("mpich", "MPICH", "libmpich-dev and mpich"),
    ],
)
def test_a_clone_trains_with_the_mpi_of_debian(tmp_path, mpi, library, packages):
    """`make setup MPI=system`, then `make train` on two ranks of the same MPI."""
    if shutil.which(f"mpicc.{mpi}") is None or shutil.which(f"mpiexec.{mpi}") is None:
        pytest.skip(f"needs Debian's {packages}")
    clone = Clone(tmp_path)
    for command in ("mpicc", "mpiexec"):
        executable(clone.bin / command, f'#!/bin/sh\nexec {command}.{mpi} "$@"\n')
    ready = clone.make("setup", "MPI=system")
    assert ready.returncode == 0, ready.stderr[-4000:]
    version = subprocess.run(
        [".venv/bin/python", "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"],
        cwd=clone.folder,
        env=clone.environment,
        text=True,
        capture_output=True,
    )
    assert library in version.stdout, version.stderr
    trained = clone.make("train", "TRAIN_FLAGS=--train-iters 4")
    assert trained.returncode == 0, trained.stderr[-4000:]
    assert "world size 2" in trained.stdout
