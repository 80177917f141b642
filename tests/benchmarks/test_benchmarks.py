"""Every benchmark command on the demo model, one round: measurements and files, not speed. Also the baselines' parity.

MPI itself: tests/benchmarks/test_ranks.py
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time

import pytest
import torch

from benchmarks import (
    attention,
    child,
    contestant,
    core,
    disturbance,
    experts,
    jobs,
    llama_cpp,
    openblas,
    preloads,
    shapes,
    step,
    torch_int8,
)
from benchmarks.__main__ import main
from benchmarks.plain_gpt import PlainGPT
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.costs.attention import causal_attention_flops
from fugaku_megatron.costs.layers import layer_records
from fugaku_megatron.costs.sizes import padded_vocab_size
from fugaku_megatron.host import kernels
from fugaku_megatron.nn.forward_context import Pass
from tests.checks.adapters import DELTA_NETS
from tests.checks.benchmarks import QUICK, needs_mpi, options, result, start
from tests.checks.once import once
from tests.checks.refusals import refusals
from tests.helpers import make_trainer, small_run
from tests.llama_models import FAMILIES as BLOCKS

pytestmark = pytest.mark.system

ROW = set(
    "op shape dtype target threads seconds gflops baseline baseline_seconds ratio peak_fraction "
    "gb_per_second max_error repeat".split()
)
MATMULS = {"forward", "data_grad", "weight_grad"}
ATTENTION = {"attention_forward", "attention", "attention_decode", "attention_part"}
ROWWISE = set(
    "layer_norm residual residual_norm dropout gelu cross_entropy cross_entropy_tp embedding position "
    "squared_norm count_zeros sum_rows adamw rms_norm residual_rms_norm swiglu rotary rotary_norm".split()
)
DELTA_NET = {
    "delta_rule_forward",
    "delta_rule",
    "delta_rule_decode",
    "convolution",
    "gated_norm",
}
IN_MEMORY = {"attention_decode", "delta_rule_decode", "convolution", "gated_norm"}
# The arguments: a folder, and a JSON list of names and commands. The result and the output of a command are files in the folder.
COMMANDS = f"""{QUICK}
import contextlib, json, sys
folder = sys.argv[1]
for name, command in json.loads(sys.argv[2]):
    with open(f"{{folder}}/{{name}}.txt", "w") as output, contextlib.redirect_stdout(output):
        try:
            __main__.main([*command.split(), "--json", f"{{folder}}/{{name}}.json"])
        except SystemExit as error:
            print(error, file=sys.stderr)
"""
ROUND = "--recipe demo --rounds 1"
STEP = f"step {ROUND} --micro-batch-size 2 --global-batch-size 4"
# Commands that one process runs, because each start imports torch.
TOGETHER = {
    "gemm fp32": f"gemm {ROUND} --only 128x128x128",  # one shape, with all rivals
    "gemm int8": f"gemm {ROUND} --dtype int8 --only 128x128x128",
    "rowwise fp32": f"rowwise {ROUND}",
    "latents": f"attention {ROUND} --num-query-groups 1 --key-size 24 --value-size 16 --seq-length 32 --only latent --mkl full",
    "step": f"{STEP} --mkl full",
    "step int8": f"{STEP} --dtype bf16 --int8 --int8-wgrad --mkl full",
}
LONGER = {
    "attention bf16": f"attention {ROUND} --dtype bf16 --mkl full",
    "delta_net fp32": f"delta_net {ROUND} --seq-length 65 --key-heads 1 --value-heads 2 --key-size 16 --value-size 16 --mkl full",
    "decode": "decode --model tiny --prompt-length 9 --new-tokens 24 --rounds 1 --mkl shipped",
    "llama.cpp": "decode --baseline llama.cpp --model tiny-qwen --prompt-length 9 --new-tokens 32 --prefill-length 64 --rounds 1 "
    "--mkl shipped",
}


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Run the commands in `TOGETHER`; return a function from a name to the JSON result and the output."""
    return run_together(tmp_path_factory, "together", TOGETHER)


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """Run the commands in `LONGER`, as `together`."""
    return run_together(tmp_path_factory, "longer", LONGER)


def run_together(tmp_path_factory, name, commands):
    commands = dict(commands)
    if not importlib.util.find_spec("transformers"):
        commands.pop("decode", None)
        commands.pop("delta_net fp32", None)
    if any(not importlib.util.find_spec(name) for name in llama_cpp.PACKAGES):
        commands.pop("llama.cpp", None)
    environment = preloads.mkl_environment("full")

    def run(folder):
        done = start(COMMANDS, str(folder), json.dumps(list(commands.items())), **environment)
        (folder / "errors").write_text(done.stderr)

    folder = once(tmp_path_factory, name, run)

    def of(name: str) -> tuple[dict, str]:
        path = folder / f"{name}.json"
        assert path.exists(), (folder / "errors").read_text()
        return json.loads(path.read_text()), path.with_suffix(".txt").read_text()

    return of


# Kernels against torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, dtype, ops",
    [
        ("gemm", "fp32", MATMULS),
        pytest.param("gemm", "int8", MATMULS, marks=pytest.mark.full),
        pytest.param("attention", "fp32", ATTENTION, marks=pytest.mark.full),
        pytest.param("attention", "bf16", ATTENTION, marks=pytest.mark.full),
        ("rowwise", "fp32", ROWWISE),
        pytest.param("rowwise", "bf16", ROWWISE, marks=pytest.mark.full),
        pytest.param("delta_net", "fp32", DELTA_NET, marks=pytest.mark.full),
    ],
)
def test_a_family_of_kernels(request, tmp_path, family, dtype, ops):
    name = f"{family} {dtype}"
    if name in TOGETHER:
        measured, printed = request.getfixturevalue("together")(name)
    elif name in LONGER:
        measured, printed = request.getfixturevalue("longer")(name)
    else:
        more = {"attention": "--mkl full", "gemm": "--only 128x128x128"}.get(family, "")
        command = f"{family} {ROUND} --dtype {dtype} {more}"
        measured, printed = result(tmp_path / "rows.json", command)
    rivals = []
    if dtype == "int8":
        rivals = list(map(re.escape, torch_int8.RIVALS))
    elif family == "gemm":
        rivals = ["MKL shipped"] if preloads.narrowed() else []
        rivals.append(r"OpenBLAS \w+")
    lines = printed.splitlines()
    assert {row["op"] for row in measured["rows"]} == ops
    assert "tuned" in measured["allocator"] and measured["allocator"] in lines[0]
    for row in measured["rows"]:
        assert row.keys() >= ROW and row["seconds"] > 0 and row["threads"] == 1
        assert row["target"] == kernels.active()
        assert row["ratio"] == pytest.approx(row["baseline_seconds"] / row["seconds"])
        assert len(row["rivals"]) == len(rivals) and all(map(re.fullmatch, rivals, row["rivals"]))
        for rival, of_rival in row["rivals"].items():
            assert of_rival["ratio"] == pytest.approx(of_rival["seconds"] / row["seconds"])
            assert f" x {rival}" in lines[-2]
        assert row["max_error"] < (2e-5 if row["dtype"] == "fp32" else 2e-2), row["op"]
        in_memory = family == "rowwise" or row["op"] in IN_MEMORY
        assert (row["gflops"] is None) == (row["peak_fraction"] is None) == in_memory
        assert row["gb_per_second"] > 0
        assert f"--only={row['op']} " in row["repeat"].replace("'", "") and row["repeat"] in printed


def test_latents_are_measured_against_both_limits(together):
    measured, printed = together("latents")
    (row,) = measured["rows"]
    heads, _, slots, key_size, value_size = row["shape"]
    flops = row["gflops"] * 1e9 * row["seconds"]
    assert flops == pytest.approx(2 * heads * slots * (key_size + value_size))
    assert f"{100 * row['peak_fraction']:.1f} % of FMA peak" in printed
    assert f"{100 * row['bandwidth_fraction']:.1f} % of triad" in printed


def test_openblas_makes_the_same_matmuls():
    torch.manual_seed(0)
    left = torch.randn(5, 7)
    right = torch.randn(7, 3)
    out = torch.empty(5, 3)
    for a, b in itertools.product(
        (left, left.mT.contiguous().mT), (right, right.mT.contiguous().mT)
    ):
        openblas.sgemm(a, b, out)
        torch.testing.assert_close(out, left @ right)
    openblas.sgemm(left, right, out, add=True)
    torch.testing.assert_close(out, 2 * left @ right)


@pytest.mark.parametrize("is_weight", [True, False], ids=["weight", "gradient"])
def test_torch_multiplies_int8_operands(is_weight):
    """Every rival but the bare matmul has the result of `left @ right`; a gradient is added to the one before."""
    torch.manual_seed(0)
    left = torch.randn(33, 48).bfloat16()
    right = torch.randn(24, 48).bfloat16().T
    exact = left.float() @ right.float()
    a, a_scales = torch_int8.quantize(left, 1)
    b, b_scales = torch_int8.quantize(right, 0)
    assert a_scales.shape == (33, 1) and b_scales.shape == (1, 24)
    product = torch_int8.matmul_alone(left, right, torch.zeros(33, 24), is_weight)()
    assert product.dtype == torch.int32
    assert torch.equal(product, a.int() @ b.int())
    torch.testing.assert_close(
        product * a_scales * b_scales, exact, rtol=0, atol=0.03 * exact.max()
    )
    out = torch.zeros(33, 24)
    run = torch_int8.scaled_matmul(left, right, out, is_weight)
    run()
    if not is_weight:
        run()
        out /= 2
    torch.testing.assert_close(out, exact, rtol=0, atol=0.05 * exact.max().item())


@pytest.mark.parametrize(
    "targets, core",
    {
        "portable avx2 avx512": {"OPENBLAS_CORETYPE": "SKYLAKEX"},
        "portable avx2": {"OPENBLAS_CORETYPE": "HASWELL"},
        "portable sve128": {},
    }.items(),
)
def test_openblas_takes_the_full_width_of_the_cpu(monkeypatch, targets, core):
    monkeypatch.setattr(kernels, "runnable_targets", targets.split)
    assert openblas.environment(3) == {"OPENBLAS_NUM_THREADS": "3", **core}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_experts_agree_with_their_opponents(dtype):
    """Every side but the dense one, which only has the FLOPs, computes the same; one expert gets half the rows."""
    given = options(f"experts --recipe olmoe --experts 3 --rows 5 --load skewed --dtype {dtype}")
    skewed = experts.counts_of(given, "skewed")
    assert skewed == (4, 7, 4) and experts.counts_of(given, "even") == (5, 5, 5)
    work = experts.Work.of(15, 40, 24, skewed, experts.DTYPES[dtype])
    tolerance = 2e-5 if dtype == "fp32" else 2e-2
    for op in ("forward", "data_grad", "weight_grad"):
        ours = work.out(op)
        theirs = work.out(op)
        call = work.grouped(op, ours)
        call.run()
        work.in_torch(op, theirs)()
        assert work.error(op, ours) < tolerance
        assert call.flops == work.dense(op, work.out(op)).flops == 2 * 15 * 40 * 24
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-1 if dtype == "bf16" else 1e-4)
        baselines = {case.baseline for case in experts.op_cases(work, op, "skewed")}
        assert baselines >= {"dense", "torch"}
    with pytest.raises(ValueError, match="--recipe demo has no experts"):
        next(experts.cases(options("experts --recipe demo")))


def test_attention_with_groups_and_a_window_agrees_with_torch():
    """Torch's side computes the same, and the FLOPs are those inside the window."""
    torch.manual_seed(0)
    flags = "--num-query-groups 2 --window-size 29,0"
    given = options(f"attention --recipe demo {flags}")
    forward, both, decode = attention.cases(given)
    heads, groups, s, d, window = both.shape
    assert (groups, window) == (2, 30)
    both.run()
    assert both.error() < 1e-5
    torch.testing.assert_close(forward.baseline_run(), both.calls[0].args[1], rtol=1e-4, atol=1e-5)
    assert both.calls[0].flops == causal_attention_flops(heads, s, d, window)
    decode.run()
    assert decode.error() < 1e-5


@pytest.mark.parametrize(
    "flags, expected",
    {
        "--recipe 124m": (12, 1024, 64),
        "--recipe 30b --tensor-model-parallel-size 4": (14, 2048, 128),
    }.items(),
)
def test_attention_shapes_are_those_of_the_published_aims(flags, expected):
    run = shapes.run_of(options(f"attention {flags}"))
    records = layer_records(run)
    record = next(record for record in records if record.name == "attention")
    assert (record.gemm_count, *record.gemm[1:]) == expected


# The step ------------------------------------------------------------------------------------------------------------------------


def test_plain_gpt_has_the_same_loss_and_gradients():
    trainer = make_trainer(SoloComm(), small_run(init_method_std=0.2))
    model = trainer.run.model
    tokens, labels = torch.randint(
        0, model.vocab_size, (2, model.seq_length, 3), generator=torch.Generator().manual_seed(4)
    )
    plain = PlainGPT(model, padded_vocab_size(model, 1))
    plain.load_state_dict({p.spec.name: p.data for p in trainer.optimizer.flat.parameters})
    trainer.optimizer.zero_grad()
    loss = trainer.stage.chunks[0](tokens, labels, Pass(first_sample=0))
    expected = plain(tokens.t(), labels.t())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    grads = {p.spec.name: p.main_grad for p in trainer.optimizer.flat.parameters}
    assert grads.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        scale = parameter.grad.abs().max()
        torch.testing.assert_close(
            grads[name] / scale,
            parameter.grad / scale,
            rtol=0,
            atol=1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


_OF_EXPERTS = {name: value for name, value in BLOCKS["qwen3"].items() if name != "qk_layernorm"} | {
    "num_experts": 4,
    "moe_ffn_hidden_size": 48,
}
EXPERTS = {
    "mixtral": _OF_EXPERTS,
    "qwen3-moe": {**_OF_EXPERTS, "qk_layernorm": True, "moe_ffn_hidden_size": 24},
    "qwen3.5-moe": {
        **{name: value for name, value in DELTA_NETS.items() if not name.startswith("lora")},
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_gate": True,
    },
}


@pytest.mark.parametrize(
    "baseline, block",
    [
        ("plain", {}),
        ("hf", {}),
        *(("hf", block) for block in (*BLOCKS.values(), *EXPERTS.values())),
    ],
    ids=["plain", "hf", *BLOCKS, *EXPERTS],
)
def test_a_baseline_trains_with_our_losses(baseline, block):
    if baseline == "hf":
        pytest.importorskip("transformers")
    flags = {
        "lr_decay_style": "constant",
        "lr": 3e-3,
        "train_iters": 6,
        "weight_decay": 0.1,
        "clip_grad": 0.5,
        "global_batch_size": 8,
    }
    run = small_run(**{**block, **flags})
    theirs = contestant.BaselineTrainer(baseline, run, compiled=False)
    trainer = make_trainer(SoloComm(), run)
    trainer.train = contestant.MockDataset(
        run.model.vocab_size, run.model.seq_length, 48, run.training.seed
    )
    for _ in range(5):
        assert theirs.step() == pytest.approx(trainer.train_step().loss, rel=2e-5)
    trainer.close()
    theirs.batches.close()


@pytest.mark.parametrize(
    "more",
    [
        "",
        pytest.param(
            "--dtype bf16 --baseline hf --baseline-preload tcmalloc", marks=pytest.mark.full
        ),
    ],
    ids=["fp32", "bf16 hf"],
)
def test_the_step(request, tmp_path, more):
    if more:
        pytest.importorskip("transformers")
        if preloads.find("tcmalloc") is None:
            pytest.skip(preloads.missing("tcmalloc"))
        measured, printed = result(tmp_path / "step.json", f"{STEP} {more}")
    else:
        measured, printed = request.getfixturevalue("together")("step")
    ours = measured["ours"]
    baseline = measured["baseline"]
    for side in (ours, baseline):
        assert side["seconds"] > 0 and side["peak_rss_mib"] > 50
        assert side["minor_faults_per_step"] >= 0
        assert side["tokens_per_s"] == pytest.approx(4 * 128 / side["seconds"])
        assert side["tflops"] == pytest.approx(measured["model_flops"] / side["seconds"] / 1e12)
    assert "tuned" in ours["allocator"]
    assert baseline["allocator"].startswith("tcmalloc" if more else "glibc")
    assert measured["ratio"] == pytest.approx(baseline["seconds"] / ours["seconds"])
    ceiling = pytest.approx(
        measured["model_flops"] / ours["seconds"] / measured["peak_gflops"] / 1e9
    )
    assert measured["ceiling_fraction"] == (None if more else ceiling)
    assert measured["threads"] == 1 and measured["clock_ghz"] > 0
    assert measured["cpu"] in printed and measured["repeat"] in printed
    same = pytest.approx(baseline["losses"], rel=step.SAME_LOSS[measured["dtype"]])
    assert ours["losses"] == same


def test_the_step_in_int8_beside_bf16(together):
    measured, printed = together("step int8")
    plain = measured[step.UNQUANTIZED]
    assert plain["ratio"] == pytest.approx(plain["seconds"] / measured["ours"]["seconds"])
    assert plain["losses"] == pytest.approx(measured["ours"]["losses"], rel=2e-3)
    assert plain["losses"] != measured["ours"]["losses"]
    assert "ours, --int8 --int8-wgrad" in printed and "x as fast as ours, bf16" in printed


def test_int8_matmuls_beside_bf16(together):
    measured, printed = together("gemm int8")
    assert measured["machine"]["int8_gops"] > 0
    assert "% of INT8 peak" in printed
    for row in measured["rows"]:
        assert row["baseline"] == "our BF16" and row["peak_fraction"] > 0
        assert 1e-4 < row["max_error"] < 3e-2


class Timed:
    """A contestant without a process: ours takes a second, torch at full width two, as shipped four."""

    def __init__(self, task):
        if task.side == "ours":
            self.seconds = 1.0
        elif any(preloads.MKL_NAME in path for path in task.preload):
            self.seconds = 2.0
        else:
            self.seconds = 4.0
        self.ready = {"allocator": "any"}

    def step(self):
        return {
            "seconds": self.seconds,
            "loss": 1.0,
            "minor_faults": 0,
            "system_seconds": 0.0,
            "peak_rss_mib": 1.0,
            "idle_cpu_seconds": 0.0,
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def wide_mkl(monkeypatch, tmp_path):
    """A CPU with an MKL that is narrower than possible; path of the library that widens MKL."""
    library = tmp_path / preloads.MKL_NAME
    monkeypatch.setattr(preloads, "narrowed", lambda: True)
    monkeypatch.setattr(preloads, "mkl_library", lambda: library)
    return str(library)


@pytest.mark.parametrize(
    "width, said",
    {
        "both": "2.000 x as fast as plain, MKL full, 4.000 x as fast as plain, MKL shipped",
        "full": "2.000 x as fast as plain, MKL full,",
        "shipped": "4.000 x as fast as plain, MKL shipped,",
    }.items(),
)
def test_the_step_against_either_mkl(monkeypatch, wide_mkl, tmp_path, capsys, width, said):
    monkeypatch.setattr(step, "Contestant", Timed)
    file = tmp_path / "a.json"
    core.run(step, options(f"step {ROUND} --mkl {width} --json {file}"))
    measured = json.loads(file.read_text())
    assert f"ours is {said}" in capsys.readouterr().out
    assert measured["ratio"] == measured["baseline"]["ratio"]
    assert measured.get("shipped", {}).get("ratio") == (4.0 if width == "both" else None)


@pytest.mark.parametrize(
    "flags, message",
    {
        "--lora-rank 4": "--lora-rank 4: --baseline plain has no adapters: pass --baseline trl",
        "--lora-base-format int8": "--lora-base-format int8 is for the frozen weights of adapters",
        "--baseline-load-in 4bit": "--baseline-load-in 4bit is for frozen weights: pass --lora-rank",
        "--baseline trl": "--baseline trl: trl missing: pip install -c requirements.txt -r requirements-trl.txt",
        "--baseline trl --lora-rank 4": "--baseline trl: trl and peft missing: pip install",
        "--baseline trl --lora-rank 4 --baseline-load-in 8bit": "trl and peft and bitsandbytes missing",
        "--baseline trl --lora-rank 4 --recipe olmoe": "the adapters of experts are not compared",
        "--baseline trl --lora-rank 0": "--lora-rank is 0: pass a number above 0",
    }.items(),
)
def test_baselines_that_cannot_run_are_refused(monkeypatch, flags, message):
    found = importlib.util.find_spec
    absent = ("trl", "peft", "bitsandbytes")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else found(name)
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        step.measure(options(f"step {flags}"))


@pytest.mark.parametrize("maker, narrower", [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_mkl_is_narrower_where_the_cpu_is_not_intels(tmp_path, maker, narrower):
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {maker}\n")
    assert preloads.narrowed(tmp_path / "cpuinfo") == (narrower and platform.machine() == "x86_64")


def test_the_library_that_widens_mkl_answers_and_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    built = preloads.mkl_library()
    assert ctypes.CDLL(str(built)).mkl_serv_intel_cpu_true() == 1
    begin = built.stat().st_mtime_ns
    assert preloads.mkl_library() == built and built.stat().st_mtime_ns == begin


def test_others_on_the_machine_are_seen(monkeypatch):
    watch = disturbance.Watch(1, time.process_time)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(0.5)
        other.kill()
    assert watch.others() > disturbance.OTHERS
    monkeypatch.setattr(disturbance, "busy_seconds", iter([100.0, 107.0]).__next__)
    own = disturbance.Watch(1, iter([10.0, 17.0]).__next__)
    assert own.others() == 0.0


def test_two_that_train_different_things_are_not_compared():
    class Side:
        def __init__(self, loss):
            self.loss = loss

        def step(self):
            return {"loss": self.loss, "seconds": 1.0}

    message = "the two do not train the same: first losses 9.000000 .ours., 9.100000"
    with pytest.raises(RuntimeError, match=message):
        step.take_turns(options("step"), {"ours": Side(9.0), "baseline": Side(9.1)})


def test_a_contestant_that_dies_is_an_error_and_not_a_wait(capfd):
    task = contestant.Task(side="baseline", recipe="demo", values={"no_such_field": 1}, threads=1)
    with pytest.raises(RuntimeError, match="the process of baseline ended with exit code 1"):
        contestant.Contestant(task)
    assert "no_such_field" in capfd.readouterr().err
    ready = [sys.executable, "-c", "print('{}', flush=True); input()"]
    with child.Child(ready, os.environ, "baseline") as side:
        assert side.answer() == {}
        side.process.kill()
        side.process.wait()
        with pytest.raises(RuntimeError, match="the process of baseline ended with exit code -9"):
            side.ask("step")


@needs_mpi
@pytest.mark.full
@pytest.mark.mpi
def test_layouts_are_measured_by_real_jobs(tmp_path):
    flags = "--ranks 2 --threads 2 --global-batch-size 4 --tensor-model-parallel-size 2"
    measured, printed = result(tmp_path / "layouts.json", f"step {ROUND} {flags}")
    rows = measured["layouts"]
    layouts = [(row["layout"], row["ranks"], row["threads"]) for row in rows]
    assert layouts == [("one rank", 1, 2), ("TP2", 2, 1)]
    assert measured["global_batch_size"] == 4 and rows[0]["ratio"] == 1.0
    for row in rows:
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-4), "layouts train the same"
        assert row["tokens_per_s"] == pytest.approx(4 * 128 / row["seconds"])
        assert row["layout"] in printed


# Allocators ---------------------------------------------------------------------------------------------------------------------


def test_another_allocator_than_requested_is_not_compared():
    for wanted, logged in (("tcmalloc", "tcmalloc"), ("stock", "glibc 2.36, stock")):
        jobs.check_allocator(wanted, logged)
    stock = "glibc 2.36, stock"
    with pytest.raises(RuntimeError, match=f"tcmalloc: the job's log says allocator {stock}"):
        jobs.check_allocator("tcmalloc", stock)


@needs_mpi
@pytest.mark.full
@pytest.mark.mpi
def test_allocators_are_measured_by_real_jobs(tmp_path):
    names = ["stock", "tuned", *(["tcmalloc"] if preloads.find("tcmalloc") else [])]
    picture = tmp_path / "alloc.png"
    flags = f"--quick --kernels torch --ranks 1 --recompute full --png {picture}"
    command = f"alloc {flags} --allocators {' '.join(names)}"
    measured, printed = result(tmp_path / "alloc.json", command)
    rows = {row["allocator"]: row for row in measured["rows"]}
    assert list(rows) == names
    for name, row in rows.items():
        assert row["recompute"] == "full" and row["kernels"] == "torch" and name in row["log"]
        assert row["peak_memory_mib"] > 50 and row["clock_ghz"] > 0
        assert math.isfinite(row["system_seconds"]) and row["minor_faults"] >= 0
        assert row["ratio"] == pytest.approx(rows["stock"]["seconds"] / row["seconds"])
    assert f"measured, {measured['cpu']}, {measured['clock_ghz']:.2f} GHz" in printed
    assert measured["repeat"] in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_layouts_of_a_long_sequence(monkeypatch, tmp_path, capsys):
    """The `full` tests for layouts start such jobs."""
    started = []

    def run(job: jobs.Job) -> jobs.Measured:
        started.append(" ".join(job.flags))
        return jobs.Measured(
            seconds=4.0 / job.ranks,
            tflops=1.0,
            samples_per_second=job.ranks / 4.0,
            minor_faults=0,
            system_seconds=0.0,
            clock_ghz=1.0,
            peak_memory_mib=300,
            allocator="tuned",
            loss=1.0,
            others=0.0,
        )

    monkeypatch.setattr(jobs, "run", run)
    file = tmp_path / "a.json"
    sizes = "--recipe demo --num-layers 2 --seq-length 4096 --global-batch-size 1"
    flags = f"--ranks 2 --threads 2 {sizes} --cp-comm-type a2a p2p --recompute --rounds 1"
    main(f"step {flags} --json {file}".split())
    rows = {row["layout"]: row for row in json.loads(file.read_text())["layouts"]}
    assert list(rows) == ["one rank", "CP2 a2a", "CP2 p2p", "TP2"]
    assert [(row["threads"], row["ratio"]) for row in rows.values()] == [(2, 1.0), *[(1, 2.0)] * 3]
    assert rows["one rank"]["tokens_per_s"] == 1024
    own = ["", *(f"--context-parallel-size 2 --cp-comm-type {t}" for t in ("a2a", "p2p"))]
    for words, expected in zip(started, [*own, "--sequence-parallel"], strict=True):
        assert expected in words
        assert "--seq-length 4096" in words and "--global-batch-size 1" in words
        assert "--num-layers 2" in words and "--recompute-granularity full" in words
    assert "CP2 a2a" in capsys.readouterr().out


@needs_mpi
def test_a_job_that_fails_is_quoted():
    job = jobs.Job(ranks=1, threads=1, flags=("--recipe", "no"))
    with pytest.raises(RuntimeError, match="--recipe no is unknown"):
        jobs.run(job)


@pytest.mark.full
def test_decoding_against_transformers(longer):
    pytest.importorskip("transformers")
    measured, printed = longer("decode")
    assert measured["same_tokens"] and len(measured["rounds"]) == 1
    assert measured["ratio"] > 0 and measured["repeat"] in printed
    reading = measured["weight_bytes"] / measured["read_gb_per_s"] / 1e9
    assert measured["bound"] == pytest.approx(measured["seconds"]["transformers"] / reading)
    assert f"only read the weights would be {measured['bound']:.2f} x" in printed


@pytest.mark.full
def test_decoding_against_llama_cpp(longer):
    for name in llama_cpp.PACKAGES:
        pytest.importorskip(name)
    measured, printed = longer("llama.cpp")
    rows = {(row["format"], row["workload"]): row for row in measured["rows"]}
    workloads = ("decode, batch 1", "decode, batch 8", "prefill of 64")
    assert list(rows) == [(name, work) for name in llama_cpp.FORMATS for work in workloads]
    for work, length in zip(workloads, (32, 32, 1)):
        assert rows["f32", work]["same"] == length
    for row in rows.values():
        assert row["ratio"] == min(row["seconds"]["llama.cpp"]) / min(row["seconds"]["ours"]) > 0
    assert measured["built_with"] in printed and measured["version"] in printed


@pytest.mark.parametrize(("_", "words", "message"), refusals("benchmarks"))
def test_mistakes_are_one_line(_, words, message, monkeypatch):
    monkeypatch.setattr(jobs, "run", lambda job: pytest.fail("nothing may be measured"))
    with pytest.raises(SystemExit) as error:
        main(words.split())
    assert str(error.value).startswith(f"python -m benchmarks {words.split()[0]}: ")
    assert message in str(error.value) and "\n" not in str(error.value)
