"""tools/kernel_driver: every op has the reference's checksum, here and on the emulated A64FX. Built from existing objects."""

import os
import re
import subprocess
import sys

import pytest

from fugaku_megatron.costs.attention import ATTENTION_BACKWARD_SHARE, causal_attention_flops
from fugaku_megatron.host import kernels
from tests.arm import builds

pytestmark = pytest.mark.arm

# By the number of a shape's numbers.
SIZES = {
    1: "1000",
    2: "17 130",
    3: "6 5 70",
    4: "40 1 2 24",
    5: "8 4 2 12 24",
    6: "40 1 4 2 24 21",
}
# Of sizes that depend on each other, or have a limit; the formula of states counts whole segments.
OWN_SIZES = {
    "attention_forward": "40 1 216 4 28 24 21",
    "attention_backward": "40 1 216 4 28 24 21",
    "attention_part_forward": "40 60 1 216 4 28 24 70 10",
    "attention_part_backward": "40 60 1 216 4 28 24 70 10",
    "attention_decode": "8 216 4 28 24 24",
    "quantize_q8": "17 128",
    "dequantize_q8": "17 128",
    "delta_rule_forward": "256 1 46 2 5 18",
    "delta_rule_backward": "256 1 46 2 5 18",
    "delta_rule_decode": "3 46 2 5 18",
    "convolution_forward": "40 2 24 4",
    "convolution_backward": "40 2 24 4",
    "convolution_decode": "6 70 4",
}
MATMULS = ("gemm_nt", "gemm_nt_packed", "gemm_nt_bias_gelu", "gemm_nn", "gemm_tn")


@pytest.fixture(scope="module")
def native():
    return [build()]


@pytest.fixture(scope="module")
def arm():
    return [builds.QEMU, "-cpu", "a64fx", build("aarch64")]


def build(*machine):
    environment = {
        k: v for k, v in os.environ.items() if k not in ("CXX", "CXXFLAGS", "TARGET_CXX")
    }
    command = [sys.executable, "-m", "tools.build_driver", *machine]
    done = subprocess.run(command, cwd=builds.ROOT, env=environment, capture_output=True, text=True)
    if "cannot find -l" in done.stderr:
        pytest.skip("no static libraries of the C and C++ run time here")
    assert done.returncode == 0, done.stdout + done.stderr
    return str(builds.ROOT / done.stdout.splitlines()[-1])


def run(program, command):
    words = [*program, *command.split()]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def listed(program):
    """Return (op, kernel, sizes) from every line in the program's own list."""
    return re.findall(
        r"^  (\w+) +(\w+) +([A-Z_ ]+?) +default", run(program, "").stdout, re.MULTILINE
    )


def ops(program):
    """Return the number of sizes that each op takes."""
    return {name: len(sizes.split()) for name, _, sizes in listed(program)}


def checksum(program, command, target=""):
    done = run(program, f"{command} --target {target}" if target else command)
    assert done.returncode == 0, done.stderr
    return float(re.search(r"^checksum (\S+)$", done.stdout, re.MULTILINE)[1])


def test_every_kernel_of_the_table_has_an_op(native):
    """Except kernels that move nothing, and the plain matmul, from which the layers' three are made."""
    rows = {row["name"]: row for row in kernels.table.rows()}
    moving = {name for name, row in rows.items() if row["bytes"] != "0"}
    assert {kernel for _, kernel, _ in listed(native)} >= moving - {"gemm"}
    for op, kernel, sizes in listed(native):
        assert sizes.lower().split() == rows[kernel]["sizes"], op


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_bytes_of_the_table_are_those_of_the_tensors(native, dtype):
    for name, numbers in ops(native).items():
        sizes = OWN_SIZES.get(name) or SIZES[numbers]
        printed = run(native, f"{name} {sizes} --dtype {dtype}").stdout
        moved, tensors = re.search(r"^bytes (\d+) of tensors (\d+)", printed, re.MULTILINE).groups()
        # attention_part does not read the keys in the tensor of its queries, and adds to gradients
        assert moved == tensors or "attention_part" in name, printed


@pytest.mark.parametrize(
    ("op", "sizes", "share"),
    [
        ("attention_forward", (64, 2, 192, 6, 16, 16, 20), 1.0),
        ("attention_backward", (64, 2, 144, 3, 16, 16, 64), ATTENTION_BACKWARD_SHARE),
    ],
)
def test_flops_of_attention_are_those_of_costs(native, op, sizes, share):
    s, b, _, heads, _, d, window = sizes
    printed = run(native, f"{op} {' '.join(map(str, sizes))}").stdout
    flops = float(re.search(r"flops (\d+)$", printed, re.MULTILINE)[1])
    assert flops == share * causal_attention_flops(b * heads, s, d, window)


@pytest.fixture(params=["native", pytest.param("arm", marks=builds.needs_compiler)])
def program(request):
    return request.getfixturevalue(request.param)


def test_every_op_agrees_with_the_reference(program):
    for name, numbers in ops(program).items():
        if not name.startswith("fma_peak"):  # its checksum is the number of operations
            command = f"{name} {OWN_SIZES.get(name) or SIZES[numbers]} --dtype f32"
            expected = pytest.approx(checksum(program, command, "reference"), rel=1e-4, abs=1e-3)
            assert checksum(program, command) == expected, command


@builds.needs_compiler
@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_norms_of_one_row_and_of_blocks_of_rows_take_the_whole_precision(arm, norm, rows):
    """A block of rows shares one reciprocal square root: an 8-bit estimate, 0.2 % off by itself, and two Newton steps."""
    command = f"{norm} {rows} 768"
    exact = checksum(arm, command, "reference")
    assert checksum(arm, command) == pytest.approx(exact, rel=1e-6, abs=2e-5)


@builds.needs_compiler
@pytest.mark.parametrize("command", ["gemm_nt 12 64 33", "activate 5 70"])
def test_both_machines_generate_the_same_data(native, arm, command):
    assert checksum(native, command, "reference") == checksum(arm, command, "reference")


@builds.needs_compiler
@pytest.mark.parametrize("cpu", ["cortex-a57", "max,sve-default-vector-length=256"])
def test_a_fall_back_to_the_baseline_is_said(arm, cpu):
    other = [arm[0], "-cpu", cpu, arm[-1]]
    done = run(other, "exp 100")
    assert "target portable" in done.stdout
    assert (
        done.stderr
        == "kernel_driver: runs target portable, the slowest, without sve512: this CPU has no SVE of 512 bits\n"
    )
    assert run(other, "exp 100 --target portable").stderr == ""
    own = run(arm, "exp 100")
    assert "target sve512" in own.stdout and own.stderr == ""


def test_half_precision_and_sums_in_fp16_are_choices(native, program):
    single, half = (checksum(native, f"activate 8 64 --dtype {dtype}") for dtype in ("f32", "bf16"))
    assert half != single and half == pytest.approx(single, rel=2e-2)
    target = "portable" if program is native else ""
    for name in MATMULS:
        command = f"{name} 29 131 300 --dtype f16"
        chunks = f"{command} --fp16-chunk 24"
        chunked = checksum(program, chunks, "reference")
        assert checksum(program, command, "reference") != chunked
        got = checksum(program, chunks, target)
        assert got == pytest.approx(chunked, rel=1e-5, abs=1e-3), name


def test_float32_in_bf16_parts_is_a_choice(native, arm):
    def check(program, target):
        for name in MATMULS:
            command = f"{name} 29 131 300"
            exact = checksum(program, command, "reference")
            split = checksum(program, f"{command} --dtype bf16x3", target)
            assert split == pytest.approx(exact, rel=1e-5, abs=1e-3), (target, name)

    for target in kernels.runnable_targets(emulated=True):
        if target.startswith(("avx512bf16", "amx")):
            check(native, target)
    check([builds.QEMU, "-cpu", "max,sve-default-vector-length=32", arm[-1]], "sve256bf16")


def test_int8_is_a_choice(program):
    """Sums of INT8 are exact, so that every target has the reference's numbers."""
    for name in MATMULS:
        command = f"{name} 29 131 300 --dtype int8"
        quantized = checksum(program, command, "reference")
        assert quantized != checksum(program, command.removesuffix(" --dtype int8"), "reference")
        assert checksum(program, command) == pytest.approx(quantized, rel=1e-6, abs=1e-4), name


def test_times_are_printed_on_request(native):
    assert "seconds" not in run(native, "gemm_panel").stdout
    printed = run(native, "gemm_panel --repeat 3 --threads 1").stdout
    assert "of 3 runs (no meaning under an emulator)" in printed and "GFLOP/s best" in printed


@pytest.mark.parametrize(
    "command, message",
    {
        "gem": "unknown op 'gem'; known: ",
        "gemm_nt 1 2": "gemm_nt: expected 3 numbers (M N K), got 2",
        "gemm_nt 1 2 x": "shape: expected a number, got 'x'",
        "exp --dtype f64": "--dtype: expected f32, bf16, f16, bf16x3 or int8, got 'f64'",
        "exp --dtype int8": "--dtype int8: not for exp",
        "exp --target sve3": "unknown kernel target 'sve3'; known: reference",
        "exp --loud 1": (
            "unknown option --loud; known: --target --dtype --fp16-chunk --threads --repeat"
        ),
        "activate --dtype f16 --fp16-chunk 8": "--fp16-chunk: not for activate",
        "gemm_tn --fp16-chunk 8": "--fp16-chunk: expected --dtype f16, got f32",
        "exp --dtype bf16x3": "--dtype bf16x3: not for exp",
        "gemm_nt --dtype bf16x3 --target portable": (
            "--dtype bf16x3: target portable has no BF16 arithmetic"
        ),
        "exp --repeat": "--repeat: expected a value",
    }.items(),
)
def test_mistakes_are_one_line(native, command, message):
    done = run(native, command)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"kernel_driver: {message}") and done.stderr.count("\n") == 1
