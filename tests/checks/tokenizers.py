"""Other libraries' tokenizers, written to files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import tokenizers

TEXTS = ["to be or not to be", "the cat sat\non the mat, 富岳", "one two  three"]
PIECES = 60
TOKENS = 293


def write_sentencepiece(path: Path, pieces: int = PIECES, **more) -> Path:
    """Write a SentencePiece model trained on TEXTS."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=model,
        vocab_size=pieces,
        model_type="bpe",
        minloglevel=2,
        **more,
    )
    path.write_bytes(model.getvalue())
    return path


def byte_level(texts: list[str], special: list[str], size: int = 300) -> tokenizers.Tokenizer:
    """Train a byte-level BPE. special: tokens that come first"""
    kind = tokenizers.Tokenizer(tokenizers.models.BPE())
    kind.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    kind.decoder = tokenizers.decoders.ByteLevel()
    kind.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return kind


def save(kind: tokenizers.Tokenizer, folder: Path, **settings: object) -> None:
    """Save a tokenizer as transformers does, with these settings in its tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    kind.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_hugging_face(folder: Path, **special: str) -> Path:
    """Write a Hugging Face folder with a byte-level BPE, a first token and an end token.

    special: special tokens by name, instead of bos_token and eos_token.
    """
    kind = byte_level(TEXTS, ["<s>", "</s>"])
    kind.add_tokens(["<extra>"])
    kind.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    special = special or {"bos_token": "<s>", "eos_token": "</s>"}
    save(kind, folder, model_max_length=8, **special)
    return folder
