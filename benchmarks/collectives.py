"""Collectives of torch.distributed by this project's backend and by gloo, in turn on the ranks of one node.

    python -m benchmarks collectives --ranks 2 4

The ranks run this module as a program (child.py), one thread each. A call's time is the slowest rank's, from the end of a barrier.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fugaku_megatron.text.table import Column

from . import child, core

OURS = "fugaku"
GLOO = "gloo"
COLUMNS: tuple[Column, ...] = (
    ("verb", "<24", "verb"),
    ("ranks", ">5", "ranks"),
    ("MiB", ">6.1f", "mebibytes"),
    ("ms", ">8.2f", OURS),
    ("gloo ms", ">8.2f", GLOO),
    ("x gloo", ">8.2f", "ratio"),
)


def all_reduce(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum `whole` over the ranks."""
    dist.all_reduce(whole, group=group)


def all_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gather `own` into `whole`."""
    dist.all_gather_into_tensor(whole, own, group=group)


def reduce_scatter(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum `whole` over the ranks and scatter it into `own`."""
    dist.reduce_scatter_tensor(own, whole, group=group)


VERBS: dict[str, Callable[[Tensor, Tensor, dist.ProcessGroup | None], None]] = {
    "all_reduce": all_reduce,
    "all_gather_into_tensor": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this family."""
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="of each run (default: 2 4)"
    )
    parser.add_argument("--verbs", nargs="+", default=list(VERBS), choices=VERBS)
    parser.add_argument(
        "--mebibytes",
        type=float,
        nargs="+",
        default=[0.0625, 1, 64],
        help="of the whole FP32 tensor (default: 0.0625 1 64)",
    )
    parser.add_argument("--rounds", type=int, default=15, help="calls of each backend")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all verbs and sizes. RuntimeError when the ranks fail."""
    rows = []
    order = {name: getattr(options, name) for name in ("verbs", "mebibytes", "rounds")}
    for ranks in options.ranks:
        for row in child.ranks(ranks, "collectives", order):
            row["ratio"] = row[GLOO] / row[OURS]
            rows.append(row)
    return {"rows": rows}


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the table."""
    return (
        f"{core.table(COLUMNS, result['rows'])}\n"
        f"medians of {options.rounds} calls in turn; measured, {result['cpu']}"
    )


def seconds(call: Callable[[], None], gloo: dist.ProcessGroup) -> float:
    """Return the slowest rank's time of a call."""
    dist.barrier(gloo)
    begin = time.perf_counter()
    call()
    taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=gloo)
    return taken.item()


def main() -> None:
    """Run on each rank; rank 0 answers one row for each verb and size."""
    order, answer = child.order()
    import fugaku_megatron.torch_backend  # noqa: F401  # registers the backend

    dist.init_process_group(OURS)
    gloo = dist.new_group(backend=GLOO)
    ranks = dist.get_world_size()
    for name in order["verbs"]:
        for mebibytes in order["mebibytes"]:
            own = torch.ones(round(mebibytes * 2**18) // ranks)
            whole = torch.zeros(ranks * own.numel())
            taken = []
            for _ in range(order["rounds"] + 1):
                backends = {OURS: None, GLOO: gloo}
                taken.append(
                    {
                        backend: 1e3 * seconds(lambda: VERBS[name](whole, own, group), gloo)  # noqa: B023
                        for backend, group in backends.items()
                    }
                )
            if dist.get_rank() == 0:
                row = {"verb": name, "ranks": ranks, "mebibytes": mebibytes}
                answer({**row, **core.medians(taken[1:])})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
