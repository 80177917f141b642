"""Published bugs of parallel training, made in this program: the source, the change, a layout, and what the report must name."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.campaigns.mutants.program import PACKAGE
from tests.checks.moments import EIGHT as MOMENTS_IN_INT8

MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed"
SILENT_BUGS = f"{MEGATRON}/issues/7452"
OVER_TP = "over the tensor-parallel ranks 0 1"
OVER_DP = "over the data-parallel ranks 0 1"
EXPERTS = {
    "num_experts": 4,
    "moe_layer_freq": "([0]+[1]*3)",
    "moe_aux_loss_coeff": (0.01,),
    "disable_bias_linear": True,
    "swiglu": True,
}
LLAMA = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "swiglu": True,
}
UNTIED = {"untie_embeddings_and_output_weights": True}
FOUR = {"global_batch_size": 4}
EIGHT = {"global_batch_size": 8}


class Published(NamedTuple):
    """A bug. source: "" for an unpublished one. words: of the report"""

    name: str
    source: str
    file: str
    old: str
    new: str
    layout: str
    flags: dict[str, Any]
    words: tuple[str, ...]

    def changed(self) -> str:
        """Return the file's changed text."""
        text = (PACKAGE / self.file).read_text()
        assert text.count(self.old) == 1, f"{self.name}: {self.file} has not one {self.old!r}"
        return text.replace(self.old, self.new)


PUBLISHED = (
    Published(
        "norm gradients of sequence shards are not summed",
        f"{MEGATRON}/issues/1446",
        "optim/buckets.py",
        "        if partial:\n            sharing",
        "        if False:\n            sharing",
        "tp2 sequence",
        FOUR,
        (": weight gradient of decoder.final_layernorm", f"all-reduce {OVER_TP}"),
    ),
    Published(
        "router gradients of sequence shards are not summed",
        f"{MEGATRON}/pull/619",
        "nn/router.py",
        "(experts, model.hidden_size), std=model.init_method_std\n",
        "(experts, model.hidden_size), std=model.init_method_std, sequence_parallel=False\n",
        "tp2 sequence",
        {**EXPERTS, **FOUR},
        (": weight gradient", "mlp.router.weight"),
    ),
    Published(
        "router gradients of tensor-parallel ranks are not summed",
        "https://github.com/pytorch/torchtitan/issues/2387",
        "nn/experts.py",
        "        scores = context.whole_sequence(scores)\n",
        "",
        "tp2",
        {**EXPERTS, **FOUR},
        (": gradient of decoder.layers.1.pre_mlp_layernorm", f"all-reduce {OVER_TP}"),
    ),
    Published(
        "experts' gradients are summed over the dense ranks",
        f"{MEGATRON}/issues/1628",
        "optim/buckets.py",
        "return self.groups.edp if bucket.expert else self.groups.dp",
        "return self.groups.dp",
        "tp2 dp2 ep2 sequence",
        {**EXPERTS, **FOUR},
        (": weight gradient of decoder.layers.1.mlp.experts",),
    ),
    Published(
        "experts' gradients are missing in the norm",
        f"{MEGATRON}/pull/5916",
        "optim/optimizer.py",
        "for comm in (groups.etp, groups.ep):",
        "for comm in (groups.etp,):",
        "dp2 ep2",
        {**EXPERTS, **FOUR},
        (": gradient norm",),
    ),
    Published(
        "a sharded parameter is a duplicate in the norm",
        SILENT_BUGS + " (8)",
        "nn/layers.py",
        "counted=owned and init_name is None",
        "counted=tp.rank == 0 and init_name is None",
        "tp2",
        FOUR,
        (": gradient norm", "all-reduces of the squared norm"),
    ),
    Published(
        "replicas count in the norm",
        f"{MEGATRON}/issues/2263",
        "optim/optimizer.py",
        "        if self.sharded:\n            groups.dp.all_reduce(summed)",
        "        if True:\n            groups.dp.all_reduce(summed)",
        "dp2",
        FOUR,
        (": gradient norm",),
    ),
    Published(
        "the balancing loss's gradient is doubled by tensor parallelism",
        SILENT_BUGS + " (10)",
        "nn/router.py",
        "balance_factor = forward_pass.balance_factor * self.context.cp.size",
        "balance_factor = forward_pass.balance_factor * self.context.sequence_shares",
        "tp2 sequence",
        {**EXPERTS, **FOUR},
        (": gradient of decoder.layers.1.pre_mlp_layernorm",),
    ),
    Published(
        "the balancing loss counts local tokens",
        f"{MEGATRON}/pull/2121",
        "nn/router.py",
        "            self.context.sum_over_sequence(counts)\n",
        "",
        "tp2 sequence",
        {**EXPERTS, **FOUR},
        (": gradient of decoder.layers.1.pre_mlp_layernorm",),
    ),
    Published(
        "the loss is scaled by the context-parallel ranks",
        f"{MEGATRON}/issues/906",
        "training/trainer.py",
        "factor=scale / (schedule.microbatches * self.layout.replicas)",
        "factor=scale * self.layout.cp / (schedule.microbatches * self.layout.replicas)",
        "cp2 p2p",
        {**UNTIED, **FOUR},
        (": gradient of decoder.final_layernorm",),
    ),
    Published(
        "key gradients of other ranks' queries are lost",
        f"{MEGATRON}/issues/1464",
        "nn/attention/context_parallel.py",
        "            total[rows] += tensor\n",
        "            total[rows] = tensor\n",
        "cp2 p2p",
        {**UNTIED, **FOUR},
        (
            ": gradient of decoder.layers.1.self_attention.linear_qkv",
            "ring of keys and values over the context-parallel ranks 0 1",
        ),
    ),
    Published(
        "the tied embedding is summed over shards of other rows",
        f"{MEGATRON}/issues/844",
        "optim/buckets.py",
        "        return self._all_reduce(self.groups.embedding, tied.main_grad, overlap)\n",
        "        rows = tied.main_grad.chunk(2)[self.groups.dp.rank]\n"
        "        self.groups.embedding.all_reduce(rows)\n"
        "        return _Sum(DONE, tied.main_grad, tied.main_grad)\n",
        "pp2 dp2 zero",
        EIGHT,
        (": weight gradient of", "all-reduce of the tied embedding's gradient"),
    ),
    Published(
        "the tied embedding is not summed over the stages",
        "https://github.com/NVIDIA-NeMo/Speech/pull/6958",
        "optim/buckets.py",
        "        return self._all_reduce(self.groups.embedding, tied.main_grad, overlap)\n",
        "        return _Sum(DONE, tied.main_grad, tied.main_grad)\n",
        "pp2",
        EIGHT,
        (": weight gradient of", "all-reduce of the tied embedding's gradient"),
    ),
    Published(
        "updated weights are read before they are gathered",
        f"{MEGATRON}/issues/950",
        "optim/buckets.py",
        "            if index in self._gathers:\n                self._gathers.pop(index).wait()",
        "            if index in self._gathers:\n                self._gathers.pop(index)",
        "dp2 overlap",
        FOUR,
        (": weight used of", "iteration 2", f"all-gather of updated weights {OVER_DP}"),
    ),
    Published(
        "a gather's old values are in the gradients",
        f"{MEGATRON}/pull/4609",
        "optim/flat.py",
        "            memory = torch.zeros(bucket.end - bucket.start)\n",
        "            memory = torch.full((bucket.end - bucket.start,), 0.5)\n"
        "            if len(self._buckets) < 2:\n"
        "                memory.zero_()\n",
        "dp2 overlap",
        FOUR,
        (": weight gradient before its sum of",),
    ),
    Published(
        "a pipeline with ZeRO does not sum its gradients",
        f"{DEEPSPEED}/pull/855",
        "optim/buckets.py",
        "            replicas.reduce_scatter(sent[own], sent)\n",
        "            pass\n",
        "pp2 dp2 zero",
        EIGHT,
        (": weight gradient of decoder.final_layernorm", "reduce-scatter over the data-parallel"),
    ),
    Published(
        "each stage scales the gradient again",
        f"{DEEPSPEED}/pull/8154",
        "training/step.py",
        "            self.gradients[key if previous is None else previous] = gradient\n",
        "            self.gradients[key if previous is None else previous] = gradient * 0.5\n",
        "pp2",
        EIGHT,
        (
            ": gradient of decoder.layers.0,",
            "message from rank 1 (stage 1) to rank 0 (stage 0)",
        ),
    ),
    Published(
        "a pipeline sums micro-batches instead of averaging them",
        f"{DEEPSPEED}/issues/7773",
        "training/trainer.py",
        "factor=scale / (schedule.microbatches * self.layout.replicas)",
        "factor=scale / ((schedule.microbatches if self.groups.pp.size == 1 else 1) * self.layout.replicas)",
        "pp2",
        EIGHT,
        (": gradient of decoder.final_layernorm",),
    ),
    Published(
        "gradients are summed before the last micro-batch",
        f"{DEEPSPEED}/issues/1488",
        "optim/buckets.py",
        "        if self._left[unit] == self._microbatches:\n",
        "        if self._left[unit] == 1:\n",
        "dp2 overlap",
        EIGHT,
        (": weight gradient",),
    ),
    Published(
        "only the first tensor-parallel rank clips its gradients",
        "https://arxiv.org/abs/2506.14813 (DeepSpeed-1801)",
        "optim/optimizer.py",
        "            grad_scale=min(clip, 1.0) / scale,\n",
        "            grad_scale=(min(clip, 1.0) if self.groups.tp.rank == 0 else 1.0) / scale,\n",
        "tp2",
        {**FOUR, "clip_grad": 0.1},
        (": moment of exp_avg", "on rank 1:"),
    ),
    Published(
        "all sequence shards have one dropout mask",
        "https://github.com/PaddlePaddle/PaddleFleetX/pull/1005",
        "nn/layers.py",
        "        context.segments(x), context.seed, stream, forward_pass.first_sample\n",
        "        [range(len(x))], context.seed, stream, forward_pass.first_sample\n",
        "tp2 sequence",
        FOUR,
        (": output of embedding", "on rank 1:"),
    ),
    Published(
        "tensor-parallel ranks draw different dropout masks",
        f"{MEGATRON}/pull/206",
        "nn/layers.py",
        "        context.segments(x), context.seed, stream, forward_pass.first_sample\n",
        "        context.segments(x), context.seed + context.tp.rank, stream,"
        " forward_pass.first_sample\n",
        "tp2",
        FOUR,
        (": output of embedding", "on rank 1:"),
    ),
    Published(
        "shards of a weight have the same initial values",
        "https://github.com/modelscope/ms-swift/pull/7944",
        "optim/flat.py",
        "count(index * rows + first_row, band)",
        "count(index * rows, band)",
        "tp2",
        FOUR,
        (": weight used of embedding.word_embeddings.weight", "on rank 1:"),
    ),
    Published(
        "the head's input gradient is not summed",
        "https://github.com/NovaSky-AI/SkyRL/pull/1886",
        "nn/model.py",
        "        whole = self.context.whole_sequence(normed)\n",
        "        whole = normed\n",
        "tp2",
        FOUR,
        (": gradient of decoder.final_layernorm", f"all-reduce {OVER_TP}"),
    ),
    Published(
        "the softmax counts every rank's rows as often as there are ranks",
        SILENT_BUGS + " (2)",
        "nn/ops/loss.py",
        "        tp.all_reduce(sum_exp)\n        tp.all_reduce(target_logit)",
        "        tp.all_reduce(sum_exp).mul_(tp.size)\n        tp.all_reduce(target_logit)",
        "tp2",
        FOUR,
        (": loss",),
    ),
    Published(
        "the tied head and embedding train apart",
        f"{MEGATRON}/issues/656",
        "optim/buckets.py",
        "        if self._tied_sum and len(self._sums) < len(self.flat.buckets):\n"
        "            self._tied_sum.wait()\n",
        "        if self._tied_sum and len(self._sums) < len(self.flat.buckets):\n",
        "pp2 dp2 overlap",
        EIGHT,
        (": weight gradient of", "all-reduce of the tied embedding's gradient"),
    ),
    Published(
        "the embedding's gradient is computed after the sum",
        f"{MEGATRON}/issues/1012",
        "training/step.py",
        "        self.weight_work.pop(_key(instruction)).run()\n",
        "        if instruction.microbatch or instruction.model_chunk:\n"
        "            self.weight_work.pop(_key(instruction)).run()\n",
        "pp2 zb-h1",
        {**LLAMA, **EIGHT},
        (": weight gradient before its sum of",),
    ),
)

# Mistakes in paths that need a shard of a kind, a loaded checkpoint or an overflow.
OF_PATHS = (
    Published(
        "matrices have another momentum on one rank",
        "",
        "optim/muon.py",
        "lerp_(grad, 1.0 - config.muon_momentum)",
        "lerp_(grad, 1.0 - config.muon_momentum * (1.0 - self.groups.dp.rank))",
        "dp2 zero",
        {**FOUR, "optimizer": "muon"},
        (": moment of exp_avg", "on rank 1:"),
    ),
    Published(
        "one rank's shards of matrices are updated as others",
        "",
        "optim/muon.py",
        ".chunk(tp.size, dim)[tp.rank]",
        ".chunk(tp.size, dim)[0]",
        "tp2",
        {**FOUR, "optimizer": "muon"},
        (": update of", "on rank 1:"),
    ),
    Published(
        "scales of 8-bit moments are not shared",
        "",
        "optim/int8.py",
        '            comm.all_reduce(together, "max")\n',
        "",
        "dp2 zero",
        {**FOUR, **MOMENTS_IN_INT8},
        (": moment's scale of", f"all-reduce of largest elements {OVER_DP}"),
    ),
    Published(
        "a rank does not load the number of updates",
        "",
        "training/checkpoints.py",
        'self.optimizer.steps = state["optimizer_steps"]',
        'self.optimizer.steps = state["optimizer_steps"] * (self.world.rank == 0)',
        "dp2",
        FOUR,
        (": loaded checkpoint of updates", "on rank 1:"),
    ),
    Published(
        "a loaded weight is not rounded again",
        "",
        "optim/optimizer.py",
        "            shard.round_weights(slice(None))\n            self.buckets.gather",
        "            self.buckets.gather",
        "dp2 bf16",
        FOUR,
        (": weight used of", "iteration 4", "between the loaded checkpoint"),
    ),
    Published(
        "only ranks whose own gradients overflow skip the update",
        "",
        "optim/optimizer.py",
        "        overflow = not math.isfinite(norm)\n",
        "        overflow = not all(bool(each.isfinite().all()) for each in grads)\n",
        "pp2",
        {**UNTIED, **FOUR},
        (": state of skipped updates, iteration 2,", "on rank 0:"),
    ),
    Published(
        "only the first stage lowers its loss scale",
        "",
        "optim/optimizer.py",
        "        self.scaler.update(overflow)\n",
        "        self.scaler.update(overflow and self.groups.pp.rank == 0)\n",
        "pp2 fp16",
        EIGHT,
        (": state of the loss scale, iteration 2,", "on rank 1:"),
    ),
)
