"""A vocabulary of one's own: byte-level BPE trained on one's own text, in the two files of GPT-2's
form.

    fugaku-megatron vocabulary --input my_texts --vocab-size 8192 --output my_vocabulary

writes my_vocabulary/vocab.json and merges.txt, for --vocab-file and --merge-file. The `tokenizers`
library does the training, with GPT-2's split into pieces; <|endoftext|> is the last token.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ...text.named_files import unreadable
from ...text.numbers import plural, say
from ...text.optional_packages import optional_package
from ...text.written_files import make_folder, write_text
from ...tokenizers.byte_level_bpe import EOD_TOKEN, bytes_to_unicode
from ..input.compressed_text import LARGEST_FLAG
from ..input.documents import Skipped, document_texts, read_documents
from ..input.input_files import add_input_arguments, input_files
from ..input.tables import Columns

MIN_TOKENS = len(bytes_to_unicode()) + 1  # every byte, and the end of a document
MAX_TOKENS = 2**26  # as --vocab-size of a model
NAMES = ("vocab.json", "merges.txt")


def train_vocabulary(texts: Iterable[str], size: int, output: Path) -> int:
    """Train a vocabulary of at most `size` tokens into `output` and return its size.

    Pairs that occur at least twice are merged.
    """
    check_size(size)
    tokenizer = optional_package(
        "tokenizers", "demo", "training a vocabulary"
    ).ByteLevelBPETokenizer()
    characters = 0

    def counted() -> Iterable[str]:
        nonlocal characters
        for text in texts:
            characters += len(text)
            yield text

    tokenizer.train_from_iterator(
        counted(), vocab_size=size - 1, min_frequency=2, show_progress=False
    )
    if not characters:
        raise ValueError("no text to train a vocabulary on")
    tokenizer.add_tokens([EOD_TOKEN])
    _write(tokenizer, output)
    return int(tokenizer.get_vocab_size())


def _write(tokenizer: Any, output: Path) -> None:
    vocabulary = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    lines = [
        "#version: 0.2",
        *(pair if isinstance(pair, str) else " ".join(pair) for pair in merges),
    ]
    texts = json.dumps(vocabulary, ensure_ascii=False), "\n".join(lines) + "\n"
    try:
        make_folder(output)
        for name, text in zip(NAMES, texts, strict=True):
            write_text(output / f"{name}.tmp", text)
        for name in NAMES:
            os.replace(output / f"{name}.tmp", output / name)
    except OSError as error:
        raise ValueError(
            f"--output {output}: cannot be written ({error.strerror}); pass another folder"
        ) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=8192,
        help="tokens of the vocabulary (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for vocab.json and merges.txt"
    )


def check_size(size: int) -> None:
    if not MIN_TOKENS <= size <= MAX_TOKENS:
        raise ValueError(
            f"--vocab-size is {size}: pass a number from {MIN_TOKENS}, which is every byte and {EOD_TOKEN}, "
            f"to {MAX_TOKENS}"
        )


def check_options(args: argparse.Namespace) -> None:
    check_size(args.vocab_size)
    if args.max_document_bytes < 1:
        raise ValueError(f"{LARGEST_FLAG} {args.max_document_bytes}: must be at least 1")
    if args.output.exists() and not args.output.is_dir():
        raise ValueError(f"--output {args.output}: exists and is not a folder; pass another one")
    for name in NAMES:
        if os.path.lexists(args.output / name) and unreadable(args.output / name):
            raise ValueError(
                f"--output {args.output}: {name} in it is not a file that can be replaced; pass another folder"
            )


def main(args: argparse.Namespace) -> int:
    """Train a vocabulary on the input, and print the matching preprocess command."""
    check_options(args)
    skipped = Skipped(args.skip_invalid)
    files = input_files(args.input, args.json_keys, skipped=skipped)
    documents = read_documents(
        files, Columns(tuple(args.json_keys)), skipped=skipped, largest=args.max_document_bytes
    )
    found = skipped.read(documents, partial(document_texts, keys=args.json_keys), kind="lines")
    texts = (
        text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        for text in chain.from_iterable(found)
    )
    try:
        tokens = train_vocabulary(texts, args.vocab_size, args.output)
    except OSError as error:
        raise ValueError(str(error)) from error
    vocab_file, merge_file = (str(args.output / name) for name in NAMES)
    print(f"wrote {vocab_file} and {merge_file}: {tokens} tokens from {plural(len(files), 'file')}")
    if line := skipped.line("documents"):
        say(line)
    if tokens < args.vocab_size:
        print(f"note: the text has no more than these, --vocab-size is {args.vocab_size}")
    words = ["--input", *args.input]
    if args.json_keys != ["text"]:
        words += ["--json-keys", *args.json_keys]
    words += ["--output-prefix", "my_data", "--vocab-file", vocab_file, "--merge-file", merge_file]
    print(f"next: fugaku-megatron preprocess {shlex.join(words)} --append-eod")
    return 0
