"""Files next to the weights in Megatron-LM's torch_dist checkpoints: manifests of --verify-integrity, and tokenizers.

Sources: megatron/core/dist_checkpointing/validation.py (save_integrity_manifest), megatron/training/checkpointing.py
(save_tokenizer_assets). tests/convert/test_megatron_core.py reads a manifest of megatron-core.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fugaku_megatron as fm
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.convert.megatron.arguments import arguments_of
from fugaku_megatron.convert.open_weights import open_weights
from fugaku_megatron.convert.weights import shapes
from tests.checks.conversions import convert, refused
from tests.checks.torch_dist import write_iteration
from tests.fault_injection import flip_file_bit
from tests.helpers import find_checkpoint, small_run
from tests.tokenizer_files import make

pytestmark = pytest.mark.unit

MANIFEST = "integrity.json"
PIECES = "__1_0.distcp"


def write_run(directory: Path, tokenizer_type: str = "GPT2BPETokenizer") -> Path:
    """Write a run with a manifest; return its iteration."""
    model = small_run(vocab_size=make.ROWS).model
    args = arguments_of(model, make.ROWS, torch.float32, 1, 1)
    args.tokenizer_type = tokenizer_type
    tensors = {name: torch.ones(shape) for name, shape in shapes(model).items()}
    path = write_iteration(directory, 7, tensors, {"args": args, "iteration": 7})
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}
    (path / MANIFEST).write_text(json.dumps({"algorithm": "sha256", "files": digests}))
    return path


def with_manifest(text: str) -> Callable[[Path], object]:
    return lambda path: (path / MANIFEST).write_text(text)


def test_a_checkpoint_with_its_manifest_is_read(tmp_path):
    write_run(tmp_path / "theirs")
    assert convert("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours") == 0
    weights = open_weights(str(tmp_path / "ours"))
    assert weights.read("decoder.final_layernorm.weight").eq(1).all()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: flip_file_bit(path / PIECES),
            f"{PIECES} is not the file that was saved: its sha256",
        ),
        (
            lambda path: flip_file_bit(path / ".metadata"),
            ".metadata is not the file that was saved",
        ),
        (lambda path: (path / PIECES).unlink(), f"{PIECES} is missing, and {MANIFEST} lists it"),
        (with_manifest('{"algorithm": "md5", "files": {}}'), "has digests of 'md5'"),
        (with_manifest('{"files": ["a"]}'), "is damaged: files is not an object of"),
        (with_manifest("{"), f"{MANIFEST} is not JSON"),
    ],
)
def test_a_checkpoint_that_differs_from_its_manifest_is_one_line(
    tmp_path, capsys, damage: Callable[[Path], None], message: str
):
    path = write_run(tmp_path / "theirs")
    damage(path)
    words = ("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours")
    assert message in refused(capsys, *words) and not (tmp_path / "ours").exists()
    run = small_run(vocab_size=make.ROWS, load=str(tmp_path / "theirs"), no_load_optim=True)
    with pytest.raises(ValueError, match=re.escape(message)):
        find_checkpoint(run, SoloComm())


@pytest.mark.parametrize("tokenizer_type", ["GPT2BPETokenizer", "TikTokenizer"])
def test_the_tokenizer_of_the_checkpoint_belongs_to_the_model(tmp_path, tokenizer_type):
    """Except tiktoken's tokens, in a file named as Hugging Face's."""
    path = write_run(tmp_path / "theirs", tokenizer_type)
    shutil.copytree(make.HERE / "two_files", path / "tokenizer")
    carried = open_weights(str(tmp_path / "theirs")).carried
    if tokenizer_type == "TikTokenizer":
        assert carried is None
        return
    assert carried == path / "tokenizer"
    assert convert("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours") == 0
    for directory in ("theirs", "ours"):
        tokenizer = fm.load(tmp_path / directory).tokenizer
        assert tokenizer.decode(tokenizer.encode("the model")) == "the model"
