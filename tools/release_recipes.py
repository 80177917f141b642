"""Writes the recipes of a release beside its source archive: those of EasyBuild and Spack with the archive's checksum.

make sdist     writes the archive and the recipes into dist/release/
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import NamedTuple

import fugaku_megatron

PACKAGING = Path(__file__).resolve().parents[1] / "packaging"
VERSION = fugaku_megatron.__version__


class Recipe(NamedTuple):
    """A package manager's file with the place of the checksum."""

    source: Path
    output: str
    unknown: str  # text of a recipe without a checksum
    known: str  # the same with a checksum for {}


EASYCONFIG = f"fugaku-megatron-{VERSION}-foss-2025b.eb"
RECIPES = (
    Recipe(PACKAGING / "easybuild" / EASYCONFIG, EASYCONFIG, "[None]", "['{}']"),
    Recipe(
        PACKAGING / "spack" / "package.py",
        "py_fugaku_megatron/package.py",
        f'version("{VERSION}")',
        f'version("{VERSION}", sha256="{{}}")',
    ),
)


def write(archive: Path) -> None:
    """Write every recipe with the archive's checksum into the archive's folder."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    for recipe in RECIPES:
        text = recipe.source.read_text()
        found = text.count(recipe.unknown)
        if found != 1:
            raise ValueError(f"{recipe.source.name}: expected {recipe.unknown} once, found {found}")
        output = archive.parent / recipe.output
        output.parent.mkdir(exist_ok=True)
        output.write_text(text.replace(recipe.unknown, recipe.known.format(digest)))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
