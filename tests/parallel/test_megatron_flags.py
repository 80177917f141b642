"""Flags of Megatron-LM, its forks and their scripts: done, noted, or refused with a reason."""

import os
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fugaku_megatron import cli
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.arguments import build_parser, parse
from fugaku_megatron.config.batches import run_length
from fugaku_megatron.config.compatibility import COMPATIBILITY_FLAGS, ONLY, REFUSED_FLAGS
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.logs import metrics
from fugaku_megatron.logs.metrics import MetricsWriter, WandbRun
from fugaku_megatron.training import pretrain
from fugaku_megatron.training.resume import find_checkpoint
from fugaku_megatron.training.session import Session
from tests.helpers import make_trainer, small_run
from tools import megatron_flags

BASE = ["--recipe", "demo", "--mock-data"]


def refusal(*words: str) -> str:
    with pytest.raises(ValueError) as refused:
        parse([*BASE, *words])
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_all_unknown_flags_are_reported_at_once():
    text = refusal("--quux", "3", "--num-layer", "-1", "--lr", "0.1", "--foo=bar", "--quux", "4")
    assert text == "unknown flags --quux, --num-layer (did you mean --num-layers?), --foo=bar: see --help for those there are"


@pytest.mark.parametrize("name", REFUSED_FLAGS)
def test_a_refused_flag_says_why(name):
    values, reason = REFUSED_FLAGS[name]
    assert refusal(name, *["1"] * values) == f"{name}: {reason}"


def test_refused_flags_are_reported_at_once_and_a_line_each(capsys):
    words = ["--fp8-format", "e4m3", "--context-parallel-size", "2", "--dataloader-type", "cyclic", "--decoupled-lr", "8"]
    text = refusal(*words)
    assert [part.split(":")[0] for part in text.split("; ") if part.startswith("--")] == [
        "--fp8-format", "--decoupled-lr", "--context-parallel-size 2", "--dataloader-type cyclic"]
    assert cli.main(["train", *BASE, *words]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "fugaku-megatron train: 4 flags are refused:"
    assert [line.split(":")[0] for line in others] == [
        "  --fp8-format", "  --decoupled-lr", "  --context-parallel-size 2", "  --dataloader-type cyclic"]


def test_the_remedy_for_fp8_is_no_flag_that_is_given(capsys):
    assert "use --bf16" not in refusal("--fp8-format", "hybrid", "--bf16") and cli.main(["train", *BASE, "--squared-relu"]) == 2
    assert capsys.readouterr().err == "fugaku-megatron train: --squared-relu: the MLP has GELU, or --swiglu\n"


@pytest.mark.parametrize("name", [*COMPATIBILITY_FLAGS])
def test_what_means_nothing_here_is_noted(name):
    values, meaning = COMPATIBILITY_FLAGS[name]
    value = {"--optimizer": "adam"}.get(name, ONLY.get(name, (("1",),))[0][0])
    arguments = parse([*BASE, name, *[value] * (1 if values else 0)])
    assert arguments.notes == (f"{name}: {meaning}",) and arguments.run == parse(BASE).run


@pytest.mark.parametrize(("tracker", "files"), [
    ("5", ["iter_0000005/mp_rank_00/model_optim_rng.pt"]), ("5", ["iter_0000005/.metadata", "iter_0000005/common.pt"]),
    ("release", ["release/mp_rank_00/model_optim_rng.pt"])])
def test_a_checkpoint_of_megatron_is_recognised(tmp_path, tracker, files):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    for save in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=r" is a checkpoint of Megatron-LM \(it holds .*convert --from-m"):
            find_checkpoint(small_run(load=str(tmp_path), save=save), SoloComm())


@pytest.mark.parametrize("iteration", [0, 15])
def test_skip_train_evaluates_and_trains_nothing(tmp_path, capsys, iteration):
    """megatron/training/training.py, build_train_valid_test_data_loaders: validation then begins at its first sample."""
    run = small_run(num_layers=1, skip_train=True, eval_iters=2, eval_interval=10, save=str(tmp_path), load=str(tmp_path))
    trainer = make_trainer(SoloComm(), run)
    expected = trainer.evaluate(trainer.valid, 0, 2)
    trainer.progress = replace(trainer.progress, iteration=iteration)
    Session(trainer, MetricsWriter(20, 10), 20, True).evaluate_only()
    trainer.close()
    printed = capsys.readouterr().out
    assert f"lm loss value: {expected:.6E}" in printed and "--skip-train: nothing is trained" in printed
    assert trainer.progress.iteration == iteration and not list(tmp_path.iterdir())


class Package(SimpleNamespace):
    """In place of the package: it keeps what it is told."""

    def init(self, **given):
        self.given, self.logged, self.finished = given, [], False
        return SimpleNamespace(log=lambda values, step: self.logged.append((step, values)),
                               finish=lambda: setattr(self, "finished", True))


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Package(__spec__=SimpleNamespace(name="wandb")))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return sys.modules["wandb"]


def test_wandb_gets_the_figures_and_is_offline_without_a_network(package, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wanted = WandbRun("project", "name", "team", str(tmp_path / "new"), {"lr": 1})
    writer = MetricsWriter(10, 5, wandb=wanted)
    writer.validation(5, 2.0, 80)
    writer.close()
    assert package.given == {"project": "project", "name": "name", "entity": "team", "dir": str(tmp_path / "new"),
                             "config": {"lr": 1}, "mode": "offline"}
    assert (5, {"lm loss validation": 2.0}) in package.logged and package.finished
    assert "--wandb-project: offline" in capsys.readouterr().out
    MetricsWriter(10, 5, wandb=wanted, printing=False).close()
    assert not package.logged or package.finished
    monkeypatch.setattr(metrics, "_reachable", lambda: True)
    MetricsWriter(10, 5, wandb=wanted).close()
    assert package.given["mode"] == "online"


def test_an_error_of_wandb_does_not_end_the_run(package, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(package, "init", lambda **given: 1 / 0)
    MetricsWriter(10, 5, wandb=WandbRun("project", "name")).validation(5, 2.0, 80)
    assert "--wandb-project project: division by zero; the run continues without it" in capsys.readouterr().out


@pytest.mark.system
def test_the_real_package_keeps_a_run_offline(tmp_path):
    words = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --mock-data"
    order = [*words.split(), *"--vocab-size 64 --train-iters 3 --log-interval 1 --eval-iters 0 --kernels native".split(),
             *"--wandb-project p --wandb-exp-name n".split()]
    # The limits are for hangs alone: with a load of 12 on two cores, its 11 processor seconds took two minutes.
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
                   "OMP_NUM_THREADS": "1", "WANDB__SERVICE_WAIT": "600", "WANDB_INIT_TIMEOUT": "600"}
    done = subprocess.run([sys.executable, "-m", "fugaku_megatron", "train", *order], cwd=tmp_path, capture_output=True, text=True,
                          env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "--wandb-project: offline" in done.stdout and len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1


def test_wandb_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--wandb-project p: a package is missing: pip install wandb"):
        MetricsWriter(10, 5, wandb=WandbRun("p", "n"))
    assert refusal("--wandb-project", "p").startswith("--wandb-project p needs --wandb-exp-name")
    assert parse([*BASE, "--wandb-entity", "e"]).notes == ("--wandb-entity has no effect without --wandb-project",)


@pytest.mark.parametrize("document", megatron_flags.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_of_the_documents_are_those_of_the_program(document):
    made = "\n".join(megatron_flags.DOCUMENTS[document]())
    assert document.read_text().partition(megatron_flags.LINE)[2].strip() == made.strip(), "python -m tools.megatron_flags --write"


def test_the_page_of_flags_has_every_flag_with_its_default_and_every_recipe():
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in megatron_flags.flag_tables() if line[:3] == "| `"]
    named = [name for cells in rows for name in re.findall(r"`(.*?)`", cells[0])]
    flags = [option for action in build_parser()._actions for option in action.option_strings if action.dest != "help"]
    assert sorted(named) == sorted([*flags, "--recipe", *RECIPES])  # --recipe is also the head of the last table
    by_name = {re.match("`(.*?)`", cells[0])[1]: cells[1:] for cells in rows}
    assert by_name["--lr-warmup-iters"] == ["integer", "0", "iterations of linear warm-up"]
    assert by_name["--zero-stage"][:2] == ["`0` or `1`", "0"] and by_name["--num-layers"][:2] == ["integer", "required"]
    assert by_name["--use-flush-denormal"] == ["", "on", "flush denormals to zero in every thread"]
    assert by_name["--max-position-embeddings"][1] == "`--seq-length`" and by_name["--bf16"][:2] == ["", ""]
    assert by_name["--rampup-batch-size"][:2] == ["integer, 3 of them", ""]


@pytest.mark.parametrize("name", RECIPES)
def test_the_flags_that_a_recipe_stands_for_make_its_run(name):
    run, recipe = parse([*megatron_flags.recipe_flags(RECIPES[name]())]).run, RECIPES[name]()
    assert run.optimizer.min_lr == pytest.approx(recipe.optimizer.min_lr, rel=1e-12)  # written with 12 digits
    assert replace(run, optimizer=replace(run.optimizer, min_lr=recipe.optimizer.min_lr)) == recipe


def test_every_flag_of_the_scripts_is_done_noted_or_refused():
    parser = build_parser()
    for name, flags in megatron_flags.scripts().items():
        assert len(flags) > 20 and name.count(": ") == 1 and re.search(r"as stored at commit [0-9a-f]{12}\b", name)
        for given in flags:
            found = megatron_flags.row(given, parser)
            assert found.meaning and found.status in ("done", "noted", "refused"), given
    status = {given: megatron_flags.row(given, parser).status for given in (
        "--lr", "--position-embedding-type rope", "--normalization RMSNorm", "--fp8-format e4m3", "--attention-backend fused")}
    assert [*status.values()] == ["done", "done", "done", "refused", "noted"]


def test_the_flags_of_a_production_script_make_a_run(tmp_path):
    fill = {"--train-tokens": "640", "--lr-decay-tokens": "600", "--lr-warmup-tokens": "64", "--wandb-entity": "team",
            "--wandb-project": "p", "--wandb-name": "n", "--num-workers": "0"}
    script = next(flags for name, flags in megatron_flags.scripts().items() if name.startswith("13B"))
    words = [word for given in script for word in (*given.split(), *fill.get(given, "").split())]
    shrunk = ["--recipe", "13b", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16",
              "--micro-batch-size", "2", "--global-batch-size", "8", "--vocab-size", "96", "--train-samples", "100", "--mock-data"]
    run = parse([*shrunk, *words]).run
    iterations, _ = run_length(run, 8, 0, 0)
    assert iterations == 5, "640 tokens are 40 samples, in batches of 8"
    with closing(make_trainer(SoloComm(), run)) as trainer:
        losses = [trainer.train_step().loss for _ in range(iterations)]
    assert losses[-1] < losses[0] and pretrain.wandb_run(run).project == "p"
