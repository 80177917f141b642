"""torch.distributed over MPI: `init_process_group("fugaku")` in a program that mpiexec or srun starts.

A process group is a communicator of `comm`: shared memory inside a node, two levels between nodes, BF16 and FP16 sums in FP32.
Its collectives run in the order of their calls on a thread of the group; messages run on the MPI thread. mpi4py is imported by
the first group. Left out: groups with devices other than the CPU, sparse tensors.
"""

# mypy: disable-error-code="override, assignment, attr-defined, call-arg, name-defined, no-any-return"
# torch's stubs overload its methods and leave out what its modules export.
from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial, reduce, wraps
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from ..comm.base import COMM_DTYPES, Comm, SoloComm
from ..comm.engine import PATIENCE, Engine
from ..comm.job import end_job_with_exceptions, init, leave_unstarted
from ..comm.mpi import MPIComm
from ..comm.node import share_node
from ..start import environment, witness
from ..start.exit_codes import ExitCode
from ..start.presence import Presence

NAME = "fugaku"
Tensors = list[Tensor]
# Reductions that `comm` lacks
FOLDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
REDUCTIONS = ("SUM", "MAX", "MIN", "AVG", *FOLDED)
MAX_TAG = 2**15  # MPI guarantees this many
GRACE = 3.0  # seconds in which the other waiting ranks say that they wait
NO_TIMEOUT = timedelta(0)
# Groups by name and ranks: torch uses a name again after destroy_process_group.
_created: Counter[int] = Counter()
_groups: WeakSet[MPIProcessGroup] = WeakSet()


class TimedOut(RuntimeError):
    """A collective or message that ran out of time; uncaught, it ends the job in one line."""

    exit_code = ExitCode.HANG


@lru_cache(maxsize=1)
def start_mpi() -> Comm:
    """Start MPI and return the world; an uncaught exception of a rank then ends all ranks."""
    world = init()
    if world.size > 1:
        end_job_with_exceptions(world)
        atexit.register(stop_threads, world.engine)
    if environment.HYDRA in os.environ:
        host = socket.gethostname()
        places = world.all_gather_object((host, os.getpid()))
        witness.start(
            {rank: pid for rank, (at, pid) in enumerate(places) if at == host}, world.rank
        )
        world.barrier()  # no rank ends before its witness watches
    return world


def stop_threads(engine: Engine) -> None:
    """End the groups' threads, after GRACE seconds also in the middle of a collective: MPI and Python cannot end around them."""
    for group in _groups:
        group.abort()
    end = time.monotonic() + GRACE
    for group in _groups:
        group.thread.join(max(0.0, end - time.monotonic()))
    engine.leaves = True
    for group in _groups:
        group.thread.join(2 * PATIENCE)


def mpi_world(timeout: timedelta) -> Comm:
    """Return the world. If MPI does not start in time, name this node's ranks that did not come and end the job."""
    start = Started([], timeout.total_seconds(), "start of MPI", Presence().missing)
    try:
        start.follow(start_mpi).wait()
    except TimedOut as error:
        leave_unstarted(error)
    return start_mpi()


def positive(timeout: timedelta, default: float) -> float:
    """Return the seconds of a timeout, `default` if torch left it unset."""
    return max(0.0, timeout.total_seconds()) or default


def absent(store: dist.Store, key: str, rank: int, ranks: Sequence[int]) -> str:
    """Announce at `key` that `rank` waits; after GRACE return which of `ranks` do not."""
    try:
        store.set(f"{key}/{rank}", "")
        time.sleep(GRACE)
        others = [str(each) for each in ranks if not store.check([f"{key}/{each}"])]
    except RuntimeError:
        return "rank 0, which serves the store, is gone"
    return f"rank(s) {', '.join(others)} did not come" if others else "all came"


def all_came(store: dist.Store, key: str, size: int) -> bool:
    """Return True on all ranks if they all call this within GRACE seconds of each other, else False on all."""
    refused = -(2**32)
    try:
        if store.add(key, 1) == size:
            store.set(f"{key}/all", "")
            return True
        store.wait([f"{key}/all"], timedelta(seconds=GRACE))
    except RuntimeError:  # one rank's refusal counts for all, unless the last rank came before it
        try:
            return store.add(key, refused) == size + refused
        except RuntimeError:  # the store is gone
            return False
    return True


class Started(Work):
    """A collective or message in progress.

    name: begins the line of a time-out
    missing: ends the line, naming the ranks that did not come
    """

    def __init__(
        self, result: Tensors, timeout: float, name: str, missing: Callable[[], str] = str
    ) -> None:
        super().__init__()
        self.future: Future[Tensors] = Future()
        self.source = -1
        self._result = result
        self._timeout = timeout
        self._name = name
        self._missing = missing
        self._ended = threading.Event()
        self._error: Exception | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for completion. RuntimeError after `timeout`, by default the group's, or if the work failed."""
        seconds = positive(timeout, self._timeout)
        if not self._ended.wait(seconds):
            named = self._missing()
            line = f"{self._name}: timeout after {seconds:g} s"
            raise TimedOut(f"{line}: {named}" if named else line)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def run(self, *functions: Callable[[], object]) -> None:
        """Call functions in turn and mark the work as complete, or as failed."""
        try:
            for function in functions:
                function()
        except Exception as error:  # `wait` raises it
            self._error = error
        self._ended.set()
        if self._error is None:
            self.future.set_result(self._result)
        else:
            self.future.set_exception(self._error)  # type: ignore[arg-type]

    def follow(self, *functions: Callable[[], object]) -> Started:
        """Call functions in turn on a thread of their own and end. Return self."""
        threading.Thread(target=self.run, args=functions, name="message", daemon=True).start()
        return self

    def result(self) -> Tensors:
        return self._result

    def _source_rank(self) -> int:  # torch's name
        return self.source

    def get_future(self) -> Future[Tensors]:
        return self.future


def collective(verb: str) -> Callable[[Callable[..., None]], Callable[..., Work]]:
    """Return a decorator of a process group's method, which then runs on the group's thread; its caller gets the work.

    The first argument has the result's tensors, the last one may be torch's options.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., Work]:
        @wraps(run)
        def start(self: MPIProcessGroup, *operands: Any, **options: Any) -> Work:
            operands = (*operands, *options.values())
            result = tensors_in(operands[:1])
            if any(tensor.layout != torch.strided for tensor in result):
                raise ValueError(f"backend {NAME} takes dense tensors: pass tensor.to_dense()")
            timeout = getattr((None, *operands)[-1], "timeout", NO_TIMEOUT)
            return self.start(verb, lambda: run(self, *operands), result, timeout)

        return start

    return decorate


def tensors_in(operand: Any) -> Tensors:
    """Return the tensors of a list of any depth."""
    if isinstance(operand, Tensor):
        return [operand]
    if isinstance(operand, list | tuple):
        return [tensor for each in operand for tensor in tensors_in(each)]
    return []


class MPIProcessGroup(dist.ProcessGroup):
    """A process group of torch.distributed on a communicator.

    freed: communicators that end with the group
    options: torch's DistributedBackendOptions
    store: names ranks that are missing after a time-out; no other group uses its keys
    ranks: the group's ranks in the world
    """

    def __init__(
        self,
        comm: Comm,
        freed: Sequence[Comm],
        options: Any,
        store: dist.Store,
        ranks: Sequence[int],
    ) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self._freed = freed
        self._ranks = ranks
        self._store = store
        self._seconds = options.timeout.total_seconds()
        self._label = str(options.group_id)
        self._count = 0
        self._ended = False
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=self._work, name=f"collectives of {self._label}", daemon=True
        )
        self.thread.start()
        _groups.add(self)

    # Names that torch's C++ and Python read.

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._label

    @property
    def group_name(self) -> str:
        return self._label

    def abort(self) -> None:
        """End the group's thread after the started collectives."""
        self._ended = True
        self._queue.put(None)

    def shutdown(self) -> None:
        """Free the communicators if all ranks end the group within GRACE seconds and no collective is missing a rank."""
        self.abort()
        self.thread.join(GRACE)
        if not self.thread.is_alive() and all_came(self._store, "ends", self.comm.size):
            for comm in self._freed:
                comm.free()

    # Operations on the group's thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        from ..host import kernels

        torch.get_num_threads()  # torch's first call on a thread would overwrite the number
        kernels.set_num_threads(1)  # the caller's threads compute meanwhile
        with torch.no_grad():
            while (operation := self._queue.get()) is not None:
                operation()

    def start(
        self, verb: str, run: Callable[[], None], result: Tensors, timeout: timedelta
    ) -> Work:
        """Queue `run`, a collective in blocking calls of `comm`."""
        self._refuse_destroyed()
        self._count += 1
        key = f"{verb} number {self._count}"
        missing = partial(absent, self._store, key, self._ranks[self.comm.rank], self._ranks)
        name = f"{key} of process group {self._label}"
        work = Started(result, positive(timeout, self._seconds), name, missing)
        self._queue.put(lambda: work.run(run))
        return work

    def _refuse_destroyed(self) -> None:
        if self._ended:
            raise ValueError(f"process group {self._label} is destroyed: make a new one")

    # Collectives ------------------------------------------------------------------------------------------------------------------

    @collective("broadcast")
    def broadcast(self, tensors: Tensors, opts: Any) -> None:
        (tensor,) = tensors
        moved = as_bytes(tensor)
        self.comm.broadcast(moved, opts.rootRank)
        restore(tensor, moved)

    @collective("all_reduce")
    def allreduce(self, tensors: Tensors, opts: Any = None) -> None:
        for tensor in tensors:
            tensor.copy_(self._reduced(tensor, reduction(opts)))

    allreduce_coalesced = allreduce

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

    @collective("reduce")
    def reduce(self, tensors: Tensors, opts: Any) -> None:
        (tensor,) = tensors
        total = self._reduced(tensor.clone(), reduction(opts))
        if self.comm.rank == opts.rootRank:
            tensor.copy_(total)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors, (p, ...)."""
        whole = tensor.new_empty(self.comm.size, *tensor.shape)
        self.comm.all_gather(as_bytes(whole), as_bytes(tensor))
        return whole

    @collective("all_gather")
    def allgather(self, output_lists: list[Tensors], tensors: Tensors, opts: Any = None) -> None:
        for outputs, tensor in zip(output_lists, tensors, strict=True):
            for output, part in zip(outputs, self._gathered(tensor), strict=True):
                output.copy_(part.view(output.shape))

    def allgather_coalesced(
        self, output_lists: list[Tensors], tensors: Tensors, opts: Any = None
    ) -> Work:
        by_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self.allgather(by_tensor, tensors, opts)

    @collective("all_gather_into_tensor")
    def all_gather_single(
        self, outputs: Tensor | Tensors, tensors: Tensor | Tensors, opts: Any = None
    ) -> None:
        for output, tensor in zip(tensors_in(outputs), tensors_in(tensors), strict=True):
            moved = as_bytes(output)
            self.comm.all_gather(moved, as_bytes(tensor))
            restore(output, moved)

    _allgather_base = all_gather_single
    all_gather_single_coalesced = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single

    @collective("gather")
    def gather(self, output_lists: list[Tensors], tensors: Tensors, opts: Any) -> None:
        (tensor,) = tensors
        self._exchange(output_lists[0] if output_lists else (), self._only(opts, tensor))

    @collective("scatter")
    def scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> None:
        (output,) = outputs
        self._exchange(self._only(opts, output), input_lists[0] if input_lists else ())

    def _only(self, opts: Any, tensor: Tensor) -> Tensors:
        """Return a tensor for each rank: `tensor` for the root, an empty one for the others."""
        none = tensor.new_empty(0)
        return [tensor if rank == opts.rootRank else none for rank in range(self.comm.size)]

    @collective("all_to_all")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> None:
        self._exchange(outputs, inputs)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Send inputs[rank] to each rank and receive outputs[rank]; without tensors, nothing."""
        nothing = [torch.empty(0) for _ in range(self.comm.size)]
        sent = [as_bytes(each) for each in inputs or nothing]
        received = [each.nbytes for each in outputs or nothing]
        whole = torch.empty(sum(received), dtype=torch.uint8)
        self.comm.all_to_all(whole, torch.cat(sent), received, [*map(len, sent)])
        for output, part in zip(outputs, whole.split(received)):
            restore(output, part)

    @collective("all_to_all_single")
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> None:
        """Exchange rows of `tensor` and `output`. splits: rows of each rank; empty: equally many"""
        outputs = output.split(self._splits(output, output_splits))
        self._exchange(outputs, tensor.split(self._splits(tensor, input_splits)))

    alltoall_base = all_to_all_single

    def _splits(self, tensor: Tensor, splits: list[int]) -> list[int]:
        """Return the rows of each rank, equally many by default. ValueError if the rows do not divide."""
        if splits:
            return splits
        if len(tensor) % self.comm.size:
            raise ValueError(
                f"{len(tensor)} rows do not divide among {self.comm.size} ranks: pass split sizes"
            )
        return [len(tensor) // self.comm.size for _ in range(self.comm.size)]

    @collective("reduce_scatter")
    def reduce_scatter(
        self, outputs: Tensors, input_lists: list[Tensors], opts: Any = None
    ) -> None:
        """Reduce one tensor for each rank, which may differ in size."""
        (output,) = outputs
        (inputs,) = input_lists
        if len({tensor.numel() for tensor in inputs}) == 1:
            whole = torch.stack([tensor.reshape(-1) for tensor in inputs])
            self._reduce_scatter(output, whole, reduction(opts))
            return
        # Shards of different sizes: every rank reduces all of them.
        totals = [self._reduced(tensor.clone(), reduction(opts)) for tensor in inputs]
        output.copy_(totals[self.comm.rank].view(output.shape))

    def _reduce_scatter(self, output: Tensor, whole: Tensor, op: str) -> None:
        """Reduce `whole` (p, n elements) and store this rank's part in `output` (n elements)."""
        if op not in ("SUM", "AVG") or whole.dtype not in COMM_DTYPES:
            parts = self._reduced(whole.clone(), op).view(self.comm.size, -1)
            output.copy_(parts[self.comm.rank].view(output.shape))
            return
        dense = output.contiguous()
        self.comm.reduce_scatter(dense, whole.contiguous())
        if op == "AVG":
            dense.div_(self.comm.size)
        output.copy_(dense)

    @collective("reduce_scatter_tensor")
    def reduce_scatter_single(
        self, outputs: Tensor | Tensors, tensors: Tensor | Tensors, opts: Any = None
    ) -> None:
        for output, tensor in zip(tensors_in(outputs), tensors_in(tensors), strict=True):
            self._reduce_scatter(output, tensor, reduction(opts))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_single_coalesced = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single

    @collective("barrier")
    def barrier(self, opts: Any = None) -> None:
        self.comm.barrier()

    # Messages on the MPI thread -----------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        (tensor,) = tensors
        work = self._message(f"send to rank {dst}", [])
        return work.follow(self.comm.isend(as_bytes(tensor), dst, tag).wait)

    def recv(self, tensors: Tensors, src: int, tag: int) -> Work:
        (tensor,) = tensors
        work = self._message(f"recv from rank {src}", tensors)
        received = as_bytes(tensor)
        work.source = src
        handle = self.comm.irecv(received, src, tag)
        return work.follow(handle.wait, lambda: restore(tensor, received))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive from the first rank that sends. ValueError in a group of one rank."""
        if isinstance(self.comm, SoloComm):
            raise ValueError("recv from any rank needs a group of two ranks or more")
        (tensor,) = tensors
        work = self._message("recv from any rank", tensors)
        received = as_bytes(tensor)
        comm: Any = self.comm  # an MPIComm, or two levels that have one
        handle = comm.irecv_any(received, tag, partial(setattr, work, "source"))
        return work.follow(handle.wait, lambda: restore(tensor, received))

    def _message(self, verb: str, result: Tensors) -> Started:
        self._refuse_destroyed()
        return Started(result, self._seconds, f"{verb} in process group {self._label}")


def reduction(options: Any) -> str:
    """Return the name of a reduction: torch's options, a ReduceOp, or None for the sum. ValueError for others than REDUCTIONS."""
    operation = getattr(options, "reduceOp", options or dist.ReduceOp.SUM)
    for name in REDUCTIONS:
        if operation == getattr(dist.ReduceOp, name):
            return name
    raise ValueError(f"backend {NAME} reduces by {', '.join(REDUCTIONS)}, not by {operation}")


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements as bytes (n,): a view of a contiguous tensor, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


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

    world = mpi_world(options.timeout)
    ranks = list(options.global_ranks_in_group) or list(range(world.size))
    if (len(ranks), ranks.index(world.rank)) != (options.group_size, options.group_rank):
        raise ValueError(
            f"torch.distributed expects rank {options.group_rank} of {options.group_size} and MPI started rank "
            f"{world.rank} of {world.size}: start with mpiexec -n {options.group_size}, and do not set RANK and WORLD_SIZE"
        )
    if not isinstance(world, MPIComm):
        return MPIProcessGroup(world, [], options, options.store, ranks)
    name = str(options.group_id)
    tag = zlib.crc32(f"{name} {ranks}".encode()) % MAX_TAG
    _created[tag] += 1
    store = dist.PrefixStore(f"{tag}/{_created[tag]}", options.store)
    created: list[Comm] = []

    def build() -> None:
        comm = world.create_group(ranks, tag)
        shared = share_node(comm, kernels)
        created.append(shared)
        if comm not in (shared, getattr(shared, "whole", None)):
            created.append(comm)

    missing = partial(absent, store, "create", world.rank, ranks)
    seconds = options.timeout.total_seconds()
    Started([], seconds, f"new process group {name}", missing).follow(build).wait()
    return MPIProcessGroup(created[0], created, options, store, ranks)
