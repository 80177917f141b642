"""Greedy continuations of transformers, token by token: prompts of unequal lengths, on one rank and on several."""

from __future__ import annotations

import zlib

import pytest
import torch

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.inference import generation
from fugaku_megatron.inference.generation import steps
from fugaku_megatron.inference.loading import LoadedModel, load_model, operations
from fugaku_megatron.inference.sampling import Sampling
from tests.helpers import grid_groups, make_trainer, small_run
from tests.llama_models import FAMILIES, copy_to, theirs
from tests.parallel.test_generate import LEARNS, save_trained
from tests.threads import ThreadWorld
from tests.unit.test_model import to_theirs

NEW = 200
WIDE = {"num_layers": 3, "max_position_embeddings": 224, "init_method_std": 0.2, "micro_batch_size": 2, "global_batch_size": 2}
PROMPTS = [list(text.encode()) for text in ("a", "to be or not", "qu", "the question is whe")]
SHORT = [[5], [3, 80, 21, 7, 7, 64, 90, 12, 33], [17, 2], [9, 8, 7, 6, 5, 4]]  # of a vocabulary of 96
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=0.0, seed=0)


def their_model(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """transformers' GPT-2 with our weights of the WIDE model."""
    transformers = pytest.importorskip("transformers")
    model = small_run(**{**LEARNS, **WIDE}).model
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=model.vocab_size, n_positions=model.max_position_embeddings, n_embd=model.hidden_size,
        n_layer=model.num_layers, n_head=model.num_attention_heads)).eval()
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if name != "lm_head.weight":  # tied
                tensor.copy_(to_theirs(name, weights, model)[: len(tensor)])
    return theirs


def their_tokens(weights: dict[str, torch.Tensor]) -> list[list[int]]:
    """Greedy continuations of PROMPTS by transformers, one prompt at a time."""
    theirs = their_model(weights)
    flags = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    return [theirs.generate(torch.tensor([prompt]), **flags)[0, len(prompt):].tolist() for prompt in PROMPTS]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(directory of a checkpoint, transformers' continuations with its weights)."""
    directory = tmp_path_factory.mktemp("wide")
    return directory, their_tokens(save_trained(SoloComm(), directory, 3, **WIDE))


def our_tokens(world, directory, sizes: tuple[int, int], prompts=PROMPTS, ends: dict[int, int] | None = None) -> list[list[int]]:
    """ends: samples that are finished after so many tokens."""
    manifest = read_manifest(directory, 3)
    loaded = load_model(saved_run(manifest, sizes), world, str(directory), 3, manifest)
    *_, ids = steps(loaded, prompts, NEW, GREEDY, lambda sample, ids: len(ids) == (ends or {}).get(sample))
    return ids


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
def test_greedy_tokens_are_those_of_transformers(pair, sizes):
    directory, expected = pair
    ranks = sizes[0] * sizes[1]
    assert ThreadWorld(ranks).run(lambda world: our_tokens(world, directory, sizes)) == [expected] * ranks
    assert len({tuple(ids) for ids in expected}) == len(PROMPTS), "prompts make a difference"


def random_model(world, family: str, tp: int, pp: int, **changes) -> LoadedModel:
    """A model of the family, or of GPT-2, whose weights, those of norms and biases as well, do not depend on the layout."""
    values = {**FAMILIES.get(family, {}), "init_method_std": 0.3, **changes}
    run = small_run(**values, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    trainer = make_trainer(world, run, operations(run.model))
    for p in trainer.optimizer.flat.parameters:
        noise = torch.randn(p.spec.shape, generator=torch.Generator().manual_seed(zlib.crc32(p.spec.init_name.encode())))
        p.data.add_(0.1 * noise[tuple(slice(o, o + n) for o, n in zip(p.spec.offset, p.shape))])
    trainer.close()
    return LoadedModel(run, grid_groups(world, run), trainer.stage)


def family_tokens(world, family: str, tp: int, pp: int, count: int) -> list[list[int]]:
    *_, ids = steps(random_model(world, family, tp, pp), SHORT, count, GREEDY, lambda sample, ids: False)
    return ids


def likeliest(family: str, ids: list[list[int]]) -> list[list[int]]:
    """What transformers takes for the likeliest token after each prefix of SHORT with `ids`, in one forward of a sequence."""
    pytest.importorskip("transformers")
    model, trained = theirs(family), random_model(SoloComm(), family, 1, 1)
    copy_to(model, {p.spec.name: p.data for p in trained.stage.parameters()}, family)
    with torch.no_grad():
        return [model(torch.tensor([prompt + own])).logits[0, len(prompt) - 1: -1].argmax(-1).tolist()
                for prompt, own in zip(SHORT, ids, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_families_that_people_train(family):
    """Each token is the likeliest for transformers after those before it, so the text is the one that it would write."""
    ids = family_tokens(SoloComm(), family, 1, 1, NEW)
    assert ids == likeliest(family, ids) and len({tuple(own) for own in ids}) == len(SHORT)
    for tp, pp in ((2, 1), (1, 2)):
        shared = ThreadWorld(2).run(lambda world, tp=tp, pp=pp: family_tokens(world, family, tp, pp, NEW))
        assert shared == [ids] * 2


def test_finished_samples_are_computed_no_further(pair, monkeypatch):
    directory, expected = pair
    rows = []
    forward = generation.Decoder._forward
    monkeypatch.setattr(generation.Decoder, "_forward", lambda self, new: rows.append(len(new)) or forward(self, new))
    ids = our_tokens(SoloComm(), directory, (1, 1), ends={0: 5, 2: 1, 1: 3, 3: 7})
    assert ids == [expected[0][:5], expected[1][:3], expected[2][:1], expected[3][:7]]
    assert rows == [4, 3, 3, 2, 2, 1, 1]


def test_prompts_that_do_not_fit_into_one_forward(pair, monkeypatch):
    directory, expected = pair
    monkeypatch.setattr(generation, "PREFILL_ROWS", 14)
    assert our_tokens(SoloComm(), directory, (1, 1), ends=dict.fromkeys(range(4), 9)) == [ids[:9] for ids in expected]
