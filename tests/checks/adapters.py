"""Models with adapters, and a few training steps."""

from __future__ import annotations

import contextlib

from tests import llama_models
from tests.helpers import (
    make_trainer,
    whole_tensors,
)
from tests.llama_models import FAMILIES

LORA = {"lora_rank": 4, "lora_alpha": 16.0, "lr": 1e-2, "num_layers": 4, "global_batch_size": 8}
ADAPTED_EXPERTS = {
    **LORA,
    "num_layers": 2,
    "num_experts": 4,
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": (0.01,),
    "moe_shared_expert_intermediate_size": 16,
    "zero_stage": 1,
    "moe_layer_freq": "[0,1]",
}
QWEN = {**FAMILIES["qwen2"], **LORA}
DELTA_NETS = {
    **llama_models.DELTA_NETS,
    **LORA,
    "apply_layernorm_1p": True,
    "linear_value_head_dim": 16,
}


def curve(world, run, steps: int = 2):
    """Return losses, gradient norms, and the adapters after some steps."""
    with contextlib.closing(make_trainer(world, run)) as trainer:
        results = [trainer.train_step() for _ in range(steps)]
        trainer.optimizer.buckets.await_weights()
        return (
            [r.loss for r in results],
            [r.grad_norm for r in results],
            whole_tensors(trainer, "weight"),
        )
