"""Generation against llama.cpp, in turn: tokens a second of decoding and of prompts, for each format of the weights.

    python -m benchmarks decode --baseline llama.cpp --model 0.5b      every format, batches of 1 and 8, prompts of 512 tokens

llama.cpp runs in a process of its own (its OpenMP is not torch's) through the package llama-cpp-python, which pip compiles for this CPU.
It reads a GGUF file that this program's converter writes from the same random weights; Q8_0 is quantized there. Its weights are in
huge pages as ours are, its keys and values have the format of the weights if that is F32, else F16, its default. Both sides take the
likeliest token in Python. A row has the fastest of --rounds. The process is started by `Engine`:

    python -m benchmarks.llama_cpp '{"file": "model.gguf", ...}'
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.convert.gguf.conversion import save_gguf
from fugaku_megatron.convert.hugging_face.conversion import open_hugging_face
from fugaku_megatron.inference.generation import steps
from fugaku_megatron.inference.loading import LoadedModel
from fugaku_megatron.text.table import Column

from . import child, core, disturbance, driver, hf_models

PACKAGES = {
    "llama_cpp": "llama-cpp-python",
    "gguf": "gguf",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
}
INSTALL = "pip install -r requirements-llama-cpp.txt"
# A CPU's flag -> llama.cpp's name of what was compiled for it.
FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    "sve": "SVE",
    "i8mm": "MATMUL_INT8",
}
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
UBATCH = 512  # tokens of prompts that llama.cpp computes at once, its default


class Format(NamedTuple):
    """Format of the weights. dtype, q8: of our checkpoint, and if it is quantized on loading; bytes: of a weight in the GGUF file."""

    dtype: str
    bytes: float
    q8: bool = False


FORMATS = {
    "f32": Format("fp32", 4),
    "bf16": Format("bf16", 2),
    "q8_0": Format("bf16", 34 / 32, q8=True),
}


@dataclass(frozen=True)
class Workload:
    """Texts that are continued: `batch` of them, each of so many tokens before and after."""

    batch: int
    prompt: int
    new: int

    @property
    def name(self) -> str:
        if self.new == 1:
            return f"prefill of {self.prompt}"
        return f"decode, batch {self.batch}"

    def prompts(self, vocabulary: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.batch)
        shape = (self.batch, self.prompt)
        return torch.randint(0, vocabulary, shape, generator=generator).tolist()


class Figures(NamedTuple):
    """Seconds of all prompts, and of a token of each text after the first; None without one. ids: the texts."""

    prompt_seconds: float
    token_seconds: float | None
    ids: list[list[int]]

    @staticmethod
    def of(texts: Iterator[list[list[int]]]) -> Figures:
        """Time an iterator of texts, which grow by a token each."""
        start = time.perf_counter()
        ids = next(texts)
        first = time.perf_counter()
        number = 0
        for number, ids in enumerate(texts, 1):  # noqa: B007  # the last texts are read below
            pass
        last = time.perf_counter()
        return Figures(first - start, (last - first) / number if number else None, ids)


# The parent ----------------------------------------------------------------------------------------------------------------------


class Engine(child.Child):
    """The parent's end of the pipes."""

    def __init__(self, file: Path, threads: int, workloads: Sequence[Workload], full_cache: bool):
        order = Order(
            file=str(file),
            threads=threads,
            samples=max(work.batch for work in workloads),
            positions=max(work.batch * (work.prompt + work.new) for work in workloads),
            tokens=max(work.batch * work.prompt for work in workloads),
            full_cache=full_cache,
        )
        environment = {**os.environ, **HUGE_PAGES, "OMP_NUM_THREADS": str(threads)}
        super().__init__(child.python("llama_cpp", asdict(order)), environment, "llama.cpp")
        self.ready = self.answer()

    def run(self, prompts: list[list[int]], new: int) -> Figures:
        time.sleep(driver.PAUSE)
        done = self.ask(json.dumps({"prompts": prompts, "new": new}))
        time.sleep(driver.PAUSE)
        return Figures(**done)


def run_ours(loaded: LoadedModel, prompts: list[list[int]], new: int) -> Figures:
    """Continue texts as `fugaku-megatron generate` does."""
    texts = steps(loaded, prompts, new, hf_models.GREEDY, lambda sample, ids: False)
    return Figures.of([own.tolist() for own in ids] for ids in texts)


def check_packages() -> None:
    missing = [name for module, name in PACKAGES.items() if not importlib.util.find_spec(module)]
    check(
        not missing,
        f"--baseline llama.cpp needs {', '.join(missing)}: {INSTALL}",
    )


def missing_features(built_with: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return llama.cpp's names of the CPU's features that it was not compiled for."""
    flags = set(cpuinfo.read_text().split())
    return [
        name
        for flag, name in FEATURES.items()
        if flag in flags and f" {name} = 1 " not in f"{built_with} "
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all formats and workloads; progress goes to standard error."""
    check_packages()
    workloads = [Workload(b, options.prompt_length, options.new_tokens) for b in options.batches]
    workloads.append(Workload(1, options.prefill_length, 1))
    torch.set_num_threads(options.threads)
    watch = disturbance.Watch(options.threads)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for name in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            measured, facts = measure_format(options, name, workloads, Path(folder))
        rows += measured
    return {
        "model": options.model,
        "threads": options.threads,
        "rounds": options.rounds,
        "rows": rows,
        "busy": watch.disturbed(),
        **facts,
    }


def measure_format(
    options: argparse.Namespace, name: str, workloads: Sequence[Workload], folder: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of a format, and facts of llama.cpp."""
    row = FORMATS[name]
    progress(f"{options.model} {name}: making and converting random weights")
    hf_models.save(options.model, row.dtype, folder)
    write_tokenizer(folder / hf_models.THEIRS)
    file = folder / "model.gguf"
    save_gguf(open_hugging_face(folder / hf_models.THEIRS), file, name, None, inexact=True)
    loaded = hf_models.load_ours(folder, row.q8)
    matrices = hf_models.matrices(loaded)
    weight_bytes = {
        "ours": hf_models.stored_bytes(matrices),
        "llama.cpp": round(row.bytes * sum(matrix.numel() for matrix in matrices)),
    }
    rows = []
    with Engine(file, options.threads, workloads, full_cache=name == "f32") as engine:
        lacks = missing_features(engine.ready["built_with"])
        check(
            not lacks,
            f"llama.cpp was compiled without {', '.join(lacks)}, which this CPU has: CMAKE_ARGS=-DGGML_NATIVE=ON "
            "pip install --force-reinstall --no-cache-dir llama-cpp-python",
        )
        for work in workloads:
            progress(f"{options.model} {name}: {work.name}, {options.rounds} rounds")
            measured = compare(loaded, engine, work, options.rounds)
            rows.append({"format": name, "weight_bytes": weight_bytes, **measured})
    return rows, engine.ready


def compare(loaded: LoadedModel, engine: Engine, work: Workload, rounds: int) -> dict[str, Any]:
    """Run a workload on both sides in turn, after a run of each that warms up."""
    prompts = work.prompts(loaded.vocab_size)
    sides: dict[str, Callable[[], Figures]] = {
        "ours": lambda: run_ours(loaded, prompts, work.new),
        "llama.cpp": lambda: engine.run(prompts, work.new),
    }
    texts = {side: run().ids for side, run in sides.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            done = sides[side]()
            taken = done.prompt_seconds if done.token_seconds is None else done.token_seconds
            seconds[side].append(taken)
    fastest = {side: min(taken) for side, taken in seconds.items()}
    tokens = work.prompt if work.new == 1 else work.batch
    return {
        "workload": work.name,
        "tokens_per_s": {side: tokens / taken for side, taken in fastest.items()},
        "ratio": fastest["llama.cpp"] / fastest["ours"],
        "same": same_tokens(*texts.values()),
        "seconds": seconds,
    }


def same_tokens(ours: list[list[int]], theirs: list[list[int]]) -> int:
    """Return how many first tokens all texts of both have in common."""
    pairs = zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes and one pair, without which there is no GGUF file."""
    import tokenizers
    import transformers

    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(level.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    vocabulary["ab"] = len(alphabet)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    made.pre_tokenizer = level
    made.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the table."""
    lines = [
        f"{result['model']}, {result['threads']} threads, {result['cpu']}, fastest of {result['rounds']} rounds in turn, measured",
        f"llama-cpp-python {result['version']}, compiled with {result['built_with']}",
        core.table(COLUMNS, result["rows"]),
    ]
    return "\n".join(lines) + core.mark(result["busy"])


def weight_rate(side: str) -> Callable[[dict[str, Any]], str]:
    """Return a column's value: GB/s of weights that decoding reads."""

    def value(row: dict[str, Any]) -> str:
        if row["workload"].startswith("prefill"):
            return ""
        return f"{row['weight_bytes'][side] / min(row['seconds'][side]) / 1e9:.1f}"

    return value


COLUMNS: tuple[Column, ...] = (
    ("format", "<6", "format"),
    ("workload", "<16", "workload"),
    ("ours, tokens/s", ">14.1f", lambda row: row["tokens_per_s"]["ours"]),
    ("GB/s", ">6", weight_rate("ours")),
    ("llama.cpp, tokens/s", ">19.1f", lambda row: row["tokens_per_s"]["llama.cpp"]),
    ("GB/s", ">6", weight_rate("llama.cpp")),
    ("ratio", ">6.2f", "ratio"),
    ("same tokens", ">11", "same"),
)


# The process ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Order:
    """A model and the limits of what is asked. positions, tokens: of all texts of a request, and of their prompts."""

    file: str
    threads: int
    samples: int
    positions: int
    tokens: int
    full_cache: bool


class Llama:
    """llama.cpp's model and context, through its C interface."""

    def __init__(self, order: Order) -> None:
        import llama_cpp

        self.api = api = llama_cpp
        self._silent = api.llama_log_callback(lambda level, line, data: None)
        api.llama_log_set(self._silent, ctypes.c_void_p(0))
        api.llama_backend_init()
        of_model = api.llama_model_default_params()
        of_model.use_mmap = False
        model = api.llama_model_load_from_file(order.file.encode(), of_model)
        check(model is not None, f"llama.cpp cannot read {order.file}")
        given = api.llama_context_default_params()
        given.n_ctx = order.positions
        given.n_batch = max(UBATCH, order.tokens)
        given.n_seq_max = order.samples
        given.kv_unified = True
        given.n_threads = given.n_threads_batch = order.threads
        if order.full_cache:
            given.type_k = given.type_v = api.GGML_TYPE_F32
        self.context = api.llama_init_from_model(model, given)
        check(self.context is not None, f"llama.cpp has no context for {order}")
        self.batch = api.llama_batch_init(given.n_batch, 0, 1)
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def texts(self, prompts: list[list[int]], new: int) -> Iterator[list[list[int]]]:
        """Yield the texts after each of `new` likeliest tokens."""
        api = self.api
        api.llama_memory_clear(api.llama_get_memory(self.context), False)
        ids: list[list[int]] = [[] for _ in prompts]
        fed = prompts
        places = [0] * len(prompts)
        for _ in range(new):
            chosen = self._decode(fed, places)
            places = [place + len(part) for place, part in zip(places, fed, strict=True)]
            for own, token in zip(ids, chosen, strict=True):
                own.append(token)
            fed = [[token] for token in chosen]
            yield ids

    def _decode(self, fed: list[list[int]], places: list[int]) -> list[int]:
        """Append tokens to each text, from its place on, and return the likeliest next ones."""
        batch = self.batch
        row = 0
        last = []
        for sample, (tokens, place) in enumerate(zip(fed, places, strict=True)):
            for number, token in enumerate(tokens):
                batch.token[row] = token
                batch.pos[row] = place + number
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sample
                batch.logits[row] = number == len(tokens) - 1
                row += 1
            last.append(row - 1)
        batch.n_tokens = row
        status = self.api.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return [self._likeliest(number) for number in last]

    def _likeliest(self, row: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


def main(order: dict[str, Any], answer: child.Answer) -> None:
    """Answer requests {"prompts", "new"} with `Figures`."""
    llama = Llama(Order(**order))
    built_with = llama.api.llama_print_system_info().decode().strip(" |")
    answer({"built_with": built_with, "version": llama.api.__version__})
    for line in sys.stdin:
        answer(Figures.of(llama.texts(**json.loads(line)))._asdict())


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main(*child.order())
