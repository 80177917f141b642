"""generate: how a token is chosen, lines in and answers out, what Ctrl-C and Ctrl-D end, and where an answer ends."""

import builtins
import os
import signal

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.data.chat.chat_template import ChatTemplate
from fugaku_megatron.inference.generate import converse
from fugaku_megatron.inference.generation import (
    Conversation,
    PromptEncoder,
    Sampling,
    StopCondition,
)
from fugaku_megatron.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.checks.chats import write_tokenizer
from tests.helpers import small_run

pytestmark = pytest.mark.unit


def decode(ids) -> str:
    return bytes(ids).decode("utf-8", "replace")


@pytest.fixture
def talk(monkeypatch, capsys):
    """Return a function that enters lines, texts or exceptions, and returns the printed pieces."""

    def call(lines, answer, *words, chat=None):
        entered = iter([*lines, EOFError()])
        pieces = []

        def enter(_: str) -> str:
            line = next(entered)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", enter)
        monkeypatch.setattr(
            builtins, "print", lambda text="", end="\n", **_: pieces.append(text + end)
        )
        if chat:
            converse(SoloComm(), chat.encode, chat.encoder.stop_condition, answer, chat.answered)
        else:
            converse(SoloComm(), encode, StopCondition(decode, 0, words), answer)
        return [piece for piece in pieces if piece]

    return call


def encode(line: str) -> list[int]:
    if line == "too long":
        raise ValueError("shorten it")
    return list(line.encode())


def written(tokens, finished):
    """Yield the first 1, 2, 3 ... tokens, until `finished`."""
    ids = torch.tensor(tokens)
    for count in range(1, len(ids) + 1):
        over = finished(0, ids[:count])
        yield [ids[:count]]
        if over:
            return


def echo(prompt, finished):
    return written(list(bytes(prompt).upper()), finished)


def test_lines_and_their_answers_as_they_come(talk):
    assert talk(["ab", "", "c"], echo) == ["A", "B", "\n", "C", "\n"]
    assert talk(["too long", "c"], echo) == ["shorten it\n", "C", "\n"]


def test_ctrl_c_ends_an_answer_and_not_the_program(talk):
    def interrupted(prompt, finished):
        def interrupting(sample, ids):
            if len(ids) == 2 and prompt == [97, 98, 99]:
                os.kill(os.getpid(), signal.SIGINT)
            return finished(sample, ids)

        return echo(prompt, interrupting)

    before = signal.getsignal(signal.SIGINT)
    assert talk(["abc", "ab"], interrupted) == ["A", "B", "\n", "A", "B", "\n"]
    assert signal.getsignal(signal.SIGINT) is before
    assert talk([KeyboardInterrupt(), "a"], echo) == ["\n", "A", "\n"]


def test_stop_words_and_characters_of_several_bytes(talk):
    assert talk(["xsy"], echo, "SY") == ["X", "\n"]
    assert talk(["xsz"], echo, "SY") == ["X", "SZ", "\n"]
    assert talk(["xs"], echo, "SY") == ["X", "S\n"]

    def answer(prompt, finished):
        for count in (1, 2, 3):
            yield [torch.tensor(list("aé".encode())[:count])]

    assert talk(["x"], answer) == ["a", "é", "\n"]
    end = StopCondition(decode, 0, ("or", "be"))
    ids = torch.tensor(list(b"to be or not"))
    assert end.text(ids) == "to " and end.text(ids[:2]) == "to"
    assert end.is_met(ids[:5]) and not end.is_met(ids[:4])
    ids = torch.tensor([97, 0])
    assert end.is_met(ids) and end.text(ids) == "a", "the end of text is not text"


def test_a_conversation_goes_on_and_its_answers_end_with_the_turn(talk, tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    prompts = []
    chat = Conversation(
        PromptEncoder(
            tokenizer,
            small_run(max_position_embeddings=256).model,
            5,
            (),
            ChatTemplate(tokenizer),
            "be brief",
        )
    )
    end = next(iter(chat.encoder.stop_condition.ends - {tokenizer.eod}))

    def answer(prompt, finished):
        prompts.append(tokenizer.decode(prompt))
        tokens = [*tokenizer.encode(f"no. {len(prompts)}"), end, *tokenizer.encode("more")]
        return written(tokens, finished)

    assert "".join(talk(["one?", "two?"], answer, chat=chat)) == "no. 1\nno. 2\n"
    begin = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == [
        begin,
        begin + "no. 1<|im_end|>\n<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n",
    ]


LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.9])
LIKELY = torch.softmax(LOGITS, 0)


def picked(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0, times: int = 400
) -> list[int]:
    sampling = Sampling(temperature, top_k, top_p, seed=0)
    rng = sampling.generator(0)
    return [sampling.pick(LOGITS, rng) for _ in range(times)]


def test_the_choice_of_a_token():
    assert (
        set(picked(temperature=0.0, top_k=4))
        == {1}
        == set(picked(temperature=1e-6))
        == set(picked(top_k=1))
    )
    assert Sampling(0.0, 0, 0.0, 0).pick(torch.tensor([1.0, 2.0, 2.0]), None) == 1, (
        "the first of several"
    )
    sampling = Sampling(1.0, 0, 0.0, seed=5)
    draws = [torch.rand(8, generator=sampling.generator(sample)).tolist() for sample in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]
    tokens = picked(times=4000)
    for token, probability in enumerate(LIKELY):
        assert abs(tokens.count(token) / 4000 - probability) < 0.03
    colder = picked(temperature=0.5, times=4000)
    assert abs(colder.count(1) / 4000 - torch.softmax(LOGITS / 0.5, 0)[1]) < 0.03
    tokens = picked(top_k=2)
    assert set(tokens) == {1, 3}
    assert abs(tokens.count(1) / 400 - 1 / (1 + torch.tensor(-0.1).exp())) < 0.1
    most = float(LIKELY[1])
    assert set(picked(top_p=most - 0.01)) == {1}
    assert set(picked(top_p=most + 0.01)) == {1, 3}
    assert set(picked(top_p=0.999)) == {0, 1, 2, 3}
    assert set(picked(top_p=most + 0.01, top_k=1)) == {1}, "both hold"
