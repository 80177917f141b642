"""Kernels cross-compiled for aarch64 and run under qemu-user at each vector length, without Python there.

qemu's A64FX refuses instructions that the A64FX lacks, so no SVE2 or BF16 instruction slipped in.
"""

import subprocess

import pytest

from fugaku_megatron.host import kernels
from tests.arm import builds

pytestmark = [pytest.mark.arm, builds.needs_compiler]

CHECKERS = sorted((builds.ROOT / "tests" / "arm").glob("check_*.cc"))
# Of a CPU with BF16 the builds without are run too: a user may choose them. The portable one, which knows no vector length, has the
# same instructions on every CPU: it is run on the one that this is for, and on the one that has nothing else.
BUILT_FOR = {
    "a64fx": {"portable", "sve512"},
    "a64fx,sve512=off": {"sve256"},
    "max,sve128=on,sve256=off": {"sve128", "sve128bf16"},
    "max,sve-default-vector-length=32": {"sve256", "sve256bf16"},
    "cortex-a57": {"portable"},
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The static checkers with every aarch64 target."""
    objects = builds.Objects(builds.ROOT / "build")
    folder = tmp_path_factory.mktemp("static")
    return [objects.link(source, folder / source.stem, "-static") for source in CHECKERS]


@pytest.fixture(scope="module")
def printed(programs):
    """Output of each checker, by CPU; every run must succeed."""
    results = {}
    for cpu, targets in BUILT_FOR.items():
        runs = [builds.emulate(cpu, program, *({"portable"} - targets)) for program in programs]
        results[cpu] = [(run.returncode, run.stdout + run.stderr) for run in runs]
    return results


@pytest.mark.parametrize(("cpu", "targets"), BUILT_FOR.items())
def test_agrees_with_reference_under_emulation(printed, cpu, targets):
    for code, text in printed[cpu]:
        assert code == 0, text
        agreeing = {
            line.split()[0]
            for line in text.splitlines()
            if line.endswith("agrees with the reference")
        }
        # Exactly the build of this vector length: a longer or shorter one would give wrong numbers silently.
        assert agreeing == targets, text


def test_builds_for_another_vector_length_or_with_bf16_are_refused(printed):
    for cpu, target in (
        ("a64fx", "sve256"),
        ("a64fx,sve512=off", "sve512"),
        ("cortex-a57", "sve512"),
    ):
        for _, text in printed[cpu]:
            assert (
                f"{target} not run: this CPU has no SVE of {target.removeprefix('sve')} bits"
                in text.splitlines()
            )
    for _, text in printed["a64fx,sve512=off"]:
        assert "sve256bf16 not run: this CPU has no svebf16" in text.splitlines()


@pytest.mark.full
@pytest.mark.parametrize("target", ["sve512", pytest.param("amx_emulated", marks=pytest.mark.slow)])
def test_no_memory_error_or_undefined_behaviour(tmp_path, target):
    arm = target.startswith("sve")
    if not arm and target not in kernels.runnable_targets(emulated=True):
        pytest.skip(f"this CPU does not run {target}")
    # Expensive optimizations: without them GCC forms no fused multiply-adds, on which the accuracy of exp rests.
    flags = (
        "-O1 -fexpensive-optimizations -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    )
    # One build alone: with sanitizers each takes long to compile.
    objects = builds.Objects(tmp_path, arm, CXXFLAGS=flags, KERNEL_TARGETS=target)
    for source in CHECKERS:
        program = objects.link(source, tmp_path / source.stem, *flags.split())
        if arm:
            run = builds.emulate(
                "a64fx",
                program,
                QEMU_LD_PREFIX="/usr/aarch64-linux-gnu",
                ASAN_OPTIONS="detect_leaks=0",
            )
        else:
            run = subprocess.run(
                [program], capture_output=True, text=True, env={"OMP_NUM_THREADS": "3"}
            )
        assert run.returncode == 0, run.stdout + run.stderr
        assert f"{target} agrees with the reference" in run.stdout
