"""PyTorch's own tests of torch.distributed (distributed_test.py) with this backend in place of gloo, on ranks of MPI.

Run as `distributed_cases.py FOLDER [NAME ...]`, by default with all cases; the ranks share FOLDER. PyTorch starts processes for
each test; here the ranks of one job run all of them, each with process groups of its own. Each rank prints "ok NAME",
"gpu NAME" for a test that asks for a GPU, or "skip (REASON) NAME" for a test that PyTorch skips; a test that fails ends the job.
"""

import importlib
import os
import sys
import unittest
from datetime import timedelta
from pathlib import Path

TIMEOUT = timedelta(seconds=60)
OURS = "fugaku"
GLOO = "gloo"

# Tests that cannot pass here, with the reason of each.
MONITORED = "PyTorch refuses it for other backends than gloo"
SKIPPED: dict[str, str] = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_monitored_barrier_failure_order": MONITORED,
    "test_monitored_barrier_gloo": MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": MONITORED,
    "test_monitored_barrier_gloo_subgroup": MONITORED,
    "test_monitored_barrier_wait_all_ranks": MONITORED,
    "test_sparse_all_reduce_sum": "sparse tensors are refused",
}


def translated(function):
    """Return torch's function with this backend for gloo."""

    def start(*arguments, **options):
        chosen = [OURS if argument == GLOO else argument for argument in arguments]
        if options.get("backend") == GLOO:
            options["backend"] = OURS
        return function(*chosen, **options)

    return start


def run(cases, name: str) -> str:
    """Return "ok" after a test, "gpu" if it needs a GPU, else the reason why PyTorch skips it."""
    reason = getattr(getattr(type(cases), name), "__unittest_skip_why__", "").lower()
    if "nccl" in reason or "cuda" in reason:
        return "gpu"
    try:
        getattr(cases, name)()
    except unittest.SkipTest as reason:
        return f"skip ({reason})"
    except SystemExit as end:
        from torch.testing._internal.common_distributed import TEST_SKIPS

        reasons = {skip.exit_code: reason for reason, skip in TEST_SKIPS.items()}
        reason = reasons[end.code]
        return "gpu" if reason.startswith(("multi-gpu", "no_cuda")) else f"skip ({reason})"
    return "ok"


def main() -> None:
    """Run tests one after another."""
    folder = Path(sys.argv[1])
    # Read by PyTorch's module: tests for gloo's features. "mpi" lets small worlds run the tests of groups.
    os.environ["BACKEND"] = GLOO
    os.environ["TEMP_DIR"] = str(folder)
    for name in ("barrier", "test_dir"):
        (folder / name).mkdir(exist_ok=True)

    importlib.import_module("fugaku_megatron.torch_backend")  # sets WORLD_SIZE and RANK
    import torch.distributed as dist
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test

    os.environ["BACKEND"] = "mpi"
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = translated(module.init_process_group)
        module.new_group = translated(module.new_group)

    class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        """PyTorch's tests without its processes."""

    names = sys.argv[2:] or sorted(name for name in dir(Cases) if name.startswith("test_"))
    for number, name in enumerate(names):
        if name in SKIPPED:
            continue
        distributed_test.BACKEND = OURS if name == "test_get_backend" else GLOO
        # Ranks call PyTorch's barrier of files more or less often in a test.
        distributed_test.Barrier.barrier_id = 1000 * number
        cases = Cases(name)
        cases.rank = int(os.environ["RANK"])
        cases.file_name = str(folder / name)
        dist.init_process_group(
            GLOO,
            init_method=f"file://{cases.file_name}",
            world_size=int(os.environ["WORLD_SIZE"]),
            rank=cases.rank,
            timeout=TIMEOUT,
        )
        cases._barrier(timeout=TIMEOUT.total_seconds())
        common_utils.set_rng_seed()
        os.write(1, f"{run(cases, name)} {name}\n".encode())  # one write: no other rank splits it
        cases._barrier(timeout=TIMEOUT.total_seconds())
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
