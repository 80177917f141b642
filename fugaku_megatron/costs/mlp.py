"""Operations of a dense MLP, and the inner width of any."""

from __future__ import annotations

from ..config.model import ModelConfig
from ..config.rows import ACTIVATIONS
from ..config.run_config import RunConfig
from .records import MatmulCollectives, Record, Records


def mlp_width(model: ModelConfig) -> int:
    """Return a token's elements between the two matmuls, over its experts."""
    if not model.num_experts:
        return model.ffn_hidden_size
    return model.moe_router_topk * (model.moe_ffn_hidden_size or 0) + (
        model.moe_shared_expert_intermediate_size or 0
    )


def mlp_records(run: RunConfig, name: str, width: int, saved_bytes: int = 0) -> Records:
    """Return both matmuls, named `name`_fc1 and `name`_fc2, and the activation.

    width: of all ranks. saved_bytes: of the input.
    """
    model = run.model
    around = MatmulCollectives.from_run(run)
    rows = run.tokens_per_microbatch
    h = model.hidden_size
    f = width // run.tp
    fc1 = model.fc1_widths * f
    biases = (0, 0) if model.disable_bias_linear else (fc1, h)
    scalars = len(ACTIVATIONS[model.activation].parameters)
    return (
        around.column(f"{name}_fc1", (rows, fc1, h), bias=biases[0], saved_bytes=saved_bytes),
        Record(
            name=model.activation,
            parameters=scalars,
            replicated=scalars,
            of_heads=scalars,
            saved_bytes=rows * fc1 * run.element_bytes,
        ),
        around.row(f"{name}_fc2", (rows, h, f), bias=biases[1], replicated=biases[1]),
    )
