"""The assistant's turns in a rendered chat: from the end of their header to the next message.

Borders come from renderings alone: of the chat's beginnings, with and without the generation
prompt, and of the chat with one content replaced by a mark. Tokens inside an answer decide nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...text.input_errors import NeverSkipped
from ...text.named_files import JsonObject
from .chats import ASSISTANT, INSTEAD_OF_CONTENT, Messages, user_turn

MARK = "fmAnswer7Mark"  # a content that a rendering is searched for
FORM = (
    "pass --chat-template FILE, the template with {% generation %} and {% endgeneration %} around what the assistant "
    "writes, such as a *_training.jinja of trl's chat_templates"
)
NOT_FOUND = "the renderings do not agree"  # in a turn, whose message is then named


class TurnTexts(NamedTuple):
    """Text around a question and its answer, which later ones have too.

    Without it the renderings of a chat would take the square of its length.
    """

    before: str
    between: str
    after: str

    @classmethod
    def of(
        cls, text: str, place: int, span: tuple[int, int], texts: tuple[str, str]
    ) -> TurnTexts | None:
        question, answer = texts
        begin, end = span
        parts = text[place:begin].split(question)
        if len(parts) != 2 or not text.startswith(answer, begin):
            return None
        return cls(parts[0], parts[1], text[begin + len(answer) : end])

    def find(self, text: str, place: int, texts: tuple[str, str]) -> tuple[int, int] | None:
        before = f"{self.before}{texts[0]}{self.between}"
        turn = f"{texts[1]}{self.after}"
        begin = place + len(before)
        return (begin, begin + len(turn)) if text.startswith(before + turn, place) else None


@dataclass(frozen=True)
class Turns:
    """Turns of a chat.

    text: the whole chat as rendered
    render: messages, and True for a generation prompt after them -> text; raises ValueError
    added: pattern of the tokenizer's added tokens, which no border cuts
    """

    messages: Messages
    text: str
    render: Callable[[Messages, bool], str]
    added: re.Pattern[str]

    def spans(self, first: int) -> list[tuple[int, int]]:
        """Return begin and end of the assistant's turns from message `first` on.

        Raises ValueError if renderings do not determine them.
        """
        found: list[tuple[int, int]] = []
        place = 0
        turn_texts: TurnTexts | None = None
        for number in range(first, len(self.messages)):
            if self.messages[number]["role"] != ASSISTANT:
                continue
            texts = self._question_and_answer(number) if found else None
            span = turn_texts.find(self.text, place, texts) if turn_texts and texts else None
            if span is None:
                try:
                    span = self._begin(number), self._end(number)
                except NeverSkipped:
                    raise
                except ValueError:  # NOT_FOUND, or a part of the chat that is not rendered
                    span = (0, 0)
                if texts:
                    turn_texts = TurnTexts.of(self.text, place, span, texts) or turn_texts
            if not place <= span[0] < span[1]:
                raise ValueError(
                    f"where the turn of message {number + 1} begins and ends does not follow from what the chat template "
                    f"renders: {FORM}"
                )
            found.append(span)
            place = span[1]
        return found

    def _question_and_answer(self, number: int) -> tuple[str, str] | None:
        """Return a question and its answer if plain texts, after an answer and not the last ones."""
        texts = []
        for message in self.messages[number - 1 : number + 1]:
            content = message.get("content")
            if (
                not isinstance(content, str)
                or not content.strip()
                or any(map(message.get, INSTEAD_OF_CONTENT))
            ):
                return None
            texts.append(content)
        roles = [message["role"] for message in self.messages[number - 2 : number]]
        if roles != [ASSISTANT, "user"] or number + 1 == len(self.messages):
            return None
        return texts[0], texts[1]

    def _begin(self, number: int) -> int:
        """Return the end of the generation prompt.

        If the template renders earlier messages otherwise in the whole chat, the prompt is searched
        for before the content there, as far as a turn without thoughts and calls repeats it.
        """
        before = self.messages[:number] or [user_turn("Hello")]
        prompt = self.render(before, True)
        if number and self.text.startswith(prompt):
            # a prompt without a header, such as after a tool's answer, before a turn with one
            is_bare = not prompt.endswith(self._usual_header)
            repeats = self.text.startswith(self._usual_header, len(prompt))
            return len(prompt) + (len(self._usual_header) if is_bare and repeats else 0)
        header = self._header(before, prompt)
        message = marked(self.messages[number])
        plain = {name: message[name] for name in message if name not in INSTEAD_OF_CONTENT}
        head = self._head(number, plain, message)
        written = self.render([*before, plain], False).partition(MARK)[0].removeprefix(prompt)
        repeated = next(n for n in range(len(header), -1, -1) if head.endswith(header[:n]))
        if header and head.endswith(header + written):
            begin = len(head) - len(written)
        elif re.search(r"\w", header[:repeated]):
            begin = len(head)
        else:
            raise ValueError(NOT_FOUND)
        if not self.text.startswith(head[:begin]):
            raise ValueError(NOT_FOUND)
        return begin

    @cached_property
    def _usual_header(self) -> str:
        """Text that the generation prompt adds to a question; empty if the template cannot render it."""
        question = [user_turn("Hello")]
        try:
            return self._header(question, self.render(question, True))
        except NeverSkipped:
            raise
        except ValueError:
            return ""

    def _head(self, number: int, *variants: JsonObject) -> str:
        """Return the text before the mark, with the first variant of a message that is rendered."""
        for variant in variants:
            whole = [*self.messages[:number], variant, *self.messages[number + 1 :]]
            try:
                head, mark, _ = self.render(whole, False).partition(MARK)
            except NeverSkipped:
                raise
            except ValueError:  # such as a tool's answer without its call
                continue
            if mark:
                return head
        raise ValueError(NOT_FOUND)

    def _header(self, before: Messages, prompt: str) -> str:
        """Return what the generation prompt adds; if nothing, its last added token."""
        texts = [self.render(before, False), prompt]
        length = len(os.path.commonprefix(texts))
        for text in texts:
            for token in self.added.finditer(text):
                if token.start() < length < token.end():
                    length = token.start()
        tokens = [token.start() for token in self.added.finditer(prompt)]
        return prompt[length:] or prompt[tokens[-1] if tokens else length :]

    def _end(self, number: int) -> int:
        """Return the place where the next message begins."""
        if number + 1 == len(self.messages):
            return len(self.text)
        before = self.messages[:number]
        message = self.messages[number]
        for upto in self._ends(before, message):
            if self.text.startswith(upto):
                return len(upto)
        message = marked(message)
        whole = [*before, message, *self.messages[number + 1 :]]
        tail = self.render(whole, False).partition(MARK)[2]
        for upto in self._ends(before, message):
            ending = upto.partition(MARK)[2]
            rest = tail.removeprefix(ending)
            if ending and rest != tail and self.text.endswith(rest):
                return len(self.text) - len(rest)
        raise ValueError(NOT_FOUND)

    def _ends(self, before: Messages, message: JsonObject) -> Iterator[str]:
        """Yield the text up to a turn: as the last one of a chat, and as one that another follows."""
        yield self.render([*before, message], False)
        before = before or [user_turn("Hello")]
        header = self._header(before, self.render(before, True))
        yield self.render([*before, message], True).removesuffix(header)


def marked(message: JsonObject) -> JsonObject:
    """Return the message with a mark as content, of the same kind."""
    is_list = isinstance(message.get("content"), list)
    return {**message, "content": [{"type": "text", "text": MARK}] if is_list else MARK}
