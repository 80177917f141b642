"""pretrain_gpt.py as a user starts it: trains, logs, saves, resumes, and refuses mistakes with one line.

What one rank shows, runs in this process, which saves its start. Killed ranks: test_restarts.py
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.nn import functional as F

from fugaku_megatron.checkpoint.manifest import latest_iteration
from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.costs import accounting
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.host import kernels
from fugaku_megatron.observe.iteration_metrics import parse_log
from fugaku_megatron.run.checks import check_early
from tests.system.mpi import launch

pytestmark = pytest.mark.mpi
PROGRAM = str(launch.TESTS.parent / "pretrain_gpt.py")
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size "
    "96 --make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 8 --lr "
    "1e-3 --mock-data --log-interval 1 --eval-iters 0 --kernels native"
).split()


def losses(directory: Path) -> list[float]:
    """Every training loss in the history, to the last bit."""
    records = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return [r["lm_loss"] for r in records if r["kind"] == "train"]


def test_trains_logs_and_resumes_to_the_same_bits(mpi, tmp_path, monkeypatch):
    """The second start ends within a log interval of TFLOPs and a profile, which are written all the same."""
    level = {"mpich": "serialized", "openmpi": "funneled"}[mpi.name]
    monkeypatch.setenv("FUGAKU_MEGATRON_MPI_THREAD_LEVEL", level)
    flags = [
        *TINY,
        *(
            "--train-iters 8 --zero-stage 1 --log-params-norm --log-num-zeros-in-grad "
            "--hidden-dropout 0.1 --lr-decay-style cosine --lr-warmup-iters 2 "
            f"--checkpoint-activations --profile --profile-dir {tmp_path / 'profile'}"
        ).split(),
    ]
    profile_to_the_end = "--profile-ranks 1 --profile-step-start 7 --profile-step-end 50".split()
    whole = mpi.run(
        2,
        PROGRAM,
        *flags,
        "--save",
        str(tmp_path / "whole"),
        "--save-interval",
        "5",
        *profile_to_the_end,
    )
    assert whole.returncode == 0 and f"MPI_THREAD_{level.upper()}" in whole.stdout, whole.stderr
    lines = parse_log(whole.stdout.splitlines())
    assert [line.iteration for line in lines] == list(range(1, 9)) and lines[-1].params_norm > 0
    assert all(
        line.minor_faults >= 0 and line.system_seconds >= 0 and 0.1 < line.clock_ghz < 10
        for line in lines
    )
    check_tflops(flags, whole.stdout, lines[-1])
    assert (tmp_path / "profile" / "table_rank1.txt").exists()
    assert "peak memory per rank: max" in whole.stdout
    profile_too_late = "--profile-ranks 0 --profile-step-start 40 --profile-step-end 50".split()
    resumed = mpi.run(
        2,
        PROGRAM,
        *flags,
        *f"--save {tmp_path / 'resumed'} --load {tmp_path / 'whole'} --ckpt-step 5".split(),
        *profile_too_late,
    )
    assert resumed.returncode == 0 and "at iteration 5" in resumed.stdout, resumed.stderr
    note = "note: no profile: this start had 3 iterations, --profile-step-start is 40"
    assert note in resumed.stdout
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")[5:]


def check_tflops(flags, log, line):
    """c B s l h^2 (1 + s/(6h) + v/(16 l h)) with c = 96, B = 8, s = 16, l = 2, h = 32, v = 96"""
    by_hand = 96 * 8 * 16 * 2 * 32**2 * (1 + 16 / (6 * 32) + 96 / (16 * 2 * 32))
    assert accounting.hardware_flops(parse(flags).run, 8) == pytest.approx(by_hand)
    shown = re.search(r"FLOPs per iteration of 8 samples: (\S+) hardware", log)
    assert float(shown[1]) == pytest.approx(by_hand, rel=1e-4)
    assert line.tflops == pytest.approx(
        by_hand / 2 / line.elapsed_seconds / 1e12, abs=0.005 + by_hand / 1e12
    )


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        pytest.param({"LC_ALL": "C.UTF-8"}, marks=pytest.mark.full),
    ],
)
def test_paths_of_any_bytes_end_no_run(mpich, tmp_path, locale):
    """No path ends a run: neither --save, --log-file and --profile-dir nor the picture's, whose title has the paths."""
    place = os.fsencode(tmp_path) + b"/\xff\xc3\xa9"

    def run(*flags):
        return subprocess.run(
            [sys.executable, PROGRAM, *TINY, "--train-iters", "4", *flags],
            capture_output=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1", **locale},
        )

    done = run(
        "--save",
        place,
        "--log-file",
        place + b".log",
        "--log-ranks",
        place + b".ranks",
        *"--profile --profile-step-start 2 --profile-step-end 3 --profile-dir".split(),
        place + b".p",
    )
    assert (
        done.returncode == 0
        and b"Traceback" not in done.stdout + done.stderr
        and b"not drawn" not in done.stdout
    ), done
    assert b"saved checkpoint of iteration 4 to " + place + b"\n" in done.stdout
    with open(place + b".log", "rb") as log:
        assert b"saved checkpoint of iteration 4 to " + place + b"\n" in log.read()
    assert os.path.getsize(place + b"/loss_curve.png") > 10_000
    refused = run("--tensorboard-dir", place)
    assert (
        refused.returncode == 2
        and refused.stderr.count(b"\n") == 1
        and b"--tensorboard-dir " + place in refused.stderr
    )


@pytest.mark.full
def test_a_rank_whose_experts_get_all_tokens_is_named(mpich, tmp_path):
    """Weights that round to 0 make all scores equal, so that every token takes the same expert."""
    sizes = {
        "hidden-size": 64,
        "num-layers": 1,
        "num-attention-heads": 4,
        "seq-length": 64,
        "vocab-size": 96,
        "micro-batch-size": 1,
        "global-batch-size": 2,
        "num-experts": 4,
        "moe-ffn-hidden-size": 64,
        "moe-router-topk": 1,
        "expert-model-parallel-size": 2,
        "train-iters": 1,
        "lr": 1e-30,
        "min-lr": 0,
        "init-method-std": 1e-46,
        "log-interval": 1,
        "eval-iters": 0,
        "save": tmp_path,
    }
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    job = mpich.run(
        2,
        PROGRAM,
        *flags,
        *(
            "--mock-data --swiglu --disable-bias-linear --moe-router-pre-softmax "
            "--position-embedding-type rope --normalization RMSNorm"
        ).split(),
    )
    assert job.returncode == 0, job.stderr
    assert "computes 2.00 of the mean" in job.stdout
    assert "without a token since the last report: " in job.stdout


def test_sigterm_saves_and_leaves_with_zero(mpich, tmp_path):
    job = start(mpich, tmp_path, "--train-iters", "100000", "--save-interval", "100000")
    wait_for_lines(job, 3)
    for rank in ranks(job):
        rank.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    assert "a signal asked to stop" in output
    assert latest_iteration(tmp_path) >= 3


def test_exit_duration_saves_logs_and_leaves_with_zero(alone, tmp_path):
    flags = "--train-iters 1000000 --log-interval 100000 --exit-duration-in-mins 0.01".split()
    job = alone(*TINY, *flags, "--save", tmp_path)
    assert job.returncode == 0, job.stderr
    assert "--exit-duration-in-mins is over" in job.stdout and latest_iteration(tmp_path)
    assert [line.iteration for line in parse_log(job.stdout.splitlines())] == [
        latest_iteration(tmp_path)
    ]
    assert len(losses(tmp_path)) == 1


def start(
    mpi, directory: Path, *flags: str, model: Sequence[str] = TINY, **environment: str
) -> subprocess.Popen:
    command = [
        *mpi.command(2),
        PROGRAM,
        *model,
        "--save",
        str(directory),
        "--load",
        str(directory),
        *flags,
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**mpi.variables(), **environment},
    )


def wait_for_lines(job: subprocess.Popen, count: int) -> bool:
    """Read until `count` iterations were logged; False when the job ended before."""
    seen = 0
    for line in job.stdout:
        seen += line.startswith(" iteration ")
        if seen == count:
            return True
    return False


def ranks(job: subprocess.Popen) -> list[psutil.Process]:
    """The processes of a job that runs. What a rank starts, to draw its losses, has the rank's command line for a moment."""
    found = {}
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a picture is drawn
            if PROGRAM in process.cmdline() and process.ppid() not in found:
                found[process.pid] = process
    return list(found.values())


@pytest.mark.full
def test_another_layout_continues_with_the_same_curve(mpich, alone, tmp_path):
    """One rank, a pipeline of two, and one rank again."""
    flags = [*TINY, "--train-iters", "8", "--hidden-dropout", "0.1"]
    directory = f"--save {tmp_path / 'parts'} --load {tmp_path / 'parts'}".split()
    whole = alone(*flags, "--save", tmp_path / "whole")
    first = alone(*flags, *directory, "--exit-interval", 3)
    assert whole.returncode == first.returncode == 0, whole.stderr + first.stderr
    assert "leaving after iteration 3: --exit-interval 3" in first.stdout
    second = mpich.run(
        2,
        PROGRAM,
        *flags,
        "--pipeline-model-parallel-size",
        "2",
        *directory,
        *"--exit-interval 6 --pipeline-schedule auto --recompute-auto".split(),
    )
    assert second.returncode == 0, second.stderr
    third = alone(*flags, *directory)
    assert third.returncode == 0, third.stderr
    assert (
        "note: saved with TP 1 x PP 1 x DP 1 x ZeRO shards 1, continues with TP 1 x PP 2 x DP 1 x ZeRO shards 1"
        in second.stdout
    )
    assert (
        "\nschedule: " in second.stdout
        and "; 1f1b 0." in second.stdout
        and "(model, a64fx)\nrecompute: " in second.stdout
    )
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    assert losses(tmp_path / "whole")[6:] != losses(tmp_path / "whole")[:2]


def test_a_converted_model_keeps_its_padding_out_of_the_loss(alone, tmp_path):
    """Its logits are near -60, so that a row of padding would have all of the softmax, as it has where the flag says no."""
    padding = pytest.importorskip("tests.parallel.test_vocab_padding")
    model, own = padding.shifted_gpt2(503), tmp_path / "own"
    model.save_pretrained(tmp_path / "theirs")
    assert padding.convert("--from-hf", tmp_path / "theirs", "--save", tmp_path / "ours") == 0
    words = (tmp_path / "ours" / "model.flags").read_text().split()
    assert (at := words.index("--mask-vocab-padding")) and words[at + 1] == "yes"
    flags = [
        *words[:at],
        *words[at + 2 :],
        *"--hidden-dropout 0 --attention-dropout 0 --seq-length 16".split(),
        *"--mock-data --micro-batch-size 2 --global-batch-size 4 --log-interval 1 --eval-iters 0 --kernels native".split(),
        *"--lr 1e-3 --lr-decay-iters 8 --save".split(),
        own,
        "--load",
        own,
    ]
    first = alone(*flags, "--pretrained-checkpoint", tmp_path / "ours", "--train-iters", 2)
    assert (
        first.returncode == 0
        and "padded vocabulary 512, padding masked in the loss\n" in first.stdout
    ), first.stderr
    samples = torch.tensor(np.stack([MockDataset(503, 16, 8, 1234)[i] for i in range(4)]))
    with torch.no_grad():
        expected = F.cross_entropy(
            model(samples[:, :-1]).logits.flatten(0, 1), samples[:, 1:].flatten()
        ).item()
    assert losses(own)[0] == pytest.approx(expected, rel=1e-5)
    second = alone(*flags, "--train-iters", 3)
    assert second.returncode == 0 and "padding masked in the loss\n" in second.stdout, second.stderr
    assert "note: --mask" not in second.stdout
    third = alone(*flags, "--train-iters", 4, "--mask-vocab-padding", "no")
    assert (
        third.returncode == 0
        and "note: --mask-vocab-padding is no, was yes: the loss curve" in third.stdout
    ), third.stderr
    assert losses(own)[2] < expected + 1 < 40 < losses(own)[3]


def test_what_may_not_be_loaded_or_replaced_is_refused(alone, tmp_path):
    """A truncated shard, after which the previous checkpoint loads; and a forgotten --load, after which every file is as before."""
    flags = [*TINY, "--save", tmp_path, "--save-interval", 2]
    assert alone(*flags, "--train-iters", 4).returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused = alone(*flags, "--train-iters", 6)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert (
        f"--save {tmp_path} holds checkpoints of iterations 2, 4" in refused.stderr
        and f"--load {tmp_path}" in refused.stderr
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    shard = sorted((tmp_path / "iter_0000004").glob("*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size // 2)
    refused = alone(*flags, "--load", tmp_path, "--train-iters", 6)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert shard.name in refused.stderr and "--ckpt-step" in refused.stderr
    previous = alone(*flags, "--load", tmp_path, "--train-iters", 6, "--ckpt-step", 2)
    assert previous.returncode == 0 and "at iteration 2" in previous.stdout, previous.stderr


def test_resumes_with_another_batch_size_and_seed(alone, tmp_path):
    def consumed(*more) -> tuple[list[int], str]:
        """Consumed samples of every iteration in the log, and the log."""
        job = alone(*TINY, "--save", tmp_path, "--load", tmp_path, *more)
        assert job.returncode == 0, job.stderr
        return [line.consumed_samples for line in parse_log(job.stdout.splitlines())], job.stdout

    assert consumed("--train-samples", 48, "--exit-interval", 2)[0] == [8, 16]
    smaller, log = consumed("--train-samples", 28, "--global-batch-size", 4, "--seed", 5)
    assert smaller == [20, 24, 28] and "note: --seed is 5, was 1234" in log
    assert consumed("--train-iters", 7, "--global-batch-size", 16)[0] == [44, 60]
    again, log = consumed("--train-iters", 7, "--global-batch-size", 16)
    assert again == [] and "nothing left to train: at iteration 7 of 7" in log


@pytest.mark.parametrize(
    "flags, message",
    [
        pytest.param(
            ["--tensor-model-parallel-size", "4"],
            "--tensor-model-parallel-size 4",
            marks=pytest.mark.full,
        ),  # found by all ranks, as in test_mpi_comm.py
        (
            ["--profile", "--profile-dir", PROGRAM, "--profile-ranks", "1"],
            f"{PROGRAM} is not writable: rank 0: ",
        ),  # by one
    ],
)
def test_mistakes_give_one_line(mpich, flags, message):
    job = mpich.run(2, PROGRAM, *TINY, "--train-iters", "1", *flags)
    assert job.returncode == 2 and job.stderr.count("\n") == 1, job.stderr
    assert message in job.stderr and job.stderr.startswith("rank 0: ")


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "--train-iters or --train-samples"),
        (["--train-iters", "1", "--global-batch-size", "7"], "use 4 or 8"),
        (
            [
                "--train-iters",
                "1",
                "--num-layers",
                "3",
                "--pipeline-model-parallel-size",
                "2",
                "--pipeline-split",
                "even",
            ],
            "--num-layers 3",
        ),
        (
            ["--train-iters", "1", "--profile", "--profile-ranks", "0", "2"],
            "--profile-ranks 0 2: the run has ranks 0 to 1",
        ),
    ],
)
def test_flags_that_no_run_of_two_ranks_can_have(flags, message):
    with pytest.raises(ValueError, match=message):
        check_early(parse([*TINY, *flags]).run, 2)


def test_missing_data_and_unwritable_save_give_one_line(alone, tmp_path):
    (tmp_path / "file").write_text("")
    missing = alone(
        *[f for f in TINY if f != "--mock-data"],
        "--train-iters",
        1,
        "--data-path",
        tmp_path / "none",
    )
    assert (
        missing.returncode == 2 and missing.stderr.count("\n") == 1 and "none.idx" in missing.stderr
    ), missing.stderr
    assert missing.stdout == "", "before memory, the machine and the data are looked at"
    unwritable = alone(*TINY, "--train-iters", 1, "--save", tmp_path / "file" / "below")
    assert (
        unwritable.returncode == 2
        and unwritable.stderr.count("\n") == 1
        and "--save" in unwritable.stderr
    ), unwritable.stderr


def test_sums_in_fp16_where_the_instruction_set_can(alone, tmp_path):
    flags = [*TINY, "--train-iters", 4, "--fp16", "--initial-loss-scale", 1024]
    with kernels.target("portable"):
        for name, more in (("fp32", []), ("fp16", ["--fp16-accumulation-chunk", 8])):
            job = alone(*flags, *more, "--save", tmp_path / name)
            assert job.returncode == 0, job.stderr
    assert "gemm native, partial sums of 8 terms in FP16" in job.stdout
    found, expected = losses(tmp_path / "fp16"), losses(tmp_path / "fp32")
    assert found != expected and found == pytest.approx(expected, rel=1e-3)
    for target in kernels.runnable_targets():
        with kernels.target(target):
            if not kernels.has_fp16_arithmetic():
                job = alone(*flags, "--fp16-accumulation")
                assert job.returncode == 2 and job.stderr.count("\n") == 1, job.stderr
                assert (
                    f"--fp16-accumulation-chunk 64 needs FP16 arithmetic, which instruction set {target} lacks"
                    in job.stderr
                )


def test_fp32_matmuls_in_bf16_parts_where_the_instruction_set_can(alone, tmp_path):
    flags = [
        *TINY,
        "--train-iters",
        2,
        "--profile",
        "--profile-step-start",
        1,
        "--profile-step-end",
        2,
        "--profile-dir",
        tmp_path,
    ]
    done = set()
    for target in kernels.runnable_targets():
        with kernels.target(target):
            can = kernels.has_bf16_arithmetic()
            if can in done:
                continue
            done.add(can)
            job = alone(*flags, "--fp32-matmul", "bf16x3")
        assert job.returncode == (0 if can else 2), job.stderr
        if can:
            assert "; fp32 with bf16x3 matmuls, ZeRO stage 0" in job.stdout
            assert "kernels: gemm native, each FP32 operand as three BF16 numbers" in job.stdout
        else:
            assert (
                f"--fp32-matmul bf16x3 needs BF16 arithmetic, which instruction set {target} lacks: leave it out"
                in job.stderr
            )
            assert job.stderr.count("\n") == 1


RANKS_OWN = """
import os, runpy, sys
sys.argv = [{program!r}, *sys.argv[1:], *({flags!r} if os.environ["PMI_RANK"] == "1" else ())]
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.mark.full
def test_ranks_that_recompute_differently_train_and_other_differences_are_refused(
    mpich, alone, tmp_path
):
    """As the 13B script on Fugaku starts its last stages without recompute."""
    flags = [*TINY, "--train-iters", "3"]
    expected = [line.lm_loss for line in parse_log(alone(*flags).stdout.splitlines())]
    found = {}
    for name, own in {"recompute": ["--checkpoint-activations"], "lr": ["--lr", "2e-3"]}.items():
        program = tmp_path / f"{name}.py"
        program.write_text(RANKS_OWN.format(program=PROGRAM, flags=own))
        found[name] = mpich.run(2, str(program), *flags, "--pipeline-model-parallel-size", "2")
    done = found["recompute"]
    assert done.returncode == 0, done.stderr
    lines = parse_log(done.stdout.splitlines())
    assert [line.lm_loss for line in lines] == pytest.approx(expected, rel=1e-6)
    note = "note: ranks recompute differently: --recompute-granularity is None on rank 0, full on rank 1"
    assert note in done.stdout
    done = found["lr"]
    assert done.returncode and not parse_log(done.stdout.splitlines())
    refused = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if "--lr is 0.001 on rank 0, 0.002 on rank 1" in line
    ]
    assert len(refused) == 1 and "Traceback" not in done.stderr
