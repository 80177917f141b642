"""Records of ShareGPT and Alpaca: the messages that LLaMA-Factory makes of them, and what is refused."""

from __future__ import annotations

import json

import pytest

from fugaku_megatron.data.chat.chat_files import ChatFiles
from fugaku_megatron.data.chat.chats import chat_of
from fugaku_megatron.data.chat.record_forms import FORMS, MEDIA, SHARED
from fugaku_megatron.data.input.tables import CHAT
from tests.checks.chats import assistant, preprocess, user, write_lines, write_tokenizer

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


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"conversations": "a"}, "conversations is a str, not a list of messages"),
        ({"conversations": []}, "conversations ends without an answer"),
        (
            {"conversations": ["a"]},
            "message 1 of conversations is not an object with from and value",
        ),
        (
            {"conversations": [user("a"), assistant("b")]},
            "message 1 of conversations is not an object with from and value",
        ),
        (
            {"conversations": [{"from": "human", "value": None}]},
            "message 1 of conversations: its value is NoneType, not text",
        ),
        (
            said(("user", "a"), ("assistant", "b")),
            "message 1 of conversations is from 'user', and human or observation is due",
        ),
        (
            said(("gpt", "a")),
            "message 1 of conversations is from 'gpt', and human or observation is due",
        ),
        (
            said(("human", "a"), ("human", "b")),
            "message 2 of conversations is from 'human', and gpt or function_call is due",
        ),
        (said(("human", "a"), ("system", "b")), "message 2 of conversations is from 'system'"),
        (
            said(("human", "a"), ("gpt", "b"), ("human", "c")),
            "conversations ends without an answer",
        ),
        (said(("human", "a"), ("function_call", "b")), "message 2 of conversations is no call"),
        (said(("human", "a"), ("function_call", "{}")), "message 2 of conversations is no call"),
        (
            {**said(("system", "a"), ("human", "b"), ("gpt", "c")), "system": "d"},
            "it has system, and a message of system",
        ),
        ({**TALK, "images": ["a.png"]}, "it has images: pass text alone"),
        (
            {**TALK, "messages": [user("a"), assistant("b")]},
            "it has messages and conversations: pass the chat once",
        ),
        ({**TALK, "system": 1}, "system is int, not text"),
        ({**ALPACA, "output": 1}, "output is int, not text"),
        ({**ALPACA, "instruction": None}, "instruction is NoneType, not text"),
        ({**ALPACA, "input": ["a"]}, "input is list, not text"),
        ({**ALPACA, "history": "a"}, "history is a str, not a list of pairs"),
        ({**ALPACA, "history": [["a", "b"], ["c"]]}, "entry 2 of history is not a pair of texts"),
        ({"instruction": "a"}, "neither messages nor prompt and completion, only 'instruction'"),
    ],
)
def test_an_unknown_shape_is_refused_with_its_place(record, reason):
    with pytest.raises(ValueError) as refused:
        chat_of(record, "a.json:7")
    assert str(refused.value).startswith(f"a.json:7: {reason}") and "\n" not in str(refused.value)


def test_preprocess_reads_lines_and_arrays_of_records(tmp_path, capsys):
    folder = write_tokenizer(tmp_path / "tokenizer")
    records = [TALK, {**ALPACA, "input": "hello"}]
    write_lines(tmp_path / "lines.jsonl", *records)
    (tmp_path / "array.json").write_text(json.dumps(records, indent=2))
    for source in ("lines.jsonl", "array.json"):
        prefix = tmp_path / source.partition(".")[0]
        words = ("--keep-order", "--workers", "1")
        assert preprocess(folder, tmp_path / source, prefix, *words) == 0
        shown = capsys.readouterr().out
        assert "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n[+two<|im_end|>" in shown
        assert "<|im_start|>user\ntranslate\nhello<|im_end|>\n" in shown and "[+bonjour<" in shown
        assert len(ChatFiles(prefix)) == 2
    write_lines(tmp_path / "bad.jsonl", TALK, said(("human", "a"), ("bot", "b")))
    assert preprocess(folder, tmp_path / "bad.jsonl", tmp_path / "bad") == 2
    error = capsys.readouterr().err.strip()
    assert "bad.jsonl:2: message 2 of conversations is from 'bot'" in error
    assert len(error.splitlines()) == 1
