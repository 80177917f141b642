"""Start and end of an MPI job: MPI_Init_thread, and a failing rank that ends all."""

from __future__ import annotations

import contextlib
import io
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


EXIT_CODE = "exit_code"  # attribute of an exception that is no bug and has its own exit code
GRACE = 0.5  # s that other ranks leave to rank 0, which may fail for the same reason


def init(waits: Callable[[bool], Any] = bool) -> Comm:
    """Start MPI on its own thread and return the world.

    A process without a launcher is a world of one rank and needs no MPI. ValueError if
    a launcher started several processes and MPI is missing or another than the launcher's.
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
    if isinstance(world, MPIComm):
        return f"{world.library}, MPI_THREAD_{world.thread_level.upper()}, {world.size} rank(s)"
    return f"no MPI, {world.size} rank(s)"


def run_or_abort(
    main: Callable[[Comm], T], comm: Comm | None = None, waits: Callable[[bool], Any] = bool
) -> T:
    """Return main(comm); report an escaping exception as "rank R: <message>" on stderr and end the
    whole job.

    Mistakes take one line, bugs their traceback. If all ranks fail alike, only rank 0 reports: others
    wait GRACE seconds (GRACE_EVERYWHERE after `everywhere`) for rank 0's abort. An exception in
    another thread ends the job, too.
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
    if failed.exc_type is SystemExit:  # ends the thread only, as in Python
        return
    try:
        _end(failed.exc_value or failed.exc_type(), comm)
    except SystemExit as end:  # a communicator without MPI would end this thread only
        os._exit(end.code if isinstance(end.code, int) else ExitCode.FAILED)


def end_job_with_exceptions(world: Comm) -> None:
    """Let every uncaught exception, on any thread, print its traceback, or its line if it has EXIT_CODE, and end all ranks.

    For programs without `run_or_abort`. A rank that leaves by sys.exit ends alone.
    """

    def end(kind: type[BaseException], error: BaseException | None, trace: Any) -> None:
        if isinstance(sys.stderr, io.StringIO):
            # torch.distributed's hook prints what other hooks wrote only after they return.
            sys.stderr = sys.__stderr__
        _end(error or kind(), world, traced=True)

    sys.excepthook = end
    threading.excepthook = lambda failed: end(
        failed.exc_type, failed.exc_value, failed.exc_traceback
    )


def leave_unstarted(error: BaseException) -> NoReturn:
    """Report an error like `run_or_abort` and end the job while MPI_Init does not return."""
    code, text = _report(error)
    time.sleep(GRACE * environment.rank())
    print(f"rank {environment.rank()}: {text}", file=sys.stderr, flush=True)
    exit_codes.close_output()
    exit_codes.wait_until_read(sys.stderr)
    exit_codes.abort(code)
    os._exit(code)


def _end(error: BaseException, comm: Comm | None, traced: bool = False) -> NoReturn:
    rank = comm.rank if comm else environment.rank()
    code, text = _report(error)
    if traced and not hasattr(error, EXIT_CODE):
        text = _traceback(error)
    if rank:
        on_all_ranks = comm and getattr(error, EVERYWHERE, False)
        time.sleep(exit_codes.GRACE_EVERYWHERE if on_all_ranks else GRACE)
    # Without MPI all processes fail alike and cannot end each other.
    if text and (comm or not rank):
        with contextlib.suppress(OSError):  # closed
            print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
    exit_codes.close_output()
    exit_codes.wait_until_read(sys.stderr)
    if threading.current_thread() is not threading.main_thread():
        # MPI_Abort calls exit, whose destructors crash a main thread that computes
        if comm is None or comm.size == 1:
            os._exit(code)
        exit_codes.abort(code)
    if comm:
        comm.abort(code)
    os._exit(code)


def _report(error: BaseException) -> tuple[int, str]:
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return error.code, ""
        return ExitCode.FAILED, str(error.code)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted"
    if (code := getattr(error, EXIT_CODE, None)) is not None:
        return code, " ".join(str(error).split())
    if isinstance(error, ValueError):
        user_code = ExitCode.STORAGE if storage_failed(error) else ExitCode.USER_ERROR
        return user_code, " ".join(str(error).split())
    if (line := exit_codes.output_error(error)) is not None:
        return ExitCode.OUTPUT, line
    if line := exit_codes.path_error(error):
        return ExitCode.USER_ERROR, line
    if line := exit_codes.memory_error(error):
        return ExitCode.FAILED, line
    return ExitCode.FAILED, _traceback(error)


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
