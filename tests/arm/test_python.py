"""ARM Python under qemu as an A64FX: the extension's own tests, and training with the same losses as on this machine."""

import json
import os
import subprocess
import sys

import pytest

from tests.arm import builds
from tests.recorded import curves

pytestmark = [pytest.mark.arm, builds.needs_python]

PROGRAM = builds.ROOT / "tests" / "arm" / "train_small.py"
KERNEL_TESTS = str(builds.ROOT / "tests" / "kernels")
# Left out: millions of elements, the portable build (test_static.py runs it), what reads sources only, the scalar references and
# the statistics of random numbers, which this machine's own tests hold and to which the kernels are compared here, what starts
# Python again or imports torch._dynamo, which costs 20 s each, numbers of threads, which depend neither on instructions nor on the
# length of vectors, and the symbols of objects, which make test-arm reads on this machine.
TOO_SLOW = (
    "test_table",
    "test_bench",
    "portable",
    "whole_range",
    "long_sequence",
    "positive_numbers",
    "from_every_half",
    "adamw_is_torchs",
    "environment_chooses",
    "shared_with_torch",
    "reference_is_the_definition",
    "is_the_slope",
    "is_standard_normal",
    "at_the_right_rate",
    "keeps_its_mean",
    "[reference",
    "-reference",
    "same_bits_for_any",
    "for_any_threads",
    "threads_and_packing",
    "threads_change_no_bit",
    "stay_in_their_namespace",
)


def run(output, *command, timeout=600, **environment):
    """Run train_small.py; return the JSON that it wrote, and its printed text."""
    # One thread: another test shares the cores. Those of kernels set one to four threads themselves.
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(builds.ROOT),
        **environment,
    }
    variables.pop("FUGAKU_MEGATRON_TARGET", None)
    done = builds.run_or_skip(
        [*command[:-1], str(PROGRAM), str(output), *command[-1]],
        timeout,
        cwd=builds.ROOT,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert output.exists(), done.stdout[-4000:]
    return json.loads(output.read_text()), done.stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses and tokens on this machine."""
    return run(tmp_path_factory.mktemp("x86") / "losses.json", sys.executable, [])[0]


@pytest.fixture(scope="module")
def curve(request):
    """This run's share of the recorded curves: one."""
    names = list(curves.CURVES)
    return names[request.config.getoption("--share")[0] % len(names)]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory, request, curve):
    """One process on the emulated A64FX: this run's share of the kernel tests, then training."""
    output = tmp_path_factory.mktemp("arm") / "losses.json"
    share = "{}/{}".format(*request.config.getoption("--share"))
    chosen = ["-k", f"not ({' or '.join(TOO_SLOW)})", "--share", share]
    return run(output, str(builds.PYTHON), [KERNEL_TESTS, *chosen], CURVE=curve)


def assert_same(losses, expected, iterations=10):
    assert len(losses) == len(expected) == iterations
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0], "the model learns nothing, so equal losses say nothing"


def test_kernels_pass_their_tests(emulated):
    result, printed = emulated
    print(printed)
    assert (result["machine"], result["target"]) == ("aarch64", "sve512")
    assert result["pytest"] == 0, printed[-4000:]
    assert result["outcomes"]["passed"] >= 100, result["outcomes"]


def test_losses_and_tokens_are_those_of_this_machine(emulated, expected):
    result = emulated[0]
    for name in ("alone", "documents"):
        assert_same(result["losses"][name], expected["losses"][name])
    assert result["losses"]["documents"] != pytest.approx(result["losses"]["alone"], rel=1e-3)
    assert_same(result["losses"]["llama"], expected["losses"]["llama"], iterations=3)
    tokens = result["tokens"]["llama"]
    assert len(tokens) == 5 and tokens == expected["tokens"]["llama"]


def test_the_beginning_of_a_recorded_curve_is_repeated(emulated, curve):
    before = curves.recorded()[curve]
    found = emulated[0]["losses"]["curve"]
    assert len(found) == 5
    assert curves.difference(found, before.losses[: len(found)]) <= before.tolerance


@pytest.mark.slow
def test_bf16_of_sve_is_as_near_to_fp32_as_that_of_this_machine(tmp_path, expected):
    """BFMMLA and BFDOT on an emulated CPU with 256-bit SVE; x86-64's own, if this machine has it."""
    cpu = "max,sve-default-vector-length=32"
    result, _ = run(tmp_path / "losses.json", str(builds.PYTHON), [], QEMU_CPU=cpu)
    assert result["target"] == "sve256bf16"
    ours = result["losses"]["bf16"]
    exact = result["losses"]["alone"]
    theirs = expected["losses"]["bf16"]
    assert ours == pytest.approx(theirs, rel=1e-2) and ours != pytest.approx(theirs, rel=1e-7)
    distances = [max(abs(a - b) / b for a, b in zip(losses, exact)) for losses in (ours, theirs)]
    print(
        f"largest relative distance from FP32: {distances[0]:.1e}, on this machine {distances[1]:.1e}"
    )
    assert distances[0] <= 1.5 * distances[1] + 1e-3


def test_two_ranks_train_over_open_mpi(tmp_path, expected):
    """This machine's mpirun starts emulated ranks with arm64 Open MPI, the base of Fugaku's MPI."""
    root = {f"OMPI_ALLOW_RUN_AS_ROOT{suffix}": "1" for suffix in ("", "_CONFIRM")}
    command = [builds.MPIRUN, "--oversubscribe", "-n", "2", str(builds.PYTHON)]
    result, _ = run(tmp_path / "losses.json", *command, [], **root)
    assert (result["machine"], result["ranks"]) == ("aarch64", 2)
    for layout in ("dp2", "tp2"):
        assert_same(result["losses"][layout], expected["losses"]["alone"])
    assert_same(result["losses"]["documents"], expected["losses"]["documents"])


@pytest.mark.slow
def test_the_report_checks_the_kernels(tmp_path):
    """The rates are the emulator's, and the report says so; MPI is not needed."""
    report = f"-m fugaku_megatron report --only kernels --output {tmp_path}/a64fx.json"
    command = [str(builds.PYTHON), *report.split()]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(builds.ROOT)}
    variables.pop("FUGAKU_MEGATRON_TARGET", None)
    done = builds.run_or_skip(
        command, 600, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    kernels = json.loads((tmp_path / "a64fx.json").read_text())["sections"]["kernels"]
    assert kernels["target"] == "sve512" and kernels["shrunk"] and len(kernels["checks"]) > 35
    assert all(row["good"] for row in kernels["checks"]), kernels["checks"]
