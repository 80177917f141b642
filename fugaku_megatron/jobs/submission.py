"""Submission by pjsub: a job, or a chain of step jobs, each submitted once; reports what is in the queue."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# pjsub's reply to a submission. Other text with a job number, such as a page of a proxy, is none.
SUBMITTED = re.compile(r"\[INFO\] PJM 0000 pjsub Job (\d+)(?:_\w+)? submitted")
NOT_EXECUTED = 126  # as in a shell


@dataclass
class Submission:
    """A job script on its way into the queue.

    options: of pjsub
    steps: step jobs of the chain; None: a single job
    job: number of the queued job
    queued: step jobs in the queue
    """

    options: Sequence[str]
    file: str
    steps: int | None
    job: str = ""
    queued: int = 0

    def submit(self) -> int:
        """Submit every step; return the exit code."""
        for step in range(1, (self.steps or 1) + 1):
            try:
                code, problem = self._submit_step(step)
            except KeyboardInterrupt:
                self._report(step, "was interrupted")
                raise
            if problem:
                self._report(step, problem)
                return code or 1
        if self.steps:
            print(f"in the queue: {self._in_queue()}")
        return 0

    def _submit_step(self, step: int) -> tuple[int, str]:
        """Run pjsub once; return (exit code, "" or the reason to stop)."""
        code, reply = _run(self._command(step))
        found = SUBMITTED.search(reply)
        if found is None:
            return code, f"ended with code {code} and no line that says that the job is submitted"
        if self.job and found[1] != self.job:
            return code, f"answered for job {found[1]}, which is not the chain's"
        self.job = found[1]
        self.queued = step
        return code, f"ended with code {code} after the submission" if code else ""

    def _command(self, step: int) -> list[str]:
        command = ["pjsub", *self.options]
        if self.steps and step == 1:
            command += ["--step", "--sparam", f"jnam={Path(self.file).stem},sn=1"]
        elif self.steps:
            # starts only after the previous step's exit code 0
            depends = f"jid={self.job},sn={step},sd=ec!=0:all:{step - 1}"
            command += ["--step", "--sparam", depends]
        return [*command, self.file]

    def _in_queue(self) -> str:
        if not self.steps:
            return f"job {self.job}"
        first = "step" if self.queued == 1 else "steps 1 to"
        return f"{first} {self.queued} of {self.steps} of job {self.job}"

    def _report(self, step: int, problem: str) -> None:
        """Print what is in the queue after a failure, and the commands that continue."""
        lines = [f"step {step}: pjsub {problem}" if self.steps else f"pjsub {problem}"]
        if not self.job:
            lines.append(
                "whether a job is in the queue is not known: look with pjstat before submitting again"
            )
        else:
            lines.append(f"in the queue: {self._in_queue()}: the same command would submit again")
        rest = range(self.queued + 1, (self.steps or 0) + 1)
        if self.job and rest:
            lines.append(
                f"to continue, run what follows, without step {rest[0]} if pjstat shows it; to delete the chain, "
                f"pjdel {self.job}:"
            )
            lines += [shlex.join(self._command(each)) for each in rest]
        print(*(f"job submit: {line}" for line in lines), sep="\n", file=sys.stderr)


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Run a command, print its output, and return (exit code, output of any encoding as text)."""
    try:
        done = subprocess.run(command, capture_output=True)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_EXECUTED, ""
    output = done.stdout.decode(errors="replace")
    errors = done.stderr.decode(errors="replace")
    sys.stdout.write(output)
    sys.stdout.flush()
    sys.stderr.write(errors)
    return done.returncode, output + errors
