"""Routing to experts on every target: choice, scores and gradients, pairs in order, rows there and back."""

import math

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    assert_near,
    for_each,
    random,
    randoms,
    refuses,
    with_gradients,
)

pytestmark = pytest.mark.kernels

KINDS = ["softmax", "softmax_of_chosen", "sigmoid"]
SHAPES = [
    (0, 5, 2),
    (1, 1, 1),
    (3, 7, 3),
    (33, 16, 2),
    (17, 67, 8),
    (211, 128, 8),
    (5, 64, 64),
]  # tokens, experts, k
GROUPED = [
    (9, 12, 4, 3, 2),
    (33, 64, 8, 8, 4),
    (5, 256, 6, 16, 2),
    (7, 20, 2, 5, 2),
]  # and groups, of which so many are chosen


def best(x, count):
    """Return the columns with the largest values in each row, among equal ones the first."""
    return x.argsort(dim=-1, descending=True, stable=True)[:, :count]


def exact(logits, k, kind, bias=None, scaling=1.0, groups=0, group_topk=0):
    """Return (scores, chosen) for double logits."""
    scores = torch.sigmoid(logits) if kind == "sigmoid" else torch.softmax(logits, -1)
    wish = logits if kind == "softmax_of_chosen" else scores if bias is None else scores + bias
    if groups:
        grouped = wish.view(len(wish), groups, -1)
        totals = grouped.sort(-1, descending=True).values[..., : k // group_topk].sum(-1)
        open_groups = torch.zeros_like(totals).scatter_(1, best(totals, group_topk), 1).bool()
        wish = grouped.masked_fill(~open_groups[..., None], -math.inf).flatten(1)
    chosen = best(wish.detach(), k)
    own = scores.gather(1, chosen)
    if kind == "softmax_of_chosen":
        own = torch.softmax(logits.gather(1, chosen), -1)
    elif kind == "sigmoid" and k > 1:
        own = own / (own.sum(-1, keepdim=True) + 1e-20)
    return own * scaling, chosen


def route(logits, k, kind, bias=None, **options):
    scores = torch.empty(len(logits), k)
    chosen = torch.empty(len(logits), k, dtype=torch.int64)
    kernels.route(logits, bias, scores, chosen, kind, **options)
    return scores, chosen


def route_backward(dscores, logits, scores, chosen, kind, scaling=1.0):
    dlogits = torch.empty_like(logits)
    kept = scores if kind == "softmax_of_chosen" else logits
    kernels.route_backward(dscores, kept, chosen, dlogits, kind, scaling)
    return dlogits


def check_route(logits, k, kind, bias=None, **options):
    scores, chosen = route(logits, k, kind, bias, **options)
    bias = bias if bias is None else bias.double()
    assert torch.equal(chosen, exact(logits.double(), k, kind, bias, **options)[1])
    dscores = random(*scores.shape, seed=4)
    want, gradient = with_gradients(
        lambda x: exact(x, k, kind, bias, **options)[0], [logits], dscores
    )
    assert_close(scores.double(), want, rtol=2e-6, atol=1e-7)
    dlogits = route_backward(dscores, logits, scores, chosen, kind, options["scaling"])
    assert_close(dlogits.double(), gradient, rtol=1e-5, atol=2e-6)


@for_each(kind=[*KINDS, "biased sigmoid"], shape=[*SHAPES, *GROUPED], scaling=[1.0, 2.5])
def test_experts_scores_and_gradients(every_target, shape, kind, scaling):
    """Also of the best groups."""
    rows, experts, k, *groups = shape
    options = dict(zip(("groups", "group_topk"), groups, strict=False), scaling=scaling)
    spread = 1 if groups else 3
    bias = random(experts, seed=2) if kind == "biased sigmoid" else None
    check_route(random(rows, experts) * spread, k, kind.split()[-1], bias, **options)


@for_each(kind=KINDS, groups=[0, 3])
def test_of_equal_numbers_the_first_comes_first(every_target, kind, groups):
    """Also -0 and 0, infinite ones, and groups; NaN counts as infinity and leaves a valid choice."""
    options = {"groups": groups, "group_topk": min(groups, 2)}
    logits = random(40, 33).mul_(2).round_().div_(2)
    logits[5] = 0.0
    logits[6, ::2] = -0.0
    logits[7, 3:] = -math.inf
    if not groups:
        assert torch.equal(route(logits, 6, kind)[1], best(logits, 6))
    assert route(torch.zeros(2, 33), 6, kind, **options)[1].tolist() == [list(range(6))] * 2
    odd = torch.full((3, 33), math.nan)
    odd[1, :30] = 1.0
    odd[2, 4] = math.inf
    scores, chosen = route(odd, 6, kind, **options)
    assert all(len(set(row)) == 6 and set(row) <= set(range(33)) for row in chosen.tolist())
    assert scores[0].isnan().all() and (groups or chosen[1].tolist() == [30, 31, 32, 0, 1, 2])


# Pairs ----------------------------------------------------------------------------------------------------------------------------


def sorted_pairs(chosen, experts):
    counts = torch.empty(experts, dtype=torch.int64)
    pairs = torch.full((chosen.numel(),), -1)
    places = torch.empty_like(chosen)
    kernels.sort_pairs(chosen, counts, pairs, places)
    return counts, pairs, places


@for_each(
    shape=[(0, 2), (1, 1), (37, 3), (1000, 1), (2049, 8)], experts=[1, 5, 128], drop=[False, True]
)
def test_pairs_in_the_order_of_experts(every_target, shape, experts, drop):
    """Some experts have no pair, and a single expert has up to 16,392."""
    chosen = torch.randint(experts, shape, generator=torch.Generator().manual_seed(3)) // 3 * 3
    chosen = chosen.masked_fill(random(*shape) > 1, experts) if drop else chosen
    counts, pairs, places = sorted_pairs(chosen, experts)
    flat = chosen.flatten()
    n = int((flat < experts).sum())
    assert torch.equal(counts, flat.bincount(minlength=experts)[:experts])
    assert torch.equal(pairs[:n], flat.argsort(stable=True)[:n]) and (pairs[n:] == -1).all()
    want = torch.full_like(flat, n)
    want[pairs[:n]] = torch.arange(n)
    assert torch.equal(places.flatten(), want)


def permute(x, pairs, k, make=torch.empty):
    out = make((len(pairs), x.shape[1]), dtype=x.dtype)
    kernels.permute(x, pairs, out, k)
    return out


def unpermute(x, places, make=torch.empty):
    out = make((len(places), x.shape[1]), dtype=x.dtype)
    kernels.unpermute(x, places, out)
    return out


@for_each(dtype=DTYPES, cols=[1, 15, 16, 67, 131, 768], k=[1, 3])
def test_rows_in_the_order_of_experts_and_back(every_target, guarded, cols, dtype, k):
    x = random(37, cols, dtype=dtype)
    chosen = torch.randint(6, (37, k), generator=torch.Generator().manual_seed(3))
    counts, pairs, places = sorted_pairs(chosen, 5)  # the pairs of expert 5 are dropped
    pairs = pairs[: counts.sum()]
    there = permute(x, pairs, k, guarded)
    assert torch.equal(there, x[pairs // k])
    there.copy_(random(len(pairs), cols, dtype=dtype, seed=6))
    back = unpermute(there, places, guarded)
    table = torch.cat((there.double(), torch.zeros(1, cols, dtype=torch.float64)))
    assert_near(back, table[places].sum(1), dtype)
    if k == 1:
        assert torch.equal(back, table[places].sum(1).to(dtype))


def test_same_bits_for_any_number_of_threads(every_target, same_for_any_threads):
    logits, dscores = randoms((700, 67), (700, 4))
    x = random(700, 131, dtype=torch.bfloat16)
    chosen = torch.randint(9, (5000, 4), generator=torch.Generator().manual_seed(3))

    def everything():
        results = []
        for kind in KINDS:
            scores, numbers = route(logits, 4, kind, scaling=1.7)
            dlogits = route_backward(dscores, logits, scores, numbers, kind, 1.7)
            results += [scores, numbers, dlogits]
        counts, pairs, places = sorted_pairs(numbers, 67)
        there = permute(x, pairs, 4)
        results += [counts, pairs, places, there, unpermute(there, places)]
        return (*results, *sorted_pairs(chosen, 8)[::2])

    same_for_any_threads(everything)


def test_wrong_arguments_leave_everything_untouched():
    logits = torch.ones(4, 6)
    scores = torch.ones(4, 2)
    chosen = torch.ones(4, 2, dtype=torch.int64)
    x = torch.ones(4, 8)
    counts = torch.ones(2, dtype=torch.int64)
    pairs = torch.ones(8, dtype=torch.int64)
    many = torch.ones(8, 8)
    refuses(
        kernels.route,
        (logits, None, scores, chosen),
        {
            "kind: expected one of softmax, softmax_of_chosen, sigmoid": "tanh",
            "logits: expected dtype float32, got float64": logits.double(),
            "scores: expected 1 to 1 columns, got 2": {"logits": logits[:, :1].contiguous()},
            "bias: expected none but of sigmoid, got one of softmax_of_": logits[0],
            "groups: expected a divisor of 6 experts": {"groups": 4, "group_topk": 2},
            "best 1 have 2 in equal parts, got 6": {"groups": 6, "group_topk": 1},
        },
    )
    refuses(
        kernels.route_backward,
        (scores, scores, chosen, logits),
        {
            r"kept: expected shape \(4, 2\)": logits + 1,
            "chosen: expected numbers from 0 to 5, got 6 at 0": chosen * 6,
        },
    )
    refuses(
        kernels.sort_pairs,
        (chosen, counts, pairs, chosen.clone()),
        {
            "chosen: expected numbers from 0 to 2, got 3 at 0": chosen * 3,
            "places: expected memory apart from chosen": chosen,
        },
    )
    refuses(
        kernels.permute,
        (x, pairs, many, 2),
        {
            "pairs: expected numbers from 0 to 7, got 8 at 0": pairs * 8,
            "out: expected dtype float32 as x, got bfloat16": many.bfloat16(),
        },
    )
    refuses(
        kernels.unpermute,
        (many, chosen, x),
        {"places: expected numbers from 0 to 8, got 9 at 0": chosen * 9},
    )


@for_each(dtype=DTYPES[:2])
def test_no_rows(every_target, dtype):
    nothing = torch.empty(0, 8, dtype=dtype)
    assert permute(nothing, torch.empty(0, dtype=torch.int64), 2).shape == (0, 8)
    assert not unpermute(nothing, torch.zeros(3, 2, dtype=torch.int64)).any()
