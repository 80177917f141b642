"""The choice of a token: likeliest, among the best k, among those that make up p; and what a seed fixes."""

from __future__ import annotations

import torch

from fugaku_megatron.inference.sampling import Sampling

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.9])
LIKELY = torch.softmax(LOGITS, 0)


def picked(temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0, times: int = 400) -> list[int]:
    sampling = Sampling(temperature, top_k, top_p, seed=0)
    chance = sampling.chance(0)
    return [sampling.pick(LOGITS, chance) for _ in range(times)]


def test_the_likeliest():
    assert set(picked(temperature=0.0, top_k=4)) == {1} == set(picked(temperature=1e-6)) == set(picked(top_k=1))
    assert Sampling(0.0, 0, 0.0, 0).pick(torch.tensor([1.0, 2.0, 2.0]), None) == 1, "the first of several"


def test_all_tokens_by_their_probability():
    tokens = picked(times=4000)
    for token, probability in enumerate(LIKELY):
        assert abs(tokens.count(token) / 4000 - probability) < 0.03
    colder = picked(temperature=0.5, times=4000)
    assert abs(colder.count(1) / 4000 - torch.softmax(LOGITS / 0.5, 0)[1]) < 0.03


def test_the_best_k():
    tokens = picked(top_k=2)
    assert set(tokens) == {1, 3}
    assert abs(tokens.count(1) / 400 - 1 / (1 + torch.tensor(-0.1).exp())) < 0.1


def test_the_fewest_that_reach_p():
    most = float(LIKELY[1])
    assert set(picked(top_p=most - 0.01)) == {1}
    assert set(picked(top_p=most + 0.01)) == {1, 3}
    assert set(picked(top_p=0.999)) == {0, 1, 2, 3}
    assert set(picked(top_p=most + 0.01, top_k=1)) == {1}, "both hold"


def test_a_seed_fixes_every_sample_apart():
    sampling = Sampling(1.0, 0, 0.0, seed=5)
    draws = [torch.rand(8, generator=sampling.chance(sample)).tolist() for sample in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]
