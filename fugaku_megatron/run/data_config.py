"""The data of a run: a group of `config`'s fields."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check, check_numbers, flag, hashed_once, opt
from .skips import Skips


@hashed_once
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokens and tokenizer."""

    data_path: tuple[str, ...] | None = opt(
        None, "prefix of .bin/.idx, or weight prefix weight prefix ...; prefixes without weights are read once, by their lengths",
        type=str, nargs="+")
    train_data_path: tuple[str, ...] | None = opt(None, "as --data-path, all of it for training", type=str, nargs="+")
    valid_data_path: tuple[str, ...] | None = opt(None, "as --data-path, all of it for validation", type=str, nargs="+")
    split: str = opt("969,30,1", "documents of --data-path for training, validation and test")
    legacy_split: bool = opt(False, "round --split as Megatron-LM did before Megatron-core 0.5, to continue such a run")
    data_cache_path: str | None = opt(None, "folder for the index of --data-path (default: beside the data, where it is large)",
                                      type=str)
    mock_data: bool = opt(False, "random tokens instead of --data-path")
    skip_samples: tuple[str, ...] | None = opt(None, "samples that training leaves out, as FIRST:END ..., END not included; they "
                                               "count as consumed", type=str, nargs="+")
    tokenizer_type: str = opt("GPT2BPETokenizer", "tokenizer of --data-path: GPT2BPETokenizer, HuggingFaceTokenizer, "
                              "SentencePieceTokenizer or NullTokenizer")
    vocab_file: str | None = opt(None, "vocab.json of the tokenizer", type=str)
    merge_file: str | None = opt(None, "merges.txt of the tokenizer", type=str)
    tokenizer_model: str | None = opt(None, "folder of HuggingFaceTokenizer, or .model file of SentencePieceTokenizer", type=str)

    def __post_init__(self) -> None:
        check_numbers(self)
        check((self.vocab_file is None) == (self.merge_file is None),
              f"--vocab-file is {self.vocab_file} and --merge-file is {self.merge_file}: give both or neither")
        Skips.parse(self.skip_samples)
        sources = [flag(name) for name in ("mock_data", "data_path", "train_data_path") if getattr(self, name)]
        check(len(sources) < 2, f"{' and '.join(sources)} exclude each other: give one")
        check(self.train_data_path or not self.valid_data_path, "--valid-data-path goes with --train-data-path: give both")

    @property
    def has_tokenizer(self) -> bool:
        """Whether the flags say which tokenizer it is, and not only of which kind."""
        return bool(self.vocab_file or self.tokenizer_model or self.tokenizer_type == "NullTokenizer")

    @property
    def files(self) -> tuple[str, ...] | None:
        """What names the files of the training data; None where there are none."""
        return self.data_path or self.train_data_path

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """Each flag that names data, with its value."""
        given = {flag(name): getattr(self, name) for name in ("data_path", "train_data_path", "valid_data_path")}
        return {name: value for name, value in given.items() if value}
