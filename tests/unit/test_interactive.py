"""generate --interactive: lines in, answers as they come out, what Ctrl-C and Ctrl-D end; and where an answer's text ends."""

from __future__ import annotations

import builtins
import os
import signal

import pytest

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.inference.interactive import converse
from fugaku_megatron.inference.sampling import Ending


def decode(ids) -> str:
    return bytes(ids).decode("utf-8", "replace")


def ending(*words: str, eod: int = 0) -> Ending:
    return Ending(decode, eod, words)


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk(lines, answer, words) -> (what was printed, piece by piece, and the errors); a line is a text or an exception."""
    def call(lines, answer, *words):
        entered, pieces = iter([*lines, EOFError()]), []

        def enter(_: str) -> str:
            line = next(entered)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", enter)
        monkeypatch.setattr(builtins, "print", lambda text="", end="\n", **_: pieces.append(text + end))
        converse(SoloComm(), encode, ending(*words), answer)
        return [piece for piece in pieces if piece]

    return call


def encode(line: str) -> list[int]:
    if line == "too long":
        raise ValueError("shorten it")
    return list(line.encode())


def echo(prompt, finished):
    """The prompt in upper case, a token at a time."""
    ids = [[]]
    for token in bytes(prompt).upper():
        ids[0].append(token)
        over = finished(0, ids[0])
        yield ids
        if over:
            return


def test_lines_and_their_answers_as_they_come(talk):
    assert talk(["ab", "", "c"], echo) == ["A", "B", "\n", "C", "\n"]


def test_a_line_that_cannot_be_continued_and_the_next(talk):
    assert talk(["too long", "c"], echo) == ["shorten it\n", "C", "\n"]


def test_ctrl_c_ends_an_answer_and_not_the_program(talk):
    def interrupted(prompt, finished):
        for number, ids in enumerate(echo(prompt, lambda *of: False)):
            if number == 1 and prompt == [97, 98, 99]:
                os.kill(os.getpid(), signal.SIGINT)
            over = finished(0, ids[0])
            yield ids
            if over:
                return

    before = signal.getsignal(signal.SIGINT)
    assert talk(["abc", "ab"], interrupted) == ["A", "B", "\n", "A", "B", "\n"]
    assert signal.getsignal(signal.SIGINT) is before
    assert talk([KeyboardInterrupt(), "a"], echo) == ["\n", "A", "\n"]


def test_a_stop_word_is_not_shown_in_part(talk):
    assert talk(["xsy"], echo, "SY") == ["X", "\n"]
    assert talk(["xsz"], echo, "SY") == ["X", "SZ", "\n"]
    assert talk(["xs"], echo, "SY") == ["X", "S\n"]


def test_characters_of_several_bytes_come_whole(talk):
    def answer(prompt, finished):
        for count in (1, 2, 3):
            yield [list("aé".encode())[:count]]

    assert talk(["x"], answer) == ["a", "é", "\n"]


def test_where_an_answer_ends():
    end = ending("or", "be")
    assert end.text(list(b"to be or not")) == "to " and end.text(list(b"to")) == "to"
    assert end.reached(list(b"to be")) and not end.reached(list(b"to b"))
    assert end.reached([97, 0]) and end.text([97, 0]) == "a", "the end of text is no text"
