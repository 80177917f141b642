"""Tokenizers of Hugging Face, SentencePiece and numbers: against their own libraries, in every command, and told apart."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import transformers

from fugaku_megatron.cli import program
from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.data.indexed import IndexedDataset
from fugaku_megatron.inference import generate
from fugaku_megatron.run.tokenizer import read_tokenizer, tokenizer_notes, with_vocabulary
from fugaku_megatron.tokenizers.hugging_face import HuggingFaceTokenizer, SentencePieceTokenizer
from fugaku_megatron.tokenizers.tokenizer import (
    SUFFIX,
    TOKENIZERS,
    NullTokenizer,
    TokenizerFlags,
    identity,
    mismatch,
    read_identity,
)
from tests.checks.generation import save_trained
from tests.checks.tokenizers import PIECES, TEXTS, TOKENS, write_hugging_face, write_sentencepiece
from tests.time_limit import time_limit

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Type -> its --tokenizer-model."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "SentencePieceTokenizer": str(write_sentencepiece(folder / "sp.model")),
        "HuggingFaceTokenizer": str(write_hugging_face(folder / "hf")),
    }


def flags_of(models, name: str) -> list[str]:
    return ["--tokenizer-type", name, "--tokenizer-model", models[name]]


def test_hugging_face_is_what_auto_tokenizer_gives(models, caplog, capsys):
    theirs = transformers.AutoTokenizer.from_pretrained(models["HuggingFaceTokenizer"])
    ours = HuggingFaceTokenizer(models["HuggingFaceTokenizer"])
    for text in TEXTS:
        assert (
            ours.encode(text) == theirs(text).input_ids == ours.encode(text.encode())
            and ours.encode(text)[0] == 0
        )
        assert ours.decode(ours.encode(text)) == "<s>" + text
    caplog.clear()
    capsys.readouterr()
    ours.encode(TEXTS[0] * 9)
    assert not caplog.records and not capsys.readouterr().err, "a long text is not a warning"
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id) == (len(theirs), 1)
    assert "\ufffd" in ours.decode(ours.encode("a\ud800b")) and "\ufffd" in ours.decode(
        ours.encode(b"a\xff")
    )


@pytest.mark.parametrize(
    ("special", "end"),
    [
        ({"eos_token": "</s>", "sep_token": "<extra>"}, "</s>"),
        ({"sep_token": "</s>"}, "</s>"),
        ({"bos_token": "<s>"}, None),
    ],
)
def test_a_sep_token_ends_documents_where_there_is_no_eos(tmp_path, special, end):
    """megatron/core/tokenizers/text/libraries/huggingface_tokenizer.py makes the sep token the missing eos token."""
    ours = HuggingFaceTokenizer(write_hugging_face(tmp_path, **special))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.eod == (
        None if end is None else theirs.convert_tokens_to_ids(end)
    ) and ours.vocab_size == len(theirs)


def test_every_token_of_a_vocabulary_with_gaps_has_a_row(tmp_path):
    """megatron/core/tokenizers/text/libraries/huggingface_tokenizer.py counts the tokens, so the last ones may have no row."""
    file = write_hugging_face(tmp_path) / "tokenizer.json"
    saved = json.loads(file.read_text())
    vocabulary = saved["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 400
    file.write_text(json.dumps(saved))
    ours = HuggingFaceTokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert max(theirs.get_vocab().values()) == 400 and (len(theirs), ours.vocab_size) == (
        TOKENS,
        401,
    )


def test_sentencepiece_is_what_its_library_gives(models, tmp_path):
    theirs = sentencepiece.SentencePieceProcessor(model_file=models["SentencePieceTokenizer"])
    ours = SentencePieceTokenizer(models["SentencePieceTokenizer"])
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text) and ours.decode(
            ours.encode(text)
        ) == theirs.decode(theirs.encode(text))
    assert ours.encode(b"the \xff") == theirs.encode("the \ufffd") and ours.encode(
        "\ud800"
    ) == theirs.encode("\ufffd")
    assert (ours.vocab_size, ours.eod) == (PIECES, theirs.eos_id()) == (PIECES, 2)
    assert (
        SentencePieceTokenizer(write_sentencepiece(tmp_path / "no_end.model", eos_id=-1)).eod
        is None
    )
    with pytest.raises(
        ValueError,
        match=f"token id {PIECES} is outside the vocabulary of {PIECES}: is this --tokenizer-model",
    ):
        ours.decode([PIECES])


def test_numbers_and_names():
    owner = SimpleNamespace(
        tokenizer_type="SentencePieceTokenizer", tokenizer_model="a b", vocab_file=None
    )
    assert (
        TokenizerFlags.of(owner).words()
        == "--tokenizer-type SentencePieceTokenizer --tokenizer-model 'a b'"
    )
    assert TokenizerFlags("GPT2BPETokenizer", "v", "m").words() == "--vocab-file v --merge-file m"
    assert TOKENIZERS["GPTSentencePieceTokenizer"] is SentencePieceTokenizer
    ours = NullTokenizer(100)
    assert ours.encode("5 0  98\n") == [5, 0, 98] and ours.decode([5, 0, 98]) == "5 0 98"
    assert (ours.vocab_size, ours.eod) == (100, 99)
    for text, message in (
        ("5 x", "'x' is not one"),
        ("-1", "'-1' is not one"),
        ("100", "token id 100 is outside the vocabulary of 100: .* pass --vocab-size 101 for its"),
        ("101", "token id 101 is outside the vocabulary of 100: pass a larger --vocab-size$"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.encode(text)


def test_mistakes(models, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for kind, model, message in (
        ("HuggingFaceTokenizer", tmp_path / "empty", "no folder with tokenizer_config.json or"),
        ("SentencePieceTokenizer", None, "SentencePieceTokenizer needs --tokenizer-model"),
        ("NullTokenizer", None, "NullTokenizer needs --vocab-size"),
        (
            "GPT2BPETokenizer",
            "m",
            "--tokenizer-model m, but --tokenizer-type is GPT2BPETokenizer: pass",
        ),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            TokenizerFlags(kind, None, None, model).build()
        assert "\n" not in str(refused.value)
    for package, kind, extra in (
        ("transformers", "HuggingFaceTokenizer", "huggingface"),
        ("sentencepiece", "SentencePieceTokenizer", "sentencepiece"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(
            ValueError,
            match=f"--tokenizer-type {kind} needs the Python package {package} .*its extra .{extra}.$",
        ):
            TokenizerFlags(kind, None, None, models[kind]).build()


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_preprocess_with_workers(models, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with open("c.jsonl", "w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS * 40)
    words = [
        "preprocess",
        "--input",
        "c.jsonl",
        *flags_of(models, name),
        "--append-eod",
        "--keep-order",
        "--output-prefix",
    ]
    assert program.main([*words, "one"]) == program.main([*words, "two", "--workers", "2"]) == 0
    one, two = (Path(f"{prefix}_text_document.bin").read_bytes() for prefix in ("one", "two"))
    tokenizer = TokenizerFlags(name, None, None, models[name]).build()
    assert one == two and IndexedDataset("one_text_document")[1].tolist() == [
        *tokenizer.encode(TEXTS[1]),
        tokenizer.eod,
    ]
    assert (
        f"--tokenizer-type {name} --tokenizer-model {models[name]} --recipe demo"
        in capsys.readouterr().out
    )
    assert read_identity("one_text_document") == identity(tokenizer)
    assert Path(f"one_text_document{SUFFIX}").stat().st_size < 200


def test_preprocess_numbers_and_a_model_without_an_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("3 1 4")
    words = "preprocess --input a.txt --output-prefix a --append-eod".split()
    assert program.main([*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]) == 0
    assert IndexedDataset("a_text_document")[0].tolist() == [3, 1, 4, 9]
    model = write_sentencepiece(tmp_path / "m", eos_id=-1)
    assert (
        program.main(
            [*words, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
        )
        == 2
    )
    assert "--append-eod: the tokenizer of --tokenizer-model" in capsys.readouterr().err


def test_a_run_gets_its_vocabulary_size(models):
    base = ["--recipe", "demo", "--mock-data"]
    for words, size in (
        (flags_of(models, "SentencePieceTokenizer"), PIECES),
        (flags_of(models, "HuggingFaceTokenizer"), TOKENS),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "77"], 77),
    ):
        run = parse([*base, *words]).run
        assert with_vocabulary(run, read_tokenizer(run, SoloComm())).model.vocab_size == size
    run = parse([*base, *flags_of(models, "SentencePieceTokenizer"), "--vocab-size", "50"]).run
    with pytest.raises(
        ValueError, match=f"--vocab-size 50 is below the {PIECES} tokens of --tokenizer-model"
    ):
        with_vocabulary(run, read_tokenizer(run, SoloComm()))


def test_a_run_takes_the_tokenizer_of_the_model_that_it_starts_from(models, tmp_path):
    start = tmp_path / "start"
    shutil.copytree(models["HuggingFaceTokenizer"], start / "hugging_face")
    base = ["--recipe", "demo", "--data-path", str(tmp_path / "d")]

    def size(*words: str) -> int | None:
        run = parse([*base, *words]).run
        return with_vocabulary(run, read_tokenizer(run, SoloComm())).model.vocab_size

    folder = ["--pretrained-checkpoint", str(start)]
    empty = ["--load", str(tmp_path / "empty")]
    assert size(*folder) == size("--load", str(start)) == size(*empty, *folder) == TOKENS
    assert size(*folder, "--eod-mask-loss", "--vocab-size", "999") == 999
    assert size(*folder, *flags_of(models, "SentencePieceTokenizer")) == PIECES
    with pytest.raises(ValueError, match="below the .* tokens of the tokenizer of the model"):
        size(*folder, "--eod-mask-loss", "--vocab-size", "9")
    with pytest.raises(ValueError, match="size is unknown: .* as --pretrained-checkpoint"):
        size("--pretrained-checkpoint", str(tmp_path))


def test_other_tokenizers_are_told(models, tmp_path):
    ours = identity(
        TokenizerFlags(
            "SentencePieceTokenizer", None, None, models["SentencePieceTokenizer"]
        ).build()
    )
    other = identity(
        SentencePieceTokenizer(write_sentencepiece(tmp_path / "other.model", PIECES - 1))
    )
    run = parse(
        [
            "--recipe",
            "demo",
            "--data-path",
            str(tmp_path / "d"),
            *flags_of(models, "SentencePieceTokenizer"),
        ]
    ).run
    (tmp_path / f"d{SUFFIX}").write_text(json.dumps(ours))
    assert (
        tokenizer_notes(run, ours, ours, SoloComm())
        == tokenizer_notes(run, None, other, SoloComm())
        == []
    )
    (tmp_path / f"d{SUFFIX}").write_text(json.dumps(other))
    first, second = tokenizer_notes(run, ours, other, SoloComm())
    assert (
        f"{tmp_path / 'd'} was tokenized with SentencePieceTokenizer of {PIECES - 1} tokens"
        in first
    )
    assert f"trained with SentencePieceTokenizer of {PIECES - 1} tokens" in second
    assert f"not SentencePieceTokenizer of {PIECES}" in second
    assert mismatch(identity(NullTokenizer(5)), other) is None
    assert mismatch(ours, {**ours, "crc32": "0"}).count(f"{PIECES} tokens, CRC-32") == 2
    for record in (
        {**ours, "eod": None},
        {name: value for name, value in ours.items() if name != "eod"},
    ):
        words = mismatch(ours, record).split(" and not ")
        assert words[0].endswith(f"end of document {record.get('eod', '?')}") and words[1].endswith(
            "end of document 2"
        )
    (tmp_path / f"d{SUFFIX}").write_text("{")
    assert read_identity(str(tmp_path / "d")) is None


def test_generate_takes_the_tokenizer_of_the_run(models, tmp_path, capsys):
    record = identity(SentencePieceTokenizer(models["SentencePieceTokenizer"]))
    save_trained(
        SoloComm(),
        tmp_path,
        1,
        tokenizer=record,
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=models["SentencePieceTokenizer"],
    )

    def write(*words: str) -> str:
        parser = Parser()
        generate.add_arguments(parser)
        options = parser.parse_args(
            ["--load", str(tmp_path), "--prompt", "to be", "--tokens", "0", *words]
        )
        generate.continue_prompts(generate.Request.of(options), SoloComm())
        return capsys.readouterr().out

    write_hugging_face(
        tmp_path / "hugging_face"
    )  # what came with a model counts where its run named none
    assert write().endswith("\n[to be]\n") and "note" not in write()
    other = write_sentencepiece(tmp_path / "other.model", PIECES - 1)
    assert f"note: the model was trained with SentencePieceTokenizer of {PIECES} tokens" in write(
        "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(other)
    )
    with pytest.raises(
        ValueError, match=f"has {TOKENS} tokens, the model of --load {tmp_path} 257: pass the files"
    ):
        write(*flags_of(models, "HuggingFaceTokenizer"))
    save_trained(SoloComm(), tmp_path / "unknown", 1)
    with pytest.raises(
        ValueError,
        match="the tokenizer is unknown, the checkpoint in --load .* was trained without one: pass",
    ):
        write("--load", str(tmp_path / "unknown"))
    for words, message in (
        (
            ["HuggingFaceTokenizer"],
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: --load",
        ),
        (
            ["TikTokenizer"],
            "TikTokenizer needs --tokenizer-model: .* was trained without a tokenizer",
        ),
        (
            ["HuggingFace"],
            "--tokenizer-type HuggingFace: unknown; did you mean HuggingFaceTokenizer",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            write("--load", str(tmp_path / "unknown"), "--tokenizer-type", *words)
    assert write("--tokenizer-type", "SentencePieceTokenizer")  # that of the run
    with pytest.raises(ValueError, match="needs --tokenizer-model: .* with SentencePieceTokenizer"):
        write("--tokenizer-type", "HuggingFaceTokenizer")


# TikTokenizer and the Japanese SentencePiece ------------------------------------------------------------------------------------


def write_tiktoken(path: Path) -> Path:
    """Write Megatron-LM's form: the 256 bytes, then tokens merged from two, in the order of the merges."""
    merged = [
        b"th",
        b"the",
        b" t",
        b" the",
        b"in",
        b"ing",
        *("日本".encode()[:size] for size in range(2, 7)),
    ]
    tokens = [*(bytes([i]) for i in range(256)), *merged]
    rows = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken_files(tmp_path, pattern):
    path = write_tiktoken(tmp_path / "tokens.json")
    flags = TokenizerFlags("TikTokenizer", None, None, str(path), 267 + 20, pattern, 20)
    tokenizer = flags.build()
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.name) == (287, 2, "TikTokenizer")
    assert tokenizer.encode("the thing") == [20 + 257, 20 + ord(" "), 20 + 256, 20 + 261]
    assert tokenizer.encode("日本") == [20 + 266] and tokenizer.encode("</s>日") == [2, 20 + 263]
    for text in ("", "the  thing\r\n\n x1 23 , 日本語 é", "a\ud800b"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.replace("\ud800", "\ufffd") and all(
            20 <= i < 287 for i in ids
        )
        assert tokenizer.count_bytes(ids) == len(text.replace("\ud800", "\ufffd").encode())
    with pytest.raises(ValueError, match="token id 287 is outside the vocabulary of 287"):
        tokenizer.decode([287])


def merged_by_definition(piece: bytes, ids: dict[bytes, int]) -> list[int]:
    """Merge the leftmost pair of the first token, until no pair forms a token."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while any(a + b in ids for a, b in zip(parts, parts[1:])):
        made = [ids.get(a + b, len(ids)) for a, b in zip(parts, parts[1:])]
        first = made.index(min(made))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return [ids[part] for part in parts]


def test_tiktoken_merges_as_defined_and_long_pieces_in_time(tmp_path):
    random = np.random.RandomState(0)
    merged = {bytes(random.choice([97, 98, 99], random.randint(2, 7))) for _ in range(60)}
    tokens = [*(bytes([i]) for i in range(256)), *random.permutation(sorted(merged)).tolist()]
    rows = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode()}
        for i, token in enumerate(tokens)
    ]
    (tmp_path / "tokens.json").write_text(json.dumps(rows))
    size = len(tokens) + 7
    flags = TokenizerFlags("TikTokenizer", None, None, tmp_path / "tokens.json", size, "v2", 7)
    tokenizer = flags.build()
    ids = {token: i + 7 for i, token in enumerate(tokens)}
    for _ in range(300):
        piece = bytes(random.choice([97, 98, 99], random.randint(7, 40)))
        assert tokenizer.encode(piece) == merged_by_definition(piece, ids)
    long = bytes(random.choice([97, 98, 99], 10**5))
    with time_limit():
        assert tokenizer.decode_bytes(tokenizer.encode(long)) == long
        assert len(tokenizer.encode(" " * 10**6)) == 10**6


@pytest.mark.parametrize(
    ("text", "size", "special", "message"),
    [
        ('[{"rank": 0}]', 300, 20, "not a JSON list of tokens"),
        ("[]", 300, 20, "not ranked"),
        (
            None,
            300,
            20,
            "it has 267 tokens, and --vocab-size without the special ones asks for 280: lower it",
        ),
        (None, 300, 3, "--tiktoken-num-special-tokens is 3: pass a number from 7"),
    ],
)
def test_damaged_tiktoken_files(tmp_path, text, size, special, message):
    path = write_tiktoken(tmp_path / "tokens.json")
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        TokenizerFlags("TikTokenizer", None, None, path, size, "v2", special).build()


def test_tiktoken_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(
        ValueError, match=r"--tokenizer-type TikTokenizer needs .* extra \[tiktoken\]"
    ):
        TokenizerFlags("TikTokenizer", None, None, tmp_path / "tokens.json").build()


def test_the_fork_of_fugaku_gives_its_sentencepiece_model_as_a_vocab_file(tmp_path):
    model = write_sentencepiece(tmp_path / "sp.model")
    plain = TokenizerFlags("SentencePieceTokenizer", None, None, model).build()
    for kind in ("JapaneseSentencePiece", "Llama2Tokenizer", "SentencePieceTokenizer"):
        tokenizer = TokenizerFlags(kind, model, None).build()
        assert (tokenizer.vocab_size, tokenizer.eod) == (plain.vocab_size, plain.eod)
    japanese = TokenizerFlags("JapaneseSentencePiece", model, None).build()
    assert (
        japanese.encode("a\r\nb") == japanese.encode("a\nb")
        and japanese.name == "JapaneseSentencePiece"
    )
    assert identity(japanese)["crc32"] == identity(plain)["crc32"]
