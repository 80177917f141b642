"""Continue texts with a trained checkpoint.

    fugaku-megatron generate --load demo/checkpoint --vocab-file demo/vocab.json --merge-file demo/merges.txt --prompt "def "
    fugaku-megatron generate ... --prompts questions.txt --max-new-tokens 200 --stop "\\n\\n" --temperature 0
    mpiexec -n 2 fugaku-megatron generate ... --tensor-model-parallel-size 2 --interactive

The model comes from the checkpoint's manifest, whatever its parallel layout. One process needs no mpiexec and holds the whole
model, weights only. Several ranks share it as --tensor-model-parallel-size and --pipeline-model-parallel-size say, or else in the
layout of the checkpoint. Keys and values of earlier tokens are kept, so that a token costs one pass over the weights; prompts of a
batch may have any lengths, and a finished one costs nothing. The same seed gives the same texts in every layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..checkpoint import manifest as checkpoint
from ..comm.agreement import everywhere, on_root
from ..comm.base import Comm
from ..comm.launch import run_or_abort
from ..config.checks import check
from ..config.layout import Layout
from ..config.run_config import ModelConfig, RunConfig, saved_run
from ..costs import accounting, activations
from ..data.tokenizer import Tokenizer
from ..host import allocator
from . import sampling
from .generation import check_lengths, steps
from .interactive import converse
from .loading import LoadedModel, add_model_tokenizer_flags, load_model, open_tokenizer, tokenizer_note
from .sampling import Ending, Sampling, read_prompts

MIB = 2**20


def describe(run: RunConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> str:
    """Parameters, layout, and the weights and the cache of the rank that holds most of each."""
    tp, pp = run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size
    layout, stages = Layout(tp * pp, tp, pp, 1), range(pp)
    weights = max(accounting.stage_parameters(run, layout, stage) for stage in stages) * activations.element_bytes(run)
    positions = max(map(len, prompts)) + max_new_tokens
    layers = max(sum(map(len, accounting.stage_layers(run, stage))) for stage in stages)
    cache = activations.cache_bytes(run, len(prompts), positions, layers, tp)
    slots = activations.cache_slots(run.model, positions)
    return (f"{accounting.parameters(run):,} parameters in {run.precision.name}, tensor parallel {tp}, pipeline parallel {pp}\n"
            f"a rank holds at most {weights / MIB:.1f} MiB of weights and {cache / MIB:.1f} MiB of keys and values: "
            f"{layers} layers, {len(prompts)} samples, {slots} positions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", required=True, help="directory of checkpoints")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load (default: the latest)")
    add_model_tokenizer_flags(parser)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; repeated: a batch of texts")
    parser.add_argument("--prompts", metavar="FILE", help="texts to continue, one a line, or a JSON list in FILE.json")
    parser.add_argument("--interactive", action="store_true", help="continue line after line; Ctrl-C ends an answer, Ctrl-D all")
    parser.add_argument("--max-new-tokens", "--tokens", "--num-tokens-to-generate", dest="max_new_tokens", type=int, default=100,
                        help="tokens to add (default: %(default)s)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="an answer ends before this text; may be "
                        "repeated")
    sampling.add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what a rank would hold, in any layout, and stop")
    for kind in ("tensor", "pipeline"):
        parser.add_argument(f"--{kind}-model-parallel-size", type=int, help="of these ranks (default: the checkpoint's)")


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for values out of range."""
    check(options.max_new_tokens >= 0, f"--max-new-tokens is {options.max_new_tokens}: give 0 or more")
    check(all(options.stop), "--stop is empty: give a text")
    given = options.prompt is not None or options.prompts is not None
    check(given or options.interactive, "nothing to continue: give --prompt TEXT, --prompts FILE or --interactive")
    check(not options.dry_run or given, "--dry-run needs prompts, whose lengths count: give --prompt TEXT or --prompts FILE")
    check(not given or not options.interactive, "--interactive asks for prompts: leave out --prompt and --prompts")
    Sampling.of(options)


def saved_manifest(options: argparse.Namespace, world: Comm) -> tuple[int, dict[str, Any]]:
    """Iteration and manifest of the checkpoint to load. Collective; ValueError on every rank when there is none."""
    step = options.ckpt_step
    iteration = on_root(world, lambda: checkpoint.existing_iteration(options.load) if step is None else step)
    check(iteration is not None, f"--load {options.load} holds no checkpoint")
    return iteration, on_root(world, lambda: checkpoint.read_manifest(options.load, iteration))


def layout_of(options: argparse.Namespace, world: Comm, saved: dict[str, Any]) -> tuple[int, int] | None:
    """(tensor, pipeline) parallel size of these ranks; None: as the checkpoint's run. saved: its layout.

    Raises ValueError for a number of ranks that does not fit.
    """
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    if tp is not None or pp is not None:
        tp, pp = tp or 1, pp or 1
        fits = options.dry_run or world.size == tp * pp
        check(fits, f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} = {tp * pp}, but "
              f"{world.size} ranks were started: start {tp * pp}, or change the sizes")
        return tp, pp
    if world.size == 1:
        return 1, 1
    tp, pp, shards = saved["tensor_model_parallel_size"], saved["pipeline_model_parallel_size"], saved["zero_shards"]
    ranks = tp * pp * shards
    check(world.size == ranks, f"--load {options.load} was written with tensor x pipeline parallel size x ZeRO-1 shards "
          f"{tp} x {pp} x {shards} = {ranks}, but {world.size} ranks were started: give --tensor-model-parallel-size or "
          f"--pipeline-model-parallel-size, or start {'it without mpiexec' if ranks == 1 else f'{ranks} or one'}")
    return None


class _Texts:
    """The tokenizer on rank 0, which reads the files and prints, and what it makes of prompts for a model."""

    def __init__(self, options: argparse.Namespace, tokenizer: Tokenizer, model: ModelConfig) -> None:
        self.options, self.tokenizer, self.model = options, tokenizer, model
        self.ending = Ending(tokenizer.decode, tokenizer.eod, options.stop)

    def encode(self, *prompts: str) -> list[list[int]]:
        """Tokens of prompts. Raises ValueError for an empty one, and for one that the model cannot continue."""
        ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        check(all(ids), "a prompt is empty: give at least one character")
        check_lengths(self.model, ids, self.options.max_new_tokens)
        return ids

    def show(self, prompt: list[int], ids: list[int]) -> None:
        """Print a prompt with its continuation."""
        print(f"[{self.tokenizer.decode(prompt)}]{self.ending.text(ids)}")


def continue_prompts(options: argparse.Namespace, world: Comm) -> None:
    """Load the checkpoint and print the continuations on rank 0. Collective."""
    iteration, manifest = saved_manifest(options, world)
    with everywhere():
        run = saved_run(manifest, layout_of(options, world, manifest["layout"]))
    texts: list[_Texts] = []  # on rank 0

    def open_and_encode() -> list[list[int]]:
        texts.append(_Texts(options, open_tokenizer(options, manifest), run.model))
        return [] if options.interactive else texts[0].encode(*read_prompts(options))

    prompts = on_root(world, open_and_encode)
    if options.dry_run:
        print(*(describe(run, prompts, options.max_new_tokens) for _ in texts), sep="")
        return None
    loaded = load_model(run, world, options.load, iteration, manifest)
    for text in texts:
        heading = f"--- iteration {iteration}" + ", prompt in brackets" * (not options.interactive) + " ---"
        print(*filter(None, (tokenizer_note(text.tokenizer, manifest), heading)), sep="\n", flush=True)
    if options.interactive:
        return _converse(options, loaded, texts)
    *_, ids = steps(loaded, prompts, options.max_new_tokens, Sampling.of(options), _finished(texts))
    for text in texts:
        for prompt, own in zip(prompts, ids, strict=True):
            text.show(prompt, own)


def _finished(texts: list[_Texts]) -> Callable[[int, list[int]], bool]:
    return lambda sample, ids: texts[0].ending.reached(ids)


def _converse(options: argparse.Namespace, loaded: LoadedModel, texts: list[_Texts]) -> None:
    def answer(prompt: list[int], finished: Callable[[int, list[int]], bool]) -> Iterator[list[list[int]]]:
        return steps(loaded, [prompt], options.max_new_tokens, Sampling.of(options), finished)

    converse(loaded.groups.world, lambda line: texts[0].encode(line)[0], texts[0].ending if texts else None, answer)


def main(options: argparse.Namespace) -> int:
    """Continue the prompts; every rank of mpiexec comes here."""
    check_options(options)
    allocator.tune("tuned")  # its huge pages: every token reads all weights
    run_or_abort(lambda world: continue_prompts(options, world))
    return 0
