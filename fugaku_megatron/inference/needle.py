"""Needle in a haystack: whether a model finds one sentence in a long text, by the text's length and by where the sentence is.

    fugaku-megatron evaluate --load checkpoints --needle book.txt --needle-lengths 1024 4096 --png needle.png

A prompt is a part of the text with the sentence at some depth, and then the sentence's beginning again, after which the model names
the number that the sentence ends with. One forward of prompt and number shows both scores: whether each token of the number is the
likeliest, so that the greedy answer begins with the number; and how many of them are likelier than the tokens of other numbers at
their place, which small models reach first.
Source: Kamradt 2023, "Needle In A Haystack" (github.com/gkamradt/LLMTest_NeedleInAHaystack).
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..config.checks import check
from ..config.command_line import pipe_table, shown, writing
from ..config.run_config import ModelConfig
from ..data.files import read_text
from ..data.tokenizer import Tokenizer
from .scoring import Request

SENTENCE, KEYS = "The secret number of {} is", ("Kyoto", "Lima", "Oslo", "Cairo", "Perth", "Quebec", "Tunis", "Riga")
NUMBERS, OTHERS = range(100000, 1000000), 9  # what is hidden; how many others the model does not see
DEPTHS, SAMPLES, SEED = (0, 25, 50, 75, 100), 4, 1234
TITLE = 60  # characters of a path in a picture
CHARACTERS = 8  # of the text that are read for each token of a prompt; where that is too little, the text repeats


@dataclass(frozen=True)
class Needles:
    """The prompts of a test. requests: one for each sample of each depth of each length, the samples side by side.

    free: of each request, how many tokens of its number all other numbers share.
    """

    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    samples: int
    requests: list[Request]
    free: list[int]


def check_numbers(lengths: Sequence[int], depths: Sequence[int], samples: int | None) -> None:
    """Raises ValueError for values of the flags that are out of range. Empty, None: left out."""
    counts = () if samples is None else (samples,)
    for name, values, most in (("lengths", lengths, 2**22), ("depths", depths, 100), ("samples", counts, 10**6)):
        least = int(name != "depths")
        wrong = next((value for value in values if not least <= value <= most), None)
        check(wrong is None, f"--needle-{name} is {wrong}: pass a number from {least} to {most}")


def read_needles(path: str, tokenizer: Tokenizer, model: ModelConfig, window: int, lengths: tuple[int, ...],
                 depths: tuple[int, ...], samples: int | None) -> Needles:
    """The prompts in the text of --needle. lengths: tokens that the model reads. depths: percent of the text before the sentence.

    window: the length of which the default lengths are parts. Raises ValueError for a text without tokens, and for
    lengths that are too small for the sentence or too large for the model.
    """
    lengths, depths = lengths or tuple(sorted({max(1, window // part) for part in (4, 2, 1)})), depths or DEPTHS
    samples, longest, positions = samples or SAMPLES, max(lengths), model.max_position_embeddings
    check(longest <= positions or not model.learned_positions, f"--needle-lengths has {longest}, and the model learned {positions} "
          f"positions: pass at most {positions}")
    text = np.array(_within(tokenizer, read_text(path, "--needle")[: CHARACTERS * longest]), np.int32)
    check(len(text) > 0, f"--needle {path} has no tokens: pass a text")
    made = [_prompt(tokenizer, text, length, depth, number) for length in lengths for depth in depths for number in range(samples)]
    return Needles(lengths, depths, samples, [request for request, _ in made], [free for _, free in made])


def _within(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text without those that the tokenizer puts around every text."""
    around = {*tokenizer.encode("")}
    return [token for token in tokenizer.encode(text) if token not in around]


def _prompt(tokenizer: Tokenizer, text: np.ndarray, length: int, depth: int, number: int) -> tuple[Request, int]:
    """The prompt of `length` tokens of a sample, which has the same sentence and text at every depth; and `Needles.free`."""
    chance = random.Random(SEED + number)
    sentence, begin = SENTENCE.format(chance.choice(KEYS)), chance.randrange(len(text))
    question = _within(tokenizer, f"\n{sentence}")
    answer, *others = (_within(tokenizer, f"\n{sentence} {value}")[len(question) :] for value in chance.sample(NUMBERS, 1 + OTHERS))
    hidden, first = [*question, *answer, *_within(tokenizer, ".\n")], tokenizer.encode("")[:1]
    rest = length + 1 - len(first) - len(hidden) - len(question) - len(answer)
    check(rest >= 0, f"--needle-lengths has {length}, and the sentence and its beginning have {length - rest} tokens: pass more")
    around, before = text.take(range(begin, begin + rest), mode="wrap"), round(rest * depth / 100)
    tokens = np.concatenate([first, around[:before], hidden, around[before:], question, answer]).astype(np.int32)
    apart = [sorted({other[place] for other in others if len(other) > place} - {token}) for place, token in enumerate(answer)]
    table = np.array([[*tokens, *(OTHERS - len(tokens)) * [-1]] for tokens in apart], np.int64)
    return Request(tokens, len(answer), others=table), sum(not tokens for tokens in apart)


def needle_figures(needles: Needles, scores: Tensor) -> dict[str, Any]:
    """Means over the samples, by length and depth. scores (requests, 3): as `scoring.score` returns them."""
    found = []
    for request, free, (likelihood, hits, wins) in zip(needles.requests, needles.free, scores.tolist(), strict=True):
        found.append((hits == request.scored, (wins - free) / max(1, request.scored - free), -likelihood / request.scored))
    cells = np.array(found, float).reshape(len(needles.lengths), len(needles.depths), needles.samples, 3).mean(2)
    exact, likelier, loss = cells.transpose(2, 0, 1).tolist()
    return {"lengths": [*needles.lengths], "depths": [*needles.depths], "samples": needles.samples, "exact": exact,
            "likelier": likelier, "loss": loss}


def needle_lines(figures: dict[str, Any]) -> list[str]:
    """The figures for a reader."""
    rows = [[str(length), *(f"{a:.2f} / {b:.2f}" for a, b in zip(exact, likelier, strict=True))]
            for length, exact, likelier in zip(figures["lengths"], figures["exact"], figures["likelier"], strict=True)]
    heads = ["tokens", *(f"depth {depth} %" for depth in figures["depths"])]
    return [f"needle: share of {figures['samples']} greedy answers that are right / share of the number's tokens that are likelier "
            f"than those of {OTHERS} others", *pipe_table([heads, *rows])]


def draw(path: str | os.PathLike, figures: dict[str, Any], place: str) -> None:
    """Two heat maps into a PNG file, lengths across and depths down. ValueError, naming --png, when it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure

    lengths, depths = figures["lengths"], figures["depths"]
    figure = Figure(figsize=(5 + 0.9 * len(lengths), 1.8 + 0.4 * len(depths)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name, label in zip(panels, ("exact", "likelier"), ("greedy answer is right", "tokens likelier than others")):
        image = axes.imshow(np.array(figures[name]).T, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set(xticks=range(len(lengths)), xticklabels=lengths, xlabel="tokens", title=label)
    panels[0].set(yticks=range(len(depths)), yticklabels=[f"{depth} %" for depth in depths], ylabel="depth of the sentence")
    figure.colorbar(image, ax=panels, label="share")
    figure.suptitle(f"needle in a haystack\n{shown(place)[-TITLE:]}", fontsize="medium")
    with writing("--png", os.fspath(path)):
        figure.savefig(path, dpi=120, format="png")
