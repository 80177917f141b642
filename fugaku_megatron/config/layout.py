"""World size, its factors, and the stages and chunks into which a run cuts the model. Pure integers, no torch.

Left out: where costs decide the cut (`accounting.virtual_stage_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from ..pipeline.cuts import evenly
from ..pipeline.placement import Placement, placement_of
from ..pipeline.schedule_names import ZBV
from .batches import sizes_of
from .fields import check, flag
from .parallel import A2A, EITHER, P2P
from .run_config import RunConfig


def check_world_size(world_size: int, tp: int, pp: int, cp: int = 1) -> None:
    """Raises ValueError when tensor-, pipeline- and context-parallel sizes do not divide the number of ranks."""
    for name, size in (("tensor", tp), ("pipeline", pp)):
        check(size >= 1, f"--{name}-model-parallel-size is {size}: pass a number above 0")
    each = tp * pp * cp
    below = world_size // each * each
    ranks = f"{below} or {below + each}" if below else f"{each}"
    check(
        world_size >= 1 and world_size == below,
        f"world size {world_size} is not divisible by {flags_of_sizes(tp, pp, cp)} "
        f"= {each}: start {ranks} ranks, or change the sizes",
    )


def flags_of_sizes(tp: int, pp: int, cp: int) -> str:
    """The flags whose product divides the number of ranks."""
    return (
        f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}"
        + f" x --context-parallel-size {cp}" * (cp > 1)
    )


@dataclass(frozen=True)
class Layout:
    """World size and its factors; `Layout.from_run` checks everything that depends on the world size.

    dp: ranks with different samples. ep, etp: ranks that have different experts, and that share each of them; etp None: tp.
    cp: ranks that share each sequence.
    """

    world_size: int
    tp: int
    pp: int
    dp: int
    ep: int = 1
    etp: int | None = None
    cp: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int, int | None, int]:
        """What `comm.grid.Grid` is built with."""
        return self.world_size, self.tp, self.pp, self.ep, self.etp, self.cp

    def __str__(self) -> str:
        return f"DP {self.dp} x TP {self.tp} x PP {self.pp}" + f" x CP {self.cp}" * (self.cp > 1)

    @property
    def words(self) -> str:
        """The sizes in a sentence."""
        context = f"context parallel {self.cp}, " * (self.cp > 1)
        return f"data parallel {self.dp}, pipeline parallel {self.pp}, {context}tensor parallel {self.tp}"

    @property
    def replicas(self) -> int:
        """Ranks that have the same weights, over which gradients are summed and ZeRO-1 cuts the optimizer state: dp x cp."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Ranks of a stage that hold the same part of the same experts."""
        return self.replicas * self.tp // (self.ep * (self.etp or self.tp))

    @staticmethod
    def from_run(run: RunConfig, world_size: int) -> Layout:
        """Raises ValueError, one line with the flag and the remedy, for a run that does not fit on `world_size` ranks."""
        tp, pp = run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size
        model, cp = run.model, run.parallel.context_parallel_size
        check_world_size(world_size, tp, pp, cp)
        check(
            tp == 1 or not model.qk_layernorm_all_heads,
            f"--qk-layernorm-all-heads needs whole heads on a rank, and "
            f"--tensor-model-parallel-size is {tp}: pass 1",
        )
        divided = {
            "num-attention-heads": model.num_attention_heads,
            "ffn-hidden-size": model.ffn_hidden_size,
        }
        if model.num_experts:
            width = (
                model.moe_ffn_hidden_size if run.parallel.expert_tensor_parallel_size != 1 else 0
            )
            divided |= {
                "moe-ffn-hidden-size": width or 0,
                "moe-shared-expert-intermediate-size": model.moe_shared_expert_intermediate_size
                or 0,
            }
        if model.group_query_attention:
            divided["num-query-groups"] = model.query_groups
        for name, value in divided.items():
            check(
                value % tp == 0,
                f"--{name} {value} is not divisible by --tensor-model-parallel-size {tp}: change one of them",
            )
        _check_context(run, cp, tp)
        check(
            model.seq_length % sequence_parts(run, tp) == 0,
            f"--seq-length {model.seq_length} is not divisible by "
            f"--tensor-model-parallel-size {tp}, into which --sequence-parallel cuts it: change one, or leave the flag out",
        )
        check_split(run)
        dp = world_size // (tp * pp * cp)
        layout = Layout(world_size, tp, pp, dp, *_expert_sizes(run, dp * cp), cp)
        for size in sizes_of(run, layout.global_batch_size(run)).sizes():
            layout.microbatches(run, size)
        micro, batch = run.training.eval_micro_batch_size, layout.eval_batch_size(run)
        check(
            micro is None or batch % (micro * layout.dp) == 0,
            f"the batch of an evaluation, {batch} samples, is not divisible "
            f"by --eval-micro-batch-size {micro} x data-parallel size {layout.dp} = {(micro or 0) * layout.dp}: change it, or "
            "--eval-global-batch-size",
        )
        layout.microbatches(evaluation_run(run), batch)
        return layout

    def global_batch_size(self, run: RunConfig) -> int:
        """--global-batch-size, or one micro-batch per data-parallel rank."""
        return run.batch.global_batch_size or run.batch.micro_batch_size * self.dp

    def eval_batch_size(self, run: RunConfig) -> int:
        """--eval-global-batch-size, or the global batch size."""
        return run.training.eval_global_batch_size or self.global_batch_size(run)

    def evaluated(self, run: RunConfig, sizes: Sequence[int], number: int) -> list[tuple[int, int]]:
        """(first sample, batches) of each validation set in the evaluation of this number, from 0; `sizes`: samples of the sets.

        With --full-validation each evaluation has all samples, where the sets follow each other; otherwise it has its own ones.
        Raises ValueError for a set that does not fill a batch.
        """
        size, iters = self.eval_batch_size(run), run.training.eval_iters
        if not run.training.full_validation:
            return [(number * iters * size, iters)]
        for index, samples in enumerate(sizes):
            check(
                samples >= size,
                f"--full-validation: validation set {index} has {samples} samples, and a batch of an evaluation "
                f"has {size}: pass a smaller --eval-global-batch-size, or more data",
            )
        return [(end - samples, samples // size) for end, samples in zip(accumulate(sizes), sizes)]

    def microbatches(self, run: RunConfig, global_batch_size: int) -> int:
        """Micro-batches per rank and iteration; ValueError when the batch does not divide."""
        each = run.batch.micro_batch_size * self.dp
        below = max(1, global_batch_size // each) * each
        name, remedy = f"--global-batch-size {global_batch_size}", f"use {below} or {below + each}"
        if global_batch_size == run.training.eval_global_batch_size:
            name = f"--eval-global-batch-size {global_batch_size}"
        elif run.batch.step_batch_size_schedule:
            name = f"--step-batch-size-schedule {run.batch.step_batch_size_schedule!r}: its batch size {global_batch_size}"
            remedy = f"pass multiples of {each}"
        elif global_batch_size != self.global_batch_size(run):
            ramp = " ".join(map(str, run.batch.rampup_batch_size or ()))
            name = f"--rampup-batch-size {ramp}: its batch size {global_batch_size}"
            remedy = f"pass a start and an increment that are multiples of {each}"
        check(
            global_batch_size % each == 0,
            f"{name} is not divisible by --micro-batch-size {run.batch.micro_batch_size} x "
            f"data-parallel size {self.dp} = {each}: {remedy}",
        )
        return global_batch_size // each


def _check_context(run: RunConfig, cp: int, tp: int) -> None:
    """Raises ValueError where the ranks of a sequence cannot share it."""
    model, name = run.model, f"--context-parallel-size {cp}"
    if cp == 1:
        return
    parts = 2 * cp * sequence_parts(run, tp)
    check(
        model.seq_length % parts == 0,
        f"--seq-length {model.seq_length} is not divisible by {parts}, two parts for each of "
        f"{name}"
        + f" x --tensor-model-parallel-size {tp}" * (sequence_parts(run, tp) > 1)
        + ": change one",
    )
    given = run.parallel.cp_comm_type or ()
    check(
        len(given) in (0, 1, model.num_layers),
        f"--cp-comm-type has {len(given)} values: pass one, or one for each of "
        f"--num-layers {model.num_layers}",
    )
    if A2A in context_ways(run):
        _check_heads(run, cp, tp)


def context_ways(run: RunConfig) -> tuple[str, ...]:
    """What ranks of a sequence send each other for attention, of each layer."""
    model, parallel = run.model, run.parallel
    cp, groups = (
        parallel.context_parallel_size,
        model.query_groups // parallel.tensor_model_parallel_size,
    )
    whole = (
        model.num_attention_heads % (parallel.tensor_model_parallel_size * cp) == 0
        and not model.qk_layernorm_all_heads
    )
    chosen = A2A if whole and (groups % cp == 0 or cp % max(1, groups) == 0) else P2P
    given = parallel.cp_comm_type or (EITHER,)
    ways = tuple(chosen if way == EITHER else way for way in given)
    return ways * model.num_layers if len(ways) == 1 else ways


def _check_heads(run: RunConfig, cp: int, tp: int) -> None:
    """Raises ValueError where the ranks of a sequence cannot exchange heads."""
    model, name = run.model, f"--context-parallel-size {cp}"
    heads, groups = model.num_attention_heads, model.query_groups // tp
    remedy = "change one, or pass --cp-comm-type p2p"
    check(
        not model.qk_layernorm_all_heads,
        f"{name} with --cp-comm-type {A2A} leaves a rank some of the heads, and "
        "--qk-layernorm-all-heads needs all of them: pass --cp-comm-type p2p",
    )
    check(
        heads % (tp * cp) == 0,
        f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {tp} x {name}, "
        f"whose ranks exchange heads for attention (--cp-comm-type {A2A}): {remedy}",
    )
    check(
        groups % cp == 0 or cp % groups == 0,
        f"--num-query-groups {model.query_groups} and --tensor-model-parallel-size {tp} "
        f"leave {groups} groups to {name}, and neither number divides the other (--cp-comm-type {A2A}): {remedy}",
    )


def group_copies(groups: int, cp: int) -> int:
    """Ranks of a sequence that have the same key and value for attention. groups: of a tensor-parallel rank."""
    return max(1, cp // groups)


def _expert_sizes(run: RunConfig, dp: int) -> tuple[int, int | None]:
    """(ep, etp) of a layout with dp ranks that have the same weights. Raises ValueError where experts or ranks do not divide."""
    parallel, experts = run.parallel, run.model.num_experts
    tp, ep, etp = (
        parallel.tensor_model_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
    )
    if not parallel.divides_experts:
        return 1, None
    flags = f"--expert-model-parallel-size {ep}" + f" x --expert-tensor-parallel-size {etp}" * (
        etp is not None
    )
    check(
        (experts or 0) % ep == 0,
        f"--num-experts {experts} is not divisible by --expert-model-parallel-size {ep}: change one",
    )
    cp, together = parallel.context_parallel_size, ep * (etp or tp)
    shared = f" x --context-parallel-size {cp}" * (cp > 1)
    check(
        dp * tp % together == 0,
        f"{flags} is {together} ranks for all experts, which do not divide data-parallel size "
        f"{dp // cp}{shared} x tensor-parallel size {tp} = {dp * tp} ranks of a stage: change one, or start more ranks",
    )
    return ep, etp


def evaluation_run(run: RunConfig) -> RunConfig:
    """The run as its evaluations see it, with --eval-micro-batch-size in place of --micro-batch-size."""
    size = run.training.eval_micro_batch_size
    return replace(run, batch=replace(run.batch, micro_batch_size=size)) if size else run


def chunks(run: RunConfig) -> int:
    """Chunks of layers, which are parts of the model, on each pipeline stage."""
    parallel = run.parallel
    if per_chunk := parallel.num_layers_per_virtual_pipeline_stage:
        return max(1, run.model.num_layers // (per_chunk * parallel.pipeline_model_parallel_size))
    return parallel.num_virtual_stages_per_pipeline_rank or (2 if parallel.schedule == ZBV else 1)


@lru_cache(maxsize=1024)  # everything asks for it
def placement(run: RunConfig) -> Placement:
    """Which part of the model is on which stage."""
    return placement_of(
        run.parallel.schedule, run.parallel.pipeline_model_parallel_size, chunks(run)
    )


def check_split(run: RunConfig) -> None:
    """Raises ValueError when the layers cannot be cut into the parts that the flags ask for."""
    layers, parallel, parts = run.model.num_layers, run.parallel, placement(run).virtual_stages
    pp, split = parallel.pipeline_model_parallel_size, parallel.pipeline_split
    per_chunk, per_stage = parallel.num_layers_per_virtual_pipeline_stage, parts // pp
    chunked = (
        f" x {per_stage} chunks of --pipeline-schedule {parallel.schedule}" if per_stage > 1 else ""
    )
    each = f"--pipeline-model-parallel-size {pp}{chunked}"
    check(layers >= parts, f"--num-layers {layers} is below {each}: each needs a layer, change one")
    check(
        per_chunk is None or layers % (pp * per_chunk) == 0,
        f"--num-layers {layers} is not divisible by "
        f"--pipeline-model-parallel-size {pp} x --num-layers-per-virtual-pipeline-stage {per_chunk}: change one of them, or pass "
        "--num-virtual-stages-per-pipeline-rank, whose chunks may differ",
    )
    check(
        split != "even" or layers % parts == 0,
        f"--num-layers {layers} is not divisible by {each}: "
        "change one of them, or pass --pipeline-split balanced",
    )
    again = run.training.recompute_part_layers
    check(
        again is None or len(again) == parts,
        f"--recompute-part-layers has {len(again or ())} numbers and {each} makes {parts} "
        f"parts: pass {parts} numbers",
    )
    if (sizes := stage_sizes(run)) is None:
        return
    flags = (
        f"--pipeline-split {split}"
        if split not in ("even", "balanced")
        else " and ".join(
            f"{flag(name)} {value}" for name, value in _ends(run).items() if value is not None
        )
    )
    check(
        (len(sizes), sum(sizes)) == (pp, layers),
        f"{flags} has {len(sizes)} stages and {sum(sizes)} "
        f"layers, --pipeline-model-parallel-size is {pp} and --num-layers {layers}: pass {pp} numbers that sum to {layers}",
    )
    check(
        min(sizes) >= per_stage,
        f"{flags} leaves a stage {min(sizes)} layers of --num-layers {layers}, and a stage has "
        f"{per_stage} parts with a layer or more each: change one",
    )


def _ends(run: RunConfig) -> dict[str, int | None]:
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    return {name: getattr(run.parallel, name) for name in names}


def stage_sizes(run: RunConfig) -> tuple[int, ...] | None:
    """Layers of each stage where the flags set them; None where costs or equal numbers decide."""
    split, pp, layers = (
        run.parallel.pipeline_split,
        run.parallel.pipeline_model_parallel_size,
        run.model.num_layers,
    )
    if split not in ("even", "balanced"):
        return tuple(map(int, split.split(",")))
    first, last = _ends(run).values()
    given = [n for n in (first, last) if n is not None]
    if not given:
        return None
    others = pp - len(given)
    between = evenly(layers - sum(given), others) if others else ()
    return (*([first] if first else []), *between, *([last] if last else []))


def sequence_parts(run: RunConfig, tp: int) -> int:
    """Parts into which tensor-parallel ranks cut a rank's sequence between their matmuls: t with --sequence-parallel, or 1."""
    return tp if run.parallel.sequence_parallel else 1
