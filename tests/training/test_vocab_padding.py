"""Fine-tuning a converted model whose vocabulary is padded: transformers' losses, updates, texts and perplexity at any padding.

The logits are shifted by -60, as GPT-2's are far below zero: a padding row that counted would have nearly all of the softmax.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.architecture import architecture
from fugaku_megatron.config.run_config import RunConfig, saved_run
from fugaku_megatron.convert.hugging_face.conversion import open_hugging_face
from fugaku_megatron.costs.sizes import padded_vocab_size
from fugaku_megatron.inference.evaluate import Inputs, evaluated
from fugaku_megatron.inference.loading import LoadedModel, load_model
from fugaku_megatron.inference.scoring import windows
from fugaku_megatron.run.checkpoint_source import Resume, with_padding
from fugaku_megatron.run.resume import resume_training
from fugaku_megatron.training.trainer import Trainer
from tests.checks.generation import tokens_of
from tests.helpers import (
    find_checkpoint,
    make_trainer,
    mock,
    parse_layout,
    plain_loss,
    small_run,
    whole_tensors,
)
from tests.threads import ThreadWorld

transformers = pytest.importorskip("transformers")

from tests.checks.conversions import convert  # noqa: E402
from tests.hf_models import shifted_gpt2, tensors  # noqa: E402

pytestmark = pytest.mark.parallel

LENGTH = 16
STEPS = 10
SHIFT = -60.0
# Adam's epsilon is above the rounding of gradients, which it would make as large as the others
LR, EPSILON = (1e-3, 1e-4)
WORDS = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


class Case(NamedTuple):
    """A converted model, and transformers' losses by step and trained model."""

    start: Path
    vocabulary: int
    losses: list[float]
    trained: torch.nn.Module


def run_of(case: Case, **changes: Any) -> RunConfig:
    """A run from a converted model's weights."""
    model = architecture(saved_run(read_manifest(case.start, 0), (1, 1)).model)
    return small_run(
        **{
            **model,
            "seq_length": LENGTH,
            "make_vocab_size_divisible_by": 128,
            "load": str(case.start),
            "finetune": True,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "train_iters": STEPS,
            "lr": LR,
            "min_lr": LR,
            "adam_eps": EPSILON,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            **changes,
        }
    )


def their_training(model: torch.nn.Module, run: RunConfig) -> list[float]:
    """Train transformers' model with torch's AdamW on the run's samples, and return the losses."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(run.optimizer.adam_beta1, run.optimizer.adam_beta2),
        eps=EPSILON,
    )
    data = mock(run)
    size = run.batch.global_batch_size
    losses = []
    for step in range(STEPS):
        samples = torch.tensor(np.stack([data[step * size + i] for i in range(size)]))
        loss = F.cross_entropy(
            model(samples[:, :-1]).logits.flatten(0, 1), samples[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def case(request, tmp_path_factory) -> Case:
    directory = tmp_path_factory.mktemp(str(request.param))
    model = shifted_gpt2(request.param, LENGTH, SHIFT)
    model.save_pretrained(directory / "theirs")
    assert convert(*f"--from-hf {directory}/theirs --save {directory}/ours".split()) == 0
    with torch.no_grad():
        assert model(mock_tokens(request.param)).logits.mean().item() == pytest.approx(
            SHIFT, abs=2.0
        )
    case = Case(directory / "ours", request.param, [], model)
    return case._replace(losses=their_training(model, run_of(case)))


def mock_tokens(vocabulary: int) -> torch.Tensor:
    """A sample (1, s)."""
    return torch.randint(vocabulary, (1, LENGTH), generator=torch.Generator().manual_seed(5))


def begun(run: RunConfig, world: Comm) -> Trainer:
    """A trainer at the beginning of the run, as `pretrain` makes it."""
    resume = find_checkpoint(run, world)
    trainer = make_trainer(world, with_padding(run, resume))
    resume_training(trainer, resume)
    return trainer


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (503, "packed"),
        (503, "pp2"),
        (503, "tp2 torch"),
        (503, "tp2 pp2 sequence zero"),
        (503, "tp2 make_vocab_size_divisible_by=1"),  # one row of padding
        (503, "tp2 make_vocab_size_divisible_by=512"),  # no token on rank 1
        (503, "tp2 make_vocab_size_divisible_by=512 torch"),
        (50257, "tp2 torch"),
    ],
    indirect=["case"],
)
def test_losses_and_updates_are_those_of_transformers(case, layout, tmp_path):
    ranks, flags = parse_layout(layout)
    run = run_of(case, **flags)
    tp = run.parallel.tensor_model_parallel_size
    assert padded_vocab_size(run.model, tp) > case.vocabulary

    def trained(world: Comm) -> tuple[list[float], float]:
        trainer = begun(run, world)
        losses = [trainer.train_step().loss for _ in range(STEPS)]
        gradients = whole_tensors(trainer, "grad")
        trainer.save(str(tmp_path / "saved"))
        trainer.close()
        return losses, max(
            gradients[key][case.vocabulary :].abs().max().item()
            for key in gradients
            if key in (WORDS, OUTPUT)
        )

    for losses, padding in ThreadWorld(ranks).run(trained):
        assert losses == pytest.approx(case.losses, rel=1e-5) and padding == 0.0
    assert convert(*f"--load {tmp_path}/saved --to-hf {tmp_path}/hf".split()) == 0
    found = tensors(tmp_path / "hf")
    expected = {key: tensor.detach() for key, tensor in case.trained.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    check_inference(case, tmp_path / "saved", ranks, run)


def check_inference(case: Case, directory: Path, ranks: int, run: RunConfig) -> None:
    """Check the checkpoint's greedy texts and perplexity against transformers' model, in the layout it was trained in."""
    manifest = read_manifest(directory, STEPS)
    tokens = mock_tokens(case.vocabulary).flatten()
    sizes = run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size
    prompt = tokens[:5].tolist()
    text = torch.cat([tokens, tokens.flip(0), tokens[:1]])

    def read(world: Comm) -> tuple[list[int], float]:
        loaded: LoadedModel = load_model(
            saved_run(manifest, sizes), world, str(directory), STEPS, manifest
        )
        (ids,) = tokens_of(loaded, [prompt], 8)
        requests = windows(text.numpy().astype(np.int32), LENGTH, LENGTH)
        texts = Inputs(requests, tokens=len(text), predicted=len(text) - 1, bytes=0, note="")
        return ids, evaluated(loaded, texts, 2)["perplexity"]

    ids, perplexity = ThreadWorld(ranks).run(read)[0]
    with torch.no_grad():
        their_ids = case.trained.generate(
            torch.tensor([prompt]),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, 5:].tolist()
        logits = case.trained(torch.stack([text[:LENGTH], text[LENGTH:-1]])).logits
    loss = F.cross_entropy(logits.flatten(0, 1), text[1:])
    assert ids == their_ids and perplexity == pytest.approx(math.exp(loss.item()), rel=1e-5)


@pytest.mark.parametrize("mask", ["auto", "no"])
def test_from_scratch_the_padding_is_masked_by_default(mask):
    """The first loss counts padding rows as words, as in Megatron-LM, if --mask-vocab-padding is no."""
    run = small_run(vocab_size=91, mask_vocab_padding=mask)
    run = with_padding(run, find_checkpoint(run, SoloComm()))
    trainer = make_trainer(SoloComm(), run)
    weights = whole_tensors(trainer, "weight")
    samples = torch.tensor(np.stack([mock(run)[i] for i in range(run.batch.global_batch_size)]))
    found = trainer.train_step().loss
    parts = (samples[:, :-1].t(), samples[:, 1:].t())
    padding = whole_tensors(trainer, "grad")[WORDS][91:]
    trainer.close()
    counted = plain_loss(weights, *parts, run.model).item()
    masked = plain_loss({**weights, WORDS: weights[WORDS][:91]}, *parts, run.model).item()
    assert len(weights[WORDS]) == 96 and masked != pytest.approx(counted, rel=1e-3)
    assert run.model.mask_vocab_padding == ("no" if mask == "no" else "yes")
    assert found == pytest.approx(counted if mask == "no" else masked, rel=1e-6)
    assert (padding != 0).any().item() == (mask == "no")


@pytest.mark.parametrize("vocabulary", [257, 503, 50257, 151936])
def test_losses_do_not_depend_on_the_padding(vocabulary, tmp_path):
    """From scratch and after a load into another tensor-parallel size."""
    hidden = 32 if vocabulary < 1000 else 16
    sizes = {
        "hidden_size": hidden,
        "num_layers": 1,
        "num_attention_heads": 4,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "vocab_size": vocabulary,
        "make_vocab_size_divisible_by": 128,
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "train_iters": 4,
    }

    def trained(world: Comm, load: str | None, steps: int) -> list[float]:
        run = small_run(**sizes, tensor_model_parallel_size=world.size, load=load)
        trainer = begun(run, world)
        losses = [trainer.train_step().loss for _ in range(steps)]
        if load is None:
            trainer.save(str(tmp_path / str(world.size)))
        trainer.close()
        return losses

    def losses_of(ranks: int, load: str | None, steps: int = 2) -> list[float]:
        return ThreadWorld(ranks).run(lambda world: trained(world, load, steps))[0]

    first = {tp: losses_of(tp, load=None) for tp in (1, 2, 4)}
    assert first[2] == pytest.approx(first[1], rel=1e-6)
    assert first[4] == pytest.approx(first[1], rel=1e-6)
    unchanged = losses_of(1, load=str(tmp_path / "1"))
    for before, after in ((1, 2), (2, 4), (4, 1)):
        assert losses_of(after, load=str(tmp_path / str(before))) == pytest.approx(
            unchanged, rel=1e-6
        )


def lines_of(
    run: RunConfig, find: Callable[[RunConfig, Comm], Resume] = find_checkpoint
) -> tuple[str, list[str]]:
    """Start a run, and return its --mask-vocab-padding and log lines."""
    resume = find(run, SoloComm())
    run = with_padding(run, resume)
    trainer = make_trainer(SoloComm(), run)
    lines = resume_training(trainer, resume)
    trainer.close()
    return run.model.mask_vocab_padding, lines[1:]


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """A converted model."""
    directory = tmp_path_factory.mktemp("padded")
    shifted_gpt2(503, LENGTH, SHIFT).save_pretrained(directory / "theirs")
    assert open_hugging_face(str(directory / "theirs")).model.masks_padding
    assert convert(*f"--from-hf {directory}/theirs --save {directory}/ours".split()) == 0
    return directory / "ours"


def test_a_checkpoint_carries_the_mask_and_a_change_is_noted(ours, tmp_path):
    own = tmp_path / "own"
    later = tmp_path / "later"
    assert "--mask-vocab-padding yes" in (ours / "model.flags").read_text()
    start = run_of(Case(ours, 503, [], None))
    assert lines_of(start) == ("yes", [])
    assert lines_of(changed(start, mask_vocab_padding="no")) == (
        "no",
        [
            "note: the padded vocabulary has 512 rows, had 503, and those beyond the 503 tokens count in the loss; pass "
            "--make-vocab-size-divisible-by 503 to keep 503",
        ],
    )
    trainer = begun(start, SoloComm())
    trainer.train_step()
    trainer.save(str(own))
    trainer.close()
    assert read_manifest(own, 1)["config"]["model"]["mask_vocab_padding"] == "yes"
    again = replace(start, output=replace(start.output, load=str(own), finetune=False))
    assert lines_of(again) == ("yes", []) == lines_of(changed(again, mask_vocab_padding="yes"))
    assert lines_of(changed(again, make_vocab_size_divisible_by=64 * 5)) == ("yes", []), (
        "how much padding there is does not matter"
    )
    assert lines_of(changed(again, mask_vocab_padding="no")) == (
        "no",
        ["note: --mask-vocab-padding is no, was yes: the loss curve changes from here on"],
    )
    assert lines_of(replace(again, output=replace(again.output, finetune=True))) == ("yes", [])
    assert convert("--load", own, "--to-megatron", tmp_path / "megatron") == 0
    assert convert("--from-megatron", tmp_path / "megatron", "--save", later) == 0
    assert read_manifest(later, 0)["config"]["model"]["mask_vocab_padding"] == "yes"


def changed(run: RunConfig, **model: Any) -> RunConfig:
    """The run with values of its model changed."""
    return replace(run, model=replace(run.model, **model))


def test_a_resumed_run_keeps_its_padding_while_the_rows_are_the_same(tmp_path):
    """An earlier version counted the padding of a run from scratch, and recorded it or nothing."""
    start = small_run(vocab_size=91, mask_vocab_padding="no")
    trainer = begun(start, SoloComm())
    trainer.train_step()
    trainer.save(str(tmp_path / "own"))
    trainer.close()
    output = replace(start.output, load=str(tmp_path / "own"))
    again = changed(replace(start, output=output), mask_vocab_padding="auto")
    kept = "note: the 5 padding rows of the vocabulary count in the loss, as in the saved run; --mask-vocab-padding yes excludes them"

    def before(run: RunConfig, world: Comm) -> Resume:
        resume = find_checkpoint(run, world)
        resume.config["model"].pop("mask_vocab_padding")
        return resume

    assert lines_of(again) == ("no", [kept]) == lines_of(again, before)
    change = "note: --mask-vocab-padding is yes, was no: the loss curve changes from here on"
    assert lines_of(changed(again, mask_vocab_padding="yes")) == ("yes", [change])
    assert lines_of(changed(again, make_vocab_size_divisible_by=128)) == (
        "yes",
        [
            change,
            "note: the padded vocabulary has 128 rows, had 96, and those beyond the 91 tokens no longer count in the loss; pass "
            "--make-vocab-size-divisible-by 96 to keep 96",
        ],
    )
    assert lines_of(changed(again, padded_vocab_size=128))[1][1].endswith(
        "; pass --padded-vocab-size 96 to keep 96"
    )
    weights = replace(again, output=replace(output, finetune=True))
    assert lines_of(changed(weights, mask_vocab_padding="no")) == ("no", [kept])
    assert lines_of(weights) == (
        "yes",
        [
            "note: --mask-vocab-padding is yes, and was no in the run that saved the weights: the loss starts at another value; "
            "pass no to keep its sums"
        ],
    )


def test_converted_weights_from_before_the_flag(ours):
    def before(run: RunConfig, world: Comm) -> Resume:
        resume = find_checkpoint(run, world)
        resume.config["model"].pop("mask_vocab_padding")
        return resume

    assert lines_of(run_of(Case(ours, 503, [], None)), before) == ("yes", [])
