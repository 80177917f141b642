"""Train a two-layer MLP of width 32, whose calls are all too small for the kernels: the cost of the torch backend around them.

python -m benchmarks programs benchmarks/small_mlp.py
"""

import time

import torch

WIDTH = 32
ITERATIONS = 200
STEPS = 100  # of an iteration


def main() -> None:
    """Print the loss and time of each iteration."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(WIDTH, WIDTH)
    targets = torch.arange(WIDTH)
    for iteration in range(ITERATIONS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        milliseconds = 1000 * (time.perf_counter() - begin)
        print(f"iter {iteration}: loss {loss.item():.4f}, time {milliseconds:.2f}ms")


if __name__ == "__main__":
    main()
