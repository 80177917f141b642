"""Commands under a launcher: help and mistakes come out once, and what they compute on two ranks is what one rank computes.

The results of one rank are compared with transformers in tests/parallel/test_evaluate.py and tests/parallel/test_generate.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks import child, two_hosts
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.planner import machine
from tests.checks.evaluation import PROSE, QUESTIONS, result
from tests.checks.generation import NEW, TEXTS, WIDE, our_tokens, save_trained, write_tokenizer
from tests.system.mpi import launch

pytestmark = pytest.mark.mpi
COMMAND, SCRIPT = ["-m", "fugaku_megatron"], [str(launch.TESTS.parent / "pretrain_gpt.py")]


@pytest.mark.parametrize(
    "words, begin, within",
    [
        ([*COMMAND, "--help"], "usage: fugaku-megatron COMMAND", "train"),
        ([*COMMAND, "train", "--help"], "usage: fugaku-megatron train ", "--num-layers"),
        ([*SCRIPT, "--help"], "usage: pretrain_gpt.py ", "--num-layers"),
    ],
)
def test_help_is_printed_once(mpich, words, begin, within):
    job = mpich.run(2, *words)
    assert job.returncode == 0, job.stderr
    assert (
        job.stdout.startswith(begin) and job.stdout.count("usage: ") == 1 and within in job.stdout
    )


@pytest.mark.parametrize(
    "name, words", [("fugaku-megatron train", [*COMMAND, "train"]), ("pretrain_gpt.py", SCRIPT)]
)
def test_a_mistake_is_told_once(mpich, name, words):
    job = mpich.run(2, *words, "--num-layer", "2")
    assert job.returncode == 2 and job.stdout == ""
    assert job.stderr.startswith(f"{name}: unknown flag --num-layer: did you mean --num-layers?\n")
    assert job.stderr.count("--num-layer:") == 1


@pytest.mark.smoke
def test_ranks_train_by_the_command(mpich):
    flags = (
        "--recipe demo --mock-data --train-iters 2 --micro-batch-size 1 --global-batch-size 2 "
        "--vocab-size 512"
    ).split()
    job = mpich.run(2, *COMMAND, "train", *flags, "--kernels", "native")
    assert job.returncode == 0 and " iteration        2/" in job.stdout, job.stderr


def test_two_ranks_evaluate(mpich, tmp_path):
    save_trained(SoloComm(), tmp_path / "saved", 1)
    (tmp_path / "text.txt").write_text(PROSE, encoding="utf-8")
    (tmp_path / "questions.json").write_text(json.dumps(QUESTIONS))
    words = [
        "--load",
        str(tmp_path / "saved"),
        *write_tokenizer(tmp_path),
        "--text",
        str(tmp_path / "text.txt"),
        "--choices",
        str(tmp_path / "questions.json"),
    ]
    job = mpich.run(
        2,
        *COMMAND,
        "evaluate",
        *words,
        "--pipeline-model-parallel-size",
        "2",
        "--json",
        str(tmp_path / "result.json"),
    )
    assert job.returncode == 0, job.stderr
    found, expected = json.loads((tmp_path / "result.json").read_text()), result(words)
    assert found.pop("load") == expected.pop("load") and found == pytest.approx(expected, rel=1e-6)
    begins = [
        "perplexity ",
        "6 windows ",
        "accuracy ",
        "questions without a context: 1",
    ]  # each once, from one rank
    lines = job.stdout.splitlines()
    assert len(lines) == len(begins) and all(map(str.startswith, lines, begins)), job.stdout


def test_two_ranks_generate(mpich, tmp_path):
    save_trained(SoloComm(), tmp_path, 3, **WIDE)
    expected = our_tokens(SoloComm(), tmp_path, (1, 1))
    prompts = [word for prompt in TEXTS for word in ("--prompt", bytes(prompt).decode())]
    job = mpich.run(
        2,
        *COMMAND,
        "generate",
        "--load",
        str(tmp_path),
        *write_tokenizer(tmp_path),
        *prompts,
        *f"--max-new-tokens {NEW} --temperature 0 --tensor-model-parallel-size 2".split(),
    )
    assert job.returncode == 0, job.stderr
    texts = [
        f"[{bytes(prompt).decode()}]{bytes(ids).decode('utf-8', 'replace')}"
        for prompt, ids in zip(TEXTS, expected)
    ]
    assert job.stdout == "\n".join(["--- iteration 3, prompt in brackets ---", *texts, ""])


# The command on vectors and matrices that fit into caches: their rates are not a machine's, and take a tenth of the time.
CALIBRATE = """
import sys
from fugaku_megatron.cli import program
from fugaku_megatron.calibration import calibrate, host_kernels
calibrate.SIZES, calibrate.TRIAD_ELEMENTS, calibrate.REDUCED = (64, 128, 256), 1 << 18, 1 << 20
host_kernels.COLD_BYTES, host_kernels.ELEMENTS, host_kernels.LENGTHS = 1 << 20, 1 << 18, (128, 256)
sys.exit(program.main(["calibrate", *sys.argv[1:]]))
"""


def test_two_ranks_calibrate_and_one_is_refused(mpich, tmp_path):
    file = str(tmp_path / "host.json")
    alone = mpich.run(1, *COMMAND, "calibrate", "--output", file)
    assert (
        alone.returncode == 2
        and "mpiexec -n 2" in alone.stderr
        and not (tmp_path / "host.json").exists()
    )
    job = mpich.run(2, "-c", CALIBRATE, "--output", file)
    assert job.returncode == 0, job.stderr
    host = machine.load(file)
    assert (
        host.ranks_per_node == 2
        and host.peak_tflops["fp32"] > 0
        and host.intra_gbs > 0
        and host.intra_alpha_us > 0
    )


def test_a_report_starts_its_own_ranks(mpich, tmp_path):
    """Each measures, one writes; the sums of the trainer and MPI's own are next to the model's."""
    file = tmp_path / "here.json"
    command = [
        sys.executable,
        *COMMAND,
        *(
            "report --ranks 2 --shrunk --only kernels communication training layers --minutes 4 "
            f"--output {file}"
        ).split(),
    ]
    job = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=mpich.variables()
    )
    assert job.returncode == 0 and job.stdout.count("wrote ") == 1, job.stderr
    assert "report: starting 2 ranks by mpiexec" in job.stderr
    report = json.loads(file.read_text())
    sections = report["sections"]
    assert report["complete"] and [rank["node"] for rank in sections["kernels"]["ranks"]] == [0, 0]
    assert (
        sections["kernels"]["differing_ranks"] == []
        and sections["communication"]["thread_level"] == "serialized"
    )
    assert sections["communication"]["ranks"] == 2
    rows = sections["communication"]["collectives"]
    assert {row["verb"] for row in rows} == {"all_reduce", "all_gather", "reduce_scatter"} and {
        row["where"] for row in rows
    } == {"inside"}
    assert all(
        row["seconds"] > 0 and row["mpi_seconds"] > 0 and row["model_seconds"] > 0 for row in rows
    )
    assert [row["ranks"] for row in sections["training"]["rows"]] == [1, 2] and sections["layers"][
        "rows"
    ][0]["groups"] == 2
    host = machine.load(str(file))
    assert (
        host.ranks_per_node == 2
        and host.sources["intra_gbs"] == "measured by fugaku-megatron report"
    )
    refused = mpich.run(2, *COMMAND, "report", "--ranks", "2")
    assert refused.returncode == 2 and refused.stderr.count("leave it out") == 1


@pytest.mark.skipif(launch.mpich() is None, reason=launch.MISSING["mpich"])
def test_two_hosts_report_as_two_nodes(tmp_path):
    """Two network namespaces, and the end by a signal to the launcher: what was measured stays."""
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    file, environment = (
        tmp_path / "two.json",
        {**os.environ, **two_hosts.NETWORK, "PYTHONPATH": launch.PATH, "OMP_NUM_THREADS": "1"},
    )
    program = [
        sys.executable,
        *COMMAND,
        *f"report --shrunk --minutes 4 --output {file}".split(),
    ]
    with two_hosts.two_hosts("1gbit"):
        first, second = (two_hosts.on_host(host, program) for host in two_hosts.HOSTS)
        with subprocess.Popen(
            [child.mpiexec(), *first, ":", *second],
            env=environment,
            cwd=tmp_path,
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        ) as job:
            assert any(
                "layers" in line for line in job.stderr
            )  # the sections before it are written
            job.send_signal(signal.SIGTERM)
            job.stderr.read()
    report = json.loads(file.read_text())
    sections = report["sections"]
    assert report["complete"] is False and len(sections["host"]["nodes"]) == 2
    assert [rank["node"] for rank in sections["kernels"]["ranks"]] == [0, 1] and sections[
        "communication"
    ]["inside"] is None
    assert 0.01 < sections["communication"]["between"]["gbs"] < 0.2  # a link of 1 Gbit/s
    assert {row["where"] for row in sections["communication"]["collectives"]} == {"between"}
    assert machine.load(str(file)).sources["link_gbs"] == "measured by fugaku-megatron report"
    assert not any(host in file.read_text() for host in two_hosts.HOSTS)
