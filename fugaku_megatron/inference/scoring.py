"""Log-likelihoods of given tokens, for perplexity, multiple choice and needles."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..cli.output_files import picture, shown
from ..comm.autograd import gather_from_tensor_parallel
from ..config.fields import check
from ..config.model import ModelConfig
from ..data.chat_dataset import unsigned
from ..data.chats import ChatTemplate, read_chat
from ..data.files import input_files, read_documents
from ..data.formats import CHAT
from ..data.indexed import StoredTokens
from ..data.tokenizer import Tokenizer
from ..nn.forward_context import Documents, Pass
from ..text.named_files import JsonObject, StrPath, about, read_text
from ..text.table import pipe_table
from .loading import LoadedModel, through_stages

EVALUATION = Pass(first_sample=0, training=False)
PROGRESS_SECONDS = 10.0
LOGITS_BYTES = 2**26  # of the FP32 logits that are held at a time, or one row of them


class Request(NamedTuple):
    """Tokens, the last `scored` (fewer than all) to be scored given all before them.

    places: positions of the `scored` tokens instead, from 1 on
    others: (scored, any number) tokens to compare each with, -1 for none
    """

    tokens: Sequence[int] | np.ndarray | StoredTokens
    scored: int
    places: np.ndarray | None = None
    others: np.ndarray | None = None


class Progress:
    """Progress line on stderr, every `PROGRESS_SECONDS`. noun: None for no line"""

    def __init__(self, total: int, noun: str | None) -> None:
        self._total = total
        self._noun = noun
        self._began = self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if self._noun and now - self._last >= PROGRESS_SECONDS:
            self._last = now
            left = (now - self._began) / done * (self._total - done)
            text = f"{done} of {self._total} {self._noun}, {left:.0f} s left"
            print(text, file=sys.stderr, flush=True)


def score(
    loaded: LoadedModel,
    requests: Sequence[Request],
    batch: int,
    noun: str | None = None,
) -> Tensor:
    """Score requests: FP64 (requests, 3), the same on every rank. Collective over the model's
    world.

    Columns: natural log-likelihood of the scored tokens, number that are the likeliest, number
    likelier than all their `others`.

    batch: requests per forward pass
    """
    # its tensor-parallel ranks have the same
    dp = loaded.groups.dp
    saves = loaded.groups.tp.rank == 0
    scores = torch.zeros(len(requests), 3, dtype=torch.float64)
    progress = Progress(len(requests), noun if loaded.groups.world.rank == 0 else None)
    done = 0
    for numbers in list(_batches(requests, batch))[dp.rank :: dp.size]:
        found = _score_batch(loaded, [requests[number] for number in numbers])
        if found is not None and saves:
            scores[numbers] = found
        done += len(numbers)
        progress(min(done * dp.size, len(requests)))
    return loaded.groups.world.all_reduce(scores)


def _batches(requests: Sequence[Request], batch: int) -> Iterator[list[int]]:
    """Yield batches of similar length, longest first."""
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
    for start in range(0, len(order), batch):
        yield order[start : start + batch]


def _score_batch(loaded: LoadedModel, requests: Sequence[Request]) -> Tensor | None:
    """Return FP64 scores (b, 3) on last-stage ranks, else None."""
    longest = max(len(request.tokens) for request in requests) - 1
    tokens = torch.zeros(
        longest, len(requests), dtype=torch.int64
    )  # what follows a sample's end changes nothing before it
    padding = torch.ones(tokens.shape, dtype=torch.bool)
    rows = []
    labels = []
    others = []
    for column, (text, scored, places, compared) in enumerate(requests):
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
        others.append(
            torch.full((scored, 1), -1) if compared is None else torch.from_numpy(compared)
        )
    positions = torch.arange(longest, dtype=torch.int32).unsqueeze(1).expand(tokens.shape)
    documents = Documents(positions=positions.contiguous(), padding=padding)
    x = through_stages(loaded, tokens, replace(EVALUATION, documents=documents))
    if x is None:
        return None
    widest = max(tokens.shape[1] for tokens in others)
    apart = torch.cat([F.pad(tokens, (0, widest - tokens.shape[1]), value=-1) for tokens in others])
    found = _score_rows(
        loaded, x.reshape(-1, 1, x.shape[-1]), torch.cat(rows), torch.cat(labels), apart
    )
    parts = torch.split(found, [request.scored for request in requests])
    return torch.stack([part.sum(0) for part in parts])


@torch.no_grad()
def _score_rows(
    loaded: LoadedModel, x: Tensor, rows: Tensor, labels: Tensor, others: Tensor
) -> Tensor:
    """Return log-likelihoods, 1 for likeliest labels, and 1 for labels likelier than all others.

    x (s b, 1, h), rows and labels (r), others (r, any number) -> (r, 3).
    """
    vocabulary = loaded.vocab_size
    found = []
    at_once = max(1, LOGITS_BYTES // (4 * vocabulary))
    for some, wanted, apart in zip(
        *(torch.split(tensor, at_once) for tensor in (rows, labels, others)), strict=True
    ):
        logits = gather_from_tensor_parallel(loaded.logits(x[some]).contiguous(), loaded.groups.tp)
        logits = logits[:, 0, :vocabulary].float()
        own = logits.gather(1, wanted[:, None])
        beaten = own > logits.gather(1, apart.clamp(min=0)).masked_fill(apart < 0, -math.inf)
        found.append(
            torch.stack(
                [own[:, 0] - logits.logsumexp(1), logits.argmax(1) == wanted, beaten.all(1)], 1
            )
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


@dataclass(frozen=True)
class ChatFile:
    """Chats in one file.

    cut: chats truncated to a window
    left_out: chats without trained tokens in it
    """

    path: str
    requests: list[Request]
    cut: int
    left_out: int


def read_chat_file(path: str, template: ChatTemplate, window: int) -> ChatFile:
    requests = []
    cut = 0
    left_out = 0
    for document in read_documents(input_files([path], ["text"], CHAT), CHAT):
        ids, trained = unsigned(template.encode(read_chat(document)))
        cut += len(ids) > window + 1
        places = 1 + np.flatnonzero(trained[1 : window + 1])
        left_out += not len(places)
        if len(places):
            requests.append(Request(ids[: window + 1], len(places), places))
    check(
        len(requests) > 0,
        f"--chats {path}: it has no chats, or none with an answer within the {window} tokens of a window",
    )
    return ChatFile(path, requests, cut, left_out)


@dataclass(frozen=True)
class Question:
    """Multiple-choice question.

    requests: one per choice
    lengths: characters per choice
    bare: choices are scored after a start token (`encode_after`)
    """

    requests: tuple[Request, ...]
    lengths: tuple[int, ...]
    answer: int
    bare: bool


def read_questions(path: str, tokenizer: Tokenizer, window: int) -> list[Question]:
    try:
        records = json.loads(read_text(path, "--choices"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            str(error)
            if str(error).startswith("--choices")
            else f"--choices {path}: not JSON: {error}"
        ) from None
    check(
        isinstance(records, list) and len(records) > 0,
        f"--choices {path}: expected a list of questions",
    )
    questions = []
    for number, record in enumerate(records):
        with about(f"--choices {path}: question {number}"):
            questions.append(_question(record, tokenizer, window))
    return questions


def _question(record: Any, tokenizer: Tokenizer, window: int) -> Question:
    fields: JsonObject = record if isinstance(record, dict) else {}
    context, choices, answer = (fields.get(name) for name in ("context", "choices", "answer"))
    if not (
        isinstance(context, str)
        and isinstance(choices, list)
        and len(choices) > 1
        and all(map(_is_text, choices))
    ):
        raise ValueError(
            'expected {"context": TEXT, "choices": [TEXT, TEXT, ...], "answer": NUMBER}'
        )
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(
            f"answer is {answer!r}: pass the number of a choice, 0 to {len(choices) - 1}"
        )
    requests = tuple(encode_pair(tokenizer, context, choice, window) for choice in choices)
    return Question(requests, tuple(map(len, choices)), answer, bare=not context.strip())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def accuracies(questions: Sequence[Question], likelihoods: Sequence[float]) -> JsonObject:
    """Return the share with the right choice likeliest, also normalized by characters.

    likelihoods: logarithms, for each question's choices
    """
    plain = by_length = start = 0
    for question in questions:
        own = likelihoods[start : start + len(question.requests)]
        start += len(own)
        plain += own.index(max(own)) == question.answer
        scaled = [
            likelihood / length for likelihood, length in zip(own, question.lengths, strict=True)
        ]
        by_length += scaled.index(max(scaled)) == question.answer
    return {
        "accuracy": plain / len(questions),
        "accuracy_norm": by_length / len(questions),
        "questions": len(questions),
        "without_context": sum(question.bare for question in questions),
    }


# Needle in a haystack: whether a model finds one sentence in a long text, by the text's length and by where the sentence is.
#
#     fugaku-megatron evaluate --load checkpoints --needle book.txt --needle-lengths 1024 4096 --png needle.png
#
# A prompt is a part of the text with the sentence at some depth, and then the sentence's beginning again, after which the model
# names the number that the sentence ends with. One forward of prompt and number shows both scores: whether each token of the number
# is the likeliest, so that the greedy answer begins with the number; and how many of them are likelier than the tokens of other
# numbers at their place, which small models reach first. Source: Kamradt 2023, "Needle In A Haystack"
# (github.com/gkamradt/LLMTest_NeedleInAHaystack).

SENTENCE = "The secret number of {} is"
KEYS = ("Kyoto", "Lima", "Oslo", "Cairo", "Perth", "Quebec", "Tunis", "Riga")
# what is hidden; how many others the model does not see
NUMBERS = range(100000, 1000000)
OTHERS = 9
DEPTHS = (0, 25, 50, 75, 100)
SAMPLES = 4
SEED = 1234
TITLE = 60  # characters of a path in a picture
CHARACTERS = 8  # of the text that are read for each token of a prompt; where that is too little, the text repeats


@dataclass(frozen=True)
class Needles:
    """Needle-in-a-haystack prompts.

    requests: by length, depth and sample
    free: per request, number tokens that all other numbers share
    """

    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    samples: int
    requests: list[Request]
    free: list[int]


def check_needle_flags(lengths: Sequence[int], depths: Sequence[int], samples: int | None) -> None:
    counts = () if samples is None else (samples,)
    for name, values, most in (
        ("lengths", lengths, 2**22),
        ("depths", depths, 100),
        ("samples", counts, 10**6),
    ):
        least = int(name != "depths")
        wrong = next((value for value in values if not least <= value <= most), None)
        check(wrong is None, f"--needle-{name} is {wrong}: pass a number from {least} to {most}")


def read_needles(
    path: str,
    tokenizer: Tokenizer,
    model: ModelConfig,
    window: int,
    lengths: tuple[int, ...],
    depths: tuple[int, ...],
    samples: int | None,
) -> Needles:
    """Build the needle prompts from a text.

    depths: percent before the sentence
    window: tokens; default lengths are fractions of it
    """
    lengths = lengths or tuple(sorted({max(1, window // part) for part in (4, 2, 1)}))
    depths = depths or DEPTHS
    samples = samples or SAMPLES
    longest = max(lengths)
    positions = model.max_position_embeddings
    check(
        longest <= positions or not model.learned_positions,
        f"--needle-lengths has {longest}, and the model learned {positions} "
        f"positions: pass at most {positions}",
    )
    text = np.array(
        _within(tokenizer, read_text(path, "--needle")[: CHARACTERS * longest]), np.int32
    )
    check(len(text) > 0, f"--needle {path} has no tokens: pass a text")
    made = [
        _needle_prompt(tokenizer, text, length, depth, number)
        for length in lengths
        for depth in depths
        for number in range(samples)
    ]
    return Needles(
        lengths, depths, samples, [request for request, _ in made], [free for _, free in made]
    )


def _within(tokenizer: Tokenizer, text: str) -> list[int]:
    around = {*tokenizer.encode("")}
    return [token for token in tokenizer.encode(text) if token not in around]


def _needle_prompt(
    tokenizer: Tokenizer, text: np.ndarray, length: int, depth: int, number: int
) -> tuple[Request, int]:
    """Return a prompt, its sentence and text independent of the depth, and `Needles.free`."""
    rng = random.Random(SEED + number)
    sentence = SENTENCE.format(rng.choice(KEYS))
    begin = rng.randrange(len(text))
    question = _within(tokenizer, f"\n{sentence}")
    answer, *others = (
        _within(tokenizer, f"\n{sentence} {value}")[len(question) :]
        for value in rng.sample(NUMBERS, 1 + OTHERS)
    )
    hidden = [*question, *answer, *_within(tokenizer, ".\n")]
    first = tokenizer.encode("")[:1]
    rest = length + 1 - len(first) - len(hidden) - len(question) - len(answer)
    check(
        rest >= 0,
        f"--needle-lengths has {length}, and the sentence and its beginning have {length - rest} tokens: pass more",
    )
    around = text.take(range(begin, begin + rest), mode="wrap")
    before = round(rest * depth / 100)
    tokens = np.concatenate(
        [first, around[:before], hidden, around[before:], question, answer]
    ).astype(np.int32)
    apart = [
        sorted({other[place] for other in others if len(other) > place} - {token})
        for place, token in enumerate(answer)
    ]
    table = np.array([[*tokens, *(OTHERS - len(tokens)) * [-1]] for tokens in apart], np.int64)
    return Request(tokens, len(answer), others=table), sum(not tokens for tokens in apart)


def needle_figures(needles: Needles, scores: Tensor) -> JsonObject:
    """Average `scoring.score`'s (requests, 3) over samples by length and depth."""
    found = []
    for request, free, (likelihood, hits, wins) in zip(
        needles.requests, needles.free, scores.tolist(), strict=True
    ):
        found.append(
            (
                hits == request.scored,
                (wins - free) / max(1, request.scored - free),
                -likelihood / request.scored,
            )
        )
    cells = (
        np.array(found, float)
        .reshape(len(needles.lengths), len(needles.depths), needles.samples, 3)
        .mean(2)
    )
    exact, likelier, loss = cells.transpose(2, 0, 1).tolist()
    return {
        "lengths": [*needles.lengths],
        "depths": [*needles.depths],
        "samples": needles.samples,
        "exact": exact,
        "likelier": likelier,
        "loss": loss,
    }


def needle_lines(figures: JsonObject) -> list[str]:
    rows = [
        [str(length), *(f"{a:.2f} / {b:.2f}" for a, b in zip(exact, likelier, strict=True))]
        for length, exact, likelier in zip(
            figures["lengths"], figures["exact"], figures["likelier"], strict=True
        )
    ]
    heads = ["tokens", *(f"depth {depth} %" for depth in figures["depths"])]
    return [
        f"needle: share of {figures['samples']} greedy answers that are right / share of the number's tokens that are likelier "
        f"than those of {OTHERS} others",
        *pipe_table([heads, *rows]),
    ]


def draw_needles(path: StrPath, figures: JsonObject, place: str) -> None:
    """Draw heat maps (lengths across, depths down) as PNG."""
    lengths = figures["lengths"]
    depths = figures["depths"]
    with picture(path, 5 + 0.9 * len(lengths), 1.8 + 0.4 * len(depths)) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, name, label in zip(
            panels,
            ("exact", "likelier"),
            ("greedy answer is right", "tokens likelier than others"),
        ):
            image = axes.imshow(
                np.array(figures[name]).T, vmin=0, vmax=1, cmap="viridis", aspect="auto"
            )
            axes.set(xticks=range(len(lengths)), xticklabels=lengths, xlabel="tokens", title=label)
        panels[0].set(
            yticks=range(len(depths)),
            yticklabels=[f"{depth} %" for depth in depths],
            ylabel="depth of the sentence",
        )
        figure.colorbar(image, ax=panels, label="share")
        figure.suptitle(f"needle in a haystack\n{shown(place)[-TITLE:]}", fontsize="medium")
