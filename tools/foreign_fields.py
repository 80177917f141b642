"""The tables of docs/formats.md: what becomes of every field of other programs' files.

    python -m tools.foreign_fields          # prints them; with --write puts them into the document

They come from the tables that the program itself reads with.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from fugaku_megatron.config.megatron_flags import OTHER_FLAGS, saved_reasons
from fugaku_megatron.convert.hugging_face import config_json, peft
from fugaku_megatron.convert.hugging_face.architectures import ARCHITECTURES, ONLY
from fugaku_megatron.convert.megatron.arguments import READ
from tools.megatron_flags import LINE, ROOT

PAGE = ROOT / "docs" / "formats.md"


def names(found: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(found))


def only(table: dict[str, tuple]) -> Iterator[str]:
    """Return a cell's text of fields that may have some values alone."""
    for name, built in sorted(table.items()):
        yield f"`{name}` ({', '.join(f'`{value!r}`' for value in built)})"


def model_fields() -> Iterator[str]:
    yield from (
        "## config.json",
        "",
        "| architecture | read | only these values |",
        "|---|---|---|",
    )
    for row in ARCHITECTURES:
        read = config_json.read_fields(row) - set(row.only) - set(ONLY)
        yield f"| `{row.model_type}` | {names(read)} | {', '.join(only(dict(row.only)))} |"
    yield f"| every one | `architectures` `model_type` | {', '.join(only(ONLY))} |"
    yield from ("", "| ignored | because |", "|---|---|")
    for reason, found in config_json.IGNORED.items():
        yield f"| {names(found)} | {reason} |"
    for kind, reasons in config_json.IGNORED_OF.items():
        for reason in dict.fromkeys(reasons.values()):
            found = [name for name in reasons if reasons[name] == reason]
            yield f"| {names(found)} of `{kind}` | {reason} |"
    outside = names(config_json.OF_THE_WHOLE)
    yield f"| {outside} in text_config | if they are next to text_config, too, which counts |"
    for reason, found in config_json.IGNORED_OUTSIDE.items():
        yield f"| {names(found)} next to text_config | {reason} |"
    yield from ("", "Any other field is refused, unless it is null, false or empty.", "")


def adapter_config() -> Iterator[str]:
    yield from ("## adapter_config.json", "", "| fields | here |", "|---|---|")
    yield f"| {names(peft.READ)} | read |"
    for name, built in peft.ONLY.items():
        yield f"| `{name}` | only {', '.join(f'`{value!r}`' for value in built)} |"
    for reason, found in peft.IGNORED.items():
        yield f"| {names(found)} | ignored: {reason} |"
    yield from ("", "Any other field is refused, unless it is null, false or empty.", "")


def saved_arguments() -> Iterator[str]:
    """Yield the table of arguments in Megatron-LM's checkpoints."""
    yield from ("## Arguments that Megatron-LM saves", "", "| arguments | here |", "|---|---|")
    yield f"| {names(READ)} | read |"
    refused: dict[str, list[str]] = {}
    for name, row in OTHER_FLAGS.items():
        if row.changes_model:
            shown = name.removeprefix("--").replace("-", "_")
            refused.setdefault(row.meaning, []).append(shown)
    for meaning, found in refused.items():
        yield f"| {names(found)} | refused where they are on: {meaning} |"
    yield "| `num_experts` | refused where it is on: experts are not read from Megatron-LM |"
    yield "| those named after a flag of [flags.md](flags.md) or [megatron.md](megatron.md) | ignored: they describe a run |"
    for reason, found in saved_reasons().items():
        yield f"| {names(found)} | ignored: {reason} |"
    end = "Any other argument is refused, unless it is null, false or empty, or `--ignore-saved-arguments` names it."
    yield from ("", end, "")


def tables() -> Iterator[str]:
    yield from model_fields()
    yield from adapter_config()
    yield from saved_arguments()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the document")
    text = "\n".join(tables())
    if parser.parse_args().write:
        PAGE.write_text(PAGE.read_text().partition(LINE)[0] + LINE + "\n" + text)
    else:
        print(text)


if __name__ == "__main__":
    main()
