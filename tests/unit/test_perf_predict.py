"""The predict command: JSON alone on stdout, pretrain_gpt.py's flags, one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fugaku_megatron import cli

EXAMPLE = ("predict --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
           "--global-batch-size 1024 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --checkpoint-activations "
           "--machine a64fx --ghz 2.0 --software torch1.10 --nodes 16 --ranks-per-node 1")
KEYS = {"seconds_per_iteration", "lower", "upper", "slow_network", "tflops_per_node", "memory_mib_max", "oom", "bubble_fraction",
        "breakdown", "warnings"}


def run_json(command: str, capsys) -> dict:
    assert cli.main([*command.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.system
def test_json_alone_on_stdout():
    command = [sys.executable, "-m", "fugaku_megatron", *EXAMPLE.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    prediction = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == "" and set(prediction) == KEYS
    assert prediction["lower"] < prediction["seconds_per_iteration"] < prediction["upper"] and prediction["oom"] is False


def test_flags_mean_what_they_mean_to_the_trainer(capsys):
    plain = run_json(EXAMPLE, capsys)
    assert run_json(EXAMPLE + " --data-path somewhere_text_document --lr 1e-4 --no-cuda --save checkpoints", capsys) == plain
    assert run_json(EXAMPLE.replace("--checkpoint-activations", "--recompute-granularity full"), capsys) == plain
    assert run_json(EXAMPLE + " --vocab-size 250000", capsys)["seconds_per_iteration"] > plain["seconds_per_iteration"]


def test_a_recipe_and_its_defaults(capsys):
    prediction = run_json("predict --recipe 30b --software torch1.10 --nodes 192 --tensor-model-parallel-size 4 "
                    "--pipeline-model-parallel-size 48 --checkpoint-activations", capsys)
    assert prediction["seconds_per_iteration"] == pytest.approx(3535, rel=0.06) and not prediction["oom"]


def test_out_of_memory_is_said(capsys):
    command = ("predict --recipe 30b --nodes 384 --software torch1.10 --tensor-model-parallel-size 8 "
               "--pipeline-model-parallel-size 48")
    assert run_json(command, capsys)["oom"] is True
    assert cli.main(command.split()) == 0 and "OUT OF MEMORY" in capsys.readouterr().out


def test_the_text_names_machine_layout_and_causes(capsys):
    assert cli.main(EXAMPLE.split()) == 0
    printed = capsys.readouterr().out
    assert "DP 16 x TP 1 x PP 1" in printed and "page_faults" in printed and "model" in printed
    assert "nobody has run" not in printed


def test_only_one_number_is_called_bubble_and_a64fx_figures_say_that_nobody_ran_it(capsys):
    command = "predict --recipe 30b --nodes 192 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 48"
    assert cli.main(command.split()) == 0
    printed = capsys.readouterr().out
    assert printed.count("bubble") == 1 and "bubble 30.8% (mean over the stages)" in printed and "slowest_stage_waits" in printed
    assert "warning: nobody has run fugaku_megatron on an A64FX: its figures come from this model and from emulation\n" in printed


@pytest.mark.parametrize("flags, message", [
    ("--kernels torch", "without --kernels torch, which is not modelled"),
    ("--allocator stock", "without --allocator stock"), ("--cache-packed-weights", "without --cache-packed-weights"),
    ("--fp16 --fp16-accumulation", "without --fp16-accumulation-chunk"),
    ("--cpu-frequency 2.2", "--cpu-frequency 2.2 is not the clock of this time, 2.0: pass --ghz"),
    ("--software torch1.10 --zero-stage 1", "software torch1.10 has no --zero-stage 1"),
    ("--software torch1.10 --recompute-activations", "software torch1.10 has no selective recompute"),
    ("--seq-length 65536 --checkpoint-activations --attention-dropout 0", "TFLOPs are above the 6.144 of the machine")])
def test_a_flag_that_the_time_leaves_out_is_said(flags, message, capsys):
    assert not any(message in w for w in run_json("predict --recipe 124m --nodes 4 --cpu-frequency 2.0", capsys)["warnings"])
    assert any(message in w for w in run_json(f"predict --recipe 124m --nodes 4 {flags}", capsys)["warnings"])


@pytest.mark.parametrize("change, message", [
    ("--machine a64", "did you mean a64fx"), ("--software torch", "--software torch is unknown"),
    ("--ghz 3", "--ghz 3.0 is not a clock"),
    ("--softwear x", "unknown flag --softwear: did you mean --software"),
    ("--num-layer 3", "did you mean --num-layers"),
    ("--tensor-model-parallel-size 3", "world size 16 is not divisible by --tensor-model-parallel-size 3 x --pipeline-model-"
     "parallel-size 1 = 3: pass --tensor- x --pipeline-model-parallel-size 4 x 1, 2 x 1 or 4 x 2, which fit on these nodes "
     "(plan finds the fastest), or start 15 or 18 ranks"),
    ("--pipeline-model-parallel-size 32", "= 32: pass --tensor- x --pipeline-model-parallel-size 1 x 8, 1 x 4 or 2 x 8, "),
    ("--nodes 3", "data-parallel size 3 = 3: pass --tensor- x --pipeline-model-parallel-size 1 x 3, which fit on"),
    ("--global-batch-size 100", "--global-batch-size 100 is not"),
    ("--nodes 0", "--nodes is 0"), ("--world-size 8", "--world-size 8 is not --nodes 16 x"),
    ("--pipeline-split 20,4 --pipeline-model-parallel-size 2", "--pipeline-split 20,4: torch1.10 cuts layers evenly"),
    ("--pipeline-model-parallel-size 16", "and torch1.10 cuts layers evenly: change one of them"),
    ("--hidden-size 2047", "not divisible by"),
    ("--ranks-per-node 100", "pass 1 to 48")])
def test_mistakes_are_one_line_and_exit_code_2(change, message, capsys):
    assert cli.main([*EXAMPLE.split(), *change.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
