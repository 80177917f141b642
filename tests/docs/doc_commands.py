"""The commands of README.md and docs/*.md: the blocks between fences, in order, and what is changed before they are run here.

A change is a row of changes.jsonl: the document, the text as it stands there, the text that is run, and why. The shell's command
":" does nothing: it replaces what needs another machine or is run by another test. A row whose text is not in its document any more
is a mistake. Test: tests/docs/test_docs_commands.py
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
)
FOLLOW_README = (
    "README.md",
    "docs/data.md",
    "docs/evaluation.md",
    "docs/training.md",
    "docs/monitoring.md",
)  # the others use its text, vocabulary and checkpoints
FENCE = re.compile(r"^```(\w*|c\+\+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

TINY = "--recipe demo --train-iters 4 --log-interval 1 --eval-iters 0 --kernels native"
CHANGES = [
    [text.replace("{TINY}", TINY) for text in json.loads(line)]
    for line in Path(__file__).with_name("changes.jsonl").read_text().splitlines()
]
# document -> files that its commands leave
LEAVES = {
    "README.md": (
        "my_text_document.bin",
        "my_text_document.idx",
        "run.log",
        "checkpoints/latest_checkpointed_iteration.txt",
        "demo/checkpoint/loss_curve.png",
    ),
    "docs/evaluation.md": ("my_result.json",),
    "docs/data.md": (
        "my_pieces_text_document.tokenizer.json",
        "my_checkpoints/latest_checkpointed_iteration.txt",
    ),
    "docs/fugaku.md": ("my.sh", "try.sh", "run_30b_12288.sh"),
    "docs/models.md": (
        "my_hf/model.safetensors",
        "my_start/latest_checkpointed_iteration.txt",
        "my_tuned_hf/config.json",
        "my_from_megatron/iter_0000000/manifest.json",
    ),
    "docs/performance-model.md": ("all.csv", "all.png"),
    "docs/chat.md": (
        "my_chats/train.mask",
        "my_chats/tuned_hf/chat_template.jinja",
        "my_chats/tuned_hf/model.safetensors",
    ),
    "docs/report.md": ("report.html", "report.json", "report.txt", "report.sh", "report.sbatch"),
    "docs/training.md": (
        "run_30b.sh",
        "my_model/loss_curve.png",
        "my_model/iter_0000006/manifest.json",
    ),
    "docs/monitoring.md": ("my_run.csv", "my_run.png", "my_ranks.png", "my_hours.png"),
}


def blocks(document: str, language: str = "") -> list[str]:
    """Return the fenced blocks of commands, or the blocks of a language."""
    fenced = [(match[1], match[2]) for match in FENCE.finditer((ROOT / document).read_text())]
    return [text for name, text in fenced if name == language]


def script(document: str) -> str:
    """The commands of a document with the changes of the table, as one shell script."""
    text = "\n".join(blocks(document))
    for name, before, after, why in CHANGES:
        if name == document:
            assert text.count(before) >= 1, f"{document} has no {before!r} any more ({why})"
            text = text.replace(before, after)
    return text


def commands(document: str) -> Iterator[list[str]]:
    """The words of every command as it stands in the document, without comments, `$(...)` and the signs of a synopsis."""
    for block in blocks(document):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(
                re.sub(r"[\[\]]|(?<=\w)(\|\w+)+|\$\([^)]*\)", "", line),
                posix=True,
                punctuation_chars=";&|",
            )
            lexer.whitespace_split = True
            for operator, words in itertools.groupby(lexer, lambda word: word in ("&&", "|", ";")):
                if not operator:
                    yield list(words)
