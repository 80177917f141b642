"""Mistakes in a job script, each with the line to change. Bash syntax is not checked."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..planner import peak_memory, search, software
from ..planner.model import step
from ..planner.system import System, start_up
from . import limits, torus
from .job import interpret
from .script import READS_COMMON, Request, add_options, parse, requested

MISSING = "missing"
RANKS = '"$RANKS_PER_NODE"'
# Arguments of the rank map: shape, ranks per node, TP, PP, and CP unless 1.
MAP = re.compile(r"(?:RANK_MAP=\(|fugaku_megatron\.jobs\.torus )(\S+ \S+ \d+ \d+(?: \d+)?)")
PRELOADED = ("TCMALLOC", "LD_PRELOAD")  # variables with libraries to preload


class Problem(NamedTuple):
    """A mistake. line: 0 for an option on pjsub's command line"""

    line: int
    text: str

    def located(self, file: str) -> str:
        where = f":{self.line}" if self.line else ", options of pjsub"
        return f"{file}{where}: {self.text}"


Problems = Iterator[Problem]


def problems(
    text: str, group: str | None = None, files: bool = True, options: Sequence[str] = ()
) -> list[Problem]:
    """Return all mistakes, by line.

    files: staged files must exist already
    """
    try:
        script = parse(text)
        add_options(script, options, 0)
        request = requested(script, group, files)
    except ValueError as error:
        line = re.match(r"line (\d+): (.*)", str(error), re.DOTALL)
        return [Problem(int(line[1]), line[2]) if line else Problem(0, str(error))]
    unique = dict.fromkeys(problem for subject in SUBJECTS for problem in subject(request))
    return sorted(unique, key=lambda p: p.line)


def _shape(request: Request) -> Problems:
    line = request.script.line("-L", "node")
    shape = request.shape
    best = torus.best_shape(request.nodes)
    near = " or ".join(map(str, torus.nearest(request.nodes)))
    remedy = f"write node={torus.text(best)}:torus" if best else f"request {near} nodes"
    large = request.nodes > limits.TORUS_ABOVE
    is_torus = "torus" in request.script.text("-L", "node")
    if large and not (shape and is_torus):
        yield Problem(
            line,
            f"{request.nodes} nodes: above {limits.TORUS_ABOVE} nodes a job must request a torus of 2x3x2 units: "
            + remedy,
        )
    if shape is None or not (large or is_torus):
        return
    node = f"node={torus.text(shape)}"
    for axis, size, unit, maximum in zip("XYZ", shape, torus.UNIT, torus.WHOLE):
        if size % unit:
            yield Problem(
                line,
                f"{node}: {axis}={size} is not a multiple of {unit} (units are 2x3x2): {remedy}",
            )
        if size > maximum:
            yield Problem(
                line, f"{node}: {axis}={size} is above {maximum}, the whole machine: {remedy}"
            )


def _resource_group(request: Request) -> Problems:
    script = request.script
    groups, source = limits.resource_groups()
    name = script.text("-L", "rscgrp", MISSING)
    line = script.line("-L", "rscgrp")
    if name not in groups:
        yield Problem(line, f"rscgrp={name}: write one of {', '.join(groups)} ({source})")
        return
    group = groups[name]
    if not group.accepts(request.nodes):
        fits = [other.name for other in groups.values() if other.accepts(request.nodes)]
        yield Problem(
            line,
            f"rscgrp={name} accepts {group.smallest} to {group.largest} nodes, but node requests {request.nodes} "
            f"({source}): " + (f"write rscgrp={fits[0]}" if fits else "request fewer nodes"),
        )
    if request.elapse > group.hours * limits.HOUR:
        yield Problem(
            script.line("-L", "elapse"),
            f"elapse={limits.clock(request.elapse)} is above {group.hours:g} h, the limit "
            f"of {name} ({source}): write elapse={limits.clock(group.hours * limits.HOUR)} and submit a chain "
            "with --steps",
        )


def _processes(request: Request) -> Problems:
    script = request.script
    proc = script.text("--mpi", "proc", MISSING)
    ranks = request.nodes * request.ranks_per_node
    if proc != str(ranks):
        yield Problem(
            script.line("--mpi", "proc"),
            f"proc={proc}, but {request.nodes} nodes x {request.ranks_per_node} ranks are {ranks}: write proc={ranks}",
        )
    spare = f" and {request.spares} spare nodes" if request.spares else ""
    for name, value, more in (
        ("RANKS_PER_NODE", request.ranks_per_node, ""),
        ("NODES", request.nodes - request.spares, spare),
    ):
        setting = script.variables.get(name)
        if setting and setting.text != str(value):
            yield Problem(
                setting.line,
                f"{name}={setting.text}, but the directives request {value}{more}: write {name}={value}",
            )
        elif setting is None and (line := script.find(name)):
            yield Problem(line, f"{name} is used but not set: write {name}={value}")


def _power(request: Request) -> Problems:
    script = request.script
    given = script.settings.get("-L", {})
    for name in ("freq", "eco_state", "retention_state"):
        if name not in given:
            near = given.get("freq") or given.get("eco_state")
            yield Problem(
                near.line if near else script.line("-L"),
                f"{name} is not set, and the site's default is Boost-Eco, which uses one "
                f"floating-point pipe: add {name}={limits.MODES['normal-2.0'].states[name]}",
            )
    retention = script.text("-L", "retention_state", "0")
    if retention != "0" and request.nodes > limits.RETENTION_NODES:
        yield Problem(
            script.line("-L", "retention_state"),
            f"retention_state={retention} is not allowed above {limits.RETENTION_NODES} nodes: "
            "write retention_state=0",
        )
    for name, setting in given.items():
        values = limits.STATES.get(name)
        if values and name not in ("freq", "eco_state") and setting.text not in map(str, values):
            yield Problem(setting.line, f"{name}={setting.text}: write {values[0]} to {values[-1]}")
        if values is None and (meant := difflib.get_close_matches(name, limits.STATES, 1, 0.8)):
            yield Problem(setting.line, f"{name} is unknown: did you mean {meant[0]}?")


def _clock(request: Request) -> Problems:
    script = request.script
    freq = script.get("-L", "freq")
    eco = script.get("-L", "eco_state")
    if freq is None or eco is None:
        return
    written = f"freq={freq.text},eco_state={eco.text}"
    modes = {f"freq={m.freq},eco_state={m.eco_state}": m for m in limits.MODES.values()}
    mode = modes.get(written)
    if mode is None:
        valid = " or ".join(name for name, other in modes.items() if not other.refused)
        yield Problem(freq.line, f"{written} is not a valid mode: write {valid}")
        return
    if mode.refused:
        yield Problem(freq.line, mode.refused)
        return
    if "--cpu-frequency" in script.flags[:-1]:  # a flag without its value is a problem of _run
        clock = script.flags[script.flags.index("--cpu-frequency") + 1]
        expected = f"{mode.ghz:.1f}"
        variable = script.get("-x", "CPU_GHZ")
        if variable and variable.text != expected:
            yield Problem(
                variable.line,
                f"-x CPU_GHZ={variable.text}, but freq={mode.freq}: pass -x CPU_GHZ={expected}",
            )
        elif variable is None and clock != expected:
            passed = f", or pass -x CPU_GHZ={expected}" if "CPU_GHZ" in script.variables else ""
            yield Problem(
                script.flag_lines["--cpu-frequency"],
                f"--cpu-frequency {clock}, but freq={mode.freq}: write --cpu-frequency {expected}{passed}",
            )


def _account(request: Request) -> Problems:
    script = request.script
    group = request.group or script.text("-g")
    if not group:
        yield Problem(
            script.last_directive,
            "no group to charge: add #PJM -g GROUP, pass -g or set FUGAKU_GROUP",
        )
    elif not limits.is_name(group):
        yield Problem(
            0 if request.group else script.line("-g"),
            f"group {group!r:.60} is not a valid name: use letters, digits, '.', '_' and '-'",
        )


def _run(request: Request) -> Problems:
    script = request.script
    line = next(iter(script.flag_lines.values()), script.last_directive)
    try:
        run = interpret(script.flags)
        layout = Layout.from_run(run, request.processes)
        layout.microbatches(run)
    except ValueError as error:
        text = str(error)
        named = [flag for flag in script.flag_lines if flag in text]
        first = min(named, key=text.index, default="")
        yield Problem(script.flag_lines.get(first, line), text)
        return
    tensor = script.flag_lines.get("--tensor-model-parallel-size", line)
    try:
        torus.check_tensor(layout.tp, request.ranks_per_node)
    except ValueError as error:
        yield Problem(tensor, str(error))
    if request.shape is None and request.ranks_per_node % layout.tp:
        yield Problem(
            tensor,
            f"--tensor-model-parallel-size {layout.tp} spans nodes, and node={request.nodes} has no 2x3x2 units "
            f"that keep them together: write node=XxYxZ:torus, or lower it to at most {request.ranks_per_node}",
        )
    yield from _rank_map(request, layout, tensor)
    yield from _cost(request, run, layout, line)


def _rank_map(request: Request, layout: Layout, tensor: int) -> Problems:
    if request.shape and not torus.whole(request.shape):
        return  # a problem of _shape
    script = request.script
    remedy = "write node=XxYxZ:torus, or remove RANK_MAP"
    valid = []
    if request.shape:
        form = f"{torus.text(request.shape)} {{}} {torus.sizes(layout)}"
        remedy = f"write {form.format(RANKS)}"
        valid = [form.format(ranks) for ranks in ("$RANKS_PER_NODE", request.ranks_per_node)]
    maps = [(number, match[1]) for number, line in script.body if (match := MAP.search(line))]
    for number, arguments in maps:
        if arguments.replace('"', "") not in valid:
            yield Problem(number, f"the rank map is for {arguments}: {remedy}")
    another = script.find("--vcoordfile") and not script.find('--vcoordfile "$MAP"')
    if request.shape and layout.tp > request.ranks_per_node and not maps and not another:
        yield Problem(
            tensor,
            f"no rank map keeps tensor-parallel groups of {layout.tp} inside a 2x3x2 unit: write "
            f"RANK_MAP=({form.format(RANKS)})",
        )


def _cost(request: Request, run: RunConfig, layout: Layout, line: int) -> Problems:
    script = request.script
    system = System.from_names(
        "a64fx", software.THIS_PROJECT, request.nodes, request.ranks_per_node
    )
    run, _ = search.resolve(run, layout, system)
    used = peak_memory.peak_mib(run, layout, system)
    limit = system.limit_mib
    if used > limit:
        yield Problem(
            script.flag_lines.get("--micro-batch-size", line),
            f"out of memory: the fullest rank needs {used:.0f} MiB "
            f"(model) of {limit:.0f}: lower --micro-batch-size, raise --tensor- or --pipeline-model-parallel-size"
            ", or add --checkpoint-activations or --zero-stage 1",
        )
    needed = start_up(request.nodes) + step(run, layout, system).seconds
    seconds = script.value("ELAPSE", {})
    margin = script.value("MARGIN", {})
    if seconds and seconds.text != str(request.elapse):
        yield Problem(
            seconds.line,
            f"ELAPSE={seconds.text}, but elapse={limits.clock(request.elapse)}: write {request.elapse}, "
            f"or pass -x ELAPSE={request.elapse}",
        )
    if margin and limits.is_number(margin.text):
        needed += int(margin.text)
    elif margin:
        yield Problem(
            margin.line, f"MARGIN={margin.text}: write whole seconds, such as {limits.MARGIN}"
        )
    if needed > request.elapse:
        yield Problem(
            script.line("-L", "elapse"),
            f"elapse={limits.clock(request.elapse)} ends before the first iteration and its "
            f"checkpoint (model): write at least elapse={limits.clock(needed)}",
        )


def _volumes(request: Request) -> Problems:
    script = request.script
    setting = script.get("-x", "PJM_LLIO_GFSCACHE")
    if setting is None:
        yield Problem(
            script.line("-x"),
            "PJM_LLIO_GFSCACHE is not set, so the job would not find any file: add "
            "#PJM -x PJM_LLIO_GFSCACHE=/vol0004",
        )
        return
    written = f"PJM_LLIO_GFSCACHE={setting.text}"
    volumes = set(setting.text.split(":"))
    for volume in sorted(volumes):
        if not re.fullmatch(r"/vol\w+", volume):
            yield Problem(
                setting.line,
                f"{written}: {volume!r} is not a volume: write names such as /vol0004, "
                "joined by colons (realpath . shows yours)",
            )
    for name in ("ARCHIVE", "SAVE", "OUT", *PRELOADED):
        path = script.value(name)
        mount = path and path.text and re.match(r"/vol\d+", os.path.realpath(path.text))
        if path and mount and mount[0] not in volumes:
            yield Problem(
                setting.line,
                f"{name}={path.text} is on {mount[0]}, which PJM_LLIO_GFSCACHE does not name: "
                f"write {written}:{mount[0]}",
            )


def _common_part(request: Request) -> Problems:
    line = request.script.find(READS_COMMON)
    if not line or not request.files:
        return
    folder = Path(request.script.text("-x", "FUGAKU_MEGATRON", os.getcwd()))
    name = "fugaku_megatron/jobs/pjsub.sh"
    if not any((folder / parent / name).is_file() for parent in ("", "../..")):
        yield Problem(
            line,
            f"the job would not find {name} in {folder}: submit from the checkout, or pass -x "
            "FUGAKU_MEGATRON=/path/to/the/checkout",
        )


def _archive(request: Request) -> Problems:
    script = request.script
    archive = script.value("ARCHIVE")
    path = Path(archive.text if archive else "")
    if request.files and archive and not path.is_file():
        yield Problem(
            archive.line,
            f"ARCHIVE {archive.text} does not exist: create it with scripts/build.sh, or set ARCHIVE=FILE",
        )
    size = script.text("--llio", "localtmp-size", MISSING)
    line = script.line("--llio", "localtmp-size")
    amount = re.fullmatch(r"(\d+)Gi", size)
    if amount is None or not 0 < int(amount[1]) <= limits.LOCAL_TMP_GIB:
        yield Problem(
            line,
            f"localtmp-size={size}: the archive is unpacked there: write 1Gi to {limits.LOCAL_TMP_GIB}Gi",
        )
    elif request.files and path.is_file() and path.stat().st_size > int(amount[1]) << 30:
        yield Problem(line, f"localtmp-size={size} is smaller than {path}: raise it")


def _packed_files(request: Request) -> Problems:
    script = request.script
    for name in ("DATA", "TOKENIZER"):
        if (packed := script.value(name)) and "/" in packed.text:
            yield Problem(
                packed.line,
                f"{name}={packed.text}: the archive stores names without folders: write "
                f"{name}={Path(packed.text).name}",
            )
    model = script.value("TOKENIZER")
    if model and model.text and "--tokenizer-type" not in script.flag_lines:
        yield Problem(
            model.line,
            f"TOKENIZER={model.text} needs --tokenizer-type HuggingFaceTokenizer or SentencePieceTokenizer",
        )


def _preloaded(request: Request) -> Problems:
    if not request.files:
        return
    for name in PRELOADED:
        library = request.script.value(name)
        if library is None:
            continue
        for path in library.text.split(":"):
            if "/" in path and "$" not in path and not Path(path).is_file():
                yield Problem(
                    library.line,
                    f"{name} {path} does not exist, and the job would run without it: set another path, or "
                    "remove it",
                )
        if not library.text and request.script.find(f'[ -f "${name}" ]'):
            yield Problem(
                library.line,
                f"{name} is not set, but this job measures it: pass -x {name}=/path/to/libtcmalloc.so",
            )


def _shared_files(request: Request) -> Problems:
    script = request.script
    if (
        request.nodes <= limits.SINGLE_FILE_NODES
        and request.processes <= limits.SINGLE_FILE_PROCESSES
    ):
        return
    if not script.find('llio_transfer "$ARCHIVE"'):
        archive = script.value("ARCHIVE")
        yield Problem(
            archive.line if archive else script.last_directive,
            f"{request.nodes} nodes would open the same file; more "
            f'than {limits.SINGLE_FILE_NODES} stop the file system: stage it with llio_transfer "$ARCHIVE"',
        )
    if not script.find("$LOCAL/bin/python3"):
        elsewhere = script.find("python3 ") or script.find('python3" ')
        yield Problem(
            elsewhere or script.last_directive,
            "ranks must start the unpacked interpreter: write $LOCAL/bin/python3",
        )


def _output(request: Request) -> Problems:
    if request.processes <= limits.SPLIT_OUTPUT_ABOVE:
        return
    for number, line in request.script.body:
        paths = re.findall(r"-(?:std(?:out|err)?|of)-proc (\S+)", line)
        if any("/1000r/" not in path for path in paths):
            yield Problem(
                number,
                f"{request.processes} processes would write into one directory: split it above "
                f'{limits.SPLIT_OUTPUT_ABOVE} processes: -stdout-proc "$OUT/%/1000r/stdout"',
            )


SUBJECTS: tuple[Callable[[Request], Problems], ...] = (
    _shape,
    _resource_group,
    _processes,
    _power,
    _clock,
    _account,
    _run,
    _volumes,
    _common_part,
    _archive,
    _packed_files,
    _preloaded,
    _shared_files,
    _output,
)
