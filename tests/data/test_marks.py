"""Marks of tokens against Megatron-LM's rules, and what runs take them from.

`left_to_right` restates megatron/core/datasets/gpt_dataset.py (_get_ltor_masks_and_position_ids), sample by sample.
"""

import numpy as np
import pytest
import torch

from fugaku_megatron.config.data import DataConfig
from fugaku_megatron.data.build import Builder
from fugaku_megatron.data.dataset import BlendedDataset, MockDataset, ValidationSets
from fugaku_megatron.data.marks import (
    COUNTED,
    FIRST,
    MarkedDataset,
    TokenCounts,
    document_starts,
    labels,
    mark,
)
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.data.token_arrays import TokenArrays
from fugaku_megatron.run.tokenizer import end_of_document
from fugaku_megatron.training.micro_batches import documents_of
from tests.checks.documents import (
    EOD,
    S,
    Texts,
    left_to_right,
)

pytestmark = pytest.mark.unit

FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def test_5000_samples_have_megatrons_masks_and_positions():
    data = Texts(50, S, 5000, 1)
    seen_flags = set()
    for first in range(0, 5000, 50):
        flags = {name: bool(first // 50 + 1 & 1 << bit) for bit, name in enumerate(FLAGS)}
        config = DataConfig(mock_data=True, **flags)
        if not config.marked:
            continue
        samples = torch.from_numpy(
            fetch(mark(data, EOD, config.eod_mask_loss), range(first, first + 50))
        )
        seen_flags.add(tuple(flags.values()))
        tokens, marks = samples
        documents = documents_of(marks, config)
        counted = labels(tokens, marks)
        for b in range(50):
            sample = data[first + b]
            assert np.array_equal(tokens[:, b], sample)
            seen, loss_mask, positions = left_to_right(sample[:-1], **flags)
            assert np.array_equal(counted[:, b], np.where(loss_mask == 1, sample[1:], -1))
            starts = torch.zeros(S) if documents.starts is None else documents.starts[b]
            assert np.array_equal((torch.arange(S) >= starts[:, None]).tril(), seen)
            own = torch.arange(S) if documents.positions is None else documents.positions[:, b]
            assert np.array_equal(own, positions)
    assert len(seen_flags) == 7


def test_documents_of_the_data_files_need_no_end_token():
    """megatron/core/datasets/gpt_dataset.py, inter_document_masking. Each document is a token of its own, which shows where it begins."""
    lengths = np.random.default_rng(1).integers(1, 2 * S, 60)
    arrays = TokenArrays([np.full(n, i) for i, n in enumerate(lengths)], "texts").measure()
    config = DataConfig(
        data_path=("texts",), dataloader_inter_document_masking=True, eod_mask_loss=True
    )
    assert config.marked and config.marks_documents == "--eod-mask-loss"
    builder = Builder(S, 1, inter_document_masking=True)
    data = mark(builder.dataset((arrays, range(60)), "train", None, None), EOD, True)
    plain = Builder(S, 1).dataset((arrays, range(60)), "train", None, None)
    samples = torch.from_numpy(fetch(data, range(len(data))))
    tokens, marks = samples
    assert np.array_equal(tokens, fetch(plain, range(len(plain)))) and len(data) > 20
    changes = tokens[1:S] != tokens[: S - 1]
    places = torch.arange(1, S)[:, None]
    starts = torch.where(changes, places, 0).cummax(0).values
    documents = documents_of(marks, config)
    assert torch.equal(documents.starts[:, 1:].t().long(), starts)
    assert torch.equal(documents.positions[1:], places - starts)
    expected = torch.where(tokens[:-1] == EOD, -1, tokens[1:])
    assert torch.equal(labels(tokens, marks), expected) and (tokens == EOD).any()


def test_the_work_of_samples():
    """[7 E 8 | 9 E E 4]: documents of 2 and 1 tokens, and of 2, 1 and 0, since the last token is only a label."""
    tokens = np.array([[7, EOD, 8, 1], [9, EOD, EOD, 4]]).T
    marks = np.array([[1, 1, FIRST, 1], [1, 1, FIRST, FIRST | COUNTED]]).T
    work = TokenCounts.of(np.stack([tokens, marks])[None])
    assert work == TokenCounts(counted=4, squares=4 + 1 + 4 + 1, samples=2, share=1.0)
    assert document_starts(torch.from_numpy(marks)).tolist() == [[0, 0, 2], [0, 0, 2]]
    twice = TokenCounts.of(np.stack([np.stack([tokens, marks])] * 2))
    assert twice == TokenCounts(8, 20, 4)


def test_validation_sets_stay_apart_and_other_attributes_are_those_of_the_data():
    sets = mark(ValidationSets([MockDataset(9, S, 3, 1), MockDataset(9, S, 4, 1)]), EOD, True)
    assert isinstance(sets, ValidationSets) and [len(each) for each in sets.datasets] == [3, 4]
    assert sets[5].shape == (2, S + 1) and np.array_equal(sets[5][0], MockDataset(9, S, 4, 1)[2])
    blend = mark(BlendedDataset([MockDataset(9, S, 30, 1)] * 2, [1.0, 2.0], 30), EOD, True)
    assert isinstance(blend, MarkedDataset) and len(blend.datasets) == 2 and len(blend) == 30


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            None,
            "--eod-mask-loss: the token that ends a document is not known: name the tokenizer of the data",
        ),
        (
            {"eod": None},
            "--eod-mask-loss: --tokenizer-type GPT2BPETokenizer has no token that ends a document",
        ),
    ],
)
def test_without_a_token_that_ends_documents_the_flags_are_refused(tokenizer, message):
    with pytest.raises(ValueError, match=message):
        end_of_document(DataConfig(mock_data=True, eod_mask_loss=True), tokenizer)
