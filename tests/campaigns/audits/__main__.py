"""Silent faults in small runs with audits: how many are found, when, and with which name.

    python -m tests.campaigns.audits --count 500 --seed 1 --results audits.jsonl --write   the table of docs/reliability.md
    python -m tests.campaigns.audits --count 1 --seed 1 --first 57                         that fault again

Kinds and layouts take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from tests.campaigns import reliability_page, results
from tests.campaigns.audits.trial import KINDS, LAYOUTS, Fault, attempt
from tests.campaigns.results import Record, Results


def outcome_of(seed: int, number: int) -> Record:
    outcome = attempt(Fault.draw(seed, number))
    return {**asdict(outcome.fault), **outcome._asdict(), "fault": None}


def row(kind: str, layout: str, found: Sequence[Record]) -> str:
    """Return a table's row. Delays count iterations from the first wrong bit to the run's end."""
    ended = [each for each in found if each["found"] is not None]
    delays = [max(each["found"] - each["onset"], 0) for each in ended]
    delay = f"{median(delays):.0f}, {max(delays)}" if delays else ""
    alone = sum(each["named"] for each in ended)
    among = sum(each["among"] for each in ended)
    loaded = sum(not each["trusted"] for each in ended)
    return (
        f"| {kind} | {layout} | {len(found)} | {len(ended)} | {delay} | {alone} | {among} | "
        f"{len(ended) - alone - among} | {loaded} |"
    )


def table(records: Sequence[Record], command: str) -> str:
    rows = [
        "| fault | layout | tried | found | iterations: median, most | rank named alone | with others | not named | "
        "wrong checkpoint trusted |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        for layout in LAYOUTS:
            found = [each for each in records if (each["kind"], each["layout"]) == (kind, layout)]
            rows.append(row(kind, layout, found))
    rows.append(row("sum", "", records))
    return f"`{command}`:\n\n" + "\n".join(rows) + "\n"


def main() -> None:
    args = results.parser("audits", __doc__, count=500).parse_args()
    numbers = range(args.first, args.first + args.count)
    found = Results(args.results, args.seed)
    for number in found.missing(numbers):
        record = outcome_of(args.seed, number)
        found.add(number, record)
        print(number, record["kind"], record["layout"], record["line"], flush=True)
    command = f"python -m tests.campaigns.audits --count {args.count} --seed {args.seed}"
    text = table(found.of(numbers), command)
    print(text)
    if args.write:
        reliability_page.write("audits", text)


if __name__ == "__main__":
    main()
