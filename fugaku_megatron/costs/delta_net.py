"""Operations, matrices and bytes of gated delta nets.

Legend: h hidden, c tokens of a chunk, n value heads, k and v sizes of key and value heads.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config.layer_kinds import GATED_DELTA_NET, IN_PROJ, OUT_PROJ, LayerKind
from ..config.model import ModelConfig
from ..config.run_config import RunConfig
from ..config.training import CORE_ATTN
from .mixers import Elementwise, MixerCosts, Segments, Shapes
from .optimizer_states import shared_segments
from .records import Collective, Collectives, Record, Records
from .sizes import FP32_BYTES

CHUNK = 64  # tokens that a few matmuls compute together
SEGMENT = 256  # tokens between two saved states
# Share of the FP32 peak in forward and backward (docs/performance.md, kernels of a gated delta net).
FP32_SHARE = 0.42


def _mixed_bytes(run: RunConfig) -> tuple[int, int, int]:
    """Return the bytes that the convolution, the delta rule and the norm save."""
    model = run.model
    rows = run.tokens_per_microbatch
    low = run.element_bytes
    heads = model.linear_num_value_heads // run.tp
    convolved = rows * model.delta_convolved // run.tp * low
    values = rows * model.delta_values // run.tp * low
    saved = (-(-model.seq_length // SEGMENT) + 1) * run.batch.micro_batch_size
    states = saved * _state_bytes(model, run.tp * run.cp)
    gates = rows * heads * (low + 2 * FP32_BYTES)
    return convolved, convolved + states + gates, 2 * values


def _state_bytes(model: ModelConfig, ranks: int) -> int:
    """Return the bytes of one sample's FP32 state. ranks: that share the heads"""
    heads = model.linear_num_value_heads // ranks
    return heads * model.linear_key_head_dim * model.linear_value_head_dim * FP32_BYTES


class DeltaNetCosts(MixerCosts):
    """Costs of a gated delta net with its projections and convolution."""

    def records(self, run: RunConfig, cp_comm_type: str, kind: LayerKind | None) -> Records:
        """Exchange heads among ranks that share a sequence, whatever --cp-comm-type says."""
        model = run.model
        rows = run.tokens_per_microbatch
        width = model.delta_width // run.tp
        values = model.delta_values // run.tp
        heads = model.linear_num_value_heads // run.tp
        k = model.linear_key_head_dim
        v = model.linear_value_head_dim
        convolved, rule, norm = _mixed_bytes(run)
        messages: Collectives = ()
        if run.cp > 1:
            messages = tuple(
                Collective("all_to_all", "cp", rows * each * run.element_bytes)
                for each in (width, values)
            )
        # Of keys with keys and queries with keys, both with the state and the updates, and of the state's update; without
        # the solved triangle.
        flops = rows * heads * (4 * min(CHUNK, model.seq_length) * (k + v) + 6 * k * v)
        return (
            self.projection(run, IN_PROJ, saved_bytes=run.residual_bytes),
            Record(
                name="conv1d",
                parameters=model.delta_convolved // run.tp * model.linear_conv_kernel_dim,
                saved_bytes=convolved,
            ),
            Record(
                name="delta_rule",
                parameters=2 * heads,
                gemm=(CHUNK, v, k),
                gemm_count=-(-flops // (2 * CHUNK * v * k)),
                flops_forward=flops,
                flops_backward=2 * flops,
                mixes=True,
                fp32_share=FP32_SHARE,
                saved_bytes=rule,
                forward=messages,
                backward=messages[::-1],
            ),
            Record(name="gated_norm", parameters=v, replicated=v, of_heads=v, saved_bytes=norm),
            self.projection(run, OUT_PROJ, saved_bytes=rows * values * run.element_bytes),
        )

    def recomputed_bytes(self, run: RunConfig, kind: LayerKind) -> int:
        """Leave out the input projection's output, which is kept."""
        if not run.training.recomputes(CORE_ATTN):
            return 0
        width = run.model.delta_width // run.tp
        return sum(_mixed_bytes(run)) - run.tokens_per_microbatch * width * run.element_bytes

    def shapes(self, model: ModelConfig) -> Shapes:
        return model.mixer_shapes(GATED_DELTA_NET)

    def elementwise(self, run: RunConfig, sizes: Mapping[str, int], kind: LayerKind) -> Elementwise:
        """Return the parts cut out of the projection, the convolution, the order of heads and the norm."""
        convolved = sizes["qkv"] * run.model.delta_convolved / run.model.delta_width
        moved = 6.0 * convolved + 5.0 * sizes["context"]
        allocations = ((sizes["qkv"], 3), (sizes["context"], 1))
        return Elementwise(moved=moved, calls=8, allocations=allocations)

    def cache_bytes(self, run: RunConfig, samples: int, positions: int, kind: LayerKind) -> int:
        model = run.model
        inputs = (model.linear_conv_kernel_dim - 1) * model.delta_convolved // run.tp
        return samples * (_state_bytes(model, run.tp) + inputs * run.element_bytes)

    def vectors(self, run: RunConfig) -> Segments:
        """Return the segments of the convolution, the decays and the norm."""
        model = run.model
        width = model.linear_conv_kernel_dim
        heads = shared_segments(model, model.linear_num_value_heads, run.tp)
        convolution = shared_segments(model, model.delta_convolved, run.tp, inner=width)
        return [convolution, heads, heads, (1, model.linear_value_head_dim)]
