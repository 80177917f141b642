"""The loops of AMX tile instructions in x86-64 assembly and their cycles on a Sapphire Rapids core, for tools/codegen.py.

LLVM 19's model of that core knows neither the rate nor the latency of tile instructions: it begins four of them in a cycle. The
cycles here are counted from Intel's published numbers, with all data in L1. A turn of a loop takes as long as the slowest of four:
the matrix unit, the load ports, the decoder, and the products that wait for the one before them on the same sum. Tested by
tests/arm/test_codegen.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fugaku_megatron.planner.cost import PARTIAL_MATMULS
from tools.asm_loops import Instruction, Loop, functions, reached, successors

# Intel 64 and IA-32 Architectures Optimization Reference Manual (248966), table 20-2, "Intel AMX instruction throughput and
# latency": TDPBF16PS and TDPBSSD begin every 16 cycles and take 52, TILELOADD every 8. The same manual on Golden Cove: a core renames 6
# operations a cycle and has three load ports, two of them for 64 bytes.
DOTS = ("tdpbf16ps", "tdpbssd")
DOT_CYCLES = 16
DOT_LATENCY = 52
DOT_MULTIPLY_ADDS = 16 * 16 * 32  # of a TDPBF16PS
FP32_MULTIPLY_ADDS = 2 * 16  # in a cycle, of two FMA units of 512 bits
LOADS = ("tileloadd", "tileloaddt1")
LOAD_CYCLES = 8
STORE = "tilestored"
TILE_OPERATIONS = 8  # of one tile load: one a cycle
WIDTH = 6
PORTS = 3
MIN_SHARE = 0.95


@dataclass(frozen=True)
class TileLoop:
    """A loop's turn: `loop` as it runs when it fetches nothing, `everything` with all that it can also run."""

    loop: Loop
    everything: Loop


def count(body: tuple[Instruction, ...], *mnemonics: str) -> int:
    return sum(i.mnemonic in mnemonics for i in body)


def shortest_cycle(start: int, after: list[set[int]]) -> list[int]:
    """Return the fewest instructions that lead from `start` back to it, in their order; empty when none do."""
    came = {}
    waiting = [start]
    for i in waiting:
        for target in sorted(after[i]):
            if target == start:
                path = [i]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if target not in came:
                came[target] = i
                waiting.append(target)
    return []


def tile_loops(assembly: str) -> Iterator[TileLoop]:
    """Yield every innermost loop that multiplies tiles."""
    for name, code, labels in functions(assembly):
        products = [i for i, x in enumerate(code) if x.mnemonic in DOTS]
        if not products:
            continue
        after = successors(code, labels)
        before: list[set[int]] = [set() for _ in code]
        for i, targets in enumerate(after):
            for target in targets:
                before[target].add(i)
        while products:
            turn = shortest_cycle(products[0], after)
            everything = sorted(reached(products[0], after) & reached(products[0], before))
            yield TileLoop(
                Loop(name, f".{products[0]}", tuple(code[i] for i in turn)),
                Loop(name, f".{products[0]}", tuple(code[i] for i in everything)),
            )
            products = [i for i in products[1:] if i not in turn]


def memory_reads(body: tuple[Instruction, ...]) -> int:
    """Count the other instructions that read or prefetch."""
    return sum(
        "(" in i.text
        and i.mnemonic not in (*LOADS, STORE)
        and not i.mnemonic.startswith(("lea", "nop"))
        for i in body
    )


def waits(body: tuple[Instruction, ...]) -> int:
    """Return the cycles that the products of one sum wait for each other in a turn: they follow one another."""
    sums = [i.operands[-1] for i in body if i.mnemonic in DOTS]
    return max((sums.count(one) for one in sums), default=0) * DOT_LATENCY


def cycles(body: tuple[Instruction, ...]) -> float:
    """Return the cycles of a turn."""
    loads = count(body, *LOADS)
    products = count(body, *DOTS)
    operations = len(body) - loads + loads * TILE_OPERATIONS
    return max(
        products * DOT_CYCLES,
        loads * LOAD_CYCLES + memory_reads(body) / PORTS,
        operations / WIDTH,
        waits(body),
    )


def share(body: tuple[Instruction, ...]) -> float:
    """Return the share of the matrix unit's rate."""
    return count(body, *DOTS) * DOT_CYCLES / cycles(body)


def fp32_ratio(body: tuple[Instruction, ...]) -> float:
    """Return the rate of the loop, of which it takes six turns for one of FP32, over two 16-lane multiply-adds a cycle."""
    return share(body) * DOT_MULTIPLY_ADDS / DOT_CYCLES / PARTIAL_MATMULS / FP32_MULTIPLY_ADDS


def faults(loop: TileLoop) -> list[str]:
    """Return what keeps the loop from the matrix unit's rate, one line each; empty when it is clean."""
    body = loop.loop.body
    loads = count(body, *LOADS)
    products = count(body, *DOTS)
    reasons = [f"a tile is stored in the loop: {i.text}" for i in body if i.mnemonic == STORE]
    reasons += [
        f"a tile on the stack: {i.text}" for i in body if i.mnemonic in LOADS and "(%rsp" in i.text
    ]
    if products < loads:
        reasons.append(f"{products} tile matmuls for {loads} tile loads")
    if share(body) < MIN_SHARE:
        reasons.append(
            f"{100 * share(body):.1f} % of the matrix unit's rate in the model, {100 * MIN_SHARE:.0f} % needed"
        )
    return reasons
