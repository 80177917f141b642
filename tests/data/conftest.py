"""A tokenizer with a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_megatron.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.checks.chats import (
    write_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(folder)
