"""Modules of a model on one rank. Shapes: s sequence, b micro-batch, h hidden, d head size, rows = s b; qkv as in `Heads`."""
