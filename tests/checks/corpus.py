"""Files with token ids."""

import numpy as np

from fugaku_megatron.data.indexed import IndexedDatasetWriter


def write(prefix, lengths, first_token=0, dtype="<i4"):
    """Write documents with the given lengths. Tokens count up from `first_token`, so that a token names its position."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for length in lengths:
            writer.add_document(np.arange(first_token, first_token + length))
            first_token += length
    return str(prefix)
