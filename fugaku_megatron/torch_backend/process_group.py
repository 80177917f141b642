"""torch.distributed over MPI: `init_process_group("fugaku")` in a program that mpiexec or srun starts.

A process group is a communicator of `comm`: shared memory inside a node, two levels between nodes, BF16 and FP16 sums in FP32.
Its collectives run in the order of their calls on a thread of the group; messages run on the MPI thread. mpi4py is imported by
the first group. Left out: groups with devices other than the CPU, sparse tensors.
"""

# mypy: disable-error-code="override, assignment, call-arg, name-defined, no-any-return"
# torch's stubs overload its methods and leave out what its modules export.
from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, reduce
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from ..comm.base import COMM_DTYPES, Comm, Handle, SoloComm
from ..comm.job import end_job_with_exceptions, init
from ..comm.mpi import MPIComm
from ..comm.node import share_node
from ..start.exit_codes import ExitCode

NAME = "fugaku"
REDUCED = ("SUM", "MAX", "MIN")  # by `comm`
FOLDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
REDUCTIONS = (*REDUCED, "AVG", *FOLDED)
MAX_TAG = 2**15  # MPI guarantees this many
GRACE = 3.0  # seconds in which the other waiting ranks say that they wait
NO_TIMEOUT = timedelta(0)


@lru_cache(maxsize=1)
def mpi_world() -> Comm:
    """Start MPI and return the world; an uncaught exception of a rank then ends all ranks."""
    world = init()
    if world.size > 1:
        end_job_with_exceptions(world)
    return world


class TimedOut(RuntimeError):
    """A collective or message that ran out of time; uncaught, it ends the job in one line."""

    exit_code = ExitCode.HANG


class Started(Work):
    """A collective or message in progress; `describe` returns its line after a time-out."""

    def __init__(self, result: list[Tensor], timeout: float, describe: Callable[[], str]) -> None:
        super().__init__()
        self.future: Future[list[Tensor]] = Future()
        self.source = -1
        self._result = result
        self._timeout = timeout
        self._describe = describe
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Mark the work as complete, or as failed."""
        self._error = error
        self._ended.set()
        if error is None:
            self.future.set_result(self._result)
        else:
            self.future.set_exception(error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for completion. RuntimeError after `timeout`, by default the group's, or if the work failed."""
        seconds = timeout.total_seconds()
        if not self._ended.wait(seconds if seconds > 0 else self._timeout):
            raise TimedOut(self._describe())
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def follow(self, handle: Handle, then: Callable[[], None] = lambda: None) -> Started:
        """End after `handle` and `then`, on a thread of its own. Return self."""

        def wait() -> None:
            try:
                handle.wait()
                then()
            except Exception as error:  # `wait` raises it
                self.end(error)
            else:
                self.end()

        threading.Thread(target=wait, name="message", daemon=True).start()
        return self

    def result(self) -> list[Tensor]:
        return self._result

    def _source_rank(self) -> int:  # torch's name
        return self.source

    def get_future(self) -> Future[list[Tensor]]:
        return self.future


class MPIProcessGroup(dist.ProcessGroup):
    """A process group of torch.distributed on a communicator.

    store: names ranks that are missing after a time-out
    """

    def __init__(self, comm: Comm, store: dist.Store, timeout: timedelta, name: str) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self._store = store
        self._seconds = timeout.total_seconds()
        self._label = name
        self._count = 0
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=f"collectives of {name}", daemon=True).start()

    # Names that torch's C++ and Python read.

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._label

    @property
    def group_name(self) -> str:
        return self._label

    def shutdown(self) -> None:
        """End the group's thread."""
        self._queue.put(None)

    abort = shutdown

    # Operations on the group's thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (operation := self._queue.get()) is not None:
            operation()

    def _start(
        self, verb: str, run: Callable[[], Any], result: list[Tensor], options: Any = None
    ) -> Work:
        """Queue `run`, a collective in blocking calls of `comm`."""
        self._count += 1
        number = self._count
        work = Started(
            result, self._timeout(options), lambda: self._missing(f"{verb} number {number}", number)
        )

        def operation() -> None:
            try:
                with torch.no_grad():
                    run()
            except Exception as error:  # `wait` raises it
                work.end(error)
            else:
                work.end()

        self._queue.put(operation)
        return work

    def _timeout(self, options: Any) -> float:
        seconds: float = getattr(options, "timeout", NO_TIMEOUT).total_seconds()
        return seconds if seconds > 0 else self._seconds

    def _missing(self, what: str, number: int) -> str:
        """Return the line of a time-out, with the ranks that have not started the collective."""
        self._store.set(f"waits/{number}/{self.comm.rank}", "")
        threading.Event().wait(GRACE)
        waiting = [
            rank for rank in range(self.comm.size) if self._store.check([f"waits/{number}/{rank}"])
        ]
        others = sorted(set(range(self.comm.size)) - set(waiting))
        named = f"rank(s) {', '.join(map(str, others))} did not come" if others else "all came"
        return f"{what} of process group {self._label} did not end in {self._seconds:g} s: {named}"

    # Collectives ------------------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        return self._start(
            "broadcast", lambda: self._broadcast(tensor, opts.rootRank), tensors, opts
        )

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        moved = as_bytes(tensor)
        self.comm.broadcast(moved, root)
        if self.comm.rank != root:
            restore(tensor, moved)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        op = reduction(opts)
        return self._start("all_reduce", lambda: self._all_reduce(tensors, op), tensors, opts)

    allreduce_coalesced = allreduce

    def _all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:
        for tensor in tensors:
            tensor.copy_(self._reduced(tensor, op))

    def _reduced(self, tensor: Tensor, op: str) -> Tensor:
        """Return the reduction of the ranks' tensors; `tensor` itself, if it was reduced in place."""
        if tensor.is_complex():
            whole = torch.view_as_real(tensor.contiguous().resolve_conj())
            return torch.view_as_complex(self._reduced(whole, op))
        if op in FOLDED:
            return reduce(FOLDED[op], self._gathered(tensor))
        if op == "AVG":
            return self._reduced(tensor, "SUM") / self.comm.size
        dense = tensor.contiguous()
        if dense.dtype not in COMM_DTYPES:
            dense = dense.to(torch.int64)
        return self.comm.all_reduce(dense, op.lower()).to(tensor.dtype)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors

        op = reduction(opts)

        def run() -> None:
            total = self._reduced(tensor.clone(), op)
            if self.comm.rank == opts.rootRank:
                tensor.copy_(total)

        return self._start("reduce", run, tensors, opts)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors, (p, ...)."""
        moved = as_bytes(tensor)
        whole = moved.new_empty(self.comm.size * moved.numel())
        self.comm.all_gather(whole, moved)
        return whole.view(tensor.dtype).view(self.comm.size, *tensor.shape)

    def allgather(
        self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any = None
    ) -> Work:
        def run() -> None:
            for outputs, tensor in zip(output_lists, tensors, strict=True):
                for output, part in zip(outputs, self._gathered(tensor), strict=True):
                    output.copy_(part.view(output.shape))

        results = [output for outputs in output_lists for output in outputs]
        return self._start("all_gather", run, results, opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any = None
    ) -> Work:
        by_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self.allgather(by_tensor, tensors, opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Work:
        def run() -> None:
            for output, tensor in zip(outputs, tensors, strict=True):
                moved = as_bytes(output)
                self.comm.all_gather(moved, as_bytes(tensor))
                restore(output, moved)

        return self._start("all_gather_into_tensor", run, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    def gather(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        outputs = output_lists[0] if output_lists else []
        sent = [tensor if rank == opts.rootRank else None for rank in range(self.comm.size)]
        return self._start(
            "gather", lambda: self._exchange(outputs or None, sent, opts.rootRank), outputs, opts
        )

    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> Work:
        (output,) = outputs
        received = [output if rank == opts.rootRank else None for rank in range(self.comm.size)]
        inputs = input_lists[0] if input_lists else None
        return self._start("scatter", lambda: self._exchange(received, inputs), outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._start("all_to_all", lambda: self._exchange(outputs, inputs), outputs, opts)

    def _exchange(
        self,
        outputs: Sequence[Tensor | None] | None,
        inputs: Sequence[Tensor | None] | None,
        root: int = 0,
    ) -> None:
        """Send inputs[rank] to each rank and receive outputs[rank]; None: nothing to or from a rank, or all ranks."""
        nothing = [None] * self.comm.size
        sent = [_flat_bytes(each) for each in inputs or nothing]
        received = [_flat_bytes(each) for each in outputs or nothing]
        whole = torch.empty(sum(map(len, received)), dtype=torch.uint8)
        self.comm.all_to_all(whole, torch.cat(sent), [*map(len, received)], [*map(len, sent)])
        for output, part in zip(outputs or nothing, whole.split([*map(len, received)])):
            if output is not None:
                restore(output, part)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        """Exchange rows of `tensor` and `output`. splits: rows of each rank; empty: equally many"""

        def run() -> None:
            outputs = output.split(self._splits(output, output_splits))
            self._exchange(outputs, tensor.split(self._splits(tensor, input_splits)))

        return self._start("all_to_all_single", run, [output], opts)

    alltoall_base = all_to_all_single

    def _splits(self, tensor: Tensor, splits: list[int]) -> list[int]:
        """Return the rows of each rank, equally many by default. ValueError if the rows do not divide."""
        if splits:
            return splits
        if len(tensor) % self.comm.size:
            raise ValueError(
                f"{len(tensor)} rows do not divide among {self.comm.size} ranks: pass split sizes"
            )
        return [len(tensor) // self.comm.size] * self.comm.size

    def reduce_scatter(
        self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any = None
    ) -> Work:
        """Reduce one tensor for each rank, which may differ in size."""
        (output,) = outputs
        (inputs,) = input_lists

        op = reduction(opts)

        def run() -> None:
            if len({tensor.numel() for tensor in inputs}) == 1:
                whole = torch.stack([tensor.reshape(-1) for tensor in inputs])
                self._reduce_scatter(output, whole, op)
                return
            # Shards of different sizes: every rank reduces all of them.
            totals = [self._reduced(tensor.clone(), op) for tensor in inputs]
            output.copy_(totals[self.comm.rank].view(output.shape))

        return self._start("reduce_scatter", run, outputs, opts)

    def _reduce_scatter(self, output: Tensor, whole: Tensor, op: str) -> None:
        """Reduce `whole` (p, n elements) and store this rank's part in `output` (n elements)."""
        if op not in ("SUM", "AVG") or whole.dtype not in COMM_DTYPES:
            parts = self._reduced(whole.clone(), op).view(self.comm.size, -1)
            output.copy_(parts[self.comm.rank].view(output.shape))
            return
        dense = output if output.is_contiguous() else torch.empty_like(output).contiguous()
        self.comm.reduce_scatter(dense, whole.contiguous())
        if op == "AVG":
            dense.div_(self.comm.size)
        if dense is not output:
            output.copy_(dense)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Work:
        op = reduction(opts)

        def run() -> None:
            for output, tensor in zip(outputs, tensors, strict=True):
                self._reduce_scatter(output, tensor, op)

        return self._start("reduce_scatter_tensor", run, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Work:
        return self._start("barrier", self.comm.barrier, [], opts)

    # Messages on the MPI thread -----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        (tensor,) = tensors
        work = self._message(f"send to rank {dst}", [])
        return work.follow(self.comm.isend(as_bytes(tensor), dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        (tensor,) = tensors
        work = self._message(f"recv from rank {src}", tensors)
        received = as_bytes(tensor)
        work.source = src
        return work.follow(self.comm.irecv(received, src, tag), lambda: restore(tensor, received))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        """Receive from the first rank that sends. ValueError in a group of one rank."""
        if isinstance(self.comm, SoloComm):
            raise ValueError("recv from any rank needs a group of two ranks or more")
        (tensor,) = tensors
        work = self._message("recv from any rank", tensors)
        received = as_bytes(tensor)

        def arrived(source: int) -> None:
            work.source = source

        comm: Any = self.comm  # an MPIComm, or two levels that have one
        handle = comm.irecv_any(received, tag, arrived)
        return work.follow(handle, lambda: restore(tensor, received))

    def _message(self, verb: str, result: list[Tensor]) -> Started:
        line = f"{verb} in process group {self._label} did not end in {self._seconds:g} s"
        return Started(result, self._seconds, lambda: line)


def reduction(options: Any) -> str:
    """Return the name of a reduction. ValueError for others than REDUCTIONS."""
    for name in REDUCTIONS:
        if options.reduceOp == getattr(dist.ReduceOp, name):
            return name
    raise ValueError(
        f"backend {NAME} reduces by {', '.join(REDUCTIONS)}, not by {options.reduceOp}"
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements as bytes (n,): a view of a contiguous tensor, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _flat_bytes(tensor: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.uint8) if tensor is None else as_bytes(tensor)


def restore(tensor: Tensor, moved: Tensor) -> None:
    """Copy bytes (n,) into a tensor, unless they are its own memory."""
    if moved.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(moved.clone().view(tensor.dtype).view(tensor.shape))


def create(options: Any, backend_options: Any = None) -> MPIProcessGroup:
    """Build the process group of `init_process_group` or `new_group`. Collective over its ranks.

    options: torch's DistributedBackendOptions
    ValueError if MPI started other ranks than torch expects.
    """
    from ..host import kernels

    world = mpi_world()
    members = list(options.global_ranks_in_group)
    if not members and (world.size, world.rank) != (options.group_size, options.group_rank):
        raise ValueError(
            f"torch.distributed expects rank {options.group_rank} of {options.group_size} and MPI started rank "
            f"{world.rank} of {world.size}: start with mpiexec -n {options.group_size}, and do not set RANK and WORLD_SIZE"
        )
    comm: Comm = world
    if members and len(members) < world.size and isinstance(world, MPIComm):
        comm = world.create_group(members, zlib.crc32(str(options.group_id).encode()) % MAX_TAG)
    elif isinstance(world, MPIComm):
        comm = world.split(0, members.index(world.rank) if members else world.rank)
    shared = share_node(comm, kernels)
    return MPIProcessGroup(shared, options.store, options.timeout, str(options.group_id))
