"""Chats of many kinds, and the text of the assistant's turns in them, found without `Turns`.

The reference renders a chat with plain words as contents, searches these words' turns by the
literal header and stop of a template, and puts the real content of each message back in turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.helpers import RECORDED


def calls(content, *names: str, **more) -> dict:
    functions = [{"name": name, "arguments": {"word": "b"}} for name in names]
    tools = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": content, "tool_calls": tools, **more}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "looks a word up",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
CHATS: dict[str, list[dict]] = json.loads((RECORDED / "chats.json").read_text())


@dataclass(frozen=True)
class Shape:
    """Text around each of a template's turns, as regular expressions.

    header: before what the assistant writes
    stop: the end of a turn that is not the last message
    opened: what the generation prompt adds to the header, if a turn repeats it
    """

    header: str
    stop: str
    opened: str = ""

    @classmethod
    def of(cls, header: str, *stops: str, opened: str = "") -> Shape:
        return cls(re.escape(header), "|".join(map(re.escape, stops)), opened)


CHATML_SHAPE = Shape.of("<|im_start|>assistant\n", "<|im_end|>\n")
OPENED_SHAPE = Shape.of("<|im_start|>assistant\n", "<|im_end|>\n", opened="<think>\n")


def words(number: int, message: dict) -> dict:
    """Return the message with a plain word as content; a tool's answer and no content stay."""
    has_words = message["role"] != "tool" and (message["content"] or "").strip()
    return {**message, "content": f"Word{number}x"} if has_words else message


def expected_text(render: Callable[[list[dict]], str], messages: list[dict], shape: Shape) -> str:
    """Return the rendered chat with [+ and +] around the assistant's turns."""
    header, stop = (re.compile(pattern, re.DOTALL) for pattern in (shape.header, shape.stop))
    plain = [words(number, message) for number, message in enumerate(messages)]
    text = render(plain)
    whole = render(messages)
    shown = ""
    place = shown_to = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        begin = found(header, text, place).end()
        is_last = number + 1 == len(messages)
        place = len(text) if is_last else found(stop, text, begin).end()
        own = render([*plain[:number], message, *plain[number + 1 :]])
        assert own[:begin] == text[:begin] and own.endswith(text[place:])
        turn = own[begin : len(own) - len(text) + place]
        ends = [match.end() for match in header.finditer(whole, shown_to)]
        first = next(end for end in ends if whole.startswith(turn, end))
        end = first + len(turn)
        if shape.opened and turn.startswith(shape.opened):
            first += len(shape.opened)
        shown += f"{whole[shown_to:first]}[+{whole[first:end]}+]"
        shown_to = end
    return (shown + whole[shown_to:]).replace("+][+", "")


def found(pattern: re.Pattern[str], text: str, place: int) -> re.Match[str]:
    match = pattern.search(text, place)
    assert match, f"no {pattern.pattern!r} in {text[place:]!r}"
    return match
