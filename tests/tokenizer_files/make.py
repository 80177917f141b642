"""The files next to this script: tokenizers from other programs, and llama.cpp's tokens.

    pip install xllamacpp tiktoken blobfile
    python -m tests.tokenizer_files.make

Each folder is one tokenizer. tokens.json has llama.cpp's tokens for TEXTS in each folder that --to-gguf writes,
and the CRC-32 of the written tokenizer. Made with tokenizers 0.23.3, transformers 5.23.0, sentencepiece 0.2.3,
tiktoken 0.14.0 and xllamacpp 2026.10.11549.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

from fugaku_megatron.convert.gguf.tokenizer import read_tokenizer
from fugaku_megatron.convert.gguf.tokens import SPACE, SPLITS, GgufTokenizer, Split

from .llama_cpp import LlamaCpp, write_model

HERE = Path(__file__).parent
TOKENS = HERE / "tokens.json"
ROWS = 640  # of the embedding
CORPUS = [
    "the model is the model that the user of the model has",
    " and then some don't they'll 12 345 6789",
    " 富岳 のテキスト café naïve\n\n\tx = y + 1; // code\n",
    "aa aaa aaaa a  b   c    d\n\n\n",
    "HELLO World ABC abc",
] * 6
TEXTS = (
    *(
        "",
        " ",
        "  ",
        "a",
        " a",
        "  a",
        "a ",
        "a  ",
        "the model",
        " the  model ",
        "\n",
        "\n\n",
        " \n",
        "\n a",
    ),
    *(
        "a\n\nb",
        "a\r\nb\r\n",
        "\ta\t",
        "\u00a0a\u00a0b",
        "\u3000a\u2003",
        "\x00a\x01\x7f",
        "\x85\u2028",
    ),
    *(
        "don't I'LL 'Tis it'S they'Ve",
        "1",
        "12345678 ²³ Ⅷ ١٢٣",
        "a1b22c333",
        "3.14,15 -26",
        "x = y_1 + 2;",
    ),
    *(
        "日本語のテキスト、富岳。",
        "Привет МИР",
        "हिन्दी",
        "e\u0301 café cafe\u0301",
        "ﬁ ｆｕｌｌ",
        "ǅ ẞ İ",
    ),
    *(
        "😀 a😀b 👨‍👩‍👧",
        "🇯🇵",
        "\U0010ffff",
        "!!! ?...",
        "(a) [b] {c}",
        "    x\n        y",
        "a" * 40,
        " " * 30,
    ),
    *(
        "\n" * 12,
        "ab" * 20,
        "<|end|>",
        "a<|end|> b",
        "<s>a</s>",
        "<unk>",
        "<0x41>",
        f"{SPACE}a b{SPACE}",
    ),
    *("extra an extra", "http://a.b/c?d=e", "\u0300a \u0300", "\\n \"q\" 'r'"),
)


def write_byte_level(folder: Path, split: Split, **config: str) -> None:
    """Train a byte-level BPE with a split from SPLITS by the package tokenizers."""
    import tokenizers
    from tokenizers import pre_tokenizers

    steps: list[Any] = []
    for kind, pattern in split.steps:
        if kind == "Split":
            steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
        if kind == "Digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
    own = split.steps[-1][0] == "ByteLevel"
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=split.whole_pieces))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens(["extra"])
    if "bos_token" in config:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A <|end|>", special_tokens=[("<s>", 1), ("<|end|>", 0)]
        )
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"), pretty=False)
    write_config(folder, {"eos_token": "<|end|>", **config})


def write_config(folder: Path, config: dict[str, Any]) -> None:
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    (folder / "tokenizer_config.json").write_text(text + "\n")


def write_pieces(folder: Path, **options: Any) -> None:
    """Train a SentencePiece model."""
    import sentencepiece

    folder.mkdir(exist_ok=True)
    settings = {
        "vocab_size": 340,
        "model_type": "bpe",
        "byte_fallback": True,
        "hard_vocab_limit": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        **options,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        minloglevel=2,
        **settings,
    )
    (folder / "tokenizer.vocab").unlink()


def write_fallback(folder: Path, prefix: bool) -> None:
    """Save a SentencePiece model in the package tokenizers' form, with all merges that make a piece."""
    import sentencepiece
    import tokenizers

    write_pieces(folder)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    (folder / "tokenizer.model").unlink()
    vocabulary = {model.id_to_piece(i): i for i in range(len(model))}
    merges = []
    for text, token in vocabulary.items():
        for cut in range(1, len(text)):
            if text[:cut] in vocabulary and text[cut:] in vocabulary:
                merges.append((-model.get_score(token), (text[:cut], text[cut:])))
    merges.sort()
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocabulary, [pair for _, pair in merges], byte_fallback=True, unk_token="<unk>"
        )
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.add_tokens([tokenizers.AddedToken("extra", normalized=False)])
    normalizers = tokenizers.normalizers
    if prefix:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            prepend_scheme="never", split=False
        )
    decoders = tokenizers.decoders
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(steps)
    made.save(str(folder / "tokenizer.json"), pretty=False)
    write_config(folder, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def write_saved(folder: Path) -> None:
    """Save a tokenizer with three chat templates by transformers."""
    import transformers

    found = transformers.AutoTokenizer.from_pretrained(HERE / "byte_level_gpt-2")
    found.chat_template = {
        "default": "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}",
        "tool_use": "{{ tools | length }}{% for message in messages %}{{ message.content }}<|end|>{% endfor %}",
        "rag": "{{ documents }}",
    }
    found.save_pretrained(folder)


def write_two_files(folder: Path) -> None:
    """Save vocab.json and merges.txt by the package tokenizers."""
    import tokenizers

    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(CORPUS, 340, special_tokens=["<|endoftext|>"], show_progress=False)
    folder.mkdir()
    made.save_model(str(folder))


def write_tiktoken(folder: Path) -> None:
    """Save ranks by tiktoken."""
    from tiktoken.load import dump_tiktoken_bpe

    ranks = {bytes([byte]): byte for byte in range(256)}
    for text in ("th", "the", " m", "od", "el", " mod", " model"):
        ranks[text.encode()] = len(ranks)
    folder.mkdir()
    dump_tiktoken_bpe(ranks, str(folder / "tokenizer.model"))


def written(tokenizer: GgufTokenizer) -> int:
    """Return the CRC-32 over the metadata that tokens depend on."""
    parts = (
        *(tokenizer.algorithm, tokenizer.split, [*map(tuple, tokenizer.tokens)], tokenizer.merges),
        *(tokenizer.add_space_prefix, tokenizer.add_bos, tokenizer.add_eos),
    )
    return zlib.crc32(repr(parts).encode())


def main() -> None:
    """Write everything anew."""
    for folder in HERE.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    for split in SPLITS:
        other = "" if split.steps[0][1] == "" or split.name != "gpt-2" else "_by_split"
        write_byte_level(HERE / f"byte_level_{split.name}{other}", split)
    write_byte_level(HERE / "byte_level_around", SPLITS[0], bos_token="<s>")
    write_pieces(HERE / "pieces_prefix")
    write_pieces(HERE / "pieces_no_prefix", add_dummy_prefix=False, user_defined_symbols="extra")
    write_pieces(HERE / "pieces_unigram", model_type="unigram", vocab_size=330)
    write_fallback(HERE / "fallback_prefix", prefix=True)
    write_fallback(HERE / "fallback_no_prefix", prefix=False)
    write_saved(HERE / "saved_by_transformers")
    write_two_files(HERE / "two_files")
    write_tiktoken(HERE / "tiktoken")
    found: dict[str, Any] = {}
    for folder in sorted(path for path in HERE.iterdir() if path.is_dir()):
        try:
            tokenizer = read_tokenizer(folder, ROWS, None, False)
        except ValueError as error:
            print(error)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "m.gguf"
            write_model(tokenizer, file)
            special = not folder.name.startswith("pieces")
            with LlamaCpp(file) as engine:
                tokens = [engine.tokens(text, special) for text in TEXTS]
        found[folder.name] = {"crc32": written(tokenizer), "tokens": tokens}
    lines = [f'"{name}": {json.dumps(row)}' for name, row in found.items()]
    TOKENS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
