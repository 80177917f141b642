"""Tokenizers of --to-gguf: what is written gives llama.cpp's tokens, and what llama.cpp computes differently is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_megatron.convert.gguf.tokenizer import KNOWN_SWITCHES, read_tokenizer
from fugaku_megatron.tokenizers.hugging_face import HuggingFaceTokenizer, SentencePieceTokenizer
from tests import file_damage
from tests.tokenizer_files import make

pytestmark = pytest.mark.unit

pytest.importorskip("gguf")
pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")
protos = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")

FILES = make.HERE
LLAMA_CPP = json.loads(make.TOKENS.read_text())
BYTE_LEVEL = "byte_level_gpt-2"
FALLBACK = "fallback_prefix"
PIECES = "pieces_prefix"


def copied(folder: Path, name: str) -> Path:
    """Copy one of the stored tokenizers."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FILES / name, folder)
    return folder


def changed(folder: Path, name: str, change) -> Path:
    """Copy a stored tokenizer, with a change of its tokenizer.json: a function, or the path and the value of a field."""
    file = copied(folder, name) / "tokenizer.json"
    contents = json.loads(file.read_text())
    if callable(change):
        change(contents)
    else:
        path, value = change.split(" ", 1)
        contents = file_damage.changed(contents, path, json.loads(value))
    file.write_text(json.dumps(contents))
    return folder


def configured(folder: Path, name: str, **more) -> Path:
    """Copy a stored tokenizer, with other values in its tokenizer_config.json."""
    file = copied(folder, name) / "tokenizer_config.json"
    contents = {**json.loads(file.read_text()), **more}
    kept = {name: value for name, value in contents.items() if value is not None}
    file.write_text(json.dumps(kept))
    return folder


def edited(folder: Path, name: str, change) -> Path:
    """Copy a stored model of SentencePiece, with a change."""
    file = copied(folder, name) / "tokenizer.model"
    model = protos.ModelProto()
    model.ParseFromString(file.read_bytes())
    change(model)
    file.write_bytes(model.SerializeToString())
    return folder


def read(folder: Path, inexact: bool = False):
    return read_tokenizer(folder, make.ROWS, None, inexact)


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_llama_cpp_makes_our_tokens(name):
    row = LLAMA_CPP[name]
    assert make.written(read(FILES / name)) == row["crc32"], (
        "run tests/tokenizer_files/make.py again"
    )
    if name.startswith("pieces"):
        ours = SentencePieceTokenizer(FILES / name / "tokenizer.model")
    else:
        ours = HuggingFaceTokenizer(FILES / name)
    for text, theirs in zip(make.TEXTS, row["tokens"], strict=True):
        assert ours.encode(text) == theirs, text


def test_every_split_is_compared():
    splits = {read(FILES / name).split for name in LLAMA_CPP}
    assert {split.name for split in make.SPLITS} <= splits


def test_keys_of_the_stored_tokenizers():
    around = read(FILES / "byte_level_around")
    assert (around.add_bos, around.add_eos) == (True, True)
    assert around.special == {"bos": 1, "eos": 0}
    assert read(FILES / "pieces_prefix").add_space_prefix is True
    assert read(FILES / "pieces_no_prefix").add_space_prefix is False
    assert read(FILES / FALLBACK).add_space_prefix is True
    assert read(FILES / "fallback_no_prefix").add_space_prefix is False
    assert read(FILES / PIECES).special == {"bos": 1, "eos": 2, "unk": 0}
    saved = read(FILES / "saved_by_transformers")
    assert {*saved.template} == {"default", "tool_use", "rag"}


def set_added(**values):
    def change(contents):
        added = contents["added_tokens"]
        next(token for token in added if token["content"] == "extra").update(values)

    return change


def add_token(content):
    def change(contents):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        contents["added_tokens"].append({**flags, "id": 341, "content": content})

    return change


def without_byte(contents):
    del contents["model"]["vocab"]["\u0100"]


def metaspace(scheme, split=False):
    def change(contents):
        contents["normalizer"] = None
        contents["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": make.SPACE,
            "prepend_scheme": scheme,
            "split": split,
        }

    return change


def around(*names):
    def change(contents):
        text = {"Sequence": {"id": "A", "type_id": 0}}
        row = [{"SpecialToken": {"id": name, "type_id": 0}} if name else text for name in names]
        pair = [*row, {"Sequence": {"id": "B", "type_id": 1}}]
        tokens = {name: {"id": name, "ids": [1], "tokens": [name]} for name in names if name}
        contents["post_processor"] = {
            "type": "TemplateProcessing",
            "single": row,
            "pair": pair,
            "special_tokens": tokens,
        }

    return change


REFUSED = [  # tokenizer, change of its tokenizer.json, message
    (
        BYTE_LEVEL,
        "pre_tokenizer/add_prefix_space true",
        r"pre_tokenizer ByteLevel, add_prefix_space",
    ),
    (BYTE_LEVEL, 'normalizer {"type": "Lowercase"}', r"normalizes a text by .*Lowercase"),
    (BYTE_LEVEL, 'normalizer {"type": "NFKC"}', r"normalizes a text by .*NFKC"),
    (
        BYTE_LEVEL,
        'normalizer {"type": "Strip", "strip_left": true, "strip_right": true}',
        r"normalizes a text by .*Strip",
    ),
    (
        BYTE_LEVEL,
        'normalizer {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}',
        r"normalizes a text by .*Replace",
    ),
    (
        BYTE_LEVEL,
        'normalizer {"type": "Prepend", "prepend": "a"}',
        r"normalizes a text by .*Prepend",
    ),
    (
        BYTE_LEVEL,
        'pre_tokenizer {"type": "Whitespace"}',
        r"\(pre_tokenizer\), which has no name",
    ),
    (BYTE_LEVEL, "pre_tokenizer null", r"\(pre_tokenizer\), which has no name"),
    (
        BYTE_LEVEL,
        "model/ignore_merges true",
        r"ignore_merges true, and llama.cpp's split gpt-2 has not",
    ),
    (BYTE_LEVEL, "model/dropout 0.5", r"drops merges at random \(dropout\)"),
    (
        BYTE_LEVEL,
        'model/end_of_word_suffix "</w>"',
        r"end_of_word_suffix|makes no token of the text",
    ),
    (BYTE_LEVEL, without_byte, r"no token for 1 of the 256 bytes"),
    (
        BYTE_LEVEL,
        "model/vocab/[PAD500] 400",
        r"tokens 400 and 500 are both '\[PAD500\]'",
    ),
    (BYTE_LEVEL, around("<s>", "<s>", None), r"\(post_processor\), and llama.cpp knows no others"),
    (FALLBACK, metaspace("always", split=True), r"prepares a text by .*Metaspace"),
    (FALLBACK, 'normalizer {"type": "NFC"}', r"prepares a text by .*NFC"),
    (FALLBACK, "model/ignore_merges true", r"ignore_merges true"),
    (FALLBACK, lambda c: c["model"]["vocab"].pop("<0x41>"), r"no piece for 1 of the 256 bytes"),
]
INEXACT = [  # what is refused unless --gguf-inexact-tokenizer is passed
    (BYTE_LEVEL, 'normalizer {"type": "NFC"}', r"normalizes a text to NFC"),
    (BYTE_LEVEL, set_added(lstrip=True), r"added token 'extra' has lstrip"),
    (BYTE_LEVEL, set_added(rstrip=True), r"added token 'extra' has rstrip"),
    (BYTE_LEVEL, set_added(single_word=True), r"added token 'extra' has single_word"),
    (BYTE_LEVEL, add_token("rage"), r"added tokens 'extra' and 'rage' may overlap"),
    (
        BYTE_LEVEL,
        add_token("xtr"),
        r"added token 'xtr' is sought before 'extra', which contains it",
    ),
    (
        BYTE_LEVEL,
        "model/vocab/<|endoftext|> 400",
        r"'<\|endoftext\|>', is ordinary text, and llama.cpp",
    ),
    (FALLBACK, metaspace("always"), r"no space before a text that begins with a space"),
    (FALLBACK, metaspace("first"), r"and after a special token \(prepend_scheme first\)"),
    (
        FALLBACK,
        set_added(normalized=True),
        r"added token 'extra' is normalized before it is sought",
    ),
    (FALLBACK, lambda c: c["model"]["merges"].pop(10), r"it does not merge .* \(merges\)"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED + INEXACT)
def test_what_llama_cpp_computes_differently_is_refused(tmp_path, name, change, message):
    folder = changed(tmp_path / "changed", name, change)
    exact = (name, change, message) not in INEXACT
    with pytest.raises(ValueError, match=message) as caught:
        read(folder, inexact=exact)
    assert "\n" not in str(caught.value)
    assert ("--gguf-inexact-tokenizer" in str(caught.value)) is not exact
    if not exact:
        assert re.search(message, "; ".join(read(folder, inexact=True).differences))


@pytest.mark.parametrize(
    "change",
    [
        "pre_tokenizer/trim_offsets false",
        'truncation {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}',
        "decoder null",
        'normalizer {"type": "Sequence", "normalizers": []}',
        "model/fuse_unk true",
        add_token("extraordinary"),
        add_token("    "),
    ],
)
def test_what_changes_no_token_is_written(tmp_path, change):
    assert read(changed(tmp_path / "changed", BYTE_LEVEL, change)).split == "gpt-2"


def of(*path, **values):
    """Return a change of a model of SentencePiece: these values of the part at a path."""

    def change(model):
        for step in path:
            model = model[step] if isinstance(step, int) else getattr(model, step)
        for name, value in values.items():
            setattr(model, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "message", "inexact"),
    [
        (
            of("trainer_spec", model_type=1),
            "of type unigram, and llama.cpp merges pieces as type bpe",
            False,
        ),
        (of("trainer_spec", model_type=3), "of type word", False),
        (of("trainer_spec", model_type=4), "of type char", False),
        (of("trainer_spec", treat_whitespace_as_suffix=True), "treat_whitespace_as_suffix", False),
        (of("normalizer_spec", escape_whitespaces=False), "escape_whitespaces", False),
        (of("pieces", 300, type=5), "has unused pieces", False),
        (of("normalizer_spec", remove_extra_whitespaces=True), "remove_extra_whitespaces", True),
        (
            of("pieces", 300, type=4),
            r"after a user-defined piece such as .* \(add_dummy_prefix\)",
            True,
        ),
        (of("pieces", 300, piece="<eos>"), "'<eos>', is ordinary text", True),
        (
            of("pieces", 1, piece="zq"),
            "its pieces merge to 'zq' in llama.cpp",
            True,
        ),
    ],
)
def test_models_of_sentencepiece_that_are_refused(tmp_path, change, message, inexact):
    folder = edited(tmp_path / "changed", PIECES, change)
    with pytest.raises(ValueError, match=message):
        read(folder, inexact=not inexact)
    if inexact:
        assert read(folder, inexact=True).differences


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "normalization_rule_name nmt_nfkc"),
        ({"byte_fallback": False}, r"no piece for 256 of the 256 bytes \(byte_fallback\)"),
    ],
)
def test_options_of_sentencepiece_that_are_refused(tmp_path, options, message):
    make.write_pieces(tmp_path / "made", **options)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "made", inexact=True)


def test_a_token_that_ends_a_text_is_needed(tmp_path):
    folder = configured(tmp_path / "made", BYTE_LEVEL, eos_token=None)
    with pytest.raises(ValueError, match="no eos_token, and llama.cpp then takes token 11"):
        read(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    assert read(folder).special["eos"] == 1


def test_special_tokens_in_a_text_are_read(tmp_path):
    folder = configured(tmp_path / "made", BYTE_LEVEL, split_special_tokens=True)
    with pytest.raises(ValueError, match="split_special_tokens true"):
        read(folder, inexact=True)


def test_a_switch_of_transformers_is_applied(tmp_path):
    switches = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": True,
        "unk_token": "<|end|>",
    }
    folder = configured(tmp_path / "made", BYTE_LEVEL, **switches)
    with pytest.raises(ValueError, match="ByteLevel, add_prefix_space"):
        read(folder)
    assert read(configured(folder, BYTE_LEVEL, **{**switches, "add_prefix_space": False}))


UNKNOWN_NAMES = st.from_regex(r"[a-z]{3,10}(_[a-z]{2,6}){0,2}", fullmatch=True).filter(
    lambda name: name not in KNOWN_SWITCHES and "token" not in name and name not in make_fields()
)
VALUES = st.one_of(st.booleans(), st.integers(-9, 9), st.text(max_size=4), st.just([]), st.just({}))


def make_fields() -> set[str]:
    """Return the names of all fields in a stored tokenizer.json."""
    return {*re.findall(r'"(\w+)":', (FILES / BYTE_LEVEL / "tokenizer.json").read_text())}


@given(name=UNKNOWN_NAMES, value=VALUES)
def test_an_unknown_switch_is_refused(tmp_path_factory, name, value):
    folder = configured(tmp_path_factory.getbasetemp() / "switch", BYTE_LEVEL, **{name: value})
    if value is None:
        return
    with pytest.raises(ValueError, match=f"unknown switch '{name}'|cannot be read as a tokenizer"):
        read(folder)


@given(
    part=st.sampled_from(
        [(), ("model",), ("pre_tokenizer",), ("decoder",), ("post_processor",), ("added_tokens", 0)]
    ),
    name=UNKNOWN_NAMES,
    value=VALUES,
)
def test_an_unknown_field_is_refused(tmp_path_factory, part, name, value):
    def change(contents):
        around("<s>", None)(contents)
        place = contents
        for step in part:
            place = place[step]
        place[name] = value

    folder = changed(tmp_path_factory.getbasetemp() / "field", BYTE_LEVEL, change)
    configured_file = folder / "tokenizer_config.json"
    configured_file.write_text('{"eos_token": "<|end|>", "bos_token": "<s>"}')
    with pytest.raises(ValueError, match=f"unknown field .*{name}|cannot be read as a tokenizer"):
        read(folder)
