"""Chats of many kinds, and the text of the assistant's turns in them, found without `Turns`.

The reference renders a chat with plain words as contents, searches these words' turns by the
literal header and stop of a template, and puts the real content of each message back in turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fugaku_megatron.data.chat.chats import user_turn as user
from tests.checks.chats import assistant


def calls(content, *names: str, **more) -> dict:
    functions = [{"name": name, "arguments": {"word": "b"}} for name in names]
    tools = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": content, "tool_calls": tools, **more}


def tool(content: str, name: str = "look_up") -> dict:
    return {"role": "tool", "content": content, "name": name}


def thinks(content: str, thought: str) -> dict:
    return {**assistant(content), "reasoning_content": thought}


SYSTEM = {"role": "system", "content": "be brief"}
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
CHATS: dict[str, list[dict]] = {
    "one turn": [user("a question"), assistant("an answer")],
    "two turns": [user("one?"), assistant("two"), user("and?"), assistant("three")],
    "a system message": [SYSTEM, user("one?"), assistant("two"), user("and?"), assistant("three")],
    "many turns": [user("ask"), assistant("say"), user("more"), assistant("less")] * 5,
    "a user's turn last": [user("one?"), assistant("two"), user("thanks")],
    "the assistant first": [assistant("welcome"), user("one?"), assistant("two")],
    "two answers": [user("one?"), assistant("two"), assistant("and a half")],
    "an empty answer": [user("one?"), assistant(""), user("well?"), assistant("two")],
    "an echo": [
        user("same words"),
        assistant("same words"),
        user("same words"),
        assistant("same words"),
    ],
    "white space": [
        user("one?"),
        assistant("\n\n  two \n"),
        user(" and?\n"),
        assistant("\tthree\n\n"),
    ],
    "lines": [user("a\nb"), assistant("c\n\nd\n```\ne\n```"), user("f"), assistant("1. g\n2. h")],
    "other scripts": [
        user("日本語?"),
        assistant("はい、🙂 é"),
        user("ñ"),
        assistant("\u05d0\u200f"),
    ],
    "thoughts in the text": [
        user("one?"),
        assistant("<think>\nhm\n</think>\n\ntwo"),
        user("and?"),
        assistant("<think>\nwell\n</think>\n\nthree"),
    ],
    "thoughts": [user("one?"), thinks("two", "hm"), user("and?"), thinks("three", "well")],
    "a thought alone": [user("one?"), thinks("", "hm")],
    "tokens in the text": [
        user("what is <|im_start|>assistant\n?"),
        assistant("write <tool_call> and </think>, <|im_end|> or </s>"),
        user("and <think>?"),
        assistant("it begins </tool_call>"),
    ],
    "a call": [user("one?"), calls(None, "look_up"), tool("42"), assistant("it is 42")],
    "a call with an empty text": [
        user("one?"),
        calls("", "look_up"),
        tool("42"),
        assistant("it is 42"),
    ],
    "a call with a text": [
        user("one?"),
        calls("let me see", "look_up"),
        tool("42"),
        assistant("so 42"),
    ],
    "two calls": [
        user("one?"),
        calls("", "look_up", "look_up"),
        tool("42"),
        tool("43"),
        assistant("it is 42"),
        user("and?"),
        assistant("43"),
    ],
    "calls one by one, with thoughts": [
        user("one?"),
        calls("", "look_up", reasoning_content="hm"),
        tool("42"),
        calls("", "look_up", reasoning_content="again"),
        tool("43"),
        thinks("it is 43", "so"),
    ],
}


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
