"""Every mistake of a job script that is known before it waits in a queue, each with the line to change.

One function per subject, each a generator of problems. Left out: whether bash can read it (bash -n does that).
Test: pytest tests/test_jobs_check.py
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..perf import memory, software
from ..perf.model import System, step
from ..run.accounting import Layout
from ..run.config import RunConfig
from . import limits, script, torus
from .job import MARGIN, RANKS_PER_NODE, interpret, start_up
from .script import Script

PRELOADED = ("TCMALLOC", "LD_PRELOAD")


@dataclass(frozen=True)
class Problem:
    """line: 0 for an option given to pjsub beside the script."""

    line: int
    text: str

    def told(self, file: str) -> str:
        return f"{file}:{self.line}: {self.text}" if self.line else f"{file}, options beside it: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a script asks for, as far as it can be read. group, files: from the command line."""

    script: Script
    nodes: int
    shape: torus.Shape | None
    ranks_per_node: int
    elapse: int
    group: str | None
    files: bool

    @property
    def processes(self) -> int:
        return self.nodes * self.ranks_per_node


def problems(text: str, group: str | None = None, files: bool = True, options: Sequence[str] = ()) -> list[Problem]:
    """All mistakes, by line. group: given to pjsub beside the script; files: whether staged files must be
    there; options: of pjsub, which replace directives."""
    try:
        given = script.parse(text)
        script.add_options(given, options, 0)
        asked = _asked(given, group, files)
    except ValueError as error:
        line = re.match(r"line (\d+): (.*)", str(error), re.DOTALL)
        return [Problem(int(line[1]), line[2]) if line else Problem(0, str(error))]
    found = [problem for subject in SUBJECTS for problem in subject(asked)]
    return sorted(dict.fromkeys(found), key=lambda p: p.line)


def _asked(given: Script, group: str | None, files: bool) -> Asked:
    node = given.get("-L", "node")
    if node is None:
        raise ValueError(f'line {given.line("-L")}: no nodes are asked for: add #PJM -L "node=XxYxZ:torus"')
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}(:(torus|mesh|noncont))?(:strict(-io)?)?", node.text, re.ASCII):
        raise ValueError(f"line {node.line}: node={node.text}: give a number or XxYxZ, and :torus:strict-io, :torus, :mesh or "
                         ":noncont after it")
    sizes = tuple(map(int, node.text.split(":")[0].split("x")))
    ranks = given.get("--mpi", "max-proc-per-node")
    if ranks is None or not ranks.text.isdecimal() or int(ranks.text) not in RANKS_PER_NODE:
        raise ValueError(f"line {given.line('--mpi')}: max-proc-per-node={ranks.text if ranks else 'missing'}: give 1, 2 or 4, "
                         "ranks of whole CMGs")
    elapse = given.get("-L", "elapse")
    if elapse is None:
        raise ValueError(f"line {given.line('-L')}: no elapse time: add elapse=HH:MM:SS")
    try:
        seconds = limits.surely(elapse.text)
    except ValueError as error:
        raise ValueError(f"line {elapse.line}: {error}") from error
    return Asked(script=given, nodes=math.prod(sizes), shape=sizes if len(sizes) == 3 else None, ranks_per_node=int(ranks.text),
                 elapse=seconds, group=group, files=files)


def _shape(asked: Asked) -> Iterator[Problem]:
    """Units of the torus."""
    line, shape = asked.script.line("-L", "node"), asked.shape
    best = torus.best_shape(asked.nodes)
    remedy = f"write node={torus.text(best)}:torus" if best else f"take {' or '.join(map(str, torus.nearest(asked.nodes)))} nodes"
    if asked.nodes > limits.TORUS_ABOVE and (shape is None or "torus" not in asked.script.get("-L", "node").text):
        yield Problem(line, f"{asked.nodes} nodes are above {limits.TORUS_ABOVE}, where only a torus of 2x3x2 units is given: "
                      + remedy)
    if shape is None or asked.nodes <= limits.TORUS_ABOVE and "torus" not in asked.script.get("-L", "node").text:
        return
    for axis, size, unit, most in zip("XYZ", shape, torus.UNIT, torus.WHOLE):
        if size % unit:
            yield Problem(line, f"node={torus.text(shape)}: {axis}={size} is not a multiple of {unit} (units are 2x3x2): {remedy}")
        if size > most:
            yield Problem(line, f"node={torus.text(shape)}: {axis}={size} is above {most}, the whole machine: {remedy}")


def _resource_group(asked: Asked) -> Iterator[Problem]:
    groups, source = limits.resource_groups()
    named, given = asked.script.get("-L", "rscgrp"), asked.script
    if named is None or named.text not in groups:
        yield Problem(given.line("-L", "rscgrp"), f"rscgrp={named.text if named else 'missing'}: give one of {', '.join(groups)} "
                      f"({source})")
        return
    group = groups[named.text]
    low, high = group.nodes
    if not low <= asked.nodes <= high:
        fits = [g.name for g in groups.values() if g.nodes[0] <= asked.nodes <= g.nodes[1]]
        yield Problem(named.line, f"rscgrp={group.name} takes {low} to {high} nodes, node asks for {asked.nodes} ({source}): "
                      + (f"give rscgrp={fits[0]}" if fits else "ask for fewer nodes"))
    if asked.elapse > group.hours * limits.HOUR:
        yield Problem(given.line("-L", "elapse"), f"elapse={limits.clock(asked.elapse)} is above {group.hours:g} h, the limit of "
                      f"{group.name} ({source}): write elapse={limits.clock(group.hours * limits.HOUR)} and continue with --steps")


def _processes(asked: Asked) -> Iterator[Problem]:
    given = asked.script
    found, value = given.get("--mpi", "proc"), asked.processes
    if found is None or found.text != str(value):
        yield Problem(given.line("--mpi", "proc"), f"proc={found.text if found else 'missing'}, but {asked.nodes} nodes x "
                      f"{asked.ranks_per_node} ranks are {value}: write proc={value}")
    for name, value in (("RANKS_PER_NODE", asked.ranks_per_node), ("NODES", asked.nodes)):
        found = given.variables.get(name)
        if found and found.text != str(value):
            yield Problem(found.line, f"{name}={found.text}, but the directives ask for {value}: write {name}={value}")
        elif found is None and (line := given.find(name)):
            yield Problem(line, f"{name} is used and not set: write {name}={value}")


def _power(asked: Asked) -> Iterator[Problem]:
    given = asked.script
    freq, eco = given.get("-L", "freq"), given.get("-L", "eco_state")
    for name, found in (("freq", freq), ("eco_state", eco), ("retention_state", given.get("-L", "retention_state"))):
        if found is None:
            line = (freq or eco).line if freq or eco else given.line("-L")
            yield Problem(line, f"{name} is not said, and the site's default is Boost-Eco, one floating-point "
                          f"pipe: add {name}={limits.MODES['normal-2.0'].states[name]}")
    retention = given.get("-L", "retention_state")
    if retention and retention.text != "0" and asked.nodes > limits.RETENTION_NODES:
        yield Problem(retention.line, f"retention_state={retention.text} is not for more than {limits.RETENTION_NODES} nodes: "
                      "write retention_state=0")
    for name, found in given.settings.get("-L", {}).items():
        values = limits.STATES.get(name)
        if values and name not in ("freq", "eco_state") and found.text not in map(str, values):
            yield Problem(found.line, f"{name}={found.text}: give {values[0]} to {values[-1]}")
        if values is None and (meant := difflib.get_close_matches(name, limits.STATES, 1, 0.8)):
            yield Problem(found.line, f"{name} is unknown: did you mean {meant[0]}?")
    if freq is None or eco is None:
        return
    mode = next((m for m in limits.MODES.values() if (str(m.freq), str(m.eco_state)) == (freq.text, eco.text)), None)
    if mode is None or mode.refused:
        yield Problem(freq.line, mode.refused if mode else f"freq={freq.text},eco_state={eco.text} is no mode: give "
                      + " or ".join(f"freq={m.freq},eco_state={m.eco_state}" for m in limits.MODES.values() if not m.refused))
        return
    if "--cpu-frequency" in given.flags[:-1]:  # without its value _run names it
        clock = given.flags[given.flags.index("--cpu-frequency") + 1]
        wanted, variable = f"{mode.ghz:.1f}", given.get("-x", "CPU_GHZ")
        if variable and variable.text != wanted:
            yield Problem(variable.line, f"-x CPU_GHZ={variable.text}, but freq={mode.freq}: give -x CPU_GHZ={wanted}")
        elif variable is None and clock != wanted:
            yield Problem(given.flag_lines["--cpu-frequency"], f"--cpu-frequency {clock}, but freq={mode.freq}: write "
                          f"--cpu-frequency {wanted}" + (f", or give -x CPU_GHZ={wanted}" if "CPU_GHZ" in given.variables else ""))


def _money(asked: Asked) -> Iterator[Problem]:
    in_script = asked.script.get("-g")
    if not asked.group and not (in_script and in_script.text):
        yield Problem(asked.script.last_directive, "no group to charge: add #PJM -g GROUP, or give -g or FUGAKU_GROUP")


def _run(asked: Asked) -> Iterator[Problem]:
    """Flags, batch, memory, time and the place of tensor groups."""
    given = asked.script
    line = next(iter(given.flag_lines.values()), given.last_directive)
    try:
        run = interpret(given.flags)
        layout = Layout.of(run, asked.processes)
        microbatches = layout.microbatches(run, layout.global_batch_size(run))
        assert microbatches
    except ValueError as error:
        named = min((flag for flag in given.flag_lines if flag in str(error)), key=str(error).index, default="")
        yield Problem(given.flag_lines.get(named, line), str(error))
        return
    tensor = given.flag_lines.get("--tensor-model-parallel-size", line)
    try:
        torus.check_tensor(layout.tp, asked.ranks_per_node)
    except ValueError as error:
        yield Problem(tensor, str(error))
    if asked.shape is None and asked.ranks_per_node % layout.tp:
        yield Problem(tensor, f"--tensor-model-parallel-size {layout.tp} spans nodes, and node={asked.nodes} has no units to keep "
                      f"it in: write node=XxYxZ:torus with whole units, or give at most {asked.ranks_per_node}")
    yield from _rank_map(asked, layout, tensor)
    yield from _cost(asked, run, layout, line)


def _rank_map(asked: Asked, layout: Layout, tensor: int) -> Iterator[Problem]:
    """The map is written for this shape and layout; without one a torus does not know of tensor groups."""
    if asked.shape and not torus.whole(asked.shape):
        return  # _shape names it
    words = f"{torus.text(asked.shape)} {{}} {layout.tp} {layout.pp}" if asked.shape else ""
    wanted = words.format('"$RANKS_PER_NODE"')
    maps = [(number, match[1]) for number, line in asked.script.body
            if (match := re.search(r"fugaku_megatron\.jobs\.torus (\S+ \S+ \d+ \d+)", line))]
    for number, found in maps:
        if found.replace('"', "") not in (words.format("$RANKS_PER_NODE"), words.format(asked.ranks_per_node)):
            yield Problem(number, f"the rank map is made for {found}: " + (f"write {wanted}" if wanted else "write "
                          "node=XxYxZ:torus, or no map"))
    another = asked.script.find("--vcoordfile") and not asked.script.find('--vcoordfile "$MAP"')
    if asked.shape and layout.tp > asked.ranks_per_node and not maps and not another:
        yield Problem(tensor, f"no rank map keeps tensor-parallel groups of {layout.tp} inside a 2x3x2 unit: give mpiexec "
                      f"--vcoordfile what python -m fugaku_megatron.jobs.torus {wanted} writes")


def _cost(asked: Asked, run: RunConfig, layout: Layout, line: int) -> Iterator[Problem]:
    given = asked.script
    system = System.from_names("a64fx", software.THIS_PROJECT, asked.nodes, asked.ranks_per_node)
    fitted = system.software.fitted
    used = memory.peak_mib(run, layout, system.software, asked.nodes, fitted.memory)
    limit = memory.limit_mib(system.machine, system.software, asked.ranks_per_node)
    if used > limit:
        yield Problem(given.flag_lines.get("--micro-batch-size", line), f"out of memory: {used:.0f} MiB on the fullest rank "
                      f"(model), {limit:.0f} are there: lower --micro-batch-size, raise --tensor- or --pipeline-model-parallel-size"
                      ", or give --checkpoint-activations or --zero-stage 1")
    needed = start_up(asked.nodes) + step(run, layout, system, fitted.values).seconds
    seconds, margin = (given.value(name, {}) for name in ("ELAPSE", "MARGIN"))
    if seconds and seconds.text != str(asked.elapse):
        yield Problem(seconds.line, f"ELAPSE={seconds.text}, but elapse={limits.clock(asked.elapse)}: write {asked.elapse}, "
                      f"or give -x ELAPSE={asked.elapse}")
    if margin and margin.text.isdecimal():
        needed += int(margin.text)
    elif margin:
        yield Problem(margin.line, f"MARGIN={margin.text}: give whole seconds, such as {MARGIN}")
    if needed > asked.elapse:
        yield Problem(given.line("-L", "elapse"), f"elapse={limits.clock(asked.elapse)} ends before the first iteration and its "
                      f"checkpoint (model): write at least elapse={limits.clock(needed)}")


def _volumes(asked: Asked) -> Iterator[Problem]:
    given = asked.script
    named = given.get("-x", "PJM_LLIO_GFSCACHE")
    volumes = set(named.text.split(":")) if named else set()
    if named is None:
        yield Problem(given.line("-x"), "PJM_LLIO_GFSCACHE is not given, and the job will find no file: add "
                      "#PJM -x PJM_LLIO_GFSCACHE=/vol0004")
    for volume in sorted(v for v in volumes if not re.fullmatch(r"/vol\w+", v)):
        yield Problem(named.line, f"PJM_LLIO_GFSCACHE={named.text}: {volume!r} is no volume: give /vol0004 and others, joined by "
                      "colons (realpath . shows yours)")
    for name in ("ARCHIVE", "SAVE", "OUT", *PRELOADED):
        path = given.value(name)
        volume = re.match(r"/vol\d+", os.path.realpath(path.text)) if path and path.text else None
        if named and volume and volume[0] not in volumes:
            yield Problem(named.line, f"{name}={path.text} is on {volume[0]}, which PJM_LLIO_GFSCACHE does not name: "
                          f"write PJM_LLIO_GFSCACHE={':'.join([*named.text.split(':'), volume[0]])}")


def _files(asked: Asked) -> Iterator[Problem]:
    given = asked.script
    archive = given.value("ARCHIVE")
    path = archive.text if archive else ""
    if asked.files and archive and not Path(path).is_file():
        yield Problem(archive.line, f"ARCHIVE {path} does not exist: write it with scripts/build.sh, or give ARCHIVE=FILE")
    size = given.get("--llio", "localtmp-size")
    amount = re.fullmatch(r"(\d+)Gi", size.text) if size else None
    if amount is None or not 0 < int(amount[1]) <= limits.LOCAL_TMP_GIB:
        yield Problem(given.line("--llio"), f"localtmp-size={size.text if size else 'missing'}: the archive is unpacked there: "
                      f"give 1Gi to {limits.LOCAL_TMP_GIB}Gi")
    elif asked.files and Path(path).is_file() and Path(path).stat().st_size > int(amount[1]) << 30:
        yield Problem(size.line, f"localtmp-size={size.text} is less than {path} holds: raise it")
    data = given.value("DATA")
    if data and "/" in data.text:
        yield Problem(data.line, f"DATA={data.text}: the archive holds files without folders: write DATA={Path(data.text).name}")
    for name in PRELOADED if asked.files else ():
        found = given.value(name)
        for path in found.text.split(":") if found else ():
            if "/" in path and "$" not in path and not Path(path).is_file():
                yield Problem(found.line, f"{name} {path} does not exist, and a job runs on without it: give another path, or none")
        if found and not found.text and given.find(f'[ -f "${name}" ]'):
            yield Problem(found.line, f"{name} is not given, and this job compares with it: give {name}=/path/to/libtcmalloc.so")
    many = asked.nodes > limits.SINGLE_FILE_NODES or asked.processes > limits.SINGLE_FILE_PROCESSES
    if many and not given.find('llio_transfer "$ARCHIVE"'):
        yield Problem(archive.line if archive else given.last_directive, f"{asked.nodes} nodes would open one file, and more "
                      f'than {limits.SINGLE_FILE_NODES} bring the file system down: stage it with llio_transfer "$ARCHIVE"')
    elsewhere = given.find("python3 ") or given.find("python3\" ")
    if many and not given.find("$LOCAL/bin/python3"):
        yield Problem(elsewhere or given.last_directive, "ranks must start the interpreter that was unpacked: write "
                      "$LOCAL/bin/python3")


def _output(asked: Asked) -> Iterator[Problem]:
    for number, line in asked.script.body:
        paths = re.findall(r"-(?:std(?:out|err)?|of)-proc (\S+)", line)
        if asked.processes > limits.SPLIT_OUTPUT_ABOVE and any("/1000r/" not in path for path in paths):
            yield Problem(number, f"{asked.processes} processes would write into one directory: split it above "
                          f"{limits.SPLIT_OUTPUT_ABOVE}, -stdout-proc \"$OUT/%/1000r/stdout\"")


SUBJECTS: tuple[Callable[[Asked], Iterator[Problem]], ...] = (
    _shape, _resource_group, _processes, _power, _money, _run, _volumes, _files, _output)
