"""Muon: steps against plain torch in double precision, coefficients, shards and resumed runs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.optimizer import MUON_COEFFICIENTS
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.host import kernels
from fugaku_megatron.optim.muon import COEFFICIENTS, orthogonalized
from tests.checks.training import trained
from tests.helpers import (
    make_trainer,
    plain_loss,
    run_layout,
    small_run,
    whole_tensors,
)
from tests.llama_models import DELTA_NETS

pytestmark = pytest.mark.parallel


MUON = {
    "optimizer": "muon",
    "muon_extra_scale_factor": 0.2,
    "weight_decay": 0.1,
    "clip_grad": 0.5,
    "lr": 2e-3,
}
GROUPED = {
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "disable_bias_linear": True,
}


def plain_orthogonal(x, steps):
    """Run the Newton-Schulz iteration as in the sources named in optim/muon.py."""
    coefficients = [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ]
    if x.shape[0] > x.shape[1]:
        return plain_orthogonal(x.T, steps).T
    x = x / x.norm()
    for a, b, c in itertools.islice(itertools.cycle(coefficients), steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def plain_matrices(name, update, model, split):
    """Return the rows (n,) of each matrix in a global weight: queries, gates if there are any, keys and values."""
    if "linear_qkv" not in name or not split:
        return [torch.arange(len(update))]
    heads = model.num_attention_heads // model.query_groups
    parts = [heads, *([heads] if model.attention_output_gate else []), 1, 1]
    of_head = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts))
    part = of_head[torch.arange(len(update)) // model.kv_channels % len(of_head)]
    return [(part == i).nonzero()[:, 0] for i in range(len(parts))]


class PlainMuon:
    """One process in double: Muon for the layers' matrices, torch's AdamW for the rest. weights: global, by name."""

    def __init__(self, weights, run):
        self.run = run
        self.weights = {name: weight.double().requires_grad_() for name, weight in weights.items()}
        self.momentum = {
            name: torch.zeros_like(w)
            for name, w in self.weights.items()
            if w.dim() > 1
            and name.startswith("decoder.")
            and not name.endswith((".bias", ".conv1d.weight"))
        }
        groups = [
            {
                "params": [w],
                "weight_decay": run.optimizer.weight_decay
                * (w.dim() > 1 and not name.endswith(".bias")),
            }
            for name, w in self.weights.items()
            if name not in self.momentum
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=run.optimizer.lr, betas=(0.9, 0.999), eps=run.optimizer.adam_eps
        )

    def step(self):
        o = self.run.optimizer
        torch.nn.utils.clip_grad_norm_(self.weights.values(), o.clip_grad)
        self.adamw.step()
        for name, momentum in self.momentum.items():
            weight = self.weights[name].data
            grad = self.weights[name].grad
            momentum.lerp_(grad, 1 - o.muon_momentum)
            update = grad.lerp(momentum, o.muon_momentum) if o.muon_nesterov else momentum
            weight.mul_(1 - o.lr * o.weight_decay)
            rows_of = weight.view(-1, weight.shape[-1])
            update = update.reshape(-1, weight.shape[-1])
            for rows in plain_matrices(name, update, self.run.model, not o.muon_no_split_qkv):
                scale = math.sqrt(max(len(rows), update.shape[1])) * o.muon_extra_scale_factor
                rows_of[rows] -= o.lr * scale * plain_orthogonal(update[rows], o.muon_num_ns_steps)


def test_muon_steps_equal_plain_torch_in_a_split_layout():
    changes = {**MUON, "lr_decay_style": "constant", "global_batch_size": 8}
    trainer = make_trainer(SoloComm(), small_run(**changes))
    plain = PlainMuon(whole_tensors(trainer, "weight"), trainer.run)
    expected = []
    for step in range(16):
        tokens = torch.from_numpy(fetch(trainer.train, range(8 * step, 8 * step + 8)))
        plain.adamw.zero_grad()
        for name in plain.momentum:
            plain.weights[name].grad = None
        loss = plain_loss(plain.weights, tokens[:-1], tokens[1:], trainer.run.model)
        loss.backward()
        plain.step()
        expected.append(loss.item())
    for losses, _ in run_layout("tp2 pp2 dp2 zero", trained, changes, None, None, 16):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        GROUPED,
        {**GROUPED, "muon_no_split_qkv": True, "muon_nesterov": True, "muon_num_ns_steps": 3},
        {"muon_nesterov": True},
        DELTA_NETS,
    ],
    ids=["grouped", "nesterov", "gpt", "gated delta nets"],
)
def test_muon_steps_of_each_layout(changes):
    """Compare with plain Muon, with each step's gradients."""
    changes = {**MUON, **changes, "lr_decay_style": "constant"}

    def steps(world, run):
        trainer = make_trainer(world, run)
        plain = PlainMuon(whole_tensors(trainer, "weight"), run)
        for _ in range(3):
            trainer.train_step()
            for name, grad in whole_tensors(trainer, "grad").items():
                plain.weights[name].grad = grad.double()
            plain.step()
            weights = whole_tensors(trainer, "weight")
            torch.testing.assert_close(
                weights, plain.weights, rtol=1e-5, atol=1e-5, check_dtype=False
            )
        trainer.close()

    for layout in ("", "tp2"):
        run_layout(layout, steps, changes)


@pytest.mark.parametrize("steps", [1, 3, 5, 6, 10, 15])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_coefficients_begin_again_after_the_last_step(steps, shape):
    """Cycle through the coefficients as Megatron-LM's library; whole cycles bring singular values near 1."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    got = orthogonalized(matrix, COEFFICIENTS["quintic"], steps, kernels).double()
    torch.testing.assert_close(got, plain_orthogonal(matrix.double(), steps), rtol=0, atol=2e-5)
    if steps % 5 == 0:
        values = torch.linalg.svdvals(got)
        assert 0.9 < values.min() and values.max() < 1.1


def test_numbers_of_coefficients_are_those_of_the_config():
    assert MUON_COEFFICIENTS == {name: len(rows) for name, rows in COEFFICIENTS.items()}


def test_a_cycle_of_one_row_of_coefficients_ends_after_any_step():
    small_run(**MUON, muon_num_ns_steps=6, muon_coefficient_type="simple")


def test_muon_on_data_parallel_ranks_has_the_bits_of_replicas():
    """Gradients are not clipped, because shards add the squares of the norm in another order."""
    changes = {**MUON, "clip_grad": 0.0}
    replicas, shards = (
        run_layout(f"dp4 bf16 ddp_bucket_size=1 {zero}", trained, changes, None, None, 4)[0]
        for zero in ("", "zero")
    )
    assert replicas[0] == shards[0]
    assert all(torch.equal(weight, shards[1][name]) for name, weight in replicas[1].items())


def test_a_muon_run_resumes_in_another_layout(tmp_path):
    run = small_run(**MUON)
    straight, _ = trained(SoloComm(), run, iterations=6)
    run_layout("tp2 pp2 dp2 zero", trained, MUON, None, tmp_path, 3)
    assert trained(SoloComm(), run, tmp_path, None, 3)[0] == pytest.approx(straight[3:], rel=1e-5)
    assert not any(
        key.startswith("exp_avg_sq/decoder") and key.endswith("linear_fc1.weight")
        for shard in make_trainer(SoloComm(), run).optimizer.checkpoint_shards()
        for key in [shard.key]
    )
