"""Parallel layout: world-size factors, pipeline stages and model chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ..pipeline.placement import evenly
from .batches import sizes_of
from .fields import check, flag
from .parallel import A2A
from .run_config import RunConfig


def check_world_size(world_size: int, tp: int, pp: int, cp: int = 1) -> None:
    """Raise ValueError unless TP x PP x CP divides the number of ranks."""
    check(tp >= 1, f"--tensor-model-parallel-size is {tp}: pass a number above 0")
    check(pp >= 1, f"--pipeline-model-parallel-size is {pp}: pass a number above 0")
    each = tp * pp * cp
    below = world_size // each * each
    ranks = f"{below} or {below + each}" if below else f"{each}"
    check(
        world_size >= 1 and world_size == below,
        f"world size {world_size} is not divisible by {flags_of_sizes(tp, pp, cp)} "
        f"= {each}: start {ranks} ranks, or change the sizes",
    )


def flags_of_sizes(tp: int, pp: int, cp: int) -> str:
    text = f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}"
    return f"{text} x --context-parallel-size {cp}" if cp > 1 else text


@dataclass(frozen=True)
class Layout:
    """World size and its factors. `Layout.from_run` checks everything that depends on the world
    size.

    dp: ranks with different samples; ep: ranks with different experts; etp: ranks that share each
        expert, None: tp; cp: ranks that share each sequence
    """

    world_size: int
    tp: int
    pp: int
    dp: int
    ep: int = 1
    etp: int | None = None
    cp: int = 1

    @cached_property
    def sizes(self) -> tuple[int, int, int, int, int | None, int]:
        return self.world_size, self.tp, self.pp, self.ep, self.etp, self.cp

    def __str__(self) -> str:
        text = f"DP {self.dp} x TP {self.tp} x PP {self.pp}"
        return f"{text} x CP {self.cp}" if self.cp > 1 else text

    @cached_property
    def words(self) -> str:
        context = f"context parallel {self.cp}, " if self.cp > 1 else ""
        return f"data parallel {self.dp}, pipeline parallel {self.pp}, {context}tensor parallel {self.tp}"

    @cached_property
    def replicas(self) -> int:
        """Ranks with the same weights, dp x cp: gradients are reduced, and ZeRO-1 states sharded,
        over them.
        """
        return self.dp * self.cp

    @cached_property
    def edp(self) -> int:
        """Ranks per stage with the same expert shard."""
        return self.replicas * self.tp // (self.ep * (self.etp or self.tp))

    @staticmethod
    def from_run(run: RunConfig, world_size: int) -> Layout:
        """Build the layout. Raises ValueError with flag and remedy if the run does not
        fit on the ranks.
        """
        model = run.model
        tp = run.tp
        pp = run.pp
        cp = run.cp
        check_world_size(world_size, tp, pp, cp)
        divided = {
            "num-attention-heads": model.num_attention_heads,
            "ffn-hidden-size": model.ffn_hidden_size,
        }
        if model.num_experts:
            width = model.expert_width
            etp = run.parallel.expert_tensor_parallel_size
            if etp is None:
                divided["moe-ffn-hidden-size"] = width
            check(
                width % (etp or 1) == 0,
                f"--moe-ffn-hidden-size {width} is not divisible by --expert-tensor-parallel-size {etp}: "
                "change one of them",
            )
            shared = model.shared_expert_width
            divided["moe-shared-expert-intermediate-size"] = shared
        if model.group_query_attention:
            divided["num-query-groups"] = model.query_groups
        if model.has_delta_nets:
            divided["linear-num-key-heads"] = model.linear_num_key_heads
        for name, value in divided.items():
            check(
                value % tp == 0,
                f"--{name} {value} is not divisible by --tensor-model-parallel-size {tp}: change one of them",
            )
        shards = tp if run.parallel.sequence_parallel else 1  # of the sequence, between matmuls
        _check_context(run, cp, tp, shards)
        check(
            model.seq_length % shards == 0,
            f"--seq-length {model.seq_length} is not divisible by "
            f"--tensor-model-parallel-size {tp}, into which --sequence-parallel cuts it: change one, or leave the flag out",
        )
        check_split(run)
        dp = world_size // (tp * pp * cp)
        layout = Layout(world_size, tp, pp, dp, *_expert_sizes(run, dp * cp), cp)
        for size in sizes_of(run, layout.global_batch_size(run)).sizes():
            layout.microbatches(run, size)
        batch = layout.eval_batch_size(run)
        if micro := run.training.eval_micro_batch_size:
            check(
                batch % (micro * dp) == 0,
                f"the batch of an evaluation, {batch} samples, is not divisible by --eval-micro-batch-size {micro} x "
                f"data-parallel size {dp} = {micro * dp}: change it, or --eval-global-batch-size",
            )
        layout.microbatches(evaluation_run(run), batch)
        return layout

    def global_batch_size(self, run: RunConfig) -> int:
        return run.batch.global_batch_size or run.batch.micro_batch_size * self.dp

    def eval_batch_size(self, run: RunConfig) -> int:
        return run.training.eval_global_batch_size or self.global_batch_size(run)

    def evaluated(self, run: RunConfig, sizes: Sequence[int], number: int) -> list[tuple[int, int]]:
        """Return (first sample, batches) for each validation set in evaluation `number`, from 0.

        With --full-validation each evaluation uses all samples, otherwise different ones. Raises
        ValueError for a set smaller than a batch.

        sizes: samples per set
        """
        size = self.eval_batch_size(run)
        iters = run.training.eval_iters
        if not run.training.full_validation:
            return [(number * iters * size, iters)]
        for index, samples in enumerate(sizes):
            check(
                samples >= size,
                f"--full-validation: validation set {index} has {samples} samples, and a batch of an evaluation "
                f"has {size}: pass a smaller --eval-global-batch-size, or more data",
            )
        return [(end - samples, samples // size) for end, samples in zip(accumulate(sizes), sizes)]

    def microbatches(self, run: RunConfig, global_batch_size: int | None = None) -> int:
        """Return the micro-batches per rank, by default of the full batch. Raises ValueError unless divisible."""
        global_batch_size = global_batch_size or self.global_batch_size(run)
        each = run.batch.micro_batch_size * self.dp
        if global_batch_size % each == 0:
            return global_batch_size // each
        below = max(1, global_batch_size // each) * each
        name = f"--global-batch-size {global_batch_size}"
        remedy = f"use {below} or {below + each}"
        if global_batch_size == run.training.eval_global_batch_size:
            name = f"--eval-global-batch-size {global_batch_size}"
        elif run.batch.step_batch_size_schedule:
            name = f"--step-batch-size-schedule {run.batch.step_batch_size_schedule!r}: its batch size {global_batch_size}"
            remedy = f"pass multiples of {each}"
        elif global_batch_size != self.global_batch_size(run):
            ramp = " ".join(map(str, run.batch.rampup_batch_size or ()))
            name = f"--rampup-batch-size {ramp}: its batch size {global_batch_size}"
            remedy = f"pass a start and an increment that are multiples of {each}"
        raise ValueError(
            f"{name} is not divisible by --micro-batch-size {run.batch.micro_batch_size} x "
            f"data-parallel size {self.dp} = {each}: {remedy}"
        )


def _check_context(run: RunConfig, cp: int, tp: int, shards: int) -> None:
    if cp == 1:
        return
    model = run.model
    ranks = f"--context-parallel-size {cp}"
    if shards > 1:
        ranks += f" x --tensor-model-parallel-size {tp}"
    blocks = 2 * cp * shards
    check(
        model.seq_length % blocks == 0,
        f"--seq-length {model.seq_length} is not divisible by {blocks}, two parts for each of {ranks}: change one",
    )
    given = run.parallel.cp_comm_type or ()
    check(
        len(given) in (0, 1, model.num_layers),
        f"--cp-comm-type has {len(given)} values: pass one, or one for each of "
        f"--num-layers {model.num_layers}",
    )
    if A2A in run.cp_comm_types:
        _check_heads(run, cp, tp)
    check(
        not model.has_delta_nets or model.linear_num_key_heads % (tp * cp) == 0,
        f"--linear-num-key-heads {model.linear_num_key_heads} is not divisible by --tensor-model-parallel-size {tp} x "
        f"--context-parallel-size {cp}, whose ranks exchange heads of gated delta nets: change one of them",
    )


def _check_heads(run: RunConfig, cp: int, tp: int) -> None:
    model = run.model
    name = f"--context-parallel-size {cp}"
    heads = model.num_attention_heads
    groups = model.query_groups // tp
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
    """Return how many context-parallel ranks share a key and value. groups: per tensor-parallel
    rank
    """
    return max(1, cp // groups)


def _expert_sizes(run: RunConfig, dp: int) -> tuple[int, int | None]:
    """Return (ep, etp). Raises ValueError if experts or ranks are not divisible."""
    parallel = run.parallel
    if not parallel.divides_experts:
        return 1, None
    experts = run.model.num_experts
    tp = parallel.tensor_model_parallel_size
    ep = parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size
    cp = parallel.context_parallel_size
    flags = f"--expert-model-parallel-size {ep}"
    if etp is not None:
        flags += f" x --expert-tensor-parallel-size {etp}"
    check(
        (experts or 0) % ep == 0,
        f"--num-experts {experts} is not divisible by --expert-model-parallel-size {ep}: change one",
    )
    ranks = ep * (etp or tp)
    shared = f" x --context-parallel-size {cp}" if cp > 1 else ""
    check(
        dp * tp % ranks == 0,
        f"{flags} is {ranks} ranks for all experts, which do not divide data-parallel size "
        f"{dp // cp}{shared} x tensor-parallel size {tp} = {dp * tp} ranks of a stage: change one, or start more ranks",
    )
    return ep, etp


def evaluation_run(run: RunConfig) -> RunConfig:
    size = run.training.eval_micro_batch_size
    if not size:
        return run
    return replace(run, batch=replace(run.batch, micro_batch_size=size))


def check_split(run: RunConfig) -> None:
    """Raise ValueError unless the layer count fits stages, model chunks and recomputed layers."""
    parallel = run.parallel
    layers = run.model.num_layers
    parts = run.placement.virtual_stages
    pp = parallel.pipeline_model_parallel_size
    split = parallel.pipeline_split
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    per_stage = parts // pp
    each = f"--pipeline-model-parallel-size {pp}"
    if per_stage > 1:
        each += f" x {per_stage} chunks of --pipeline-schedule {parallel.schedule}"
    sizes = stage_sizes(run)
    check(
        layers >= parts or sizes is not None,
        f"--num-layers {layers} is below {each}: each needs a layer, change one",
    )
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
    recomputed = run.training.recompute_part_layers
    check(
        recomputed is None or len(recomputed) == parts,
        f"--recompute-part-layers has {len(recomputed or ())} numbers and {each} makes {parts} "
        f"parts: pass {parts} numbers",
    )
    if sizes is None:
        return
    check(
        not parallel.ends_in_split or sum(sizes) == layers,
        f"--num-layers {layers} and {parallel.ends_in_split}, each a layer more, are not divisible by {each}: change one",
    )
    flags = f"--pipeline-split {split}"
    if split in ("even", "balanced"):
        given = {name: value for name, value in _ends(run).items() if value is not None}
        flags = " and ".join(f"{flag(name)} {value}" for name, value in given.items())
    numbers = str(pp) if parts == pp else f"{pp} or {parts}"
    check(
        len(sizes) in (pp, parts) and sum(sizes) == layers,
        f"{flags} has {len(sizes)} stages and {sum(sizes)} "
        f"layers, --pipeline-model-parallel-size is {pp} and --num-layers {layers}: pass {numbers} numbers that sum to {layers}",
    )
    check(
        len(sizes) == parts or min(sizes) >= per_stage,
        f"{flags} leaves a stage {min(sizes)} layers of --num-layers {layers}, and a stage has "
        f"{per_stage} parts with a layer or more each: change one",
    )


def _ends(run: RunConfig) -> dict[str, int | None]:
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    return {name: getattr(run.parallel, name) for name in names}


def stage_sizes(run: RunConfig) -> tuple[int, ...] | None:
    """Return each stage's layers, or each virtual stage's in model order, if flags set them, or None."""
    split = run.parallel.pipeline_split
    if split not in ("even", "balanced"):
        return tuple(map(int, split.split(",")))
    if run.parallel.ends_in_split:
        return _even_with_ends(run)
    first = run.parallel.decoder_first_pipeline_num_layers
    last = run.parallel.decoder_last_pipeline_num_layers
    if first is None and last is None:
        return None
    before = () if first is None else (first,)
    after = () if last is None else (last,)
    stages = run.pp - len(before) - len(after)
    layers = run.model.num_layers - sum(before) - sum(after)
    between = evenly(layers, stages) if stages else ()
    return (*before, *between, *after)


def _even_with_ends(run: RunConfig) -> tuple[int, ...]:
    """Return equal numbers of layers for each virtual stage, of which the embedding and the loss are one if a flag says so."""
    embedding = int(run.parallel.account_for_embedding_in_pipeline_split)
    loss = int(run.parallel.account_for_loss_in_pipeline_split)
    stages = run.placement.virtual_stages
    sizes = [(run.model.num_layers + embedding + loss) // stages for _ in range(stages)]
    sizes[0] -= embedding
    sizes[-1] -= loss
    return tuple(sizes)
