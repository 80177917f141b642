"""Evaluate a checkpoint: perplexity of a text or a data set, and chat loss.

    fugaku-megatron evaluate --load checkpoints --input book.txt --json result.json
    fugaku-megatron evaluate --load checkpoints --data-path my_text_document --max-windows 100
    mpiexec -n 4 fugaku-megatron evaluate --load checkpoints --input book.txt
    --tensor-model-parallel-size 2
    fugaku-megatron evaluate --load tuned --chats held_out.jsonl

Texts are cut into windows of the sequence length, without a last, shorter one. Ranks share the
model by flags, or in the checkpoint's layout, and its replicas share the windows.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cli.output_files import check_file, writing
from ..cli.parser import add_fields, from_options
from ..comm.agreement import everywhere, on_root
from ..comm.base import Comm
from ..comm.job import run_or_abort
from ..config.fields import check, check_fields, option, optional
from ..config.model import ModelConfig
from ..data.chat.chat_files import unsigned
from ..data.chat.chat_template import ChatTemplate, read_template
from ..data.chat.chats import read_chat
from ..data.indexed import StoredTokens
from ..data.input.documents import read_documents
from ..data.input.input_files import input_files
from ..data.input.tables import CHAT
from ..data.token_files import open_tokens
from ..text.named_files import JsonObject, read_text
from ..text.written_files import named_file
from . import scoring
from .loading import LoadedModel, Source, add_source_flags, load_model
from .scoring import score, windows
from .tokenizer_choice import tokenizer_note

DECODED = 2**20  # tokens whose bytes are counted at a time


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_flags(parser)
    add_fields(parser, Model)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_fields(parser, Request)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Checkpoint, window length and batch size of an evaluation."""

    source: Source
    seq_length: int | None = optional("tokens of a window (default: the model's)")
    micro_batch_size: int = option(4, "windows side by side")

    def __post_init__(self) -> None:
        check_fields(self)
        check_fields(self.source)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Model:
        return from_options(cls, options, source=Source.of(options))

    def window(self, model: ModelConfig) -> int:
        """Return --seq-length or the model's."""
        length = self.seq_length or model.seq_length
        positions = model.max_position_embeddings
        check(
            length <= positions or not model.learned_positions,
            f"--seq-length is {length}, and the model of --load "
            f"{self.source.load} has {positions} positions: pass at most {positions}",
        )
        return length


@dataclass(frozen=True, kw_only=True)
class Request:
    """Texts, data set and chats to evaluate, from the command line."""

    model: Model
    input: str | None = optional("perplexity of this text", aliases=("--text",), metavar="FILE")
    data_path: str | None = optional(
        "perplexity of a data set, its documents one after another: PREFIX.bin and .idx, or a token file",
        metavar="PREFIX",
    )
    chats: tuple[str, ...] = option(
        (),
        "mean loss of the assistant's tokens in each of these .jsonl files of chats",
        metavar="FILE",
    )
    chat_template: str | None = optional(
        "jinja template of --chats (default: the tokenizer's)", metavar="FILE"
    )
    json: str | None = optional("write the result here", metavar="FILE")
    stride: int | None = optional(
        "tokens from one window to the next, each scored once (default: a window, without overlap)"
    )
    max_windows: int | None = optional("no more windows than these, from the beginning")

    def __post_init__(self) -> None:
        check(
            bool(self.input or self.data_path or self.chats),
            "nothing to evaluate: pass --input, --data-path or --chats",
        )
        check(
            self.chats or self.chat_template is None,
            f"--chat-template {self.chat_template} goes with --chats: pass both",
        )
        check(
            not (self.input and self.data_path),
            "--input and --data-path exclude each other: pass one",
        )
        check_fields(self)
        check_file("--json", self.json)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Request:
        return from_options(cls, options, model=Model.of(options))


@dataclass(frozen=True)
class ChatFile:
    """Chats in one file.

    cut: chats truncated to a window
    left_out: chats without trained tokens in it
    """

    path: str
    requests: list[scoring.Request]
    cut: int
    left_out: int


def read_chat_file(path: str, template: ChatTemplate, window: int) -> ChatFile:
    """Encode chats as requests of at most `window` + 1 tokens that score the assistant's tokens."""
    requests = []
    cut = 0
    left_out = 0
    for document in read_documents(input_files([path], ["text"], CHAT), CHAT):
        ids, trained = unsigned(template.encode(read_chat(document)))
        cut += len(ids) > window + 1
        places = 1 + np.flatnonzero(trained[1 : window + 1])
        left_out += not len(places)
        if len(places):
            requests.append(scoring.Request(ids[: window + 1], len(places), places))
    check(
        len(requests) > 0,
        f"--chats {path}: it has no chats, or none with an answer within the {window} tokens of a window",
    )
    return ChatFile(path, requests, cut, left_out)


@dataclass(frozen=True)
class Inputs:
    """Inputs on every rank.

    requests: at most --max-windows
    predicted: tokens scored by all windows
    bytes: of the tokens scored by `requests`
    """

    requests: list[scoring.Request]
    tokens: int
    predicted: int
    bytes: int
    note: str
    chats: Sequence[ChatFile] = ()


@dataclass(frozen=True)
class Windows:
    """Windows of `length` tokens, one every `stride`; `limit`: most windows that are scored."""

    length: int
    stride: int
    limit: int | None

    @classmethod
    def of(cls, request: Request, model: ModelConfig) -> Windows:
        length = request.model.window(model)
        stride = request.stride or length
        check(
            stride <= length,
            f"--stride is {stride}, more than the {length} tokens of a window: pass at most {length}",
        )
        return cls(length, stride, request.max_windows)

    def cut(self, ids: np.ndarray | StoredTokens, source: str) -> list[scoring.Request]:
        check(
            len(ids) > self.length,
            f"{source} has {len(ids)} tokens, and a window needs {self.length} and the one that follows: "
            "pass a longer text, or a smaller --seq-length",
        )
        return windows(ids, self.length, self.stride)


def sizes_of(source: Source, world: Comm, saved: JsonObject) -> tuple[int, int]:
    """Return a replica's (tensor, pipeline) parallel size."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    default = (
        [saved[name] for name in names] if world.size > 1 and not any(source.sizes) else [1, 1]
    )
    tp, pp = (size or other for size, other in zip(source.sizes, default))
    check(
        world.size % (tp * pp) == 0,
        f"the model of --load {source.load} over tensor x pipeline parallel size {tp} x {pp} takes "
        f"a multiple of {tp * pp} ranks, and {world.size} were started: start others, or pass --tensor-model-parallel-size and "
        "--pipeline-model-parallel-size",
    )
    return tp, pp


def read_all(request: Request, manifest: JsonObject, cut: Windows) -> Inputs:
    """Encode text and chats, and count the bytes of the scored tokens."""
    tokenizer = request.model.source.open_tokenizer(manifest)
    requests = []
    tokens = 0
    predicted = 0
    size = 0
    ids: np.ndarray | StoredTokens | None = None
    if request.data_path:
        ids = open_tokens(request.data_path).tokens
        source = f"--data-path {request.data_path}"
    elif request.input:
        ids = np.array(tokenizer.encode(read_text(request.input, "--input")), np.int32)
        source = f"--input {request.input}"
    if ids is not None:
        requests = cut.cut(ids, source)
        tokens = len(ids)
        predicted = sum(part.scored for part in requests)
        requests = [each._replace(tokens=np.asarray(each.tokens)) for each in requests[: cut.limit]]
        end = 1 + sum(part.scored for part in requests)
        size = sum(
            tokenizer.count_bytes(np.asarray(ids[start : min(start + DECODED, end)]))
            for start in range(1, end, DECODED)
        )
    chats = []
    if request.chats:
        template = ChatTemplate(tokenizer, read_template(request.chat_template))
        chats = [read_chat_file(path, template, cut.length) for path in request.chats]
    note = tokenizer_note(tokenizer, manifest)
    return Inputs(requests, tokens, predicted, size, note, chats)


def perplexity(total: float, texts: Inputs) -> JsonObject:
    """Return figures from a total log-likelihood; per byte only if the text has bytes."""
    tokens = sum(request.scored for request in texts.requests)
    result = {
        "perplexity": _exp(-total / tokens),
        "loss": -total / tokens,
        "tokens": tokens,
        "windows": len(texts.requests),
        "left_out": texts.tokens - 1 - texts.predicted,
        "after_max_windows": texts.predicted - tokens,
    }
    if texts.bytes:
        result |= {
            "perplexity_per_byte": _exp(-total / texts.bytes),
            "bits_per_byte": -total / texts.bytes / math.log(2),
            "bytes": texts.bytes,
        }
    return result


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def evaluated(loaded: LoadedModel, texts: Inputs, batch: int) -> JsonObject:
    """Return all figures. Collective."""
    result: JsonObject = {}
    if texts.requests:
        scores = score(loaded, texts.requests, batch, "windows")
        result |= perplexity(float(scores[:, 0].sum()), texts)
    if texts.chats:
        result["chats"] = [chat_loss(loaded, file, batch) for file in texts.chats]
    return result


def chat_loss(loaded: LoadedModel, file: ChatFile, batch: int) -> JsonObject:
    """Return one file's figures. Collective."""
    scores = score(loaded, file.requests, batch, f"chats of {file.path}")
    tokens = sum(request.scored for request in file.requests)
    loss = -float(scores[:, 0].sum()) / tokens
    return {
        "file": file.path,
        "loss": loss,
        "perplexity": _exp(loss),
        "accuracy": float(scores[:, 1].sum()) / tokens,
        "tokens": tokens,
        "chats": len(file.requests),
        "cut": file.cut,
        "left_out": file.left_out,
    }


def lines(result: JsonObject, cut: Windows) -> list[str]:
    """Format the figures of `evaluated` for the terminal: perplexity, windows, then chats."""
    shown = []
    if "perplexity" in result:
        by_byte = (
            ", {perplexity_per_byte:.4f} per byte ({bits_per_byte:.4f} bits), {bytes} bytes".format_map(
                result
            )
            if "bytes" in result
            else ""
        )
        shown.append(
            "perplexity {perplexity:.4f} per token, {tokens} tokens".format_map(result) + by_byte
        )
        beyond = (
            "--max-windows left out {after_max_windows} tokens, and the last {left_out}"
            if result["after_max_windows"]
            else "the last {left_out} tokens"
        )
        words = (
            "{windows} windows of {} tokens, one every {}; "
            + beyond
            + " of the text fill no window"
        )
        shown.append(words.format(cut.length, cut.stride, **result))
    return shown + [chat_line(file) for file in result.get("chats", ())]


def chat_line(file: JsonObject) -> str:
    line = (
        "{file}: loss {loss:.4f}, perplexity {perplexity:.4f} per trained token, {accuracy:.1%} of {tokens} trained tokens "
        "are the likeliest, {chats} chats"
    )
    if file["cut"]:
        line += "; {cut} chats are longer than a window and were cut, {left_out} of them have no trained token left"
    return line.format_map(file)


def evaluate(request: Request, world: Comm) -> JsonObject:
    """Print the figures on rank 0 and write --json. Collective."""
    source = request.model.source
    iteration, manifest = source.manifest(world)
    with everywhere():
        run = source.run(manifest, sizes_of(source, world, manifest["layout"]))
        cut = Windows.of(request, run.model)
    texts = on_root(world, lambda: read_all(request, manifest, cut))
    loaded = load_model(run, world, source.load, iteration, manifest, source.q8)
    result = {
        "load": source.load,
        "iteration": iteration,
        **evaluated(loaded, texts, request.model.micro_batch_size),
    }
    if world.rank == 0:
        print(*filter(None, [texts.note, *lines(result, cut)]), sep="\n")
        if request.json:
            with (
                writing("--json", request.json),
                open(request.json, "w", encoding="utf-8", opener=named_file) as file,
            ):
                file.write(json.dumps(result, indent=2) + "\n")
    return result


def main(options: argparse.Namespace) -> int:
    request = Request.of(options)
    run_or_abort(lambda world: evaluate(request, world))
    return 0
