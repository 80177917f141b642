"""A job script's #PJM directives, flags and variables, each with its line.

Options on pjsub's command line replace directives. The common part (pjsub.sh) is parsed as part of
the line that reads it.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..config.fields import check
from ..text.named_files import about, unreadable
from . import limits, torus

COMMON = Path(__file__).with_name("pjsub.sh")
READS_COMMON = '. "${COMMON'  # how the line that reads the common part begins
SWITCHES = "-S -s -j -X --step --bulk --interact --restart --norestart --no-check-directory --no-check-gfscache".split()
LONG = {"--rsc-list": "-L", "--name": "-N"}  # long name of an option -> short name
VALUED = "-L --mpi -g -x --llio -N -o -e --sparam --omp --spath --at -m --mail-list".split()
NODES = re.compile(
    r"[1-9]\d{0,8}(x[1-9]\d{0,8}){0,2}(:(torus|mesh|noncont))?(:strict(-io)?)?", re.ASCII
)
_COMMA = re.compile(r",(?=[\w-]+(?:=|$|,))")  # between settings, not inside a value
_COMMA_X = re.compile(
    r",(?=[A-Za-z_]\w*=)"
)  # the same between variables, whose values may hold commas


class Value(NamedTuple):
    """A setting's text and line; line 0 is pjsub's command line."""

    text: str
    line: int


@dataclass
class Script:
    """A parsed script.

    settings: option -> name -> value, such as settings["-L"]["node"]
    switches: option without value -> line
    flag_lines: flag -> line
    variables: assignments in the body
    body: (line, text) without comment lines
    """

    settings: dict[str, dict[str, Value]] = field(default_factory=dict)
    switches: dict[str, int] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    flag_lines: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Value] = field(default_factory=dict)
    body: list[tuple[int, str]] = field(default_factory=list)
    last_directive: int = 1

    def get(self, option: str, name: str = "") -> Value | None:
        return self.settings.get(option, {}).get(name)

    def text(self, option: str, name: str = "", missing: str = "") -> str:
        value = self.get(option, name)
        return value.text if value else missing

    def line(self, option: str, name: str = "") -> int:
        setting = self.get(option, name)
        first_of_option = next(iter(self.settings.get(option, {}).values()), None)
        return (setting or first_of_option or Value("", self.last_directive)).line

    def value(self, name: str, environ: Mapping[str, str] = os.environ) -> Value | None:
        option = self.get("-x", name)
        assignment = self.variables.get(name)
        if assignment is None or option and assignment.text.startswith("${"):
            return option
        return Value(default(assignment.text, environ), assignment.line)

    def find(self, text: str) -> int | None:
        return next((number for number, line in self.body if text in line.split(" #")[0]), None)


def add_options(script: Script, words: Sequence[str], line: int) -> list[str]:
    """Add pjsub's options; return the other words, from the script's name on.

    line: of a directive, 0 for the command line
    """
    words = list(words)
    where = f"line {line}: " if line else ""
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in SWITCHES:
            script.switches[word] = line
            continue
        name, _, value = word.partition("=") if word.startswith("--") else (word, "", "")
        name = LONG.get(name, name)
        check(name in VALUED, f"{where}pjsub option {word} is unknown")
        check(value or words, f"{where}pjsub option {word} needs a value")
        _enter(script, name, value or words.pop(0), line)
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
    """Return a job script's text. ValueError if bash could not read the file."""
    if reason := unreadable(path):
        raise ValueError(f"{path}: {reason}: pass a job script")
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: pass a job script") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file: pass a job script") from None
    check(
        "\r" not in text,
        f"{path}: its lines end with CR LF, which bash cannot read: convert it with sed -i 's/\\r$//' {path}",
    )
    return text


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        yield number, line
        if line.startswith(READS_COMMON):
            yield from ((number, common) for common in COMMON.read_text().splitlines())


def parse(text: str) -> Script:
    """Parse directives, FLAGS and variables of a pjsub script. ValueError names the line."""
    script = Script()
    in_flags = False
    in_body = False
    for number, line in _lines(text):
        if line.startswith("#PJM"):
            check(
                not in_body,
                f"line {number}: pjsub ignores a directive after the first command: move it to the top",
            )
            rest = add_options(script, _words(line[4:], number), number)
            check(
                not rest,
                f"line {number}: {' '.join(rest)!r} does not belong to an option of pjsub: quote the value, or "
                "delete it",
            )
            script.last_directive = number
        elif in_flags or line.startswith("FLAGS=("):
            words = _words(line.removeprefix("FLAGS=("), number)
            in_flags = ")" not in words
            for word in itertools.takewhile(lambda word: word != ")", words):
                if not word.startswith("--"):
                    script.flags.append(word)
                    continue
                name, equals, value = word.partition("=")
                script.flags += [name, value] if equals else [name]
                script.flag_lines[name] = number
        elif line.strip() and not line.startswith("#"):
            in_body = True
            script.body.append((number, line))
            if match := re.match(r"(?:export )?([A-Z_]+)=(\S*)", line):
                script.variables.setdefault(match[1], Value(match[2], number))
    return script


def _words(text: str, line: int) -> list[str]:
    with about(f"line {line}"):
        return shlex.split(text, comments=True)


def default(value: str, environ: Mapping[str, str]) -> str:
    """Return the value of NAME=${NAME:-text}: from the environment, or the text with $VARIABLES
    replaced.
    """
    known = {"PWD": os.getcwd(), **environ}
    match = re.fullmatch(r"\$\{(\w+):-(.*)\}", value)
    text = known.get(match[1]) or match[2] if match else value
    return re.sub(r"\$\{?(\w+)\}?", lambda m: known.get(m[1], m[0]), text)


class Request(NamedTuple):
    """A script's resources.

    elapse: seconds
    """

    script: Script
    nodes: int
    spares: int
    shape: torus.Shape | None
    ranks_per_node: int
    elapse: int
    group: str | None
    files: bool

    @property
    def processes(self) -> int:
        return (self.nodes - self.spares) * self.ranks_per_node


def requested(script: Script, group: str | None, files: bool) -> Request:
    """Return the request. ValueError begins with "line N:"."""
    node = script.text("-L", "node")
    line = script.line("-L", "node")
    check(
        node,
        f'line {line}: the script requests no nodes: add #PJM -L "node=XxYxZ:torus"',
    )
    if not NODES.fullmatch(node):
        raise ValueError(
            f"line {line}: node={node}: write a number or XxYxZ, optionally followed by :torus:strict-io, "
            ":torus, :mesh or :noncont"
        )
    sizes = tuple(map(int, node.split(":")[0].split("x")))
    nodes = math.prod(sizes)
    check(
        nodes <= torus.NODES,
        f"line {line}: node={node} is more than the whole machine, {torus.NODES} nodes: request fewer",
    )
    ranks = script.text("--mpi", "max-proc-per-node", "missing")
    check(
        limits.is_number(ranks) and int(ranks) in limits.RANKS_PER_NODE,
        f"line {script.line('--mpi')}: max-proc-per-node={ranks}: write 1, 2 or 4, "
        "so that each rank has whole CMGs",
    )
    elapse = script.text("-L", "elapse")
    line = script.line("-L", "elapse")
    check(elapse, f"line {line}: no elapse time: add elapse=HH:MM:SS")
    with about(f"line {line}"):
        seconds = limits.min_seconds(elapse)
    spares = script.value("SPARE_NODES") or Value("0", 0)
    check(
        spares.text.isdecimal() and int(spares.text) < nodes,
        f"line {spares.line}: SPARE_NODES={spares.text} of node={nodes}: write a number from 0 to {nodes - 1}",
    )
    return Request(
        script=script,
        nodes=nodes,
        spares=int(spares.text),
        shape=sizes if len(sizes) == 3 else None,
        ranks_per_node=int(ranks),
        elapse=seconds,
        group=group,
        files=files,
    )
