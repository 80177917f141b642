"""Chats: tokenizers, templates and files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fugaku_megatron.cli import program
from fugaku_megatron.data.chat.chat_files import ChatFiles, ChatWriter, signed
from fugaku_megatron.data.chat.chats import user_turn as user
from tests.checks.tokenizers import byte_level, save

SPECIAL = [
    "<s>",
    "</s>",
    "<|start|>",
    "<|end|>",
    "<|eot|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
]
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TALK = [user("one?"), assistant("two "), user("and?"), assistant("three")]
GOOD = {"messages": TALK}


def write_tokenizer(path: Path) -> Path:
    """Write a byte-level tokenizer with every template's special tokens, and ChatML's template."""
    kind = byte_level(["user assistant system one two three"], SPECIAL)
    save(kind, path, bos_token="<s>", eos_token="</s>")
    (path / "chat_template.jinja").write_text(CHATML)
    return path


def write_lines(path: Path, *records) -> Path:
    path.write_text(
        "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records)
        + "\n"
    )
    return path


def preprocess(folder, source, prefix, *more: str) -> int:
    words = f"preprocess --chat --input {source} --output-prefix {prefix}"
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
    return program.main([*words.split(), *tokenizer.split(), *more])


CHAT_LENGTH = 9  # of each random chat: its last token is a label alone in a sample of 8
SAMPLES = {8: 8, 16: 8, 24: 4, 32: 3, 64: 2}  # by sequence length, for eight random chats
PADDED_CHATS = {
    "num_layers": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "init_method_std": 0.2,
    "sft": True,
    "mock_data": False,
    "data_path": ("chats",),
    "max_position_embeddings": 64,
}


def packed(length: int) -> dict[str, int]:
    """Return sizes with the eight random chats as the only micro-batch."""
    samples = SAMPLES[length]
    return {"seq_length": length, "micro_batch_size": samples, "global_batch_size": samples}


def write_random_chats(prefix: Path) -> ChatFiles:
    """Write eight equally long chats with a trained second half."""
    random = np.random.default_rng(1)
    with ChatWriter(prefix, "<u2") as writer:
        for _ in range(8):
            ids = random.integers(1, 96, size=CHAT_LENGTH)
            writer.add_document(signed(ids, np.arange(CHAT_LENGTH) >= CHAT_LENGTH // 2))
    return ChatFiles(prefix)


def write_chats(prefix: Path, lengths, token: int = 5) -> ChatFiles:
    """Write chats with these lengths. Tokens count up from `token`; all but a chat's first two are trained."""
    with ChatWriter(prefix, "<u2") as writer:
        for length in lengths:
            writer.add_document(signed(np.arange(token, token + length), np.arange(length) > 1))
            token += length
    return ChatFiles(prefix)


def signed_chats(files: ChatFiles) -> list[np.ndarray]:
    """Return the tokens of all chats, the trained ones negative."""
    chats = [files.get(i).astype(np.int32) for i in range(len(files))]
    return [signed(chat, files.trained(i, len(chat))) for i, chat in enumerate(chats)]
