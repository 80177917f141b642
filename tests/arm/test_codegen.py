"""The gate on hot loops: its parser on written-out loops, good and bad, and the real kernels under both compilers."""

import itertools
import platform
import re
import shutil
import subprocess
import sys

import pytest

from tests.arm import builds
from tools import amx_loops, arm_vector_loops, codegen
from tools.asm_loops import (
    faults,
    innermost_loops,
    slow_instructions,
)

pytestmark = pytest.mark.arm

needs_model = pytest.mark.skipif(not shutil.which(codegen.MCA[0]), reason=f"needs {codegen.MCA[0]}")
ACCUMULATORS = 24
CLEAN = [f"fmla z{i}.s, p0/m, z30.s, z31.s" for i in range(ACCUMULATORS)]
LOADS = ["ld1rw z30.s, p0/z, [x1]", "ld1w z31.s, p0/z, [x2]", "add x1, x1, 4"]


def function(
    body,
    name="_ZN2fm6sve51212micro_kernelINS0_10FloatWordsELi12EEEvlPKNT_4WordEPKfPflb",
    file="gemm_micro.h",
):
    """A function with `body` as its inner loop and a store-only loop around it, as a compiler writes it."""
    lines = [
        f'.file 1 "kernels_sve" "{file}" md5 0x0',
        ".text",
        f".type {name}, %function",
        f"{name}:",
        "mov x3, 0",
        ".L2:",
        ".loc 1 7 3",
        ".L3:",
        *body,
        "subs x0, x0, 1",
        "b.ne .L3 // again",
        "str z0, [x4]",
        "bne .L2",
        "ret",
        f".size {name}, .-{name}",
    ]
    return "\n".join("\t" + line for line in lines)


def only_loop(body, **names):
    (loop,) = innermost_loops(function(body, **names))
    return loop


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("str z3, [sp, #2, mul vl]", "an accumulator in memory"),
        ("ldr z3, [x29, #-1, mul vl]", "an accumulator in memory"),
        ("st1w { z3.s }, p0, [x5]", "a store in the loop"),
        ("fmla z24.s, z30.s, z7.s[2]", "by element"),
        ("insr z31.s, s2", "one by one"),
        ("fdiv z25.s, p0/m, z25.s, z26.s", "98 cycles"),
        ("fsqrt z25.s, p0/m, z26.s", "98 cycles"),
    ],
)
def test_a_bad_instruction_is_named(bad, message):
    (fault,) = faults(only_loop([*LOADS, *CLEAN, bad]))
    assert message in fault and bad in fault
    assert slow_instructions(only_loop([*LOADS, *CLEAN, "fdiv s1, s2, s3"])) == [], (
        "a division of scalars, outside the vectors"
    )


def test_missing_loop_is_a_fault():
    """A renamed file or a loop that the compiler no longer keeps in registers must not pass unseen."""
    kernels = codegen.hot_kernels((12, 2), 8)
    for text in (
        function(LOADS + CLEAN[:8]),
        function(LOADS + CLEAN, file="other.h"),
        function(LOADS + CLEAN, name="f"),
    ):
        wrong = [
            fault for _, reasons in codegen.check("GCC", text, kernels[:1]) for fault in reasons
        ]
        assert wrong == ["GCC GEMM k-loop: no loop of 24 or more multiply-adds in gemm_micro.h"]


@needs_model
def test_the_model_sees_a_slow_loop():
    kernel = codegen.hot_kernels((12, 2), 8)[0]
    fast = only_loop(LOADS + CLEAN)
    slow = only_loop(LOADS + CLEAN + ["mov z26.d, z27.d"] * 60)
    assert codegen.row("GCC", "f", kernel, fast)[1] == []
    assert "of the peak in the model, 98 % needed" in codegen.row("GCC", "f", kernel, slow)[1][0]


EXP = ["fexpa z1.s, z2.s", *(f"fmul z{i}.s, z{i}.s, z30.s" for i in range(3, 20))]
GELU = arm_vector_loops.VectorLoop("GELU", "gelu_alone", 26)


def elementwise(*bodies):
    return "\n".join(
        function(body, name="gelu_alone", file="gelu.h").replace(".L", f".L{i}")
        for i, body in enumerate(bodies)
    )


@needs_model
def test_an_elementwise_loop_is_held_to_its_cycles():
    slow = [*EXP, *["fadd z20.s, z20.s, z30.s"] * 4]
    texts = {"GCC": elementwise(EXP * 2), "Clang": elementwise(slow)}
    line, faults_found = codegen.vector_cycles(GELU, texts)
    assert len(faults_found) == 1 and re.fullmatch(
        r"Clang GELU: 3\d\.\d cycles a vector, at most 26 allowed", faults_found[0]
    )
    assert float(line.split()[-1]) > 2
    texts["Clang"] = elementwise(["add x1, x1, 4"])
    assert codegen.vector_cycles(GELU, texts)[1] == ["Clang GELU: no loop with fexpa in gelu_alone"]


TILE_LOADS = [
    "tileloadd (%rsi,%rbx,1), %tmm4",
    "tileloadd (%rdx,%rcx,1), %tmm6",
    "tileloadd (%rdi,%rcx,1), %tmm7",
    "tileloadd (%r9,%rbx,1), %tmm5",
]
PRODUCTS = [
    f"tdpbf16ps %tmm{b}, %tmm{a}, %tmm{c}"
    for c, (a, b) in enumerate([(4, 6), (4, 7), (5, 6), (5, 7)])
]


def tiles_function(body, fetched=()):
    """tiles_kernel<TilePairs, 32> as a compiler writes it: data after the loop, and the sums are stored after it."""
    lines = [
        '.file 1 "tiles.h"',
        ".type f, @function",
        "f:",
        "tilezero %tmm0",
        ".L3: # in Loop",
        "testq %rax, %rax",
        "jne .L9",
        ".L4:",
        *body,
        "addq $2048, %rsi",
        "decq %r8",
        "jne .L3",
        "tilestored %tmm0, (%rdi,%rcx,1)",
        "ret",
        ".L9:",
        *fetched,
        "jmp .L4",
        ".size f, .-f",
    ]
    return "\n".join("\t" + line for line in lines)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            [*TILE_LOADS, *PRODUCTS, "tilestored %tmm0, (%rax,%rbx,1)"],
            "a tile is stored in the loop",
        ),
        (["tileloadd 64(%rsp,%rcx,1), %tmm4", *TILE_LOADS[1:], *PRODUCTS], "a tile on the stack"),
        ([*TILE_LOADS, *PRODUCTS[:3]], "3 tile matmuls for 4 tile loads"),
        (
            [*TILE_LOADS[:3], *PRODUCTS[:1] * 3],
            "30.8 % of the matrix unit's rate in the model",
        ),  # one sum waits for itself
    ],
)
def test_a_loop_that_wastes_the_matrix_unit_is_named(body, message):
    (loop,) = amx_loops.tile_loops(tiles_function(body))
    assert any(message in fault for fault in amx_loops.faults(loop))


def gate(machine):
    """Return the gate's output after a pass."""
    words = [sys.executable, "-m", "tools.codegen", machine]
    done = subprocess.run(words, cwd=builds.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ for x86-64"
)
def test_kernels_for_amx_pass_the_gate():
    printed = gate("amx")
    assert all(f"{name} with what is fetched" in printed for name in codegen.TILE_KERNELS)
    assert printed.count("block_gradients") >= 3


@builds.needs_compiler
@pytest.mark.full
def test_kernels_pass_the_gate():
    printed = gate("arm")
    print(printed)
    compilers = [name for name, cxx in codegen.COMPILERS.items() if shutil.which(cxx.split()[0])]
    for compiler, name in itertools.product(compilers, ("BF16", "bf16x3")):
        lines = re.findall(rf"^{compiler} +GEMM {name} k-loop:", printed, re.MULTILINE)
        assert len(lines) == len(codegen.NEOVERSES)


@builds.needs_compiler
@needs_model
def test_a_chunk_of_fp16_sums_costs_a_share_of_the_peak():
    """From the real kernels: a step takes half a cycle per accumulator, a chunk less than its steps from 32 on."""
    text = codegen.assembly(codegen.GCC, "GCC 12")
    step, per_chunk = codegen.chunk_costs(text, (12, 2))
    assert step == pytest.approx(12, rel=0.02)
    assert 24 < per_chunk < 32 * step
    line = codegen.chunk_line("GCC 12", text, (12, 2))
    shares = [int(share) for share in re.findall(r"\d+: (\d+)", line)]
    assert len(shares) == len(codegen.CHUNKS) and shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 100
