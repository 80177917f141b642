"""Checks the machine code of the hot loops: compiles for the A64FX, for Neoverse and for AMX and reads the assembly.

    make arm-codegen                      (or: python -m tools.codegen arm)
    make amx-codegen                      (or: python -m tools.codegen amx)

For ARM it reads every family of kernels for the A64FX, and the BF16 and INT8 GEMM for Neoverse V1 (SVE of 256 bits) and V2 (128 bits). It
prints which share of the FP16 peak remains when every chunk of FP16 sums is added in float32 (gemm_half.h), and the cycles a vector
of the elementwise loops, each with a limit (tools/arm_vector_loops.py). It fails

- when an inner-product loop spills, multiplies by element, has FMLAs of one accumulator too close together or falls below its share
  of the peak in llvm-mca's model, the GEMM's also with all that it can fetch (gemm_fetch.h);
- when any loop for the A64FX holds a vector divide, square root or INSR;
- when an expected loop is not found.

For AMX (target amx, Sapphire Rapids) it reads the BF16 and INT8 GEMM and attention. It fails when a loop over k stores a tile, reads one
from the stack, has fewer tile matmuls than tile loads, or falls below its share of the matrix unit's rate by Intel's published
cycles, the GEMM's also with all that it can fetch (tools/amx_loops.py). For Neoverse and AMX it prints the rate of --fp32-matmul
bf16x3 relative to FP32's.

It uses GCC 12 and, where installed, Clang 19; without llvm-mca-19 it says that there is no model. The model is of one core with all
data in L1: no caches, no measurement. Tested by tests/arm/test_codegen.py.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import setup
from fugaku_megatron.planner.cost import PARTIAL_MATMULS
from tools import amx_loops, arm_env, arm_vector_loops
from tools.arm_vector_loops import LOOPS, VectorLoop, hot_loop
from tools.asm_loops import (
    Loop,
    around_loop,
    faults,
    innermost_loops,
    outside_loops,
    slow_instructions,
)

ROOT = Path(__file__).resolve().parents[1]
GCC = arm_env.CXX
COMPILERS = {"GCC 12": GCC, "Clang 19": "clang++-19 --target=aarch64-linux-gnu"}
MCA = ["llvm-mca-19", "-mtriple=aarch64-linux-gnu"]
ITERATIONS = 400
CHUNKS = (16, 32, 64, 128, 256)  # steps of k summed in FP16
MIN_BF16X3 = 1.3  # times FP32's peak on AMX
INT8_FILES = r"gemm_int8\.h|simd_\w+\.h|arm_\w+\.h"  # that a compiler names for an intrinsic
SPLIT_TILES = "tiles_kernel<SplitWords<TilePairs>, 32>"  # FP32 in three BF16 parts
TILE_KERNELS = ("tiles_kernel<TilePairs, 32>", SPLIT_TILES, "tiles_kernel<Int8Tiles, 32>")


@dataclass(frozen=True)
class Machine:
    """A core as llvm-mca models it. target: of setup.py. pipes: multiply-adds that it begins in a cycle. families: the
    families in target.cc that are read; source: another text instead of target.cc. cxx: the compiler of the baseline."""

    name: str
    target: str
    flags: tuple[str, ...]
    pipes: int
    families: tuple[str, ...]
    source: str = ""
    cxx: str = GCC


# LLVM's own model says that an A64FX decodes 6 instructions a cycle; it decodes 4.
# bench.h is left out: it has the GEMM's own loop once more.
A64FX = Machine(
    "A64FX",
    "sve512",
    ("-mcpu=a64fx", "-dispatch=4"),
    2,
    tuple(f for f in setup.families() if f != "bench"),
)
NEOVERSES = (
    Machine("Neoverse V1", "sve256bf16", ("-mcpu=neoverse-v1",), 2, ("gemm",)),
    Machine("Neoverse V2", "sve128bf16", ("-mcpu=neoverse-v2",), 4, ("gemm",)),
)
AMX = Machine("Sapphire Rapids", "amx", (), 1, setup.TILE_FAMILIES, cxx="g++")
AMX_COMPILERS = {"GCC": "g++", "Clang 19": "clang++-19"}
VECTOR_LOOPS = replace(A64FX, families=("vectors",), source=arm_vector_loops.SOURCE)


@dataclass(frozen=True)
class Kernel:
    """Loops that must reach a share of the peak: in functions like `function`, with multiply-adds from `file`, a pattern."""

    name: str
    file: str
    function: str
    min_share: float  # of a multiply-add a cycle in each pipe of the model
    multiply_adds: int  # fewer than this in a turn: not one of its inner products
    turns: int = 0  # of the loop, after which it fetches; 0: it does not


def hot_kernels(tile: tuple[int, int], fetch_steps: int) -> list[Kernel]:
    """Return the A64FX's kernels. tile: rows and vectors of the target's GEMM. fetch_steps: steps of k after which the GEMM fetches."""
    rows = tile[0]
    sums = tile[0] * tile[1]
    return [
        Kernel(
            "GEMM k-loop",
            "gemm_micro.h",
            rf"micro_kernel<.*FloatWords, {rows}>",
            0.98,
            sums,
            fetch_steps,
        ),
        Kernel(
            "GEMM FP16 k-loop",
            "gemm_half.h|simd_sve.h",
            rf"micro_kernel<.*HalfWords, {rows}>",
            0.98,
            sums,
            fetch_steps,
        ),
        Kernel(
            "GEMM INT8 k-loop",
            INT8_FILES,
            rf"micro_kernel<.*Int8Words, {rows}>",
            0.95,
            sums,
            fetch_steps,
        ),
        Kernel(
            "delta rule inner products",
            r"delta_matmul\.h",
            rf"delta_tile<{rows}, (true|false)>",
            0.98,
            sums,
        ),
        # Tiles next to the diagonal have 8 or 16 sums, which wait for their own latency of 9 cycles.
        Kernel("attention inner products", "attention_tile.h", r"Singles", 0.95, 24),
    ]


def matrix_kernels(tile: tuple[int, int], fetch_steps: int) -> list[Kernel]:
    """Return the kernels whose instructions multiply 2 x 4 by 4 x 2 (BF16) or 2 x 8 by 8 x 2 (INT8).

    A tile of `tile` is then a multiply-add for each of its registers, of two steps of k.
    """
    rows, vectors = tile
    files = rf"gemm_quads\.h|{INT8_FILES}"
    return [
        Kernel(
            name,
            files,
            rf"quads_kernel<.*{words}, {rows}>",
            share,
            rows * vectors,
            fetch_steps // 2,
        )
        for name, words, share in (
            ("GEMM BF16 k-loop", "Bf16Pairs", 0.9),
            ("GEMM bf16x3 k-loop", r"Bf16Pairs ?>", 0.9),
            ("GEMM INT8 k-loop", "Int8Words", 0.95),
        )
    ]


def gemm_tuning(machine: Machine) -> tuple[tuple[int, int], int]:
    """Return (rows and vectors of the target's GEMM tile, steps of k after which it fetches) of kernels_sve/tuning.h."""
    from fugaku_megatron.host import kernels

    row = next(row for row in kernels.targets() if row["name"] == machine.target)
    return row["gemm_tile"], row["fetch_steps"]


def assembly(cxx: str, name: str, machine: Machine = A64FX) -> str:
    """Return the machine's code with line numbers, by setup.py's own flags, one family after another; made anew only after a change."""
    compiler = setup.Compiler(ROOT / "build", {**os.environ, "CXX": machine.cxx, "TARGET_CXX": cxx})
    target = next(t for t in setup.TARGETS if t.name == machine.target)
    flags = ["-g1", "-S"]
    texts = []
    for family in machine.families:
        output = compiler.objects / f"codegen_{name.replace(' ', '')}_{machine.target}_{family}.s"
        source = setup.SOURCES / "target.cc"
        if machine.source:
            source = compiler.objects / f"codegen_{machine.target}_{family}.cc"
            if not source.exists() or source.read_text() != machine.source:
                source.write_text(machine.source)
        command = compiler.target_command(target, "gemm" if machine.source else family)
        compiler.compile([*command, *flags], source, output, force=False)
        texts.append(output.read_text())
    return "\n".join(texts)


def demangled(names: list[str]) -> list[str]:
    filtered = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    return [re.sub(r"fm::\w+::", "", name) for name in filtered.splitlines()]


def cycles(loop: Loop, machine: Machine = A64FX) -> float:
    """Return the cycles of one turn in llvm-mca's model of the machine."""
    command = [*MCA, *machine.flags, f"-iterations={ITERATIONS}"]
    report = subprocess.run(
        command, input=loop.text(), capture_output=True, text=True, check=True
    ).stdout
    return int(re.search(r"Total Cycles:\s+(\d+)", report)[1]) / ITERATIONS


def row(
    compiler: str, function: str, kernel: Kernel, loop: Loop, machine: Machine = A64FX
) -> tuple[str, list[str]]:
    """Return (line of the table, faults) of one inner-product loop."""
    return modelled(
        compiler,
        f"{kernel.name}: {function.split('(')[0].removeprefix('void ')}",
        kernel,
        loop,
        faults(loop),
        machine,
    )


def fetching_row(
    compiler: str, kernel: Kernel, around: Loop, loop: Loop, machine: Machine
) -> tuple[str, list[str]]:
    """Return the line and the faults of the loop with `around`, the code that runs when there is everything to fetch."""
    whole = Loop(loop.function, loop.label, around.body + loop.body * kernel.turns)
    return modelled(
        compiler,
        f"{kernel.name}, {kernel.turns} turns with what is fetched",
        kernel,
        whole,
        [],
        machine,
    )


def modelled(
    compiler: str, name: str, kernel: Kernel, loop: Loop, reasons: list[str], machine: Machine
) -> tuple[str, list[str]]:
    """Return the line and the faults of a loop with its cycles in llvm-mca's model."""
    count = len(loop.multiply_adds)
    model = f"{'':7} {'no llvm-mca':>9}"
    if shutil.which(MCA[0]):
        turn = cycles(loop, machine)
        share = count / machine.pipes / turn
        model = f"{turn:7.2f} {100 * share:8.1f}%"
        if share < kernel.min_share:
            reasons.append(
                f"{100 * share:.1f} % of the peak in the model, {100 * kernel.min_share:.0f} % needed"
            )
    return f"{compiler:9} {name:60.60} {count:5} {len(loop.body):6} {model}", [
        f"{compiler} {name}: {fault}" for fault in reasons
    ]


def check(
    compiler: str, text: str, kernels: list[Kernel], machine: Machine = A64FX
) -> Iterator[tuple[str, list[str]]]:
    """Yield (line, faults) of every hot loop of one assembly, then of all other vector loops together."""
    loops = innermost_loops(text)
    named = list(zip(demangled([loop.function for loop in loops]), loops, strict=True))
    for kernel in kernels:
        hot = [
            (name, loop)
            for name, loop in named
            if re.fullmatch(kernel.file, loop.file)
            and re.search(kernel.function, name)
            and len(loop.multiply_adds) >= kernel.multiply_adds
        ]
        if not hot:
            yield (
                "",
                [
                    f"{compiler} {kernel.name}: no loop of {kernel.multiply_adds} or more multiply-adds in {kernel.file}"
                ],
            )
        for name, loop in hot:
            yield row(compiler, name, kernel, loop, machine)
            if kernel.turns:
                yield fetching_row(compiler, kernel, around_loop(text, loop), loop, machine)
    if machine == A64FX:  # a Neoverse divides in 10 cycles
        slow = [
            f"{compiler} {name}: {text}" for name, loop in named for text in slow_instructions(loop)
        ]
        yield f"{compiler:9} {len(loops)} innermost loops: {len(slow)} slow instructions", slow


def chunk_costs(text: str, tile: tuple[int, int]) -> tuple[float, float]:
    """Return the modelled cycles of the FP16 micro-kernel: (per step of k, per chunk: what is outside its k-loop, and add_chunk)."""
    rows, vectors = tile
    loops = innermost_loops(text)
    names = demangled([loop.function for loop in loops])
    step = next(
        loop
        for loop, name in zip(loops, names, strict=True)
        if re.search(rf"micro_kernel<.*HalfWords, {rows}>", name) and loop.multiply_adds
    )
    additions = [loop for loop, name in zip(loops, names, strict=True) if "add_chunk<true>" in name]
    add = max(additions, key=lambda loop: len(loop.body))  # the unrolled one
    widened = sum(i.mnemonic == "fcvt" for i in add.body)
    return cycles(step), cycles(outside_loops(text, step.function)) + cycles(
        add
    ) * 2 * rows * vectors / widened


def chunk_line(compiler: str, text: str, tile: tuple[int, int]) -> str:
    """Return the share of the FP16 peak by the length of a chunk."""
    step, per_chunk = chunk_costs(text, tile)
    peak = tile[0] * tile[1] / A64FX.pipes
    shares = ", ".join(
        f"{chunk}: {100 * chunk * peak / (chunk * step + per_chunk):.0f}" for chunk in CHUNKS
    )
    return f"{compiler:9} GEMM FP16 with {per_chunk:.0f} cycles per chunk, % of the FP16 peak by chunk: {shares}"


def bf16x3_line(
    compiler: str, text: str, machine: Machine, tile: tuple[int, int]
) -> tuple[str, list[str]]:
    """Return (line, faults) of the rate of --fp32-matmul bf16x3 over the FP32 loop's: six BFMMLAs for four FMLAs."""
    loops = [loop for loop in innermost_loops(text) if len(loop.multiply_adds) >= tile[0] * tile[1]]
    names = demangled([loop.function for loop in loops])

    def turn(pattern: str) -> float:
        return next(
            cycles(loop, machine)
            for loop, name in zip(loops, names, strict=True)
            if re.search(pattern, name)
        )

    parts = (
        turn(rf"quads_kernel<.*Bf16Pairs ?>, {tile[0]}>") * PARTIAL_MATMULS / 4
    )  # a turn is four k
    ratio = turn(rf"micro_kernel<.*FloatWords, {tile[0]}>") / parts
    line = f"{compiler:9} GEMM bf16x3: {ratio:.2f} of the FP32 loop's rate; the units allow {4 / PARTIAL_MATMULS:.2f}"
    slow = ratio < 0.9 * 4 / PARTIAL_MATMULS
    return line, [f"{line}: 90 % of that needed"] if slow else []


def machine_faults(machine: Machine, compilers: dict[str, str]) -> list[str]:
    """Print the loops of a machine's code and return the faults."""
    tile, steps = gemm_tuning(machine)
    wanted = hot_kernels(tile, steps) if machine == A64FX else matrix_kernels(tile, steps)
    print(
        f"{machine.name}, {machine.target}: model of LLVM 19 ({' '.join(machine.flags)}), all data in L1; not a measurement"
    )
    print(f"{'compiler':9} {'loop':60} {'FMAs':>5} {'instr.':>6} {'cycles':>7} {'of peak':>9}")
    found = []
    for name, cxx in compilers.items():
        for line, wrong in check(name, assembly(cxx, name, machine), wanted, machine):
            found += wrong
            print(line, flush=True) if line else None
        if machine in NEOVERSES and not found and shutil.which(MCA[0]):
            line, wrong = bf16x3_line(name, assembly(cxx, name, machine), machine, tile)
            found += wrong
            print(line, flush=True)
        if machine == A64FX and not found and shutil.which(MCA[0]):
            print(chunk_line(name, assembly(cxx, name), tile), flush=True)
    return found


def vector_cycles(wanted: VectorLoop, texts: dict[str, str]) -> tuple[str, list[str]]:
    """Return (line, faults) of an elementwise loop: its cycles a vector by compiler, and the larger over the smaller."""
    costs = {}
    reasons = []
    for compiler, text in texts.items():
        loop = hot_loop(text, wanted)
        if loop is None:
            reasons.append(
                f"{compiler} {wanted.name}: no loop with {wanted.marker} in {wanted.function}"
            )
            continue
        costs[compiler] = cycles(loop) / wanted.vectors_of(loop)
        reasons += [f"{compiler} {wanted.name}: {fault}" for fault in slow_instructions(loop)]
        if costs[compiler] > wanted.limit:
            reasons.append(
                f"{compiler} {wanted.name}: {costs[compiler]:.1f} cycles a vector, at most {wanted.limit:g} allowed"
            )
    apart = f"{max(costs.values()) / min(costs.values()):.2f}" if len(costs) > 1 else ""
    figures = "".join(
        f"{costs[compiler]:9.1f}" if compiler in costs else " " * 9 for compiler in texts
    )
    return f"{wanted.name:36}{figures} {wanted.limit:9g} {apart:>8}", reasons


def vector_faults(compilers: dict[str, str]) -> list[str]:
    """Print the elementwise loops' cycles and return the faults."""
    texts = {name: assembly(cxx, name, VECTOR_LOOPS) for name, cxx in compilers.items()}
    print(
        f"A64FX, cycles for a vector of 16 floats in the same model\n{'loop':36}{''.join(f'{name:>9}' for name in texts)} "
        f"{'at most':>9} {'apart':>8}"
    )
    found = []
    for wanted in LOOPS:
        line, wrong = vector_cycles(wanted, texts)
        found += wrong
        print(line, flush=True)
    return found


def check_tiles(compiler: str, text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (line, faults) of every loop over k of whole tiles in the code for AMX, alone and with what it fetches."""
    for loop in amx_loops.tile_loops(text):
        function = demangled([loop.loop.function])[0].split("(")[0].removeprefix("void ")
        if function.startswith("tiles_kernel") and function.endswith(
            ", 16>"
        ):  # at the bottom of a matrix: a tile of A for two of B
            continue
        reasons = amx_loops.faults(loop)
        parts = [(function, loop.loop.body)]
        if function.startswith("tiles_kernel"):
            parts.append((f"{function} with what is fetched", loop.everything.body))
            if amx_loops.share(loop.everything.body) < amx_loops.MIN_SHARE:
                reasons.append("what is fetched takes longer than the matmuls of tiles")
        for name, body in parts:
            products = amx_loops.count(body, *amx_loops.DOTS)
            loads = amx_loops.count(body, *amx_loops.LOADS)
            yield (
                (
                    f"{compiler:9} {name:60.60} {products:8} {loads:5} {len(body):6} {amx_loops.cycles(body):7.1f} "
                    f"{100 * amx_loops.share(body):8.1f}%"
                ),
                [f"{compiler} {name}: {reason}" for reason in reasons],
            )
            reasons = []


def amx_faults(compilers: dict[str, str]) -> list[str]:
    """Print the loops over k of the code for AMX and return the faults."""
    print(
        f"{AMX.name}, {AMX.target}: cycles by Intel's published throughput, all data in L1; not a measurement"
    )
    print(
        f"{'compiler':9} {'loop':60} {'matmuls':>8} {'loads':>5} {'instr.':>6} {'cycles':>7} {'of peak':>9}"
    )
    found = []
    for name, cxx in compilers.items():
        text = assembly(cxx, name, AMX)
        seen = set()
        for line, wrong in check_tiles(name, text):
            found += wrong
            seen |= {kernel for kernel in TILE_KERNELS if kernel in line}
            print(line, flush=True)
        found += [
            f"{name}: no loop over k in {kernel}" for kernel in TILE_KERNELS if kernel not in seen
        ]
        ratio = min(
            (
                amx_loops.fp32_ratio(loop.everything.body)
                for loop in amx_loops.tile_loops(text)
                if SPLIT_TILES in demangled([loop.loop.function])[0]
            ),
            default=0.0,
        )
        print(f"{name:9} GEMM bf16x3: {ratio:.2f} of the FP32 peak of the vector units", flush=True)
        if ratio < MIN_BF16X3:
            found.append(f"{name} GEMM bf16x3: {ratio:.2f} of the FP32 peak, {MIN_BF16X3} needed")
    return found


def arm_faults(compilers: dict[str, str]) -> list[str]:
    """Print the loops of the code for ARM and return the faults."""
    found = [
        fault for machine in (A64FX, *NEOVERSES) for fault in machine_faults(machine, compilers)
    ]
    return found + (vector_faults(compilers) if shutil.which(MCA[0]) else [])


def main() -> int:
    """Check one processor's machine code and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="codegen", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("processor", choices=("arm", "amx"))
    processor = parser.parse_args().processor
    compilers, needed, check_all = {
        "arm": (COMPILERS, GCC, arm_faults),
        "amx": (AMX_COMPILERS, "g++", amx_faults),
    }[processor]
    if not shutil.which(needed) or processor == "amx" and platform.machine() != "x86_64":
        print(
            f"{processor}-codegen: not run: no {needed}"
            + (" (make arm-env)" if processor == "arm" else " for x86-64")
        )
        return 3
    there = {name: cxx for name, cxx in compilers.items() if shutil.which(cxx.split()[0])}
    for name in compilers.keys() - there.keys():
        print(f"{name}: not checked: no {compilers[name].split()[0]} (make arm-env)")
    found = check_all(there)
    for fault in found:
        print(f"FAULT {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
