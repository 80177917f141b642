"""Measure how a start reads: calls, functions, files, and returns to a file that was left before.

    python -m tools.start_profile train --recipe demo --mock-data --vocab-size 512 --dry-run --world-size 4

Run a command of fugaku-megatron in this process until it ends or calls `train_step`. Imports are not counted.
A return is a function whose first call is in a file that the start has left before: a start without any reads downwards.
"""

from __future__ import annotations

import argparse
import atexit
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = "fugaku_megatron"
END = "train_step"
SPECIAL = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


class StartProfile:
    """Calls of a start, in order."""

    def __init__(self, root: Path) -> None:
        self.root = f"{root / PACKAGE}/"
        self.calls: list[CodeType] = []
        self.importing = 0
        self.ended = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or self.ended:
            return
        if code.co_name == "<module>":
            self.importing += 1 if event == "call" else -1
            return
        if event == "return" or self.importing > 1 or not code.co_filename.startswith(self.root):
            return
        if code.co_name == END:
            self.ended = True
            sys.setprofile(None)
            return
        self.calls.append(code)

    def path(self, code: CodeType) -> str:
        """Return the file of a function, relative to the package."""
        return code.co_filename.removeprefix(self.root)

    def first_calls(self) -> list[CodeType]:
        """Return every named function once, in the order of the first calls."""
        named = (code for code in self.calls if code.co_name not in SPECIAL)
        return [*dict.fromkeys(named)]

    def report(self, listed: int) -> Iterator[str]:
        """Yield the figures, and the files to which a start returns most often."""
        functions = self.first_calls()
        calls = self.returns(self.calls)
        reads = self.returns(functions)
        files = {*map(self.path, self.calls)}
        yield f"{len(self.calls):,} calls, {len(functions):,} functions, {len(files)} files"
        yield f"returns to a file left before: {len(reads):,} of functions, {len(calls):,} of calls"
        for path, count in Counter(reads).most_common(listed):
            yield f"  {count:5} {path}"

    def returns(self, codes: list[CodeType]) -> list[str]:
        """Return the files left before to which a sequence of functions returns."""
        left: set[str] = set()
        found = []
        current = None
        for path in map(self.path, codes):
            if path == current:
                continue
            if path in left:
                found.append(path)
            if current is not None:
                left.add(current)
            current = path
        return found


def main() -> None:
    """Profile one command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--listed", type=int, default=10, help="files to list (default: 10)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="words after fugaku-megatron")
    args = parser.parse_args()
    profile = StartProfile(Path.cwd())
    sys.argv = [PACKAGE, *args.command]

    def report() -> None:
        sys.setprofile(None)
        print(*profile.report(args.listed), sep="\n", file=sys.stderr)

    atexit.register(report)
    sys.setprofile(profile)
    runpy.run_module(PACKAGE, run_name="__main__")


if __name__ == "__main__":
    main()
