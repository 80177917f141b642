"""Tokenizers and trained models for generation."""

import json
import zlib
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.inference.generation import Sampling, steps
from fugaku_megatron.inference.loading import LoadedModel, load_model, operations
from tests.checks.gpt2 import to_theirs
from tests.helpers import build_trainer, grid_groups, make_trainer, small_run, whole_tensors
from tests.llama_models import FAMILIES

TEXT = "to be or not to be, "
LEARNS = {
    "seq_length": 24,
    "vocab_size": 257,
    "num_layers": 2,
    "micro_batch_size": 8,
    "global_batch_size": 8,
    "lr": 1e-2,
    "adam_beta2": 0.95,
    "init_method_std": 0.1,
}


def write_tokenizer(directory: Path) -> list[str]:
    """Write a vocabulary of single bytes and the end of text, 257 tokens, and return its flags."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's byte alphabet
    others = [b for b in range(256) if b not in printable]
    characters = {
        **{b: chr(b) for b in printable},
        **{b: chr(256 + n) for n, b in enumerate(others)},
    }
    vocabulary = {characters[b]: b for b in range(256)} | {"<|endoftext|>": 256}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return [
        "--vocab-file",
        str(directory / "vocab.json"),
        "--merge-file",
        str(directory / "merges.txt"),
    ]


class Repeated:
    """TEXT repeated. Every sample begins one character later."""

    def __init__(self, length: int):
        self.length = length
        self.tokens = torch.tensor(list(TEXT.encode()))

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[(index + torch.arange(self.length + 1)) % len(self.tokens)]


def save_trained(
    world, directory: Path, iterations: int, tokenizer: dict | None = None, **changes
) -> dict[str, torch.Tensor]:
    """Train on TEXT, save, and return the weights."""
    torch.set_num_threads(1)
    run = small_run(**{**LEARNS, "train_iters": iterations, **changes})
    data = Repeated(24)
    trainer = build_trainer(run, world, data, data, tokenizer=tokenizer)
    for _ in range(iterations):
        trainer.train_step()
    trainer.close()
    trainer.save(str(directory))
    return whole_tensors(trainer, "weight")


NEW = 100
WIDE = {
    "num_layers": 3,
    "max_position_embeddings": 224,
    "init_method_std": 0.2,
    "micro_batch_size": 2,
    "global_batch_size": 2,
}
TEXTS = [list(text.encode()) for text in ("a", "to be or not", "qu", "the question is whe")]
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=0.0, seed=0)


def their_model(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return transformers' GPT-2 with the weights of the WIDE model."""
    transformers = pytest.importorskip("transformers")
    model = small_run(**{**LEARNS, **WIDE}).model
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=model.vocab_size,
            n_positions=model.max_position_embeddings,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_attention_heads,
        )
    ).eval()
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if name != "lm_head.weight":  # tied
                tensor.copy_(to_theirs(name, weights, model)[: len(tensor)])
    return theirs


def our_tokens(
    world, directory, sizes: tuple[int, int], prompts=TEXTS, ends: dict[int, int] | None = None
) -> list[list[int]]:
    """Return generated tokens. ends: the number of tokens after which a sample is finished"""
    manifest = read_manifest(directory, 3)
    loaded = load_model(saved_run(manifest, sizes), world, str(directory), 3, manifest)
    return tokens_of(loaded, prompts, NEW, ends=ends or {})


def tokens_of(
    loaded, prompts, count, sampling=GREEDY, ends=MappingProxyType({})
) -> list[list[int]]:
    """Return `count` generated tokens for each prompt. ends: as in `our_tokens`"""
    *_, ids = steps(
        loaded, prompts, count, sampling, lambda sample, ids: len(ids) == ends.get(sample)
    )
    return [own.tolist() for own in ids]


def random_model(world, family: str, tp: int, pp: int, **changes) -> LoadedModel:
    """Return a model of the family, or of GPT-2. No weight depends on the layout, norms and biases included."""
    values = {**FAMILIES.get(family, {}), "init_method_std": 0.3, **changes}
    run = small_run(**values, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    trainer = make_trainer(world, run, operations(run.model))
    for p in trainer.optimizer.flat.parameters:
        noise = torch.randn(
            p.spec.shape,
            generator=torch.Generator().manual_seed(zlib.crc32(p.spec.init_name.encode())),
        )
        p.data.add_(0.1 * noise[tuple(slice(o, o + n) for o, n in zip(p.spec.offset, p.shape))])
    trainer.close()
    return LoadedModel(run, grid_groups(world, run), trainer.stage)
