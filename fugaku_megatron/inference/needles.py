"""Needle in a haystack: find one sentence in a long text, by text length and the sentence's depth.

    fugaku-megatron evaluate --load checkpoints --needle book.txt --needle-lengths 1024 4096 --png needle.png

A prompt ends with the beginning of the hidden sentence, and the model names the number that ends
it. One forward gives both scores: exact if every token of the number is the likeliest, and how many
are likelier than other numbers' tokens. Source: Kamradt 2023, "Needle In A Haystack"
(github.com/gkamradt/LLMTest_NeedleInAHaystack).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..cli.output_files import picture, shown
from ..config.fields import check
from ..config.model import ModelConfig
from ..text.named_files import JsonObject, StrPath, read_text
from ..text.table import pipe_table
from ..tokenizers.tokenizer import Tokenizer
from .scoring import Request

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
