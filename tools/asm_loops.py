"""The innermost loops of assembly, and what is slow in them on an A64FX or a Neoverse, for tools/codegen.py and amx_loops.py.

A loop is known by its function's name and by the source file of its multiply-adds in the compiler's .loc lines (-g1, which changes
no code), so the source needs no marks that could disturb the scheduler. Left out: loops that end in an indirect branch.
Tested by tests/arm/test_codegen.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# Multiply-add -> which operand is the accumulator; the result is the first. FMAD and its kin overwrite a factor.
ACCUMULATOR = {
    "bfmmla": 0,
    "fmla": 0,
    "fmls": 0,
    "fnmla": 0,
    "fnmls": 0,
    "fmad": 3,
    "fmsb": 3,
    "fnmad": 3,
    "fnmsb": 3,
    "sdot": 0,
    "smmla": 0,
}
MIN_BETWEEN = 18  # other FMLAs between two on one accumulator: latency 9 on two pipes
FILE = re.compile(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
FUNCTION = re.compile(r"\.type\s+(\S+),\s*[%@]function")
BRANCH = re.compile(r"(b|b\.?[a-z]{2,5}|cbn?z|tbn?z|j[a-z]{1,4})$")
LEAVES = ("b", "ret", "jmp")  # what follows is not run next


@dataclass(frozen=True)
class Instruction:
    """One line of assembly."""

    text: str
    file: str = ""  # where it comes from, by the .loc before it

    @property
    def mnemonic(self) -> str:
        return self.text.split(None, 1)[0].lower()

    @property
    def operands(self) -> list[str]:
        """Split at commas outside brackets and braces."""
        rest = self.text.split(None, 1)[1:]
        return [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", rest[0])] if rest else []

    @property
    def register(self) -> str:
        """The vector register that it names first, without its element type: its result, or what it stores."""
        match = re.match(r"\{?\s*([zv]\d+)\b", (self.operands or [""])[0])
        return match[1] if match else ""

    @property
    def multiply_add(self) -> bool:
        return self.mnemonic in ACCUMULATOR and self.register != ""

    @property
    def vector_store(self) -> bool:
        return self.register != "" and self.mnemonic.startswith("st")


@dataclass(frozen=True)
class Loop:
    """A loop of a function, from its label to the branch back."""

    function: str
    label: str
    body: tuple[Instruction, ...]

    @property
    def multiply_adds(self) -> list[Instruction]:
        return [i for i in self.body if i.multiply_add]

    @property
    def file(self) -> str:
        """The source file that most multiply-adds come from."""
        files = Counter(i.file for i in self.multiply_adds)
        return files.most_common(1)[0][0] if files else ""

    def text(self) -> str:
        return "\n".join([f"{self.label}:", *(f"\t{i.text}" for i in self.body)]) + "\n"


def functions(assembly: str) -> Iterator[tuple[str, list[Instruction], dict[str, int]]]:
    """Yield (name, instructions, label -> index of the instruction after it) of every function."""
    files: dict[str, str] = {}
    name = ""
    code = []
    labels = {}
    here = ""
    for line in assembly.splitlines():  # a million: patterns are for the few that may fit
        line = line.split("//", 1)[0].split("# ", 1)[0].strip()  # comments for ARM and for x86
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif not line.startswith("."):
            if name and line and line[0] != "#":
                code.append(Instruction(line.replace("\t", " "), here))
        elif line.startswith(".loc"):
            here = files.get(line.split()[1], "")
        elif match := FILE.match(line):
            files[match[1]] = match[2].rsplit("/", 1)[-1]
        elif match := FUNCTION.match(line):
            name = match[1]
            code = []
            labels = {}
        elif line.startswith(".size") and name:
            yield name, code, labels
            name = ""


def code_of(assembly: str, function: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return (instructions, labels) of one function, as `functions` has them but for their files; the rest of the text is not parsed."""
    first, last = (
        re.search(rf"\.{word}\s+{re.escape(function)},.*", assembly) for word in ("type", "size")
    )
    ((_, code, labels),) = functions(assembly[first.start() : last.end()])
    return code, labels


def innermost_spans(code: list[Instruction], labels: dict[str, int]) -> list[tuple[int, int, str]]:
    """Return (first, last, label) of every backward branch's body, when no other backward branch lies inside."""
    spans = []
    for end, instruction in enumerate(code):
        target = (instruction.operands or [""])[-1] if BRANCH.match(instruction.mnemonic) else ""
        if labels.get(target, end + 1) <= end:
            spans.append((labels[target], end, target))
    return [
        (begin, end, label)
        for begin, end, label in spans
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e, _ in spans)
    ]


def innermost_loops(assembly: str) -> list[Loop]:
    return [
        Loop(name, label, tuple(code[begin : end + 1]))
        for name, code, labels in functions(assembly)
        for begin, end, label in innermost_spans(code, labels)
    ]


def outside_loops(assembly: str, function: str) -> Loop:
    """Return what a function does around its innermost loops, as one piece of straight code without branches."""
    code, labels = code_of(assembly, function)
    inside = {i for begin, end, _ in innermost_spans(code, labels) for i in range(begin, end + 1)}
    body = tuple(
        x
        for i, x in enumerate(code)
        if i not in inside and not BRANCH.match(x.mnemonic) and x.mnemonic != "ret"
    )
    return Loop(function, "outside", body)


def around_loop(assembly: str, inner: Loop) -> Loop:
    """Return what runs between two runs of an innermost loop, as one piece of straight code without branches.

    That is all that it leads to and that leads back to it, wherever the compiler has put it.
    """
    code, labels = code_of(assembly, inner.function)
    begin, end = next(
        (begin, end) for begin, end, label in innermost_spans(code, labels) if label == inner.label
    )
    after = successors(code, labels)
    before: list[set[int]] = [set() for _ in code]
    for i, targets in enumerate(after):
        for target in targets:
            before[target].add(i)
    inside = sorted((reached(begin, after) & reached(begin, before)) - set(range(begin, end + 1)))
    return Loop(
        inner.function,
        "around",
        tuple(code[i] for i in inside if not BRANCH.match(code[i].mnemonic)),
    )


def successors(code: list[Instruction], labels: dict[str, int]) -> list[set[int]]:
    """Return the instructions that may follow each instruction of a function."""
    after: list[set[int]] = [set() for _ in code]
    for i, instruction in enumerate(code):
        if (
            BRANCH.match(instruction.mnemonic)
            and instruction.operands
            and instruction.operands[-1] in labels
        ):
            after[i].add(labels[instruction.operands[-1]])
        if instruction.mnemonic not in LEAVES and i + 1 < len(code):
            after[i].add(i + 1)
    return after


def reached(start: int, edges: list[set[int]]) -> set[int]:
    """Return what the edges lead to from `start`, `start` included."""
    found = set()
    waiting = [start]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += edges[i]
    return found


def shortest_gap(loop: Loop) -> int:
    """Return the fewest other multiply-adds between two on one accumulator, round the loop; a large number when none repeats."""
    last: dict[str, int] = {}  # register -> number of the multiply-add whose sum it holds
    gap = 10**6
    count = 0
    for instruction in loop.body * 2:
        operands = [re.split(r"[./]", operand)[0] for operand in instruction.operands]
        if instruction.multiply_add:
            source = operands[ACCUMULATOR[instruction.mnemonic]]
            if source in last:
                gap = min(gap, count - last[source] - 1)
            last[operands[0]] = count
            count += 1
        elif (
            instruction.mnemonic in ("mov", "movprfx")
            and instruction.register
            and operands[-1] in last
        ):
            last[instruction.register] = last[operands[-1]]
        elif instruction.register and not instruction.vector_store:
            last.pop(instruction.register, None)
    return gap


def slow_instructions(loop: Loop) -> list[str]:
    """Return what a vector loop must not have: an unpipelined divide or square root, INSR, a multiply-add by element."""
    reasons = []
    for i in loop.body:
        if i.mnemonic in ("fdiv", "fdivr", "fsqrt") and i.register:
            reasons.append(f"{i.mnemonic} takes 98 cycles: {i.text}")
        if i.mnemonic == "insr":
            reasons.append(f"lanes filled one by one: {i.text}")
        if i.multiply_add and re.search(r"z\d+\.[hsd]\s*\[\d+\]", i.text):
            reasons.append(f"multiply-add by element runs at half rate: {i.text}")
    return reasons


def faults(loop: Loop) -> list[str]:
    """Return what keeps an inner-product loop from its peak, one line each; empty when it is clean."""
    reasons = slow_instructions(loop)
    for i in loop.body:
        if i.register and re.search(r"\[(sp|x29|fp)\b", i.text):
            reasons.append(f"an accumulator in memory: {i.text}")
        elif i.vector_store:
            reasons.append(f"a store in the loop: {i.text}")
    gap = shortest_gap(loop)
    if gap < MIN_BETWEEN:
        reasons.append(
            f"only {gap} multiply-adds between two on one accumulator, {MIN_BETWEEN} needed"
        )
    return reasons
