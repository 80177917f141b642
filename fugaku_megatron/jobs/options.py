"""The options of a job besides the flags of a run. Test: pytest tests/test_jobs_submit.py"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from ..run import arguments
from ..run.checks import check, flag
from ..run.command_line import Parser
from . import check as checks
from . import job as jobs
from . import limits, render

OWN = ("nodes", "ranks_per_node", "mode", "group", "volumes", "elapse", "resource_group", "name", "kind", "output", "all")
GROUP_VARIABLE = "FUGAKU_GROUP"
# a flag that the script gives itself -> the variable at its top
SCRIPTS_OWN = {"save": "SAVE", "load": "SAVE", "data_path": "DATA", "train_data_path": "DATA", "vocab_file": "DATA",
               "merge_file": "DATA", "tokenizer_model": "TOKENIZER", "exit_duration_in_mins": "MARGIN"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A job's own options, and every flag of a run."""
    group = parser.add_argument_group("job")
    group.add_argument("--nodes", type=int, help="nodes of the job (must be given)")
    group.add_argument("--ranks-per-node", type=int, choices=jobs.RANKS_PER_NODE, help="default: what is fastest in the model")
    group.add_argument("--mode", default="normal-2.0", help=f"clock and power: {', '.join(limits.MODES)} (default: normal-2.0)")
    group.add_argument("-g", "--group", default=None, help=f"project to charge (default: ${GROUP_VARIABLE} when submitting)")
    group.add_argument("--volumes", default="/vol0004", help="volumes that the job opens, joined by colons (default: /vol0004)")
    group.add_argument("--elapse", help="HH:MM:SS (default: what the model says, at most the resource group's limit)")
    group.add_argument("--resource-group", help="default: small, large or huge, by nodes")
    group.add_argument("--name", help="name of the job")
    group.add_argument("--kind", default="train", choices=sorted(render.RUNS), help="what the script does (default: train)")
    group.add_argument("-o", "--output", help="file to write")
    arguments.add_train_flags(parser, "those not given are chosen")


def job_from_words(words: Sequence[str]) -> jobs.Job:
    """The job that the words of a command line describe. Raises ValueError for a user's mistake."""
    parser = Parser()
    add_arguments(parser)
    return job_from(parser.parse_args(words))


def job_from(args: argparse.Namespace) -> jobs.Job:
    """The job that parsed options describe. Raises ValueError for a user's mistake."""
    check(args.nodes is not None, "--nodes must be given: the nodes of the job")
    mode = limits.mode(args.mode)
    check(not mode.refused, f"--mode {args.mode}: {mode.refused}")
    for name, variable in SCRIPTS_OWN.items():
        value = getattr(args, name, None)
        check(value is None, f"{flag(name)} {' '.join(value) if isinstance(value, list) else value}: the script says it: give "
              f"{variable} there, or pjsub -x {variable}=...")
    clock = getattr(args, "cpu_frequency", mode.ghz)
    check(clock == mode.ghz, f"--cpu-frequency {clock}, but --mode {args.mode} is {mode.ghz} GHz: leave it out")
    for name, value in (("--name", args.name), ("--group", args.group)):
        check(value is None or limits.is_name(value), f"{name} {value!r:.60}: give letters, digits, '.', '_' and '-', at most 64")
    check(re.fullmatch(r"/vol\w+(:/vol\w+)*", args.volumes) is not None, f"--volumes {args.volumes!r:.60}: give /vol0004 and "
          "others, joined by colons")
    job = jobs.decide(args, OWN)[0]
    problems = checks.problems(render.render(job), group="submitter", files=False)
    check(not problems, problems[0].text if problems else "")
    return job
