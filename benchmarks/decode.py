"""Tokens a second of generation at batch 1 against transformers' own `generate`, in turn in one process.

    python -m benchmarks decode --model 124m                       GPT-2
    python -m benchmarks decode --model 0.5b --dtype bf16          Qwen2's smallest
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

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.fields import check
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.convert.hugging_face import open_hugging_face
from fugaku_megatron.convert.weights import save_own
from fugaku_megatron.host import allocator, kernels
from fugaku_megatron.host.timing import seconds
from fugaku_megatron.inference.generation import Sampling, steps
from fugaku_megatron.inference.loading import LoadedModel, load_model

from . import core, disturbance, driver, preloads

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=0.0, seed=0)
SIDES = ("ours", "transformers")
TORCH_HERE = True
# Configurations of transformers: class, values. "tiny" is for tests.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "GPT2",
        {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
    "124m": ("GPT2", {}),
    "0.5b": (
        "Qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
}
Side = Callable[[int], list[int]]  # the tokens that follow, so many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    parser.add_argument("--model", default="124m", choices=MODELS)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
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
    """Both sides in turn; seconds are of a token. ValueError for options that do not fit."""
    check(options.new_tokens > 1, f"--new-tokens {options.new_tokens}: pass 2 or more")
    allocator.tune("tuned")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = models(options, Path(folder))
    prompt = torch.randint(
        0,
        MODELS["tiny"][1]["vocab_size"],
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
    weights = sum(
        p.nbytes for p in ours.stage.parameters() if p.dim() > 1 and "position" not in p.spec.name
    )
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


def models(options: argparse.Namespace, folder: Path) -> tuple[Any, LoadedModel]:
    """(transformers' model with random weights, ours with the same)."""
    import transformers

    torch.manual_seed(0)
    kind, values = MODELS[options.model]
    config = getattr(transformers, f"{kind}Config")(**values)
    dtype = driver.DTYPES[options.dtype]
    theirs = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        .to(dtype)
        .eval()
    )
    theirs.save_pretrained(folder / "theirs")
    save_own(open_hugging_face(folder / "theirs"), folder / "ours")
    manifest = read_manifest(folder / "ours", 0)
    return theirs, load_model(
        saved_run(manifest, (1, 1)), SoloComm(), str(folder / "ours"), 0, manifest
    )


def our_side(loaded: LoadedModel, prompt: list[int]) -> Side:
    """`fugaku-megatron generate` without its command line."""

    def write(count: int) -> list[int]:
        *_, (ids,) = steps(loaded, [prompt], count, GREEDY, lambda sample, ids: False)
        return ids.tolist()

    return write


def their_side(model: Any, prompt: torch.Tensor) -> Side:
    """transformers' generate. prompt (s,)."""
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
    """GB/s at which this process reads memory: the best of some passes over 256 MiB."""
    x = torch.ones(1 << 26)
    return x.nbytes / min(seconds(lambda: kernels.squared_norm(x)) for _ in range(5)) / 1e9


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """The table."""
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
