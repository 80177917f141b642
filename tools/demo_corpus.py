#!/usr/bin/env python3
"""Makes the demo's text, which every machine has: Python's standard library, with a byte-level BPE vocabulary trained on it.

Writes OUTPUT/corpus.jsonl, OUTPUT/vocab.json and OUTPUT/merges.txt. Left out: tests and installed packages of that library.
Run: python -m tools.demo_corpus --output demo
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from fugaku_megatron.cli import program
from fugaku_megatron.cli.output_files import writing
from fugaku_megatron.data.preprocessing.vocabulary import train_vocabulary

SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "lib2to3",
    "encodings",
}
SUFFIXES = {".py", ".txt", ".rst"}


def texts(root: Path) -> Iterator[str]:
    """Yield every source and documentation file below `root`, in the order of their names."""
    for path in sorted(root.rglob("*")):
        if (
            path.suffix in SUFFIXES
            and path.is_file()
            and not SKIPPED & set(path.relative_to(root).parts)
        ):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=320,
        help="tokens of the vocabulary (default: %(default)s)",
    )


def main(options: argparse.Namespace) -> int:
    """Write the files. ValueError, one line, for a user's mistake."""
    with writing("--output", options.output):
        options.output.mkdir(parents=True, exist_ok=True)
    documents = list(texts(Path(sysconfig.get_paths()["stdlib"])))
    with (
        writing("--output", options.output),
        open(options.output / "corpus.jsonl", "w", encoding="utf-8") as corpus,
    ):
        corpus.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    train_vocabulary(documents, options.vocab_size, options.output)
    print(
        f"{len(documents)} files, {sum(map(len, documents)) / 1e6:.1f} M characters of the standard library -> {options.output}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(program.start("demo_corpus", sys.modules[__name__], sys.argv[1:]))
