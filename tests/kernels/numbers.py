"""Numbers for the kernel tests: the same for the same shape and seed."""

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 61, 64, 65, 127, 1031, 131101]  # of flat tensors


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
