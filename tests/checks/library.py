"""Documents and flags for library runs."""

from pathlib import Path

import numpy as np

from fugaku_megatron.data.indexed import IndexedDatasetWriter, best_dtype
from tests.helpers import SMALL

FLAGS = {
    **{name: value for name, value in SMALL.items() if name not in ("mock_data", "train_iters")},
    "num_layers": 2,
    "global_batch_size": 4,
    "kernels": "native",
    "eval_iters": 2,
}


def documents(seed: int = 0) -> list[np.ndarray]:
    """Return documents with unequal lengths: one is empty, one is longer than a sample."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, FLAGS["vocab_size"], length) for length in (50, 3, 0, 200, 77, 1)]


def write(prefix: Path, arrays: list[np.ndarray]) -> Path:
    with IndexedDatasetWriter(prefix, best_dtype(FLAGS["vocab_size"])) as writer:
        for array in arrays:
            writer.add_document(array)
    return prefix
