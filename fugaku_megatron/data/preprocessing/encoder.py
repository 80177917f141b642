"""Tokenization of documents, by worker processes or this one."""

from __future__ import annotations

import ctypes
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...tokenizers.hugging_face import HuggingFaceTokenizer
from ...tokenizers.tokenizer import TokenizerFlags
from ..chat.chat_template import ChatTemplate
from ..chat.chats import read_chat
from ..indexed import best_dtype
from ..input.documents import Document, Place, Skipped, document_texts
from ..input.tables import CHAT, Columns
from .document_order import DocumentTokens

# of text that a worker gets at a time: enough to hide the exchange, little enough to balance
BATCH_BYTES = 2**18
PR_SET_PDEATHSIG = 1  # of Linux's prctl
BATCHES_AHEAD = 4  # per worker, which bounds the memory that input and results in waiting take


class Job(NamedTuple):
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


class Encoded(NamedTuple):
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
    `chat_files.signed`.
    """

    def __init__(self, job: Job):
        self.job = job
        self.tokenizer = job.flags.build()
        self.template = ChatTemplate(self.tokenizer, job.chat_template) if job.chat else None
        self.dtype = np.dtype(np.int32) if job.chat else best_dtype(self.tokenizer.vocab_size)
        self._unread: set[str] = set()

    def encode(self, documents: list[Document]) -> Encoded:
        """Return token ids and document lengths for each key, without skipped documents."""
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
def encoder_of(job: Job) -> Encoder:
    return Encoder(job)


def _encode(job: Job, documents: list[Document]) -> Encoded:
    return encoder_of(job).encode(documents)


def _start_worker() -> None:
    """Make a worker exit with its parent, also if that is killed, use one core, and ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if hasattr(library := ctypes.CDLL(None), "prctl"):
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield consecutive documents in lists of at least BATCH_BYTES, except the last list."""
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


def encode_all(job: Job, documents: Iterable[Document], workers: int) -> Iterator[Encoded]:
    """Yield every batch's `Encoder.encode` in order, by `workers` processes (1: this one)."""
    work = batches(documents)
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
