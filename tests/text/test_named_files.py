"""Each small file that a flag names: what is no regular file is refused at once, before it is opened."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fugaku_megatron.config.yaml_file import read_yaml
from fugaku_megatron.data.chat.chat_template import read_template
from fugaku_megatron.data.chat.template_process import LARGEST_TEMPLATE
from fugaku_megatron.data.data_flags import listed_data
from fugaku_megatron.inference.generation import prompts_of
from fugaku_megatron.jobs import script
from fugaku_megatron.jobs.supervise import read_hosts
from fugaku_megatron.observe.log import rank_table
from fugaku_megatron.observe.profile import trace
from fugaku_megatron.planner import machine
from fugaku_megatron.report import record
from fugaku_megatron.text.named_files import FIRST_BYTES, read_text
from fugaku_megatron.tokenizers.hugging_face import load_pieces
from fugaku_megatron.tokenizers.tokenizer import TokenizerFlags
from tests.time_limit import time_limit
from tests.tokenizer_files import make

pytestmark = pytest.mark.unit

VOCABULARY = make.HERE / "two_files" / "vocab.json"
READERS: dict[str, Callable[[str], object]] = {
    "--yaml-cfg": lambda path: read_yaml(path),
    "--chat-template": read_template,
    "--prompts": prompts_of,
    "--data-args-path": lambda path: listed_data(path, None),
    "--per-split-data-args-path": lambda path: listed_data(None, path),
    "--vocab-file": lambda path: TokenizerFlags("GPT2BPETokenizer", path, path, None).build(),
    "--merge-file": lambda path: TokenizerFlags("GPT2BPETokenizer", VOCABULARY, path).build(),
    "--tokenizer-model": lambda path: load_pieces(path, "--tokenizer-type"),
    "--hosts": lambda path: read_hosts(f"@{path}"),
    "--machine": machine.load,
    "--before": lambda path: record.read("--before", Path(path)),
    "job check": lambda path: script.read(Path(path)),
    "log --ranks": rank_table.read,
    "plot": trace.read_trace,
}


@pytest.mark.parametrize("flag", READERS)
def test_what_is_no_file_is_refused_at_once(flag, tmp_path):
    pytest.importorskip("ruamel.yaml")
    pytest.importorskip("sentencepiece")
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    device = tmp_path / "device.json"
    device.symlink_to("/dev/zero")
    folder = tmp_path / "folder.json"
    folder.mkdir()
    pointer = tmp_path / "pointer.json"
    pointer.write_bytes(FIRST_BYTES + b"v1\noid sha256:0\nsize 9\n")
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket.json"))
    listening.close()
    names = ("socket.json", "a\0b.json", "gone.json")
    for path in (fifo, device, folder, pointer, loop, *(tmp_path / name for name in names)):
        with time_limit(), pytest.raises(ValueError) as refused:
            READERS[flag](str(path))
        assert len(str(refused.value).splitlines()) == 1
        assert path.name.replace("\0", "") in str(refused.value).replace("\0", "")
        if path == pointer:
            assert "Git LFS pointer: run git lfs pull" in str(refused.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_fifo_in_the_folder_of_a_tokenizer_is_refused_at_once(name, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} cannot be read .it is a FIFO, not a regular"):
        TokenizerFlags("HuggingFaceTokenizer", None, None, tmp_path).build()


def test_a_text_has_a_largest_size(tmp_path):
    path = tmp_path / "a.jinja"
    path.write_text("a" * (LARGEST_TEMPLATE + 1))
    with pytest.raises(ValueError, match="a.jinja: larger than 262144 bytes; is it another file"):
        read_template(str(path))
    path.write_bytes(b"a\r\nb")
    assert read_text(path, "--x") == "a\nb"


def test_a_key_that_stands_twice_in_json_is_refused(tmp_path):
    path = tmp_path / "own.json"
    path.write_text('{"train": ["a"], "train": ["b"]}')
    with pytest.raises(ValueError, match="own.json: .*the key 'train' stands in an object twice"):
        listed_data(None, str(path))
    known = json.dumps({"base": "a64fx", "constants": {}})
    path.write_text(known[:-1] + ', "base": "a64fx"}')
    with pytest.raises(ValueError, match="own.json.*the key 'base' stands in an object twice"):
        machine.load(str(path))
