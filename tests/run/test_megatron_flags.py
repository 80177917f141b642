"""Flags of Megatron-LM, its forks and their scripts: done, noted, or refused with a reason."""

import sys
from dataclasses import replace
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
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.observe.export.metrics_writer import LogOutputs, MetricsWriter
from fugaku_megatron.observe.export.writers import open_writers
from fugaku_megatron.run import data as data_module
from fugaku_megatron.run.loop import Session
from fugaku_megatron.run.sources import Sources
from fugaku_megatron.run.tokenizer import read_tokenizer, with_vocabulary
from tests.checks.tokenizers import PIECES, TEXTS, write_sentencepiece
from tests.helpers import build_trainer, find_checkpoint, grid_groups, make_trainer, small_run
from tests.threads import ThreadWorld
from tools import scripts_start

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
    for name, other in OTHER_FLAGS.items():
        if other.refused:
            shown = f"{name} 77" if other.accepted else name
            assert refusal(*given(name, "77")) == f"{shown}: {other.meaning}"


def test_flags_of_programs_that_generate_text_name_our_command_in_one_line():
    """Arguments of gpt_dynamic_inference.py and run_text_generation_server.py."""
    text = refusal(
        *"--num-tokens-to-generate 30 --prompts a b --top_p 0.9 --inference-max-requests 8 --port 5000".split()
    )
    assert text.startswith(
        "--num-tokens-to-generate, --prompts, --top_p, --port: train generates no text: "
        "pass fugaku-megatron generate --load DIRECTORY"
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
        "--use-mup --hybrid-context-parallel --dataloader-type cyclic "
        "--quux 3 --lr-decay-style x --kv-channels 6"
    ).split()
    starts = [
        "unknown flag --quux",
        "argument --lr-decay-style",
        "--use-mup",
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
