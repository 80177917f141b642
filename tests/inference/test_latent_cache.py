"""Generation of latent attention from a cache of latents: texts of transformers, logits of whole sequences, and memory."""

import functools

import pytest
import torch

from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.costs.attention import AttentionCosts
from fugaku_megatron.costs.linear_layers import q8_inference_savings
from fugaku_megatron.costs.mixers import cache_bytes
from fugaku_megatron.costs.stages import stage_parameters
from fugaku_megatron.inference.generate import describe
from fugaku_megatron.inference.generation import Decoder
from fugaku_megatron.inference.loading import LoadedModel, _empty_model, operations, quantize
from fugaku_megatron.nn.attention.kv_cache import LayerCache
from fugaku_megatron.nn.attention.multi_latent_attention import MultiLatentAttention
from fugaku_megatron.nn.parameter import scales_of
from tests.checks.generation import random_model, tokens_of
from tests.helpers import grid_groups, make_trainer, small_run
from tests.llama_models import DELTA_NETS, LATENT
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

PROMPTS = [[5], [3, 80, 21, 7, 7, 64, 90, 12, 33], [17, 2], [9, 8, 7, 6, 5, 4]]
NEW = 24
CASES = ("deepseek_v3", "deepseek_v2_lite", "minicpm3")
# The sizes of DeepSeek-V3's attention.
V3 = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "num_layers": 2,
    "bf16": True,
}


@functools.cache
def expected(name: str) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Return the weights of a model of transformers in our form, and its greedy continuations of PROMPTS."""
    pytest.importorskip("transformers")
    from tests.checks.latent_attention import in_our_form, theirs

    model = theirs(name)
    flags = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
    texts = [
        model.generate(torch.tensor([prompt]), **flags, eos_token_id=None)[0, len(prompt) :]
        for prompt in PROMPTS
    ]
    weights = {each: parameter.detach() for each, parameter in model.named_parameters()}
    return in_our_form(name, weights), [text.tolist() for text in texts]


def loaded(world: Comm, name: str, tp: int, pp: int) -> LoadedModel:
    """Return our model with the weights of transformers."""
    from tests.checks.latent_attention import flags

    weights, _ = expected(name)
    run = small_run(**flags(name), tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    trainer = make_trainer(world, run, operations(run.model))
    for parameter in trainer.optimizer.flat.parameters:
        spec = parameter.spec
        own = zip(spec.offset, parameter.shape, strict=True)
        parameter.data.copy_(weights[spec.name][tuple(slice(o, o + n) for o, n in own)])
    trainer.close()
    return LoadedModel(run, grid_groups(world, run), trainer.stage)


@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_transformers(name):
    _, texts = expected(name)
    assert tokens_of(loaded(SoloComm(), name, 1, 1), PROMPTS, NEW) == texts
    for tp, pp in ((2, 1), (1, 2)):
        found = ThreadWorld(2).run(
            lambda world, tp=tp, pp=pp: tokens_of(loaded(world, name, tp, pp), PROMPTS, NEW)
        )
        assert found == [texts, texts]
    assert len({tuple(text) for text in texts}) == len(PROMPTS)


def logits(model: LoadedModel, pieces: list[list[list[int]]]) -> torch.Tensor:
    """Return the last logits of samples whose tokens are appended in pieces, one list of tokens a sample."""
    decoder = Decoder(model, [sum(map(len, own)) for own in zip(*pieces, strict=True)])
    last = None
    for piece in pieces:
        tokens = torch.tensor([token for own in piece for token in own])
        last = decoder.logits(torch.arange(len(piece)), [len(own) for own in piece], tokens)
    assert last is not None
    return last


# Two samples, as a prompt each, token by token after prompts of different lengths, and in parts.
TOKENS = ([5, 61, 20, 33, 9, 48, 2, 77, 30, 11], [3, 80, 21, 7, 7, 64, 90, 12, 33, 50])


def slices(*ends: tuple[int, int]) -> list[list[list[int]]]:
    """Cut TOKENS at `ends` of both samples."""
    begins = ((0, 0), *ends)
    return [
        [own[a:b] for own, a, b in zip(TOKENS, begin, end, strict=True)]
        for begin, end in zip(begins, ends, strict=False)
    ]


WHOLE = slices((10, 10))
ONE_BY_ONE = slices((4, 2), (5, 5), *((end, end) for end in range(6, 11)))
IN_PARTS = slices((3, 3), (6, 5), (9, 9), (10, 10))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_size": "3,0"},
        {"qk_layernorm": False, "q_lora_rank": None},
        {"kv_lora_rank": 18},
        {"v_head_dim": 6, "kernels": "torch"},
        {"attn_logit_softcapping": 2.0},
        {"softmax_type": "learnable"},
        {"lora_rank": 4},
        {"no_rope_freq": "2"},
    ],
    ids=str,
)
def test_logits_are_those_of_whole_sequences(changes):
    """The projections are absorbed for single tokens only, and a prefill may begin with a filled cache."""
    model = random_model(SoloComm(), "gpt", 1, 1, **{**LATENT, **changes})
    whole = logits(model, WHOLE)
    for pieces in (ONE_BY_ONE, IN_PARTS):
        torch.testing.assert_close(logits(model, pieces), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {}),
        ("qwen3", {}),
        ("llama", {"attn_logit_softcapping": 2.0}),
        ("llama", {"softmax_type": "learnable"}),
        ("qwen3", DELTA_NETS),
    ],
)
def test_parts_of_prompts_with_other_mixers(family, changes):
    model = random_model(SoloComm(), family, 1, 1, **changes)
    whole = logits(model, WHOLE)
    for pieces in (ONE_BY_ONE, IN_PARTS):
        torch.testing.assert_close(logits(model, pieces), whole, rtol=1e-5, atol=1e-5)


def test_single_tokens_are_absorbed(monkeypatch):
    """No key and no value of a head is computed when a token is appended, unless an adapter is not merged."""
    counts = []
    widened = MultiLatentAttention._prefill_latents
    monkeypatch.setattr(
        MultiLatentAttention,
        "_prefill_latents",
        lambda self, *args: counts.append(1) or widened(self, *args),
    )
    for changes, later in (({}, 0), ({"lora_rank": 4}, 5)):
        model = random_model(SoloComm(), "gpt", 1, 1, **LATENT, **changes)
        layers = model.run.model.num_layers
        counts.clear()
        logits(model, ONE_BY_ONE)
        assert len(counts) == (2 + later) * layers


def test_merged_adapters_are_absorbed():
    model = random_model(SoloComm(), "gpt", 1, 1, **LATENT, lora_rank=4)
    unmerged = logits(model, WHOLE)
    for module in [*model.stage.modules()]:
        if (adapter := getattr(module, "adapter", None)) is not None:
            module.weight.data.copy_(adapter.merged(module.weight.data))
            module.adapter = None
    merged = logits(model, ONE_BY_ONE)
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_formats(precision):
    exact = logits(random_model(SoloComm(), "gpt", 1, 1, **LATENT), WHOLE)
    model = random_model(SoloComm(), "gpt", 1, 1, **LATENT, **{precision: True})
    for pieces in (WHOLE, ONE_BY_ONE):
        assert (logits(model, pieces) - exact).norm() < 0.05 * exact.norm(), pieces


def test_weights_in_eight_bits():
    """Decoding reads the quantized projections, as many bytes as planned, and its logits do not depend on the batch."""
    model = random_model(SoloComm(), "gpt", 1, 1, **LATENT)
    exact = logits(model, WHOLE)
    quantize(model.stage)
    stored = [*model.stage.parameters()]
    stored += [scales for p in stored if (scales := scales_of(p)) is not None]
    planned = stage_parameters(model.run, 0) * 4 - q8_inference_savings(model.run, 0)
    assert sum(tensor.nbytes for tensor in stored) == planned
    both = logits(model, ONE_BY_ONE)
    assert (both - exact).norm() < 0.1 * exact.norm()
    alone = logits(model, [[piece[1]] for piece in ONE_BY_ONE])
    torch.testing.assert_close(alone[0], both[1], rtol=1e-5, atol=1e-5)


def allocated(cache: LayerCache) -> int:
    """Return the bytes of the memory under a cache's tensors."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in (cache.keys, cache.values)
    }
    return sum(storages.values())


def test_memory_of_the_sizes_of_deepseek_v3():
    """A token takes 576 numbers in each layer on every rank, where keys and values of 128 heads are 40,960."""
    positions = 16384
    run = small_run(**V3)
    decoder = Decoder(_empty_model(run, SoloComm()), [positions])
    kinds = run.model.layer_kinds
    kept = [allocated(cache) for cache in decoder.cache.values()]
    assert kept == [cache.keys.nbytes for cache in decoder.cache.values()]
    assert kept == [positions * 576 * 2] * 2
    assert sum(kept) == cache_bytes(run, 1, positions, kinds)
    assert 60 * kept[0] <= AttentionCosts().cache_bytes(run, 1, positions, kinds[0])
    for ranks in (1, 2):
        of_ranks = small_run(**V3, tensor_model_parallel_size=ranks)
        text = describe(of_ranks, [[1] * 16000], 384)
        assert "36.0 MiB of cache: 2 layers, 1 samples, 16384 positions" in text
