"""Files of tokenizers that other programs wrote, that are damaged, of another kind, or would run code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fugaku_megatron.data.chat.chat_files import unsigned
from fugaku_megatron.data.chat.chat_template import ChatTemplate
from fugaku_megatron.data.chat.chats import Chat, user_turn
from fugaku_megatron.text.input_errors import NeverSkipped
from fugaku_megatron.text.named_files import FIRST_BYTES
from fugaku_megatron.tokenizers import hugging_face
from fugaku_megatron.tokenizers.tokenizer import TokenizerFlags
from tests.tokenizer_files import make

pytestmark = pytest.mark.unit

pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

FILES = make.HERE
FOLDERS = [
    path.parent for path in FILES.glob("*/*") if path.name in ("tokenizer.json", "vocab.json")
]
FOLDERS += FILES.glob("pieces*")
POINTER = FIRST_BYTES + b"v1\noid sha256:" + b"a" * 64 + b"\nsize 499723\n"
LLAMA = '{"tokenizer_class": "LlamaTokenizer"}'
GPT2 = '{"tokenizer_class": "GPT2Tokenizer"}'
JSON = (FILES / "byte_level_gpt-2" / "tokenizer.json").read_bytes()
PIECES = (FILES / "pieces_prefix" / "tokenizer.model").read_bytes()
RANKS = (FILES / "tiktoken" / "tokenizer.model").read_bytes()
VOCABULARY = (FILES / "two_files" / "vocab.json").read_bytes()
MERGES = (FILES / "two_files" / "merges.txt").read_bytes()


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, contents in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return folder


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDERS))
def test_a_file_of_each_program_is_read(name):
    folder = FILES / name
    text = "the model 富岳"
    if (folder / "vocab.json").is_file():
        ours = TokenizerFlags(
            "GPT2BPETokenizer", folder / "vocab.json", folder / "merges.txt"
        ).build()
    elif name.startswith("pieces"):
        ours = TokenizerFlags(
            "SentencePieceTokenizer", None, None, folder / "tokenizer.model"
        ).build()
    else:
        ours = TokenizerFlags("HuggingFaceTokenizer", None, None, folder).build()
    ids = ours.encode(text)
    assert len(ids) < len(text.encode()) + 3
    if name != "pieces_unigram":  # which has no bytes
        assert text in ours.decode(ids)


def test_a_file_of_tiktoken_is_read_by_transformers(tmp_path):
    pytest.importorskip("tiktoken")
    config = '{"tokenizer_class": "Qwen2Tokenizer"}'
    folder = write(tmp_path / "t", {"tokenizer.model": RANKS, "tokenizer_config.json": config})
    ours = TokenizerFlags("HuggingFaceTokenizer", None, None, folder).build()
    assert ours.encode("the model") == [257, 262]  # "the" and " model" of the file's ranks


DAMAGED = [  # files, a part of the message
    (
        {"tokenizer.json": POINTER},
        "tokenizer.json cannot be read (it is a Git LFS pointer: run git lfs pull)",
    ),
    (
        {"tokenizer.json": JSON, "tokenizer_config.json": POINTER},
        "tokenizer_config.json cannot be read (it is a Git",
    ),
    (
        {"tokenizer.model": POINTER, "tokenizer_config.json": LLAMA},
        "tokenizer.model cannot be read (it is a Git LFS",
    ),
    (
        {"vocab.json": POINTER, "tokenizer_config.json": GPT2},
        "vocab.json cannot be read (it is a Git LFS pointer",
    ),
    (
        {"vocab.json": VOCABULARY, "merges.txt": POINTER, "tokenizer_config.json": GPT2},
        "merges.txt cannot be read (it is a Git LFS pointer",
    ),
    (
        {"tokenizer.json": JSON, "chat_template.jinja": POINTER},
        "chat_template.jinja cannot be read (it is a Git LFS",
    ),
    (
        {"tokenizer.json": JSON, "additional_chat_templates/tool_use.jinja": POINTER},
        "additional_chat_templates/tool_use.jinja cannot be read (it is a Git LFS pointer",
    ),
    ({"tokenizer.json": JSON[:1000]}, "tokenizer.json is not JSON"),
    ({"tokenizer.json": b""}, "tokenizer.json is not JSON"),
    ({"tokenizer.json": b"\xff\xfe\x00"}, "tokenizer.json is not JSON"),
    ({"tokenizer.json": b"[" * 100000}, "tokenizer.json is not JSON"),
    ({"tokenizer.json": "[]"}, "tokenizer.json holds a list, not an object"),
    ({"tokenizer.json": '{"architectures": []}'}, "tokenizer.json has no object named model"),
    ({"tokenizer.json": '{"model": {}}'}, "cannot be read as a tokenizer"),
    ({"tokenizer.json": JSON, "tokenizer_config.json": "["}, "tokenizer_config.json is not JSON"),
    ({"tokenizer.json": JSON, "tokenizer_config.json": "[]"}, "tokenizer_config.json holds a list"),
    (
        {"tokenizer.json": JSON, "added_tokens.json": "3"},
        "added_tokens.json holds a int, not an object",
    ),
    (
        {"tokenizer.json": JSON, "special_tokens_map.json": "["},
        "special_tokens_map.json is not JSON",
    ),
    (
        {"tokenizer.model": b"", "tokenizer_config.json": LLAMA},
        "tokenizer.model is neither a SentencePiece",
    ),
    (
        {"tokenizer.model": b"\x00\x01", "tokenizer_config.json": LLAMA},
        "tokenizer.model is neither a SentencePiece",
    ),
    (
        {"tokenizer.model": JSON, "tokenizer_config.json": LLAMA},
        "tokenizer.model is neither a SentencePiece",
    ),
    (
        {"tokenizer.model": PIECES[:3000], "tokenizer_config.json": LLAMA},
        "not a SentencePiece model",
    ),
    (
        {"vocab.json": "[]", "merges.txt": MERGES, "tokenizer_config.json": GPT2},
        "vocab.json holds a list",
    ),
    ({"vocab.json": VOCABULARY, "tokenizer_config.json": GPT2}, "cannot be read as a tokenizer"),
    (
        {"vocab.json": VOCABULARY, "merges.txt": "no such", "tokenizer_config.json": GPT2},
        "cannot be read as a",
    ),
    ({"tokenizer_config.json": GPT2}, "GPT2Tokenizer makes no token of the text"),
    ({"tokenizer_config.json": "{}"}, "cannot be read as a tokenizer"),
]


@pytest.mark.parametrize(("files", "message"), DAMAGED)
def test_damaged_folders_are_refused_in_one_line(tmp_path, files, message):
    folder = write(tmp_path / "folder", files)
    with pytest.raises(ValueError) as refused:
        TokenizerFlags("HuggingFaceTokenizer", None, None, folder).build()
    text = str(refused.value)
    assert text.startswith(f"--tokenizer-model {folder}") and message in text, text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("kind", "contents", "message"),
    [
        ("SentencePieceTokenizer", POINTER, "it is a Git LFS pointer: run git lfs pull"),
        ("SentencePieceTokenizer", RANKS, "not a SentencePiece model, but a file of tiktoken"),
        ("SentencePieceTokenizer", JSON, "not a SentencePiece model"),
        ("SentencePieceTokenizer", PIECES[:3000], "not a SentencePiece model"),
        ("SentencePieceTokenizer", b"", "not a SentencePiece model"),
        ("TikTokenizer", POINTER, "it is a Git LFS pointer: run git lfs pull"),
        (
            "TikTokenizer",
            JSON,
            "not a JSON list of tokens with token_bytes and rank (it holds a dict)",
        ),
        ("TikTokenizer", RANKS, "not a JSON list of tokens with token_bytes and rank"),
        ("TikTokenizer", PIECES, "not UTF-8 text"),
    ],
)
def test_damaged_models_are_refused_in_one_line(tmp_path, kind, contents, message):
    (tmp_path / "file").write_bytes(contents)
    with pytest.raises(ValueError) as refused:
        TokenizerFlags(kind, None, None, tmp_path / "file").build()
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_chat_with_tools_is_rendered_by_the_template_for_them(tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(FILES / "saved_by_transformers", folder)
    ours = TokenizerFlags("HuggingFaceTokenizer", None, None, folder).build()
    template = ChatTemplate(ours)
    messages = [user_turn("hi"), {"role": "assistant", "content": "the model"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (None, tools):
        ids, _ = unsigned(template.encode(Chat(messages, None, given)))
        theirs = ours.library.apply_chat_template(messages, tools=given)["input_ids"]
        assert ids.tolist() == theirs
        assert ours.decode(ids).startswith("1hi" if given else "hi")
    one = ChatTemplate(ours, template.text)  # --chat-template is for every chat
    assert ours.decode(unsigned(one.encode(Chat(messages, None, tools)))[0]).startswith("hi")
    shutil.rmtree(folder / "additional_chat_templates")
    (folder / "chat_template.jinja").unlink()
    rows = [
        {"name": "default", "template": template.text},
        {"name": "tool_use", "template": "T" + template.text},
    ]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": rows})
    )
    listed = ChatTemplate(TokenizerFlags("HuggingFaceTokenizer", None, None, folder).build())
    assert ours.decode(unsigned(listed.encode(Chat(messages, None, tools)))[0]).startswith("Thi")
    settings = {"eos_token": "<|end|>", "chat_template": rows[1:]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="templates named tool_use, and none named default: pass"):
        ChatTemplate(TokenizerFlags("HuggingFaceTokenizer", None, None, folder).build())


# Code in a folder --------------------------------------------------------------------------------------------------------------

CODE = "from pathlib import Path\nPath(__file__).with_name('it_ran').touch()\nPath({!r}).touch()\n"


@pytest.mark.parametrize(
    ("config", "model", "refused"),
    [
        ({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}, None, True),
        ({"tokenizer_class": "Own", "auto_map": ["own.Own", None]}, None, True),
        ({"auto_map": {"AutoTokenizer": [None, "own.Own"]}}, None, True),
        (
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "auto_map": {"AutoTokenizer": ["own.Own", None]},
            },
            None,
            False,
        ),
        ({}, {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, True),
        (
            {},
            {
                "model_type": "own",
                "auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": "own.Own"},
            },
            True,
        ),
    ],
)
def test_code_in_a_folder_never_runs_and_nothing_is_asked(
    tmp_path, monkeypatch, config, model, refused
):
    def asked(*_):
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    ran = tmp_path / "ran"
    files = {"own.py": CODE.format(str(ran)) + "class Own: pass\n", "tokenizer.json": JSON}
    files["tokenizer_config.json"] = json.dumps({"eos_token": "<|end|>", **config})
    if model:
        files["config.json"] = json.dumps(model)
    folder = write(tmp_path / "folder", files)
    try:
        TokenizerFlags("HuggingFaceTokenizer", None, None, folder).build()
    except ValueError as error:
        assert (
            refused
            and "its auto_map asks for own.Own, code in the folder, which is never run"
            in str(error)
        )
        assert "\n" not in str(error)
    else:
        assert not refused or model
    assert not ran.exists() and not (folder / "it_ran").exists()


def with_expression(folder: Path, expression: str):
    """Return the tokenizer of a file whose pieces are found by a regular expression."""
    contents = json.loads(JSON)
    split = {"pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    contents["pre_tokenizer"] = {"type": "Split", **split}
    config = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    files = {"tokenizer.json": json.dumps(contents), "tokenizer_config.json": config}
    return TokenizerFlags("HuggingFaceTokenizer", None, None, write(folder, files)).build()


@pytest.mark.parametrize("call", ["encode", "encode_many", "offsets", "chat", "prompt"])
def test_an_expression_that_never_ends_has_a_limit_of_time(tmp_path, monkeypatch, call):
    tokenizer = with_expression(tmp_path, r"(a*)(a*)(a*)\1x|b(?=.)")
    text = "a" * 300 + "b"  # 300**4 / 24 steps; the library's own limit is for one place of a text
    works = {
        "encode": lambda: tokenizer.encode(text),
        "encode_many": lambda: tokenizer.encode_many(["b", text]),
        "offsets": lambda: tokenizer.library(text, return_offsets_mapping=True),
        "chat": lambda: template.encode(
            Chat([user_turn(text), {"role": "assistant", "content": text}])
        ),
        "prompt": lambda: template.prompt([user_turn(text)]),
    }
    template = ChatTemplate(tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setattr(hugging_face, "SECONDS", 0.05)
    with pytest.raises(
        NeverSkipped, match=rf"--tokenizer-model {tmp_path}: did not tokenize [36]0"
    ):
        works[call]()
    assert tokenizer.decode(tokenizer.encode("bb")) == "bb"


def test_the_limit_of_the_library_of_expressions_is_one_line(tmp_path, capfd):
    """The lines that Rust prints of its panic are discarded; others of native code are not."""
    tokenizer = with_expression(tmp_path, "(a+)+$")
    with pytest.raises(NeverSkipped, match=f"{tmp_path}: .*retry-limit"):
        tokenizer.encode("a" * 60 + "b")
    assert capfd.readouterr().err == ""
    hugging_face.limited("here", 0, lambda: os.write(2, b"a line"))
    assert capfd.readouterr().err == "a line"
