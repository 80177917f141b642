"""Records of ShareGPT and Alpaca: the messages that LLaMA-Factory makes of them, and what is refused."""

from __future__ import annotations

import json

import pytest

from fugaku_megatron.data.chat.chats import chat_of, read_chat
from fugaku_megatron.data.chat.record_forms import FORMS, MEDIA, SHARED
from fugaku_megatron.data.input.documents import Document
from fugaku_megatron.data.input.tables import CHAT
from tests.checks.chats import assistant
from tests.checks.refusals import refusals
from tests.helpers import RECORDED

pytestmark = pytest.mark.unit

# Records of each form, and the messages that LLaMA-Factory makes of them.
ROWS = [*map(json.loads, (RECORDED / "chat_records.jsonl").read_text().splitlines())]
TALK = ROWS[0]["record"]


@pytest.mark.parametrize("row", ROWS)
def test_a_record_becomes_messages(row):
    chat = chat_of(row["record"], "chat")
    assert chat.messages == row["messages"] and chat.begin is None and not chat.unread


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
