"""Multiple choice by log-likelihood: questions from a JSON file, and how many of them a model answers rightly.

    [{"context": "The sky is", "choices": [" blue", " made of tin"], "answer": 0}, ...]

Context and choice stand together as they are, so a choice begins with its space.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..data.files import read_text
from ..data.tokenizer import Tokenizer
from ..run.checks import check
from .scoring import Request, encode_pair


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
    fields = record if isinstance(record, dict) else {}
    context, choices, answer = (fields.get(name) for name in ("context", "choices", "answer"))
    check(isinstance(context, str) and isinstance(choices, list) and len(choices) > 1 and all(map(_is_text, choices)),
          'expected {"context": TEXT, "choices": [TEXT, TEXT, ...], "answer": NUMBER}')
    check(type(answer) is int and 0 <= answer < len(choices), f"answer is {answer!r}: give the number of a choice, 0 to "
          f"{len(choices) - 1}")
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
