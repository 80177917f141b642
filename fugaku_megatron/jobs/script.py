"""What a job script says: its #PJM directives, flags and settings, each with its line. Read by the checks and by local_pjsub.

Options given to pjsub come after the directives and win. Left out: what values mean. Test: pytest tests/test_jobs_check.py
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..run.config import check

SWITCHES = {"-S", "-s", "-j", "-X", "--step", "--bulk", "--interact", "--restart", "--norestart", "--no-check-directory",
            "--no-check-gfscache"}
VALUED = {"-L": "-L", "--rsc-list": "-L", "--mpi": "--mpi", "-g": "-g", "-x": "-x", "--llio": "--llio", "-N": "-N", "--name": "-N",
          "-o": "-o", "-e": "-e", "--sparam": "--sparam", "--omp": "--omp", "--spath": "--spath", "--at": "--at", "-m": "-m",
          "--mail-list": "--mail-list"}
_COMMA = re.compile(r",(?=[\w-]+(?:=|$|,))")  # between settings, not inside a value
_COMMA_X = re.compile(r",(?=[A-Za-z_]\w*=)")  # the same between variables, whose values may hold commas


@dataclass(frozen=True)
class Value:
    text: str
    line: int


@dataclass
class Script:
    """settings["-L"]["node"] -> Value; switches; flags of FLAGS=( ); variables NAME=value of the body."""

    settings: dict[str, dict[str, Value]] = field(default_factory=dict)
    switches: dict[str, int] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    flag_lines: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Value] = field(default_factory=dict)
    body: list[tuple[int, str]] = field(default_factory=list)
    last_directive: int = 1

    def get(self, option: str, name: str = "") -> Value | None:
        return self.settings.get(option, {}).get(name)

    def line(self, option: str, name: str = "") -> int:
        """The line to change for a setting: its own, its option's, or the last directive."""
        found = self.get(option, name)
        of_option = next(iter(self.settings.get(option, {}).values()), None)
        return (found or of_option or Value("", self.last_directive)).line

    def value(self, name: str, environ: dict[str, str] | None = None) -> Value | None:
        """What a variable stands for: as -x gives it, else as `default` finds it in the body."""
        given, found = self.get("-x", name), self.variables.get(name)
        if found is None or given and found.text.startswith("${"):
            return given
        return Value(default(found, environ), found.line)

    def find(self, text: str) -> int | None:
        """The first line of the body, comments apart, that has the text."""
        return next((number for number, line in self.body if text in line.split(" #")[0]), None)


def add_options(script: Script, words: Sequence[str], line: int) -> list[str]:
    """Enter pjsub's options, up to the first word that is none; returns the rest (the script's name, and its words).

    line: 0 for a command line. Raises ValueError naming an option that is unknown.
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
    """The text of a script. Raises ValueError naming the file that cannot be read, by us or by bash."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: give a job script") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is no text: give a job script") from None
    check("\r" not in text, f"{path}: its lines end with CR LF, and bash reads the CR too: sed -i 's/\\r$//' {path}")
    return text


def parse(text: str) -> Script:
    """Read a script. Raises ValueError naming the line that cannot be read."""
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
    """What NAME=${NAME:-text} stands for here: the environment's value, or the text with $VARIABLES filled in."""
    if value is None:
        return ""
    environ = dict(os.environ if environ is None else environ)
    environ.setdefault("PWD", os.getcwd())
    match = re.fullmatch(r"\$\{(\w+):-(.*)\}", value.text)
    text = environ.get(match[1]) or match[2] if match else value.text
    return re.sub(r"\$\{?(\w+)\}?", lambda m: environ.get(m[1], m[0]), text)
