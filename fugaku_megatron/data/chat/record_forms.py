"""ShareGPT's and Alpaca's records as messages, converted as LLaMA-Factory does.

Source: LLaMA-Factory, src/llamafactory/data/converter.py and data/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ...text.named_files import JsonObject

# Of a conversation: who speaks in turn, and the role of its message.
ASKING = {"human": "user", "observation": "tool"}
ANSWERING = {"gpt": "assistant", "function_call": "assistant"}
MEDIA = ("images", "videos", "audios")


class RecordForm(NamedTuple):
    """Kind of record. keys: all of them make a record one. others: keys that it may have"""

    keys: tuple[str, ...]
    others: tuple[str, ...] = ()
    messages: Callable[[JsonObject], list[JsonObject]] | None = None


def converted(record: JsonObject) -> tuple[JsonObject, frozenset[str]]:
    """Return (record with messages, or with prompt and completion; names that nothing reads).

    Raises ValueError for a record of two forms, and for one that its form does not allow.
    """
    forms = [form for form in FORMS if record.keys() >= {*form.keys}]
    if len(forms) > 1:
        names = " and ".join(", ".join(form.keys) for form in forms)
        raise ValueError(f"it has {names}: pass the chat once")
    if not forms:
        return record, frozenset()
    form = forms[0]
    unread = frozenset(record.keys() - {*form.keys, *form.others, *SHARED})
    if form.messages is None:
        return record, unread
    for name in MEDIA:
        if record.get(name):
            raise ValueError(f"it has {name}: pass text alone")
    messages = form.messages(record)
    if system := _text(record, "system", ""):
        messages.insert(0, {"role": "system", "content": system})
    shared = {name: record[name] for name in SHARED if record.get(name)}
    if "tools" in shared:
        shared["tools"] = _tools(shared["tools"])
    return {**shared, "messages": messages}, unread - {*MEDIA}


def _tools(tools: Any) -> Any:
    """Return tools in the form that templates take; others unchanged, for the check of all chats."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return tools
    if not isinstance(tools, list):
        return tools
    is_bare = [isinstance(tool, dict) and "function" not in tool for tool in tools]
    return [
        {"type": "function", "function": tool} if bare else tool
        for tool, bare in zip(tools, is_bare)
    ]


def _conversation(record: JsonObject) -> list[JsonObject]:
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise ValueError(f"conversations is a {type(turns).__name__}, not a list of messages")
    messages: list[JsonObject] = []
    place = 0
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
            raise ValueError(
                f"message {number} of conversations is not an object with from and value"
            )
        if not isinstance(turn["value"], str):
            kind = type(turn["value"]).__name__
            raise ValueError(f"message {number} of conversations: its value is {kind}, not text")
        speaker = turn["from"]
        if number == 1 and speaker == "system":
            messages.append({"role": "system", "content": turn["value"]})
            continue
        expected = ANSWERING if place % 2 else ASKING
        if not isinstance(speaker, str) or speaker not in expected:
            raise ValueError(
                f"message {number} of conversations is from {speaker!r:.60}, and {' or '.join(expected)} is due: human or observation, "
                "and gpt or function_call, take turns after one system"
            )
        place += 1
        if speaker == "function_call":
            messages.append(_calls(turn["value"], f"message {number} of conversations"))
        else:
            messages.append({"role": expected[speaker], "content": turn["value"]})
    if not place or place % 2:
        raise ValueError("conversations ends without an answer of gpt or function_call")
    if messages[0]["role"] == "system" and record.get("system"):
        raise ValueError(
            "it has system, and a message of system in conversations: pass one of them"
        )
    return messages


def _calls(value: str, name: str) -> JsonObject:
    """Return a message with tool calls from JSON, and with a thought before it as content."""
    thought, mark, rest = value.rpartition("</think>")
    try:
        found = json.loads(rest)
    except (ValueError, RecursionError):
        found = None
    calls = found if isinstance(found, list) else [found]
    functions = [{"name": _name(call, name), "arguments": _arguments(call)} for call in calls]
    tools = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": thought + mark, "tool_calls": tools}


def _name(call: Any, name: str) -> str:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f'{name} is no call: pass {{"name": ..., "arguments": ...}}, or a list')
    return str(call["name"])


def _arguments(call: JsonObject) -> Any:
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    return arguments


def _instruction(record: JsonObject) -> list[JsonObject]:
    messages = []
    pairs = record.get("history") or []
    if not isinstance(pairs, list):
        raise ValueError(f"history is a {type(pairs).__name__}, not a list of pairs")
    for number, pair in enumerate(pairs, start=1):
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"entry {number} of history is not a pair of texts")
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    words = [_text(record, "instruction", None), _text(record, "input", "")]
    messages.append({"role": "user", "content": "\n".join(filter(None, words))})
    messages.append({"role": "assistant", "content": _text(record, "output", None)})
    return messages


def _text(record: JsonObject, name: str, default: str | None) -> str:
    value = record.get(name)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text")
    return value


SHARED = ("tools", "chat_template_kwargs")
FORMS = (
    RecordForm(("messages",)),
    RecordForm(("prompt", "completion")),
    RecordForm(("conversations",), ("system",), _conversation),
    RecordForm(("instruction", "output"), ("input", "history", "system"), _instruction),
)
