"""Conversions of Hugging Face models that are refused or interrupted: one line, and nothing is left."""

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fugaku_megatron.convert import convert_command
from fugaku_megatron.convert.new_directory import new_directory
from tests.checks.refusals import refusals
from tests.file_damage import MISSING

transformers = pytest.importorskip("transformers")

from tests.hf_models import (  # noqa: E402
    VOCABULARY,
    read_hf,
)

pytestmark = pytest.mark.unit
from tests.checks.conversions import refused  # noqa: E402
from tests.checks.hugging_face import edit, stored  # noqa: E402


@pytest.mark.parametrize(("model", "change", "message"), refusals("config_json"))
def test_what_the_block_cannot_do_is_named(copied, tmp_path, capsys, model, change, message):
    field, value = change.split(" ", 1)
    hf = copied(model)
    edit(hf / "config.json", field, MISSING if value == "removed" else json.loads(value))
    assert message in refused(capsys, "--from-hf", hf, "--save", tmp_path / "ours")
    assert not list(tmp_path.glob("*ours*"))


DAMAGE = [
    ("model-00002-of-*", Path.unlink, "is missing, and model.safetensors.index.json names it"),
    (
        "model-00002-of-*",
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        "is not a valid safetensors file: its header is damaged (a tensor of shape",
    ),
    (
        "model-00002-of-*",
        lambda path: path.write_bytes(b"\xff" * 64),
        "is not a valid safetensors file: its header of ",
    ),
    (
        "model-00002-of-*",
        lambda path: save_file({"x": torch.ones(1)}, path),
        "does not hold transformer.",
    ),
    (
        "model.safetensors.index.json",
        Path.unlink,
        "holds neither model.safetensors nor model.safetensors.index.json",
    ),
    (
        "model.safetensors.index.json",
        lambda path: path.write_text('{"weight_map": {"a": "../b"}}'),
        "has no weight_map of tensors",
    ),
    ("config.json", lambda path: path.write_text("{"), "config.json is not JSON: Expecting"),
    ("config.json", lambda path: path.write_text("[]"), "config.json holds list, not an object"),
    ("config.json", Path.unlink, "config.json is missing"),
    (
        "model-00001-of-*",
        lambda path: stored(path, lambda old: {**old, "score.weight": torch.ones(2)}),
        "tensors that GPT2LMHeadModel does not have here",
    ),
    (
        "model-00001-of-*",
        lambda path: stored(
            path, lambda old: {**old, "lm_head.weight": torch.ones(VOCABULARY, 48)}
        ),
        "lm_head.weight differs from ",
    ),
    *(
        (
            "model-00002-of-*",
            lambda path, to=dtype: stored(
                path, lambda old: {name: t.to(to) for name, t in old.items()}
            ),
            message,
        )
        for dtype, message in (
            (
                torch.float8_e4m3fn,
                "has the format F8_E4M3, which is not supported for weights: save the model",
            ),
            (torch.int8, "has the format I8, which is not supported: save the model"),
            (torch.int64, "has the format I64, which is not supported for weights: save"),
        )
    ),
]


@pytest.mark.parametrize(
    ("file", "damage", "message"), DAMAGE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_damaged_files_are_named_and_nothing_is_left(
    tmp_path, capsys, sources, file, damage, message
):
    transformers.GPT2LMHeadModel.from_pretrained(sources["gpt2"]).save_pretrained(
        tmp_path / "hf", max_shard_size="60KB"
    )
    capsys.readouterr()
    damage(next((tmp_path / "hf").glob(file)))
    line = refused(capsys, "--from-hf", tmp_path / "hf", "--save", tmp_path / "ours")
    assert message in line and line.startswith(
        f"fugaku-megatron convert: --from-hf {tmp_path / 'hf'}: "
    )
    assert not list(tmp_path.glob("*ours*"))


def test_a_disk_that_fails_in_the_middle_leaves_nothing(sources, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert_command, "carry", full)
    line = refused(capsys, "--from-hf", sources["gpt2"], "--save", tmp_path / "ours")
    assert line.endswith("ours: No space left on device: pass another directory") and not list(
        tmp_path.iterdir()
    )


def test_what_a_killed_conversion_left_is_removed_and_other_directories_stay(sources, tmp_path):
    """Remove directories of dead processes on this host; processes of other hosts may be running."""
    killed = subprocess.Popen(
        [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    own = f".ours.converting.{platform.node()}.{killed.pid}"
    killed.kill()
    killed.communicate()
    others = [
        ".ours.converting.elsewhere.7.ab",
        f".ours.converting.{platform.node()}.{os.getppid()}.ab",
        "ours.tmp",
    ]
    for name in (f"{own}.ab", *others):
        (tmp_path / name).mkdir()
    read_hf(sources["gpt2"], tmp_path / "ours")
    assert {path.name for path in tmp_path.iterdir()} == {"ours", *others}


def test_two_conversions_into_one_directory_do_not_disturb_each_other(tmp_path):
    """Start the second while the first writes. The first to end gets the name, and the other is refused."""
    with pytest.raises(ValueError, match=r"--save .*ours is not empty: pass a new directory"):
        with new_directory("--save", str(tmp_path / "ours")) as first:
            (first / "weights").write_text("first")
            with new_directory("--save", str(tmp_path / "ours")) as second:
                (second / "weights").write_text("second")
            assert (first / "weights").read_text() == "first"
    assert (tmp_path / "ours" / "weights").read_text() == "second" and len(
        list(tmp_path.iterdir())
    ) == 1


@pytest.mark.parametrize(
    ("model", "flag"),
    [
        ("olmo", "--normalization is PlainLayerNorm"),
        ("gpt_neox", "--parallel-residual is True"),
        ("gemma", "--geglu is True"),
        ("granite", "--embedding-multiplier is 3.0"),
        ("falcon", "--parallel-residual is True"),
    ],
)
def test_a_block_that_megatron_does_not_have_is_refused(sources, tmp_path, capsys, model, flag):
    line = refused(capsys, "--from-hf", sources[model], "--to-megatron", tmp_path / "megatron")
    assert (
        f"{flag}" in line and "Megatron-LM's GPT computes" in line and not list(tmp_path.iterdir())
    )


# TRAINED is a checkpoint of this program, HF a model, and NEW, NONE and FULL are folders: the last one has a file.
FLAGS = """\
--from-hf HF => no destination given: pass exactly one of --save, --to-hf
--from-hf HF --load TRAINED --save NEW => more than one source, --load and --from-hf: pass
--load TRAINED --save NEW => a checkpoint loads into any layout
--from-hf HF --save FULL => is not empty: pass a new directory
--from-hf HF --save FULL/thesis.tex => is a file: pass a directory
--from-hf HF --save NEW --max-shard-size '5 apples' => --max-shard-size is '5 apples': pass a size such as 5GB
--from-hf HF --save NEW --ckpt-step 3 => --ckpt-step 3 is for --load
--from-hf HF --save NEW --vocab-size 3 => --vocab-size 3 is for --from-megatron
--from-hf HF --save NEW --tensor-model-parallel-size 0 => --tensor-model-parallel-size is 0: pass a number above 0
--from-hf HF --save NEW --hf-files NONE => is not a directory
--from-hf HF --save NEW --chat-template NONE => is not a file
--from-hf NONE --save NEW => is not a directory: pass one that holds config.json
--load NONE --to-hf NEW => holds no checkpoint
--load TRAINED --ckpt-step 9 --to-hf NEW => manifest.json is missing"""


def test_flags_that_do_not_go_together(trained, sources, tmp_path, capsys, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    places = {"HF": sources["gpt2"], "TRAINED": trained}
    places |= {name: tmp_path / name.lower() for name in ("NEW", "NONE", "FULL")}
    for row in FLAGS.splitlines():
        words, message = row.split(" => ")
        for name, place in places.items():
            words = words.replace(name, str(place))
        assert message in refused(capsys, *shlex.split(words))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["full"]
    monkeypatch.setenv("PMI_SIZE", "2")
    words = ("--from-hf", sources["gpt2"], "--save", tmp_path / "new")
    message = "convert is one process, and PMI_SIZE says that 2 were started"
    assert message in refused(capsys, *words)
