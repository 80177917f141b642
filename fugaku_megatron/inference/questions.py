"""Multiple-choice questions and their accuracies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config.fields import check
from ..text.named_files import JsonObject, about, read_text
from ..tokenizers.tokenizer import Tokenizer
from .scoring import Request, encode_pair


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
