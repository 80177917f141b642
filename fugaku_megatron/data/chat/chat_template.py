"""Tokenize chats with a tokenizer's chat template, and mark the assistant's tokens.

They are found by {% generation %} markers, or from renderings (`turns`). A chat whose turns cannot
be found is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ...text.input_errors import NeverSkipped
from ...text.named_files import JsonObject, read_text
from ...tokenizers.hugging_face import HuggingFaceTokenizer
from ...tokenizers.tokenizer import Tokenizer
from ...tokenizers.vocabulary import clean
from .chat_files import signed, unsigned
from .chats import (
    ASSISTANT,
    INSTEAD_OF_CONTENT,
    REASON,
    REASONING,
    WEIGHTS,
    Chat,
    Messages,
    user_turn,
)
from .template_process import LARGEST_TEMPLATE, TemplateLimit, TemplateRefusal, apply_chat_template
from .training_forms import training_form
from .turns import FORM, MARK, Turns

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
Trained = tuple[np.ndarray, np.ndarray]  # token ids, and True for those that are trained


class ChatTemplate:
    """Chat template from a Hugging Face tokenizer, or another one. form: row in TRAINING_FORMS

    Raises ValueError without a template, and for other tokenizers.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None):
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ValueError(
                f"--chat needs a tokenizer with a chat template, and {tokenizer.name} has none: pass --tokenizer-type "
                f"{HuggingFaceTokenizer.name} and the folder as --tokenizer-model"
            )
        self._library = tokenizer.library
        try:
            self.text: str = self._library.get_chat_template(template)
        except ValueError:
            named = self._library.chat_template
            if isinstance(named, dict):
                raise ValueError(
                    f"the tokenizer of --tokenizer-model has chat templates named {', '.join(named)}, and none named "
                    "default: pass one as --chat-template FILE"
                ) from None
            raise ValueError(
                "the tokenizer of --tokenizer-model has no chat template: pass one as --chat-template FILE, such as "
                "the chat_template.jinja of the model's chat version"
            ) from None
        if len(self.text) > LARGEST_TEMPLATE:
            raise ValueError(
                f"the chat template of --tokenizer-model has {len(self.text)} characters, more than "
                f"{LARGEST_TEMPLATE}: pass another one as --chat-template FILE"
            )
        self._marks = MARKER.search(self.text) is not None
        self._for_training = self.text
        self.form: str | None = None
        if not self._marks:
            self._for_training, self.form = training_form(self.text, self._renders_alike)
            self._marks = self.form is not None
        # transformers applies the template named tool_use to chats with tools
        for_tools = self._library.get_chat_template(template, tools=[])
        self._with_tools = None
        if for_tools != self.text:
            self._with_tools = ChatTemplate(tokenizer, for_tools)
        kinds = self._library.added_tokens_decoder
        special = {token for token, kind in kinds.items() if kind.special}
        self._special: set[int] = special | {*self._library.all_special_ids}
        self._added: set[int] = self._special | {*kinds}
        names = sorted({*self._library.all_special_tokens, *map(str, kinds.values())}, key=len)
        self._pattern = re.compile("|".join(map(re.escape, names[::-1])) or r"(?!)")

    def _renders_alike(self, changed: str, template: str) -> bool:
        chat = Chat([user_turn("Hello"), {"role": ASSISTANT, "content": "Hello!"}])
        try:
            one, other = (self._text(chat, chat.messages, form) for form in (changed, template))
            return one == other
        except ValueError:
            return False

    @property
    def how(self) -> str:
        if self.form:
            return f"by generation markers; the template is {self.form}'s, changed for training as trl does"
        return (
            "by the template's generation markers"
            if self._marks
            else "turn by turn, as the template has no generation markers"
        )

    def encode(self, chat: Chat) -> np.ndarray:
        """Return int32 (n,), as `chat_files.signed`."""
        if chat.tools and self._with_tools is not None:
            return self._with_tools.encode(chat)
        try:
            ids, trained = self._encode(chat)
            if not trained.any():
                raise ValueError(
                    "the template renders no token of the assistant that could be trained"
                )
            if not chat.texts:
                self._check_ends(ids, trained, self._stops or self._find_stops(chat))
        except NeverSkipped as error:
            raise type(error)(f"{chat.where}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{chat.where}: {error}") from None
        return signed(ids, trained)

    def prompt(self, messages: Messages) -> list[int]:
        chat = self._as_taken(Chat(messages))
        return list(self._rendered(chat, chat.messages, add_generation_prompt=True)["input_ids"])

    @cached_property
    def ends(self) -> frozenset[int]:
        turn = self.encode(Chat([user_turn("Hello"), {"role": ASSISTANT, "content": "Hello"}]))
        ids, trained = unsigned(turn)
        ends = {self._last_word(ids[trained]), self._library.eos_token_id}
        return frozenset(ends - {None})

    def unread(self, chat: Chat) -> frozenset[str]:
        names = {name for message in chat.messages for name in message if name not in self.text}
        names -= {"role", "content", *WEIGHTS}
        if any(name in self.text for name in REASONING):
            names -= {*REASONING}
        return chat.unread | {f"{name} of messages" for name in names}

    @cached_property
    def _stops(self) -> frozenset[int]:
        return self._find_stops(Chat([]))

    def _find_stops(self, chat: Chat) -> frozenset[int]:
        """Return special or added tokens that end a plain answer, whose own text has none.

        chat: its tools and options are passed to the template
        """
        talk = [user_turn("Hello"), {"role": ASSISTANT, "content": "Hello"}] * 2
        ends: list[int | None] = []
        for messages in (talk[:2], talk):
            try:
                plain = self._as_taken(Chat(messages, tools=chat.tools, options=chat.options))
                ids, trained = self._encode_messages(plain)
            except NeverSkipped:
                raise
            except ValueError:
                continue
            ends += [self._last_word(turn) for turn in _runs(ids, trained)]
        return frozenset(self._added.intersection(ends))

    @cached_property
    def _takes(self) -> tuple[bool, bool]:
        """Return (takes text, takes lists of texts): renders a user's words of this kind."""
        texts = []
        for content in (MARK, [{"type": "text", "text": MARK}]):
            chat = Chat([{"role": "user", "content": content}])
            try:
                texts.append(self._text(chat, chat.messages))
            except NeverSkipped:
                raise
            except ValueError:
                texts.append("")
        takes_text = MARK in texts[0]
        takes_parts = MARK in texts[1] and (not takes_text or texts[0] == texts[1])
        return takes_text or not takes_parts, takes_parts

    def _as_taken(self, chat: Chat) -> Chat:
        """Convert contents to the kind that the template renders: text for a list, and for none."""
        takes_text, takes_parts = self._takes
        whole = list(chat.messages)
        for number, message in enumerate(whole):
            content = message.get("content")
            if isinstance(content, list) and not takes_parts:
                content = "".join(part["text"] for part in content)
            elif isinstance(content, str) and not takes_text:
                content = [{"type": "text", "text": content}]
            whole[number] = {**message, "content": content} if content is not None else message
        empty = [number for number, message in enumerate(whole) if message.get("content") is None]
        if empty:
            try:
                self._text(chat, whole)
            except NeverSkipped:
                raise
            except ValueError:
                for number in empty:
                    whole[number] = {**whole[number], "content": ""}
        self._check_rendered(chat, whole)
        return replace(chat, messages=whole)

    def _check_rendered(self, chat: Chat, messages: Messages) -> None:
        """Raise ValueError if calls or thoughts in place of a content are not rendered.

        A template that reads calls has to render those next to a content too.
        """
        probes = {}
        for number, message in enumerate(messages):
            instead = [name for name in INSTEAD_OF_CONTENT if message.get(name)]
            reads = "tool_calls" in instead and "tool_calls" in self.text
            if message["role"] == ASSISTANT and instead and (reads or _is_blank(message)):
                probes[number] = instead[0]
        if not probes:
            return
        whole = list(messages)
        for number in probes:
            whole[number] = _probe(whole[number], f"{MARK}{number}_")
        text = self._text(chat, whole, self._for_training)
        for number, name in probes.items():
            if f"{MARK}{number}_" not in text:
                what = "tool calls" if name == "tool_calls" else name
                alone = " and no content" if _is_blank(messages[number]) else ""
                raise ValueError(
                    f"message {number + 1} has {what}{alone}, and the chat template does not render {what}{alone and ' there'}: pass "
                    "another one as --chat-template FILE"
                )

    def _encode(self, chat: Chat) -> Trained:
        if chat.texts:
            return self._encode_texts(*chat.texts)
        chat = self._as_taken(chat)
        if chat.begin is None:
            return self._encode_messages(chat)
        prompt = chat.messages[: chat.begin]
        if all(message["role"] == ASSISTANT for message in chat.messages[chat.begin :]):
            text = self._text(chat, chat.messages)
            before = self._text(chat, prompt, add_generation_prompt=True)
            if text.startswith(before):
                return self._tokens(text, [(len(before), len(text))])
        if not self._marks:
            return self._encode_messages(chat, chat.begin)
        text = self._text(chat, chat.messages, self._for_training)
        before = self._text(chat, prompt, self._for_training)
        if not text.startswith(before):
            raise ValueError(
                "the chat template renders the prompt differently alone and before its completion: pass the chat as "
                "messages, whose every answer is trained"
            )
        ids, trained = self._encode_messages(chat)
        return ids, trained & self._tokens(text, [(len(before), len(text))])[1]

    def _encode_texts(self, prompt: str, completion: str) -> Trained:
        """Tokenize as trl: the completion begins at the first token that differs from the prompt's."""
        eos = self._library.eos_token
        if eos is None:
            raise ValueError(
                "the tokenizer has no token that ends a text, which must follow a completion"
            )
        completion += "" if completion.endswith(eos) else eos
        before, ids = (
            np.array(self._library(clean(text)).input_ids, np.int32)
            for text in (prompt, prompt + completion)
        )
        shorter = min(len(before), len(ids))
        differing = np.flatnonzero(before[:shorter] != ids[:shorter])
        return ids, np.arange(len(ids)) >= (differing[0] if len(differing) else shorter)

    def _encode_messages(self, chat: Chat, first: int = 0) -> Trained:
        """Tokenize; without markers, the answers from message `first` on are trained."""
        if self._marks:
            found = self._rendered(
                chat, chat.messages, self._for_training, return_assistant_tokens_mask=True
            )
            return np.array(found["input_ids"], np.int32), np.array(found["assistant_masks"], bool)
        text = self._text(chat, chat.messages)

        def render(messages: Messages, prompt: bool) -> str:
            return self._text(chat, messages, add_generation_prompt=prompt)

        return self._tokens(text, Turns(chat.messages, text, render, self._pattern).spans(first))

    def _tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> Trained:
        """Tokenize a rendered text. Tokens are trained that end in a span, also if they begin before."""
        found = self._library(
            text, add_special_tokens=False, return_offsets_mapping=self._library.is_fast
        )
        ids = np.array(found["input_ids"], np.int32)
        trained = np.zeros(len(ids), bool)
        if self._library.is_fast:
            ends = np.array(found["offset_mapping"]).reshape(-1, 2)[:, 1]
            for begin, end in spans:
                trained |= (ends > begin) & (ends <= end)
            return ids, trained
        for begin, end in spans:
            first, last = (
                np.array(
                    self._library(text[:place], add_special_tokens=False)["input_ids"], np.int32
                )
                for place in (begin, end)
            )
            if not (
                np.array_equal(first, ids[: len(first)]) and np.array_equal(last, ids[: len(last)])
            ):
                raise ValueError(f"a token holds text of two turns: {FORM}")
            trained[len(first) : len(last)] = True
        return ids, trained

    def _text(self, chat: Chat, messages: Messages, template: str | None = None, **how: Any) -> str:
        how |= {"tokenize": False, "return_dict": False}
        return str(self._rendered(chat, messages, template, **how))

    def _rendered(
        self, chat: Chat, messages: Messages, template: str | None = None, **how: Any
    ) -> Any:
        """Render messages. template: None: the one for chats that are not trained"""
        try:
            return apply_chat_template(
                self._library,
                messages,
                tools=chat.tools,
                chat_template=template or self.text,
                **{"return_dict": True, **how},
                **chat.options,
            )
        except TemplateLimit as error:
            raise TemplateLimit(f"the chat template cannot render it ({error})") from None
        except NeverSkipped:  # of the tokenizer
            raise
        except Exception as error:  # any of the library, depending on what is wrong
            name = "" if isinstance(error, TemplateRefusal) else f"{type(error).__name__}: "
            reason = " ".join(f"{name}{error}".split())
            raise ValueError(f"the chat template cannot render it ({reason[:REASON]})") from None

    def _check_ends(self, ids: np.ndarray, trained: np.ndarray, stops: frozenset[int]) -> None:
        """Raise ValueError unless every turn ends with an end token: the model would never stop.

        stops: tokens that end a plain answer; without any, added tokens are text of the answer.
        """
        for turn in _runs(ids, trained):
            last = self._last_word(turn)
            if not stops or last not in stops | self._special:
                raise ValueError(
                    "the chat template does not end a turn of the assistant with a special token that is trained, so "
                    f"that a model would not learn to stop: {FORM}"
                )

    def _last_word(self, ids: np.ndarray) -> int | None:
        for token in map(int, ids[::-1]):
            if token in self._special or self._library.decode([token]).strip():
                return token
        return None


def read_template(path: str | None) -> str | None:
    return None if path is None else read_text(path, "--chat-template", largest=LARGEST_TEMPLATE)


def _runs(ids: np.ndarray, trained: np.ndarray) -> Iterator[np.ndarray]:
    borders = np.flatnonzero(np.diff(trained, prepend=False, append=False))
    for start, end in zip(borders[::2], borders[1::2]):
        yield ids[start:end]


def _is_blank(message: JsonObject) -> bool:
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return not "".join(texts).strip()


def _probe(message: JsonObject, mark: str) -> JsonObject:
    """Return the message with a mark as each tool's name, or as its thoughts."""
    calls = message.get("tool_calls")
    if not calls:
        return {**message, **{name: mark for name in REASONING if message.get(name)}}
    named = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            named.append({**call, "function": {**function, "name": mark}})
        else:
            named.append({**call, "name": mark} if isinstance(call, dict) else call)
    return {**message, "tool_calls": named}
