"""Other libraries' tokenizers, written to files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece
import tokenizers

TEXTS = ["to be or not to be", "the cat sat\non the mat, 富岳", "one two  three"]
PIECES = 60
TOKENS = 293


def write_sentencepiece(path: Path, pieces: int = PIECES, **more) -> Path:
    """Write a SentencePiece model trained on TEXTS."""
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


def write_hugging_face(folder: Path, **special: str) -> Path:
    """Write a Hugging Face folder with a byte-level BPE, a first token and an end token.

    special: special tokens by name, instead of bos_token and eos_token.
    """
    kind = tokenizers.Tokenizer(tokenizers.models.BPE())
    kind.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    kind.decoder = tokenizers.decoders.ByteLevel()
    kind.train_from_iterator(
        TEXTS,
        tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>"],
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    kind.add_tokens(["<extra>"])
    kind.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    folder.mkdir(exist_ok=True)
    kind.save(str(folder / "tokenizer.json"))
    special = special or {"bos_token": "<s>", "eos_token": "</s>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
