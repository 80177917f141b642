"""The extension's machinery: targets, threads, checks of arguments."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import refuses

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).resolve().parents[2]


def run_python(code, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT
    )


def test_targets_say_why_they_cannot_run():
    rows = kernels.targets()
    before = kernels.active()
    left_out = [row["name"] for row in rows if row["reason"].startswith("left out of this build")]
    assert rows[0]["name"] == "reference" and (
        "portable" in left_out or rows[1]["name"] == "portable"
    )
    assert before == os.environ.get("FUGAKU_MEGATRON_TARGET", kernels.runnable_targets()[-1])
    for row in rows:
        assert row["runnable"] == (row["reason"] == "") and (
            row["compiled"] or not row["runnable"]
        ), row
        if not row["runnable"]:
            with pytest.raises(
                RuntimeError, match=f"{row['name']} cannot run here: {row['reason']}"
            ):
                kernels.use(row["name"])
    with pytest.raises(
        ValueError, match="unknown kernel target 'avx1024'; known: reference, portable, .*sve512"
    ):
        kernels.use("avx1024")
    with pytest.raises(KeyError), kernels.target("reference"):
        assert kernels.active() == "reference"
        raise KeyError
    assert kernels.active() == before


def test_an_emulated_target_is_never_the_default():
    """Not even if the CPU runs it: it is for tests."""
    emulated = set(kernels.runnable_targets(emulated=True)) - set(kernels.runnable_targets())
    assert kernels.active() not in emulated and all(name.endswith("_emulated") for name in emulated)
    flags = Path("/proc/cpuinfo").read_text().split()
    built = next(row["compiled"] for row in kernels.targets() if row["name"] == "amx_emulated")
    assert emulated == ({"amx_emulated"} if built and "avx512_bf16" in flags else set())


def test_amx_runs_where_the_cpu_and_the_system_have_it():
    row = next(row for row in kernels.targets() if row["name"] == "amx")
    if not row["compiled"]:
        pytest.skip(row["reason"])
    if "amx_bf16" in Path("/proc/cpuinfo").read_text().split():
        assert row["reason"] == "" or row["reason"].startswith(
            "the operating system refuses AMX tiles: "
        )
    else:
        assert re.fullmatch("this CPU has no (avx|amx).*", row["reason"])


def test_the_start_up_line_says_what_the_system_refuses(monkeypatch):
    assert kernels.instruction_set().split("; ")[0] == kernels.active()
    refusal = "the operating system refuses AMX tiles: not permitted"
    reasons = {
        kernels.active(): "",
        "amx next": refusal,
        "other": "not in this build, it is for s390x",
    }
    monkeypatch.setattr(
        kernels,
        "targets",
        lambda: [{"name": name, "reason": reason} for name, reason in reasons.items()],
    )
    assert kernels.instruction_set() == f"{kernels.active()}; amx next is not used: {refusal}"
    monkeypatch.setattr(kernels, "active", lambda: "amx_emulated")
    assert kernels.instruction_set() == "amx_emulated"


def test_environment_chooses_the_target_and_torch_is_imported_first():
    code = "from fugaku_megatron.host import kernels; print(kernels.active())"
    assert run_python(code, FUGAKU_MEGATRON_TARGET="portable").stdout == "portable\n"
    for run, error in (
        (
            run_python(code, FUGAKU_MEGATRON_TARGET="sve3"),
            "ValueError: environment variable FUGAKU_MEGATRON_TARGET: unknown kernel target 'sve3'; known: reference,",
        ),
        (run_python("import fugaku_megatron._kernels"), "ImportError:"),
    ):
        assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith(error)


THREADS_CODE = """
import os, re, torch
def threads(): return len(os.listdir('/proc/self/task'))
torch.set_num_threads(3)
a = torch.randn(512, 512)
a @ a; a.add_(1); torch.nn.functional.gelu(a)
alone = threads()
from fugaku_megatron.host import kernels
x = torch.ones(1 << 22)
assert kernels.num_threads() == 3
assert kernels.squared_norm(x) == 1 << 22
kernels.elementwise('exp', x, x)
a @ a
print(alone, threads())
print(*sorted(set(re.findall(r'\\S+/lib[gi]?omp[^/\\s]*', open('/proc/self/maps').read()))))
"""


def test_threads_are_shared_with_torch():
    run = run_python(THREADS_CODE)
    assert run.returncode == 0, run.stderr
    counts, libraries = run.stdout.splitlines()
    alone, both = map(int, counts.split())
    assert both == alone >= 3
    assert len(libraries.split()) == 1, libraries


def test_thread_setting_is_torchs(with_threads):
    with_threads(3)
    assert torch.get_num_threads() == kernels.num_threads() == 3
    torch.set_num_threads(1)
    assert kernels.num_threads() == 1
    with pytest.raises(ValueError, match="threads: expected at least 1, got 0"):
        with_threads(0)


def test_kernels_run_from_several_python_threads():
    x = torch.arange(200_000, dtype=torch.float32)
    expected = kernels.squared_norm(x)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: kernels.squared_norm(x), range(200))) == [expected] * 200


def test_target_flags_stay_in_their_namespace():
    """The linker could pick a weak symbol outside its target's namespace for CPUs that lack the instructions."""
    objects = sorted((ROOT / "build").glob("kernels-*/target_*.o"))
    if not objects:
        pytest.skip("the objects of the build are gone")
    names = sorted(
        (row["name"] for row in kernels.targets()), key=len, reverse=True
    )  # avx512bf16 before avx512
    for path in objects:
        symbols = subprocess.run(
            ["nm", "-C", str(path)], capture_output=True, text=True, check=True
        ).stdout
        namespace = f"fm::{re.match('target_(' + '|'.join(names) + ')', path.stem)[1]}::"
        assert "_GLOBAL__sub_I" not in symbols, (
            f"{path}: a constructor would run these instructions on every CPU"
        )
        leaks = [
            line
            for line in symbols.splitlines()
            if re.search(r"^\S+ [WVuTBD] ", line) and namespace not in line
        ]
        assert leaks == [], path


def test_views_and_parameters_are_accepted(target):
    buffer = torch.arange(64, dtype=torch.float32)
    assert kernels.squared_norm(buffer[1:18]) == float((buffer[1:18] ** 2).sum()), (
        "alignment is not required"
    )
    assert kernels.squared_norm(torch.nn.Parameter(torch.full((3, 5), 2.0))) == 60.0


def test_bad_arguments_are_value_errors_before_a_byte_is_written():
    zeros = torch.zeros(4, 6)
    refuses(
        kernels.dropout,
        (zeros, torch.ones(4, 6), 0.1, 1, 1, 0, 0),
        {
            "x: expected a tensor in CPU memory, got meta": zeros.to("meta"),
            "x: expected a real dtype of this extension, got torch.comp": zeros.cfloat(),
            "x: expected dtype float32 or bfloat16 or float16, got int32": zeros.int(),
            r"x: expected 2 to 8 dimensions, got shape \(6,\)": zeros[0],
            r"out: expected shape \(4, 6\) as x, got \(6, 4\)": zeros.view(6, 4),
            "out: expected dtype float32 as x, got bfloat16": zeros.bfloat16(),
            r"x: expected a contiguous tensor, got shape \(4, 6\) with strides \(1, 4\)": (
                zeros.view(6, 4).t()
            ),
            r"p: expected a probability in \[0, 1\), got 1.0": 1.0,
            "sample_dim: expected a dimension before the last, got 1": 1,
            "first_sample: expected 0 or more, got -1": -1,
            r"row0: expected fewer than 2\*\*32 rows in a sample": 2**32,
        },
    )


def test_overlap_is_refused_and_in_place_is_not():
    buffer = torch.arange(40.0)
    with pytest.raises(
        ValueError, match="out: expected the memory of x or memory apart from it, got partly over"
    ):
        kernels.elementwise("sqrt", buffer[:20], buffer[10:30])
    kernels.elementwise("sqrt", buffer[:20], buffer[20:])
    assert_close(buffer[20:], torch.arange(20.0).sqrt())
    kernels.elementwise("sqrt", buffer, buffer)


def test_a_faster_row_that_the_build_left_out_is_named(monkeypatch):
    rows = [
        {"name": "portable", "reason": ""},
        {"name": "fast", "reason": "left out of this build: run make kernels for all targets"},
        {"name": "fast_emulated", "reason": "left out of this build: run make kernels"},
        {"name": "other", "reason": "this CPU has no other"},
    ]
    monkeypatch.setattr(kernels, "targets", lambda: rows)
    monkeypatch.setattr(kernels, "active", lambda: "portable")
    line = "portable; fast is not used: left out of this build: run make kernels for all targets"
    assert kernels.instruction_set() == line
