"""Other programs that train the same model: plain PyTorch (plain_gpt.py) and Hugging Face's GPT2LMHeadModel.

A baseline starts from our trainer's initial weights, reads the same tokens and makes the same update: its losses equal ours. BF16
uses autocast, as torch's users do. Left out: the timing (contestant.py). Test: pytest tests/test_benchmarks.py
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fugaku_megatron.comm.dry import DryComm
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.data.sampler import Prefetcher, micro_batches
from fugaku_megatron.nn.model import Stage
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.run import accounting
from fugaku_megatron.run.checks import check
from fugaku_megatron.run.config import RunConfig
from fugaku_megatron.training.flat import initial_values

from .plain_gpt import PlainGPT

_FIXED = {"transformer.wte.weight": "embedding.word_embeddings.weight",
          "transformer.wpe.weight": "embedding.position_embeddings.weight",
          "transformer.ln_f.weight": "decoder.final_layernorm.weight", "transformer.ln_f.bias": "decoder.final_layernorm.bias"}
_PLACES = {"ln_1": "input_layernorm", "attn.c_attn": "self_attention.linear_qkv", "attn.c_proj": "self_attention.linear_proj",
           "ln_2": "pre_mlp_layernorm", "mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2"}


def our_name(theirs: str) -> str:
    """Our global name of a parameter of GPT2LMHeadModel."""
    if theirs in _FIXED:
        return _FIXED[theirs]
    _, _, layer, rest = theirs.split(".", 3)
    place, kind = rest.rsplit(".", 1)
    return f"decoder.layers.{layer}.{_PLACES[place]}.{kind}"


def in_their_shape(theirs: str, ours: Tensor, heads: int) -> Tensor:
    """Our tensor in GPT2LMHeadModel's layout: Conv1D holds (in, out), and all of q, all of k, all of v instead of head by head."""
    if theirs in _FIXED:
        return ours
    if ".attn.c_attn." in theirs:
        ours = ours.view(heads, 3, -1, *ours.shape[1:]).transpose(0, 1).reshape(ours.shape)
    return ours.t() if ours.dim() == 2 else ours


class _HuggingFace(nn.Module):
    """GPT2LMHeadModel with our loss: every position has a label; its own loss would leave out the last one."""

    def __init__(self, run: RunConfig, vocabulary: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        model = run.model
        self.gpt = GPT2LMHeadModel(GPT2Config(
            vocab_size=vocabulary, n_positions=model.max_position_embeddings, n_embd=model.hidden_size, n_layer=model.num_layers,
            n_head=model.num_attention_heads, n_inner=model.ffn_hidden_size, layer_norm_epsilon=model.layernorm_epsilon,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy. tokens, labels (b, s) -> ()."""
        return F.cross_entropy(self.gpt(tokens).logits.flatten(0, 1), labels.flatten())


def _plain(run: RunConfig, vocabulary: int) -> nn.Module:
    with torch.device("meta"):
        model = PlainGPT(run.model, vocabulary)
    return model.to_empty(device="cpu")


BASELINES: dict[str, Callable[[RunConfig, int], nn.Module]] = {"plain": _plain, "hf": _HuggingFace}


def check_baseline(name: str, compiled: bool) -> None:
    """ValueError when a package or compiler is missing."""
    check(name != "hf" or importlib.util.find_spec("transformers") is not None,
          "--baseline hf: a package is missing: pip install transformers")
    check(not compiled or shutil.which("g++") is not None or shutil.which("clang++") is not None,
          "--baseline-compile: torch.compile needs a C++ compiler: install g++, or leave the flag out")


def build(name: str, run: RunConfig) -> nn.Module:
    """The baseline's model with our initial weights; (tokens (b, s), labels (b, s)) -> loss ()."""
    model = BASELINES[name](run, accounting.padded_vocab_size(run.model, 1))
    ops = Ops.build()
    ours = {p.spec.name: p for p in Stage(run, Grid(1, 1, 1).groups(DryComm()), ops).parameters()}  # on the meta device
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            theirs = parameter_name.removeprefix("gpt.")
            source = ours[our_name(theirs) if name == "hf" else theirs]
            values = initial_values(source, run.training.seed, ops.kernels)
            parameter.copy_(in_their_shape(theirs, values, run.model.num_attention_heads) if name == "hf" else values)
    return model


class BaselineTrainer:
    """Trains a baseline: accumulate micro-batches, clip, fused AdamW."""

    def __init__(self, name: str, run: RunConfig, compiled: bool) -> None:
        self.run, model, optimizer = run, build(name, run), run.optimizer
        groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": optimizer.weight_decay},
                  {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=optimizer.lr, betas=(optimizer.adam_beta1, optimizer.adam_beta2),
                                           eps=optimizer.adam_eps, fused=True)
        self.parameters, self.model = list(model.parameters()), torch.compile(model) if compiled else model
        size, b = run.batch.global_batch_size, run.batch.micro_batch_size
        data = MockDataset(run.model.vocab_size, run.model.seq_length, run.training.train_iters * size, run.training.seed)
        self.batches = Prefetcher(micro_batches(data, 0, lambda _: size, b, 0, 1))
        self.microbatches = size // b

    def step(self) -> float:
        """One iteration; the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for tokens, labels in itertools.islice(self.batches, self.microbatches):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.run.precision.bf16):
                loss = self.model(tokens.t().contiguous(), labels.t().contiguous()) / self.microbatches
            loss.backward()
            total += loss.item()
        if self.run.optimizer.clip_grad:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.run.optimizer.clip_grad)
        self.optimizer.step()
        return total
