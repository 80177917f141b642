"""Check every byte of a checkpoint directory and print one line a problem.

    fugaku-megatron verify checkpoints                     every iteration
    fugaku-megatron verify checkpoints --ckpt-step 100     one iteration

Exit code 0: all files OK, 1: problems, 2: nothing to check. Several threads read; progress is on
stderr.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..text.numbers import plural
from ..text.progress_line import ProgressLine
from .manifest import (
    MANIFEST,
    iteration_name,
    iteration_path,
    latest_iteration,
    missing,
    read_folder,
    read_head,
    saved_iterations,
)
from .schema import Entry, Manifest, check_size
from .shards import check_stored
from .tensor_files import BlockFile, read_header

THREADS = 8  # at most, unless --threads says so
# seconds between two lines of progress
INTERVAL = 30.0
TERMINAL_INTERVAL = 0.5
GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", help="the directory of --save, which holds iter_... and the tracker"
    )
    parser.add_argument("--ckpt-step", type=int, help="check this iteration alone")
    parser.add_argument(
        "--threads",
        type=int,
        default=min(THREADS, os.cpu_count() or 1),
        help="number of files that are read at the same time (default: %(default)s)",
    )


def main(options: argparse.Namespace) -> int:
    """Verify checkpoints and print every problem; return 1 if any was found, else 0."""
    directory = Path(options.directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: pass the directory of --save")
    if directory.name.startswith("iter_"):
        raise ValueError(
            f"{directory} is one iteration of a checkpoint: pass its parent {directory.parent} and --ckpt-step"
        )
    present = saved_iterations(directory)
    if not present:
        raise ValueError(
            f"{directory} holds no checkpoint: it has no folder such as {iteration_name(1)}"
        )
    if options.ckpt_step is not None and options.ckpt_step not in present:
        raise ValueError(
            f"--ckpt-step {options.ckpt_step} is not in {directory}: it holds {', '.join(map(str, present))}"
        )
    iterations = present if options.ckpt_step is None else [options.ckpt_step]
    if options.threads < 1:
        raise ValueError(f"--threads is {options.threads}: pass a number above 0")
    found = 0
    for problem in _tracker_problems(directory) if options.ckpt_step is None else ():
        print(problem)
        found += 1
    for iteration in iterations:
        lines, summary = check_iteration(directory, iteration, options.threads)
        print(*lines, summary, sep="\n", flush=True)
        found += len(lines)
    print(plural(found, "problem") if found else "all files OK")
    return 1 if found else 0


def _tracker_problems(directory: Path) -> Iterator[str]:
    try:
        latest = latest_iteration(directory)
    except ValueError as error:
        yield str(error)
        return
    if latest is not None and (note := missing(directory, latest)):
        yield note


def check_iteration(directory: Path, iteration: int, threads: int) -> tuple[list[str], str]:
    """Verify all files on `threads` threads; return (problems, summary line)."""
    path = iteration_path(directory, iteration)
    try:
        head = read_head(directory, iteration)
    except ValueError as error:
        return [str(error)], f"{path}: not checked further"
    problems: list[str] = []
    files = dict(_files(path, head, problems))
    progress = ProgressLine(INTERVAL, TERMINAL_INTERVAL)
    total = sum(entry["size"] for entry in files.values()) / GIB
    checked = 0.0
    with ThreadPoolExecutor(threads) as pool:
        checks = pool.map(lambda name: check_file(path / name, files[name]), files)
        for entry, lines in zip(files.values(), checks, strict=True):
            problems += lines
            checked += entry["size"] / GIB
            progress(f"checked {checked:.1f} of {total:.1f} GiB")
    problems += _gaps(path, files)
    result = plural(len(problems), "problem") if problems else "whole"
    return problems, f"{path}: {len(files)} files, {total:.3f} GiB: {result}"


def _files(path: Path, head: Manifest, problems: list[str]) -> Iterator[tuple[str, Entry]]:
    yield from head.get("files", {}).items()
    for folder in head.get("folders", ()):
        try:
            yield from read_folder(path, folder, head).items()
        except ValueError as error:
            problems.append(
                f"{error}; the files of {path / folder} are not checked without {MANIFEST}"
            )


def check_file(path: Path, entry: Entry) -> list[str]:
    """Return a file's problems: its size, block checksums, and headers unlike the records."""
    try:
        check_size(path, entry)
        with BlockFile(path, entry) as file:
            if damaged := list(_damaged(file)):
                return damaged
            stored = read_header(file)
            for record in entry["shards"]:
                check_stored(stored, record, path)
    except (OSError, ValueError) as error:
        return [str(error)]
    return []


def _damaged(file: BlockFile) -> Iterator[str]:
    """Yield a line for each range of damaged blocks, with tensor names if the header is readable."""
    first = None
    count = -(-file.entry["size"] // file.block_size)
    for index in range(count + 1):
        damaged = index < count and not _is_whole(file, index)
        if damaged and first is None:
            first = index
        elif not damaged and first is not None:
            start = first * file.block_size
            end = min(index * file.block_size, file.entry["size"])
            yield f"{file.path} is damaged in its bytes {start} to {end}{_names(file, start, end)}"
            first = None


def _is_whole(file: BlockFile, index: int) -> bool:
    try:
        file.block(index)
    except ValueError:
        return False
    return True


def _names(file: BlockFile, start: int, end: int) -> str:
    try:
        stored = read_header(file)
    except ValueError:
        return ", its header among them" if start == 0 else ""
    names = [
        name
        for name, at in sorted(stored.items(), key=lambda item: item[1].start)
        if at.start < end and start < at.start + at.numel * at.dtype.itemsize
    ]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f", which hold {', '.join(names[:3])}{more}"


def _gaps(path: Path, files: dict[str, Entry]) -> Iterator[str]:
    held: Counter[str] = Counter()
    needed: dict[str, int] = {}
    for entry in files.values():
        for record in entry["shards"]:
            held[record["key"]] += record["numel"]
            needed.setdefault(record["key"], math.prod(record["global_shape"]))
    for key, count in needed.items():
        if held[key] != count:
            yield f"{path}: the files hold {held[key]} elements of {key}, which has {count}"
