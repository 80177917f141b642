"""Tokenize chats with a tokenizer's chat template, and mark the assistant's tokens.

Trained tokens equal trl's SFTTrainer with assistant_only_loss or completion_only_loss. They are
found by {% generation %} markers, or by rendering turn by turn. An ambiguous chat is refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ...text.named_files import JsonObject, read_text
from ...tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from ...tokenizers.tokenizer import Tokenizer
from ...tokenizers.utf8 import clean
from .chat_files import signed, unsigned
from .chats import ASSISTANT, REASON, REASONING, WEIGHTS, Chat, Messages, user_turn
from .template_process import LARGEST_TEMPLATE, TemplateLimit, TemplateRefusal, apply_chat_template
from .training_forms import training_form

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = "fmAnswer7Mark"  # stands for an answer's content, to find where a template puts it
NOT_FOUND = (
    "the chat template renders {what} differently alone and in the whole chat, so that the assistant's tokens cannot be found: pass "
    "--chat-template FILE, the template with {{% generation %}} and {{% endgeneration %}} around what the assistant writes"
)
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
        self.marked = MARKER.search(self.text) is not None
        self._for_training = self.text
        self.form: str | None = None
        if not self.marked:
            self._for_training, self.form = training_form(self.text, self._renders_alike)
        # transformers applies the template named tool_use to chats with tools
        for_tools = self._library.get_chat_template(template, tools=[])
        self._with_tools = None
        if for_tools != self.text:
            self._with_tools = ChatTemplate(tokenizer, for_tools)
        self._special: set[int] = {
            *self._library.get_added_vocab().values(),
            *self._library.all_special_ids,
        }

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
            if self.marked
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
            self._check_ends(ids, trained)
        except TemplateLimit as error:
            raise TemplateLimit(f"{chat.where}: {error}") from None
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
    def _takes_parts(self) -> bool:
        """True for a template that renders a one-text list like the text."""
        texts = []
        for content in ("Hello", [{"type": "text", "text": "Hello"}]):
            chat = Chat([{"role": "user", "content": content}])
            try:
                texts.append(self._text(chat, chat.messages))
            except ValueError:
                return False
        return texts[0] == texts[1]

    def _as_taken(self, chat: Chat) -> Chat:
        """Convert contents to the kind that the template renders: text for a list, and for none."""
        whole = list(chat.messages)
        contents = [message.get("content") for message in whole]
        if any(isinstance(content, list) for content in contents) and not self._takes_parts:
            for number, content in enumerate(contents):
                if isinstance(content, list):
                    content = "".join(part["text"] for part in content)
                whole[number] = {**whole[number], "content": content}
        empty = [number for number, content in enumerate(contents) if content is None]
        if not empty:
            return replace(chat, messages=whole)
        try:
            text = self._text(chat, whole)
        except ValueError:
            for number in empty:
                whole[number] = {**whole[number], "content": ""}
            text = self._text(chat, whole)
        for number, message in enumerate(whole, start=1):
            if not message.get("content") and not all(
                name in text for name in _tool_names(message)
            ):
                raise ValueError(
                    f"message {number} has tool calls and no content, and the chat template does not render tool calls: pass "
                    "another one as --chat-template FILE"
                )
        return replace(chat, messages=whole)

    def _encode(self, chat: Chat) -> Trained:
        if chat.texts:
            return self._encode_texts(*chat.texts)
        chat = self._as_taken(chat)
        if chat.begin is None:
            return self._encode_messages(chat)
        only_answers = all(message["role"] == ASSISTANT for message in chat.messages[chat.begin :])
        template = self.text if only_answers else self._for_training
        prompt = chat.messages[: chat.begin]
        before = self._ids(chat, prompt, template, prompt=True)
        if only_answers:
            ids = self._ids(chat, chat.messages)
            trained = np.ones(len(ids), bool)
        else:
            ids, trained = self._encode_messages(chat)
        begin = len(before)
        if only_answers and not np.array_equal(before, ids[:begin]):  # a token holds text of both
            text = self._text(chat, prompt, add_generation_prompt=True)
            whole = self._text(chat, chat.messages)
            _, ends = self._offsets(ids, whole)
            if whole.startswith(text):
                before = ids[: np.searchsorted(ends, len(text), side="right")]
        self._check_prefix(before, ids, "the prompt")
        trained[: len(before)] = False
        return ids, trained

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

    def _encode_messages(self, chat: Chat) -> Trained:
        if self.marked or self.form:
            found = self._rendered(
                chat, chat.messages, self._for_training, return_assistant_tokens_mask=True
            )
            return np.array(found["input_ids"], np.int32), np.array(found["assistant_masks"], bool)
        ids = self._ids(chat, chat.messages)
        try:
            return ids, self._trained_by_prefixes(chat, ids)
        except ValueError:  # parts of a chat that differ from the whole, or cannot be rendered
            return ids, self._trained_by_text(chat, ids)

    def _trained_by_prefixes(self, chat: Chat, ids: np.ndarray) -> np.ndarray:
        trained = np.zeros(len(ids), bool)
        for number, message in enumerate(chat.messages):
            if message["role"] == ASSISTANT:
                before = self._ids(chat, chat.messages[:number], prompt=True)
                after = self._ids(chat, chat.messages[: number + 1])
                self._check_prefix(before, ids, f"what is before message {number + 1}")
                self._check_prefix(after, ids, f"the chat up to message {number + 1}")
                trained[len(before) : len(after)] = True
        return trained

    def _trained_by_text(self, chat: Chat, ids: np.ndarray) -> np.ndarray:
        """Return bool (n,): answers, found in the rendered text if tokens cross their borders.

        As in transformers' assistant mask, an answer's outer tokens may contain adjacent text.
        """
        text = self._text(chat, chat.messages)
        begins, ends = self._offsets(ids, text)
        trained = np.zeros(len(ids), bool)
        for number, message in enumerate(chat.messages):
            if message["role"] == ASSISTANT:
                begin, end = self._answer(chat, number, text)
                trained |= (ends > begin) & (begins < end)
        return trained

    def _offsets(self, ids: np.ndarray, text: str) -> tuple[np.ndarray, np.ndarray]:
        if not self._library.is_fast:
            raise ValueError(NOT_FOUND.format(what="a turn"))
        found = self._library(text, add_special_tokens=False, return_offsets_mapping=True)
        self._check_prefix(np.array(found["input_ids"], np.int32), ids, "its text")
        places = np.array(found["offset_mapping"]).reshape(-1, 2)
        return places[:, 0], places[:, 1]

    def _answer(self, chat: Chat, number: int, text: str) -> tuple[int, int]:
        """Return begin and end for a message in the rendered chat, including the end-of-turn token.

        Compare the renderings before and up to the message. If the template renders earlier turns
        differently, search around a placeholder.
        """
        whole = chat.messages
        if number:
            before = self._text(chat, whole[:number], add_generation_prompt=True)
            after = self._text(chat, whole[: number + 1])
            if text.startswith(before) and text.startswith(after):
                return len(before), len(after)
        marked = [
            {**message, "content": MARK} if place == number else message
            for place, message in enumerate(whole)
        ]
        head, mark, tail = self._text(chat, marked).partition(MARK)
        is_around = text.startswith(head) and text.endswith(tail)
        end_of_turn = self._end_of_turn(tail)
        if not (mark and is_around and len(head) + len(tail) <= len(text) and end_of_turn):
            raise ValueError(NOT_FOUND.format(what=f"message {number + 1}"))
        return len(head), len(text) - len(tail) + end_of_turn

    def _end_of_turn(self, tail: str) -> int:
        special = map(self._library.convert_ids_to_tokens, sorted(self._special))
        space = len(tail) - len(tail.lstrip())
        found = [token for token in special if token and tail.startswith(token, space)]
        return space + max(map(len, found)) if found else 0

    def _ids(
        self, chat: Chat, messages: Messages, template: str | None = None, prompt: bool = False
    ) -> np.ndarray:
        found = self._rendered(chat, messages, template, add_generation_prompt=prompt)
        return np.array(found["input_ids"], np.int32)

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
        except Exception as error:  # any of the library, depending on what is wrong
            name = "" if isinstance(error, TemplateRefusal) else f"{type(error).__name__}: "
            reason = " ".join(f"{name}{error}".split())
            raise ValueError(f"the chat template cannot render it ({reason[:REASON]})") from None

    @staticmethod
    def _check_prefix(part: np.ndarray, whole: np.ndarray, what: str) -> None:
        if not np.array_equal(part, whole[: len(part)]):
            raise ValueError(NOT_FOUND.format(what=what))

    def _check_ends(self, ids: np.ndarray, trained: np.ndarray) -> None:
        """Raise ValueError unless every turn ends with an end token: the model would never stop."""
        borders = np.flatnonzero(np.diff(trained, prepend=False, append=False))
        for start, end in zip(borders[::2], borders[1::2]):
            if self._last_word(ids[start:end]) not in self._special:
                raise ValueError(
                    "the chat template does not end a turn of the assistant with a special token that is trained, so "
                    "that a model would not learn to stop: pass another one as --chat-template FILE"
                )

    def _last_word(self, ids: np.ndarray) -> int | None:
        for token in map(int, ids[::-1]):
            if token in self._special or self._library.decode([token]).strip():
                return token
        return None


def read_template(path: str | None) -> str | None:
    return None if path is None else read_text(path, "--chat-template", largest=LARGEST_TEMPLATE)


def _tool_names(message: JsonObject) -> list[str]:
    calls = message.get("tool_calls")
    functions = [call.get("function", call) for call in calls or [] if isinstance(call, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]
