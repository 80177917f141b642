"""YAML files: each mistake ends in one line that names the file, the line in it and the remedy, in a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fugaku_megatron.config.yaml_file import LARGEST, read_yaml

pytestmark = pytest.mark.unit

pytest.importorskip("ruamel.yaml")

DEEP = "cannot be read: brackets or sections are nested too deeply: write a key"
ALIASES = "its aliases stand for more than 10000 values: write the values out"
LINE = "cannot be read: line"
MISTAKES = [  # (content, message after the file)
    ("a: 1\nb: 2\na: 3\n", f'{LINE} 3: while constructing a mapping: found duplicate key "a"'),
    ("s:\n  a: 1\n  a: 1\n", f'{LINE} 3: while constructing a mapping: found duplicate key "a"'),
    ('"a": 1\na: 2\n', f'{LINE} 2: while constructing a mapping: found duplicate key "a"'),
    (
        "a: &x {b: 1}\nc: {<<: *x, <<: *x}\n",
        f'{LINE} 2: while constructing a mapping: found duplicate merge key "<<"',
    ),
    ("a: !!int abc\n", f"{LINE} 1: 'abc' is no int: correct the line"),
    ("a: !!int ''\n", f"{LINE} 1: '' is no int"),
    ("a: 1\nb: !!float x\n", f"{LINE} 2: 'x' is no float"),
    ("a: !!bool x\n", f"{LINE} 1: 'x' is no bool"),
    (f"a: {'9' * 5000}\n", f"{LINE} 1: '9999"),
    ("a: 1\nb: -010\n", f"{LINE} 2: -010 is octal in YAML 1.1, and decimal in 1.2: correct"),
    ("a: !!binary '@'\n", f"{LINE} 1: could not determine a constructor for the tag"),
    ("a: !!python/name:os.system\n", f"{LINE} 1: could not determine a constructor for the tag"),
    ("a: !!set {b, c}\n", f"{LINE} 1: could not determine a constructor for the tag"),
    ("a: !!map 3\n", f"{LINE} 1: expected a mapping node, but found scalar"),
    ("a: !!int [1]\n", f"{LINE} 1: expected a scalar node, but found sequence"),
    ("a: =\n", f"{LINE} 1: could not determine a constructor"),
    ("{a: 1}: 2\n", f"{LINE} 1: while constructing a mapping: found unhashable key"),
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
    ('a: "\\UFFFFFFFF"\n', "cannot be read: "),
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


def test_values_of_yaml_1_2_and_merge_keys_are_read(tmp_path):
    text = "a: &x {b: 1, c: 0}\nd: {<<: *x, b: 2}\ne: '010'\nf: -0.5\ng: 0x10\nh: 1_000\ni: 1e-3\nj: on\nk: 1:30\nl: 2001-01-01\nm: true\n"
    (tmp_path / "run.yaml").write_text(text)
    assert read_yaml(str(tmp_path / "run.yaml")) == {
        "a": {"b": 1, "c": 0},
        "d": {"b": 2, "c": 0},
        "e": "010",
        "f": -0.5,
        "g": 16,
        "h": 1000,
        "i": 1e-3,
        "j": "on",
        "k": "1:30",
        "l": "2001-01-01",
        "m": True,
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
    assert "--yaml-cfg run.yaml: cannot be read: line 1: '' is no float" in ended.stderr
