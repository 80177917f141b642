"""From a recipe and a number of nodes to a job on a cluster: plan, render, check and submit scripts. Times and memory are modelled.

    fugaku-megatron job plan --recipe 30b --nodes 6144                what it decides, and why
    fugaku-megatron job render --recipe 124m --nodes 256 -o FILE      the script (to standard output without -o)
    fugaku-megatron job check FILE [-g GROUP]                         every mistake, with the line to change
    fugaku-megatron job submit FILE -g GROUP [--steps 5]              check, then pjsub; --steps: a chain of step jobs
    fugaku-megatron job slurm scripts/slurm                           write the Slurm scripts again

The group can also come from FUGAKU_GROUP. `python scripts/submit.py` of the checkout is the same command.
Test: pytest tests/test_jobs_submit.py
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..run.checks import check
from ..run.command_line import Command
from . import check as checks
from . import job as jobs
from . import limits, options, render, script, scripts, slurm


def plan(args: argparse.Namespace) -> int:
    """What would be submitted, and why."""
    job = options.job_from(args)
    ranks = jobs.rank_map(job)
    print("\n".join([*job.why, *(jobs.hop_lines(ranks) if ranks else []), "flags: " + " ".join(job.flags)]))
    return 0


def _write(path: Path, text: str, flag: str = "") -> None:
    """A script. Raises ValueError naming what cannot be written."""
    check(not path.is_fifo(), f"{flag}{path} is a FIFO, which would wait for a reader: give a file")
    try:
        path.write_text(text)
        path.chmod(0o755)
    except OSError as error:
        raise ValueError(f"{flag}{path}: {error.strerror}: give a file in a folder that is there and writable") from error


def render_all(folder: Path) -> int:
    """Write the scripts of scripts.py."""
    check(folder.is_dir(), f"--all {folder}: give a folder that is there, such as scripts/pjsub")
    for name in scripts.SCRIPTS:
        _write(folder / name, scripts.text(name))
        print(f"wrote {folder / name}")
    return 0


def add_render_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_arguments(parser)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write all of scripts/pjsub again; other options do not count")


def make(args: argparse.Namespace) -> int:
    """Write the script."""
    if args.all:
        return render_all(args.all)
    job = options.job_from(args)
    text = render.render(job)
    left = [f"to fill in: {problem.located(args.output or 'the script')}"
            for problem in checks.problems(text, os.environ.get(options.GROUP_VARIABLE))]
    if not args.output:
        sys.stdout.write(text)
        print(*left, sep="\n", end="\n" * bool(left), file=sys.stderr)
        return 0
    _write(Path(args.output), text, "-o ")
    print("\n".join([*job.why, f"wrote {args.output}", *left]))
    return 0


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="job script")
    parser.add_argument("-g", "--group", default=os.environ.get(options.GROUP_VARIABLE),
                        help=f"project to charge (default: ${options.GROUP_VARIABLE})")
    parser.add_argument("--no-files", action="store_true", help="do not ask whether staged files are there")


def _problems(args: argparse.Namespace, passed: Sequence[str] = ()) -> int:
    """How many mistakes, each printed. passed: options of pjsub, which replace directives."""
    check(Path(args.file).is_file(), f"{args.file} is no file: give a job script")
    problems = checks.problems(script.read(Path(args.file)), args.group, files=not args.no_files, options=passed)
    for problem in problems:
        print(problem.located(args.file), file=sys.stderr)
    return len(problems)


def verify(args: argparse.Namespace) -> int:
    """Every mistake of a script."""
    if _problems(args):
        return 2
    print(f"{args.file}: no mistake found (limits: {limits.resource_groups()[1]})")
    return 0


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_arguments(parser)
    parser.add_argument("--steps", type=int, help="a chain of this many step jobs, each after the one before it has ended well")
    parser.set_defaults(passed=[])
    parser.epilog = "options of pjsub, behind --, replace the script's directives: -- -x TCMALLOC=/path -L freq=2200"


def submit(args: argparse.Namespace) -> int:
    """Check, then hand over to pjsub. What stands behind "--" goes to pjsub as it is."""
    rest = script.add_options(script.Script(), args.passed, 0)
    check(not rest, f"behind -- stands {' '.join(rest)!r}, which is no option of pjsub: give FILE before --")
    check(args.steps is None or args.steps > 0, f"--steps is {args.steps}: give a number above 0")
    check(bool(shutil.which("pjsub")), "pjsub is not on the PATH: submit on a login node of Fugaku, or try the job here with "
          "scripts/pjsub/local_pjsub")
    if _problems(args, args.passed):
        return 2
    words = [*(["-g", args.group] if args.group else []), *args.passed]
    if args.steps is None:
        return subprocess.run(["pjsub", *words, args.file]).returncode
    return _chain(words, args.file, args.steps)


def _chain(words: list[str], file: str, steps: int) -> int:
    """Step jobs: the next one starts when the one before has ended with 0, and the rest is dropped when it has not."""
    name = Path(file).stem
    first = subprocess.run(["pjsub", *words, "--step", "--sparam", f"jnam={name},sn=1", file], capture_output=True, text=True)
    sys.stdout.write(first.stdout)
    sys.stderr.write(first.stderr)
    job = re.search(r"Job (\d+)", first.stdout)
    if first.returncode or job is None:
        return first.returncode or 1
    for step in range(2, steps + 1):
        depends = f"jid={job[1]},sn={step},sd=ec!=0:all:{step - 1}"
        code = subprocess.run(["pjsub", *words, "--step", "--sparam", depends, file]).returncode
        if code:
            return code
    return 0


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where they go, such as scripts/slurm: a folder for each cluster")


def write_slurm(args: argparse.Namespace) -> int:
    """Write the Slurm scripts of every cluster."""
    check(args.folder.is_dir(), f"{args.folder}: give a folder that is there, such as scripts/slurm")
    slurm.write_scripts(args.folder)
    return 0


COMMANDS = {
    "plan": Command("Fugaku: nodes, layout, clock and time that a job would ask for, and why", options.add_arguments, plan),
    "render": Command("Fugaku: write the job script of such a plan", add_render_arguments, make),
    "check": Command("Fugaku: after an edit, every mistake of a job script with its line", add_file_arguments, verify),
    "submit": Command("Fugaku: check, then pjsub, also as a chain of jobs", add_submit_arguments, submit),
    "slurm": Command("other clusters: write the committed Slurm scripts again", add_slurm_arguments, write_slurm),
}
