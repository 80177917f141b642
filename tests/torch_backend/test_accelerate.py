"""Accelerated models of transformers against transformers' own computation."""

import copy
import sys
import types
from functools import partial

import pytest
import torch

import fugaku_megatron as fm
from fugaku_megatron.torch_backend import attention_interface, transformers_names, trl_head
from fugaku_megatron.torch_backend.accelerate import accelerate, restore
from fugaku_megatron.torch_backend.linear_loss import Call, Head, row_losses
from fugaku_megatron.torch_backend.logits import LazyLogits, lazy_linear
from tests.checks.tiny_transformers import MODELS, batch_of, model_of

pytestmark = pytest.mark.unit
TOLERANCES = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (4e-2, 0.4)}
CAUSAL = sorted(set(MODELS) - {"bert"})


def quiet(_: str) -> None:
    pass


def step(model, batch):
    """Return the loss and all gradients as one vector."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients)


def compare(kind, call=step, dtype=torch.float32, padding="none", tolerances=None):
    """Compare a call before and after accelerate. tolerances: of the loss, and of the gradients relative to their norm"""
    model = model_of(kind, dtype)
    batch = batch_of(kind, padding)
    loss, gradients = call(model, batch)
    accelerate(model, quiet)
    fast_loss, fast_gradients = call(model, batch)
    tolerances = tolerances or TOLERANCES[dtype]
    assert abs(fast_loss - loss) < tolerances[0]
    assert (fast_gradients - gradients).norm() < tolerances[1] * gradients.norm()


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients(kind, padding):
    compare(kind, padding=padding)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_sinks_are_served(padding, monkeypatch):
    def refuse(*_):
        raise AssertionError("a mask that the kernels express")

    monkeypatch.setattr(attention_interface, "_transformers_attention", refuse)
    accelerate(model_of("gpt_oss"), quiet)(**batch_of("gpt_oss", padding, length=64))


@pytest.mark.parametrize("kind", MODELS)
def test_bf16(kind):
    compare(kind, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", MODELS)
def test_checkpointed_layers(kind):
    def call(model, batch):
        model.gradient_checkpointing_enable()
        return step(model, batch)

    compare(kind, call)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "bert"])
def test_autocast_is_near(kind):
    call = torch.autocast("cpu", torch.bfloat16)(step)
    compare(kind, call, tolerances=(3e-2, 0.1))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss", "qwen3_moe"])
def test_packed_documents(kind):
    positions = torch.cat((torch.arange(7), torch.arange(12))).expand(3, -1)
    compare(kind, lambda model, batch: step(model, {**batch, "position_ids": positions}))


def test_packed_delta_rule_equals_documents_apart():
    model = accelerate(model_of("qwen3_5"), quiet).eval()
    tokens = batch_of("qwen3_5")["input_ids"][:1]
    bounds = torch.tensor([0, 7, 19], dtype=torch.int32)
    positions = torch.cat((torch.arange(7), torch.arange(12)))[None]
    with torch.no_grad():
        documents = {"position_ids": positions, "cu_seq_lens_q": bounds, "use_cache": False}
        packed = model(tokens, **documents).logits
        apart = [model(part).logits for part in (tokens[:, :7], tokens[:, 7:])]
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("boolean", [True, False])
def test_own_masks_go_to_torch(boolean):
    visible = torch.rand(3, 1, 19, 19) > 0.3
    visible |= torch.eye(19, dtype=torch.bool)
    mask = visible if boolean else torch.zeros(3, 1, 19, 19).masked_fill(~visible, -1e9)
    compare("llama", lambda model, batch: step(model, {**batch, "attention_mask": mask}))


@pytest.mark.parametrize(("cache", "padding"), [("static", "left"), (None, "none")])
@pytest.mark.parametrize("kind", CAUSAL)
def test_generated_tokens(kind, cache, padding):
    model = model_of(kind).eval()
    batch = batch_of(kind, padding)
    del batch["labels"]
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    tokens = model.generate(**batch, **options)
    assert torch.equal(accelerate(model, quiet).generate(**batch, **options), tokens)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_compiled_without_a_break(kind):
    def call(model, batch):
        if "forward" not in vars(model.lm_head):  # not accelerated yet
            return step(model, batch)
        torch._dynamo.reset()
        return step(torch.compile(model, backend="aot_eager", fullgraph=True), batch)

    compare(kind, call, tolerances=(1e-5, 1e-5))


def test_frozen_parts_have_no_gradient():
    model = accelerate(model_of("qwen3_moe"), quiet)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    model(**batch_of("qwen3_moe")).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained and all("self_attn" in name for name in trained)


def test_dropout_is_repeated_by_a_checkpoint():
    model = model_of("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    accelerate(model, quiet)
    results = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(7)
        results.append(step(model, batch_of("llama")))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_logits_are_computed_when_they_are_read():
    model = model_of("llama")
    batch = batch_of("llama")
    expected = model(**batch).logits
    output = accelerate(model, quiet)(**batch)
    assert isinstance(output.logits, LazyLogits)
    assert output.logits.known is None
    assert output.logits.shape == expected.shape
    torch.testing.assert_close(output.logits * 1, expected, rtol=1e-4, atol=1e-4)
    shifted = output.logits[:, :-1].float().mean()
    shifted.backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_in_blocks(reduction, monkeypatch):
    monkeypatch.setattr("fugaku_megatron.torch_backend.linear_loss.BLOCK_BYTES", 4 * 3 * 11)
    head = torch.nn.Linear(8, 11)
    x = torch.randn(2, 7, 8, requires_grad=True)
    labels = torch.randint(0, 11, (14,))
    labels[:3] = -100
    results = []
    for layer in (head, partial(lazy_linear, head)):
        logits = layer(x).contiguous().view(-1, 11).float()
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
        results.append((loss, *torch.autograd.grad(3 * loss, (x, head.weight, head.bias))))
    for expected, value in zip(*results):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def test_gradient_of_the_entropy():
    x = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    labels = torch.randint(0, 11, (5,))
    factors = torch.randn(2, 5)
    logs = (0.7 * x @ weight.t()).log_softmax(-1)
    expected = (logs.gather(1, labels[:, None])[:, 0], -(logs.exp() * logs).sum(-1))
    call = Call(0.7, torch.float32, ("entropy",))
    values = row_losses(x, Head(weight, None), labels, call)[:2]
    results = [
        torch.autograd.grad((torch.stack(each) * factors).sum(), (x, weight))
        for each in (expected, values)
    ]
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_without_labels(reduction):
    head = torch.nn.Linear(8, 11)
    x = torch.randn(3, 8, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        lazy_linear(head, x), torch.full((3,), -100), reduction=reduction
    )
    loss.backward()
    assert loss.isnan() == (reduction == "mean")
    assert head.weight.grad.isfinite().all() or reduction == "mean"


def line_of(model):
    """Return the line that accelerate prints."""
    lines = []
    assert fm.accelerate(model, lines.append) is model
    (line,) = lines
    return line


def test_line_and_undo():
    model = model_of("qwen3_5")
    batch = batch_of("qwen3_5")
    loss, _ = step(model, batch)
    assert line_of(model) == (
        "accelerate: replaced attention, 8 RMS norms, gated delta rule and convolution, output layer"
    )
    assert "forward" in vars(model.lm_head)
    copied = copy.deepcopy(model)
    restore(copied)
    assert "forward" not in vars(copied.lm_head)
    accelerate(model, quiet)
    restore(model)
    assert "forward" not in vars(model.lm_head)
    assert model.config._attn_implementation == "sdpa"
    assert step(model, batch)[0] == pytest.approx(loss, abs=1e-5)
    modeling = sys.modules[type(model).__module__]
    assert not hasattr(modeling.torch_chunk_gated_delta_rule, "original")
    restore(model)


def test_parts_that_are_left():
    model = model_of("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    model.model.norm.forward = lambda x: x
    assert line_of(model).endswith("left output layer Sequential")


def test_an_older_trl_keeps_its_function(monkeypatch):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, last_hidden, weight, targets, temperature, chunk_size):
            raise NotImplementedError

    older = types.ModuleType(trl_head.MODULE)
    older._ChunkedLogProbFunction = Function
    monkeypatch.setitem(sys.modules, trl_head.MODULE, older)
    assert line_of(model_of("llama")).endswith("left trl's log-probabilities")
    assert older._ChunkedLogProbFunction is Function


def test_probabilities_of_eager_attention():
    model = model_of("llama")
    model.set_attn_implementation("eager")
    assert line_of(model).endswith("left attention eager")
    tokens = batch_of("llama")["input_ids"]
    assert len(model(tokens, output_attentions=True).attentions) == 2


def test_refuses_other_models():
    with pytest.raises(ValueError, match="accelerate: Linear contains no model of transformers"):
        accelerate(torch.nn.Linear(2, 2))


def test_refuses_an_old_transformers(monkeypatch):
    import transformers

    model = model_of("llama")
    monkeypatch.delattr(transformers.PreTrainedModel, "_can_set_attn_implementation")
    monkeypatch.setattr(transformers, "__version__", "4.53.3")
    with pytest.raises(ValueError, match="transformers 4.53.3 is too old: install 4.57 or newer$"):
        accelerate(model)
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("missing", ["transformers.integrations.moe", "transformers.masking_utils"])
def test_a_transformers_without_a_seam_keeps_its_own(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    transformers_names.register()


def test_names_without_accelerate():
    import transformers

    import fugaku_megatron.torch_backend  # noqa: F401

    config = model_of("gpt_oss").config
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="fugaku", experts_implementation="fugaku"
    )
    assert model(**batch_of("gpt_oss")).loss.isfinite()
