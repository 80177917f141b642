"""Checks before a run allocates anything: files, flags and ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ..checkpoint.save import check_replaces, check_writable
from ..cli.output_files import check_file
from ..comm.agreement import Nodes, agree, differing, everywhere, on_root
from ..comm.base import Comm
from ..config import batches
from ..config.fields import BY_STAGE, FieldValues, check, flag
from ..config.run_config import RunConfig, all_flags
from ..costs.plan import Plan
from ..data.chat.chat_files import check_mask_file
from ..data.data_flags import listed_data, parse_data_path
from ..data.indexed import check_files
from ..data.token_files import is_token_file, read_header
from ..host import kernels
from ..observe.export.history import HISTORY, read_run_history
from ..observe.profile.profile import profiled_ranks
from .checkpoint_source import Resume
from .hf_export import check_exportable


def check_same_run(run: RunConfig, world: Comm) -> list[str]:
    """Return the log's lines about flags that differ between ranks. Collective.

    Raise ValueError, with flag, values and ranks, if a flag must not differ.
    """
    shared = {flag(each.name): run.values[each.name] for each in all_flags() if not each.differs}
    text = differing(world, shared)
    recompute = {
        flag(each.name): run.values[each.name] for each in all_flags() if each.differs == BY_STAGE
    }
    among = differing(world, recompute)
    tp = run.tp
    if text is None and among is not None and world.size % tp == 0:
        # Tensor-parallel ranks, which follow each other, recompute together.
        inside = world.split(world.rank // tp, world.rank)
        problem = differing(inside, recompute)
        remedy = f"{problem} of the tensor-parallel group that begins with rank {world.rank // tp * tp}: pass these ranks the same"
        agree(world, lambda: check(problem is None, remedy), name_rank=False)
    with everywhere():
        check(
            text is None,
            f"{text}: pass every rank the same command line, apart from what may differ between pipeline stages "
            "(recompute) and between nodes (places of their own, threads)",
        )
    return [] if among is None else [f"ranks recompute differently: {among}"]


def check_early(run: RunConfig, world_size: int) -> Plan:
    """Check the flags alone and return the plan. The same ValueError on every rank."""
    check(
        run.data.mock_data or run.data.files is not None,
        "the run has no data: pass --data-path, a prefix that fugaku-megatron "
        "preprocess wrote, or --mock-data",
    )
    batches.length(run.training, batches.RampUp(1, 1, 0, 1))
    ranks = run.output.profile_ranks
    check(
        not run.output.profile or max(ranks) < world_size,
        f"--profile-ranks {' '.join(map(str, ranks))}: the run has ranks 0 to "
        f"{world_size - 1}: pass some of these",
    )
    chunk = run.system.fp16_accumulation_chunk
    check(
        chunk is None or kernels.has_fp16_arithmetic(),
        f"--fp16-accumulation-chunk {chunk} needs FP16 arithmetic, which "
        f"instruction set {kernels.active()} lacks: leave it out, or set FUGAKU_MEGATRON_TARGET=portable for a slow emulation",
    )
    check(
        not run.system.splits_fp32 or kernels.has_bf16_arithmetic(),
        "--fp32-matmul bf16x3 needs BF16 arithmetic, which "
        f"instruction set {kernels.active()} lacks: leave it out",
    )
    plan = Plan.of(run, world_size)
    _ = plan.param_schedule  # raises for a schedule that does not fit the run
    return plan


def with_listed_data(run: RunConfig, world: Comm) -> RunConfig:
    """Return the run with the data that --data-args-path or --per-split-data-args-path lists. Collective: one rank reads."""
    files = (run.data.data_args_path, run.data.per_split_data_args_path)
    if not any(files):
        return run
    listed = on_root(world, lambda: listed_data(*files))
    changes: FieldValues = {"data_args_path": None, "per_split_data_args_path": None, **listed}
    return replace(run, data=replace(run.data, **changes))


def check_data(run: RunConfig, arrays: Collection[str] = ()) -> None:
    """Raise ValueError for missing data files; one rank looks."""
    for name, path in run.data.paths.items():
        for prefix in parse_data_path(path, name)[0]:
            if prefix in arrays:
                continue
            if is_token_file(prefix) and not run.data.sft:
                read_header(prefix)
                continue
            check_files(prefix)
            if run.data.sft:
                check_mask_file(prefix)


def check_run(run: RunConfig, world: Comm, arrays: Collection[str] = ()) -> tuple[Plan, list[str]]:
    """Make all checks that need neither a model nor a checkpoint. Collective.

    Return the plan with its listed data, and the log's lines, or raise ValueError.
    """
    with everywhere():
        plan = check_early(run, world.size)
    plan = replace(plan, config=with_listed_data(run, world))
    lines = check_same_run(plan.config, world)
    on_root(world, lambda: check_data(plan.config, arrays))
    return plan, lines


def check_outputs(plan: Plan, resume: Resume, world: Comm, nodes: Nodes) -> None:
    """Raise ValueError for an output that is not writable or would replace checkpoints. Collective."""
    output = plan.config.output
    writers = (world.rank,) if nodes.leads else ()
    if output.save:
        check_replaces(output.save, output.load, resume.iteration, world)
        check_writable(output.save, world, ranks=writers)
        history = Path(output.save) / HISTORY
        on_root(world, lambda: read_run_history(history))
    if output.save and output.save_hf_interval:
        on_root(world, lambda: check_exportable(plan.config.model))
    if output.save and output.save_local:
        check_writable(output.save_local, world, "--save-local", writers)
    if output.tensorboard_dir:
        check_writable(output.tensorboard_dir, world, "--tensorboard-dir", (0,))
    on_root(world, lambda: check_file("--log-file", output.log_file))
    on_root(world, lambda: check_file("--log-ranks", output.log_ranks))
    if output.profile:
        ranks = profiled_ranks(output, plan.layout)
        check_writable(output.profile_dir, world, "--profile-dir", ranks)
