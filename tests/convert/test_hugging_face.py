"""Hugging Face models to checkpoints and back: the same bytes, the same logits, and clean failures."""

import copy
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.architecture import architecture
from fugaku_megatron.config.fields import as_tuples
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.convert.hugging_face.config_json import read_config
from fugaku_megatron.convert.hugging_face.conversion import open_hugging_face
from fugaku_megatron.convert.hugging_face.tensor_mapping import (
    in_their_shape,
    tensor_mappings,
)
from fugaku_megatron.inference.generation import Decoder
from fugaku_megatron.inference.loading import load_model
from fugaku_megatron.nn.forward_context import PackedDocuments, Pass
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.training import expert_counts
from tests.helpers import make_trainer, small_run

transformers = pytest.importorskip("transformers")

from tests.hf_models import (  # noqa: E402
    LENGTH,
    MODELS,
    RECENT,
    VOCABULARY,
    decoder,
    gradients,
    randomized,
    read_hf,
    same,
    tensors,
    write_hf,
)

pytestmark = pytest.mark.unit
from tests.checks.hugging_face import assert_same_logits, model_of_flags, without_files  # noqa: E402


@dataclass(frozen=True)
class Converted:
    """A Hugging Face model, its directory, the checkpoint made of it, and the directory made of that checkpoint."""

    model: torch.nn.Module
    theirs: Path
    ours: Path
    back: Path


@pytest.fixture(scope="module", params=list(MODELS))
def converted(request, tmp_path_factory) -> Converted:
    directory = tmp_path_factory.mktemp(request.param)
    theirs, ours, back = (directory / name for name in ("theirs", "ours", "back"))
    model = randomized(MODELS[request.param])
    model.save_pretrained(theirs, max_shard_size="60KB")
    (theirs / "tokenizer.json").write_text("{}")
    read_hf(theirs, ours)
    write_hf(ours, back, "--max-shard-size", "60KB")
    return Converted(model, theirs, ours, back)


def test_there_and_back_every_byte_is_the_same(converted):
    assert same(tensors(converted.theirs), tensors(converted.back))
    assert len(list(converted.back.glob("model-*-of-*.safetensors"))) > 2
    for file in ("config.json", "generation_config.json"):
        assert json.loads((converted.theirs / file).read_text()) == json.loads(
            (converted.back / file).read_text()
        )
    assert (
        (converted.back / "tokenizer.json").read_text()
        == "{}"
        == (converted.ours / "hugging_face/tokenizer.json").read_text()
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(converted.back)
    assert type(again) is type(converted.model) and same(
        again.state_dict(), converted.model.state_dict()
    )


def test_the_same_logits_and_flags_that_make_the_model(converted):
    assert_same_logits(converted.model, converted.ours, LENGTH)
    saved = as_tuples(read_manifest(converted.ours, 0)["config"]["model"])
    model = model_of_flags(converted.ours)
    assert all(
        saved[name] == value for name, value in architecture(model).items()
    ) and model.num_layers in (2, 3)


def greedy_text(ours: Path, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """Continue prompts (b, s) by `count` tokens, with the key-value cache of each layer."""
    manifest = read_manifest(ours, 0)
    loaded = load_model(saved_run(manifest, (1, 1)), SoloComm(), str(ours), 0, manifest)
    size, length = prompts.shape
    decoder = Decoder(loaded, [length + count] * size)
    samples = torch.arange(size)
    tokens = [prompts]
    logits = decoder.logits(samples, [length] * size, prompts.flatten())
    for _ in range(count):
        tokens.append(logits.argmax(-1, keepdim=True))
        logits = decoder.logits(samples, [1] * size, tokens[-1].flatten())
    return torch.cat(tokens, 1)


def test_greedy_tokens_are_those_of_transformers(converted):
    """Generate beyond a window, with the key-value cache of each layer."""
    torch.manual_seed(6)
    prompts = torch.randint(3, VOCABULARY, (2, 5))
    tokens = prompts
    with torch.no_grad():
        for _ in range(LENGTH - 5):
            best = converted.model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, best), 1)
    assert torch.equal(greedy_text(converted.ours, prompts, LENGTH - 5), tokens)


@pytest.mark.parametrize("kind", RECENT)
def test_a_greedy_text_of_100_tokens_is_transformers(tmp_path, kind):
    """Pass every window and a chunk of the delta rule, with the caches of both programs."""
    model = randomized(MODELS[kind])
    model.config.max_position_embeddings = 128
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "hf")
    read_hf(tmp_path / "hf", tmp_path / "ours")
    prompt = torch.randint(3, VOCABULARY, (1, 5), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        expected = model.generate(prompt, do_sample=False, max_new_tokens=100, use_cache=True)
    assert torch.equal(greedy_text(tmp_path / "ours", prompt, 100), expected)


# Gradients that transformers computes with differences of long FP32 sums: they differ by up to 2e-4 from the same code in FP64,
# with which this program's are compared (largest difference 2e-5).
OF_DECAYS = ("dt_bias", "A_log", "in_proj_a.weight", "in_proj_ba.weight")


IN_FP64 = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class InDouble(TorchFunctionMode):
    """Replace FP32 by FP64 where code asks for FP32."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        if function is torch.Tensor.float:
            return arguments[0].double()

        def widened(value: object) -> object:
            return torch.float64 if value is torch.float32 else value

        named = {name: widened(value) for name, value in (named or {}).items()}
        return function(*map(widened, arguments), **named)


Loss = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(
    model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())


def exact_gradients(
    model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor, loss_of: Loss
) -> dict[str, torch.Tensor]:
    """Return the gradients of the loss from transformers' code in FP64."""
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"
    exact.zero_grad()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            loss_of(exact, tokens, labels).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: gradient.float() for name, gradient in gradients(exact).items()}


def check_training(
    theirs: torch.nn.Module,
    directory: Path,
    backend: str,
    loss_of: Loss = cross_entropy,
    documents: PackedDocuments | None = None,
    **changes: object,
) -> None:
    """Compare the loss and the gradient of every weight, norms and biases included. loss_of: of transformers' model"""
    architecture, model = read_config(json.loads((directory / "config.json").read_text()))
    plain = {
        "seq_length": LENGTH,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "make_vocab_size_divisible_by": 1,
    }
    trainer = make_trainer(
        SoloComm(), small_run(**{**asdict(model), **plain, **changes}), Ops.build(backend)
    )
    weights = open_hugging_face(str(directory))
    ours = {p.spec.name: p for p in trainer.optimizer.flat.parameters}
    for name, parameter in ours.items():
        parameter.data.copy_(weights.read(name))
    tokens, labels = torch.randint(
        0, VOCABULARY, (2, LENGTH, 2), generator=torch.Generator().manual_seed(5)
    )  # (s, b) each
    theirs.zero_grad()
    expected = loss_of(theirs, tokens.t(), labels.t())
    expected.backward()
    trainer.optimizer.zero_grad()
    loss = trainer.stage.last(
        tokens, labels, Pass(first_sample=0, documents=documents or PackedDocuments())
    )
    loss.backward()
    balance = sum(
        router.take_load()[-2].item() for router in expert_counts.routers(trainer.stage).values()
    )
    torch.testing.assert_close(
        loss + balance * sum(trainer.run.model.moe_aux_loss_coeff), expected, rtol=1e-5, atol=0
    )
    found = gradients(theirs)
    if architecture.model_type in IN_FP64:
        exact = exact_gradients(theirs, tokens.t(), labels.t(), loss_of)
        found |= {name: exact[name] for name in exact if name.endswith(OF_DECAYS)}
    made = {
        "lm_head.weight" if name == architecture.head else name: part
        for name, part in tensor_mappings(architecture, model).items()
        if not name.endswith("e_score_correction_bias")  # has no gradient
    }
    assert made.keys() == found.keys()
    for name, part in made.items():
        gradient = in_their_shape(ours[part.ours].main_grad, part, model)
        scale = found[name].abs().max().item() or 1.0  # 0 of an expert without tokens
        torch.testing.assert_close(
            gradient / scale,
            found[name] / scale,
            rtol=0,
            atol=3e-5 if name.endswith(OF_DECAYS) else 1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_same_loss_and_gradients(converted, backend):
    check_training(converted.model, converted.theirs, backend)


BORDERS = ((0, 1, 9, LENGTH), (0, 8, LENGTH))  # of the documents of two samples


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_same_loss_and_gradients_of_documents(converted, backend):
    """A sample's documents are texts of their own in transformers."""
    starts = torch.zeros(2, LENGTH, dtype=torch.int32)
    for own, borders in zip(starts, BORDERS, strict=True):
        for border in borders[:-1]:
            own[border:] = border
    positions = (torch.arange(LENGTH, dtype=torch.int32) - starts).t().contiguous()

    def loss(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sums = [
            cross_entropy(model, tokens[i : i + 1, first:end], labels[i, first:end]) * (end - first)
            for i, borders in enumerate(BORDERS)
            for first, end in itertools.pairwise(borders)
        ]
        return torch.stack(sums).sum() / tokens.numel()

    check_training(
        converted.model, converted.theirs, backend, loss, PackedDocuments(starts, positions)
    )


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Mixtral", {"num_local_experts": 4}),
        ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True}),
        (
            "Qwen2Moe",
            {"num_experts": 6, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 36},
        ),
        ("Olmoe", {"num_experts": 6}),
    ],
)
def test_the_same_loss_with_the_balancing_loss(tmp_path, kind, more, backend):
    """Use one layer, since theirs joins the layers' tokens; their sum over a token's experts is not divided by k."""
    model = randomized(decoder(kind, num_hidden_layers=1, num_experts_per_tok=2, **more))
    model.save_pretrained(tmp_path)

    def loss(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = model(tokens, output_router_logits=True)
        return (
            torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
            + 0.7 * out.aux_loss
        )

    check_training(model, tmp_path, backend, loss, moe_aux_loss_coeff=(2 * 0.7,))


# Models whose block is another architecture's as well: without Mamba Granite's, and DeepSeek-V3's.
OTHER_CLASS = {
    "granitemoehybrid": "GraniteForCausalLM",
    "glm4_moe_lite": "DeepseekV3ForCausalLM",
}


def test_without_the_config_that_it_came_with_one_is_made(converted, tmp_path):
    """Write it as transformers 4 and published files do."""
    write_hf(converted.ours, tmp_path / "hf", *without_files(tmp_path))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    other = OTHER_CLASS.get(converted.model.config.model_type)
    if other is not None:
        assert type(again).__name__ == other
    else:
        assert type(again) is type(converted.model)
        assert same(again.state_dict(), converted.model.state_dict())
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = again(tokens).logits, converted.model(tokens).logits
    # Granite's separate matmuls round differently from Granite 4's fused one.
    rtol = 1e-5 if type(again) is not type(converted.model) else 0.0
    torch.testing.assert_close(*logits, rtol=rtol, atol=rtol)
    read_hf(tmp_path / "hf", tmp_path / "ours")
    first, second = (
        read_manifest(path, 0)["config"]["model"] for path in (converted.ours, tmp_path / "ours")
    )
    assert first == second


def test_the_chat_template_is_copied_or_is_a_named_one(converted, tmp_path):
    source = tmp_path / "source"
    named = tmp_path / "named.jinja"
    shutil.copytree(converted.theirs, source)
    (source / "chat_template.jinja").write_text("own")
    (source / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    named.write_text("named")
    read_hf(source, tmp_path / "ours")
    for more, expected in (((), "own"), (("--chat-template", named), "named")):
        made = tmp_path / expected
        write_hf(tmp_path / "ours", made, *more)
        assert (made / "chat_template.jinja").read_text() == expected
        assert (made / "tokenizer_config.json").read_text() == '{"chat_template": "old"}'
    read_hf(converted.theirs, tmp_path / "with", "--chat-template", named)
    assert (tmp_path / "with" / "hugging_face" / "chat_template.jinja").read_text() == "named"


def test_a_dtype_of_ones_own_and_one_file(converted, tmp_path):
    write_hf(converted.ours, tmp_path / "half", "--dtype", "bf16")
    half = tensors(tmp_path / "half")
    whole = tensors(converted.theirs)
    assert sorted(file.name for file in (tmp_path / "half").glob("model*")) == ["model.safetensors"]
    assert same(half, {name: tensor.bfloat16() for name, tensor in whole.items()})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert again.dtype == torch.bfloat16
    read_hf(tmp_path / "half", tmp_path / "kept")
    write_hf(tmp_path / "kept", tmp_path / "again")
    assert same(half, tensors(tmp_path / "again")), "BF16 is kept as BF16"


def test_a_model_trained_here_is_exported(trained, tmp_path):
    write_hf(trained, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == "GPT2LMHeadModel" and model.config.vocab_size == VOCABULARY
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers refuses files without it"
