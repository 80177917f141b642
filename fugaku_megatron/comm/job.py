"""Start and end of an MPI job: MPI_Init_thread, and one failing rank that ends all ranks at once."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..start import environment, exit_codes
from ..start.exit_codes import ExitCode
from .agreement import EVERYWHERE, storage_failed
from .base import Comm, SoloComm
from .mpi import MPIComm, mpi_world

T = TypeVar("T")


# the attribute of an exception that is no bug, and ends a job with a code of its own
EXIT_CODE = "exit_code"


GRACE = 0.5  # s that rank > 0 leaves to rank 0, which may be failing of the same cause


def init(waits: Callable[[bool], Any] = bool) -> Comm:
    """Start MPI on its own thread and return the world; `describe(world)` returns the granted thread level.

    waits: is called when this process begins and ends to wait for others (`comm.engine.Engine`).

    A process that no launcher started is a world of one, and then MPI need not be installed. Raises ValueError when a
    launcher started several processes but MPI is missing, or is another MPI than the launcher's, in which case each
    process would take itself for the whole world; and for limits of the system with which MPI would abort.
    """
    name, started = environment.processes()
    environment.check_launcher()
    environment.check_limits()
    try:
        world = mpi_world(waits)
    except (ImportError, RuntimeError) as error:  # mpi4py is missing; mpi4py finds no MPI library
        if started == 1:
            return SoloComm()
        raise ValueError(
            f"{name}={started} but MPI cannot be loaded ({error}): run `pip install mpi4py mpich` and use the mpiexec "
            "next to python, or build mpi4py with the site's MPI"
        ) from error
    if world.size == 1 and started > 1:
        raise ValueError(
            f"{name}={started} but {world.library} sees one process: use the mpiexec of the MPI that mpi4py loads "
            f"(for MPICH: `pip install mpich`), or unset {name} to run independent processes"
        )
    return world


def describe(world: Comm) -> str:
    """One line for the log: library, thread level, number of ranks."""
    if isinstance(world, MPIComm):
        return f"{world.library}, MPI_THREAD_{world.thread_level.upper()}, {world.size} rank(s)"
    return f"no MPI, {world.size} rank(s)"


def run_or_abort(
    main: Callable[[Comm], T], comm: Comm | None = None, waits: Callable[[bool], Any] = bool
) -> T:
    """Return main(comm); if an exception escapes, report it on stderr and end the whole job.

    `comm` is the world, by default that of `init(waits)`. "rank R: <message>" is printed, then MPI_Abort is called:

        ValueError (a user's mistake)       one line                exit code 2
        the same, from a failing disk       one line                exit code 7
        KeyboardInterrupt                   one line                exit code 130
        SystemExit, other than 0            its message if it has   its code
        a path that the system refuses      one line                exit code 2
        standard output closed or full      nothing, or one line    exit code 141
        memory that the system refuses      one line                exit code 1
        anything else (a bug)               the traceback           exit code 1

    When all ranks fail alike, one report shall come out, but failing ranks cannot agree by a collective: others may
    never enter it. So rank 0 reports at once, and its abort ends the other ranks while they still wait, GRACE seconds,
    or GRACE_EVERYWHERE if the error is marked by `everywhere`. A rank whose wait ends knows that rank 0 did not fail:
    it reports and aborts itself. So nothing hangs, and a mistake of one rank is reported at most GRACE seconds late.
    An exception in another thread of the process ends the job in the same way.
    """
    previous = threading.excepthook
    threading.excepthook = lambda failed: _thread_failed(failed, comm)
    try:
        comm = init(waits) if comm is None else comm
        return main(comm)
    except SystemExit as error:
        if not error.code:
            raise
        _end(error, comm)
    except BaseException as error:
        _end(error, comm)
    finally:
        threading.excepthook = previous


def _thread_failed(failed: threading.ExceptHookArgs, comm: Comm | None) -> None:
    if failed.exc_type is SystemExit:  # ends the thread only, as Python has it
        return
    try:
        _end(failed.exc_value or failed.exc_type(), comm)
    except SystemExit as end:  # from a communicator without MPI: would end this thread only
        os._exit(end.code if isinstance(end.code, int) else ExitCode.FAILED)


def end_job_with_exceptions(world: Comm) -> None:
    """From now on an exception that nobody catches, on the main thread or another, prints its traceback and ends all ranks.

    For a program that is not called by `run_or_abort`. It sets sys.excepthook and threading.excepthook, which SystemExit does not
    reach: a rank that leaves by sys.exit ends alone, and the others wait for it.
    """

    def end(kind: type[BaseException], error: BaseException | None, trace: Any) -> None:
        _end(error or kind(), world, traced=True)

    sys.excepthook = end
    threading.excepthook = lambda failed: end(
        failed.exc_type, failed.exc_value, failed.exc_traceback
    )


def _end(error: BaseException, comm: Comm | None, traced: bool = False) -> NoReturn:
    """Report the error, with its traceback in any case if `traced`, and end the job."""
    rank = comm.rank if comm else environment.rank()
    code, text = _report(error)
    if traced:
        text = _traceback(error)
    if rank:
        time.sleep(
            exit_codes.GRACE_EVERYWHERE if comm and getattr(error, EVERYWHERE, False) else GRACE
        )
    if text and (
        comm or not rank
    ):  # without MPI all processes fail alike, and none can end the others
        with contextlib.suppress(OSError):  # nobody reads
            print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
    exit_codes.close_output()
    exit_codes.wait_until_read(sys.stderr)
    if comm:
        comm.abort(code)
    os._exit(code)


def _report(error: BaseException) -> tuple[int, str]:
    """Exit code and text."""
    if isinstance(error, SystemExit):
        return (
            (error.code, "") if isinstance(error.code, int) else (ExitCode.FAILED, str(error.code))
        )
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted"
    if (code := getattr(error, EXIT_CODE, None)) is not None:
        return code, " ".join(str(error).split())
    if isinstance(error, ValueError):
        return ExitCode.STORAGE if storage_failed(error) else ExitCode.USER_ERROR, " ".join(
            str(error).split()
        )
    if (line := exit_codes.output_error(error)) is not None:
        return ExitCode.OUTPUT, line
    if line := exit_codes.path_error(error):
        return ExitCode.USER_ERROR, line
    if line := exit_codes.memory_error(error):
        return ExitCode.FAILED, line
    return ExitCode.FAILED, _traceback(error)


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
