"""Campaign of changed programs: how many --check-layout finds.

    python -m tests.campaigns.mutants --seed 1 --count 300 --results mutants.jsonl
    python -m tests.campaigns.mutants --published --results published.jsonl
    python -m tests.campaigns.mutants --clean 100 --seed 1 --results clean.jsonl

Each trial is a process forked from one that has loaded the program. It gives one function other code, and checks layouts that
execute the changed line, with ranks as threads. Results are appended to a file; the same command continues an interrupted campaign.
    named         the report names the first tensor that the change makes wrong
    elsewhere     the report names a later tensor
    stopped       the program raises an error, hangs or needs too much time
    alike         one rank changes like the layout: only a record of the original (--against) differs
    rounding      tensors change by less than their tolerances
    equivalent    no bit of any tensor changes
    not executed  no layout executes the line; not among the trials
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pickle
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from tests.campaigns.mutants.layouts import LAYOUTS, SHARES, draw
from tests.campaigns.mutants.mutations import Site, mutant, sites
from tests.campaigns.mutants.program import PACKAGE, Lines, LinesOfCalls, Program, loaded_files
from tests.campaigns.mutants.published import OF_PATHS, PUBLISHED, Published
from tests.campaigns.mutants.trial import (
    ALIKE,
    ELSEWHERE,
    EQUIVALENT,
    FOUND,
    NAMED,
    NOT_EXECUTED,
    ROUNDING,
    STOPPED,
    Checked,
    Result,
    check_once,
    result_of,
)

FOLDERS = ("comm", "nn", "optim", "pipeline", "run", "training")
CPU_SECONDS = 40  # of a trial
ASLEEP = 40  # looks in a row at a trial whose threads all sleep
LOOK = 0.25  # s
MEMORY = 8 << 30  # bytes that a trial may add


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments) of another process, or the reason why it ended without a result."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sending, function, arguments))
    process.start()
    sending.close()
    reason = "the process died"
    try:
        reason = _wait(receiving, process.pid or 0)
        if not reason:
            return pickle.loads(receiving.recv_bytes())
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
        receiving.close()
    return Result(STOPPED, "", reason or "the process died")


def _work(sending: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_SECONDS, spent + CPU_SECONDS + 5))
    size = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    # Not `send`, which would share the memory of tensors with a process that ends.
    sending.send_bytes(pickle.dumps(function(*arguments)))
    sending.close()
    os._exit(0)


def _wait(receiving: Connection, pid: int) -> str:
    """Wait for a result. Return the reason if none will come."""
    asleep = 0
    before = -1.0
    while not receiving.poll(LOOK):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            times = process.cpu_times()
            spent = times.user + times.system
            sleeps = process.status() == psutil.STATUS_SLEEPING and spent == before
            asleep = asleep + 1 if sleeps else 0
            before = spent
            if asleep > ASLEEP:
                return "the ranks hang"
    return ""


def trace(layout: str) -> Lines:
    """Return the lines that a check of the layout executes."""
    with LinesOfCalls() as lines:
        checked = check_once(layout, LAYOUTS[layout])
    assert not checked.problem, f"{layout}: {checked.problem}"
    return {name: sorted(numbers) for name, numbers in lines.lines.items()}


def load() -> Program:
    """Load all code that a change can replace."""
    return Program([*map(str, paths()), *loaded_files()])


def paths() -> list[Path]:
    found = [path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")]
    return sorted(path.relative_to(PACKAGE) for path in found)


def trace_all(path: Path) -> dict[str, Lines]:
    """Trace the layouts of the campaign. path: keeps the lines for a continued campaign"""
    if path.exists():
        known: dict[str, Lines] = json.loads(path.read_text())
        return known
    executed: dict[str, Lines] = {}
    for layout in LAYOUTS:
        executed[layout] = forked(trace, layout)
        assert isinstance(executed[layout], dict), f"{layout}: {executed[layout]}"
    path.write_text(json.dumps(executed))
    return executed


class Originals(dict[str, Checked]):
    """Checks by the original program, each computed once."""

    def __missing__(self, layout: str) -> Checked:
        self[layout] = forked(check_once, layout, LAYOUTS[layout])
        assert isinstance(self[layout], Checked), f"{layout}: {self[layout]}"
        return self[layout]


def candidates() -> list[tuple[str, Site]]:
    """Return everything that can be changed in the files of FOLDERS."""
    return [(str(path), site) for path in paths() for site in sites((PACKAGE / path).read_text())]


def layouts_of(name: str, line: int, executed: dict[str, Lines]) -> list[str]:
    """Return the first few layouts that execute a line."""
    return [each for each in LAYOUTS if line in executed[each].get(name, ())][:SHARES]


WORST_FIRST = (STOPPED, NAMED, ELSEWHERE, ALIKE, ROUNDING, EQUIVALENT)


def try_in(replaced: Callable[[], int], layouts: list[str], before: dict[str, Checked]) -> Result:
    """Return a changed program's result in the first layout that finds it, or the largest change."""
    assert replaced(), "no function changed"
    results = []
    for layout in layouts:
        results.append(result_of(layout, LAYOUTS[layout], before[layout]))
        if results[-1].kind in FOUND:
            break
    return min(results, key=lambda each: WORST_FIRST.index(each.kind))


def mutants(
    seed: int, count: int, results: Path
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield a key and a trial for each random mutant of an executed line."""
    executed = trace_all(results.with_suffix(".lines.json"))
    program = load()
    before = Originals()
    all_sites = candidates()
    random.Random(seed).shuffle(all_sites)
    tried = 0
    unexecuted = 0
    for name, site in all_sites:
        if tried == count:
            break
        layouts = layouts_of(name, site.line, executed)
        if not layouts:
            unexecuted += 1
            continue
        tried += 1
        source = (PACKAGE / name).read_text()

        def trial(
            name: str = name, site: Site = site, layouts: list[str] = layouts, source: str = source
        ) -> dict[str, Any]:
            changed = mutant(source, site)
            for layout in layouts:
                before[layout]  # noqa: B018  # computed before the fork
            result = forked(try_in, lambda: program.replace(name, changed.tree), layouts, before)
            where = {"file": name, "line": changed.line, "change": changed.change}
            return {**where, "layouts": layouts, **result._asdict()}

        yield f"{name}:{site.number}:{site.choice}", trial
    print(f"{unexecuted} other places that no layout executes were drawn ({NOT_EXECUTED})")


def published() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield a name and a trial for each published bug and each bug of a path."""
    program = load()
    for bug in (*PUBLISHED, *OF_PATHS):

        def trial(bug: Published = bug) -> dict[str, Any]:
            result = forked(try_published, bug, program)
            named = all(words in result.text for words in bug.words)
            return {"file": bug.file, "right": named, **result._asdict()}

        yield bug.name, trial


def try_published(bug: Published, program: Program) -> Result:
    before = check_once(bug.layout, bug.flags)
    assert program.replace(bug.file, bug.changed()), f"{bug.name} changes no function"
    return result_of(bug.layout, bug.flags, before)


def clean(seed: int, count: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield a name and a check for each random layout."""
    rng = random.Random(seed)
    for number in range(count):
        layout, flags = draw(rng)

        def trial(layout: str = layout, flags: dict[str, Any] = flags) -> dict[str, Any]:
            found = forked(check_once, layout, flags)
            row: dict[str, Any] = {"layout": layout, "flags": flags}
            if isinstance(found, Result):
                return {**row, "kind": STOPPED, "text": found.text}
            kind = "alarm" if found.problem else "clean"
            return {**row, "kind": kind, "text": found.problem, "errors": found.errors}

        yield f"{number}", trial


def run(trials: Iterator[tuple[str, Callable[[], dict[str, Any]]]], path: Path) -> None:
    """Run the trials that the file of results lacks, and print the score."""
    done: dict[str, dict[str, Any]] = {}
    if path.exists():
        done = {row["key"]: row for row in map(json.loads, path.read_text().splitlines())}
    rows = []
    for key, trial in trials:
        if key not in done:
            started = time.perf_counter()
            row = {"key": key, **trial(), "seconds": round(time.perf_counter() - started, 1)}
            with path.open("a") as file:
                print(json.dumps(row), file=file)
            print(f"{row['kind']:<10} {key}: {row.get('change', '')}", flush=True)
            print(f"           {row.get('layout', '')}: {row['text']:.400}", flush=True)
            done[key] = row
        rows.append(done[key])
    counts = Counter(row["kind"] for row in rows)
    score = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
    seconds = sum(row["seconds"] for row in rows)
    print(f"{len(rows)} trials: {score} ({seconds:.0f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30, help="random mutants")
    parser.add_argument("--published", action="store_true", help="try published bugs")
    parser.add_argument("--clean", type=int, help="check so many right layouts drawn at random")
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"))
    options = parser.parse_args()
    if options.published:
        trials = published()
    elif options.clean:
        trials = clean(options.seed, options.clean)
    else:
        trials = mutants(options.seed, options.count, options.results)
    run(trials, options.results)


if __name__ == "__main__":
    sys.exit(main())
