"""The parts of a job script: its #PJM directives, flags and variables, each with its line. For the checks and local_pjsub.

Options on pjsub's command line replace directives. Left out: what the values mean. Test: pytest tests/test_jobs_check.py
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..run.checks import check

SWITCHES = {"-S", "-s", "-j", "-X", "--step", "--bulk", "--interact", "--restart", "--norestart", "--no-check-directory",
            "--no-check-gfscache"}
VALUED = {"-L": "-L", "--rsc-list": "-L", "--mpi": "--mpi", "-g": "-g", "-x": "-x", "--llio": "--llio", "-N": "-N", "--name": "-N",
          "-o": "-o", "-e": "-e", "--sparam": "--sparam", "--omp": "--omp", "--spath": "--spath", "--at": "--at", "-m": "-m",
          "--mail-list": "--mail-list"}
_COMMA = re.compile(r",(?=[\w-]+(?:=|$|,))")  # between settings, not inside a value
_COMMA_X = re.compile(r",(?=[A-Za-z_]\w*=)")  # the same between variables, whose values may hold commas


@dataclass(frozen=True)
class Value:
    """The text of a setting and the line it stands in; line 0: pjsub's command line."""

    text: str
    line: int


@dataclass
class Script:
    """A parsed script.

    settings: option -> name -> value, such as settings["-L"]["node"]. switches: option without value -> line. flags: the words of
    FLAGS=( ). flag_lines: flag -> line. variables: those that the body assigns. body: (line, text), comments left out.
    """

    settings: dict[str, dict[str, Value]] = field(default_factory=dict)
    switches: dict[str, int] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    flag_lines: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Value] = field(default_factory=dict)
    body: list[tuple[int, str]] = field(default_factory=list)
    last_directive: int = 1

    def get(self, option: str, name: str = "") -> Value | None:
        """The value of a setting, such as get("-L", "node")."""
        return self.settings.get(option, {}).get(name)

    def line(self, option: str, name: str = "") -> int:
        """The line to change for a setting: its own, its option's, or the last directive."""
        setting = self.get(option, name)
        first_of_option = next(iter(self.settings.get(option, {}).values()), None)
        return (setting or first_of_option or Value("", self.last_directive)).line

    def value(self, name: str, environ: dict[str, str] | None = None) -> Value | None:
        """The value of a variable: that of -x, else the one that `default` reads from the body."""
        option, assignment = self.get("-x", name), self.variables.get(name)
        if assignment is None or option and assignment.text.startswith("${"):
            return option
        return Value(default(assignment, environ), assignment.line)

    def find(self, text: str) -> int | None:
        """The first line of the body that contains the text outside of comments."""
        return next((number for number, line in self.body if text in line.split(" #")[0]), None)


def add_options(script: Script, words: Sequence[str], line: int) -> list[str]:
    """Add pjsub's options to the script's settings; returns the words from the first that is no option (the script's name).

    line: of a directive, 0 for the command line. Raises ValueError naming an option that is unknown.
    """
    words, where = list(words), f"line {line}: " if line else ""
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in SWITCHES:
            script.switches[word] = line
            continue
        name, _, value = word.partition("=") if word.startswith("--") else (word, "", "")
        check(name in VALUED, f"{where}pjsub option {word} is unknown")
        check(bool(value or words), f"{where}pjsub option {word} needs a value")
        _enter(script, VALUED[name], value or words.pop(0), line)
    return words


def _enter(script: Script, option: str, value: str, line: int) -> None:
    group = script.settings.setdefault(option, {})
    if option in ("-L", "--mpi", "--llio", "-x", "--sparam"):
        for part in (_COMMA_X if option == "-x" else _COMMA).split(value):
            name, _, text = part.partition("=")
            group[name.strip()] = Value(text.strip(), line)
    else:
        group[""] = Value(value, line)


def read(path: Path) -> str:
    """The text of a script. Raises ValueError naming a file that we or bash cannot read."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: give a job script") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is no text: give a job script") from None
    check("\r" not in text, f"{path}: its lines end with CR LF, and bash reads the CR too: sed -i 's/\\r$//' {path}")
    return text


def parse(text: str) -> Script:
    """Parse a script. Raises ValueError naming the line that cannot be read."""
    script, in_flags, in_body = Script(), False, False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#PJM"):
            check(not in_body, f"line {number}: a directive after the first command is not read: move it to the top")
            rest = add_options(script, _words(line[4:], number), number)
            check(not rest, f"line {number}: {' '.join(rest)!r} belongs to no option of pjsub: quote the value, or delete it")
            script.last_directive = number
        elif in_flags or line.startswith("FLAGS=("):
            words = _words(line.removeprefix("FLAGS=("), number)
            in_flags = ")" not in words
            for word in words[: words.index(")")] if ")" in words else words:
                name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
                script.flags += [name, value] if equals else [name]
                if word.startswith("--"):
                    script.flag_lines[name] = number
        elif line.strip() and not line.startswith("#"):
            in_body = True
            script.body.append((number, line))
            if match := re.match(r"(?:export )?([A-Z_]+)=(\S*)", line):
                script.variables.setdefault(match[1], Value(match[2], number))
    return script


def _words(text: str, line: int) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from error


def default(value: Value | None, environ: dict[str, str] | None = None) -> str:
    """The value of NAME=${NAME:-text}: that of the environment, or the text with $VARIABLES replaced."""
    if value is None:
        return ""
    environ = dict(os.environ if environ is None else environ)
    environ.setdefault("PWD", os.getcwd())
    match = re.fullmatch(r"\$\{(\w+):-(.*)\}", value.text)
    text = environ.get(match[1]) or match[2] if match else value.text
    return re.sub(r"\$\{?(\w+)\}?", lambda m: environ.get(m[1], m[0]), text)
