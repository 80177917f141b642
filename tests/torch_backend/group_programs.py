"""Programs of ranks that compare process groups of the backend with gloo's, or end in a way of their own.

Run as `group_programs.py FUNCTION`; every rank prints "ok NAME" lines, or ends as the test expects.
"""

import os
import re
import signal
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard

import fugaku_megatron.torch_backend  # noqa: F401  # registers the backend

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16)
# Types that gloo lacks in some collectives, and types that hold the same small integers.
IN_GLOO = {torch.bfloat16: torch.float32, torch.int16: torch.int64}
ITERATIONS = 5
GROUPS = 1000


def say(line: str) -> None:
    """Print a line by one write, which the other ranks' lines cannot split."""
    os.write(1, f"{line}\n".encode())


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small integers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def complex_sum(group, rank, size, dtype):
    x = values(rank, 5, dtype=torch.complex64) * 1j
    dist.all_reduce(x, group=group)
    return x


def in_place(name, call):
    """Return the verb of a function that changes a tensor, which is not contiguous."""

    def verb(group, rank, size, dtype):
        x = values(rank, 3, 7, dtype=dtype).t()
        call(x, group=group)
        return x

    verb.__name__ = name
    return verb


def reduce(group, rank, size, dtype):
    x = values(rank, 5, dtype=dtype)
    dist.reduce(x, 1, group=group)
    return x if rank == 1 else torch.zeros(1)


def all_gather(group, rank, size, dtype):
    outputs = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
    dist.all_gather(outputs, values(rank, 2, 3, dtype=dtype), group=group)
    return torch.stack(outputs)


def all_gather_into_tensor(group, rank, size, dtype):
    output = torch.empty(size * 2, 3, dtype=dtype)
    dist.all_gather_into_tensor(output, values(rank, 2, 3, dtype=dtype), group=group)
    return output


def gather(group, rank, size, dtype):
    outputs = [torch.empty(4, dtype=dtype) for _ in range(size)] if rank == 1 else None
    dist.gather(values(rank, 4, dtype=dtype), outputs, 1, group=group)
    return torch.stack(outputs) if outputs else torch.zeros(1)


def scatter(group, rank, size, dtype):
    output = torch.empty(4, dtype=dtype)
    inputs = [values(each, 4, dtype=dtype) for each in range(size)] if rank == 1 else None
    dist.scatter(output, inputs, 1, group=group)
    return output


def reduce_scatter(group, rank, size, dtype):
    output = torch.empty(4, dtype=dtype)
    inputs = [values(rank + each, 4, dtype=dtype) for each in range(size)]
    dist.reduce_scatter(output, inputs, group=group)
    return output


def all_to_all_single(group, rank, size, dtype):
    sent = [(rank + each) % 3 for each in range(size)]
    received = [(each + rank) % 3 for each in range(size)]
    output = torch.empty(sum(received), 2, dtype=dtype)
    dist.all_to_all_single(
        output, values(rank, sum(sent), 2, dtype=dtype), received, sent, group=group
    )
    return output


def messages(group, rank, size, dtype):
    x = torch.empty(4, dtype=dtype)
    after = (rank + 1) % size
    sending = dist.isend(values(rank, 4, dtype=dtype), after, group=group, tag=7)
    dist.recv(x, (rank - 1) % size, group=group, tag=7)
    sending.wait()
    return x


def any_source(group, rank, size, dtype):
    total = torch.zeros(2, dtype=dtype)
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            x = torch.zeros(2, dtype=dtype)
            sources.add(dist.recv(x, None, group=group))
            total += x
        assert sources == set(range(1, size))
    else:
        dist.send(values(rank, 2, dtype=dtype), 0, group=group)
    dist.barrier(group=group)  # no rank sends for the next call before
    return total


def asynchronous(group, rank, size, dtype):
    x = values(rank, 1000, dtype=dtype)
    y = values(rank + 1, 3, dtype=dtype)
    works = [dist.all_reduce(each, group=group, async_op=True) for each in (x, y)]
    future = works[1].get_future()
    future.wait()
    for work in works:
        work.wait()
    assert all(work.is_completed() for work in works)
    return torch.cat([x, y])


def objects(group, rank, size, dtype):
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank}, group=group)
    assert found == [{"rank": each, "text": "x" * each} for each in range(size)]
    return torch.zeros(1)


VERBS = (
    in_place("all_reduce", dist.all_reduce),
    in_place("maximum", partial(dist.all_reduce, op=dist.ReduceOp.MAX)),
    in_place("product", partial(dist.all_reduce, op=dist.ReduceOp.PRODUCT)),
    in_place("broadcast", partial(dist.broadcast, src=1)),
    complex_sum,
    reduce,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    reduce_scatter,
    all_to_all_single,
    messages,
    any_source,
    asynchronous,
    objects,
)


def use_one_thread() -> None:
    """Check that collectives start no second team of OpenMP threads."""
    torch.set_num_threads(3)
    x = torch.ones(2**20)
    (x + x).sum()
    before = len(os.listdir("/proc/self/task"))
    for dtype in (torch.float32, torch.int16):
        dist.all_reduce(x.to(dtype))
    assert len(os.listdir("/proc/self/task")) <= before
    assert torch.get_num_threads() == 3
    say("ok threads")


def verbs() -> None:
    """Compare every verb and type with gloo, in the world and in a group of two ranks."""
    dist.init_process_group("fugaku")
    rank = dist.get_rank()
    size = dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    for verb in VERBS:
        for dtype in DTYPES:
            ours = verb(None, rank, size, dtype)
            theirs = verb(gloo, rank, size, IN_GLOO.get(dtype, dtype))
            assert torch.equal(ours, theirs.to(ours.dtype)), (verb.__name__, dtype, ours, theirs)
        say(f"ok {verb.__name__}")
    assert dist.get_backend() == "fugaku"
    with pytest.raises(ValueError, match="backend fugaku takes dense tensors"):
        dist.all_reduce(torch.ones(3).to_sparse())
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = halves[rank % 2]
    x = torch.tensor([rank])
    dist.all_reduce(x, group=own)
    assert x.item() == 2 * (rank % 2) + 2
    dist.destroy_process_group(own)
    say("ok groups")
    use_one_thread()
    dist.destroy_process_group()


def losses(wrap, group) -> list[float]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = wrap(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for iteration in range(ITERATIONS):
        torch.manual_seed(100 * iteration + rank)
        x = torch.randn(8, 16)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    if isinstance(model, nn.Sequential):
        save_and_load(model, group)
    return found


def save_and_load(model: nn.Module, group) -> None:
    """Check that a sharded checkpoint brings the weights back."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0, group=group)
    state = model.state_dict()
    checkpoint.save(state, checkpoint_id=folder[0], process_group=group)
    expected = {name: each.to_local().clone() for name, each in state.items()}
    for each in state.values():
        each.to_local().zero_()
    checkpoint.load(state, checkpoint_id=folder[0], process_group=group)
    assert all(torch.equal(state[name].to_local(), each) for name, each in expected.items())


def data_parallel(model: nn.Module, group) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def sharded(model: nn.Module, group) -> nn.Module:
    mesh = dist.DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def training() -> None:
    """Compare losses of DDP and FSDP2 with gloo's."""
    dist.init_process_group("fugaku")
    gloo = dist.new_group(backend="gloo")
    for wrap in (data_parallel, sharded):
        ours = losses(wrap, None)
        theirs = losses(wrap, gloo)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
        say(f"ok {wrap.__name__}")


def late() -> None:
    """Let rank 1 stay away from a collective."""
    dist.init_process_group("fugaku")
    group = dist.new_group(timeout=timedelta(seconds=3))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(3), group=group)


def raises() -> None:
    """Let rank 1 fail while the others wait."""
    dist.init_process_group("fugaku")
    dist.barrier()
    if dist.get_rank() == 1:
        raise KeyError("boom")
    dist.all_reduce(torch.ones(3))


def killed() -> None:
    """Kill a rank while the others wait."""
    dist.init_process_group("fugaku")
    dist.barrier()
    if dist.get_rank() == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def late_start() -> None:
    """Let rank 1 stay away from init_process_group."""
    if os.environ["RANK"] == "1":
        time.sleep(60)
    dist.init_process_group("fugaku", timeout=timedelta(seconds=20))  # others may be slow to start


def late_group() -> None:
    """Let rank 2 stay away from new_group."""
    dist.init_process_group("fugaku")
    dist.barrier()
    if dist.get_rank() == 2:
        time.sleep(60)
    dist.new_group([1, 2], timeout=timedelta(seconds=3))


def late_in_group() -> None:
    """Let rank 2 stay away from a collective of a group whose ranks have other numbers."""
    dist.init_process_group("fugaku")
    group = dist.new_group([1, 2], timeout=timedelta(seconds=3))
    if dist.get_rank() != 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(3), group=group)


def waits() -> None:
    """Catch the time-out of one wait, and use the group further."""
    dist.init_process_group("fugaku")
    dist.barrier()
    x = torch.ones(3)
    if dist.get_rank() == 1:
        time.sleep(6)
    work = dist.all_reduce(x, async_op=True)
    if dist.get_rank() == 0:
        line = "all_reduce number 2 of process group 0: timeout after 1 s: rank(s) 1 did not come"
        with pytest.raises(RuntimeError, match=re.escape(line)):
            work.wait(timedelta(seconds=1))
    work.wait()
    assert x.tolist() == [2.0] * 3
    dist.destroy_process_group()
    say("ok waits")


def unfinished() -> None:
    """Catch the time-out of a collective that rank 1 never starts, and end with an exit code."""
    dist.init_process_group("fugaku")
    reduces = partial(dist.all_reduce, torch.ones(3))
    for collective in (reduces, dist.barrier):  # in shared memory, and by MPI
        group = dist.new_group(timeout=timedelta(seconds=1))
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=re.escape("rank(s) 1 did not come")):
                collective(group=group)
        dist.barrier()
    say("ok unfinished")
    sys.exit(7)


def many_groups() -> None:
    """Make and destroy more groups than MPI has communicators; use none after its end."""
    dist.init_process_group("fugaku")
    for _ in range(GROUPS):
        group = dist.new_group([0, 1])
        x = torch.ones(5)
        work = dist.all_reduce(x, group=group, async_op=True)
        dist.destroy_process_group(group)  # after the collective
        work.wait()
        assert x.tolist() == [2.0] * 5
    world = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="process group 0 is destroyed"):
        world.allreduce([torch.ones(3)], dist.AllreduceOptions())
    dist.init_process_group("fugaku")
    dist.barrier()
    dist.destroy_process_group()
    say("ok groups")


def accelerated() -> None:
    """Print losses of a program of accelerate."""
    import accelerate

    dist.init_process_group(sys.argv[2])
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    assert accelerator.num_processes == dist.get_world_size()
    found = []
    for x in data:
        with accelerator.accumulate(model):
            loss = (model(x) - x).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.gather(loss.detach().view(1)).mean().item())
    assert len(found) == 16 // dist.get_world_size()
    say(f"losses {dist.get_rank()} {found}")


def trainer() -> None:
    """Print losses of trl's SFTTrainer with LoRA."""
    from tests.torch_backend.test_trainers import history

    dist.init_process_group(sys.argv[2])
    rows = history("qwen3", "SFT", False, tempfile.mkdtemp())
    losses = [(row["loss"], row["grad_norm"]) for row in rows]
    say(f"losses {dist.get_rank()} {losses}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
