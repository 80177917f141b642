"""Continue a text with a trained checkpoint.

    fugaku-megatron generate --load demo/checkpoint --vocab-file demo/vocab.json --merge-file demo/merges.txt --prompt "def "

The model comes from the checkpoint's manifest, whatever its parallel layout. One process needs no mpiexec and holds the whole
model, weights only. A model that is too large for that runs in the layout of its checkpoint: start as many ranks as tensor x
pipeline parallel size, times the data-parallel size if ZeRO-1 sharded the weights. Every token is a whole forward pass: there is no
key-value cache. Test: pytest tests/test_generate.py
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import manifest as checkpoint
from ..comm.agreement import everywhere, on_root
from ..comm.autograd import gather_from_tensor_parallel
from ..comm.base import Comm
from ..comm.launch import run_or_abort
from ..nn.passes import Pass
from ..run.checks import check
from .loading import LoadedModel, load_model, saved_run
from .tokenizing import add_model_tokenizer_flags, open_tokenizer, tokenizer_note

EVALUATION = Pass(first_sample=0, training=False)
MIN_TEMPERATURE = 1e-6  # above 0: logits divided by less are not finite in FP32
MAX_SEED = 2**63 - 1  # what torch's generator takes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", required=True, help="directory of checkpoints")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load (default: the latest)")
    add_model_tokenizer_flags(parser)
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to add (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=40, help="choose among this many tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="of the choice among tokens (default: %(default)s)")


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for values out of range."""
    check(options.tokens >= 0, f"--tokens is {options.tokens}: give 0 or more")
    check(0 <= options.temperature < math.inf, f"--temperature is {options.temperature}: give 0 or more")
    check(options.temperature == 0 or options.temperature >= MIN_TEMPERATURE, f"--temperature is {options.temperature}: give 0, "
          f"which always takes the likeliest token, or at least {MIN_TEMPERATURE}")
    check(options.top_k > 0, f"--top-k is {options.top_k}: give a number above 0")
    check(0 <= options.seed <= MAX_SEED, f"--seed is {options.seed}: give a number from 0 to {MAX_SEED}")


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token from logits (v,)."""
    if temperature == 0.0:
        return int(logits.argmax())
    best, tokens = logits.topk(min(top_k, logits.numel()))
    return int(tokens[torch.multinomial(torch.softmax(best / temperature, 0), 1, generator=generator)])


@torch.no_grad()
def last_logits(loaded: LoadedModel, tokens: Tensor) -> Tensor | None:
    """Logits (v,) after the last of `tokens` (s, 1), on the last stage; None elsewhere."""
    stage, pp, model = loaded.stage, loaded.groups.pp, loaded.run.model
    x, logits = tokens, None
    for number, chunk in enumerate(stage.chunks):
        previous, following = (stage.placement.neighbour(pp.rank, number, step) for step in (-1, 1))  # (stage, chunk) or None
        if previous and previous[0] != pp.rank:
            x = pp.recv(torch.empty(len(tokens), 1, model.hidden_size, dtype=loaded.dtype), previous[0])
        x = chunk.decode(chunk.embedding(x, EVALUATION) if chunk.is_first else x, EVALUATION)
        if following is None:
            logits = chunk.logits(x[-1:]).contiguous()
        elif following[0] != pp.rank:
            pp.send(x.contiguous(), following[0])
    return None if logits is None else gather_from_tensor_parallel(logits, loaded.groups.tp)[0, 0, : model.vocab_size].float()


def generate(loaded: LoadedModel, prompt: list[int], options: argparse.Namespace, eod: int | None) -> list[int]:
    """Token ids of the continuation, the same on every rank. Collective."""
    generator = torch.Generator().manual_seed(options.seed)
    ids, pp = list(prompt), loaded.groups.pp
    for _ in range(options.tokens):
        window = torch.tensor(ids[-loaded.run.model.seq_length :]).unsqueeze(1)  # (s, 1)
        logits = last_logits(loaded, window)
        token = torch.tensor([pick(logits, options.temperature, options.top_k, generator) if logits is not None else 0])
        ids.append(int(pp.broadcast(token, root=loaded.stage.placement.last_stage)))
        if ids[-1] == eod:
            break
    return ids[len(prompt) :]


def saved_manifest(options: argparse.Namespace, world: Comm) -> tuple[int, dict[str, Any]]:
    """Iteration and manifest of the checkpoint to load. Collective; ValueError on every rank when there is none."""
    step = options.ckpt_step
    iteration = on_root(world, lambda: checkpoint.latest_iteration(options.load) if step is None else step)
    check(iteration is not None, f"--load {options.load} holds no checkpoint")
    return iteration, on_root(world, lambda: checkpoint.read_manifest(options.load, iteration))


def check_ranks(options: argparse.Namespace, world: Comm, layout: dict[str, Any]) -> None:
    """Raises ValueError for a number of ranks other than one or the checkpoint's."""
    tp, pp, shards = layout["tensor_model_parallel_size"], layout["pipeline_model_parallel_size"], layout["zero_shards"]
    ranks = tp * pp * shards
    remedy = "start it without mpiexec" + f", or with mpiexec -n {ranks} fugaku-megatron generate ..." * (ranks > 1)
    check(world.size in (1, ranks), f"--load {options.load} was written with tensor x pipeline parallel size x ZeRO-1 shards "
          f"{tp} x {pp} x {shards} = {ranks}, but {world.size} ranks were started: {remedy}")


def continue_prompt(options: argparse.Namespace, world: Comm) -> None:
    """Load the checkpoint and print the continuation on rank 0. Collective."""
    iteration, manifest = saved_manifest(options, world)
    with everywhere():
        check_ranks(options, world, manifest["layout"])
        run = saved_run(manifest, alone=world.size == 1)
    tokenizers = []  # on rank 0, which reads the files and prints

    def encode() -> tuple[list[int], int | None]:
        tokenizers.append(open_tokenizer(options, manifest))
        prompt = tokenizers[0].encode(options.prompt)
        check(len(prompt) > 0, "--prompt is empty: give at least one character")
        return prompt, tokenizers[0].eod

    prompt, eod = on_root(world, encode)
    loaded = load_model(run, world, options.load, iteration, manifest)
    ids = generate(loaded, prompt, options, eod)
    if world.rank == 0:
        before, after = map(tokenizers[0].decode, (prompt, ids))
        lines = tokenizer_note(tokenizers[0], manifest), f"--- iteration {iteration}, prompt in brackets ---", f"[{before}]{after}"
        print(*filter(None, lines), sep="\n")


def main(options: argparse.Namespace) -> int:
    """Continue the prompt; every rank of mpiexec comes here."""
    check_options(options)
    run_or_abort(lambda world: continue_prompt(options, world))
    return 0
