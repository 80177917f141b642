"""Save and load checkpoints with megatron-core on a CPU: python megatron_core.py save|load|train FOLDER

Runs in an environment of its own, with a megatron-core that requirements-megatron-core.txt names:

    python3.12 -m venv mcore && mcore/bin/pip install -r requirements-megatron-core.txt
    mcore/bin/python tests/foreign/megatron_core.py save FOLDER

`save` writes a checkpoint in the format torch_dist for every row of CASES, with `expected.pt`: its
tensors by key, token ids, and the logits. `load` loads FOLDER/NAME strictly into the same model and
writes `loaded.pt`, of the same form. `train` saves a run with the state of megatron-core's
distributed optimizer, with `expected.pt`: the samples of the next updates, and the weights after
them by torch.optim.AdamW, which continues from the same state.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

ROWS = 64
LENGTH = 32
COMMON = dict(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48)
LLAMA = dict(
    num_query_groups=2,
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    add_bias_linear=False,
)
EXPERTS = dict(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    moe_token_dispatcher_type="allgather",
    moe_router_load_balancing_type="none",
)
SHARED = dict(
    moe_shared_expert_intermediate_size=40,
    moe_shared_expert_gate=True,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_layer_freq=[0, 1],
)
DELTA = dict(
    linear_conv_kernel_dim=3,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    attention_output_gate=True,
    qk_layernorm=True,
    layernorm_zero_centered_gamma=True,
    deterministic_mode=True,
)
DELTA_LAYERS = dict(
    experimental_attention_variant="gated_delta_net", linear_attention_freq=[1, 0, 1]
)
LATENT = dict(
    LLAMA,
    num_query_groups=None,
    multi_latent_attention=True,
    kv_lora_rank=16,
    qk_head_dim=12,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
    qk_layernorm=True,
)
LATENT_YARN = dict(
    q_lora_rank=20,
    rope_type="yarn",
    rotary_scaling_factor=40.0,
    mscale=0.9,
    mscale_all_dim=0.5,
    apply_rope_fusion=False,
)
MTP = dict(mtp_num_layers=2, mtp_loss_scaling_factor=0.6)
UNTIED = dict(position_embedding_type="rope", share_embeddings_and_output_weights=False)
TIED = dict(position_embedding_type="learned_absolute", share_embeddings_and_output_weights=True)
# Fields of the config, arguments of the model, pattern of a HybridModel.
Case = tuple[dict[str, Any], dict[str, Any], str | None]
CASES: dict[str, Case] = {
    "dense": ({}, TIED, None),
    "llama": (dict(LLAMA, qk_layernorm=True), UNTIED, None),
    "experts": (dict(LLAMA, **EXPERTS), UNTIED, None),
    "shared": (dict(LLAMA, **EXPERTS, **SHARED), UNTIED, None),
    "mtp": (dict(LLAMA, **MTP), UNTIED, None),
    "latent": (dict(LATENT, **LATENT_YARN), UNTIED, None),
    "latent_mtp": (
        dict(
            {**LATENT, "qk_layernorm": False},
            q_lora_rank=None,
            rope_type="rope",
            **EXPERTS,
            **SHARED,
            **MTP,
        ),
        UNTIED,
        None,
    ),
    "hybrid": (dict(LLAMA, num_layers=4), UNTIED, "*-*-"),
    "hybrid_parts": (dict(LLAMA, num_layers=3), UNTIED, "**-"),
    "hybrid_experts": (dict(LLAMA, **EXPERTS, num_layers=4), UNTIED, "*E*E"),
    "delta": (dict(LLAMA, **DELTA, **DELTA_LAYERS, num_layers=3), UNTIED, None),
    "hybrid_delta": (dict(LLAMA, **DELTA, num_layers=4), UNTIED, "G-*-"),
}


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        named = dict(named or {})
        if "cuda" in str(named.get("device", "")):
            named["device"] = "cpu"
        return function(*arguments, **named)


def without_gpu(rank: int = 0, size: int = 1, store: dist.Store | None = None) -> None:
    """Answer megatron-core's questions to a GPU, and start tensor-parallel ranks, or one process alone."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16 without Transformer Engine
        moe_utils.te_general_gemm = None
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    kind = torch.Tensor.type  # which the distributed optimizer compares with types of a GPU

    def as_on_gpu(tensor: torch.Tensor, *to: Any, **named: Any) -> Any:
        found = kind(tensor, *to, **named)
        if isinstance(found, str) and "cuda" not in found:
            return found.replace("torch.", "torch.cuda.")
        return found

    torch.Tensor.type = as_on_gpu
    torch.cuda.current_stream = lambda *_: contextlib.nullcontext()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    dist.init_process_group("gloo", store=store or dist.HashStore(), rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


def arguments(case: Case, size: int = 1) -> argparse.Namespace:
    """Return the arguments that Megatron-LM's training script saves. size: tensor-parallel ranks"""
    config, other, pattern = case
    fields = {**COMMON, **config}
    arguments = argparse.Namespace(
        seq_length=LENGTH,
        max_position_embeddings=LENGTH,
        padded_vocab_size=ROWS,
        vocab_size=ROWS,
        norm_epsilon=1e-5,
        group_query_attention=fields.get("num_query_groups") is not None,
        swiglu=fields.get("gated_linear_unit", False),
        bias_gelu_fusion=fields.get("bias_activation_fusion", False),
        num_experts=fields.get("num_moe_experts"),
        position_embedding_type=other["position_embedding_type"],
        untie_embeddings_and_output_weights=not other["share_embeddings_and_output_weights"],
        rotary_base=10000,
        rotary_percent=1.0,
        tensor_model_parallel_size=size,
        pipeline_model_parallel_size=1,
        hybrid_layer_pattern=pattern,
    )
    arguments.apply_layernorm_1p = fields.get("layernorm_zero_centered_gamma", False)
    foreign = (
        "gated_linear_unit",
        "activation_func",
        "bias_activation_fusion",
        "num_moe_experts",
        "layernorm_zero_centered_gamma",
    )
    for field, value in fields.items():
        if field not in foreign:
            setattr(arguments, field, value)
    return arguments


class Norm(torch.nn.Module):
    """RMSNorm of megatron-core's arguments, with weights minus 1 too, which torch's own does not have."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.shift = float(config.layernorm_zero_centered_gamma)
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size) - self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight + self.shift, self.eps)


def delta_net() -> Any:
    """Return the attention of a gated delta net out of layers for a CPU; its spec needs a GPU package."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    common.HAVE_FLA = True
    common.l2norm = lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear
        ),
    )


def delta_layers(config: Any) -> Any:
    """Return the layers of a GPTModel with gated delta nets, named as Transformer Engine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer

    specs = []
    for is_delta in config.linear_attention_freq:
        layer = get_gpt_layer_local_submodules(normalization="RMSNorm", qk_layernorm=True)
        with_norms(layer)
        if is_delta:
            layer.self_attention = delta_net()
            keys = dict(layer.sharded_state_dict_keys_map)
            keys["input_layernorm."] = "self_attention.in_proj.layer_norm_"
            layer.sharded_state_dict_keys_map = keys
        specs.append(ModuleSpec(module=TransformerLayer, submodules=layer))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def with_norms(layer: Any) -> None:
    """Replace the norms of a layer."""
    layer.input_layernorm = Norm
    layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.q_layernorm = Norm
    attention.k_layernorm = Norm


def attend_latent(spec: Any) -> None:
    """Replace the attention of a GPTModel's layers by one with values of another size, which megatron-core has on a GPU alone."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentAttention(DotProductAttention):
        def __init__(
            self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any
        ) -> None:
            super().__init__(*args, **named)
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    for layer in getattr(spec, "layer_specs", [spec]):
        layer.submodules.self_attention.submodules.core_attention = LatentAttention


def hybrid_stack(pattern: str) -> Any:
    """Return a HybridModel's layers out of megatron-core's own modules; its spec needs a GPU package."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    has_delta = "G" in pattern
    hybrid_block.TENorm = Norm if has_delta else WrappedTorchNorm
    dense = get_gpt_layer_local_submodules(normalization="RMSNorm", qk_layernorm=has_delta)
    experts = get_gpt_layer_local_submodules(normalization="RMSNorm", num_experts=4)
    norms = dense.sharded_state_dict_keys_map
    delta = None
    if has_delta:
        with_norms(dense)
        delta = ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=Norm,
                self_attention=delta_net(),
                self_attn_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={
                    "input_layernorm.": "self_attention.in_proj.layer_norm_"
                },
            ),
        )
    attention = TransformerLayerSubmodules(
        input_layernorm=dense.input_layernorm,
        self_attention=dense.self_attention,
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=norms,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=dense.pre_mlp_layernorm,
        mlp=dense.mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=norms,
    )
    moe = TransformerLayerSubmodules(
        pre_mlp_layernorm=dense.pre_mlp_layernorm, mlp=experts.mlp, mlp_bda=get_bias_dropout_add
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            gdn_layer=delta,
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=moe),
        ),
    )


def build(case: Case, rank: int = 0, size: int = 1) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    fields, other, pattern = case
    latent = "multi_latent_attention" in fields
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **{**COMMON, "bias_activation_fusion": False, **fields},
        tensor_model_parallel_size=size,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(1 + rank)
    common = dict(vocab_size=ROWS, max_sequence_length=LENGTH, **other)
    # The loss of MTP modules changes the logits in place, which gathered ones do not allow.
    common["parallel_output"] = config.mtp_num_layers is not None
    if pattern is not None:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        return HybridModel(config, hybrid_stack(pattern), hybrid_layer_pattern=pattern, **common)
    if config.linear_attention_freq is not None:
        spec = delta_layers(config)
    elif config.num_moe_experts is None:
        spec = get_gpt_layer_local_spec(
            normalization=config.normalization,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=latent,
        )
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )
    if latent:
        attend_latent(spec)
    if config.mtp_num_layers:
        common["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, False)
    return GPTModel(config, spec, **common)


def logits_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.randint(ROWS, (1, 24), generator=torch.Generator().manual_seed(5))
    mask = torch.triu(torch.ones(1, 1, 24, 24, dtype=torch.bool), diagonal=1)
    with torch.no_grad():
        return {"ids": ids[0], "logits": model.eval()(ids, torch.arange(24)[None], mask)[0]}


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def save(name: str, folder: Path) -> None:
    from megatron.core import __version__, dist_checkpointing

    model = build(CASES[name])
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for key, value in model.named_buffers():
        if key.endswith("expert_bias"):
            value += torch.randn_like(value)
    path = folder / name / "iter_0000010"
    path.mkdir(parents=True)
    state = {
        "args": arguments(CASES[name]),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": model.sharded_state_dict(),
    }
    form = {}
    if "verify_integrity" in inspect.signature(dist_checkpointing.save).parameters:
        form["verify_integrity"] = True  # megatron-core since 0.19
    dist_checkpointing.save(state, str(path), **form)
    (folder / name / "latest_checkpointed_iteration.txt").write_text("10")
    expected = {"by": __version__, **logits_of(model), "weights": weights_of(model)}
    torch.save(expected, folder / name / "expected.pt")


def load(name: str, folder: Path) -> None:
    from megatron.core import __version__, dist_checkpointing

    model = build(CASES[name])
    directory = folder / name
    iteration = (directory / "latest_checkpointed_iteration.txt").read_text().strip()
    path = directory / (iteration if iteration == "release" else f"iter_{int(iteration):07d}")
    state = {"model": model.sharded_state_dict()}
    loaded, missing, unexpected = dist_checkpointing.load(state, str(path), strict="return_all")
    if missing or unexpected:
        sys.exit(f"{name}: missing {sorted(missing)}, unexpected {sorted(unexpected)}")
    model.load_state_dict(loaded["model"], strict=True)
    found = {
        "by": __version__,
        **logits_of(model),
        "weights": weights_of(model),
        "args": vars(loaded["args"]),
    }
    torch.save(found, directory / "loaded.pt")


DONE = 3  # updates before the checkpoint
MORE = 5
BATCH = 4
SCHEDULE = dict(
    init_lr=0.0,
    max_lr=1e-3,
    min_lr=1e-4,
    lr_warmup_steps=2 * BATCH,
    lr_decay_steps=(DONE + MORE) * BATCH,
    lr_decay_style="cosine",
    start_wd=0.1,
    end_wd=0.1,
    wd_incr_steps=(DONE + MORE) * BATCH,
    wd_incr_style="constant",
)
# Adam's epsilon is above the rounding of gradients: those of the biases of keys are 0 but for it.
ADAM = dict(adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-4, weight_decay=0.1, clip_grad=1.0)


def loss_of(model: torch.nn.Module, samples: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy. samples: (b, s + 1)"""
    length = samples.shape[1] - 1
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    positions = torch.arange(length)[None].expand(len(samples), -1)
    if getattr(
        model, "module", model
    ).config.mtp_num_layers:  # its loss has the MTP modules' gradient
        return model(samples[:, :-1], positions, mask, labels=samples[:, 1:]).mean()
    logits = model(samples[:, :-1], positions, mask)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())


def module_losses() -> torch.Tensor:
    """Return the losses of MTP modules since they were last set to 0."""
    try:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    except ImportError:  # megatron-core 0.16 without Transformer Engine
        return torch.zeros(0)
    return MTPLossLoggingHelper.tracker.get("loss_values", torch.zeros(0))


def train(name: str, folder: Path) -> None:
    from megatron.core import __version__, dist_checkpointing
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    module = build(CASES[name])
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(module.config, ddp, module)
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True, **ADAM
    )
    optimizer = get_megatron_optimizer(adam, [model])
    scheduler = OptimizerParamScheduler(optimizer, **SCHEDULE)
    generator = torch.Generator().manual_seed(3)
    shape = (DONE + MORE, BATCH, LENGTH + 1)
    samples = torch.randint(ROWS, shape, generator=generator)
    for batch in samples[:DONE]:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        model.finish_grad_sync()
        optimizer.step()
        scheduler.step(increment=BATCH)
    path = folder / name / f"iter_{DONE:07d}"
    path.mkdir(parents=True)
    args = arguments(CASES[name])
    vars(args).update(
        consumed_train_samples=DONE * BATCH,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        train_iters=DONE + MORE,
        lr=1e-3,
        min_lr=1e-4,
        lr_decay_style="cosine",
        lr_warmup_iters=2,
        **ADAM,
    )
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": DONE,
        "model": module.sharded_state_dict(),
    }
    form = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=form)
    state["opt_param_scheduler"] = scheduler.state_dict()
    dist_checkpointing.save(state, str(path))
    (folder / name / "latest_checkpointed_iteration.txt").write_text(str(DONE))
    weights = {key: value.detach().clone() for key, value in module.named_parameters()}
    moments = {}
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for key, parameter in module.named_parameters():
            if parameter in each.model_param_gbuf_map:
                moments[key] = each._get_main_param_and_optimizer_states(parameter)
    continued, losses = train_plainly(name, weights, moments, samples[DONE:], scheduler, optimizer)
    expected = {
        "by": __version__,
        "samples": samples,
        "saved": weights,
        "weights": continued,
        "losses": losses,
    }
    torch.save(expected, folder / name / "expected.pt")


def train_plainly(
    name: str,
    weights: dict[str, torch.Tensor],
    moments: dict[str, dict[str, torch.Tensor]],
    samples: torch.Tensor,
    scheduler: Any,
    theirs: Any,
) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    """Continue with torch.optim.AdamW from moments; return the weights at the end, and the losses before each update.

    The losses are the model's, and those of its MTP modules as Megatron-LM logs them.

    scheduler: sets the learning rate of the optimizer `theirs`
    """
    model = build(CASES[name])
    for key, parameter in model.named_parameters():
        parameter.data.copy_(weights[key])
    groups = [
        {"params": [p], "weight_decay": ADAM["weight_decay"] * (p.dim() > 1)}
        for p in model.parameters()
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=ADAM["adam_eps"])
    for key, parameter in model.named_parameters():
        own = moments[key]
        adam.state[parameter] = {
            "step": torch.tensor(float(DONE)),
            "exp_avg": own["exp_avg"].detach().clone().view_as(parameter),
            "exp_avg_sq": own["exp_avg_sq"].detach().clone().view_as(parameter),
        }
    losses = []
    for batch in samples:
        adam.zero_grad()
        module_losses().zero_()
        loss = loss_of(model, batch)
        losses.append([loss.item(), *module_losses().tolist()])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["clip_grad"])
        for group in adam.param_groups:
            group["lr"] = theirs.param_groups[0]["lr"]
        adam.step()
        scheduler.step(increment=BATCH)
    return {key: parameter.detach() for key, parameter in model.named_parameters()}, losses


if __name__ == "__main__":
    action, target, *names = sys.argv[1:]
    without_gpu()
    with OnCpu():
        for case in names or CASES:
            {"save": save, "load": load, "train": train}[action](case, Path(target))
