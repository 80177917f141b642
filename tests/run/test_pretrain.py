"""pretrain_gpt.py as a user starts it: trains, logs, saves, resumes, and refuses mistakes with one line.

Tests with one rank run in this process, without a start. Killed ranks: tests/jobs/test_restarts.py
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fugaku_megatron.checkpoint.manifest import latest_iteration
from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.costs.flops import hardware_flops
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.host import kernels
from fugaku_megatron.observe.log.iteration_metrics import parse_log
from fugaku_megatron.run.checks import check_early
from tests.mpi.launch import words
from tests.mpi.pretraining import (
    MODEL,
    PROGRAM,
    TINY,
    losses,
    pretrain,
    ranks,
    resuming,
    start,
    wait_for_lines,
)

pytestmark = [pytest.mark.system, pytest.mark.mpi]


def iterations(job):
    return parse_log(job.stdout.splitlines())


def test_trains_logs_and_resumes_to_the_same_bits(mpi, tmp_path, monkeypatch):
    """The second start ends within a log interval and a profile; both are written all the same."""
    level = {"mpich": "serialized", "openmpi": "funneled"}[mpi.name]
    monkeypatch.setenv("FUGAKU_MEGATRON_MPI_THREAD_LEVEL", level)
    flags = (
        f"{TINY} --train-iters 8 --zero-stage 1 --log-params-norm --log-num-zeros-in-grad "
        "--hidden-dropout 0.1 --lr-decay-style cosine --lr-warmup-iters 2 --checkpoint-activations "
        f"--profile --profile-dir {tmp_path}/profile"
    )
    to_the_end = "--profile-ranks 1 --profile-step-start 7 --profile-step-end 50"
    saved = f"--save {tmp_path}/whole --save-interval 5"
    whole = pretrain(mpi, 2, flags, saved, to_the_end)
    assert f"MPI_THREAD_{level.upper()}" in whole.stdout
    lines = iterations(whole)
    assert [line.iteration for line in lines] == list(range(1, 9)) and lines[-1].params_norm > 0
    for line in lines:
        assert line.minor_faults >= 0 and line.system_seconds >= 0 and 0.1 < line.clock_ghz < 10
    check_tflops(flags, whole.stdout, lines[-1])
    assert (tmp_path / "profile" / "table_rank1.txt").exists()
    assert "peak memory per rank: max" in whole.stdout
    resumed = pretrain(
        mpi,
        2,
        flags,
        f"--save {tmp_path}/resumed --load {tmp_path}/whole --ckpt-step 5",
        "--profile-ranks 0 --profile-step-start 40 --profile-step-end 50",
    )
    assert "at iteration 5" in resumed.stdout
    note = "note: no profile: this start had 3 iterations, --profile-step-start is 40"
    assert note in resumed.stdout
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")[5:]


def check_tflops(flags, log, line):
    """c B s l h^2 (1 + s/(6h) + v/(16 l h)) with c = 96, B = 8, s = 16, l = 2, h = 32, v = 96"""
    by_hand = 96 * 8 * 16 * 2 * 32**2 * (1 + 16 / (6 * 32) + 96 / (16 * 2 * 32))
    assert hardware_flops(parse(words(flags)).run, 8) == pytest.approx(by_hand)
    shown = re.search(r"FLOPs per iteration of 8 samples: (\S+) hardware", log)
    assert float(shown[1]) == pytest.approx(by_hand, rel=1e-4)
    per_rank = by_hand / 2 / line.elapsed_seconds / 1e12
    assert line.tflops == pytest.approx(per_rank, abs=0.005 + by_hand / 1e12)


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        pytest.param({"LC_ALL": "C.UTF-8"}, marks=pytest.mark.full),
    ],
)
def test_paths_of_any_bytes_end_no_run(mpich, tmp_path, locale):
    """No path ends a run: --save, --log-file, --profile-dir, and the picture's, with paths in its title."""
    place = os.fsencode(tmp_path) + b"/\xff\xc3\xa9"

    def run(flags):
        return subprocess.run(
            [sys.executable, PROGRAM, *words(TINY, "--train-iters 4"), *flags.split()],
            capture_output=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1", **locale},
        )

    done = run(
        b"--save %b --log-file %b.log --log-ranks %b.ranks --profile --profile-step-start 2 "
        b"--profile-step-end 3 --profile-dir %b.p" % (place, place, place, place)
    )
    assert done.returncode == 0 and b"Traceback" not in done.stdout + done.stderr, done
    assert b"not drawn" not in done.stdout
    saved = b"saved checkpoint of iteration 4 to " + place + b"\n"
    with open(place + b".log", "rb") as log:
        assert saved in done.stdout and saved in log.read()
    assert os.path.getsize(place + b"/loss_curve.png") > 10_000
    refused = run(b"--tensorboard-dir " + place)
    assert refused.returncode == 2 and refused.stderr.count(b"\n") == 1
    assert b"--tensorboard-dir " + place in refused.stderr


@pytest.mark.full
def test_a_rank_whose_experts_get_all_tokens_is_named(mpich, tmp_path):
    """Weights that round to 0 make all scores equal, so that every token takes the same expert."""
    job = pretrain(
        mpich,
        2,
        "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 96",
        "--micro-batch-size 1 --global-batch-size 2 --num-experts 4 --moe-ffn-hidden-size 64",
        "--moe-router-topk 1 --expert-model-parallel-size 2 --train-iters 1 --lr 1e-30 --min-lr 0",
        "--init-method-std 1e-46 --log-interval 1 --eval-iters 0 --mock-data --swiglu",
        "--disable-bias-linear --moe-router-pre-softmax --position-embedding-type rope",
        "--normalization RMSNorm --save",
        tmp_path,
    )
    assert "computes 2.00 of the mean" in job.stdout
    assert "without a token since the last report: " in job.stdout


def test_sigterm_saves_and_leaves_with_zero(mpich, tmp_path):
    job = start(mpich, TINY, resuming(tmp_path), "--train-iters 100000 --save-interval 100000")
    wait_for_lines(job, 3)
    for rank in ranks(job):
        rank.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0 and "a signal asked to stop" in output, output
    assert latest_iteration(tmp_path) >= 3


def test_exit_duration_saves_logs_and_leaves_with_zero(alone, tmp_path):
    job = alone(
        f"{TINY} --train-iters 1000000 --log-interval 100000 --exit-duration-in-mins 0.01",
        f"--save {tmp_path}",
    )
    assert "--exit-duration-in-mins is over" in job.stdout
    assert [line.iteration for line in iterations(job)] == [latest_iteration(tmp_path)]
    assert len(losses(tmp_path)) == 1


@pytest.mark.full
def test_another_layout_continues_with_the_same_curve(mpich, alone, tmp_path):
    """One rank, a pipeline on two, and one rank again."""
    flags = f"{TINY} --train-iters 8 --hidden-dropout 0.1"
    parts = resuming(tmp_path / "parts")
    alone(flags, f"--save {tmp_path}/whole")
    first = alone(flags, parts, "--exit-interval 3")
    assert "leaving after iteration 3: --exit-interval 3" in first.stdout
    pipeline = "--pipeline-model-parallel-size 2 --pipeline-schedule auto --recompute-auto"
    second = pretrain(mpich, 2, flags, parts, pipeline, "--exit-interval 6").stdout
    alone(flags, parts)
    assert (
        "note: saved with TP 1 x PP 1 x DP 1 x ZeRO shards 1, continues with TP 1 x PP 2 x DP 1 "
        "x ZeRO shards 1" in second
    )
    assert "\nschedule: " in second and "; 1f1b 0." in second
    assert "(model, a64fx)\nrecompute: " in second
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "parts") == pytest.approx(whole, rel=1e-6)
    assert whole[6:] != whole[:2]


def test_a_converted_model_keeps_its_padding_out_of_the_loss(alone, tmp_path):
    """Logits are near -60, so that a padding row would have the whole softmax, as it has if the flag says no."""
    pytest.importorskip("transformers")
    from tests.checks.conversions import convert
    from tests.hf_models import shifted_gpt2

    model = shifted_gpt2(503, 16, -60.0)
    own = tmp_path / "own"
    model.save_pretrained(tmp_path / "theirs")
    assert convert("--from-hf", tmp_path / "theirs", "--save", tmp_path / "ours") == 0
    converted = (tmp_path / "ours" / "model.flags").read_text()
    assert "--mask-vocab-padding yes" in " ".join(converted.split())
    flags = (
        " ".join(converted.split()).replace("--mask-vocab-padding yes", "")
        + " --hidden-dropout 0 --attention-dropout 0 --seq-length 16 --mock-data --micro-batch-size 2 "
        "--global-batch-size 4 --log-interval 1 --eval-iters 0 --kernels native --lr 1e-3 "
        f"--lr-decay-iters 8 {resuming(own)}"
    )
    first = alone(flags, f"--pretrained-checkpoint {tmp_path}/ours --train-iters 2")
    assert "padded vocabulary 512\n" in first.stdout
    samples = torch.tensor(np.stack([MockDataset(503, 16, 8, 1234)[i] for i in range(4)]))
    with torch.no_grad():
        logits = model(samples[:, :-1]).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, samples[:, 1:].flatten()).item()
    assert losses(own)[0] == pytest.approx(expected, rel=1e-5)
    second = alone(flags, "--train-iters 3").stdout
    assert "padding counted" not in second and "note: --mask" not in second
    third = alone(flags, "--train-iters 4 --mask-vocab-padding no")
    assert "note: --mask-vocab-padding is no, was yes: the loss curve" in third.stdout
    assert losses(own)[2] < expected + 1 < 40 < losses(own)[3]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_may_not_be_loaded_or_replaced_is_refused(alone, tmp_path):
    """A forgotten --load changes no file. With a truncated shard the previous checkpoint loads."""
    flags = f"{TINY} --save {tmp_path} --save-interval 2"
    alone(flags, "--train-iters 4")
    before = contents(tmp_path)
    refused = alone(flags, "--train-iters 6", code=2)
    refused.mistake(f"--save {tmp_path} holds checkpoints of iterations 2, 4", f"--load {tmp_path}")
    assert contents(tmp_path) == before
    shard = min((tmp_path / "iter_0000004").glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size // 2)
    resumed = f"{flags} --load {tmp_path} --train-iters 6"
    alone(resumed, code=2).mistake(shard.name, "--ckpt-step")
    assert "at iteration 2" in alone(resumed, "--ckpt-step 2").stdout


def test_resumes_with_another_batch_size_and_seed(alone, tmp_path):
    def consumed(flags) -> tuple[list[int], str]:
        """Return the consumed samples after every iteration, and the log."""
        job = alone(TINY, resuming(tmp_path), flags)
        return [line.consumed_samples for line in iterations(job)], job.stdout

    assert consumed("--train-samples 48 --exit-interval 2")[0] == [8, 16]
    smaller, log = consumed("--train-samples 28 --global-batch-size 4 --seed 5")
    assert smaller == [20, 24, 28] and "note: --seed is 5, was 1234" in log
    assert consumed("--train-iters 7 --global-batch-size 16")[0] == [44, 60]
    again, log = consumed("--train-iters 7 --global-batch-size 16")
    assert again == [] and "nothing left to train: at iteration 7 of 7" in log


@pytest.mark.parametrize(
    "flags, message",
    [
        # found by all ranks, as in tests/comm/test_mpi.py
        pytest.param(
            "--tensor-model-parallel-size 4",
            "--tensor-model-parallel-size 4",
            marks=pytest.mark.full,
        ),
        # by one
        (
            f"--profile --profile-dir {PROGRAM} --profile-ranks 1",
            f"{PROGRAM} is not writable: rank 0: ",
        ),
    ],
)
def test_mistakes_give_one_line(mpich, flags, message):
    job = pretrain(mpich, 2, TINY, "--train-iters 1", flags, code=2)
    job.mistake(message)
    assert job.stderr.startswith("rank 0: ")


@pytest.mark.parametrize(
    "flags, message",
    {
        "": "--train-iters or --train-samples",
        "--train-iters 1 --global-batch-size 7": "use 4 or 8",
        "--train-iters 1 --num-layers 3 --pipeline-model-parallel-size 2 --pipeline-split even": "--num-layers 3",
        "--train-iters 1 --profile --profile-ranks 0 2": "--profile-ranks 0 2: the run has ranks 0 to 1",
    }.items(),
)
def test_flags_that_no_run_of_two_ranks_can_have(flags, message):
    with pytest.raises(ValueError, match=message):
        check_early(parse(words(TINY, flags)).run, 2)


def test_missing_data_and_unwritable_save_give_one_line(alone, tmp_path):
    (tmp_path / "file").write_text("")
    missing = alone(f"{MODEL} --train-iters 1 --data-path {tmp_path}/none", code=2)
    missing.mistake("none.idx")
    assert missing.stdout == "", "before memory, the machine and the data are looked at"
    alone(f"{TINY} --train-iters 1 --save {tmp_path}/file/below", code=2).mistake("--save")


def test_sums_in_fp16_where_the_instruction_set_can(alone, tmp_path):
    flags = f"{TINY} --train-iters 4 --fp16 --initial-loss-scale 1024"
    with kernels.target("portable"):
        alone(flags, f"--save {tmp_path}/fp32")
        job = alone(flags, f"--fp16-accumulation-chunk 8 --save {tmp_path}/fp16")
    assert "gemm native, partial sums of 8 terms in FP16" in job.stdout
    found, expected = (losses(tmp_path / name) for name in ("fp16", "fp32"))
    assert found != expected and found == pytest.approx(expected, rel=1e-3)
    for target in kernels.runnable_targets():
        with kernels.target(target):
            if not kernels.has_fp16_arithmetic():
                alone(flags, "--fp16-accumulation", code=2).mistake(
                    "--fp16-accumulation-chunk 64 needs FP16 arithmetic, which instruction set "
                    f"{target} lacks"
                )


def test_fp32_matmuls_in_bf16_parts_where_the_instruction_set_can(alone, tmp_path):
    flags = (
        f"{TINY} --train-iters 2 --fp32-matmul bf16x3 --profile --profile-step-start 1 "
        f"--profile-step-end 2 --profile-dir {tmp_path}"
    )
    by_arithmetic = {}
    for target in kernels.runnable_targets():
        with kernels.target(target):
            by_arithmetic.setdefault(kernels.has_bf16_arithmetic(), target)
    for can, target in by_arithmetic.items():
        with kernels.target(target):
            job = alone(flags, code=0 if can else 2)
        if can:
            assert "; fp32 with bf16x3 matmuls, ZeRO stage 0" in job.stdout
            assert "kernels: gemm native, each FP32 operand as three BF16 numbers" in job.stdout
        else:
            job.mistake(
                "--fp32-matmul bf16x3 needs BF16 arithmetic, which instruction set "
                f"{target} lacks: leave it out"
            )


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
    flags = f"{TINY} --train-iters 3"

    def of_two(*own):
        program = tmp_path / "own.py"
        program.write_text(RANKS_OWN.format(program=PROGRAM, flags=own))
        pipeline = "--pipeline-model-parallel-size 2"
        return mpich.run(2, *words(program, flags, pipeline), code=None)

    expected = [line.lm_loss for line in iterations(alone(flags))]
    done = of_two("--checkpoint-activations").check(0)
    assert [line.lm_loss for line in iterations(done)] == pytest.approx(expected, rel=1e-6)
    note = "note: ranks recompute differently: --recompute-granularity is None on rank 0, full on rank 1"
    assert note in done.stdout
    done = of_two("--lr", "2e-3")
    assert done.returncode and not iterations(done)
    printed = done.stdout + done.stderr
    assert printed.count("--lr is 0.001 on rank 0, 0.002 on rank 1") == 1
    assert "Traceback" not in done.stderr
