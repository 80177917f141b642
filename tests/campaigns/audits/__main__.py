"""Silent faults in small runs with audits: how many are found, when, and with which name.

    python -m tests.campaigns.audits --count 500 --seed 1 --results audits.jsonl --write   the table of docs/reliability.md
    python -m tests.campaigns.audits --count 1 --seed 1 --first 57                         that fault again
    python -m tests.campaigns.audits --clean 10000                                         audits of right ranks, as threads
    python -m tests.campaigns.audits --clean-jobs 5000                                     the same of MPI processes, under each MPI

Kinds and layouts take turns. --results gets a line for each fault, and the same command continues an interrupted campaign.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.config.fields import check
from tests.campaigns import reliability_page
from tests.campaigns.audits.clean import audit_right_ranks
from tests.campaigns.audits.clean_jobs import audit_right_jobs
from tests.campaigns.audits.trial import KINDS, LAYOUTS, Fault, attempt

Record = dict[str, Any]  # an outcome in --results


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="python -m tests.campaigns.audits", description=__doc__)
    made.add_argument("--count", type=int, default=0)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--first", type=int, default=0, help="number of the first fault")
    made.add_argument("--results", type=Path, metavar="FILE")
    made.add_argument("--write", action="store_true", help="write the table of docs/reliability.md")
    made.add_argument("--clean", type=int, default=0, help="audits of right ranks")
    made.add_argument("--clean-jobs", type=int, default=0, help="audits of right MPI processes")
    return made


def outcomes(seed: int, numbers: range, results: Path | None) -> Iterator[Record]:
    """Yield the outcome of each fault, from the file if it has it."""
    done: dict[int, Record] = {}
    if results is not None and results.exists():
        lines = map(json.loads, results.read_text().splitlines())
        done = {line["number"]: line for line in lines if line["seed"] == seed}
    for number in numbers:
        if number not in done:
            outcome = attempt(Fault.draw(seed, number))
            fault = asdict(outcome.fault)
            record = {**fault, **outcome._asdict(), "fault": None, "number": number, "seed": seed}
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            done[number] = record
        yield done[number]


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


def main(words: Sequence[str] | None = None) -> None:
    args = parser().parse_args(words)
    check(
        args.count or args.clean or args.clean_jobs,
        "nothing to do: pass --count, --clean or --clean-jobs",
    )
    if args.clean:
        print(audit_right_ranks(args.clean))
    if args.clean_jobs:
        print(audit_right_jobs(args.clean_jobs))
    if args.count:
        numbers = range(args.first, args.first + args.count)
        records = []
        for record in outcomes(args.seed, numbers, args.results):
            records.append(record)
            print(record["number"], record["kind"], record["layout"], record["line"], flush=True)
        text = table(
            records, f"python -m tests.campaigns.audits --count {args.count} --seed {args.seed}"
        )
        print(text)
        if args.write:
            reliability_page.write("audits", text)


if __name__ == "__main__":
    main()
