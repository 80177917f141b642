"""From a recipe and a number of nodes to a job on a cluster: plan, render, check and submit scripts. Times and memory are modelled.

    fugaku-megatron job plan --recipe 30b --nodes 6144                the decisions and the reasons
    fugaku-megatron job render --recipe 124m --nodes 256 -o FILE      write the script (to standard output without -o)
    fugaku-megatron job render --report --nodes 2 [--slurm x86]       the script that measures the nodes (docs/report.md)
    fugaku-megatron job check FILE [-g GROUP]                         print every mistake with the line to change
    fugaku-megatron job submit FILE -g GROUP [--steps 5]              check, then pjsub; --steps: a chain of step jobs
    fugaku-megatron job slurm scripts/slurm                           write Slurm scripts for every cluster and model

FUGAKU_GROUP sets the default of the group.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..cli import arguments
from ..cli.parser import Command, Parser
from ..config.fields import check, flag
from ..config.run_config import all_flags
from ..text.written_files import make_folder, named_file
from . import check as checks
from . import job as jobs
from . import limits, render, script, torus
from .submission import Submission

GROUP_VARIABLE = "FUGAKU_GROUP"
SHORT = "--train-iters 20 --eval-iters 0 --elapse 01:00:00"
# file in scripts/pjsub -> the options that render it
SCRIPTS = {
    "run_124m.sh": "--recipe 124m --nodes 256",
    "run_30b.sh": "--recipe 30b --nodes 6144 --micro-batch-size 1",
    "resume.sh": "--recipe 124m --nodes 64 --kind resume --name gpt_124m_chain",
    "compare_tcmalloc.sh": f"--recipe 124m --nodes 16 --ranks-per-node 1 --tensor-model-parallel-size 1 --micro-batch-size 1 "
    f"--pipeline-model-parallel-size 1 --kind tcmalloc --name compare_tcmalloc {SHORT}",
    "compare_frequency.sh": f"--recipe 124m --nodes 16 --kind frequency --name compare_frequency {SHORT}",
    # with tensor parallelism, whose all-reduces the rank map is for, though the model finds a faster layout without it
    "sweep_topology.sh": "--recipe 30b --nodes 384 --micro-batch-size 1 --ranks-per-node 4 --tensor-model-parallel-size 8 "
    "--kind topology --name sweep_topology --train-iters 10 --eval-iters 0 --elapse 03:00:00",
}


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags of the Fugaku job, and the training flags of the run."""
    group = parser.add_argument_group("job")
    add = group.add_argument
    add("--nodes", type=int, help="nodes of the job (required)")
    add(
        "--ranks-per-node",
        type=int,
        choices=limits.RANKS_PER_NODE,
        help="default: the fastest in the model",
    )
    add(
        "--mode",
        default="normal-2.0",
        help=f"clock and power: {', '.join(limits.MODES)} (default: normal-2.0)",
    )
    add(
        "-g",
        "--group",
        default=None,
        help=f"project to charge (default: ${GROUP_VARIABLE} when submitting)",
    )
    add(
        "--volumes",
        default="/vol0004",
        help="volumes that the job opens, joined by colons (default: /vol0004)",
    )
    add(
        "--elapse", help="HH:MM:SS (default: the modelled time, at most the resource group's limit)"
    )
    add("--resource-group", help="default: small, large or huge, by the number of nodes")
    add("--name", help="name of the job")
    add(
        "--kind",
        default="train",
        choices=sorted(render.RUNS),
        help="what the script does (default: train)",
    )
    _add_check_layout(group)
    add("-o", "--output", help="file to write")
    arguments.add_train_flags(parser, "the planner chooses those that are not set")


def _add_check_layout(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--check-layout",
        action="store_true",
        help="first compare the layout with one rank, on the fewest ranks that hold a replica",
    )


def job_from_words(words: Sequence[str], given: argparse.Namespace | None = None) -> jobs.Job:
    """Plan the job of a command line. given: values of other flags"""
    parser = Parser()
    add_plan_arguments(parser)
    return job_from(parser.parse_args(words, given))


def job_from(args: argparse.Namespace) -> jobs.Job:
    """Plan a job. ValueError for flags that the script sets, or that pjsub would refuse."""
    check(args.nodes is not None, "--nodes is missing: pass the number of nodes of the job")
    mode = limits.mode(args.mode)
    check(not mode.refused, f"--mode {args.mode}: {mode.refused}")
    for each in all_flags():
        value = getattr(args, each.name, None) if each.script else None
        check(
            value is None,
            f"{flag(each.name)} {' '.join(value) if isinstance(value, list) else value}: the script sets it: "
            f"set {each.script} in the script, or pass pjsub -x {each.script}=...",
        )
    clock = getattr(args, "cpu_frequency", mode.ghz)
    check(
        clock == mode.ghz,
        f"--cpu-frequency {clock}, but --mode {args.mode} is {mode.ghz} GHz: omit --cpu-frequency",
    )
    for name, value in (("--name", args.name), ("--group", args.group)):
        check(
            value is None or limits.is_name(value),
            f"{name} {value!r:.60}: use letters, digits, '.', '_' and '-', at most 64",
        )
    check(
        re.fullmatch(r"/vol\w+(:/vol\w+)*", args.volumes) is not None,
        f"--volumes {args.volumes!r:.60}: pass volumes such as /vol0004, joined by colons",
    )
    check(
        not args.check_layout or args.kind in render.CHECKED_KINDS,
        f"--check-layout checks before a run of --kind {' or '.join(render.CHECKED_KINDS)}, not {args.kind}: leave it out",
    )
    job = jobs.decide(args)
    problems = checks.problems(render.render(job), group="submitter", files=False)
    check(not problems, problems[0].text if problems else "")
    return job


def plan(args: argparse.Namespace) -> int:
    """Print a job's decisions, reasons, hops of its rank map, and flags."""
    job = job_from(args)
    lines = [*job.why, *job.reasons]
    if ranks := jobs.rank_map(job):
        hops = ", ".join(
            f"{kind.upper()} {mean:.2f}, {maximum}"
            for kind, (mean, maximum) in ranks.statistics().items()
        )
        lines.append(
            f"rank map: the replicas of a stage fill a box of {torus.text(ranks.box)} tensor-parallel groups; hops between "
            f"neighbours of a ring (mean, maximum): {hops}"
        )
    print(*lines, f"flags: {' '.join(job.flags)}", sep="\n")
    return 0


def _write(path: Path, text: str, flag: str = "") -> None:
    check(not path.is_fifo(), f"{flag}{path} is a FIFO, which would wait for a reader: pass a file")
    try:
        with open(path, "w", opener=named_file) as file:
            file.write(text)
        path.chmod(0o755)
    except OSError as error:
        raise ValueError(
            f"{flag}{path}: {error.strerror}: pass a file in an existing, writable folder"
        ) from error


def rendered(name: str) -> str:
    return render.render(job_from_words(shlex.split(SCRIPTS[name])))


def add_render_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the job's flags, and flags that select a report, Slurm or all scripts."""
    add_plan_arguments(parser)
    parser.add_argument(
        "--report",
        action="store_true",
        help="a job that runs fugaku-megatron report on --nodes, instead of a run",
    )
    parser.add_argument(
        "--slurm",
        choices=render.CLUSTERS,
        metavar="CLUSTER",
        help=f"with --report: for Slurm on nodes such as {', '.join(render.CLUSTERS)}",
    )
    parser.add_argument(
        "--all",
        type=Path,
        metavar="FOLDER",
        help="write scripts/pjsub again, without other options",
    )


def make(args: argparse.Namespace) -> int:
    """Write the script of a run or report, and list what to fill in; return the exit code."""
    if folder := args.all:
        check(folder.is_dir(), f"--all {folder}: pass an existing folder, such as scripts/pjsub")
        for name in SCRIPTS:
            _write(folder / name, rendered(name))
            print(f"wrote {folder / name}")
        return 0
    check(
        args.slurm is None or args.report,
        f"--slurm {args.slurm} goes with --report: pass both, or look into scripts/slurm",
    )
    check(
        not args.report or (args.nodes or 0) > 0,
        "--report needs --nodes: pass the number of nodes to measure",
    )
    if args.slurm:
        cluster = render.CLUSTERS[args.slurm]
        text = render.fill(render.SLURM_REPORT, cluster, nodes=args.nodes, time=render.REPORT_TIME)
        return _output(args, text)
    job = report_job(args) if args.report else job_from(args)
    text = render.self_contained(render.render(job))
    left = [
        f"to fill in: {problem.located(args.output or 'the script')}"
        for problem in checks.problems(text, os.environ.get(GROUP_VARIABLE))
    ]
    return _output(args, text, job.why, left)


def _output(
    args: argparse.Namespace, text: str, why: Sequence[str] = (), left: Sequence[str] = ()
) -> int:
    if args.output:
        _write(Path(args.output), text, "-o ")
        print(*why, f"wrote {args.output}", *left, sep="\n")
        return 0
    sys.stdout.write(text)
    for line in left:
        print(line, file=sys.stderr)
    return 0


def report_job(args: argparse.Namespace) -> jobs.Job:
    """Return the Fugaku job that measures its nodes with one rank per CMG."""
    ranks = args.ranks_per_node or max(limits.RANKS_PER_NODE)
    own = {name: getattr(args, name) for name in ("nodes", "mode", "group", "volumes")}
    given = argparse.Namespace(
        **own,
        resource_group=args.resource_group,
        ranks_per_node=ranks,
        kind="report",
        name=args.name or "report",
        elapse=args.elapse or render.REPORT_TIME,
        global_batch_size=args.nodes * ranks,
    )
    return job_from_words(render.REPORT_FLAGS.split(), given)


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="job script")
    parser.add_argument(
        "-g",
        "--group",
        default=os.environ.get(GROUP_VARIABLE),
        help=f"project to charge (default: ${GROUP_VARIABLE})",
    )
    parser.add_argument(
        "--no-files", action="store_true", help="do not check that staged files exist"
    )


def _problems(args: argparse.Namespace, passed: Sequence[str] = ()) -> int:
    check(Path(args.file).is_file(), f"{args.file} is not a file: pass a job script")
    problems = checks.problems(
        script.read(Path(args.file)), args.group, files=not args.no_files, options=passed
    )
    for problem in problems:
        print(problem.located(args.file), file=sys.stderr)
    return len(problems)


def verify(args: argparse.Namespace) -> int:
    if _problems(args):
        return 2
    print(f"{args.file}: no mistake found (limits: {limits.resource_groups()[1]})")
    return 0


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_arguments(parser)
    parser.add_argument(
        "--steps",
        type=int,
        help="a chain of this many step jobs; each starts if the previous one ended with 0",
    )
    parser.set_defaults(passed=[])
    parser.epilog = "options of pjsub after -- replace the directives of the script: -- -x TCMALLOC=/path -L freq=2200"


def submit(args: argparse.Namespace) -> int:
    """Check a script and submit the job, or a chain of step jobs; return the exit code."""
    rest = script.add_options(script.Script(), args.passed, 0)
    check(not rest, f"{' '.join(rest)!r} after -- is not an option of pjsub: pass FILE before --")
    check(args.steps is None or args.steps > 0, f"--steps is {args.steps}: pass a number above 0")
    check(
        shutil.which("pjsub"),
        "pjsub is not on the PATH: submit on a login node of Fugaku, or try the job here with "
        "scripts/pjsub/local_pjsub",
    )
    if _problems(args, args.passed):
        return 2
    words = [*(["-g", args.group] if args.group else []), *args.passed]
    return Submission(words, args.file, args.steps).submit()


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        help="an existing folder, such as scripts/slurm; each cluster gets a folder in it",
    )
    parser.add_argument(
        "--recipe", choices=render.SLURM_RECIPES, help="scripts of this model (default: of all)"
    )
    _add_check_layout(parser)


def write_slurm(args: argparse.Namespace) -> int:
    check(args.folder.is_dir(), f"{args.folder}: pass an existing folder, such as scripts/slurm")
    for path, text in render.slurm_scripts(args.recipe, args.check_layout).items():
        make_folder((args.folder / path).parent)
        _write(args.folder / path, text)
    return 0


COMMANDS = {
    "plan": Command(
        "Fugaku: nodes, layout, clock and time of a job, and the reasons", add_plan_arguments, plan
    ),
    "render": Command("Fugaku: write the job script of such a plan", add_render_arguments, make),
    "check": Command(
        "Fugaku: print every mistake of an edited job script with its line",
        add_file_arguments,
        verify,
    ),
    "submit": Command(
        "Fugaku: check, then pjsub, also as a chain of jobs", add_submit_arguments, submit
    ),
    "slurm": Command(
        "other clusters: write Slurm scripts for every kind of node and model",
        add_slurm_arguments,
        write_slurm,
    ),
}
