"""A plain PyTorch program: a small GPT on the bytes of this file, alone or data-parallel under torchrun or mpiexec.

python examples/train_with_pytorch.py
python -m fugaku_megatron.torch_backend --report examples/train_with_pytorch.py
mpiexec -n 2 python -m fugaku_megatron.torch_backend examples/train_with_pytorch.py --backend fugaku
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

LENGTH = 128


class Block(nn.Module):
    """Causal attention and an MLP, each with a layer norm before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output. x (b, s, h)"""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Two blocks between an embedding of bytes and positions, and a head with the weight of the embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(Block(width), Block(width), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next bytes. tokens (b, s + 1)"""
        x = self.embedding(tokens[:, :-1]) + self.positions.weight
        logits = self.head(self.blocks(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Train and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--width", type=int, default=256, help="hidden size")
    options = parser.parse_args()
    torch.manual_seed(0)
    model: nn.Module = GPT(options.width)
    rank = int(os.environ.get("RANK", 0))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(options.backend)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    torch.manual_seed(rank)
    for iteration in range(options.iterations):
        starts = torch.randint(len(text) - LENGTH - 1, (options.batch_size,))
        tokens = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = model(tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            print(f"iteration {iteration}: loss {loss.item():.6f}")
    if "WORLD_SIZE" in os.environ:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
