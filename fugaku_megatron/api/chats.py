"""Chats in memory, as objects or as tokens with a mask, for a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..config.fields import check
from ..config.run_config import RunConfig
from ..data.chat.chat_files import ChatArrays, signed
from ..data.chat.chat_template import ChatTemplate
from ..data.chat.chats import chat_of, unread_note
from ..data.token_arrays import Documents
from ..run.tokenizer import find_tokenizer


def chat_arrays(
    source: Documents, name: str, run: RunConfig, warn: Callable[[str], None]
) -> ChatArrays:
    """Return the tokens of chats with their training mask.

    source: objects with messages, or with prompt and completion, for the tokenizer's chat template;
        or pairs (token ids (n,), mask of trained tokens (n,)).
    name: of the chats in error messages. warn: called with a line about unread fields.
    Raise ValueError for another kind of chat, or an uncertain mask.
    """
    chats = [source[index] for index in range(len(source))]
    template: ChatTemplate | None = None
    made = []
    unread: set[str] = set()
    for index, chat in enumerate(chats):
        where = f"chat {index} of {name}"
        if not isinstance(chat, Mapping):
            made.append(_marked(chat, where))
            continue
        if template is None:
            found = find_tokenizer(run)
            if found is None:
                raise ValueError(
                    "--sft: chats in memory are rendered by the tokenizer's chat template: pass "
                    "tokenizer_type HuggingFaceTokenizer and its folder as tokenizer_model to Config, a "
                    "model with a tokenizer as pretrained_checkpoint, or pairs of token ids and what is "
                    "trained of them"
                )
            template = ChatTemplate(found.build())
        read = chat_of(dict(chat), where)
        unread |= template.unread(read)
        made.append(template.encode(read))
    if unread:
        warn(unread_note(unread))
    return ChatArrays(made, name)


def _marked(chat: Any, where: str) -> np.ndarray:
    expected = (
        "pass chats (messages, or prompt and completion), or pairs (token ids, which of them are "
        "trained)"
    )
    check(
        isinstance(chat, (tuple, list)) and len(chat) == 2,
        f"{where} is no chat of --sft: {expected}",
    )
    try:
        ids, trained = (np.asarray(part) for part in chat)
    except (ValueError, TypeError, RuntimeError):
        raise ValueError(f"{where} is no pair of arrays: {expected}") from None
    check(
        ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in "iu",
        f"{where} has token ids of shape {ids.shape} and type {ids.dtype}: {expected}",
    )
    check(
        trained.shape == ids.shape and set(np.unique(trained).tolist()) <= {0, 1},
        f"{where} has {ids.size} token ids, and what is trained of them has shape "
        f"{trained.shape} and type {trained.dtype}: "
        "pass an array of as many, true or false",
    )
    check(int(ids.min()) >= 0, f"{where} has token id {int(ids.min())}: pass 0 or more")
    return signed(ids, trained.astype(bool))
