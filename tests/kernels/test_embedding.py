"""Word and position embedding on every target, against torch.

Legend: s sequence, b micro-batch, h hidden.
"""

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, for_each, random, refuses

pytestmark = pytest.mark.kernels

COLUMNS = [1, 15, 16, 17, 67, 131, 768]


def some_tokens(s=37, b=3, words=23):
    return torch.randint(words, (s, b), generator=torch.Generator().manual_seed(5))


@for_each(dtype=DTYPES, h=COLUMNS)
def test_embedding(every_target, h, dtype):
    tokens = some_tokens()
    table = random(23, h, dtype=dtype)
    out = torch.empty(37, 3, h, dtype=dtype)
    kernels.embedding(tokens, table, out, vocabulary=23)
    assert torch.equal(out, table[tokens])
    kernels.embedding(tokens, table[7:15].contiguous(), out, first_row=7)
    assert torch.equal(out, table[tokens] * ((tokens >= 7) & (tokens < 15)).unsqueeze(-1))


@for_each(dtype=DTYPES, h=COLUMNS)
def test_embedding_backward(every_target, h, dtype):
    tokens = some_tokens()
    dout = random(37, 3, h, dtype=dtype)
    grad = torch.ones(8, h)
    kernels.embedding_backward(tokens, dout, grad, first_row=7)
    want = torch.zeros(23, h).index_add_(0, tokens.flatten(), dout.float().flatten(0, 1))[7:15] + 1
    assert_close(grad, want, rtol=1e-5, atol=1e-5)


@for_each(dtype=DTYPES, h=COLUMNS)
def test_position(every_target, h, dtype):
    x = random(37, 3, h, dtype=dtype)
    table = random(40, h, dtype=dtype, seed=1)
    out = torch.empty_like(x)
    grad = torch.ones(40, h)
    kernels.add_position(x, table, out)
    assert torch.equal(out, x + table[:37].unsqueeze(1))
    kernels.add_position_backward(x, grad)
    assert_close(grad[:37], x.float().sum(1) + 1, rtol=1e-5, atol=1e-5)
    assert (grad[37:] == 1).all()


def test_no_tokens_and_no_positions(every_target):
    tokens = torch.empty(0, 3, dtype=torch.int64)
    table = torch.ones(5, 16)
    kernels.embedding(tokens, table, torch.empty(0, 3, 16), vocabulary=5)
    kernels.embedding_backward(tokens, torch.empty(0, 3, 16), table)
    kernels.add_position(torch.empty(0, 3, 16), table, torch.empty(0, 3, 16))
    kernels.add_position_backward(torch.empty(4, 0, 16), table)
    assert (table == 1).all()


def test_same_bits_for_any_number_of_threads(every_target, same_for_any_threads):
    tokens = some_tokens(300, 4)
    dout = random(300, 4, 331)

    def both():
        grad = torch.zeros(23, 331)
        positions = torch.zeros(300, 331)
        kernels.embedding_backward(tokens, dout, grad)
        kernels.add_position_backward(dout, positions)
        return grad, positions

    same_for_any_threads(both)


def test_wrong_arguments_leave_everything_untouched():
    tokens = torch.tensor([[0, 9]])
    table = torch.ones(5, 8)
    out = torch.ones(1, 2, 8)
    refuses(
        kernels.embedding,
        (tokens, table, out),
        {
            "tokens: expected words from 0 to 8, got 9 at 1": {"vocabulary": 9},
            "out: expected a row of 8 for each of 2 tokens": out[:, :1].contiguous(),
        },
    )
    refuses(
        kernels.embedding_backward,
        (tokens, out, table),
        {"dtable: expected dtype float32": table.half()},
    )
    long = torch.ones(6, 1, 8)
    refuses(
        kernels.add_position,
        (long, torch.ones(6, 8), long.clone()),
        {"table: expected at least 6 rows of 8": table},
    )
