"""The generate command with a tiny checkpoint: the same text every time, and the prompt's continuation that training taught."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from fugaku_megatron.comm.dry import DryComm
from fugaku_megatron.comm.local import ThreadWorld
from fugaku_megatron.data.tokenizer import gpt2_files
from fugaku_megatron.inference import generate
from fugaku_megatron.run.command_line import Parser
from fugaku_megatron.training.train import Trainer
from tests.helpers import grid_groups, small_run, whole_tensors

TEXT = "to be or not to be, "
LEARNS = {"seq_length": 24, "vocab_size": 257, "num_layers": 2, "micro_batch_size": 8, "global_batch_size": 8, "lr": 1e-2,
          "adam_beta2": 0.95, "init_method_std": 0.1}


def write_tokenizer(directory: Path) -> list[str]:
    """A vocabulary of single bytes and the end of text, 257 tokens; returns its flags."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's byte alphabet
    others = [b for b in range(256) if b not in printable]
    letters = {**{b: chr(b) for b in printable}, **{b: chr(256 + n) for n, b in enumerate(others)}}
    vocabulary = {letters[b]: b for b in range(256)} | {"<|endoftext|>": 256}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return ["--vocab-file", str(directory / "vocab.json"), "--merge-file", str(directory / "merges.txt")]


class Repeated:
    """TEXT over and over, beginning one character later in every sample."""

    def __init__(self, length: int):
        self.length, self.tokens = length, torch.tensor(list(TEXT.encode()))

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[(index + torch.arange(self.length + 1)) % len(self.tokens)]


def save_trained(world, directory: Path, iterations: int, tokenizer: dict | None = None, **changes) -> None:
    torch.set_num_threads(1)
    run = small_run(**{**LEARNS, "train_iters": iterations, **changes})
    data = Repeated(24)
    trainer = Trainer(run, world, grid_groups(world, run), data, data, tokenizer=tokenizer)
    for _ in range(iterations):
        trainer.train_step()
    trainer.close()
    trainer.save(str(directory))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory of a checkpoint that knows TEXT by heart, flags of its tokenizer)."""
    directory = tmp_path_factory.mktemp("generate")
    flags = write_tokenizer(directory)
    save_trained(DryComm(), directory / "checkpoint", 80)
    return directory / "checkpoint", flags


@pytest.fixture
def write(trained, capsys):
    """write(flags ...) -> what the command prints."""
    def call(*flags: str, world=None, load: Path | None = None) -> str:
        parser = Parser()
        generate.add_arguments(parser)
        options = parser.parse_args(["--load", str(load or trained[0]), *trained[1], *flags])
        generate.check_options(options)
        generate.continue_prompt(options, world or DryComm())
        return capsys.readouterr().out
    return call


def test_it_continues_what_it_has_learned(write):
    text = write("--prompt", "to be or", "--tokens", "30", "--temperature", "0")
    first, second = text.splitlines()
    assert first == "--- iteration 80, prompt in brackets ---"
    assert second == "[to be or] not to be, to be or not to be"
    assert text == write("--prompt", "to be or", "--tokens", "30", "--temperature", "0")


def test_sampling_is_a_function_of_the_seed(write):
    flags = ["--prompt", "Q", "--tokens", "40", "--temperature", "3.0", "--top-k", "100"]
    again, other = write(*flags, "--seed", "1"), write(*flags, "--seed", "2")
    assert again == write(*flags, "--seed", "1") and again != other


def test_a_prompt_longer_than_the_sequence(write):
    assert write("--prompt", TEXT * 3, "--tokens", "6", "--temperature", "0").rstrip("\n").endswith("]to be ")


def test_mistakes(write, tmp_path):
    with pytest.raises(ValueError, match="--prompt is empty"):
        write("--prompt", "")
    with pytest.raises(ValueError, match=f"--load {tmp_path} holds no checkpoint"):
        write("--prompt", "a", load=tmp_path)
    with pytest.raises(ValueError, match="1 x 1 x 1 = 1, but 2 ranks were started: start it without mpiexec$"):
        write("--prompt", "a", world=DryComm(0, 2))
    for step in (0, 7):
        with pytest.raises(ValueError, match=f"iter_000000{step}"):
            write("--prompt", "a", "--ckpt-step", str(step))
    for flag, wrong in (("--tokens", "-1"), ("--temperature", "-0.5"), ("--temperature", "nan"), ("--top-k", "0"),
                        ("--temperature", "1e-45"), ("--seed", "-1"), ("--seed", str(2**70))):
        with pytest.raises(ValueError, match=f"{flag} is {wrong}: give"):
            write("--prompt", "a", flag, wrong)
    with pytest.raises(ValueError, match="unknown flag --foo"):
        write("--prompt", "a", "--foo")
    vocab, merges = map(str, gpt2_files())
    with pytest.raises(ValueError, match=f"--vocab-file {vocab} has 50257 tokens, the model of --load .*: give the files"):
        write("--prompt", "a", "--vocab-file", vocab, "--merge-file", merges)


OPTIONS = Namespace(tokens=12, temperature=0.5, top_k=20, seed=3)
TOKENS = list(b"to be")


def continued(directory: Path, world=None) -> list[int]:
    """What a checkpoint of 12 iterations goes on with, on one rank or in its own layout."""
    world = world or DryComm()
    manifest = generate.checkpoint.read_manifest(directory, 12)
    run = generate.saved_run(manifest, alone=world.size == 1)
    return generate.generate(generate.load_model(run, world, str(directory), 12, manifest), TOKENS, OPTIONS, 256)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a run on one rank goes on with after 12 iterations."""
    directory = tmp_path_factory.mktemp("alone")
    save_trained(DryComm(), directory, 12, micro_batch_size=4)
    return continued(directory)


TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(("ranks", "layout"), [
    (4, TP2_PP2), (2, {"zero_stage": 1}), (8, {**TP2_PP2, "zero_stage": 1}),
    (4, {**TP2_PP2, "sequence_parallel": True}),
    (4, {"tensor_model_parallel_size": 4, "make_vocab_size_divisible_by": 24}),  # 288 rows of the vocabulary, 264 on one rank
])
def test_a_parallel_checkpoint_writes_what_one_rank_writes(alone, tmp_path, ranks, layout):
    def train_and_continue(world) -> list[int]:
        save_trained(world, tmp_path, 12, micro_batch_size=4, **layout)
        return continued(tmp_path, world)

    assert ThreadWorld(ranks).run(train_and_continue) == [alone] * ranks and len(alone) == 12
    assert continued(tmp_path) == alone, "put together on one rank"


def test_the_weights_of_a_bf16_run_are_those_it_trained_with(tmp_path):
    layout = {**TP2_PP2, "zero_stage": 1, "bf16": True}

    def weights(world) -> dict[str, torch.Tensor]:
        save_trained(world, tmp_path, 3, micro_batch_size=4, **layout)
        manifest = generate.checkpoint.read_manifest(tmp_path, 3)
        trainer = Trainer(generate.saved_run(manifest), world)
        trainer.load(str(tmp_path))
        return whole_tensors(trainer, "weight")

    theirs = ThreadWorld(8).run(weights)[0]
    manifest = generate.checkpoint.read_manifest(tmp_path, 3)
    loaded = generate.load_model(generate.saved_run(manifest, alone=True), DryComm(), str(tmp_path), 3, manifest)
    for parameter in loaded.stage.parameters():
        rows = len(parameter) if parameter.spec.name != "embedding.word_embeddings.weight" else 257
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.float()[:rows], theirs[parameter.spec.name][:rows]), parameter.spec.name


def test_a_prompt_that_is_not_utf_8(write):
    assert "[\ufffd]" in write("--prompt", "\udcff", "--tokens", "1")


def test_the_choice_of_a_token():
    logits, chance = torch.tensor([0.0, 3.0, 1.0, 2.9]), torch.Generator().manual_seed(0)
    assert generate.pick(logits, 0.0, 4, chance) == 1
    picked = [generate.pick(logits, 1.0, 2, chance) for _ in range(400)]
    assert set(picked) == {1, 3}, "only the best two"
    assert abs(picked.count(1) / 400 - 1 / (1 + torch.tensor(-0.1).exp())) < 0.1
