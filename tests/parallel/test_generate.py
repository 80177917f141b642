"""The generate command with tiny checkpoints: what training taught, Hugging Face's tokens one by one, and every layout alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.command_line import Parser
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.costs import activations
from fugaku_megatron.data.tokenizer import gpt2_files
from fugaku_megatron.inference import generate
from fugaku_megatron.inference.generation import Decoder, steps
from fugaku_megatron.inference.loading import load_model
from fugaku_megatron.inference.sampling import Sampling
from fugaku_megatron.training.train import Trainer
from tests.helpers import grid_groups, small_run, whole_tensors
from tests.threads import ThreadWorld

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


def save_trained(world, directory: Path, iterations: int, tokenizer: dict | None = None, **changes) -> dict[str, torch.Tensor]:
    """Train on TEXT and save; the weights."""
    torch.set_num_threads(1)
    run = small_run(**{**LEARNS, "train_iters": iterations, **changes})
    data = Repeated(24)
    trainer = Trainer(run, world, grid_groups(world, run), data, data, tokenizer=tokenizer)
    for _ in range(iterations):
        trainer.train_step()
    trainer.close()
    trainer.save(str(directory))
    return whole_tensors(trainer, "weight")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory of a checkpoint that knows TEXT by heart, flags of its tokenizer)."""
    directory = tmp_path_factory.mktemp("generate")
    flags = write_tokenizer(directory)
    save_trained(SoloComm(), directory / "checkpoint", 80)
    return directory / "checkpoint", flags


@pytest.fixture
def write(trained, capsys):
    """write(flags ...) -> what the command prints."""
    def call(*flags: str, world=None, load: Path | None = None) -> str:
        parser = Parser()
        generate.add_arguments(parser)
        options = parser.parse_args(["--load", str(load or trained[0]), *trained[1], *flags])
        generate.continue_prompts(generate.Request.of(options), world or SoloComm())
        return capsys.readouterr().out
    return call


def test_it_continues_what_it_has_learned(write):
    text = write("--prompt", "to be or", "--tokens", "16", "--temperature", "0")
    first, second = text.splitlines()
    assert first == "--- iteration 80, prompt in brackets ---"
    assert second == "[to be or] not to be, to b"
    assert text == write("--prompt", "to be or", "--tokens", "16", "--temperature", "0")


def test_memory_has_huge_pages_before_weights_are_loaded(monkeypatch):
    called = []
    monkeypatch.setattr(generate.allocator, "tune", called.append)
    monkeypatch.setattr(generate, "run_or_abort", lambda job: called.append("load"))
    parser = Parser()
    generate.add_arguments(parser)
    generate.main(parser.parse_args(["--load", "checkpoint", "--prompt", "a"]))
    assert called == ["tuned", "load"]


def test_sampling_is_a_function_of_the_seed(write):
    flags = ["--prompt", "Q", "--tokens", "20", "--temperature", "3.0", "--top-k", "100"]
    again, other = write(*flags, "--seed", "1"), write(*flags, "--seed", "2")
    assert again == write(*flags, "--seed", "1") and again != other


def test_more_positions_than_were_learned(write):
    with pytest.raises(ValueError, match=r"prompt 2 has 20 tokens and --max-new-tokens is 5, 25 positions in all, .* learned 24 "):
        write("--prompt", "a", "--prompt", TEXT, "--tokens", "5")


def test_mistakes(write, tmp_path):
    with pytest.raises(ValueError, match="a prompt is empty"):
        write("--prompt", "")
    with pytest.raises(ValueError, match="nothing to continue: give --prompt TEXT"):
        write()
    with pytest.raises(ValueError, match=f"--load {tmp_path} holds no checkpoint"):
        write("--prompt", "a", load=tmp_path)
    with pytest.raises(ValueError, match="1 x 1 x 1 = 1, but 2 ranks were started: .* or start it without mpiexec$"):
        write("--prompt", "a", world=SoloComm(0, 2))
    with pytest.raises(ValueError, match="--pipeline-model-parallel-size 1 = 4, but 2 ranks were started: start 4"):
        write("--prompt", "a", "--tensor-model-parallel-size", "4", world=SoloComm(0, 2))
    for step in (0, 7):
        with pytest.raises(ValueError, match=f"iter_000000{step}"):
            write("--prompt", "a", "--ckpt-step", str(step))
    for flag, wrong in (("--max-new-tokens", "-1"), ("--temperature", "-0.5"), ("--temperature", "nan"), ("--top-k", "-1"),
                        ("--temperature", "1e-45"), ("--top-p", "1.5"), ("--seed", "-1"), ("--seed", str(2**70))):
        with pytest.raises(ValueError, match=f"{flag} is {wrong}: give"):
            write("--prompt", "a", flag, wrong)
    with pytest.raises(ValueError, match="unknown flag --foo"):
        write("--prompt", "a", "--foo")
    vocab, merges = map(str, gpt2_files())
    with pytest.raises(ValueError, match=f"--vocab-file {vocab} has 50257 tokens, the model of --load .*: give the files"):
        write("--prompt", "a", "--vocab-file", vocab, "--merge-file", merges)


SAMPLED = Sampling(temperature=0.5, top_k=20, top_p=0.9, seed=3)
PROMPTS = [list(b"to be"), list(b"or not to"), list(b"q")]


def continued(directory: Path, world=None, sizes=None) -> list[list[int]]:
    """What a checkpoint of 12 iterations goes on with, on one rank or in its own layout or another."""
    world = world or SoloComm()
    manifest = read_manifest(directory, 12)
    run = saved_run(manifest, sizes or ((1, 1) if world.size == 1 else None))
    *_, ids = steps(load_model(run, world, str(directory), 12, manifest), PROMPTS, 12, SAMPLED, lambda sample, ids: False)
    return ids


@pytest.fixture(scope="module")
def alone_directory(tmp_path_factory):
    """A checkpoint of one rank after 12 iterations."""
    directory = tmp_path_factory.mktemp("alone")
    save_trained(SoloComm(), directory, 12, micro_batch_size=4)
    return directory


@pytest.fixture(scope="module")
def alone(alone_directory):
    """What one rank goes on with."""
    return continued(alone_directory)


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

    together = ThreadWorld(ranks).run(train_and_continue)
    assert together == [continued(tmp_path)] * ranks, "put together on one rank"
    assert together[0] == alone or "make_vocab_size_divisible_by" in layout, "training differs with the padded vocabulary"
    assert list(map(len, alone)) == [12] * 3


def test_the_weights_of_a_bf16_run_are_those_it_trained_with(tmp_path):
    layout = {**TP2_PP2, "zero_stage": 1, "bf16": True}

    def weights(world) -> dict[str, torch.Tensor]:
        save_trained(world, tmp_path, 3, micro_batch_size=4, **layout)
        manifest = read_manifest(tmp_path, 3)
        run = saved_run(manifest)
        trainer = Trainer(run, world, grid_groups(world, run))
        trainer.load(str(tmp_path))
        return whole_tensors(trainer, "weight")

    theirs = ThreadWorld(8).run(weights)[0]
    manifest = read_manifest(tmp_path, 3)
    loaded = load_model(saved_run(manifest, (1, 1)), SoloComm(), str(tmp_path), 3, manifest)
    for parameter in loaded.stage.parameters():
        rows = len(parameter) if parameter.spec.name != "embedding.word_embeddings.weight" else 257
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.float()[:rows], theirs[parameter.spec.name][:rows]), parameter.spec.name


def test_a_prompt_that_is_not_utf_8(write):
    assert "[\ufffd]" in write("--prompt", "\udcff", "--tokens", "1")


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_a_checkpoint_generates_in_another_layout(alone_directory, alone, sizes):
    ranks = sizes[0] * sizes[1]
    assert ThreadWorld(ranks).run(lambda world: continued(alone_directory, world, sizes)) == [alone] * ranks


def test_a_batch(write, tmp_path):
    flags = ["--tokens", "14", "--temperature", "0", "--stop", "or", "--stop", "zz"]
    (tmp_path / "lines").write_text("to be or\n\n, t\n")
    (tmp_path / "list.json").write_text('["to be or", ", t"]')
    answers = [write(*flags, *prompts).splitlines()[1:] for prompts in (
        ["--prompt", "to be or", "--prompt", ", t"], ["--prompts", str(tmp_path / "lines")],
        ["--prompts", str(tmp_path / "list.json")])]
    assert answers == [["[to be or] not to be, to", "[, t]o be "]] * 3


def test_what_a_rank_would_hold(write, alone_directory):
    flags = ["--prompt", "to be", "--prompt", "q", "--tokens", "7", "--dry-run"]
    printed = write(*flags, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    cache = 2 * 1 * 2 * 12 * 32 // 2 * 4  # keys and values, layers, samples, positions, half of the width, bytes
    assert f"{cache / 2**20:.1f} MiB of keys and values: 1 layers, 2 samples, 12 positions\n" in printed
    manifest = read_manifest(alone_directory, 12)
    loaded = load_model(saved_run(manifest, (1, 1)), SoloComm(), str(alone_directory), 12, manifest)
    weights = sum(p.nbytes for p in loaded.stage.parameters())
    assert f"holds at most {weights / 2**20:.1f} MiB of weights" in write(*flags)
    decoder = Decoder(loaded, [12, 8])
    kept = sum(cache.keys.nbytes + cache.values.nbytes for cache in decoder.cache.values())
    assert kept == activations.cache_bytes(loaded.run, 2, 12, 2, 1)


def test_files_of_prompts_that_are_none(write, tmp_path):
    for name, text, message in (("none", "", "has no prompt"), ("a.json", "{}", "no JSON list of texts"),
                                ("b.json", "[1]", "no JSON list of texts"), ("c.json", "[", "Expecting value"),
                                ("d", b"\xff", "can't decode byte")):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=f"--prompts {path}.*{message}"):
            write("--prompts", str(path))
    with pytest.raises(ValueError, match="No such file"):
        write("--prompts", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="--interactive asks for prompts"):
        write("--prompt", "a", "--interactive")
