"""Commands under a launcher: help and mistakes are printed once, and two ranks compute the results of one.

tests/inference/test_evaluate.py and test_generate.py compare one rank's results with transformers.
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
from tests.checks.evaluation import PROSE, result
from tests.checks.generation import NEW, TEXTS, WIDE, our_tokens, save_trained, write_tokenizer
from tests.mpi import launch
from tests.mpi.launch import words

pytestmark = [pytest.mark.system, pytest.mark.mpi]
COMMAND = "-m fugaku_megatron"
SCRIPT = launch.TESTS.parent / "pretrain_gpt.py"


@pytest.mark.parametrize(
    "command, begin, within",
    [
        pytest.param(
            f"{COMMAND} --help", "usage: fugaku-megatron COMMAND", "train", marks=pytest.mark.full
        ),
        (f"{COMMAND} train --help", "usage: fugaku-megatron train ", "--num-layers"),
        pytest.param(
            f"{SCRIPT} --help", "usage: pretrain_gpt.py ", "--num-layers", marks=pytest.mark.full
        ),
    ],
)
def test_help_is_printed_once(mpich, command, begin, within):
    printed = mpich.run(2, *words(command)).stdout
    assert printed.startswith(begin) and printed.count("usage: ") == 1 and within in printed


@pytest.mark.parametrize(
    "name, command",
    [
        pytest.param("fugaku-megatron train", f"{COMMAND} train", marks=pytest.mark.full),
        ("pretrain_gpt.py", SCRIPT),
    ],
)
def test_a_mistake_is_told_once(mpich, name, command):
    job = mpich.run(2, *words(command, "--num-layer 2"), code=2)
    assert job.stdout == ""
    assert job.stderr.startswith(f"{name}: unknown flag --num-layer: did you mean --num-layers?\n")
    assert job.stderr.count("--num-layer:") == 1


@pytest.mark.smoke
def test_ranks_train_by_the_command(mpich):
    flags = (
        "--recipe demo --mock-data --train-iters 2 --micro-batch-size 1 --global-batch-size 2 "
        "--vocab-size 512 --kernels native"
    )
    job = mpich.run(2, *words(COMMAND, "train", flags))
    assert " iteration        2/" in job.stdout


def test_two_ranks_evaluate(mpich, tmp_path):
    save_trained(SoloComm(), tmp_path / "saved", 1)
    (tmp_path / "text.txt").write_text(PROSE, encoding="utf-8")
    flags = words(
        f"--load {tmp_path}/saved --text {tmp_path}/text.txt",
        *write_tokenizer(tmp_path),
    )
    more = f"--pipeline-model-parallel-size 2 --json {tmp_path}/result.json"
    job = mpich.run(2, *words(COMMAND, "evaluate", *flags, more))
    found = json.loads((tmp_path / "result.json").read_text())
    expected = result(flags)
    assert found.pop("load") == expected.pop("load") and found == pytest.approx(expected, rel=1e-6)
    # each once, from one rank
    begins = ["perplexity ", "6 windows "]
    lines = job.stdout.splitlines()
    assert len(lines) == len(begins) and all(map(str.startswith, lines, begins)), job.stdout


def test_two_ranks_generate(mpich, tmp_path):
    save_trained(SoloComm(), tmp_path, 3, **WIDE)
    expected = our_tokens(SoloComm(), tmp_path, (1, 1))
    prompts = [word for prompt in TEXTS for word in ("--prompt", bytes(prompt).decode())]
    flags = f"--max-new-tokens {NEW} --temperature 0 --tensor-model-parallel-size 2"
    command = words(COMMAND, "generate --load", tmp_path, *write_tokenizer(tmp_path), flags)
    job = mpich.run(2, *command, *prompts)
    texts = [
        f"[{bytes(prompt).decode()}]{bytes(ids).decode('utf-8', 'replace')}"
        for prompt, ids in zip(TEXTS, expected)
    ]
    assert job.stdout == "\n".join(["--- iteration 3, prompt in brackets ---", *texts, ""])


# The command on vectors and matrices that fit into caches: their rates are not a machine's, and take a tenth of the time.
CALIBRATE = """
import sys
from fugaku_megatron.cli import program
from fugaku_megatron.calibration import calibrate
small = calibrate.Scale(
    sizes=(64, 128, 256), cold_bytes=1 << 20, lengths=(128, 256), triad=1 << 18, elements=1 << 18, reduced=1 << 20
)
calibrate.Scale = lambda: small
sys.exit(program.main(["calibrate", *sys.argv[1:]]))
"""


def test_two_ranks_calibrate_and_one_is_refused(mpich, tmp_path):
    file = tmp_path / "host.json"
    alone = mpich.run(1, *words(COMMAND, "calibrate --output", file), code=2)
    assert "mpiexec -n 2" in alone.stderr and not file.exists()
    mpich.run(2, "-c", CALIBRATE, "--output", str(file))
    host = machine.load(str(file))
    assert host.ranks_per_node == 2 and host.peak_tflops["fp32"] > 0
    assert host.intra_gbs > 0 and host.intra_alpha_us > 0


def test_a_report_starts_its_own_ranks(mpich, tmp_path):
    """Each measures, one writes; the trainer's sums and MPI's are next to the model's."""
    file = tmp_path / "here.json"
    only = "--only kernels communication training layers"
    job = subprocess.run(
        words(
            sys.executable, COMMAND, "report --ranks 2 --shrunk --minutes 4 --output", file, only
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env=mpich.variables(),
    )
    assert job.returncode == 0 and job.stdout.count("wrote ") == 1, job.stderr
    assert "report: starting 2 ranks by mpiexec" in job.stderr
    report = json.loads(file.read_text())
    kernels, communication, training, layers = (
        report["sections"][name] for name in ("kernels", "communication", "training", "layers")
    )
    assert report["complete"] and kernels["differing_ranks"] == []
    assert [rank["node"] for rank in kernels["ranks"]] == [0, 0]
    assert communication["thread_level"] == "serialized" and communication["ranks"] == 2
    rows = communication["collectives"]
    assert {row["verb"] for row in rows} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert {row["where"] for row in rows} == {"inside"}
    for row in rows:
        assert min(row["seconds"], row["mpi_seconds"], row["model_seconds"]) > 0
    assert [row["ranks"] for row in training["rows"]] == [1, 2] and layers["rows"][0]["groups"] == 2
    host = machine.load(str(file))
    assert host.ranks_per_node == 2
    assert host.sources["intra_gbs"] == "measured by fugaku-megatron report"
    refused = mpich.run(1, *words(COMMAND, "report --ranks 2"), code=2)
    assert refused.stderr.count("leave it out") == 1


@pytest.mark.skipif(launch.mpich() is None, reason=launch.MISSING["mpich"])
def test_two_hosts_report_as_two_nodes(tmp_path):
    """Two network namespaces; after a signal to the launcher the measurements stay."""
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    file = tmp_path / "two.json"
    own = {"PYTHONPATH": launch.PATH, "OMP_NUM_THREADS": "1"}
    program = words(sys.executable, COMMAND, "report --shrunk --minutes 4 --output", file)
    with two_hosts.two_hosts("1gbit"):
        first, second = (two_hosts.on_host(host, program) for host in two_hosts.HOSTS)
        with subprocess.Popen(
            [child.mpiexec(), *first, ":", *second],
            env={**os.environ, **two_hosts.NETWORK, **own},
            cwd=tmp_path,
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        ) as job:
            assert any("layers" in line for line in job.stderr)  # earlier sections are written
            job.send_signal(signal.SIGTERM)
            job.stderr.read()
    text = file.read_text()
    report = json.loads(text)
    sections = report["sections"]
    assert report["complete"] is False and len(sections["host"]["nodes"]) == 2
    assert [rank["node"] for rank in sections["kernels"]["ranks"]] == [0, 1]
    communication = sections["communication"]
    assert communication["inside"] is None
    assert 0.01 < communication["between"]["gbs"] < 0.2  # a link of 1 Gbit/s
    assert {row["where"] for row in communication["collectives"]} == {"between"}
    assert machine.load(str(file)).sources["link_gbs"] == "measured by fugaku-megatron report"
    assert not any(host in text for host in two_hosts.HOSTS)
