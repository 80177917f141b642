"""Chats of JSON lines: messages, or prompt and completion, or what `record_forms` converts."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from ...text.named_files import JsonObject, about
from ...tokenizers.vocabulary import clean
from ..input.documents import Document, read_record
from ..input.tables import CHAT
from .record_forms import converted

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # which transformers takes for each other
INSTEAD_OF_CONTENT = ("tool_calls", *REASONING)
# with which other programs leave messages out of the training
WEIGHTS = ("weight", "train", "loss", "training", "trainable")
MANY_FIELDS = 20  # that a note names
REASON = 200  # characters of a template's own message that are shown
LOOKS = (
    'pass {"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...}, '
    '{"conversations": [{"from": "human", "value": ...}, ...]} or {"instruction": ..., "output": ...}'
)
# Arguments of transformers' apply_chat_template that are not variables of a template.
OUR_OPTIONS = {
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}

Messages = list[JsonObject]


@dataclass(frozen=True)
class Chat:
    """Chat from one line.

    begin: number of the completion's first message; None: train the assistant
    tools, options: further template arguments
    texts: prompt and completion as texts, in place of messages
    """

    messages: Messages
    begin: int | None = None
    tools: list[Any] | None = None
    options: JsonObject = field(default_factory=dict)
    where: str = "chat"
    unread: frozenset[str] = frozenset()
    texts: tuple[str, str] | None = None


def read_chat(document: Document) -> Chat:
    if document.line == 0:
        raise ValueError(
            f"--input {document.path} is plain text, and chats are JSON lines: pass .jsonl files"
        )
    where, record = read_record(
        document, "a JSON object with messages, or with prompt and completion"
    )
    if b"\\ud" in document.raw.lower():  # a lone surrogate, perhaps
        record = json.loads(clean(json.dumps(record, ensure_ascii=False)))
    return chat_of(record, where)


def chat_of(record: JsonObject, where: str) -> Chat:
    with about(where):
        for key in WEIGHTS:
            if record.get(key) in (False, 0):
                raise ValueError(
                    f"{key} is {record[key]!r}, and every chat is trained: leave the chat out, or {key}"
                )
        record, unread = converted(record)
        return replace(_read(record, where), unread=unread)


def _read(record: JsonObject, where: str) -> Chat:
    tools = record.get("tools")
    options = record.get("chat_template_kwargs") or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise ValueError(
            f"tools is text that is not JSON ({error}): pass a list of tools"
        ) from None
    if not isinstance(tools, list | None) or not isinstance(options, dict):
        raise ValueError("tools must be a list, and chat_template_kwargs an object")
    if ours := sorted(OUR_OPTIONS & options.keys()):
        raise ValueError(
            f"chat_template_kwargs has {', '.join(ours)}, which preprocess decides: leave it out"
        )
    if "messages" in record:
        return Chat(_answered(record["messages"], "messages"), None, tools or None, options, where)
    if not {"prompt", "completion"} <= record.keys():
        raise ValueError(
            f"neither messages nor prompt and completion, only {', '.join(map(repr, record))[:REASON]}: {LOOKS}"
        )
    prompt = record["prompt"]
    completion = record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise ValueError("completion is empty, so that nothing of it would be trained")
        return Chat([], where=where, texts=(prompt, completion))
    before = check_messages(prompt, "prompt")
    return Chat(
        [*before, *_answered(completion, "completion")], len(before), tools or None, options, where
    )


def user_turn(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def _answered(value: object, key: str) -> Messages:
    messages = check_messages(value, key)
    if all(message["role"] != ASSISTANT for message in messages):
        raise ValueError(
            f"{key} has no message of the assistant, so that nothing of it would be trained"
        )
    for number, message in enumerate(messages, start=1):
        for weight in WEIGHTS:
            if message["role"] == ASSISTANT and message.get(weight) not in (None, True, 1):
                raise ValueError(
                    f"message {number} of {key} has {weight} {message[weight]!r:.40}, and every message of the assistant "
                    "is trained alike: leave it out, or pass what is not trained as a prompt"
                )
    return messages


def check_messages(value: object, key: str) -> Messages:
    if not isinstance(value, list):
        raise ValueError(f"{key} is a {type(value).__name__}, not a list of messages: {LOOKS}")
    if not value:
        raise ValueError(f"{key} is empty: a chat without messages")
    for number, message in enumerate(value, start=1):
        _check_message(message, f"message {number} of {key}")
    return value


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f"{name} is not an object with role and content")
    role = message["role"]
    content = message.get("content")
    if role not in ROLES:
        raise ValueError(
            f"{name} has the unknown role {role!r:.60}: pass {', '.join(ROLES[:-1])} or {ROLES[-1]}"
        )
    if content is None and role == ASSISTANT and any(map(message.get, INSTEAD_OF_CONTENT)):
        return
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        kinds = {
            part.get("type")
            for part in content
            if part.get("type") != "text" or not isinstance(part.get("text"), str)
        }
        if kinds:
            shown = ", ".join(sorted(repr(kind)[:40] for kind in kinds))
            raise ValueError(f"{name}: its content has parts of type {shown}: pass text alone")
        return
    if not isinstance(content, str):
        raise ValueError(f"{name}: its content is {type(content).__name__}, not text")


def unread_note(names: Collection[str]) -> str:
    words = []
    for name in sorted(names)[:MANY_FIELDS]:
        near = get_close_matches(name, CHAT.names, n=1, cutoff=0.8)
        hint = f" (did you mean {near[0]}?)" if near else ""
        words.append(f"{name!r:.60}{hint}")
    if len(names) > MANY_FIELDS:
        words.append("...")
    return f"note: fields of chats that nothing reads: {', '.join(words)}" if words else ""
