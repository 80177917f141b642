"""Interrupts while importing, standard streams that are closed or full, variables that mislead: one line each."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.processes import ROOT, run_python

pytestmark = pytest.mark.system

CLI = [sys.executable, "-m", "fugaku_megatron"]
SLOW = "import sys, time\nprint('importing', flush=True)\ntime.sleep(600)\n"
SWALLOWING = "try:\n    import slow\nexcept BaseException:\n    raise ImportError('no slow module') from None\n"
TRAIN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --global-batch-size 1 "
    "--max-position-embeddings 8 --mock-data --train-iters 1 --lr 1"
)


def run(words, **options):
    return subprocess.run(
        words, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=200, **options
    )


@pytest.mark.parametrize("module", ["slow", "swallowing"])
def test_an_interrupt_while_importing_is_one_line(tmp_path, module):
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    code = f"from fugaku_megatron.start import signals; signals.report_interrupts('a command'); import {module}"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1] == "a command: interrupted\n"
    assert process.returncode == 130


def test_a_request_to_stop_is_kept_before_the_program_has_imported_itself():
    code = (
        "import os, runpy, signal, sys, types\n"
        "early = types.ModuleType('tools.environment')\n"
        "early.use = lambda *packages: os.kill(os.getpid(), signal.SIGUSR1)\n"
        "import tools\n"
        "tools.environment = sys.modules[early.__name__] = early\n"
        "sys.argv = ['pretrain_gpt.py', '--help']\n"
        "runpy.run_path('pretrain_gpt.py', run_name='__main__')"
    )
    run_python("-c", code)


def test_outside_of_imports_an_interrupt_is_what_it_was():
    code = (
        "from fugaku_megatron.start import signals; import os, signal; signals.report_interrupts('a command')\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('cleaned up')"
    )
    assert run_python("-c", code).stdout == "cleaned up\n"


@pytest.mark.parametrize(
    "words, prefix",
    [
        ("train --help", "fugaku-megatron train"),
        pytest.param("tables --document 001", "fugaku-megatron tables", marks=pytest.mark.full),
        (f"train {TRAIN} --dry-run", "rank 0"),
    ],
    ids=["help", "tables", "run"],
)
def test_a_full_disk_is_one_line_and_a_reader_that_leaves_is_not_an_error(words, prefix):
    read, write = os.pipe()
    os.close(read)  # as head does when it has seen enough
    full = f"{prefix}: standard output: No space left on device\n"
    for output, said in (("/dev/full", full), (write, "")):
        with open(output, "w") as stdout:
            result = run([*CLI, *words.split()], stdout=stdout)
        assert (result.returncode, result.stderr) == (141, said)


@pytest.mark.parametrize("closed", [pytest.param("2>&-", marks=pytest.mark.full), "<&- >&- 2>&-"])
def test_closed_streams_leave_the_result_as_it_is(tmp_path, closed):
    """The exit code is 0 for a run that fits, 1 for a damaged checkpoint, 2 for a mistake."""
    path = tmp_path / "iter_0000001"
    path.mkdir()
    (path / "manifest.json").write_text("{")
    for words, code in {
        f"train {TRAIN} --dry-run": 0,
        f"verify {tmp_path}": 1,
        f"log {tmp_path}/none": 2,
    }.items():
        done = run(["sh", "-c", f'"$@" {closed}', "sh", *CLI, *words.split()])
        assert done.returncode == code


def test_a_file_does_not_get_the_descriptor_of_a_closed_stream(tmp_path):
    code = (
        "import os, sys; from fugaku_megatron.start import environment; environment.open_streams()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); os.write(1, b'of a library')\n"
        "print('said'); print('said', file=sys.stderr)"
    )
    assert run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]).returncode == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        pytest.param({"LC_ALL": "C.UTF-8"}, marks=pytest.mark.full),
    ],
)
def test_any_path_is_printed_as_it_was_given(tmp_path, locale):
    path = os.fsencode(tmp_path) + b"/\xff" + "\u00e9".encode()

    def command(name):
        return subprocess.run(
            [*CLI, name, path],
            cwd=ROOT,
            env={**os.environ, **locale},
            capture_output=True,
            timeout=200,
        )

    done = command("log")
    said = b"fugaku-megatron log: " + path + b": No such file or directory: pass a run's log\n"
    assert (done.returncode, done.stderr) == (2, said)
    os.makedirs(path + b"/iter_0000001")
    done = command("verify")
    assert done.returncode == 1, done
    assert path + b"/iter_0000001/manifest.json is missing" in done.stdout


LIBRARY = ("-c", "import fugaku_megatron as fm; fm.init()")
COMMAND = ("-m", "fugaku_megatron", "train", *TRAIN.split())


@pytest.mark.parametrize("rank", ["0", "1"])
def test_processes_that_torchrun_started_do_not_train_alone(rank):
    """torchrun, accelerate and deepspeed set these variables; one process reports."""
    done = run_python(*COMMAND, code=2, WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
    assert "world size" not in done.stdout and done.stderr.count("\n") == (rank == "0")


def test_the_library_names_what_torchrun_should_be():
    done = run_python(*LIBRARY, code=None, WORLD_SIZE="2", RANK="1", LOCAL_RANK="1")
    assert done.returncode != 0 and "world size" not in done.stdout
    assert "WORLD_SIZE=2" in done.stderr and "mpiexec -n 2" in done.stderr


def test_a_process_that_torchrun_started_alone_is_any_process():
    plan = ("-m", "fugaku_megatron", "plan", "--help")
    run_python(*plan, WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")


@pytest.mark.parametrize(
    "name, value",
    [
        ("PMI_SIZE", "abc"),
        ("OMPI_COMM_WORLD_SIZE", "-1"),
        ("SLURM_PROCID", "1e3"),
        ("PMI_SIZE", "9" * 5000),
        ("OMP_NUM_THREADS", "99999,2"),
    ],
)
def test_a_variable_that_misleads_is_named_before_anything_is_loaded(name, value):
    shown = value.split(",")[0][:40]
    run_python(*COMMAND, code=2, **{name: value}).mistake(f"{name}={shown}")


CONTROLS = "a\x1b[2Jb\x07\x9b\u202ec\x1b[32md\x1b[0m\te\n"
ESCAPED = "a\\x1b[2Jb\\x07\\x9b\\u202ec\x1b[32md\x1b[0m\te\n"


@pytest.mark.parametrize("as_is", [False, True])
def test_control_characters_are_printed_as_escapes(as_is):
    code = (
        "import sys; from fugaku_megatron.start import environment; environment.open_streams()\n"
        f"{'environment.print_as_is()' if as_is else ''}\n"
        f"print({CONTROLS!r}, end=''); print({CONTROLS!r}, end='', file=sys.stderr)\n"
        f"raise ValueError({CONTROLS!r})"
    )
    done = run([sys.executable, "-c", code], stdout=subprocess.PIPE, encoding="utf-8")
    assert done.stdout == (CONTROLS if as_is else ESCAPED)
    assert done.stderr.startswith(ESCAPED) and "\x1b[2J" not in done.stderr


def test_a_name_in_a_foreign_file_reaches_no_terminal_with_control_characters(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"\x1b]0;title\x07": 1}) + "\n")
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "96"]
    files = ["--input", f"{tmp_path}/a.jsonl", "--output-prefix", f"{tmp_path}/o"]
    done = run([*CLI, "preprocess", *words, *files])
    assert done.returncode == 2 and "\\x1b]0;title\\x07" in done.stderr
    assert "\x1b" not in done.stderr
