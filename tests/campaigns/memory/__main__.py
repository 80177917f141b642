"""Lost ranks and nodes of small runs with copies in memory: what is repeated, and the bits at the end.

    python -m tests.campaigns.memory --count 60 --seed 1 --results memory.jsonl --write   the table of docs/reliability.md
    python -m tests.campaigns.memory --count 5 --seed 1 --first 20                        these kills again

Runs take five kills each, in all layouts in turn, with MPICH and Open MPI if both are installed. A run must end with the bits of an
undisturbed one.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from fugaku_megatron.checkpoint.manifest import read_manifest
from tests.campaigns import reliability_page, results
from tests.campaigns.faults import jobs
from tests.campaigns.memory.trial import (
    KILLS,
    KINDS,
    LAYOUTS,
    MEMORY,
    PARTNERS,
    SAVE,
    SPARE,
    Kill,
    Trial,
    starts,
)
from tests.campaigns.results import Record, Results
from tests.mpi import launch


def draw_kinds(rng: random.Random) -> list[str]:
    """Return a run's kills in order: there is one spare node, and one lost group."""
    others = [kind for kind in KINDS if kind not in (SPARE, PARTNERS)]
    kinds = [SPARE, PARTNERS, *(rng.choice(others) for _ in range(KILLS - 2))]
    rng.shuffle(kinds)
    return kinds


def final(folder: Path, iterations: int) -> Record:
    """Return each file's CRC-32 in the last checkpoint."""
    manifest = read_manifest(folder / "save", iterations)
    return {name: entry["crc32"] for name, entry in manifest["files"].items()}


class Campaign:
    """Runs in a folder, with an undisturbed one for each layout and MPI. mpis: in turn"""

    def __init__(self, folder: Path, seed: int, mpis: Sequence[launch.MPI]) -> None:
        self._folder = folder
        self._seed = seed
        self._data = jobs.write_data(folder)
        self._mpis = mpis
        self._references: dict[tuple[str, str, int], Record] = {}

    def run(self, number: int, kills: int = KILLS) -> Record:
        """Run number `number` of a seed."""
        rng = random.Random(f"{self._seed} {number}")
        name = list(LAYOUTS)[number % len(LAYOUTS)]
        mpi = self._mpis[number // len(LAYOUTS) % len(self._mpis)]
        trial = self._trial(f"run{number}", name, mpi, rng, draw_kinds(rng)[:kills])
        code, text = trial.run()
        found = [Kill(kind, *start) for kind, start in zip(trial.kinds, starts(text))]
        ended = code == 0 and final(trial.folder, trial.iterations)
        same = ended == self._reference(name, mpi, trial.kinds)
        left = [str(path) for path in (trial.folder / "nodes").glob("*/copies")]
        right = same and not left and len(found) == kills and all(kill.is_right for kill in found)
        return {
            "layout": name,
            "mpi": mpi.name,
            "kills": found,
            "same": same,
            "right": right,
            "text": "" if right else text,
        }

    def _trial(
        self, folder: str, name: str, mpi: launch.MPI, rng: random.Random, kinds: Sequence[str]
    ) -> Trial:
        place = self._folder / folder
        place.mkdir()
        return Trial(place, self._data, LAYOUTS[name], mpi, rng, kinds)

    def _reference(self, name: str, mpi: launch.MPI, kinds: Sequence[str]) -> Record:
        key = (name, mpi.name, len(kinds))
        if key not in self._references:
            folder = f"whole{len(self._references)}"
            trial = self._trial(folder, name, mpi, random.Random(0), kinds)
            job = jobs.start(trial.undisturbed(), **mpi.variables())
            assert job.end() == 0, job.text()
            self._references[key] = final(trial.folder, trial.iterations)
        return self._references[key]


def row(kind: str, layout: str, kills: Sequence[Kill], different: int) -> str:
    """Return a table's row. different: runs with other bits at the end"""
    repeated = [kill.repeated for kill in kills]
    counts = f"{median(repeated):.0f}, {max(repeated)}" if repeated else ""
    memory = sum(kill.source == MEMORY for kill in kills)
    save = sum(kill.source == SAVE for kill in kills)
    rest = len(kills) - memory - save
    return (
        f"| {kind} | {layout} | {len(kills)} | {memory} | {save} | {rest} | {counts} | "
        f"{sum(not kill.is_right for kill in kills)} | {different} |"
    )


def kills_of(record: Record) -> list[Kill]:
    return [Kill(*kill) for kill in record["kills"]]


def table(records: Sequence[Record], command: str) -> str:
    rows = [
        "| lost | layout | kills | from memory | from `--save` | from the beginning | iterations repeated: median, most | more than "
        "allowed | runs with other bits |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        for layout in LAYOUTS:
            runs = [record for record in records if record["layout"] == layout]
            kills = [kill for record in runs for kill in kills_of(record) if kill.kind == kind]
            if kills:
                rows.append(row(kind, layout, kills, sum(not record["same"] for record in runs)))
    every = [kill for record in records for kill in kills_of(record)]
    rows.append(row("sum", "", every, sum(not record["same"] for record in records)))
    return f"`{command}`:\n\n" + "\n".join(rows) + "\n"


def main() -> int:
    args = results.parser("memory", __doc__, count=60).parse_args()
    numbers = range(args.first // KILLS, -(-(args.first + args.count) // KILLS))
    mpis = [mpi for mpi in (launch.mpich(), launch.openmpi()) if mpi is not None]
    found = Results(args.results, args.seed)
    with tempfile.TemporaryDirectory(prefix="memory.", dir="/dev/shm") as folder:
        campaign = Campaign(Path(folder), args.seed, mpis)
        for number in found.missing(numbers):
            record = campaign.run(number)
            found.add(number, record)
            verdict = "right" if record["right"] else f"WRONG {record['text'][-3000:]}"
            kills = "; ".join(
                f"{kill.kind}: {kill.source}, {kill.repeated}" for kill in record["kills"]
            )
            print(f"{number} {record['layout']}, {record['mpi']}: {kills}: {verdict}", flush=True)
    first = f" --first {args.first}" if args.first else ""
    command = f"python -m tests.campaigns.memory --count {args.count} --seed {args.seed}{first}"
    records = found.of(numbers)
    text = table(records, command)
    print(text)
    if args.write:
        reliability_page.write("memory", text)
    return int(not all(record["right"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
