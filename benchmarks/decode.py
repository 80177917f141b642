"""Tokens a second of generation against transformers' own `generate`, in turn in one process, or llama.cpp (llama_cpp.py).

    python -m benchmarks decode --model 124m                       GPT-2
    python -m benchmarks decode --model 0.5b --dtype bf16          Qwen2's smallest
    python -m benchmarks decode --baseline llama.cpp               all formats, batches of 1 and 8, and a prompt
    python -m benchmarks decode --mkl shipped                      with torch's MKL as it is, on CPUs that are not Intel's

Transformers runs eagerly as its users run it: a cache, scaled_dot_product_attention, no gradients, nothing but the likeliest token.
Both sides have the same random weights, converted by `fugaku-megatron convert`, the same prompt, threads and memory allocator. A
round is a text of one token and one of --new-tokens on each side, and the difference is what decoding takes, without the prompt.
The last column is the share of what this machine reads from memory in the same time. The last line names the ratio of a program
that only read the weights. In FP32 the tokens must be the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.host import allocator, kernels
from fugaku_megatron.host.timing import seconds
from fugaku_megatron.inference.generation import steps
from fugaku_megatron.inference.loading import LoadedModel

from . import core, disturbance, hf_models, llama_cpp, preloads

SIDES = ("ours", "transformers")
TORCH_HERE = True
LLAMA_CPP = "llama.cpp"
Side = Callable[[int], list[int]]  # the tokens that follow, so many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this family."""
    parser.add_argument("--model", default="124m", choices=hf_models.MODELS)
    parser.add_argument("--baseline", default=SIDES[1], choices=(SIDES[1], LLAMA_CPP))
    parser.add_argument(
        "--dtype", default="fp32", choices=("fp32", "bf16"), help="with --baseline transformers"
    )
    formats = tuple(llama_cpp.FORMATS)
    parser.add_argument(
        "--formats",
        nargs="+",
        default=formats,
        choices=formats,
        help=f"of the weights, with --baseline {LLAMA_CPP} (default: all)",
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        type=int,
        default=(1, 8),
        metavar="SAMPLES",
        help=f"texts at once, with --baseline {LLAMA_CPP} (default: 1 8)",
    )
    parser.add_argument(
        "--prefill-length",
        type=int,
        default=512,
        help=f"tokens of the prompt that is timed, with --baseline {LLAMA_CPP} (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-length", type=int, default=32, help="tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=65, help="tokens of a text (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")
    preloads.add_mkl(parser, "torch's")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turn; seconds are of a token. ValueError for options that do not fit."""
    check(options.new_tokens > 1, f"--new-tokens {options.new_tokens}: pass 2 or more")
    allocator.tune("tuned")
    torch.set_num_threads(options.threads)
    if options.baseline == LLAMA_CPP:
        return llama_cpp.measure(options)
    with tempfile.TemporaryDirectory() as folder:
        theirs = hf_models.save(options.model, options.dtype, Path(folder))
        ours = hf_models.load_ours(Path(folder))
    prompt = torch.randint(
        0,
        hf_models.MODELS["tiny"][1]["vocab_size"],
        (options.prompt_length,),
        generator=torch.Generator().manual_seed(0),
    )
    sides = {"ours": our_side(ours, prompt.tolist()), "transformers": their_side(theirs, prompt)}
    watch = disturbance.Watch(options.threads)
    same = sides["ours"](options.new_tokens) == sides["transformers"](options.new_tokens)
    if options.dtype == "fp32" and not same:
        raise RuntimeError("the two do not write the same tokens")
    rounds = [
        {name: seconds_of_a_token(write, options.new_tokens) for name, write in sides.items()}
        for _ in range(options.rounds)
    ]
    busy = watch.disturbed()
    medians = core.medians(rounds)
    read = read_rate()
    weights = hf_models.stored_bytes(hf_models.matrices(ours))
    return {
        "model": options.model,
        "dtype": options.dtype,
        "threads": options.threads,
        "seconds": medians,
        "tokens_per_s": {side: 1 / medians[side] for side in SIDES},
        "ratio": statistics.median(r["transformers"] / r["ours"] for r in rounds),
        "weight_bytes": weights,
        "read_gb_per_s": read,
        "bound": medians["transformers"] * 1e9 * read / weights,
        "same_tokens": same,
        "busy": busy,
        "rounds": rounds,
        "torch": torch.__version__,
        "mkl": preloads.mkl_width(),
    }


def our_side(loaded: LoadedModel, prompt: list[int]) -> Side:
    """Return `fugaku-megatron generate` without its command line."""

    def write(count: int) -> list[int]:
        *_, (ids,) = steps(loaded, [prompt], count, hf_models.GREEDY, lambda sample, ids: False)
        return ids.tolist()

    return write


def their_side(model: Any, prompt: torch.Tensor) -> Side:
    """Return transformers' generate. prompt (s,)."""
    flags = {
        "do_sample": False,
        "use_cache": True,
        "eos_token_id": None,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt[None]),
    }  # it would take a token 0 for padding

    def write(count: int) -> list[int]:
        return model.generate(prompt[None], max_new_tokens=count, min_new_tokens=count, **flags)[
            0, len(prompt) :
        ].tolist()

    return write


def seconds_of_a_token(write: Side, count: int) -> float:
    """Return the seconds of decoding, without the prompt: a text of `count` tokens less one of a single token."""
    return (seconds(lambda: write(count)) - seconds(lambda: write(1))) / (count - 1)


def read_rate() -> float:
    """Return GB/s at which this process reads memory: the best of some passes over 256 MiB."""
    x = torch.ones(1 << 26)
    return x.nbytes / min(seconds(lambda: kernels.squared_norm(x)) for _ in range(5)) / 1e9


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the table."""
    if options.baseline == LLAMA_CPP:
        return llama_cpp.text(options, result)
    lines = [
        f"{result['model']} {result['dtype']}, {result['threads']} threads, {result['cpu']}, MKL {result['mkl']}, measured"
        + core.mark(result["busy"])
    ]
    for side in SIDES:
        rate = result["weight_bytes"] / result["seconds"][side] / 1e9
        lines.append(
            f"{side:<14} {result['tokens_per_s'][side]:>8.1f} tokens/s {1e3 * result['seconds'][side]:>8.2f} ms/token "
            f"{rate:>6.1f} GB/s of weights, {100 * rate / result['read_gb_per_s']:.0f} % of reading memory"
        )
    lines.append(
        f"ours is {result['ratio']:.2f} x as fast"
        + (", with the same tokens" if result["same_tokens"] else "")
        + f"; a program that only read the weights would be {result['bound']:.2f} x as fast"
    )
    return "\n".join(lines)
