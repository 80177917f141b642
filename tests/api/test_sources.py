"""Checkpoints, models of other programs, and adapters in a Trainer, with the command's losses."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import fugaku_megatron as fm
from fugaku_megatron.checkpoint import manifest
from fugaku_megatron.checkpoint.manifest import list_iterations, read_manifest
from fugaku_megatron.cli import program
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.fields import flag_words
from fugaku_megatron.config.run_config import GROUPS, all_flags, saved_run
from fugaku_megatron.data.chat.chat_files import ChatFiles, ChatWriter, signed
from fugaku_megatron.inference.loading import load_model
from tests.checks import library_and_command
from tests.checks.library import documents, write
from tests.checks.library_and_command import (
    FEATURES,
    OF_SAVES,
    RUN,
    VALUES,
    WITHIN_THE_RUN,
    command,
    library,
    trainer_of,
)
from tests.checks.tables import read_rows
from tests.helpers import TP2, rows
from tests.llama_models import FAMILIES
from tests.threads import ThreadWorld
from tools import flag_chats

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # notes of runs
in_this_process = library_and_command.in_this_process
LORA = {"lora_rank": 4, "lora_alpha": 16.0, "lr": 1e-2}
ALONE = SoloComm()
TRAINED = 3  # iterations of the base


def write_chats(prefix: Path) -> tuple[str]:
    """Write chats with every second token trained. Some chats are longer than a sample."""
    rng = np.random.default_rng(3)
    with ChatWriter(prefix, "<u2") as writer:
        for length in (5, 9, 14, 7, 16, 30, 3, 11, 12, 8):
            tokens = rng.integers(0, 96, length)
            writer.add_document(signed(tokens, np.arange(length) % 2 == 1))
    return (str(prefix),)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with data, chats, a base in three forms, and another base."""
    place = tmp_path_factory.mktemp("start")
    write(place / "data", documents())
    write_chats(place / "chats")
    torch.set_num_threads(1)
    for name, seed in (("base", 1234), ("other", 7)):
        trainer = trainer_of(
            ALONE, data_path=(str(place / "data"),), train_iters=TRAINED, seed=seed, **BLOCK
        )
        list(trainer.steps())
        trainer.save(place / name)
    convert(*f"--load {place}/base --to-hf {place}/hf".split())
    convert(*f"--load {place}/base --to-megatron {place}/megatron".split())
    convert(*f"--from-hf {place}/hf --save {place}/converted".split())
    convert("--from-megatron", place / "megatron", "--save", place / "converted megatron")
    return place


def convert(*words: Any) -> None:
    assert program.main(["convert", *map(str, words)]) == 0


# A block that Hugging Face's models have.
BLOCK = FAMILIES["qwen2"]
STARTS = read_rows(Path(__file__).with_name("starts.txt"), {"lora": LORA})
PLACES = (
    "load",
    "pretrained_checkpoint",
    "data_args_path",
    "per_split_data_args_path",
    "data_cache_path",
)
PREFIXES = ("data_path", "train_data_path", "valid_data_path")


def at(place: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags with names of the place as paths."""
    found = {"train_iters": 6, "data_path": ("data",), **BLOCK, **flags}
    for name in PLACES:
        if found.get(name):
            found[name] = str(place / found[name])
    for name in PREFIXES:
        if found.get(name):
            found[name] = tuple(str(place / prefix) for prefix in found[name])
    return found


RARE = (
    "resumed, zero",
    "schedule of the run",
    "optimizer anew",
    "it must be there",
    "adapters of a converted model",
    "some adapters",
    "adapters, context",
    "chats, context",
    "index in a folder",
)


@pytest.mark.parametrize("start", rows(STARTS, RARE))
def test_the_losses_are_those_of_the_command(start, place):
    (place / "words").write_text(str(place / "data"))
    words = [str(place / "data")]
    (place / "words.json").write_text(json.dumps({"train": words, "valid": words}))
    ranks, flags = STARTS[start]

    def both(world):
        return command(world, **at(place, flags)), library(world, **at(place, flags))

    for expected, found in ThreadWorld(ranks).run(both):
        assert found == expected and len(set(expected)) >= 6


def test_every_flag_acts_as_in_the_command_or_is_refused():
    """A new flag needs a row in FEATURES, STARTS, WITHIN_THE_RUN, or `library` in its field."""
    compared = {
        *RUN,
        *(name for table in (FEATURES, STARTS) for _, flags in table.values() for name in flags),
    }
    acting = compared | WITHIN_THE_RUN | OF_SAVES
    every = {field.name for group in GROUPS.values() for field in fields(group)}
    refused = {each.name for each in all_flags() if each.library}
    assert acting | refused == every and not acting & refused
    assert refused == VALUES.keys()


def adapted(place: Path, directory: Path, count: int = 2, **flags: Any) -> list[float]:
    """Save adapters after some steps; the losses of the two steps after them."""
    trainer = trainer_of(ALONE, **at(place, {"pretrained_checkpoint": "base", **LORA, **flags}))
    list(trainer.steps(count))
    trainer.save(directory)
    return [step.loss for step in trainer.steps(2)]


def refusal(work) -> str:
    with pytest.raises(ValueError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("base", ["base", "hf", "megatron", "converted"])
def test_adapters_continue_and_hold_nothing_else(place, tmp_path, base):
    rest = adapted(place, tmp_path / "lora", pretrained_checkpoint=base, lora_dropout=0.1)
    saved = read_manifest(tmp_path / "lora", 2)
    keys = {shard["key"] for entry in saved["files"].values() for shard in entry["shards"]}
    assert all("lora_" in key for key in keys) and saved["state"]["lora"]["base"] == str(
        place / base
    )
    flags = at(place, {**LORA, "lora_dropout": 0.1, "seed": 1234})
    for more in ({}, {"pretrained_checkpoint": str(place / base)}):
        again = trainer_of(ALONE, **flags, **more)
        again.load(tmp_path / "lora")
        assert [step.loss for step in again.steps(2)] == rest
    named = trainer_of(ALONE, **flags, load=str(tmp_path / "lora"))
    assert named.iteration == 2 and [step.loss for step in named.steps(2)] == rest


def test_the_command_continues_adapters_of_the_library_and_the_other_way(place, tmp_path):
    rest = adapted(place, tmp_path / "lora")
    flags = {**LORA, "load": str(tmp_path / "lora")}
    assert command(ALONE, **at(place, flags))[:4:2] == rest
    command(
        ALONE,
        **at(place, {**LORA, "pretrained_checkpoint": "base", "exit_interval": 2}),
        save=str(tmp_path / "theirs"),
    )
    assert library(ALONE, **at(place, {**LORA, "load": str(tmp_path / "theirs")}))[:4:2] == rest


def test_adapters_of_another_program_s_model_name_the_way_to_the_command(place, tmp_path):
    adapted(place, tmp_path / "lora", pretrained_checkpoint="hf")
    flags = at(place, {**LORA, "load": str(tmp_path / "lora")})
    message = refusal(lambda: command(ALONE, **flags))
    assert f"--pretrained-checkpoint {place / 'hf'} holds no checkpoint of this program" in message
    expected = library(ALONE, **flags)
    assert (
        command(ALONE, **{**flags, "pretrained_checkpoint": str(place / "converted")}) == expected
    )


@pytest.mark.parametrize("kind", ["hf", "megatron"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_models_of_other_programs_train_as_their_conversion_does(place, kind, ranks):
    layout = TP2 if ranks == 2 else {}
    converted = {"hf": "converted", "megatron": "converted megatron"}[kind]

    def all_ways(world, more):
        flags = {**layout, **more}
        expected = command(world, **at(place, {**flags, "pretrained_checkpoint": converted}))
        found = library(world, **at(place, {**flags, "pretrained_checkpoint": kind}))
        loaded = trainer_of(world, **at(place, flags))
        loaded.load(place / kind)
        return expected, found, [step.loss for step in loaded.steps()]

    for more in ({}, LORA):
        for expected, found, losses in ThreadWorld(ranks).run(all_ways, more):
            assert found == expected and losses == expected[::2]


def test_without_its_model_a_run_of_adapters_does_nothing(place, tmp_path):
    trainer = trainer_of(ALONE, **at(place, LORA))
    for work in (trainer.steps, trainer.evaluate, lambda: trainer.save(tmp_path / "none")):
        assert (
            "--lora-rank 4 trains adapters of a model that was not loaded: pass "
            "pretrained_checkpoint" in refusal(work)
        )
    assert not (tmp_path / "none").exists()
    trainer.load(place / "base", weights_only=True)
    expected = library(ALONE, **at(place, {**LORA, "pretrained_checkpoint": "base"}))
    assert [step.loss for step in trainer.steps()] == expected[::2]


def test_weights_alone_begin_anew_also_after_training(place):
    flags = at(place, {**LORA, "pretrained_checkpoint": "base"})
    expected = [step.loss for step in trainer_of(ALONE, **flags).steps()]
    trainer = trainer_of(ALONE, **flags)
    list(trainer.steps(2))
    trainer.load(place / "base", weights_only=True)
    assert trainer.iteration == 0 and [step.loss for step in trainer.steps()] == expected


def test_mistakes_about_what_is_loaded(place, tmp_path):
    lora = at(place, {**LORA, "pretrained_checkpoint": "base"})
    adapted(place, tmp_path / "lora")

    def load(directory, *arguments, **flags):
        return refusal(lambda: trainer_of(ALONE, **{**lora, **flags}).load(directory, *arguments))

    whole = {"lora_rank": None, "lora_alpha": None, "pretrained_checkpoint": None}
    other = "holds another model, with --num-layers 2 (this run: 3)"
    assert other in load(place / "base", num_layers=3, **whole)
    assert other in load(place / "hf", num_layers=3, **whole)
    assert "holds other adapters, with --lora-rank 4 (this run: 2)" in load(
        tmp_path / "lora", lora_rank=2
    )
    assert "--lora-target" in load(tmp_path / "lora", lora_target="q_proj")
    assert "holds adapters of rank 4 and not a model: pass --lora-rank 4" in load(
        tmp_path / "lora", **whole
    )
    assert "holds a whole model, of which --lora-rank 4 trains adapters" in load(place / "base")
    assert "is not a directory: pass a checkpoint" in load(tmp_path / "none")
    assert "holds no checkpoint" in load(tmp_path)

    def start(**flags):
        return refusal(lambda: trainer_of(ALONE, **{**lora, **flags}))

    named = str(tmp_path / "none")
    assert f"{named} is not a directory" in start(pretrained_checkpoint=named)
    assert other in start(num_layers=3)
    assert other in start(num_layers=3, pretrained_checkpoint=str(place / "hf"))
    assert other in start(num_layers=3, lora_rank=None, lora_alpha=None)
    assert "holds adapters and not the weights of a model" in start(
        pretrained_checkpoint=str(tmp_path / "lora")
    )
    assert "is not a directory" in start(load=named)
    assert "has other weights than the one that the adapters were trained for" in start(
        load=str(tmp_path / "lora"), pretrained_checkpoint=str(place / "other")
    )
    (tmp_path / "lora").rename(tmp_path / "moved")
    moved = copied(place / "base", tmp_path / "base")
    adapted(place, tmp_path / "lora", pretrained_checkpoint=str(moved))
    moved.rename(tmp_path / "elsewhere")
    assert "which is not there: pass its place as --pretrained-checkpoint DIR" in start(
        load=str(tmp_path / "lora"), pretrained_checkpoint=None
    )
    flags = {**lora, "load": str(tmp_path / "lora")}
    flags["pretrained_checkpoint"] = str(tmp_path / "elsewhere")
    trainer_of(ALONE, **flags)
    trainer_of(ALONE, **flags, finetune=True)
    assert "both name the model of new adapters: pass one of them" in refusal(
        lambda: command(ALONE, **{**flags, "load": str(place / "base"), "finetune": True})
    )
    saved = manifest.read_manifest(tmp_path / "lora", 2)
    assert "merge them with fugaku-megatron convert --load" in refusal(
        lambda: load_model(saved_run(saved, (1, 1)), ALONE, str(tmp_path / "lora"), 2, saved)
    )


def test_a_failed_load_leaves_a_run_of_adapters_without_weights(place, tmp_path):
    trainer = trainer_of(ALONE, **at(place, {**LORA, "num_layers": 3}))
    for _ in range(2):
        refusal(lambda: trainer.load(place / "base", weights_only=True))
        assert "a model that was not loaded" in refusal(trainer.steps)


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


TOKENS = [3, 1, 4, 15, 92, 6]


@pytest.mark.parametrize("base", ["base", "hf", "megatron"])
def test_adapters_are_loaded_as_the_merged_model(place, tmp_path, base):
    moved = copied(place / base, tmp_path / "model")
    adapted(place, tmp_path / "chained", pretrained_checkpoint="other")
    adapted(place, tmp_path / "lora", pretrained_checkpoint=str(moved))
    convert(*f"--load {tmp_path}/lora --merge --save {tmp_path}/merged".split())
    expected = fm.load(tmp_path / "merged").logits(TOKENS)
    model = fm.load(tmp_path / "lora", tokenizer_type="NullTokenizer")
    assert torch.equal(model.logits(TOKENS), expected)
    assert not torch.equal(fm.load(place / base).logits(TOKENS), expected)
    text = model.generate("3 1 4", 8, temperature=0.0)
    merged = fm.load(tmp_path / "merged", tokenizer_type="NullTokenizer")
    assert text == merged.generate("3 1 4", 8, temperature=0.0) and len(text.split()) == 8
    fm.load(tmp_path / "merged").save_hf(tmp_path / "hf")
    assert torch.equal(fm.load(tmp_path / "hf").logits(TOKENS), expected)
    moved.rename(tmp_path / "elsewhere")
    assert (
        f"holds adapters of the model in {moved}, which is not there: pass its place as "
        "--pretrained-checkpoint"
    ) in refusal(lambda: fm.load(tmp_path / "lora"))
    named = fm.load(tmp_path / "lora", pretrained_checkpoint=tmp_path / "elsewhere")
    assert torch.equal(named.logits(TOKENS), expected)
    words = ("--load", tmp_path / "lora", "--pretrained-checkpoint", tmp_path / "elsewhere")
    convert(*words, "--merge", "--save", tmp_path / "again")
    assert torch.equal(fm.load(tmp_path / "again").logits(TOKENS), expected)
    for wrong, message in (
        (place / "other", "has other weights than the model that the adapters were trained for"),
        (tmp_path / "chained", "holds adapters and not the weights of a model"),
        (tmp_path / "none", "is not a directory: pass the place of the model"),
    ):
        load = partial(fm.load, tmp_path / "lora", pretrained_checkpoint=wrong)
        assert message in refusal(load)
    assert "leave --pretrained-checkpoint" in refusal(
        lambda: fm.load(place / "hf", pretrained_checkpoint=place / "base")
    )
    assert "holds a whole model: leave --pretrained-checkpoint" in refusal(
        lambda: fm.load(place / "base", pretrained_checkpoint=place / "other")
    )


def test_adapters_that_name_no_model_are_refused_in_a_line(place, tmp_path, capsys):
    """Checkpoints of this kind were written by Trainer.save once."""
    adapted(place, tmp_path / "lora")
    with mock.patch.object(manifest, "read_head", nameless(manifest.read_head)):
        assert "does not name their model: pass its place as --pretrained-checkpoint" in refusal(
            lambda: fm.load(tmp_path / "lora")
        )


def nameless(read):
    def head(*arguments):
        found = read(*arguments)
        found["state"]["lora"] = {}
        return found

    return head


def test_files_of_the_tokenizer_go_on_with_the_model(place, tmp_path):
    hf = copied(place / "hf", tmp_path / "hf")
    (hf / "tokenizer.json").write_text("{}")
    flags = at(place, {"pretrained_checkpoint": str(hf)})
    convert("--from-hf", hf, "--save", tmp_path / "converted")
    for start in (hf, tmp_path / "converted"):
        for more in ({}, LORA):
            trainer = trainer_of(ALONE, **{**flags, **more, "pretrained_checkpoint": str(start)})
            target = tmp_path / f"{start.name} {bool(more)}"
            trainer.save(target)
            assert (target / "hugging_face" / "tokenizer.json").read_text() == "{}"


SAVES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "all": ({}, [1, 2, 3, 4]),
    "the last ones": ({"keep_last": 2}, [3, 4]),
    "some": ({"save_retain_interval": 2}, [2, 4]),
    "while training": ({"async_save": True}, [1, 2, 3, 4]),
    "while training, the last ones": ({"async_save": True, "keep_last": 1}, [4]),
    "on the node": ({"save_local": "local"}, [1, 2, 3, 4]),
    "on the node while training": ({"save_local": "local", "async_save": True}, [1, 2, 3, 4]),
    "without the optimizer": ({"no_save_optim": True}, [1, 2, 3, 4]),
}


@pytest.mark.parametrize(
    "kind", rows(SAVES, ("while training, the last ones", "on the node while training"))
)
def test_saves_are_those_of_the_command(place, tmp_path, kind):
    flags, kept = SAVES[kind]
    flags = at(place, {**flags, "train_iters": 4})
    if "save_local" in flags:
        flags["save_local"] = str(tmp_path / "local")
    trainer = trainer_of(ALONE, **flags)
    losses = []
    for step in trainer.steps():
        trainer.save(tmp_path / "library")
        losses.append(step.loss)
    expected = command(ALONE, **flags, save=str(tmp_path / "command"), save_interval=1)
    assert losses == expected[::2]
    assert list_iterations(tmp_path / "library") == list_iterations(tmp_path / "command") == kept
    for iteration in kept:
        ours, theirs = (
            fm.load(tmp_path / name, ckpt_step=iteration).logits(TOKENS)
            for name in ("library", "command")
        )
        assert torch.equal(ours, theirs)


def test_a_save_of_the_last_iteration_is_written_when_the_script_ends(place, tmp_path):
    flags = at(place, {"async_save": True})
    trainer = trainer_of(ALONE, **flags)
    for _ in trainer.steps():
        trainer.save(tmp_path / "saved")
        break
    trainer.close()
    assert list_iterations(tmp_path / "saved") == [1]


def test_chats_in_memory_are_trained_as_files_of_them_are(place, tmp_path):
    flags = {"sft": True, "sft_truncate": True, "data_path": None, "split": None}
    flags |= {"eval_iters": 1, "eval_interval": 2}
    files = ChatFiles(place / "chats")
    own = at(place, flags)
    expected = library(ALONE, data=place / "chats", valid=place / "chats", **own)
    assert len(set(expected)) > 12
    pairs = []
    for index in range(len(files)):
        tokens = files.get(index)
        pairs.append((tokens.tolist(), torch.from_numpy(files.trained(index, len(tokens)))))
    assert library(ALONE, data=pairs, valid=pairs, **own) == expected
    for chat, message in (
        ([1, 2], "chat 1 of <data> has token ids of shape ()"),
        ([1, 2, 3], "chat 1 of <data> is no chat of --sft: pass chats (messages"),
        (
            ([1, 2], [1]),
            "chat 1 of <data> has 2 token ids, and what is trained of them has shape (1,)",
        ),
        (([1, 2], [1, 2]), "what is trained of them has shape (2,)"),
        (([-1], [1]), "token id -1: pass 0 or more"),
        (([], []), "chat 1 of <data> has token ids of shape (0,)"),
        (([1, 999], [0, 1]), "document 1 of <data>: token id 999 is outside the vocabulary of 96"),
        ({"messages": []}, "pass tokenizer_type HuggingFaceTokenizer and its folder"),
    ):
        assert message in refusal(partial(library, ALONE, data=[pairs[0], chat], **own))
    for chat in (([1, 2, 3], [0, 0, 0]), ([1, 2, 3], [1, 0, 0]), ([1] * 99, [0] * 98 + [1])):
        assert "train data of <data>: none of its" in refusal(
            partial(library, ALONE, data=[chat, chat], **own)
        )


def test_chats_are_rendered_as_preprocess_renders_them(tmp_path):
    flag_chats.write(tmp_path)
    folder = str(tmp_path / "tokenizer")
    lines = (tmp_path / "train.jsonl").read_text().splitlines()[:12]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    words = (
        "--chat",
        "--keep-order",
        "--input",
        tmp_path / "some.jsonl",
        "--output-prefix",
        tmp_path / "chats",
    )
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": folder}
    tokenizer = [word for name, value in named.items() for word in flag_words(name, value)]
    assert program.main(["preprocess", *map(str, words), "--workers", "1", *tokenizer]) == 0
    flags = {"sft": True, "split": None, "seq_length": 128, "vocab_size": None, **named}
    expected = library(ALONE, data=tmp_path / "chats", **flags)
    assert library(ALONE, data=[json.loads(line) for line in lines], **flags) == expected
    assert "chat 0 of <data>: neither messages nor prompt" in refusal(
        lambda: library(ALONE, data=[{"text": "a"}], **flags)
    )
    with pytest.warns(UserWarning, match=r"nothing reads: 'tool' \(did you mean tools\?\)"):
        odd = {**json.loads(lines[0]), "tool": []}
        trainer_of(ALONE, data=[odd], **flags).close()
    untrained = json.loads(lines[0])
    untrained["messages"] = [{**message, "weight": 0} for message in untrained["messages"]]
    assert "chat 0 of <data>: message 2 of messages has weight 0" in refusal(
        lambda: library(ALONE, data=[untrained], **flags)
    )
    # the same with the tokenizer of the model that the run starts from
    trainer = trainer_of(ALONE, data=tmp_path / "chats", **flags)
    trainer.save(tmp_path / "model")
    trainer.close()
    unnamed = {name: value for name, value in flags.items() if name not in named}
    starts = {"pretrained_checkpoint": str(tmp_path / "model")}
    expected = library(ALONE, data=tmp_path / "chats", **flags, **starts)
    chats = [json.loads(line) for line in lines]
    assert library(ALONE, data=chats, **unnamed, **starts) == expected
