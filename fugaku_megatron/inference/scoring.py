"""How likely a model finds given tokens: the sums that perplexity and multiple choice consist of, and the choices themselves.

Replicas of the model share the requests. Logits are computed for some rows at a time, never for a whole batch.
Legend: s sequence, b samples of a batch, h hidden, r rows, v vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..comm.autograd import gather_from_tensor_parallel
from ..config.checks import check
from ..data.chat_files import unsigned
from ..data.chats import ChatTemplate, read_chat
from ..data.files import input_files, read_documents, read_text
from ..data.formats import CHAT
from ..data.tokenizer import Tokenizer
from ..nn.passes import Pass
from .loading import LoadedModel, through_stages

EVALUATION = Pass(first_sample=0, training=False)
LOGITS_BYTES = 2**26  # of the FP32 logits that are held at a time, or one row of them


class Request(NamedTuple):
    """Tokens, of which the last `scored` are asked for, each given all before it. There are more tokens than `scored`.

    places: where the `scored` tokens are instead, from 1 on. others (scored, any number): tokens with which each of them is
    compared, -1 for none.
    """

    tokens: Sequence[int] | np.ndarray
    scored: int
    places: np.ndarray | None = None
    others: np.ndarray | None = None


def score(loaded: LoadedModel, requests: Sequence[Request], batch: int, progress: Callable[[int], None] | None = None) -> Tensor:
    """For each request the log-likelihood (natural logarithm) of its scored tokens, how many of them are the likeliest, and how
    many are likelier than all of their `others`.

    A tensor (requests, 3) of FP64, the same on every rank. batch: requests side by side. progress: is called with the number of
    requests of this replica that are done, in multiples of its share. Collective over the model's world.
    """
    dp, saves = loaded.groups.dp, loaded.groups.tp.rank == 0  # its tensor-parallel ranks have the same
    scores = torch.zeros(len(requests), 3, dtype=torch.float64)
    done = 0
    for numbers in list(_batches(requests, batch))[dp.rank :: dp.size]:
        found = _score_batch(loaded, [requests[number] for number in numbers])
        if found is not None and saves:
            scores[numbers] = found
        done += len(numbers)
        if progress:
            progress(min(done * dp.size, len(requests)))
    return loaded.groups.world.all_reduce(scores)


def _batches(requests: Sequence[Request], batch: int) -> Iterator[list[int]]:
    """Numbers of requests, those of like lengths together, the longest first."""
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
    for start in range(0, len(order), batch):
        yield order[start : start + batch]


def _score_batch(loaded: LoadedModel, requests: Sequence[Request]) -> Tensor | None:
    """(b, 3) of FP64 on the ranks of the last stage; None elsewhere."""
    longest = max(len(request.tokens) for request in requests) - 1
    tokens = torch.zeros(longest, len(requests), dtype=torch.int64)  # what follows a sample's end changes nothing before it
    rows, labels, others = [], [], []
    for column, (text, scored, places, compared) in enumerate(requests):
        ids = torch.from_numpy(np.array(text, np.int64))
        tokens[: len(ids) - 1, column] = ids[:-1]
        asked = torch.arange(len(ids) - scored, len(ids)) if places is None else torch.from_numpy(places)
        rows.append((asked - 1) * len(requests) + column)
        labels.append(ids[asked])
        others.append(torch.full((scored, 1), -1) if compared is None else torch.from_numpy(compared))
    x = through_stages(loaded, tokens, EVALUATION)
    if x is None:
        return None
    widest = max(tokens.shape[1] for tokens in others)
    apart = torch.cat([F.pad(tokens, (0, widest - tokens.shape[1]), value=-1) for tokens in others])
    found = _score_rows(loaded, x.reshape(-1, 1, x.shape[-1]), torch.cat(rows), torch.cat(labels), apart)
    return torch.stack([part.sum(0) for part in found.split([request.scored for request in requests])])


@torch.no_grad()
def _score_rows(loaded: LoadedModel, x: Tensor, rows: Tensor, labels: Tensor, others: Tensor) -> Tensor:
    """The labels' log-likelihoods, 1 where the label is the likeliest token, and 1 where it is likelier than all others.

    x (s b, 1, h), rows and labels (r), others (r, any number) -> (r, 3).
    """
    vocabulary, found = loaded.vocab_size, []
    at_once = max(1, LOGITS_BYTES // (4 * vocabulary))
    for some, wanted, apart in zip(rows.split(at_once), labels.split(at_once), others.split(at_once), strict=True):
        logits = gather_from_tensor_parallel(loaded.logits(x[some]).contiguous(), loaded.groups.tp)
        logits = logits[:, 0, :vocabulary].float()
        own = logits.gather(1, wanted[:, None])
        beaten = own > logits.gather(1, apart.clamp(min=0)).masked_fill(apart < 0, -math.inf)
        found.append(torch.stack([own[:, 0] - logits.logsumexp(1), logits.argmax(1) == wanted, beaten.all(1)], 1))
    return torch.cat(found).double()


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str, window: int) -> Request:
    """A request for `continuation` after `context`, cut on the left to `window` tokens and one.

    Spaces at the context's end are part of the continuation, because tokens begin with them. A context without tokens is the one
    before a text (`encode_after`). ValueError for a continuation without tokens, or with more than `window`.
    """
    before, whole = tokenizer.encode(context.rstrip()), tokenizer.encode(context + continuation)
    if not before:
        before, whole = encode_after(tokenizer, ""), encode_after(tokenizer, context + continuation)
    scored = len(whole) - len(before)
    check(scored > 0, f"continuation {continuation[:40]!r} has no tokens of its own after {context[-40:]!r}")
    check(scored <= window, f"continuation {continuation[:40]!r} has {scored} tokens, and the model takes {window}")
    return Request(whole[-(window + 1) :], scored)


def encode_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text that begin with one before it: what the tokenizer puts there itself, or else what ends a text.

    ValueError where the tokenizer has neither.
    """
    if tokenizer.encode(""):  # tokens that stand around every text
        return tokenizer.encode(text)
    if tokenizer.eod is None:
        raise ValueError(f"the {tokenizer.name} has no token that begins or ends a text, and a text's first token needs one before "
                         "it")
    return [tokenizer.eod, *tokenizer.encode(text)]


def windows(tokens: Sequence[int] | np.ndarray, length: int, stride: int) -> list[Request]:
    """Windows of `length` tokens, one every `stride`, that predict their successors; what one before predicted is not scored again.

    What does not fill a window is left out.
    """
    starts = range(0, len(tokens) - length, stride)
    return [Request(tokens[start : start + length + 1], stride if start else length) for start in starts]


def rolling(tokens: Sequence[int], length: int) -> list[Request]:
    """Windows of at most `length` that score every token after the first once, the last window with as much context as fits."""
    last = len(tokens) - 1
    ends = [(start, min(start + length, last)) for start in range(0, last, length)]
    return [Request(tokens[max(0, end - length) : end + 1], end - start) for start, end in ends]


@dataclass(frozen=True)
class ChatFile:
    """The chats of one file. requests: their trained tokens. cut: chats that are longer than a window, and end with it.

    left_out: those of them without trained tokens in the window.
    """

    path: str
    requests: list[Request]
    cut: int
    left_out: int


def read_chat_file(path: str, template: ChatTemplate, window: int) -> ChatFile:
    """The chats of a file. Raises ValueError, with file and line, for what is not a chat, and for a file without chats."""
    requests, cut, left_out = [], 0, 0
    for document in read_documents(input_files([path], ["text"], CHAT), CHAT):
        ids, trained = unsigned(template.encode(read_chat(document)))
        cut += len(ids) > window + 1
        places = 1 + np.flatnonzero(trained[1 : window + 1])
        left_out += not len(places)
        if len(places):
            requests.append(Request(ids[: window + 1], len(places), places))
    check(len(requests) > 0, f"--chats {path}: it has no chats, or none with an answer within the {window} tokens of a window")
    return ChatFile(path, requests, cut, left_out)


@dataclass(frozen=True)
class Question:
    """requests: one for each choice. lengths: characters of the choices. answer: number of the right one, from 0.

    bare: without a context, so that the choices are scored after the token before a text (`scoring.encode_after`).
    """

    requests: tuple[Request, ...]
    lengths: tuple[int, ...]
    answer: int
    bare: bool


def read_questions(path: str, tokenizer: Tokenizer, window: int) -> list[Question]:
    """The questions of --choices. Raises ValueError, with the number of the question, for what is none."""
    try:
        records = json.loads(read_text(path, "--choices"))
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error) if str(error).startswith("--choices") else f"--choices {path}: not JSON: {error}") from None
    check(isinstance(records, list) and len(records) > 0, f"--choices {path}: expected a list of questions")
    questions = []
    for number, record in enumerate(records):
        try:
            questions.append(_question(record, tokenizer, window))
        except ValueError as error:
            raise ValueError(f"--choices {path}: question {number}: {error}") from None
    return questions


def _question(record: Any, tokenizer: Tokenizer, window: int) -> Question:
    fields: dict[str, Any] = record if isinstance(record, dict) else {}
    context, choices, answer = (fields.get(name) for name in ("context", "choices", "answer"))
    if not (isinstance(context, str) and isinstance(choices, list) and len(choices) > 1 and all(map(_is_text, choices))):
        raise ValueError('expected {"context": TEXT, "choices": [TEXT, TEXT, ...], "answer": NUMBER}')
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"answer is {answer!r}: pass the number of a choice, 0 to {len(choices) - 1}")
    requests = tuple(encode_pair(tokenizer, context, choice, window) for choice in choices)
    return Question(requests, tuple(map(len, choices)), answer, bare=not context.strip())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def accuracies(questions: Sequence[Question], likelihoods: Sequence[float]) -> dict[str, Any]:
    """The share of questions whose right choice is the likeliest, and the likeliest for its characters.

    likelihoods: logarithms, of all choices of all questions in turn.
    """
    plain = by_length = start = 0
    for question in questions:
        own = likelihoods[start : start + len(question.requests)]
        start += len(own)
        plain += own.index(max(own)) == question.answer
        scaled = [likelihood / length for likelihood, length in zip(own, question.lengths, strict=True)]
        by_length += scaled.index(max(scaled)) == question.answer
    return {"accuracy": plain / len(questions), "accuracy_norm": by_length / len(questions), "questions": len(questions),
            "without_context": sum(question.bare for question in questions)}
