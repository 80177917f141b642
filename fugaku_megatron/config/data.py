"""Fields of the data: files, splits, tokenizer and document masks."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import (
    check,
    check_numbers,
    check_positive,
    flag,
    hashed_once,
    opt,
)
from .sample_rules import Skips

SENTENCEPIECE_TYPES = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "JapaneseSentencePiece",
)


TIKTOKEN = "TikTokenizer"


MARKING = (
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
)  # what needs the token that ends a document


@hashed_once
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokens and tokenizer."""

    data_path: tuple[str, ...] | None = opt(
        None,
        "prefix of .bin/.idx, or weight prefix weight prefix ...; prefixes without weights are read once, by their lengths",
        type=str,
        nargs="+",
    )
    train_data_path: tuple[str, ...] | None = opt(
        None, "as --data-path, all of it for training", type=str, nargs="+"
    )
    valid_data_path: tuple[str, ...] | None = opt(
        None, "as --data-path, all of it for validation", type=str, nargs="+"
    )
    data_args_path: str | None = opt(None, "file that holds the words of --data-path", type=str)
    per_split_data_args_path: str | None = opt(
        None,
        "JSON file that holds the words of --train-data-path as train, and of "
        "--valid-data-path as valid",
        type=str,
    )
    split: str = opt("969,30,1", "documents of --data-path for training, validation and test")
    legacy_split: bool = opt(
        False, "round --split as Megatron-LM did before Megatron-core 0.5, to continue such a run"
    )
    data_cache_path: str | None = opt(
        None,
        "folder for the index of --data-path (default: next to the data, where it is large)",
        type=str,
    )
    mock_data: bool = opt(False, "random tokens instead of --data-path")
    reset_position_ids: bool = opt(False, "positions count from the beginning of each document")
    reset_attention_mask: bool = opt(False, "a token attends to tokens of its own document alone")
    eod_mask_loss: bool = opt(
        False, "the loss leaves out what is predicted from the token that ends a document"
    )
    mean_document_length: int | None = opt(
        None,
        "tokens of a document, for the times and FLOPs that are estimated of a run with "
        "--reset-attention-mask (default: as many as --seq-length)",
        type=int,
    )
    skip_samples: tuple[str, ...] | None = opt(
        None,
        "samples that training leaves out, as FIRST:END ..., END not included; they "
        "count as consumed",
        type=str,
        nargs="+",
    )
    tokenizer_type: str = opt(
        "GPT2BPETokenizer",
        "tokenizer of --data-path: GPT2BPETokenizer, HuggingFaceTokenizer, "
        "SentencePieceTokenizer, Llama2Tokenizer, JapaneseSentencePiece, TikTokenizer or NullTokenizer; "
        "if no file of one is named, that of the model that the run starts from is used",
    )
    vocab_file: str | None = opt(
        None, "vocab.json of the tokenizer, or a SentencePiece model", type=str
    )
    merge_file: str | None = opt(None, "merges.txt of the tokenizer", type=str)
    tokenizer_model: str | None = opt(
        None,
        "folder of HuggingFaceTokenizer, .model file of SentencePiece, or .json file of "
        "TikTokenizer",
        type=str,
    )
    tiktoken_pattern: str = opt(
        "v2", "how TikTokenizer cuts a text into pieces", choices=("v1", "v2")
    )
    tiktoken_num_special_tokens: int = opt(1000, "tokens of TikTokenizer that stand for no text")
    sft: bool = opt(
        False,
        "--data-path are chats that fugaku-megatron preprocess --chat wrote: whole chats share a sample, each "
        "with positions and attention of its own, and the loss is that of the assistant's tokens",
    )
    sft_truncate: bool = opt(False, "cut chats of more tokens than a sample has")

    def __post_init__(self) -> None:
        check_numbers(self)
        check(
            self.tokenizer_type in SENTENCEPIECE_TYPES
            or (self.vocab_file is None) == (self.merge_file is None),
            f"--vocab-file is {self.vocab_file} and --merge-file is {self.merge_file}: pass both or neither",
        )
        Skips.parse(self.skip_samples)
        check_positive(self, "mean_document_length")
        check(
            self.mean_document_length is None or self.masks_attention,
            f"--mean-document-length {self.mean_document_length} is "
            "for runs whose attention ends with a document: pass --reset-attention-mask, or leave it out",
        )
        names = (
            "mock_data",
            "data_path",
            "train_data_path",
            "data_args_path",
            "per_split_data_args_path",
        )
        sources = [flag(name) for name in names if getattr(self, name)]
        check(len(sources) < 2, f"{' and '.join(sources)} exclude each other: pass one")
        check(
            self.train_data_path or not self.valid_data_path,
            "--valid-data-path goes with --train-data-path: pass both",
        )
        check(
            not (self.sft and self.mock_data),
            "--sft reads chats, and --mock-data are random tokens: pass --data-path",
        )
        check(
            not (self.sft and self.eod_mask_loss),
            "--sft counts what the assistant wrote, and --eod-mask-loss leaves out what "
            "follows the end of a text: leave one out",
        )

    @property
    def marks_documents(self) -> str:
        """The flags that need the token that ends a document; empty where there are none, and for chats, whose files have marks."""
        return "" if self.sft else " ".join(flag(name) for name in MARKING if getattr(self, name))

    @property
    def marked(self) -> bool:
        """Whether samples come with marks (`data.marks`)."""
        return self.sft or bool(self.marks_documents)

    @property
    def masks_attention(self) -> bool:
        """Whether attention ends with a document."""
        return self.sft or self.reset_attention_mask

    @property
    def restarts_positions(self) -> bool:
        """Whether positions begin anew with a document."""
        return self.sft or self.reset_position_ids

    @property
    def has_tokenizer(self) -> bool:
        """Whether the flags say which tokenizer it is, and not only of which kind."""
        return bool(
            self.vocab_file or self.tokenizer_model or self.tokenizer_type == "NullTokenizer"
        )

    @property
    def files(self) -> tuple[str, ...] | None:
        """What names the files of the training data; None where there are none."""
        listed = self.data_args_path or self.per_split_data_args_path
        return self.data_path or self.train_data_path or ((listed,) if listed else None)

    @property
    def cuts_chats(self) -> bool | None:
        """Whether a chat that is too long is cut, and not refused; None where the data are not chats."""
        return self.sft_truncate if self.sft else None

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """Each flag that names data, with its value."""
        given = {
            flag(name): getattr(self, name)
            for name in ("data_path", "train_data_path", "valid_data_path")
        }
        return {name: value for name, value in given.items() if value}
