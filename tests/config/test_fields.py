"""Traits of flags: nothing that is known about a flag is a list of names in another place."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from fugaku_megatron.config.fields import Declaration, option
from fugaku_megatron.config.run_config import GROUPS, all_flags

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fugaku_megatron"
NAMES = {each.name for each in all_flags()}
LEAST = 3  # names of flags in a collection that is a list of flags
VALUES = "values of a run or model, not a list of flags"
# Beginning of a module's path -> the reason why its collections have names of flags.
EXCEPTIONS = {
    "calibration/": VALUES,
    "convert/convert_command.py": "flags of the command convert, which have the names of a run's",
    "convert/gguf/latent_attention.py": "factors that llama.cpp has as constants",
    "convert/hugging_face/": "rows of model families: names of Hugging Face, and values of their models",
    "convert/megatron/arguments.py": VALUES,
    "layout_check/shrink.py": VALUES,
    "layout_check/": "number formats",
    "planner/plan.py": "flags that a row of the comparison fixes, as a user's flags are fixed in a search",
    "planner/plan_text.py": "keys of the planner's JSON",
    "report/": VALUES,
    "run/resume.py": "keys of a checkpoint's layout, and their abbreviations",
    "tokenizers/": "arguments of a tokenizer's class",
}


def lists_of_flags(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        texts: list[ast.expr | None] = []
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            texts = [*node.elts]
        elif isinstance(node, ast.Dict):
            texts = node.keys
        names = [each.value for each in texts if isinstance(each, ast.Constant)]
        known = [name for name in names if name in NAMES]
        if len(known) >= LEAST:
            yield f"line {node.lineno}: {', '.join(known)}"


def test_no_module_outside_config_has_a_list_of_flags():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("config/") and (lists := [*lists_of_flags(path)]):
            found[name] = lists
    excepted = tuple(EXCEPTIONS)
    unknown = {name: lists for name, lists in found.items() if not name.startswith(excepted)}
    assert not unknown, f"give the fields a trait, or name the exception: {unknown}"
    for beginning in EXCEPTIONS:
        assert any(name.startswith(beginning) for name in found), f"none in {beginning}"


def without_meaning() -> list[str]:
    return [
        f.name for group in GROUPS.values() for f in fields(group) if "meaning" not in f.metadata
    ]


def test_every_flag_says_what_it_means_for_a_resume():
    assert not without_meaning(), "pass meaning=WEIGHTS, ANGLES, COURSE, LENGTH, BATCHES or FREE"


def test_names_in_traits_are_flags():
    for each in all_flags():
        assert NAMES.issuperset({*each.drops, *filter(None, (each.follows,))}), each.name
        for need in each.needs:
            word = need.text.split()[0]
            names = word.removeprefix("--").replace("-", "_")
            assert not word.startswith("--") or names in NAMES, (each.name, need.text)


def test_an_unknown_trait_is_refused():
    with pytest.raises(TypeError, match="a field has no meanings"):
        option(1, "a number", meanings=3)
    assert {"meaning", "needs", "library", "megatron"} <= {*Declaration._fields}


# A line in a class of config -> the class's file and the line before the first one.
NEW_FIELDS = {
    "optimizer.py": (
        '    lr: float = course_option(1e-4, "peak learning rate"',
        '    lr_noise: float = course_option(0.5, "noise of the learning rate", needs="decoupled_lr")\n',
    ),
    "model.py": (
        "    hidden_dropout: float = course_option(",
        '    key_noise: float = weight_option(0.25, "noise of the keys")\n',
    ),
}
PROGRAM = """
import sys, torch
import fugaku_megatron as fm
from fugaku_megatron.cli.arguments import build_parser, parse
from fugaku_megatron.config.architecture import architecture
from fugaku_megatron.convert.hugging_face.architectures import LLAMA
from fugaku_megatron.convert.megatron.arguments import arguments_of
from fugaku_megatron.run.resume import differences
from tools.megatron_flags import flag_tables

small = dict(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=64, micro_batch_size=1)
config = fm.Config(**small, lr_noise=2.0, key_noise=0.5)
assert (config.lr_noise, config.key_noise) == (2.0, 0.5)
assert config.notes == ("--lr-noise has no effect without --decoupled-lr",), config.notes
for text in (build_parser().format_help(), "".join(flag_tables())):
    assert "--lr-noise" in text and "noise of the keys" in text
words = [f"--{name.replace('_', '-')}={value}" for name, value in small.items()]
with open("run.yaml", "w") as file:
    file.write("".join(f"{name}: {value}\\n" for name, value in small.items()) + "lr_noise: 3.0\\n")
assert parse(["--yaml-cfg", "run.yaml"]).run.optimizer.lr_noise == 3.0
assert differences(config.run, {"optimizer": {"lr_noise": 0.5}}) == ["--lr-noise is 2.0, was 0.5"]
assert architecture(config.run.model)["key_noise"] == 0.5
llama = config.replace(swiglu=True, position_embedding_type="rope", normalization="RMSNorm", disable_bias_linear=True)
assert LLAMA.fits(llama.replace(key_noise=0.25).run.model) and not LLAMA.fits(llama.run.model)
arguments_of(config.replace(key_noise=0.25).run.model, 64, torch.float32, 1, 1)
try:
    arguments_of(config.run.model, 64, torch.float32, 1, 1)
except ValueError as error:
    assert str(error) == "--key-noise is 0.5, and Megatron-LM's GPT computes 0.25", error
else:
    raise AssertionError("a flag without an argument of Megatron-LM is converted")
"""


def test_a_flag_is_one_line(tmp_path):
    """Add fields to a copy of the package: help, documents, YAML, library, resume and conversion follow."""
    shutil.copytree(PACKAGE, tmp_path / "fugaku_megatron", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("*.pyc"))
    for name, (place, line) in NEW_FIELDS.items():
        path = tmp_path / "fugaku_megatron" / "config" / name
        before, found, after = path.read_text().partition(place)
        assert found, place
        path.write_text(f"{before}{line}{place}{after}")
    command = [sys.executable, "-c", PROGRAM]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, timeout=120)
