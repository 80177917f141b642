"""Flags of Megatron-LM, its forks and their scripts: done, noted, or refused with a reason."""

import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.cli import program
from fugaku_megatron.cli.arguments import build_parser, parse
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.batches import run_length
from fugaku_megatron.config.megatron_flags import OTHER_FLAGS, OtherFlag
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.observe.export import writers
from fugaku_megatron.observe.export.metrics_writer import LogOutputs, MetricsWriter
from fugaku_megatron.observe.export.writers import WandbRun, open_writers
from fugaku_megatron.run import data as data_module
from fugaku_megatron.run.loop import Session
from fugaku_megatron.run.sources import Sources
from fugaku_megatron.run.tokenizer import read_tokenizer, with_vocabulary
from tests.checks.tokenizers import PIECES, TEXTS, write_sentencepiece
from tests.helpers import build_trainer, find_checkpoint, grid_groups, make_trainer, small_run
from tests.threads import ThreadWorld
from tools import megatron_flags, scripts_start

pytestmark = pytest.mark.parallel

BASE = ["--recipe", "demo", "--mock-data"]


def refusal(*words: str) -> str:
    with pytest.raises(ValueError) as refused:
        parse([*BASE, *words])
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_all_unknown_flags_are_reported_at_once():
    text = refusal(*"--quux 3 --num-layer -1 --lr 0.1 --foo=bar --quux 4".split())
    assert (
        text
        == "unknown flags --quux, --num-layer (did you mean --num-layers?), --foo=bar: see --help for those there are"
    )


def given(name: str, value: str) -> list[str]:
    return [name, value] if OTHER_FLAGS[name].values else [name]


def test_every_refused_flag_says_why():
    refused = {name: other for name, other in OTHER_FLAGS.items() if other.refused}
    text = refusal(*(word for name in refused for word in given(name, "77")))
    assert text == "; ".join(
        f"{name}{' 77' if other.accepted else ''}: {other.meaning}"
        for name, other in refused.items()
    )


def test_every_flag_that_changes_nothing_is_noted():
    plain = parse([*BASE, "--position-embedding-type", "rope"]).run
    rope = ["--position-embedding-type", "rope"]
    noted = {
        name: other for name, other in OTHER_FLAGS.items() if other.accepted or not other.refused
    }
    for number in range(max(1, *(len(other.accepted) for other in noted.values()))):
        values = {name: other.accepted or ("77",) for name, other in noted.items()}
        words = [given(name, of[min(number, len(of) - 1)]) for name, of in values.items()]
        arguments = parse([*BASE, *rope, *(word for pair in words for word in pair)])
        assert (
            arguments.notes == tuple(f"{name}: {other.note}" for name, other in noted.items())
            and arguments.run == plain
        )


def test_flags_that_go_with_some_runs_alone():
    assert parse([*BASE, "--zero-stage", "3"]).run == parse([*BASE, "--zero-stage", "1"]).run
    assert (
        parse([*BASE, "--zero-stage", "3"])
        .notes[0]
        .startswith("--zero-stage 3: gradients and weights stay whole on every rank")
    )


def test_values_are_compared_as_numbers_where_they_are_numbers():
    other = OtherFlag(1, True, "why", ("0", "none"))
    assert [other.refuses([value]) for value in ("0", "0.0", "none", "1", "x")] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert OtherFlag("+", True, "why", ("1",)).refuses(["1", "2"]) and OtherFlag(
        0, True, "why"
    ).refuses([])


def test_all_reasons_come_in_one_message_a_line_each(capsys):
    words = (
        "--multi-latent-attention --hybrid-context-parallel --dataloader-type cyclic "
        "--quux 3 --lr-decay-style x --kv-channels 6 --q-lora-rank 2"
    ).split()
    starts = [
        "unknown flag --quux",
        "argument --lr-decay-style",
        "--multi-latent-attention",
        "--hybrid-context-parallel",
        "--dataloader-type cyclic",
        "--kv-channels is 6",
    ]
    assert refusal(*words).count("; ") >= len(starts) - 1
    assert program.main(["train", *BASE, *words]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "fugaku-megatron train: 6 flags are refused:"
    assert [line.startswith("  " + start) for line, start in zip(others, starts, strict=True)] == [
        True
    ] * len(starts)


def test_the_flags_of_megatron_head_are_all_known():
    head = next(flags for name, flags in megatron_flags.scripts().items() if "every flag" in name)
    known = {option for action in build_parser()._actions for option in action.option_strings}
    assert len(head) > 870 and set(head) <= known


LEGACY = r" is a checkpoint of Megatron-LM \(it holds .*convert --from-m"


@pytest.mark.parametrize(
    ("tracker", "files", "message"),
    [
        ("5", ["iter_0000005/mp_rank_00/model_optim_rng.pt"], LEGACY),
        (
            "5",
            ["iter_0000005/.metadata", "iter_0000005/common.pt"],
            r"\.metadata is damaged, or is not metadata of torch\.distributed\.checkpoint",
        ),
        ("release", ["release/mp_rank_00/model_optim_rng.pt"], LEGACY),
    ],
)
def test_a_checkpoint_of_megatron_is_recognised(tmp_path, tracker, files, message):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    for save in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=message):
            find_checkpoint(small_run(load=str(tmp_path), save=save), SoloComm())


@pytest.mark.parametrize("iteration", [0, 15])
def test_skip_train_evaluates_and_trains_nothing(tmp_path, capsys, iteration):
    """megatron/training/training.py, build_train_valid_test_data_loaders: validation then begins at its first sample."""
    run = small_run(
        num_layers=1,
        skip_train=True,
        eval_iters=2,
        eval_interval=10,
        save=str(tmp_path),
        load=str(tmp_path),
    )
    trainer = make_trainer(SoloComm(), run)
    expected = trainer.evaluate(trainer.valid, 0, 2)
    trainer.progress = replace(trainer.progress, iteration=iteration)
    Session(trainer, MetricsWriter(20, 10), 20, (4096,)).evaluate_only()
    trainer.close()
    printed = capsys.readouterr().out
    assert (
        f"lm loss value: {expected:.6E}" in printed
        and "--skip-train: nothing is trained" in printed
    )
    assert trainer.progress.iteration == iteration and not list(tmp_path.iterdir())


class Package(SimpleNamespace):
    """A stand-in for the package that keeps its arguments."""

    def init(self, **given):
        self.given = given
        self.logged = []
        self.finished = False
        return SimpleNamespace(
            log=lambda values, step: self.logged.append((step, values)),
            finish=lambda: setattr(self, "finished", True),
        )


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Package(__spec__=SimpleNamespace(name="wandb")))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return sys.modules["wandb"]


def test_wandb_gets_the_figures_and_is_offline_without_a_network(
    package, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    words = "--wandb-project project --wandb-exp-name name --wandb-entity team --wandb-save-dir"
    run = parse([*BASE, *words.split(), str(tmp_path / "new")]).run
    writer = MetricsWriter(10, 5, LogOutputs(writers=open_writers(run, 0, True, print)))
    writer.validation(5, 2.0, 80)
    writer.close()
    assert package.given == {
        "project": "project",
        "name": "name",
        "entity": "team",
        "dir": str(tmp_path / "new"),
        "config": asdict(run),
        "mode": "offline",
    }
    assert (5, {"lm loss validation": 2.0}) in package.logged and package.finished
    assert "--wandb-project: offline" in capsys.readouterr().out
    assert open_writers(run, 0, False, print) == []
    monkeypatch.setattr(writers, "_reachable", lambda: True)
    open_writers(run, 0, True, print)
    assert package.given["mode"] == "online"


def test_an_error_of_wandb_does_not_end_the_run(package, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(package, "init", lambda **given: 1 / 0)
    wandb = WandbRun("project", "name", print)
    MetricsWriter(10, 5, LogOutputs(writers=[wandb])).validation(5, 2.0, 80)
    assert (
        "--wandb-project project: division by zero; the run continues without it"
        in capsys.readouterr().out
    )


@pytest.mark.system
def test_the_real_package_keeps_a_run_offline(tmp_path):
    words = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --mock-data"
    order = [
        *words.split(),
        *"--vocab-size 64 --train-iters 3 --log-interval 1 --eval-iters 0 --kernels native".split(),
        *"--wandb-project p --wandb-exp-name n".split(),
    ]
    # The limits are for hangs alone: with a load of 12 on two cores, its 11 processor seconds took two minutes.
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "OMP_NUM_THREADS": "1",
        "WANDB__SERVICE_WAIT": "600",
        "WANDB_INIT_TIMEOUT": "600",
    }
    done = subprocess.run(
        [sys.executable, "-m", "fugaku_megatron", "train", *order],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "--wandb-project: offline" in done.stdout
        and len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    )


def test_wandb_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="--wandb-project p: a package is missing: pip install wandb"
    ):
        open_writers(
            parse([*BASE, *"--wandb-project p --wandb-exp-name n".split()]).run, 0, False, print
        )
    assert parse([*BASE, "--wandb-entity", "e"]).notes == (
        "--wandb-entity has no effect without --wandb-project",
    )


@pytest.mark.parametrize("document", megatron_flags.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_of_the_documents_are_those_of_the_program(document):
    made = "\n".join(megatron_flags.DOCUMENTS[document]())
    assert document.read_text().partition(megatron_flags.LINE)[2].strip() == made.strip(), (
        "python -m tools.megatron_flags --write"
    )


def test_the_page_of_flags_has_every_flag_with_its_default_and_every_recipe():
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in megatron_flags.flag_tables()
        if line[:3] == "| `"
    ]
    named = [name for cells in rows for name in re.findall(r"`(.*?)`", cells[0])]
    flags = [
        option
        for action in build_parser()._actions
        for option in action.option_strings
        if option not in OTHER_FLAGS
    ]
    flags = [option for option in flags if option not in ("-h", "--help")]
    assert sorted(named) == sorted(
        [*flags, "--recipe", *RECIPES]
    )  # --recipe is also the head of the last table
    by_name = {re.match("`(.*?)`", cells[0])[1]: cells[1:] for cells in rows}
    assert by_name["--lr-warmup-iters"] == ["integer", "0", "iterations of linear warm-up"]
    assert by_name["--zero-stage"][:2] == ["`0` or `1` or `2` or `3`", "0"]
    assert by_name["--num-layers"][:2] == ["integer", "required"]
    assert by_name["--use-flush-denormal"] == ["", "on", "flush denormals to zero in every thread"]
    assert by_name["--max-position-embeddings"][1] == "`--seq-length`" and by_name["--bf16"][
        :2
    ] == ["", ""]
    assert by_name["--rampup-batch-size"][:2] == ["integer, 3 of them", ""]


@pytest.mark.parametrize("name", RECIPES)
def test_the_flags_that_a_recipe_stands_for_make_its_run(name):
    run = parse([*megatron_flags.recipe_flags(RECIPES[name]())]).run
    recipe = RECIPES[name]()
    assert run.optimizer.min_lr == pytest.approx(
        recipe.optimizer.min_lr, rel=1e-12
    )  # written with 12 digits
    assert replace(run, optimizer=replace(run.optimizer, min_lr=recipe.optimizer.min_lr)) == recipe


def test_every_flag_of_the_scripts_is_done_noted_or_refused():
    parser = build_parser()
    for name, flags in megatron_flags.scripts().items():
        assert (
            len(flags) > 20
            and name.count(": ") == 1
            and re.search(r"as stored at commit [0-9a-f]{12}\b|as released in", name)
        )
        for given in flags:
            found = megatron_flags.row(given, parser)
            assert found.meaning and found.status in ("done", "noted", "refused"), given
    status = {
        given: megatron_flags.row(given, parser).status
        for given in (
            "--lr",
            "--position-embedding-type rope",
            "--normalization RMSNorm",
            "--multi-latent-attention",
            "--attention-backend fused",
        )
    }
    assert [*status.values()] == ["done", "done", "done", "refused", "noted"]


PRODUCTION = next(
    script
    for script in scripts_start.read(str(Path(__file__).parents[1] / "megatron_scripts.jsonl"))
    if "13b_pp8_tp6" in script["name"]
)


def production_words(folder: Path, **changed: str) -> list[str]:
    """Return the command line for the 13B run on Fugaku, with paths in a folder and the shell's computed values."""
    values = {
        "--vocab-file": str(write_sentencepiece(folder / "sp.model")),
        "--save": str(folder / "save"),
        "--load": str(folder / "save"),
        "--data-path": str(folder / "sp_text_document"),
        "--tensorboard-dir": str(folder / "tensorboard"),
        "--train-tokens": "500e9",
        "--lr-decay-tokens": "400e9",
        "--lr-warmup-tokens": "1e9",
        "--train-samples": "300000000",
        **{f"--{name.replace('_', '-')}": value for name, value in changed.items()},
    }
    return [
        *scripts_start.words(
            [(name, values.get(name, value)) for name, value in PRODUCTION["flags"]], build_parser()
        )
    ]


def test_the_production_script_of_fugaku_is_planned_on_its_nodes(tmp_path, capsys):
    words = production_words(tmp_path)
    assert program.main(["train", *words, "--dry-run", "--world-size", "13824"]) == 0
    printed = capsys.readouterr().out
    assert (
        "world size 13824 = DP 288 x PP 8 x TP 6" in printed
        and "7 micro-batches per iteration" in printed
    )
    assert "note: --lr-warmup-fraction has no effect with --lr-warmup-tokens, which wins" in printed


def test_the_flags_of_a_production_script_and_a_sentencepiece_model_start_a_shrunk_run(
    package, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = production_words(
        tmp_path,
        train_tokens="640",
        lr_decay_tokens="600",
        lr_warmup_tokens="64",
        num_layers="2",
        hidden_size="32",
        num_attention_heads="2",
        seq_length="16",
        max_position_embeddings="16",
        micro_batch_size="2",
        global_batch_size="8",
        eval_iters="0",
        lr="1e-3",
        split="100,0,0",
        pipeline_model_parallel_size="2",
        tensor_model_parallel_size="1",
        wandb_project="p",
        train_samples="100",
    )
    (tmp_path / "text.txt").write_text(" ".join(TEXTS) * 40)
    tokenizer = f"--tokenizer-type JapaneseSentencePiece --vocab-file {tmp_path}/sp.model".split()
    assert (
        program.main(
            [
                "preprocess",
                *f"--input {tmp_path}/text.txt --output-prefix {tmp_path}/sp --append-eod".split(),
                *tokenizer,
            ]
        )
        == 0
    )
    arguments = parse([*words, "--kernels", "torch"])

    def train(world):
        torch.set_num_threads(1)
        record = read_tokenizer(arguments.run, world)
        run = with_vocabulary(arguments.run, record)
        groups = grid_groups(world, run)
        data = data_module.open_data(Plan.of(run, world.size), groups, Sources())
        trainer = build_trainer(run, world, *data, groups=groups, tokenizer=record)
        iterations, _ = run_length(run, 8, 0, 0)
        printing = world.rank == 0
        outputs = LogOutputs(writers=open_writers(run, 0, printing, print))
        writer = MetricsWriter(iterations, 1, outputs, printing=printing)
        Session(trainer, writer, iterations, ()).run()
        trainer.close()
        writer.close()
        return trainer.progress.iteration

    assert ThreadWorld(2).run(train) == [5, 5]  # 640 tokens are 40 samples, in batches of 8
    assert (
        package.given["project"] == "p"
        and package.given["config"]["training"]["train_tokens"] == 640
    )
    assert len({step for step, values in package.logged if "lm loss" in values}) == 5
    manifest = read_manifest(tmp_path / "save", 5)
    assert (
        manifest["config"]["model"]["vocab_size"]
        == PIECES
        == manifest["state"]["tokenizer"]["vocab_size"]
    )


YAML = """
language_model:
  num_layers: 2
  hidden_size: 64
  num_attention_heads: 4
  num_query_groups: null
  add_bias_linear: False
  activation_func: ACTIVATION
  gated_linear_unit: False
  layernorm_zero_centered_gamma: True
  layernorm_epsilon: 1.e-6
  apply_rope_fusion: True
  init_method: null
model_parallel:
  tensor_model_parallel_size: 2
  bf16: True
  timers: null
micro_batch_size: 2
global_batch_size: 8
rampup_batch_size: [2, 2, 100]
swiglu: True
add_position_embedding: False
position_embedding_type: rope
check_for_nan_in_loss_and_grad: True
seq_length: 32
max_position_embeddings: 64
lr: 2.5e-4
use_flush_denormal: False
train_samples: 400
train_data_path: 0.3 a 0.7 b
wandb_project: ''
"""
LIKE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --disable-bias-linear --layernorm-epsilon 1e-6 --bf16 "
    "--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 8 --rampup-batch-size 2 2 100 --lr 2.5e-4 "
    "--position-embedding-type rope --seq-length 32 --max-position-embeddings 64 --no-use-flush-denormal --train-samples 400 "
    "--apply-layernorm-1p --train-data-path 0.3 a 0.7 b"
)


@pytest.mark.parametrize(
    ("activation", "switch"),
    [("swiglu", "--swiglu"), ("squaredrelu", "--squared-relu"), ("gelu", "--no-bias-gelu-fusion")],
)
def test_flags_from_a_yaml_file(tmp_path, activation, switch):
    """megatron/training/yaml_arguments.py: activation_func decides, whatever swiglu says, and the command line is ignored."""
    path = tmp_path / "gpt.yaml"
    path.write_text(YAML.replace("ACTIVATION", activation))
    found = parse(f"--yaml-cfg {path} --dry-run --num-layers 7 --use-mpi".split())
    assert found.dry_run and found.run == parse([*LIKE.split(), switch]).run
    assert (
        found.notes[0]
        == f"--yaml-cfg {path}: the command line's --num-layers, --use-mpi are ignored, as in Megatron-LM"
    )
    assert (
        found.notes[1].startswith("--no-position-embedding:") and found.run.model.apply_layernorm_1p
    )
    assert parse(["--yaml-cfg", str(path)]).notes == found.notes[1:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "language_model:\n  num_layer: 3",
            "language_model.num_layer: unknown key: did you mean --num-layers?",
        ),
        ("lr: fast", "lr: argument --lr: invalid float value: 'fast'"),
        ("bf16: 3", "bf16: 3 is not a value of a switch: pass true, false or null"),
        ("lr: True", "lr: True is not a value of --lr: pass one, or null"),
        (
            "language_model: {activation_func: tanh}",
            "language_model.activation_func: 'tanh' is not an activation: pass swiglu",
        ),
        (
            "language_model: {init_method: xavier_uniform}",
            "language_model.init_method: 'xavier_uniform' is not supported: pass null",
        ),
        (
            "language_model: {tensor_parallel_num_weight_shards: 2}",
            "language_model.tensor_parallel_num_weight_shards: "
            "--tensor-parallel-num-weight-shards 2: weights are not cut further",
        ),
        (
            "training: {lr: 1}",
            "training is a section, and the sections are language_model and model_parallel",
        ),
        (
            "lr: 1\nlanguage_model: {lr: 1}",
            "lr stands at the top or in a section twice: leave one out",
        ),
        ("lr: {a: 1}", "lr is a section"),
        ("language_model: {lr: {a: 1}}", "language_model.lr: it has keys of its own"),
        ("- 1", "it holds no keys"),
        ("a: [", "cannot be read: line 1: while parsing"),
        (None, "cannot be read (No such file or directory); pass the path"),
    ],
)
def test_mistakes_in_a_yaml_file_name_the_file_and_the_key(tmp_path, text, message):
    path = tmp_path / "gpt.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as refused:
        parse(["--yaml-cfg", str(path)])
    assert str(refused.value).startswith(f"--yaml-cfg {path}: {message}") and "\n" not in str(
        refused.value
    )


def test_a_yaml_file_needs_a_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    with pytest.raises(
        ValueError, match=r"--yaml-cfg x needs .*: pip install ruamel.yaml, or .* extra \[yaml\]"
    ):
        parse(["--yaml-cfg", "x"])
