"""Data fields: files, splits, tokenizer and document masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from .fields import (
    BY_RANK,
    LENGTH,
    SHARE,
    Requirement,
    cached_hash,
    check,
    course_option,
    course_optional,
    course_switch,
    flag,
    free_option,
    free_optional,
    of_topic,
    optional,
)
from .rules import CheckedFields
from .sample_rules import Skips

SENTENCEPIECE_TYPES = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "JapaneseSentencePiece",
)

FIM_TOKENS = (
    "fim_prefix_token",
    "fim_middle_token",
    "fim_suffix_token",
    "fim_pad_token",
    "fim_eod_token",
)
MARKS = "marks of documents"  # topic of flags that need the end-of-document token
fim_option = partial(course_option, needs="fim_data")
TOKENIZER = Requirement("--vocab-file or --tokenizer-model", lambda run: run.data.has_tokenizer)


@cached_hash
@dataclass(frozen=True, kw_only=True)
class DataConfig(CheckedFields):
    """Tokens and tokenizer."""

    data_path: tuple[str, ...] | None = course_optional(
        "prefix of .bin/.idx, a token file of llm.c, modded-nanogpt or nanoGPT (.bin), or a blend: weight prefix weight "
        "prefix ...; without weights every data set is read once",
        script="DATA",
    )
    train_data_path: tuple[str, ...] | None = course_optional(
        "as --data-path, for training only", script="DATA"
    )
    valid_data_path: tuple[str, ...] | None = course_optional("as --data-path, for validation only")
    data_args_path: str | None = free_optional("file with the words of --data-path")
    per_split_data_args_path: str | None = free_optional(
        "JSON file with the words of --train-data-path as train, and of --valid-data-path as valid",
    )
    split: str = course_option(
        "969,30,1",
        "documents of --data-path for training, validation and test",
        needs="data_path",
    )
    legacy_split: bool = course_switch(
        "round --split as Megatron-LM before Megatron-core 0.5, to resume such a run",
        needs="data_path",
    )
    data_cache_path: str | None = free_optional(
        "directory for the index of --data-path (default: next to the data, if it is large)",
        differs=BY_RANK,
    )
    mock_data: bool = course_switch("random tokens instead of --data-path")
    reset_position_ids: bool = course_switch("restart positions at each document", topic=MARKS)
    reset_attention_mask: bool = course_switch(
        "restrict attention to a token's own document", topic=MARKS
    )
    eod_mask_loss: bool = course_switch(
        "exclude predictions from the end-of-document token from the loss",
        topic=MARKS,
    )
    dataloader_inter_document_masking: bool = course_switch(
        "restrict attention to a token's own document of the data files, and restart positions there; "
        "no end-of-document token is needed"
    )
    mean_document_length: int | None = free_optional(
        "tokens per document, for estimates of time and FLOPs with "
        "--reset-attention-mask (default: --seq-length)",
    )
    skip_samples: tuple[str, ...] | None = optional(
        "samples excluded from training, as FIRST:END ..., without END; skipped samples count as consumed",
        meaning=LENGTH,
    )
    tokenizer_type: str = free_option(
        "GPT2BPETokenizer",
        "tokenizer of --data-path: GPT2BPETokenizer, HuggingFaceTokenizer, "
        "SentencePieceTokenizer, Llama2Tokenizer, JapaneseSentencePiece, TikTokenizer or NullTokenizer; "
        "without tokenizer files, the tokenizer of the initial model",
        needs=TOKENIZER,
    )
    vocab_file: str | None = free_optional(
        "vocab.json of the tokenizer, or a SentencePiece model", script="DATA"
    )
    merge_file: str | None = free_optional("merges.txt of the tokenizer", script="DATA")
    tokenizer_model: str | None = free_optional(
        "directory of HuggingFaceTokenizer, .model file of SentencePiece, or .json file of "
        "TikTokenizer",
        script="TOKENIZER",
    )
    tiktoken_pattern: str = free_option(
        "v2",
        "pattern by which TikTokenizer splits text",
        choices=("v1", "v2"),
        needs="tokenizer_type=TikTokenizer",
    )
    tiktoken_num_special_tokens: int = free_option(
        1000,
        "special tokens of TikTokenizer",
        range=None,
        needs="tokenizer_type=TikTokenizer",
    )
    fim_data: bool = course_switch(
        "rearrange texts to prefix, suffix and middle at random, so that the model learns to fill in the middle"
    )
    fim_rate: float = fim_option(0.5, "share of documents that are rearranged", range=SHARE)
    fim_spm_rate: float = fim_option(
        0.5, "share of them that begins with the suffix, before the prefix", range=SHARE
    )
    fim_split_sample: str | None = fim_option(
        None, "token between the files of a document, which are rearranged one by one"
    )
    fim_fragment_rate: float | None = fim_option(
        None, "share of the files that are rearranged, with --fim-split-sample", range=SHARE
    )
    fim_no_prefix: str | None = fim_option(None, "leave texts that begin with this as they are")
    fim_prefix_token: str = fim_option("<fim_prefix>", "token before a prefix")
    fim_middle_token: str = fim_option("<fim_middle>", "token before a middle")
    fim_suffix_token: str = fim_option("<fim_suffix>", "token before a suffix")
    fim_pad_token: str = fim_option("<fim_pad>", "token after a sample that has become shorter")
    fim_eod_token: str = fim_option("<|endoftext|>", "token that ends a document")
    sft: bool = course_switch(
        "fine-tune on chats: --data-path is from fugaku-megatron preprocess --chat, whole chats are packed into a sample, each "
        "with its own positions and attention, and the loss is over the assistant's tokens",
    )
    sft_truncate: bool = course_switch("truncate chats longer than a sample", needs="sft")

    def _check(self) -> None:
        check(
            self.tokenizer_type in SENTENCEPIECE_TYPES
            or (self.vocab_file is None) == (self.merge_file is None),
            f"--vocab-file is {self.vocab_file} and --merge-file is {self.merge_file}: pass both or neither",
        )
        Skips.parse(self.skip_samples)
        check(
            self.mean_document_length is None or self.masks_attention,
            f"--mean-document-length {self.mean_document_length} is "
            "for runs whose attention ends with a document: pass --reset-attention-mask, or leave it out",
        )
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
        check(
            not self.dataloader_inter_document_masking or not (self.sft or self.mock_data),
            "--dataloader-inter-document-masking is for documents of --data-path, not for --sft, whose chats are "
            "separate anyway, nor for --mock-data: leave it out",
        )
        self._check_fim()

    def _check_fim(self) -> None:
        if not self.fim_data:
            return
        others = ("sft", "mock_data", "dataloader_inter_document_masking")
        given = " ".join(flag(name) for name in others if getattr(self, name))
        check(
            not given,
            f"--fim-data rearranges the texts of --data-path, and does not go with {given}: leave one out",
        )
        check(
            (self.fim_split_sample is None) == (self.fim_fragment_rate is None),
            f"--fim-split-sample is {self.fim_split_sample} and --fim-fragment-rate is {self.fim_fragment_rate}: "
            "pass both or neither",
        )

    @cached_property
    def marks_documents(self) -> str:
        """Flags that need the end-of-document token, except for chats, whose files have masks."""
        if self.sft:
            return ""
        names = of_topic(DataConfig, MARKS)
        if self.dataloader_inter_document_masking:
            names = ("eod_mask_loss",)
        return " ".join(flag(name) for name in names if getattr(self, name))

    @cached_property
    def marked(self) -> bool:
        """True if samples have document or loss masks."""
        return self.separates_documents or bool(self.marks_documents)

    @cached_property
    def separates_documents(self) -> bool:
        """True if the data files say where a document begins."""
        return self.sft or self.dataloader_inter_document_masking

    @cached_property
    def masks_attention(self) -> bool:
        return self.separates_documents or self.reset_attention_mask

    @cached_property
    def restarts_positions(self) -> bool:
        return self.separates_documents or self.reset_position_ids

    @cached_property
    def has_tokenizer(self) -> bool:
        return bool(
            self.vocab_file or self.tokenizer_model or self.tokenizer_type == "NullTokenizer"
        )

    @cached_property
    def files(self) -> tuple[str, ...] | None:
        words = self.data_path or self.train_data_path
        if words:
            return words
        listed = self.data_args_path or self.per_split_data_args_path
        return (listed,) if listed else None

    @cached_property
    def cuts_chats(self) -> bool | None:
        """True: truncate chats that are too long; False: refuse them; None: not chats."""
        return self.sft_truncate if self.sft else None

    @cached_property
    def paths(self) -> dict[str, tuple[str, ...]]:
        given = {
            "--data-path": self.data_path,
            "--train-data-path": self.train_data_path,
            "--valid-data-path": self.valid_data_path,
        }
        return {name: value for name, value in given.items() if value}
