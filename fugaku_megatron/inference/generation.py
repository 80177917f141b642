"""Samples that grow token by token until each is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..run.checks import check
from ..run.config import ModelConfig
from .decoder import Decoder
from .loading import LoadedModel
from .sampling import Sampling


def check_lengths(model: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises ValueError when a prompt and what is added to it have more positions than the model has learned."""
    if not model.learned_positions:
        return
    for number, prompt in enumerate(prompts):
        length = len(prompt) + max_new_tokens
        check(length <= model.max_position_embeddings, f"prompt {number + 1} has {len(prompt)} tokens and --max-new-tokens is "
              f"{max_new_tokens}, {length} positions in all, and the model learned {model.max_position_embeddings} "
              "(--max-position-embeddings): shorten one")


def steps(loaded: LoadedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling,
          finished: Callable[[int, list[int]], bool]) -> Iterator[list[list[int]]]:
    """The tokens that each prompt was continued with so far, after every step or once if there is none; always the same lists.

    finished(sample, its tokens so far): whether nothing follows; asked on the world's first rank, which tells the others. Such a
    sample is computed no further. Collective: all ranks take all steps.
    """
    ids: list[list[int]] = [[] for _ in prompts]
    if max_new_tokens == 0:
        yield ids
        return
    decoder = Decoder(loaded, [len(prompt) + max_new_tokens for prompt in prompts])
    chances = [sampling.chance(sample) for sample in range(len(prompts))]
    new = dict(enumerate(prompts))
    for _ in range(max_new_tokens):
        tokens = _chosen(loaded, decoder.logits(new), [(sampling, chances[sample]) for sample in new])
        for sample, token in zip(new, tokens, strict=True):
            ids[sample].append(token)
        new = {sample: ids[sample][-1:] for sample in _unfinished(loaded, list(new), ids, finished)}
        yield ids
        if not new:
            return


def _chosen(loaded: LoadedModel, logits: Tensor | None, choices: list[tuple[Sampling, torch.Generator]]) -> list[int]:
    """A token for each row of logits (samples, v), which the last stage has; on all stages."""
    tokens = torch.zeros(len(choices), dtype=torch.int64)
    if logits is not None:
        tokens = torch.tensor([sampling.pick(row, chance) for row, (sampling, chance) in zip(logits, choices, strict=True)])
    return loaded.groups.pp.broadcast(tokens, root=loaded.stage.placement.last_stage).tolist()


def _unfinished(loaded: LoadedModel, samples: list[int], ids: list[list[int]],
                finished: Callable[[int, list[int]], bool]) -> list[int]:
    world = loaded.groups.world
    going = torch.ones(len(samples), dtype=torch.int64)
    if world.rank == 0:
        going = torch.tensor([int(not finished(sample, ids[sample])) for sample in samples])
    return [sample for sample, more in zip(samples, world.broadcast(going).tolist(), strict=True) if more]
