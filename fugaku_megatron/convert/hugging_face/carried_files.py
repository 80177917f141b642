"""Files that a converted model keeps: tokenizer, configurations, licences."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ...config.fields import check
from ...text.named_files import unreadable
from ...tokenizers.hugging_face import CHAT_TEMPLATE, TEMPLATES, TOKENIZER_CONFIG
from .rules import FILE
from .tensor_directory import read_json

# What belongs to a model in addition to its weights, as patterns of names: the files of every tokenizer of transformers, and of others.
CARRIED = (
    FILE,
    "generation_config.json",
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "*_vocab.json",
    "merges*",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.tokenizer",
    "tekken.json",
    "bpe.codes",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "normalizer.json",
    "word_*.json",
    "sentencepiece*",
    "chat_template*",
    f"{TEMPLATES}/*",
    "processor_config.json",
    "LICENSE*",
    "NOTICE*",
)


def carried_files(source: Path | None) -> list[Path]:
    if source is None:
        return []
    found = (file for pattern in CARRIED for file in sorted(source.glob(pattern)))
    return [*dict.fromkeys(file for file in found if file.is_file())]


def check_carried(source: Path | None) -> None:
    """Raise ValueError for an unreadable CARRIED file, before writing anything."""
    for file in carried_files(source):
        if reason := unreadable(file):
            raise ValueError(f"{file} cannot be read ({reason}): correct it, or remove it")


def carry(source: Path | None, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for file in carried_files(source):
        assert source is not None
        copy = directory / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def set_chat_template(folder: Path, template: Path) -> None:
    """Make a file a tokenizer folder's template; named templates are kept.

    transformers reads the templates in tokenizer_config.json only without a template file.
    """
    config = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    named = config.get("chat_template")
    for row in named if isinstance(named, list) else []:
        name = str(row.get("name"))
        check(
            re.fullmatch(r"[\w-]+", name) is not None,
            f"{folder / TOKENIZER_CONFIG} has a chat template named {name!r:.40}: name it by letters",
        )
        file = folder / TEMPLATES / f"{name}.jinja"
        if name != "default" and not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(str(row.get("template")), encoding="utf-8")
    shutil.copyfile(template, folder / CHAT_TEMPLATE)
