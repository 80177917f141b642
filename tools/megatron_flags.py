"""The tables of docs/flags.md, every flag of a run, and of docs/megatron.md, every flag of published Megatron-LM scripts.

    python -m tools.megatron_flags          # prints them; with --write puts them into the documents

Both come from the command line's own parser and tables. The scripts' flags, and the flags of Megatron-LM itself, are in
tools/megatron_flags.txt.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from fugaku_megatron.cli.arguments import build_parser
from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.config.fields import flag_words
from fugaku_megatron.config.megatron_flags import OTHER_FLAGS
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.config.rows import NORMS
from fugaku_megatron.config.run_config import GROUPS, RunConfig
from fugaku_megatron.tokenizers.tokenizer import TOKENIZERS

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ROOT / "tools" / "megatron_flags.txt"
DESCRIBED = "[Flags](flags.md) describes them"
LINE = "---\n"  # of a document: below it stands what this program prints
HELP = re.compile(
    r"(.*?)(?: \((?:default: (.*)|on by default)\))?"
)  # what a flag means, its default
DEFAULTS = {field.name: field.default for config in GROUPS.values() for field in fields(config)}
VALUES = {"--normalization": tuple(NORMS), "--tokenizer-type": tuple(TOKENIZERS)}


@dataclass(frozen=True)
class Row:
    """A flag of a script with its value, if that is a word. status: done, noted or refused."""

    given: str
    status: str
    meaning: str


def scripts() -> dict[str, list[str]]:
    """Return the name and source of each script -> its flags, each with its value."""
    found: dict[str, list[str]] = {}
    for line in FLAGS.read_text().splitlines():
        if line.startswith("=="):
            words = found.setdefault(line.removeprefix("==").strip(), [])
        elif not line.startswith("#"):
            words += [f"--{given.strip()}" for given in f" {line}".split(" --")[1:]]
    return found


def row(given: str, parser: Parser) -> Row:
    """Return what becomes of one flag. KeyError for a flag that the command line does not know."""
    name, _, value = given.partition(" ")
    if value and name in VALUES and value not in VALUES[name]:
        return Row(given, "refused", f"pass {' or '.join(VALUES[name])}")
    if name in OTHER_FLAGS:
        return other_row(given, name, value)
    known = {option: action.help for action in parser._actions for option in action.option_strings}
    return Row(given, "done", known[name].replace("%%", "%"))


def other_row(given: str, name: str, value: str) -> Row:
    """Return what becomes of a flag that is not a field of the config."""
    other = OTHER_FLAGS[name]
    if other.accepted and not value:
        return Row(
            given,
            "noted",
            f"{' or '.join(other.accepted)} is accepted; others are refused: {other.meaning}",
        )
    refused = other.refuses([value] if value else [])
    return Row(given, "refused", other.meaning) if refused else Row(given, "noted", other.note)


def script_tables() -> Iterator[str]:
    """Yield the lines of one table a script. Flags of which the same is said share a row; docs/flags.md describes those that are done."""
    parser = build_parser()
    for name, flags in scripts().items():
        rows = [row(given, parser) for given in flags]
        count = ", ".join(
            f"{sum(r.status == status for r in rows)} {status}"
            for status in ("done", "noted", "refused")
        )
        yield from (
            f"## {name}",
            "",
            f"{len(rows)} flags: {count}.",
            "",
            "| flags | | here |",
            "|---|---|---|",
        )
        same: dict[tuple[str, str], list[str]] = {}
        for r in rows:
            same.setdefault((r.status, DESCRIBED if r.status == "done" else r.meaning), []).append(
                r.given
            )
        for (status, meaning), given in sorted(same.items(), key=lambda item: item[0][0]):
            yield f"| {' '.join(f'`{flag}`' for flag in given)} | {status} | {meaning.replace('|', '/')} |"
        yield ""


def value(action: argparse.Action) -> str:
    """Return what follows a flag on the command line, as a cell; nothing follows a switch."""
    kind = {int: "integer", float: "number"}.get(action.type, "text")
    kind = " or ".join(f"`{choice}`" for choice in action.choices) if action.choices else kind
    return {None: kind, 0: "", 1: kind, "+": f"{kind}, one or more"}.get(
        action.nargs, f"{kind}, {action.nargs} of them"
    )


def flag_row(action: argparse.Action, parser: Parser) -> str:
    """Return a line of a table: the flag and its other names, its value, its default and its meaning."""
    meaning, default = HELP.fullmatch(row(action.option_strings[0], parser).meaning).groups()
    if default is None:
        of_field = DEFAULTS.get(action.dest)
        default = "required" if of_field is MISSING else "on" if of_field is True else ""
    texts = (
        re.sub(r"(?<![\w`-])--[a-zA-Z][\w-]*", r"`\g<0>`", text) for text in (default, meaning)
    )
    cells = (" ".join(f"`{name}`" for name in action.option_strings), value(action), *texts)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def flag_tables() -> Iterator[str]:
    """Yield the lines of one table a group of flags, in the order of --help, and of the table of recipes."""
    parser = build_parser()
    for group in parser._action_groups:
        actions = [
            action
            for action in group._group_actions
            if action.dest != "help" and action.option_strings and action.help != argparse.SUPPRESS
        ]
        if actions:
            title = "general" if group.title == "options" else group.title
            yield from (f"## {title[0].upper()}{title[1:]}", "")
            yield from (group.description, "") if group.description else ()
            yield from ("| flag | value | default | meaning |", "|---|---|---|---|")
            yield from (flag_row(action, parser) for action in actions)
            yield ""
    yield from (
        "## Recipes",
        "",
        "| `--recipe` | model | the flags that it stands for |",
        "|---|---|---|",
    )
    for name, make in RECIPES.items():
        yield f"| `{name}` | {make.about} | `{' '.join(recipe_flags(make()))}` |"
    yield ""


def recipe_flags(run: RunConfig) -> Iterator[str]:
    """Yield the words of a command line that make a recipe's run."""
    for group, config in GROUPS.items():
        for field in fields(config):
            chosen = getattr(getattr(run, group), field.name)
            if chosen is not None and chosen != field.default:
                shown = (
                    float(f"{chosen:.12g}") if isinstance(chosen, float) else chosen
                )  # 6e-05, not 5.9999999999999995e-05
                yield from flag_words(field.name, shown)


DOCUMENTS = {ROOT / "docs" / "flags.md": flag_tables, ROOT / "docs" / "megatron.md": script_tables}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the documents")
    write = parser.parse_args().write
    for document, tables in DOCUMENTS.items():
        text = "\n".join(tables())
        if write:
            document.write_text(document.read_text().partition(LINE)[0] + LINE + "\n" + text)
        else:
            print(text)


if __name__ == "__main__":
    main()
