"""What becomes of every flag of published Megatron-LM scripts, as the tables of docs/megatron.md.

    python -m tools.megatron_flags          # prints them; with --write puts them into the document

The scripts' flags are in tools/megatron_flags.txt, and what becomes of each is what the command line's own tables say.
Test: pytest tests/test_letter_flags.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fugaku_megatron.data.tokenizer import TOKENIZERS
from fugaku_megatron.run.arguments import build_parser
from fugaku_megatron.run.block_parts import NORMS, choices
from fugaku_megatron.run.command_line import Parser
from fugaku_megatron.run.compatibility import COMPATIBILITY_CHOICES, COMPATIBILITY_FLAGS, ONLY, REFUSED_FLAGS

ROOT = Path(__file__).resolve().parents[1]
FLAGS, DOCUMENT = ROOT / "tools" / "megatron_flags.txt", ROOT / "docs" / "megatron.md"
LINE = "---\n"  # of the document: below it stands what this program prints
VALUES = {**COMPATIBILITY_CHOICES, "--normalization": tuple(NORMS), "--tokenizer-type": tuple(TOKENIZERS)}


@dataclass(frozen=True)
class Row:
    """A flag of a script with its value, if that is a word. status: done, noted or refused."""

    given: str
    status: str
    meaning: str


def scripts() -> dict[str, list[str]]:
    """The name and source of each script -> its flags, each with its value."""
    found: dict[str, list[str]] = {}
    for line in FLAGS.read_text().splitlines():
        if line.startswith("=="):
            words = found.setdefault(line.removeprefix("==").strip(), [])
        elif not line.startswith("#"):
            words += [f"--{given.strip()}" for given in f" {line}".split(" --")[1:]]
    return found


def row(given: str, parser: Parser) -> Row:
    """What becomes of one flag. KeyError for a flag that the command line does not know."""
    name, _, value = given.partition(" ")
    if name in REFUSED_FLAGS:
        return Row(given, "refused", REFUSED_FLAGS[name][1])
    if value and name in VALUES and value not in VALUES[name]:
        return Row(given, "refused", f"give {choices(VALUES[name])}")
    if name in COMPATIBILITY_FLAGS:
        also = f"; other values than {' '.join(ONLY[name][0])} are refused: {ONLY[name][1]}" if name in ONLY else ""
        return Row(given, "noted", COMPATIBILITY_FLAGS[name][1] + also)
    known = {option: action.help for action in parser._actions for option in action.option_strings}
    return Row(given, "done", known[name].replace("%%", "%"))


def tables() -> Iterator[str]:
    """The lines of one table a script."""
    parser = build_parser()
    for name, flags in scripts().items():
        rows = [row(given, parser) for given in flags]
        count = ", ".join(f"{sum(r.status == status for r in rows)} {status}" for status in ("done", "noted", "refused"))
        yield from (f"## {name}", "", f"{len(rows)} flags: {count}.", "", "| flag | | here |", "|---|---|---|")
        yield from (f"| `{r.given}` | {r.status} | {r.meaning.replace('|', '/')} |" for r in rows)
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put the tables into {DOCUMENT.relative_to(ROOT)}")
    text = "\n".join(tables())
    if parser.parse_args().write:
        DOCUMENT.write_text(DOCUMENT.read_text().partition(LINE)[0] + LINE + "\n" + text)
    else:
        print(text)


if __name__ == "__main__":
    main()
