"""Latent attention against transformers' own modules in FP64: loss and every gradient, in layouts of ranks."""

import contextlib
import functools

import pytest
import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.config.run_config import RunConfig
from tests.checks.documents import RESETS
from tests.checks.layouts import random_tokens, texts
from tests.helpers import assert_near, make_trainer, parse_layout, small_run, whole_tensors
from tests.threads import ThreadWorld

pytest.importorskip("transformers")

from tests.checks.latent_attention import (  # noqa: E402
    CASES,
    expected_loss,
    flags,
    in_our_form,
    theirs,
)

pytestmark = pytest.mark.parallel

Tensors = dict[str, torch.Tensor]
SAMPLES = 4
LAYOUTS = {  # layout: with documents
    "": False,
    "torch": False,
    "tp2": False,
    "tp2 sequence selective": True,
    "tp2 sequence full": False,
    "pp2": True,
    "pp2 zb-h1": False,
    "cp2": True,
    "cp2 p2p": True,
    "cp2 allgather selective": False,
    "tp2 pp2 cp2 sequence": True,
    "selective recompute_modules=('mla_up_proj',)": False,
    "tp2 sequence selective recompute_modules=('core_attn','mla_up_proj')": True,
    "cp2 p2p selective recompute_modules=('mla_up_proj',)": False,
}


def run_of(name: str, layout: str) -> tuple[int, RunConfig]:
    ranks, options = parse_layout(layout)
    more = RESETS if LAYOUTS[layout] else {}
    return ranks, small_run(**{**flags(name), **more, **options})


@functools.cache
def reference(name: str, documents: bool) -> tuple[Tensors, float, Tensors]:
    """Return the weights, the loss of the first iteration, and its gradients, in our form."""
    model = theirs(name)
    _, run = run_of(name, "pp2" if documents else "")
    data = texts(run)[0] if documents else random_tokens(run)[0]
    samples = [data[index] for index in range(SAMPLES)]
    if documents:
        samples = [sample[0] for sample in samples]  # without the marks
    loss = expected_loss(model, samples, documents)
    loss.backward()
    weights = {each: parameter.detach() for each, parameter in model.named_parameters()}
    gradients = {each: parameter.grad for each, parameter in model.named_parameters()}
    return in_our_form(name, weights), loss.item(), in_our_form(name, gradients)


def first_iteration(world: Comm, run: RunConfig, weights: Tensors) -> tuple[float, Tensors]:
    """Return the loss of an iteration, and its gradients before the norm cuts them."""
    data = texts(run) if run.data.marked else random_tokens(run)
    with contextlib.closing(make_trainer(world, run, data=data)) as trainer:
        for parameter in trainer.optimizer.flat.parameters:
            spec = parameter.spec
            own = zip(spec.offset, parameter.shape, strict=True)
            parameter.data.copy_(weights[spec.name][tuple(slice(o, o + n) for o, n in own)])
        result = trainer.train_step()
        return result.loss, whole_tensors(trainer, "grad")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_transformers(name, layout):
    weights, loss, gradients = reference(name, LAYOUTS[layout])
    ranks, run = run_of(name, layout)
    for found_loss, found in ThreadWorld(ranks).run(first_iteration, run, weights):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert found.keys() == gradients.keys()
        assert_near(found, {each: x.float() for each, x in gradients.items()}, 1e-5)
