"""Log-likelihoods of given tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..comm.autograd import gather_from_tensor_parallel
from ..config.fields import check
from ..data.indexed import StoredTokens
from ..nn.forward_context import PackedDocuments, Pass
from ..text.progress_line import ProgressLine
from ..tokenizers.tokenizer import Tokenizer
from .loading import LoadedModel, through_stages

EVALUATION = Pass(first_sample=0, training=False)
PROGRESS_SECONDS = 10.0
LOGITS_BYTES = 2**26  # of the FP32 logits that are held at a time, or one row of them


class Request(NamedTuple):
    """Tokens, the last `scored` (fewer than all) to be scored given all before them.

    places: positions of the `scored` tokens instead, from 1 on
    """

    tokens: Sequence[int] | np.ndarray | StoredTokens
    scored: int
    places: np.ndarray | None = None


def score(
    loaded: LoadedModel,
    requests: Sequence[Request],
    batch: int,
    noun: str | None = None,
) -> Tensor:
    """Score requests: FP64 (requests, 2), the same on every rank. Collective over the model's
    world.

    Columns: natural log-likelihood of the scored tokens, number that are the likeliest.

    batch: requests per forward pass
    """
    # its tensor-parallel ranks have the same
    dp = loaded.groups.dp
    saves = loaded.groups.tp.rank == 0
    scores = torch.zeros(len(requests), 2, dtype=torch.float64)
    progress = ProgressLine(PROGRESS_SECONDS)
    total = len(requests)
    done = 0
    for numbers in list(_batches(requests, batch))[dp.rank :: dp.size]:
        found = _score_batch(loaded, [requests[number] for number in numbers])
        if found is not None and saves:
            scores[numbers] = found
        done += len(numbers)
        if noun and loaded.groups.world.rank == 0:
            scored = min(done * dp.size, total)
            remaining = progress.seconds / scored * (total - scored)
            progress(f"{scored} of {total} {noun}, {remaining:.0f} s left")
    return loaded.groups.world.all_reduce(scores)


def _batches(requests: Sequence[Request], batch: int) -> Iterator[list[int]]:
    """Yield batches of similar length, longest first."""
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
    for start in range(0, len(order), batch):
        yield order[start : start + batch]


def _score_batch(loaded: LoadedModel, requests: Sequence[Request]) -> Tensor | None:
    """Return FP64 scores (b, 2) on last-stage ranks, else None."""
    longest = max(len(request.tokens) for request in requests) - 1
    tokens = torch.zeros(
        longest, len(requests), dtype=torch.int64
    )  # what follows a sample's end changes nothing before it
    padding = torch.ones(tokens.shape, dtype=torch.bool)
    rows = []
    labels = []
    for column, (text, scored, places) in enumerate(requests):
        ids = torch.from_numpy(np.array(text, np.int64))
        tokens[: len(ids) - 1, column] = ids[:-1]
        padding[: len(ids) - 1, column] = False
        asked = (
            torch.arange(len(ids) - scored, len(ids))
            if places is None
            else torch.from_numpy(places)
        )
        rows.append((asked - 1) * len(requests) + column)
        labels.append(ids[asked])
    positions = torch.arange(longest, dtype=torch.int32).unsqueeze(1).expand(tokens.shape)
    documents = PackedDocuments(positions=positions.contiguous(), padding=padding)
    x = through_stages(loaded, tokens, replace(EVALUATION, documents=documents))
    if x is None:
        return None
    found = _score_rows(loaded, x.reshape(-1, 1, x.shape[-1]), torch.cat(rows), torch.cat(labels))
    parts = torch.split(found, [request.scored for request in requests])
    return torch.stack([part.sum(0) for part in parts])


@torch.no_grad()
def _score_rows(loaded: LoadedModel, x: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """Return log-likelihoods, and 1 for labels that are the likeliest.

    x (s b, 1, h), rows and labels (r) -> (r, 2).
    """
    vocabulary = loaded.vocab_size
    found = []
    at_once = max(1, LOGITS_BYTES // (4 * vocabulary))
    for block, wanted in zip(rows.split(at_once), labels.split(at_once), strict=True):
        logits = gather_from_tensor_parallel(loaded.logits(x[block]).contiguous(), loaded.groups.tp)
        logits = logits[:, 0, :vocabulary].float()
        own = logits.gather(1, wanted[:, None])
        found.append(
            torch.stack([own[:, 0] - logits.logsumexp(1), logits.argmax(1) == wanted], dim=1)
        )
    return torch.cat(found).double()


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str, window: int) -> Request:
    """Build the request for `continuation` after `context`, cut on the left to `window` + 1 tokens.

    Trailing spaces move to the continuation, because tokens begin with them. An empty context
    becomes a start token (`encode_after`).
    """
    before = tokenizer.encode(context.rstrip())
    whole = tokenizer.encode(context + continuation)
    if not before:
        before = encode_after(tokenizer, "")
        whole = encode_after(tokenizer, context + continuation)
    scored = len(whole) - len(before)
    check(
        scored > 0,
        f"continuation {continuation[:40]!r} has no tokens of its own after {context[-40:]!r}",
    )
    check(
        scored <= window,
        f"continuation {continuation[:40]!r} has {scored} tokens, and the model takes {window}",
    )
    return Request(whole[-(window + 1) :], scored)


def encode_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize after the tokenizer's start token, or else its end-of-document token."""
    if tokenizer.encode(""):  # tokens that stand around every text
        return tokenizer.encode(text)
    if tokenizer.eod is None:
        raise ValueError(
            f"the {tokenizer.name} has no token that begins or ends a text, and a text's first token needs one before "
            "it"
        )
    return [tokenizer.eod, *tokenizer.encode(text)]


def windows(
    tokens: Sequence[int] | np.ndarray | StoredTokens, length: int, stride: int
) -> list[Request]:
    """Cut windows, one every `stride`, scoring each token once, without a shorter last one."""
    starts = range(0, len(tokens) - length, stride)
    return [
        Request(tokens[start : start + length + 1], stride if start else length) for start in starts
    ]


def rolling(tokens: Sequence[int], length: int) -> list[Request]:
    """Cut windows of at most `length` that score every token after the first once, the last with
    the most context.
    """
    last = len(tokens) - 1
    ends = [(start, min(start + length, last)) for start in range(0, last, length)]
    return [Request(tokens[max(0, end - length) : end + 1], end - start) for start, end in ends]
