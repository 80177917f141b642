"""Chats of a file as requests to score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config.fields import check
from ..data.chat.chat_files import unsigned
from ..data.chat.chat_template import ChatTemplate
from ..data.chat.chats import read_chat
from ..data.input.documents import read_documents
from ..data.input.input_files import input_files
from ..data.input.tables import CHAT
from .scoring import Request


@dataclass(frozen=True)
class ChatFile:
    """Chats in one file.

    cut: chats truncated to a window
    left_out: chats without trained tokens in it
    """

    path: str
    requests: list[Request]
    cut: int
    left_out: int


def read_chat_file(path: str, template: ChatTemplate, window: int) -> ChatFile:
    """Encode chats as requests of at most `window` + 1 tokens that score the assistant's tokens."""
    requests = []
    cut = 0
    left_out = 0
    for document in read_documents(input_files([path], ["text"], CHAT), CHAT):
        ids, trained = unsigned(template.encode(read_chat(document)))
        cut += len(ids) > window + 1
        places = 1 + np.flatnonzero(trained[1 : window + 1])
        left_out += not len(places)
        if len(places):
            requests.append(Request(ids[: window + 1], len(places), places))
    check(
        len(requests) > 0,
        f"--chats {path}: it has no chats, or none with an answer within the {window} tokens of a window",
    )
    return ChatFile(path, requests, cut, left_out)
