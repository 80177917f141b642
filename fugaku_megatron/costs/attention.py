"""Costs of attention."""

from __future__ import annotations

from collections.abc import Mapping

from ..config.layer_kinds import ATTENTION, PROJ, QKV, LayerKind
from ..config.layout import group_copies
from ..config.model import ModelConfig
from ..config.parallel import A2A, P2P
from ..config.rows import LEARNABLE
from ..config.run_config import RunConfig
from ..config.training import CORE_ATTN
from .context_parallel import attention_messages
from .layers import typical_layer
from .mixers import Elementwise, Matrices, MixerCosts, Segments, Shapes
from .optimizer_states import shared_segments
from .records import Collectives, Record, Records, all_reduce
from .sizes import (
    FP32_BYTES,
    context_bytes,
    qkv_bytes,
    round_up,
)

# Attention kernels (kernels_sve/attention/attention_shape.h): rows of a block, dQ sums per head, and the length from which heads are few.
ATTENTION_BLOCK = 96
QUERY_SUMS = 6
LONG_SEQUENCE = 32768
CAPPED_SCORES = 6  # tensors of scores that torch holds at once in the backward of capped attention
# Backward FLOPs of attention relative to forward: S is recomputed; dP, dQ, dK and dV are new.
ATTENTION_BACKWARD_SHARE = 2.5


class AttentionCosts(MixerCosts):
    """Costs of softmax attention with its projections."""

    def records(self, run: RunConfig, cp_comm_type: str, kind: LayerKind | None) -> Records:
        """Return QKV projection, rotary embedding, attention and output projection."""
        model = run.model
        return (
            self.projection(run, QKV, bias=model.qkv_bias, saved_bytes=run.residual_bytes),
            *_rotary(run, cp_comm_type, kind or typical_layer(model)),
            attention_record(run, cp_comm_type, kind),
            self.projection(run, PROJ, bias=not model.disable_bias_linear),
        )

    def shapes(self, model: ModelConfig) -> Shapes:
        return model.mixer_shapes(ATTENTION)

    def tensors(self, run: RunConfig) -> dict[str, int]:
        rows = run.tokens_per_microbatch * run.element_bytes
        scores = rows * run.model.seq_length * run.model.num_attention_heads // run.tp
        return {**super().tensors(run), "qkv": qkv_bytes(run), "scores": scores}

    def elementwise(self, run: RunConfig, sizes: Mapping[str, int], kind: LayerKind) -> Elementwise:
        """Return rope, which reads and writes qkv once, and the gates of the output."""
        moved = 0.0
        calls = 0
        allocations: tuple[tuple[int, int], ...] = ()
        if run.model.uses_rotary(kind):
            moved += 2.0 * sizes["qkv"]
            calls += 1
            allocations += ((sizes["qkv"], 1),)
        if run.model.attention_output_gate:
            # queries, keys and values without the gates, and the context's product with the gates
            moved += 2.0 * sizes["qkv"] + 5.0 * sizes["context"]
            calls += 2
            allocations += ((sizes["qkv"], 1), (sizes["context"], 2))
        return Elementwise(moved, calls, allocations)

    def recomputed_bytes(self, run: RunConfig, kind: LayerKind) -> int:
        if not run.training.recomputes(CORE_ATTN):
            return 0
        cp_comm_type = run.typical_cp_comm_type
        saved = sum(record.saved_bytes for record in _rotary(run, cp_comm_type, kind))
        if run.cp > 1 and cp_comm_type == A2A:
            saved += context_bytes(run)  # before heads are exchanged for rows
        return saved + _softmax_bytes(run)

    def cache_bytes(self, run: RunConfig, samples: int, positions: int, kind: LayerKind) -> int:
        slots = samples * cache_slots(kind, positions)
        return (
            slots * run.model.query_groups // run.tp * run.model.key_value_size * run.element_bytes
        )

    def matrices(self, run: RunConfig) -> Matrices:
        model = run.model
        queries = model.context_width
        keys = model.query_groups * model.kv_channels
        h = model.hidden_size
        if run.optimizer.muon_no_split_qkv:
            return super().matrices(run)
        return [(model.query_widths, queries, h), (2, keys, h), (1, h, queries)]

    def vectors(self, run: RunConfig) -> Segments:
        """Return the segments of norms of queries and keys, sinks and biases."""
        model = run.model
        found: Segments = []
        if model.qk_layernorm:
            for heads in (model.num_attention_heads, model.query_groups):
                if model.qk_layernorm_all_heads:
                    found.append(shared_segments(model, heads * model.kv_channels, run.tp))
                else:
                    found.append((model.norm.vectors, model.kv_channels))
        if model.qkv_bias:
            found.append(shared_segments(model, model.qkv_width, run.tp))
        return found + output_vectors(run)


def output_vectors(run: RunConfig) -> Segments:
    """Return the segments of sinks and of the output projection's bias."""
    model = run.model
    found: Segments = []
    if model.softmax_type == LEARNABLE:
        found.append(shared_segments(model, model.num_attention_heads, run.tp))
    if not model.disable_bias_linear:
        found.append((1, model.hidden_size))
    return found


def attention_record(run: RunConfig, cp_comm_type: str, kind: LayerKind | None) -> Record:
    """Return attention between its projections, with the messages of context-parallel ranks."""
    model = run.model
    cp = run.cp
    each = document_length(run)
    rows = run.tokens_per_microbatch * (model.num_attention_heads // run.tp)
    # Q K^T and P V over the full square, as Megatron counts it
    flops = 2 * rows * each * model.key_value_size
    side = each  # of the squares that a kernel call computes
    contexts = 1  # the context is also the projection's input, unless ranks exchange heads
    if cp > 1 and cp_comm_type == A2A:
        contexts = 2
    elif cp > 1:
        side = min(each, model.seq_length // (2 * cp))
    if model.attention_output_gate:  # the gates and the gated context
        contexts += 2
    saved = qkv_bytes(run, cp_comm_type) + contexts * context_bytes(run)
    saved += _softmax_bytes(run)
    window = (kind or typical_layer(model)).window
    forward, backward = attention_messages(run, cp_comm_type, window)
    sinks = model.num_attention_heads // run.tp if model.softmax_type == LEARNABLE else 0
    return Record(
        name="attention",
        parameters=sinks,
        gemm=(side, side, model.key_value_size // 2),
        gemm_count=-(-rows * each // side**2),
        flops_forward=flops,
        flops_backward=2 * flops,
        mixes=True,
        visible=visible_share(each, window) if kind else mean_visible_share(model, each),
        dropout=model.attention_dropout > 0,
        saved_bytes=saved,
        forward=forward,
        backward=backward,
    )


def _rotary(run: RunConfig, cp_comm_type: str, kind: LayerKind) -> Records:
    """Return the rotary record; only the query and key norms save their inputs."""
    model = run.model
    if not model.uses_rotary(kind):
        return ()
    if not model.qk_layernorm:
        return (Record(name="rotary"),)
    saved = qkv_bytes(run, cp_comm_type)
    together = model.qk_layernorm_all_heads
    heads = (model.num_attention_heads + model.query_groups) // run.tp
    if not model.norms_in_rotary:
        # queries, keys, and the mean and deviation of each head or of all heads
        statistics = 2 if together else 2 * heads
        saved = run.tokens_per_microbatch * (
            heads * model.kv_channels * run.element_bytes + statistics * FP32_BYTES
        )
    weights = heads * model.kv_channels
    whole = 0
    sums: Collectives = ()
    if together:  # sharded like the heads; ranks sum the squares of queries and keys
        sums = all_reduce(2 * run.tokens_per_microbatch * FP32_BYTES, run.tp)
    else:
        whole = weights = 2 * model.norm.vectors * model.kv_channels
    return (
        Record(
            name="rotary",
            parameters=weights,
            replicated=whole,
            of_heads=whole,
            saved_bytes=saved,
            forward=sums,
            backward=sums,
        ),
    )


def _softmax_bytes(run: RunConfig) -> int:
    """Return the bytes of one FP32 number per row and head."""
    return run.tokens_per_microbatch * run.model.num_attention_heads // run.tp * FP32_BYTES


def cache_slots(kind: LayerKind, positions: int) -> int:
    """Return a layer's cached positions: at most the window, none without an attention."""
    if not kind.has_softmax:
        return 0
    return min(positions, kind.window or positions)


def causal_attention_flops(heads: int, s: int, d: int, window: int | None = None) -> float:
    """Return Q K^T and P V FLOPs over visible pairs. heads: query heads times samples."""
    return 4.0 * heads * d * visible_pairs(s, window)


def visible_pairs(s: int, window: int | None) -> float:
    """Count the visible (query, key) pairs: s^2 / 2 - (s - window)^2 / 2."""
    window = min(window or s, s)
    return window * (2 * s - window) / 2


def visible_share(s: int, window: int | None) -> float:
    return visible_pairs(s, window) / s**2


def document_length(run: RunConfig) -> int:
    """Return the mean document length if documents are masked, or else the sample length."""
    return min(run.data.mean_document_length or run.model.seq_length, run.model.seq_length)


def mean_visible_share(model: ModelConfig, s: int) -> float:
    """Return the mean over the layers with an attention."""
    windows = [kind.window for kind in model.layer_kinds if kind.has_softmax]
    return sum(visible_share(s, window) for window in windows) / max(1, len(windows))


def attention_workspace_bytes(run: RunConfig, threads: int) -> int:
    """Return the FP32 bytes for the attention kernels' packed operands and sums.

    threads: per rank. About 12 matrices (s, d) per head in progress; with a sequence segment's s if ranks exchange keys.
    """
    return max(
        _attention_bytes(run, threads, cp_comm_type) for cp_comm_type in set(run.cp_comm_types)
    )


def _attention_bytes(run: RunConfig, threads: int, cp_comm_type: str) -> int:
    model = run.model
    cp = run.cp
    queries = keys = model.seq_length
    heads = model.num_attention_heads // run.tp
    groups = model.query_groups // run.tp
    if model.attn_logit_softcapping is not None:
        scores = run.tokens_per_microbatch * heads * queries // cp
        return FP32_BYTES * CAPPED_SCORES * scores
    if cp > 1 and cp_comm_type == A2A:
        heads = heads // cp
        groups = groups * group_copies(groups, cp) // cp
    elif cp > 1:
        queries = model.seq_length // (2 * cp)
        if cp_comm_type == P2P:
            keys = queries
    share = heads // groups
    sums = min(round_up(keys, ATTENTION_BLOCK) // ATTENTION_BLOCK, QUERY_SUMS)
    wanted = max(2, min(16, threads))
    if max(queries, keys) > LONG_SEQUENCE:
        wanted = min(wanted, -(-threads // sums))
    groups_at_once = min(-(-wanted // share), groups * run.batch.micro_batch_size)
    heads_at_once = wanted if share > wanted else groups_at_once * share
    query_rows = round_up(queries, ATTENTION_BLOCK)
    key_rows = round_up(keys, ATTENTION_BLOCK)
    # Packed queries and contexts of both kinds, and sums of dQ; packed keys; sums of dK and dV if heads share them.
    per_head = query_rows * (2 * model.key_value_size + sums * model.kv_channels) + 2 * queries
    per_group = key_rows * model.kv_channels
    if share > 1:
        per_head += key_rows * model.key_value_size
        per_group += key_rows * model.key_value_size
    return FP32_BYTES * (heads_at_once * per_head + groups_at_once * per_group)
