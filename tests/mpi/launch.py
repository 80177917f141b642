"""Start `mpiexec -n N python ...` under MPICH or Open MPI, and end it for certain.

MPICH's mpiexec is the one next to the running python (`pip install mpich`). Open MPI's is looked for in the directory
named by FUGAKU_MEGATRON_OPENMPI, then in <prefix of python>/openmpi; it holds bin/mpiexec and lib/libmpi.so.
Left out: which MPI to test, see tests/conftest.py.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parents[1]
FIRST = TESTS / "campaigns" / "faults" / "first"
PATH = os.pathsep.join([str(FIRST), str(TESTS.parent)])  # PYTHONPATH of jobs
OPENMPI_VARIABLE = "FUGAKU_MEGATRON_OPENMPI"


def words(*parts: object) -> list[str]:
    """Split a command line, given in pieces, at blanks."""
    return " ".join(map(str, parts)).split()


@dataclass(frozen=True)
class Result:
    """A job's end. `returncode` is mpiexec's."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def check(self, code: int | None) -> Result:
        """Return this result if it has this exit code."""
        assert code is None or self.returncode == code, f"{self.stdout}\n{self.stderr}"
        return self

    def mistake(self, *said: str) -> None:
        """Check that the job was refused with one line that has these words."""
        self.check(2)
        assert self.stderr.count("\n") == 1 and all(part in self.stderr for part in said), (
            self.stderr
        )


@dataclass(frozen=True)
class MPI:
    """One installed MPI: its mpiexec, and variables for its jobs."""

    name: str
    mpiexec: Path
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # variables that choose another MPI

    def command(self, n: int) -> list[str]:
        """Return mpiexec with a Python on each of `n` ranks."""
        return [str(self.mpiexec), *self.options, "-n", str(n), sys.executable]

    def variables(self) -> dict[str, str]:
        """Return a job's environment. No losses are drawn in it."""
        inherited = {name: value for name, value in os.environ.items() if name not in self.removed}
        return {**inherited, **self.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}

    def run(
        self,
        n: int,
        *arguments: str,
        timeout: float = 240,
        code: int | None = 0,
        **environment: str,
    ) -> Result:
        """Run `python *arguments` on `n` ranks and check the exit code (None: any).

        After `timeout` seconds the process tree is killed, and TimeoutError shows the output until then.
        """
        command = [*self.command(n), *arguments]
        variables = {**self.variables(), **environment}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            begin = time.monotonic()
            job = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=variables
            )
            try:
                job.wait(timeout)
            except subprocess.TimeoutExpired:
                kill_tree(job.pid)
                raise TimeoutError(
                    f"{' '.join(command)}: {timeout} s; {read(out)} {read(err)}"
                ) from None
            finally:
                if job.poll() is None:  # the test run itself is interrupted
                    kill_tree(job.pid)
                job.wait()
            seconds = time.monotonic() - begin
            return Result(job.returncode, read(out), read(err), seconds).check(code)


def read(file) -> str:
    file.seek(0)
    return file.read()


def kill_tree(pid: int) -> None:
    """Kill a process with all its descendants, also in other sessions, which launchers start."""
    tree: list[psutil.Process] = []
    try:
        parent = psutil.Process(pid)
        while new := [
            process for process in (parent, *parent.children(recursive=True)) if process not in tree
        ]:
            tree += new
            for process in new:  # stopped, it starts no further ones
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
    except psutil.NoSuchProcess:
        pass
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(tree, timeout=60)


def mpich() -> MPI | None:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    return MPI("mpich", mpiexec, removed=("MPI4PY_MPIABI",)) if mpiexec.exists() else None


def openmpi() -> MPI | None:
    prefix = Path(os.environ.get(OPENMPI_VARIABLE, Path(sys.prefix) / "openmpi"))
    mpiexec = prefix / "bin" / "mpiexec"
    if not mpiexec.exists():
        return None
    libraries = [str(prefix / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {
        "MPI4PY_MPIABI": "openmpi",
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        # containers run tests as root
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # it may have been relocated
        **{f"{layer}_PREFIX": str(prefix) for layer in ("OPAL", "PMIX", "PRTE")},
        # more ranks than cores: a waiting rank shall leave its core
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    return MPI("openmpi", mpiexec, ("--oversubscribe",), environment)


FIND = {"mpich": mpich, "openmpi": openmpi}
MISSING = {
    "mpich": "MPICH is not installed next to python: pip install mpich",
    "openmpi": f"Open MPI is not installed in <prefix of python>/openmpi and {OPENMPI_VARIABLE} names no other place",
}
