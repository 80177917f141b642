"""SentencePiece models as tokenizers of GGUF files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...config.fields import check
from ...text.optional_packages import optional_package
from ...tokenizers.hugging_face import load_pieces
from .tokens import (
    BPE,
    BYTE,
    BYTE_PIECES,
    CONTROL,
    MODEL_TYPES,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER,
    GgufTokenizer,
    Token,
    overlaps,
)


def of_pieces(path: Path) -> GgufTokenizer:
    """Convert a SentencePiece model of type bpe. Raises ValueError for a model that llama.cpp cannot represent."""
    where = f"--to-gguf: {path}"
    try:
        processor, contents = load_pieces(path, "--to-gguf")
    except ValueError as error:
        raise ValueError(str(error).replace("--tokenizer-model", "--to-gguf:", 1)) from None
    protos: Any = optional_package(
        "sentencepiece.sentencepiece_model_pb2", "sentencepiece", "--to-gguf"
    )
    proto = protos.ModelProto.FromString(contents)
    trainer = proto.trainer_spec
    normalizer = proto.normalizer_spec
    name = MODEL_TYPES.get(trainer.model_type, f"type {trainer.model_type}")
    check(
        trainer.model_type == BPE,
        f"{where} is a SentencePiece model of type {name}, and llama.cpp merges pieces as type bpe does: "
        "train the tokenizer with --model_type=bpe, or pass --to-hf",
    )
    kinds = {2: UNKNOWN, 3: CONTROL, 4: USER, 5: UNUSED, 6: BYTE}  # of sentencepiece_model.proto
    tokens = [
        Token(piece.piece, kinds.get(piece.type, NORMAL), piece.score) for piece in proto.pieces
    ]
    check_bytes(tokens, where)
    check(
        normalizer.escape_whitespaces and not trainer.treat_whitespace_as_suffix,
        f"{where} does not put {SPACE} before a word (escape_whitespaces, treat_whitespace_as_suffix), and "
        "llama.cpp does",
    )
    check(
        all(token.kind != UNUSED for token in tokens),
        f"{where} has unused pieces, which llama.cpp uses: pass --to-hf",
    )
    check(
        not normalizer.precompiled_charsmap,
        f"{where} normalizes a text (normalization_rule_name {normalizer.name}), line feeds included, and llama.cpp "
        "does not: train the tokenizer with --normalization_rule_name=identity, or pass --to-hf",
    )
    differences = []
    if normalizer.remove_extra_whitespaces:
        differences.append(
            "it removes spaces at the ends of a text and after a space (remove_extra_whitespaces), and llama.cpp does not"
        )
    if proto.denormalizer_spec.precompiled_charsmap:
        differences.append("it changes a decoded text (denormalizer_spec), and llama.cpp does not")
    added = [token.text for token in tokens if token.kind == USER]
    if added and normalizer.add_dummy_prefix:
        differences.append(
            f"after a user-defined piece such as {added[0]!r} it puts no space (add_dummy_prefix), and llama.cpp does"
        )
    spaced = [text for text in added if SPACE in text or " " in text]
    if spaced:
        differences.append(
            f"its user-defined piece {spaced[0]!r} has a space, which llama.cpp does not find in a text"
        )
    differences += overlaps(added)
    differences += _reached(tokens)
    ids = {key: getattr(processor, f"{key}_id")() for key in ("bos", "eos", "unk", "pad")}
    special = {key: token for key, token in ids.items() if token >= 0}
    return GgufTokenizer(
        "llama",
        "default",
        tokens,
        add_space_prefix=normalizer.add_dummy_prefix,
        special=special,
        differences=differences,
    )


def check_bytes(tokens: list[Token], where: str) -> None:
    """Raise ValueError unless every byte is a piece: llama.cpp fails at other unknown characters."""
    found = {token.text for token in tokens if token.kind == BYTE}
    missing = [text for text in BYTE_PIECES if text not in found]
    check(
        not missing,
        f"{where} has no piece for {len(missing)} of the 256 bytes (byte_fallback), and llama.cpp needs them: "
        "train the tokenizer with --byte_fallback, or pass --to-hf",
    )


def halves(text: str) -> Iterator[tuple[str, str]]:
    return ((text[:cut], text[cut:]) for cut in range(1, len(text)))


def _reached(tokens: list[Token]) -> list[str]:
    """Return a difference if llama.cpp merges to a control piece or a byte."""
    normal = {token.text for token in tokens if token.kind in (NORMAL, USER)}
    for text, kind, _ in tokens:
        if kind not in (CONTROL, BYTE, UNKNOWN):
            continue
        for pair in halves(text):
            if all(len(half) == 1 or half in normal for half in pair):
                return [f"its pieces merge to {text!r} in llama.cpp, and not in SentencePiece"]
    return []
