"""Files of --to-gguf in llama.cpp itself, where the optional package xllamacpp is installed: tokens and logits."""

from __future__ import annotations

import random

import pytest
import torch

from fugaku_megatron.convert.gguf.tokenizer import read_tokenizer
from fugaku_megatron.tokenizers.hugging_face import HuggingFaceTokenizer, SentencePieceTokenizer
from tests.checks.gguf import MODELS, convert, write_tokenizer
from tests.checks.gguf import write_model as write_hugging_face
from tests.tokenizer_files import make
from tests.tokenizer_files.llama_cpp import LlamaCpp, write_model

pytestmark = pytest.mark.unit

pytest.importorskip("xllamacpp")
transformers = pytest.importorskip("transformers")

LETTERS = (
    "abcdehilmnorstuTHE  \n\n\t\r.,'!?-_0123é中日한😀▁<>|/\u00a0\u3000\u0301\u200d²Ⅷ\x7f\x85\u2028"
)
WORDS = [
    "the",
    "model",
    " ",
    "  ",
    "\n",
    "<|end|>",
    "<s>",
    "</s>",
    "extra",
    "123",
    "'s",
    "▁",
    "富岳",
]
LETTER = 70  # a token that is a letter in every tokenizer of `write_tokenizer`


def random_texts(number: int) -> list[str]:
    """Make texts of letters and of words, the same ones each time."""
    choice = random.Random(1)
    return [
        "".join(choice.choices(WORDS if text % 3 == 0 else LETTERS, k=choice.randrange(1, 25)))
        for text in range(number)
    ]


@pytest.mark.parametrize(
    "name", [path.parent.name for path in sorted(make.HERE.glob("*/tokenizer*"))]
)
def test_tokens_are_those_of_llama_cpp(tmp_path, name):
    folder = make.HERE / name
    try:
        tokenizer = read_tokenizer(folder, make.ROWS, None, False)
    except ValueError as error:
        pytest.skip(str(error))
    write_model(tokenizer, tmp_path / "m.gguf")
    pieces = name.startswith("pieces")
    if pieces:
        ours = SentencePieceTokenizer(folder / "tokenizer.model")
    else:
        ours = HuggingFaceTokenizer(folder)
    with LlamaCpp(tmp_path / "m.gguf") as engine:
        for text in [*make.TEXTS, *random_texts(150)]:
            assert engine.tokens(text, parse_special=not pieces) == ours.encode(text), text


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def scaled(kind: str, scaling: dict):
    config = MODELS[kind](transformers)
    config.rope_parameters = {"rope_theta": 10000.0, **scaling}
    return config


def lite(t):
    config = MODELS["deepseek_v2"](t)
    config.q_lora_rank = None
    config.num_hidden_layers = 27
    return config


CONFIGS = {
    **MODELS,
    "llama yarn": lambda _: scaled("llama", YARN),
    "qwen3 yarn": lambda _: scaled("qwen3", YARN),
    "deepseek_v2 lite": lite,
    "qwen2 linear": lambda _: scaled("qwen2", LINEAR),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(tmp_path, monkeypatch, name):
    monkeypatch.setitem(MODELS, name, CONFIGS[name])
    folder = tmp_path / "hf"
    model = write_hugging_face(folder, name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    assert convert(folder, tmp_path / "m.gguf") == 0
    ids = torch.randint(3, 300, (1, 50), generator=torch.Generator().manual_seed(1))
    with LlamaCpp(tmp_path / "m.gguf") as engine:
        for length in (1, 50):
            with torch.no_grad():
                ours = model(ids[:, :length]).logits[0, -1].log_softmax(-1)
            theirs = engine.next_token(ids[0, :length].tolist(), LETTER)
            there = torch.tensor([theirs[token] for token in sorted(theirs)])
            ours = ours[sorted(theirs)]
            spread = float(ours.max() - ours.min())
            assert len(theirs) > 300 and spread > 0.5
            # Keys and values are F16 there, in every layer.
            rounding = 4e-3 if model.config.num_hidden_layers < 10 else 8e-3
            assert float((there - ours).abs().max()) < rounding * spread
