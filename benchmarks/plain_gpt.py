"""The same GPT in plain torch in one file, as a PyTorch user writes it: the baseline of `benchmarks step` and the tests' reference.

    model = PlainGPT(run.model, vocabulary)        vocabulary: padded, see costs.sizes.padded_vocab_size
    loss = model(tokens, labels)                   (b, s) each -> ()

Parameters have the global names, shapes and order of heads of fugaku_megatron's checkpoints, so weights need no conversion.
Left out: dropout, recompute, parallel layouts. Legend: s sequence, b batch, h hidden, n heads, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from fugaku_megatron.config.run_config import ModelConfig


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.heads = model.num_attention_heads
        self.linear_qkv = nn.Linear(model.hidden_size, 3 * model.hidden_size)
        self.linear_proj = nn.Linear(model.hidden_size, model.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, s, h) -> (b, s, h)."""
        b, s, h = x.shape
        q, k, v = (
            self.linear_qkv(x).view(b, s, self.heads, 3, h // self.heads).permute(3, 0, 2, 1, 4)
        )  # (b, n, s, h/n) each
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear_proj(context.transpose(1, 2).reshape(b, s, h))


class MLP(nn.Module):
    """h -> ffn -> h with GELU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(model.hidden_size, model.ffn_hidden_size)
        self.linear_fc2 = nn.Linear(model.ffn_hidden_size, model.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, s, h) -> (b, s, h)."""
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class Block(nn.Module):
    """Pre-layer-norm transformer layer."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(model.hidden_size, model.layernorm_epsilon)
        self.self_attention = Attention(model)
        self.pre_mlp_layernorm = nn.LayerNorm(model.hidden_size, model.layernorm_epsilon)
        self.mlp = MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, s, h) -> (b, s, h)."""
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class PlainGPT(nn.Module):
    """GPT-2: learned positions, tied head."""

    def __init__(self, model: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(vocabulary, model.hidden_size),
                "position_embeddings": nn.Embedding(
                    model.max_position_embeddings, model.hidden_size
                ),
            }
        )
        self.decoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList(Block(model) for _ in range(model.num_layers)),
                "final_layernorm": nn.LayerNorm(model.hidden_size, model.layernorm_epsilon),
            }
        )

    def take(self, ours: Callable[[str], Tensor]) -> None:
        """Copy our weights, by global name, into its parameters."""
        for name, parameter in self.named_parameters():
            parameter.copy_(ours(name))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy. tokens, labels (b, s) -> ()."""
        words = self.embedding["word_embeddings"]
        x = (
            words(tokens) + self.embedding["position_embeddings"].weight[: tokens.shape[1]]
        )  # (b, s, h)
        for layer in self.decoder["layers"]:
            x = layer(x)
        logits = F.linear(self.decoder["final_layernorm"](x), words.weight)  # (b, s, v)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
