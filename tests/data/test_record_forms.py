"""Records of ShareGPT and Alpaca: the messages that LLaMA-Factory makes of them, and what is refused."""

from __future__ import annotations

import json

import pytest

from fugaku_megatron.data.chat.chats import chat_of, read_chat
from fugaku_megatron.data.chat.record_forms import FORMS, MEDIA, SHARED
from fugaku_megatron.data.input.documents import Document
from fugaku_megatron.data.input.tables import CHAT
from tests.checks.chats import assistant, user
from tests.checks.refusals import refusals

pytestmark = pytest.mark.unit

SYSTEM = {"role": "system", "content": "be brief"}


def said(*turns: tuple[str, str]) -> dict:
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


def called(content: str, *functions: dict) -> dict:
    tools = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": content, "tool_calls": tools}


LOOK_UP = {"name": "look_up", "arguments": {"word": "b"}}
ALPACA = {"instruction": "translate", "output": "bonjour"}
TALK = said(("human", "one?"), ("gpt", "two"))


@pytest.mark.parametrize(
    "record, messages",
    [
        (TALK, [user("one?"), assistant("two")]),
        ({**TALK, "system": "be brief"}, [SYSTEM, user("one?"), assistant("two")]),
        (
            said(("system", "be brief"), ("human", "one?"), ("gpt", "two")),
            [SYSTEM, user("one?"), assistant("two")],
        ),
        (
            said(
                ("human", "one?"),
                ("function_call", json.dumps(LOOK_UP)),
                ("observation", "42"),
                ("gpt", "it is 42"),
            ),
            [
                user("one?"),
                called("", LOOK_UP),
                {"role": "tool", "content": "42"},
                assistant("it is 42"),
            ],
        ),
        (
            said(
                ("human", "one?"),
                (
                    "function_call",
                    "<think>hm</think>"
                    + json.dumps([LOOK_UP, {"name": "stop", "arguments": '{"now": true}'}]),
                ),
            ),
            [
                user("one?"),
                called("<think>hm</think>", LOOK_UP, {"name": "stop", "arguments": {"now": True}}),
            ],
        ),
        (ALPACA, [user("translate"), assistant("bonjour")]),
        ({**ALPACA, "input": "hello"}, [user("translate\nhello"), assistant("bonjour")]),
        ({**ALPACA, "input": "", "system": ""}, [user("translate"), assistant("bonjour")]),
        ({**ALPACA, "input": None, "history": None}, [user("translate"), assistant("bonjour")]),
        (
            {**ALPACA, "system": "be brief", "history": [["a", "b"], ["c", "d"]]},
            [
                SYSTEM,
                user("a"),
                assistant("b"),
                user("c"),
                assistant("d"),
                user("translate"),
                assistant("bonjour"),
            ],
        ),
    ],
)
def test_a_record_becomes_messages(record, messages):
    chat = chat_of(record, "chat")
    assert chat.messages == messages and chat.begin is None and not chat.unread


def test_tools_are_wrapped_as_templates_take_them():
    function = {"name": "look_up", "description": "", "parameters": {}}
    wrapped = [{"type": "function", "function": function}]
    for tools in ([function], json.dumps([function]), wrapped):
        assert chat_of({**TALK, "tools": tools}, "chat").tools == wrapped
    assert chat_of({**TALK, "tools": ""}, "chat").tools is None


def test_other_fields_are_named_and_every_column_is_read():
    assert chat_of({**TALK, "id": 1, "images": []}, "chat").unread == {"id"}
    assert chat_of({"messages": [assistant("a")], "system": "b"}, "chat").unread == {"system"}
    names = {name for form in FORMS for name in (*form.keys, *form.others)}
    assert names | {*SHARED, *MEDIA} == {*CHAT.names}


@pytest.mark.parametrize(("_", "record", "line"), refusals("chats"))
def test_a_record_that_is_no_chat_is_refused_with_its_place(_, record, line):
    with pytest.raises(ValueError) as refused:
        read_chat(Document("a.json", 7, record.encode()))
    assert str(refused.value).startswith(f"a.json:7: {line}") and "\n" not in str(refused.value)
