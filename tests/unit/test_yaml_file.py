"""YAML files: each mistake ends in one line that names the file, the line in it and the remedy, in a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fugaku_megatron.config.yaml_file import LARGEST, read_yaml

pytest.importorskip("yaml")

DEEP = "cannot be read: brackets or sections are nested too deeply: write a key"
ALIASES = "its aliases stand for more than 10000 values: write the values out"
MISTAKES = [  # (content, message after the file)
    ("a: 1\nb: 2\na: 3\n", "a stands on the lines 1 and 3: leave one out"),
    ("s:\n  a: 1\n  a: 1\n", "a stands on the lines 2 and 3: leave one out"),
    ("a: [{b: 1, b: 2}]\n", "b stands on the lines 1 and 1: leave one out"),
    ('"a": 1\na: 2\n', "a stands on the lines 1 and 2: leave one out"),
    ("a: &x {b: 1}\nc: {<<: *x, <<: *x}\n", "<< stands on the lines 2 and 2: leave one out"),
    ("a: 2001-99-99\n", "line 1: '2001-99-99' is not a date: correct it, or put text in quotes"),
    ("a: 1\nb: 2001-01-01 25:61:61\n", "line 2: '2001-01-01 25:61:61' is not a date"),
    ("a: !!timestamp x\n", "line 1: 'x' is not a date"),
    ("a: !!int abc\n", "line 1: 'abc' is not a whole number"),
    ("a: !!int ''\n", "line 1: '' is not a whole number"),
    ("a: 1\nb: !!float x\n", "line 2: 'x' is not a number"),
    ("a: !!float ''\n", "line 1: '' is not a number"),
    ("a: !!bool x\n", "line 1: 'x' is not true or false"),
    (f"a: {'9' * 5000}\n", "line 1: '9999"),
    (f"a: 0x{'f' * 5000}\n", "line 1: '0xff"),
    (f"a: {':'.join(['1'] * 5000)}\n", "line 1: '1:1"),
    ("a: 010\n", "line 1: 010 is 8 in YAML: write that, or put text in quotes"),
    ("a: 1:30\n", "line 1: 1:30 is 90 in YAML: write that"),
    ("a: 1:30.5\n", "line 1: 1:30.5 is 90.5 in YAML: write that"),
    ("a: !!binary '@'\n", "line 1: the tag 'tag:yaml.org,2002:binary' is not for this value"),
    ("a: !!python/name:os.system\n", "line 1: the tag 'tag:yaml.org,2002:python/name:os.system'"),
    ("a: !!set {b, c}\n", "line 1: the tag 'tag:yaml.org,2002:set' is not for this value"),
    ("a: !!map 3\n", "line 1: the tag 'tag:yaml.org,2002:map' is not for this value"),
    ("a: !!int [1]\n", "line 1: the tag 'tag:yaml.org,2002:int' is not for this value"),
    ("a: =\n", "cannot be read: line 1: could not determine a constructor"),
    ("1: 2\n", "line 1: the key 1 is not text: write a flag's name"),
    ("a: 1\non: 2\n", "line 2: the key on is not text"),
    ("null: 2\n", "line 1: the key null is not text"),
    ("[1]: 2\n", "line 1: the key of this line is not text"),
    ("{a: 1}: 2\n", "line 1: the key of this line is not text"),
    ("- 1\n", "it holds no keys: pass a file with lines such as `num_layers: 24`"),
    ("text\n", "it holds no keys"),
    ("", "it holds no keys"),
    ("a: 1\n---\nb: 1\n", "cannot be read: line 2: expected a single document"),
    (
        "a: 1\n\tb: 2\n",
        "cannot be read: line 2: while scanning for the next token: found character",
    ),
    ("a: 1\nb: 2\0\n", "cannot be read: line 2: the character #x0000 is not allowed: remove it"),
    (b"a: \xff\n", "not UTF-8 text (byte 3); is it another file?"),
    ("a: 1\nb: *c\n", "cannot be read: line 2: found undefined alias 'c'"),
    ("a: &a [*a]\n", ALIASES),
    ("a: &a\n  <<: *a\n", ALIASES),
    ("a:\n  <<: 3\n", "cannot be read: line 2: while constructing a mapping: expected a mapping"),
    ('a: "\\UFFFFFFFF"\n', "cannot be read: line 1: "),
    ("%YAML 9.9\n---\na: 1\n", "cannot be read: line 1: found incompatible YAML document"),
    ("a: " + "[" * 5000, DEEP),
    ("{a: " * 5000, DEEP),
    ("- " * 5000, DEEP),
    ("version https://git-lfs.github.com/spec/v1\n", "cannot be read (it is a Git LFS pointer"),
    ("#" * (LARGEST + 1), f"larger than {LARGEST} bytes; is it another file?"),
]


@pytest.mark.parametrize(("content", "message"), MISTAKES)
def test_a_mistake_names_the_file_and_the_line(content, message, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as refused:
        read_yaml(str(path))
    text = str(refused.value)
    assert text.startswith(f"--yaml-cfg {path}: {message}") and text.isprintable()
    assert len(text) < 400 + len(str(path))


def test_merge_keys_numbers_and_quoted_text_are_read(tmp_path):
    text = "a: &x {b: 1, c: 0}\nd: {<<: *x, b: 2}\ne: '010'\nf: -0.5\ng: 0x10\nh: 1_000\ni: 1e-3\nj: on\n"
    (tmp_path / "run.yaml").write_text(text)
    assert read_yaml(str(tmp_path / "run.yaml")) == {
        "a": {"b": 1, "c": 0},
        "d": {"b": 2, "c": 0},
        "e": "010",
        "f": -0.5,
        "g": 16,
        "h": 1000,
        "i": "1e-3",
        "j": True,
    }


def test_a_command_with_a_broken_file_ends_with_code_2(tmp_path):
    (tmp_path / "run.yaml").write_text("num_layers: !!float ''\n")
    ended = subprocess.run(
        [sys.executable, "-m", "fugaku_megatron", "train", "--yaml-cfg", "run.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "--yaml-cfg run.yaml: line 1: '' is not a number" in ended.stderr
