"""Unchanged programs under python -m fugaku_megatron.torch_backend, and processes in which the backend is used badly."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "fugaku_megatron.torch_backend")
SHAPE = 'import os, sys, torch\na = torch.full((128, 128), 2.0)\nprint("product", (a @ a)[0, 0].item())\n'
PRODUCT = "product 512.0\n"


def run(*command, cwd, expected=0, **variables):
    """Run a command; return its stdout and stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == expected, done.stderr
    return done.stdout, done.stderr


def script(folder, text):
    (folder / "train.py").write_text(SHAPE + text)
    return "train.py"


def test_a_program_sees_its_own_name_arguments_and_folder(tmp_path):
    """Also its multiprocessing, where a spawned child imports the script as __main__, and its own import of the backend."""
    text = (
        "import multiprocessing, neighbour, fugaku_megatron.torch_backend\n"
        "def double(x):\n    return 2 * x\n"
        'if __name__ == "__main__":\n'
        "    print(__file__, sys.argv, neighbour.name)\n"
        '    with multiprocessing.get_context("spawn").Pool(1) as pool:\n'
        "        print(pool.map(double, [4]))\n"
    )
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("name = __name__\n")
    script(tmp_path / "scripts", text)
    out, error = run(*COMMAND, "--report", "scripts/train.py", "--report", "-m", cwd=tmp_path)
    assert out.endswith(
        "scripts/train.py ['scripts/train.py', '--report', '-m'] neighbour\nproduct 512.0\n[8]\n"
    ), out
    lines = error.splitlines()
    assert lines[0].split()[:4] == ["operator", "calls", "served", "%"]
    assert lines[-1].split()[:2] == ["all", "1"]


def test_a_module_is_run_by_its_name(tmp_path):
    script(tmp_path, "print(__name__, sys.argv[1:])\n")
    arguments = ("--kernels", "native", "--report", "-m", "train", "--lr", "1")
    out, error = run(*COMMAND, *arguments, cwd=tmp_path)
    assert out == PRODUCT + "__main__ ['--lr', '1']\n"
    assert error.splitlines()[1].split()[:3] == ["mm", "1", "100.0"]


@pytest.mark.parametrize(
    "text, code, error",
    [
        ('raise KeyError("mine")', 1, 'File "train.py", line 4, in <module>'),
        ('sys.exit("the program\'s own")', 1, "the program's own"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_an_error_of_the_program_is_shown_as_ever(tmp_path, text, code, error):
    _, shown = run(*COMMAND, script(tmp_path, text), cwd=tmp_path, expected=code)
    assert error in shown
    assert "runpy" not in shown
    assert "__main__.py" not in shown


def test_command_line_mistakes_are_one_line(tmp_path):
    for arguments in ((), ("missing.py",)):
        _, shown = run(*COMMAND, *arguments, cwd=tmp_path, expected=2)
        assert "error: no " in shown.splitlines()[-1]


def test_a_process_without_a_library_ends_in_one_line(tmp_path):
    """The package is copied without its library, and no compiler is there."""
    ignore = shutil.ignore_patterns("_dispatch*", "__pycache__")
    shutil.copytree(ROOT / "fugaku_megatron", tmp_path / "fugaku_megatron", ignore=ignore)
    variables = {"CXX": "no-compiler", "PYTHONPATH": str(tmp_path)}
    _, shown = run(*COMMAND, "train.py", cwd=tmp_path, expected=1, **variables)
    assert len(shown.splitlines()) == 1
    assert "no-compiler is missing: install g++" in shown


def test_an_old_torch_is_one_line(tmp_path):
    old = 'import torch\ntorch.__version__ = "2.8.0+cpu"\n'
    (tmp_path / "sitecustomize.py").write_text(old)
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    _, shown = run(*COMMAND, "train.py", cwd=tmp_path, expected=1, **path)
    assert len(shown.splitlines()) == 1
    assert "torch 2.8.0+cpu is too old" in shown


def test_an_unknown_target_is_one_line(tmp_path):
    variables = {"FUGAKU_MEGATRON_TARGET": "sse9"}
    _, shown = run(*COMMAND, "train.py", cwd=tmp_path, expected=1, **variables)
    assert len(shown.splitlines()) == 1
    assert "sse9" in shown


def test_a_cpu_without_vector_targets_runs(tmp_path):
    variables = {"FUGAKU_MEGATRON_TARGET": "portable"}
    arguments = ("--kernels", "native", script(tmp_path, ""))
    assert run(*COMMAND, *arguments, cwd=tmp_path, **variables)[0] == PRODUCT


def test_a_fork_after_a_team_of_threads_names_the_remedy(tmp_path):
    """PyTorch alone waits forever there."""
    text = (
        "sys.stdout.flush()\n"
        "if os.fork() == 0:\n"
        "    if len(sys.argv) > 1:\n        torch.set_num_threads(1)\n"
        '    print("child", (a @ a)[0, 0].item(), flush=True)\n    os._exit(0)\n'
        "os.wait()\n"
    )
    program = script(tmp_path, text)
    threads = {"OMP_NUM_THREADS": "2"}
    _, shown = run(*COMMAND, program, cwd=tmp_path, **threads)
    assert "forked after its parent computed with several threads" in shown
    out, _ = run(*COMMAND, program, "one", cwd=tmp_path, **threads)
    assert out == PRODUCT + "child 512.0\n"


def gnu_runtime(folder):
    """Compile a library with a team function and the compiler's OpenMP runtime, which is not torch's."""
    source = folder / "other.cc"
    source.write_text(
        'extern "C" int team() { int n = 0;\n#pragma omp parallel reduction(+ : n)\n  ++n;\n  return n; }\n'
    )
    compiled = folder / "other.so"
    command = ["g++", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(compiled)]
    subprocess.run(command, check=True)
    return f'import ctypes\nassert ctypes.CDLL("{compiled}").team() == 2\n'


def llvm_runtime(folder):
    """Start a team of the runtime of clang and of Intel's compilers, by the function that their code calls."""
    names = ("libiomp5.so", "libomp.so", "libomp.so.5")
    folders = (Path(sys.prefix) / "lib", Path("/usr/lib"), *Path("/usr/lib").glob("llvm-*/lib"))
    found = [each / name for each in folders for name in names if (each / name).exists()]
    if not found:
        pytest.skip("no libiomp5 or libomp here: pip install intel-openmp")
    return (
        "import ctypes\n"
        f'runtime = ctypes.CDLL("{found[0]}", ctypes.RTLD_GLOBAL)\n'
        "count = []\n"
        "outlined = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: count.append(1))\n"
        "runtime.__kmpc_fork_call(None, 0, outlined)\n"
        "assert len(count) == 2\n"
    )


@pytest.mark.parametrize("runtime", [gnu_runtime, llvm_runtime])
def test_another_openmp_runtime_is_no_obstacle(tmp_path, runtime):
    """It computes with two threads before torch is loaded and after our kernels did."""
    text = runtime(tmp_path)
    program = tmp_path / "train.py"
    program.write_text(f"{text}import fugaku_megatron.torch_backend\n{SHAPE}a @ a\n{text}a @ a\n")
    threads = {"OMP_NUM_THREADS": "2"}
    assert run(sys.executable, "train.py", cwd=tmp_path, **threads)[0] == PRODUCT


@pytest.mark.full  # the compiler works for a minute
def test_compiled_code_calls_the_operators_with_outputs(tmp_path):
    text = (
        "layer = torch.nn.Linear(128, 128)\n"
        "torch.compile(layer)(a).sum().backward()\n"
        "expected = layer(a).sum()\n"
        "torch.testing.assert_close(torch.compile(layer)(a).sum(), expected)\n"
    )
    program = script(tmp_path, text)
    _, error = run(*COMMAND, "--kernels", "native", "--report", program, cwd=tmp_path)
    served = {line.split()[0]: line.split()[2] for line in error.splitlines()[1:]}
    assert served["addmm.out"] == "100.0"
