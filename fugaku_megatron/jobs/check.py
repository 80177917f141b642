"""The mistakes of a job script that can be known before it waits in a queue, each with the line to change.

One function per subject, each a generator of problems. Left out: whether bash can parse the script (bash -n checks that).
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

from ..perf import choice, memory, software
from ..perf.model import System, step
from ..run.config import RunConfig
from ..run.layout import Layout
from . import limits, torus
from .job import MARGIN, RANKS_PER_NODE, interpret, start_up
from .script import Script, add_options, parse

PRELOADED = ("TCMALLOC", "LD_PRELOAD")  # variables with libraries to preload


@dataclass(frozen=True)
class Problem:
    """A mistake. line: of the script; 0 for an option that was passed to pjsub on its command line."""

    line: int
    text: str

    def located(self, file: str) -> str:
        """The message with the file and line in front."""
        return f"{file}:{self.line}: {self.text}" if self.line else f"{file}, options beside it: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The resources that a script requests.

    elapse: seconds. group: to charge, from the command line. files: whether staged files must exist already. spares: of the nodes,
    those that the run leaves unused.
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
        """Ranks of the run."""
        return (self.nodes - self.spares) * self.ranks_per_node


def problems(text: str, group: str | None = None, files: bool = True, options: Sequence[str] = ()) -> list[Problem]:
    """All mistakes, by line.

    group: to charge, from pjsub's command line. files: whether staged files must exist already. options: of pjsub's command line,
    which replace directives.
    """
    try:
        script = parse(text)
        add_options(script, options, 0)
        request = _request(script, group, files)
    except ValueError as error:
        line = re.match(r"line (\d+): (.*)", str(error), re.DOTALL)
        return [Problem(int(line[1]), line[2]) if line else Problem(0, str(error))]
    unique = dict.fromkeys(problem for subject in SUBJECTS for problem in subject(request))
    return sorted(unique, key=lambda p: p.line)


def _request(script: Script, group: str | None, files: bool) -> Request:
    """The request of a script. Raises ValueError that begins with "line N:" when it cannot be read."""
    node = script.get("-L", "node")
    if node is None:
        raise ValueError(f'line {script.line("-L")}: no nodes are asked for: add #PJM -L "node=XxYxZ:torus"')
    if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8}){0,2}(:(torus|mesh|noncont))?(:strict(-io)?)?", node.text, re.ASCII):
        raise ValueError(f"line {node.line}: node={node.text}: give a number or XxYxZ, and :torus:strict-io, :torus, :mesh or "
                         ":noncont after it")
    sizes = tuple(map(int, node.text.split(":")[0].split("x")))
    if math.prod(sizes) > torus.NODES:
        raise ValueError(f"line {node.line}: node={node.text} is above {torus.NODES} nodes, the whole machine: ask for fewer")
    ranks = script.get("--mpi", "max-proc-per-node")
    if ranks is None or not limits.is_number(ranks.text) or int(ranks.text) not in RANKS_PER_NODE:
        raise ValueError(f"line {script.line('--mpi')}: max-proc-per-node={ranks.text if ranks else 'missing'}: give 1, 2 or 4, "
                         "ranks of whole CMGs")
    elapse = script.get("-L", "elapse")
    if elapse is None:
        raise ValueError(f"line {script.line('-L')}: no elapse time: add elapse=HH:MM:SS")
    try:
        seconds = limits.min_seconds(elapse.text)
    except ValueError as error:
        raise ValueError(f"line {elapse.line}: {error}") from error
    nodes = math.prod(sizes)
    return Request(script=script, nodes=nodes, spares=_spares(script, nodes), shape=sizes if len(sizes) == 3 else None,
                   ranks_per_node=int(ranks.text), elapse=seconds, group=group, files=files)


def _spares(script: Script, nodes: int) -> int:
    """SPARE_NODES of the nodes. Raises ValueError that begins with "line N:" for no such number."""
    setting = script.value("SPARE_NODES")
    if setting is None:
        return 0
    if not setting.text.isdecimal() or not int(setting.text) < nodes:
        raise ValueError(f"line {setting.line}: SPARE_NODES={setting.text} of node={nodes}: give a number from 0 to {nodes - 1}")
    return int(setting.text)


def _shape(request: Request) -> Iterator[Problem]:
    """The shape of the nodes: whole units of the torus, inside the machine."""
    line, shape = request.script.line("-L", "node"), request.shape
    best = torus.best_shape(request.nodes)
    remedy = f"write node={torus.text(best)}:torus" if best else f"take {' or '.join(map(str, torus.nearest(request.nodes)))} nodes"
    if request.nodes > limits.TORUS_ABOVE and (shape is None or "torus" not in request.script.get("-L", "node").text):
        yield Problem(line, f"{request.nodes} nodes are above {limits.TORUS_ABOVE}, where only a torus of 2x3x2 units is given: "
                      + remedy)
    if shape is None or request.nodes <= limits.TORUS_ABOVE and "torus" not in request.script.get("-L", "node").text:
        return
    for axis, size, unit, maximum in zip("XYZ", shape, torus.UNIT, torus.WHOLE):
        if size % unit:
            yield Problem(line, f"node={torus.text(shape)}: {axis}={size} is not a multiple of {unit} (units are 2x3x2): {remedy}")
        if size > maximum:
            yield Problem(line, f"node={torus.text(shape)}: {axis}={size} is above {maximum}, the whole machine: {remedy}")


def _resource_group(request: Request) -> Iterator[Problem]:
    """The resource group's limits on nodes and elapse time."""
    groups, source = limits.resource_groups()
    group_setting, script = request.script.get("-L", "rscgrp"), request.script
    if group_setting is None or group_setting.text not in groups:
        yield Problem(script.line("-L", "rscgrp"), f"rscgrp={group_setting.text if group_setting else 'missing'}: give one of "
                      f"{', '.join(groups)} ({source})")
        return
    group = groups[group_setting.text]
    low, high = group.nodes
    if not low <= request.nodes <= high:
        fits = [g.name for g in groups.values() if g.nodes[0] <= request.nodes <= g.nodes[1]]
        yield Problem(group_setting.line, f"rscgrp={group.name} takes {low} to {high} nodes, node asks for {request.nodes} "
                      f"({source}): " + (f"give rscgrp={fits[0]}" if fits else "ask for fewer nodes"))
    if request.elapse > group.hours * limits.HOUR:
        yield Problem(script.line("-L", "elapse"), f"elapse={limits.clock(request.elapse)} is above {group.hours:g} h, the limit "
                      f"of {group.name} ({source}): write elapse={limits.clock(group.hours * limits.HOUR)} and continue with "
                      "--steps")


def _processes(request: Request) -> Iterator[Problem]:
    """proc and the variables of the body that repeat the directives' numbers."""
    script = request.script
    setting, value = script.get("--mpi", "proc"), request.nodes * request.ranks_per_node
    if setting is None or setting.text != str(value):
        yield Problem(script.line("--mpi", "proc"), f"proc={setting.text if setting else 'missing'}, but {request.nodes} nodes x "
                      f"{request.ranks_per_node} ranks are {value}: write proc={value}")
    for name, value in (("RANKS_PER_NODE", request.ranks_per_node), ("NODES", request.nodes - request.spares)):
        setting = script.variables.get(name)
        if setting and setting.text != str(value):
            beside = f" beside {request.spares} spare ones" if request.spares and name == "NODES" else ""
            yield Problem(setting.line, f"{name}={setting.text}, but the directives ask for {value}{beside}: write {name}={value}")
        elif setting is None and (line := script.find(name)):
            yield Problem(line, f"{name} is used and not set: write {name}={value}")


def _power(request: Request) -> Iterator[Problem]:
    """Every power state is set, to a value that it has."""
    script = request.script
    freq, eco = script.get("-L", "freq"), script.get("-L", "eco_state")
    for name, setting in (("freq", freq), ("eco_state", eco), ("retention_state", script.get("-L", "retention_state"))):
        if setting is None:
            line = (freq or eco).line if freq or eco else script.line("-L")
            yield Problem(line, f"{name} is not said, and the site's default is Boost-Eco, one floating-point "
                          f"pipe: add {name}={limits.MODES['normal-2.0'].states[name]}")
    retention = script.get("-L", "retention_state")
    if retention and retention.text != "0" and request.nodes > limits.RETENTION_NODES:
        yield Problem(retention.line, f"retention_state={retention.text} is not for more than {limits.RETENTION_NODES} nodes: "
                      "write retention_state=0")
    for name, setting in script.settings.get("-L", {}).items():
        values = limits.STATES.get(name)
        if values and name not in ("freq", "eco_state") and setting.text not in map(str, values):
            yield Problem(setting.line, f"{name}={setting.text}: give {values[0]} to {values[-1]}")
        if values is None and (meant := difflib.get_close_matches(name, limits.STATES, 1, 0.8)):
            yield Problem(setting.line, f"{name} is unknown: did you mean {meant[0]}?")


def _clock(request: Request) -> Iterator[Problem]:
    """Clock and eco state are a mode that the site accepts, and --cpu-frequency agrees with the clock."""
    script = request.script
    freq, eco = script.get("-L", "freq"), script.get("-L", "eco_state")
    if freq is None or eco is None:
        return
    mode = next((m for m in limits.MODES.values() if (str(m.freq), str(m.eco_state)) == (freq.text, eco.text)), None)
    if mode is None or mode.refused:
        yield Problem(freq.line, mode.refused if mode else f"freq={freq.text},eco_state={eco.text} is no mode: give "
                      + " or ".join(f"freq={m.freq},eco_state={m.eco_state}" for m in limits.MODES.values() if not m.refused))
        return
    if "--cpu-frequency" in script.flags[:-1]:  # a flag without its value is a problem of _run
        clock = script.flags[script.flags.index("--cpu-frequency") + 1]
        clock_text, variable = f"{mode.ghz:.1f}", script.get("-x", "CPU_GHZ")
        if variable and variable.text != clock_text:
            yield Problem(variable.line, f"-x CPU_GHZ={variable.text}, but freq={mode.freq}: give -x CPU_GHZ={clock_text}")
        elif variable is None and clock != clock_text:
            yield Problem(script.flag_lines["--cpu-frequency"], f"--cpu-frequency {clock}, but freq={mode.freq}: write "
                          f"--cpu-frequency {clock_text}"
                          + (f", or give -x CPU_GHZ={clock_text}" if "CPU_GHZ" in script.variables else ""))


def _account(request: Request) -> Iterator[Problem]:
    """The group that pays."""
    in_script = request.script.get("-g")
    group = request.group or (in_script and in_script.text)
    if group and not limits.is_name(group):
        yield Problem(in_script.line if in_script and not request.group else 0, f"group {group!r:.60} is no group's name: give "
                      "letters, digits, '.', '_' and '-'")
    if not group:
        yield Problem(request.script.last_directive, "no group to charge: add #PJM -g GROUP, or give -g or FUGAKU_GROUP")


def _run(request: Request) -> Iterator[Problem]:
    """Flags, batch, memory, time and the placement of tensor-parallel groups."""
    script = request.script
    line = next(iter(script.flag_lines.values()), script.last_directive)
    try:
        run = interpret(script.flags)
        layout = Layout.from_run(run, request.processes)
        microbatches = layout.microbatches(run, layout.global_batch_size(run))
        assert microbatches
    except ValueError as error:
        named = min((flag for flag in script.flag_lines if flag in str(error)), key=str(error).index, default="")
        yield Problem(script.flag_lines.get(named, line), str(error))
        return
    tensor = script.flag_lines.get("--tensor-model-parallel-size", line)
    try:
        torus.check_tensor(layout.tp, request.ranks_per_node)
    except ValueError as error:
        yield Problem(tensor, str(error))
    if request.shape is None and request.ranks_per_node % layout.tp:
        yield Problem(tensor, f"--tensor-model-parallel-size {layout.tp} spans nodes, and node={request.nodes} has no units to "
                      f"keep it in: write node=XxYxZ:torus with whole units, or give at most {request.ranks_per_node}")
    yield from _rank_map(request, layout, tensor)
    yield from _cost(request, run, layout, line)


def _rank_map(request: Request, layout: Layout, tensor: int) -> Iterator[Problem]:
    """The rank map is made for this shape and layout; without a map ranks of a tensor-parallel group may lie far apart."""
    if request.shape and not torus.whole(request.shape):
        return  # a problem of _shape
    form = f"{torus.text(request.shape)} {{}} {layout.tp} {layout.pp}" if request.shape else ""
    expected = form.format('"$RANKS_PER_NODE"')
    maps = [(number, match[1]) for number, line in request.script.body
            if (match := re.search(r"fugaku_megatron\.jobs\.torus (\S+ \S+ \d+ \d+)", line))]
    for number, arguments in maps:
        if arguments.replace('"', "") not in (form.format("$RANKS_PER_NODE"), form.format(request.ranks_per_node)):
            yield Problem(number, f"the rank map is made for {arguments}: " + (f"write {expected}" if expected else "write "
                          "node=XxYxZ:torus, or no map"))
    another = request.script.find("--vcoordfile") and not request.script.find('--vcoordfile "$MAP"')
    if request.shape and layout.tp > request.ranks_per_node and not maps and not another:
        yield Problem(tensor, f"no rank map keeps tensor-parallel groups of {layout.tp} inside a 2x3x2 unit: give mpiexec "
                      f"--vcoordfile what python -m fugaku_megatron.jobs.torus {expected} writes")


def _cost(request: Request, run: RunConfig, layout: Layout, line: int) -> Iterator[Problem]:
    """Modelled memory fits a rank, and the first iteration and its checkpoint end before the elapse time."""
    script = request.script
    system = System.from_names("a64fx", software.THIS_PROJECT, request.nodes, request.ranks_per_node)
    fitted = system.software.fitted
    run, _ = choice.settled(run, layout, system)
    used = memory.peak_mib(run, layout, system.software, request.nodes, fitted.memory)
    limit = memory.limit_mib(system.machine, system.software, request.ranks_per_node)
    if used > limit:
        yield Problem(script.flag_lines.get("--micro-batch-size", line), f"out of memory: {used:.0f} MiB on the fullest rank "
                      f"(model), {limit:.0f} are there: lower --micro-batch-size, raise --tensor- or --pipeline-model-parallel-size"
                      ", or give --checkpoint-activations or --zero-stage 1")
    needed = start_up(request.nodes) + step(run, layout, system, fitted.values).seconds
    seconds, margin = (script.value(name, {}) for name in ("ELAPSE", "MARGIN"))
    if seconds and seconds.text != str(request.elapse):
        yield Problem(seconds.line, f"ELAPSE={seconds.text}, but elapse={limits.clock(request.elapse)}: write {request.elapse}, "
                      f"or give -x ELAPSE={request.elapse}")
    if margin and limits.is_number(margin.text):
        needed += int(margin.text)
    elif margin:
        yield Problem(margin.line, f"MARGIN={margin.text}: give whole seconds, such as {MARGIN}")
    if needed > request.elapse:
        yield Problem(script.line("-L", "elapse"), f"elapse={limits.clock(request.elapse)} ends before the first iteration and its "
                      f"checkpoint (model): write at least elapse={limits.clock(needed)}")


def _volumes(request: Request) -> Iterator[Problem]:
    """The volumes that the job mounts hold all paths of the script."""
    script = request.script
    setting = script.get("-x", "PJM_LLIO_GFSCACHE")
    volumes = set(setting.text.split(":")) if setting else set()
    if setting is None:
        yield Problem(script.line("-x"), "PJM_LLIO_GFSCACHE is not given, and the job will find no file: add "
                      "#PJM -x PJM_LLIO_GFSCACHE=/vol0004")
    for volume in sorted(v for v in volumes if not re.fullmatch(r"/vol\w+", v)):
        yield Problem(setting.line, f"PJM_LLIO_GFSCACHE={setting.text}: {volume!r} is no volume: give /vol0004 and others, joined "
                      "by colons (realpath . shows yours)")
    for name in ("ARCHIVE", "SAVE", "OUT", *PRELOADED):
        path = script.value(name)
        volume = re.match(r"/vol\d+", os.path.realpath(path.text)) if path and path.text else None
        if setting and volume and volume[0] not in volumes:
            yield Problem(setting.line, f"{name}={path.text} is on {volume[0]}, which PJM_LLIO_GFSCACHE does not name: "
                          f"write PJM_LLIO_GFSCACHE={':'.join([*setting.text.split(':'), volume[0]])}")


def _files(request: Request) -> Iterator[Problem]:
    """The archive, the local storage it is unpacked to, libraries to preload, and how many nodes open one file."""
    script = request.script
    archive = script.value("ARCHIVE")
    path = archive.text if archive else ""
    if request.files and archive and not Path(path).is_file():
        yield Problem(archive.line, f"ARCHIVE {path} does not exist: write it with scripts/build.sh, or give ARCHIVE=FILE")
    size = script.get("--llio", "localtmp-size")
    amount = re.fullmatch(r"(\d+)Gi", size.text) if size else None
    if amount is None or not 0 < int(amount[1]) <= limits.LOCAL_TMP_GIB:
        yield Problem(script.line("--llio"), f"localtmp-size={size.text if size else 'missing'}: the archive is unpacked there: "
                      f"give 1Gi to {limits.LOCAL_TMP_GIB}Gi")
    elif request.files and Path(path).is_file() and Path(path).stat().st_size > int(amount[1]) << 30:
        yield Problem(size.line, f"localtmp-size={size.text} is less than {path} holds: raise it")
    for name in ("DATA", "TOKENIZER"):
        if (packed := script.value(name)) and "/" in packed.text:
            yield Problem(packed.line, f"{name}={packed.text}: the archive holds names without folders: write "
                          f"{name}={Path(packed.text).name}")
    if (model := script.value("TOKENIZER")) and model.text and "--tokenizer-type" not in script.flag_lines:
        yield Problem(model.line, f"TOKENIZER={model.text} needs --tokenizer-type HuggingFaceTokenizer or SentencePieceTokenizer")
    for name in PRELOADED if request.files else ():
        library = script.value(name)
        for path in library.text.split(":") if library else ():
            if "/" in path and "$" not in path and not Path(path).is_file():
                yield Problem(library.line, f"{name} {path} does not exist, and a job runs on without it: give another path, or "
                              "none")
        if library and not library.text and script.find(f'[ -f "${name}" ]'):
            yield Problem(library.line, f"{name} is not given, and this job compares with it: give {name}=/path/to/libtcmalloc.so")
    many = request.nodes > limits.SINGLE_FILE_NODES or request.processes > limits.SINGLE_FILE_PROCESSES
    if many and not script.find('llio_transfer "$ARCHIVE"'):
        yield Problem(archive.line if archive else script.last_directive, f"{request.nodes} nodes would open one file, and more "
                      f'than {limits.SINGLE_FILE_NODES} bring the file system down: stage it with llio_transfer "$ARCHIVE"')
    elsewhere = script.find("python3 ") or script.find("python3\" ")
    if many and not script.find("$LOCAL/bin/python3"):
        yield Problem(elsewhere or script.last_directive, "ranks must start the interpreter that was unpacked: write "
                      "$LOCAL/bin/python3")


def _output(request: Request) -> Iterator[Problem]:
    """Output files of many ranks are spread over directories."""
    for number, line in request.script.body:
        paths = re.findall(r"-(?:std(?:out|err)?|of)-proc (\S+)", line)
        if request.processes > limits.SPLIT_OUTPUT_ABOVE and any("/1000r/" not in path for path in paths):
            yield Problem(number, f"{request.processes} processes would write into one directory: split it above "
                          f"{limits.SPLIT_OUTPUT_ABOVE}, -stdout-proc \"$OUT/%/1000r/stdout\"")


SUBJECTS: tuple[Callable[[Request], Iterator[Problem]], ...] = (
    _shape, _resource_group, _processes, _power, _clock, _account, _run, _volumes, _files, _output)
