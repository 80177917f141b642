"""Routing to experts on every target this CPU runs: choice, scores and gradients, the order of pairs, rows there and back."""

import math

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    assert_near,
    assert_refused,
    assert_slope,
    for_each,
    random,
)

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
    """Numbers of the largest in each row, of equal ones the first."""
    return x.argsort(dim=-1, descending=True, stable=True)[:, :count]


def exact(logits, k, kind, bias=None, scaling=1.0, groups=0, group_topk=0):
    """(scores, chosen) of double logits."""
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


def check_route(logits, k, kind, bias=None, **options):
    scores, chosen = route(logits, k, kind, bias, **options)
    leaf = logits.double().requires_grad_()
    want, numbers = exact(leaf, k, kind, bias if bias is None else bias.double(), **options)
    assert torch.equal(chosen, numbers)
    torch.testing.assert_close(scores.double(), want.detach(), rtol=2e-6, atol=1e-7)
    dscores = random(*scores.shape, seed=4)
    dlogits = torch.empty_like(logits)
    want.backward(dscores.double())
    kept = scores if kind == "softmax_of_chosen" else logits
    kernels.route_backward(dscores, kept, chosen, dlogits, kind, options.get("scaling", 1.0))
    torch.testing.assert_close(dlogits.double(), leaf.grad, rtol=1e-5, atol=2e-6)


@for_each(kind=KINDS, shape=SHAPES, scaling=[1.0, 2.5])
def test_experts_scores_and_gradients(every_target, shape, kind, scaling):
    rows, experts, k = shape
    check_route(random(rows, experts) * 3, k, kind, scaling=scaling)
    if kind == "sigmoid":
        check_route(random(rows, experts) * 3, k, kind, random(experts, seed=2), scaling=scaling)


@for_each(kind=KINDS, shape=GROUPED)
def test_experts_of_the_best_groups(every_target, shape, kind):
    rows, experts, k, groups, group_topk = shape
    options = {"groups": groups, "group_topk": group_topk, "scaling": 1.5}
    check_route(random(rows, experts), k, kind, **options)
    if kind == "sigmoid":
        check_route(random(rows, experts), k, kind, random(experts, seed=2), **options)


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


@for_each(kind=KINDS)
def test_route_backward_is_the_slope(every_target, kind):
    logits = 2 * random(5, 19)
    dscores = random(5, 4, seed=1)
    dlogits = torch.empty(5, 19)
    scores, chosen = route(logits, 4, kind)
    kernels.route_backward(
        dscores, scores if kind == "softmax_of_chosen" else logits, chosen, dlogits, kind
    )
    with torch.no_grad():
        gaps = (
            logits.sort(-1, descending=True).values[:, 3]
            - logits.sort(-1, descending=True).values[:, 4]
        )
    assert gaps.min() > 0.02, "no other expert is chosen nearby"
    assert_slope(
        lambda: (route(logits, 4, kind)[0].double() * dscores.double()).sum(), [logits], [dlogits]
    )


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
    """Some experts have no pair, and where one has all it may have 1,000."""
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


@for_each(dtype=DTYPES, cols=[1, 15, 16, 67, 131, 768], k=[1, 3])
def test_rows_in_the_order_of_experts_and_back(every_target, guarded, cols, dtype, k):
    x = random(37, cols, dtype=dtype)
    chosen = torch.randint(6, (37, k), generator=torch.Generator().manual_seed(3))
    counts, pairs, places = sorted_pairs(
        chosen.clamp(max=5), 5
    )  # the pairs of expert 5 are dropped
    pairs = pairs[: counts.sum()]
    there = guarded((len(pairs), cols), dtype)
    back = guarded((37, cols), dtype)
    kernels.permute(x, pairs, there, k)
    assert torch.equal(there, x[pairs // k])
    there.copy_(random(len(pairs), cols, dtype=dtype, seed=6))
    kernels.unpermute(there, places, back)
    table = torch.cat((there.double(), torch.zeros(1, cols, dtype=torch.float64)))
    assert_near(back, table[places].sum(1), dtype)
    if k == 1:
        assert torch.equal(back, table[places].sum(1).to(dtype))


def test_same_bits_for_any_number_of_threads(every_target, same_for_any_threads):
    logits = random(700, 67)
    dscores = random(700, 4, seed=1)
    x = random(700, 131, dtype=torch.bfloat16)
    chosen = torch.randint(9, (5000, 4), generator=torch.Generator().manual_seed(3))

    def everything():
        results = []
        for kind in KINDS:
            scores, numbers = route(logits, 4, kind, scaling=1.7)
            dlogits = torch.empty_like(logits)
            kernels.route_backward(
                dscores,
                scores if kind == "softmax_of_chosen" else logits,
                numbers,
                dlogits,
                kind,
                1.7,
            )
            results += [scores, numbers, dlogits]
        counts, pairs, places = sorted_pairs(numbers, 67)
        there = x.new_empty(len(pairs), 131)
        back = torch.empty_like(x)
        kernels.permute(x, pairs, there, 4)
        kernels.unpermute(there, places, back)
        return (*results, counts, pairs, places, there, back, *sorted_pairs(chosen, 8)[::2])

    same_for_any_threads(everything)


def test_wrong_arguments_leave_everything_untouched():
    logits = torch.ones(4, 6)
    scores = torch.ones(4, 2)
    chosen = torch.ones(4, 2, dtype=torch.int64)
    x = torch.ones(4, 8)
    counts = torch.ones(2, dtype=torch.int64)
    pairs = torch.ones(8, dtype=torch.int64)
    many = torch.ones(8, 8)
    assert_refused(
        [
            (
                lambda: kernels.route(logits, None, scores, chosen, "tanh"),
                "kind: expected one of softmax, softmax_of_chosen, sigmoid",
            ),
            (
                lambda: kernels.route(logits.double(), None, scores, chosen),
                "logits: expected dtype float32, got float64",
            ),
            (
                lambda: kernels.route(logits[:, :1].contiguous(), None, scores, chosen),
                "scores: expected 1 to 1 columns, got 2",
            ),
            (
                lambda: kernels.route(logits, logits[0], scores, chosen),
                "bias: expected none but of sigmoid, got one of softmax_of_",
            ),
            (
                lambda: kernels.route(logits, None, scores, chosen, groups=4, group_topk=2),
                "groups: expected a divisor of 6 experts",
            ),
            (
                lambda: kernels.route(logits, None, scores, chosen, groups=6, group_topk=1),
                "best 1 have 2 in equal parts, got 6",
            ),
            (
                lambda: kernels.route_backward(scores, logits, chosen, logits.clone()),
                r"kept: expected shape \(4, 2\)",
            ),
            (
                lambda: kernels.route_backward(scores, scores, chosen * 6, logits),
                "chosen: expected numbers from 0 to 5, got 6 at 0",
            ),
            (
                lambda: kernels.sort_pairs(chosen * 3, counts, pairs, chosen.clone()),
                "chosen: expected numbers from 0 to 2, got 3 at 0",
            ),
            (
                lambda: kernels.sort_pairs(chosen, counts, pairs, chosen),
                "places: expected memory apart from chosen",
            ),
            (
                lambda: kernels.permute(x, pairs * 8, many, 2),
                "pairs: expected numbers from 0 to 7, got 8 at 0",
            ),
            (
                lambda: kernels.permute(x, pairs, many.bfloat16(), 2),
                "out: expected dtype float32 as x, got bfloat16",
            ),
            (
                lambda: kernels.unpermute(many, chosen * 9, x),
                "places: expected numbers from 0 to 8, got 9 at 0",
            ),
        ],
        untouched=(logits, scores, chosen, x, counts, pairs, many),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows(every_target, dtype):
    nothing = torch.empty(0, 8, dtype=dtype)
    none = torch.empty(0, dtype=torch.int64)
    kernels.permute(nothing, none, nothing.clone(), 2)
    out = torch.ones(3, 8, dtype=dtype)
    kernels.unpermute(nothing, torch.zeros(3, 2, dtype=torch.int64), out)
    assert not out.any()
