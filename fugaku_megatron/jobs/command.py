"""The commands of scripts/submit.py: plan, render, check, submit. Test: pytest tests/test_jobs_submit.py"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..run.arguments import Parser
from ..run.config import check
from . import check as checks
from . import job as jobs
from . import limits, options, render, script, scripts

USAGE = (f"usage: {options.PROGRAM} plan|render --nodes N --recipe R ... | check FILE | submit FILE [-- options of pjsub]     "
         f"({options.PROGRAM} plan --help)")


def plan(argv: Sequence[str]) -> int:
    """What would be submitted, and why."""
    _, job = options.decided("plan", argv)
    made = jobs.rank_map(job)
    print("\n".join([*job.why, *(jobs.hop_lines(made) if made else []), "flags: " + " ".join(job.flags)]))
    return 0


def _write(path: Path, text: str, flag: str = "") -> None:
    """A script. Raises ValueError naming what cannot be written."""
    try:
        path.write_text(text)
        path.chmod(0o755)
    except OSError as error:
        raise ValueError(f"{flag}{path}: {error.strerror}: give a file in a folder that is there and writable") from error


def make_all(folder: str) -> int:
    """Write the scripts of scripts.py."""
    for name in scripts.SCRIPTS:
        path = Path(folder) / name
        _write(path, scripts.text(name))
        print(f"wrote {path}")
    return 0


def make(argv: Sequence[str]) -> int:
    """Write the script."""
    if argv and argv[0] == "--all":
        check(len(argv) == 2 and Path(argv[1]).is_dir(), "render --all: give one folder, such as scripts/pjsub")
        return make_all(argv[1])
    args, job = options.decided("render", argv)
    text = render.render(job)
    if not args.output:
        sys.stdout.write(text)
        return 0
    _write(Path(args.output), text, "-o ")
    print("\n".join([*job.why, f"wrote {args.output}"]))
    return 0


def _file_parser(command: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"{options.PROGRAM} {command}", allow_abbrev=False)
    parser.add_argument("file", help="job script")
    parser.add_argument("-g", "--group", default=os.environ.get(options.GROUP_VARIABLE),
                        help=f"project to charge (default: ${options.GROUP_VARIABLE})")
    parser.add_argument("--no-files", action="store_true", help="do not ask whether staged files are there")
    return parser


def _problems(args: argparse.Namespace, passed: Sequence[str] = ()) -> int:
    """How many mistakes, each printed. passed: options of pjsub, which replace directives."""
    check(Path(args.file).is_file(), f"{args.file} is no file: give a job script")
    found = checks.problems(script.read(Path(args.file)), args.group, files=not args.no_files, options=passed)
    for problem in found:
        print(problem.told(args.file), file=sys.stderr)
    return len(found)


def verify(argv: Sequence[str]) -> int:
    """Every mistake of a script."""
    args = _file_parser("check").parse_args(argv)
    if _problems(args):
        return 2
    print(f"{args.file}: no mistake found (limits: {limits.resource_groups()[1]})")
    return 0


def submit(argv: Sequence[str]) -> int:
    """Check, then hand over to pjsub. What stands behind "--" goes to pjsub as it is: -- -x TCMALLOC=/path -L freq=2200"""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    parser, passed = _file_parser("submit"), words[end + 1:]
    parser.add_argument("--steps", type=int, help="a chain of this many step jobs, each after the one before it has ended well")
    parser.epilog = "options of pjsub, behind --, replace the script's directives"
    args = parser.parse_args(words[:end])
    rest = script.add_options(script.Script(), passed, 0)
    check(not rest, f"behind -- stands {' '.join(rest)!r}, which is no option of pjsub: give FILE before --")
    check(args.steps is None or args.steps > 0, f"--steps is {args.steps}: give a number above 0")
    check(bool(shutil.which("pjsub")), "pjsub is not on the PATH: submit on a login node of Fugaku, or try the job here with "
          "scripts/pjsub/local_pjsub")
    if _problems(args, passed):
        return 2
    given = [*(["-g", args.group] if args.group else []), *passed]
    if args.steps is None:
        return subprocess.run(["pjsub", *given, args.file]).returncode
    return _chain(given, args.file, args.steps)


def _chain(given: list[str], file: str, steps: int) -> int:
    """Step jobs: the next one starts when the one before has ended with 0, and the rest is dropped when it has not."""
    name = Path(file).stem
    first = subprocess.run(["pjsub", *given, "--step", "--sparam", f"jnam={name},sn=1", file], capture_output=True, text=True)
    sys.stdout.write(first.stdout)
    sys.stderr.write(first.stderr)
    job = re.search(r"Job (\d+)", first.stdout)
    if first.returncode or job is None:
        return first.returncode or 1
    for step in range(2, steps + 1):
        depends = f"jid={job[1]},sn={step},sd=ec!=0:all:{step - 1}"
        code = subprocess.run(["pjsub", *given, "--step", "--sparam", depends, file]).returncode
        if code:
            return code
    return 0


COMMANDS = {"plan": plan, "render": make, "check": verify, "submit": submit}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; a user's mistake is one line and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in ("-h", "--help"):
            print(USAGE)
            return 0 if words else 2
        check(words[0] in COMMANDS, f"command {words[0]} is unknown: give {' or '.join(COMMANDS)}")
        return COMMANDS[words[0]](words[1:])
    except ValueError as error:
        print(f"{options.PROGRAM}: {error}", file=sys.stderr)
        return 2
