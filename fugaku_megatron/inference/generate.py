r"""Continue texts with a trained checkpoint.

    fugaku-megatron generate --load demo/checkpoint --vocab-file demo/vocab.json --merge-file
    demo/merges.txt --prompt "def "
    fugaku-megatron generate ... --prompts questions.txt --max-new-tokens 200 --stop "\n\n"
    --temperature 0
    mpiexec -n 2 fugaku-megatron generate ... --tensor-model-parallel-size 2 --interactive
    fugaku-megatron generate --load tuned --chat --prompt "Which flag names the data?"
    --temperature 0

Ranks share the model by flags, or in the checkpoint's layout. Keys and values are cached, prompts
in a batch may differ in length, and finished samples cost nothing. The same seed generates the same
text in every layout.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from torch import Tensor

from ..checkpoint.schema import Manifest
from ..cli.parser import add_fields, from_options
from ..comm.agreement import agree, everywhere, on_root
from ..comm.agreement import describe as one_line
from ..comm.base import Comm
from ..comm.job import run_or_abort
from ..config.fields import check, flag, option, optional, switch
from ..config.model import ModelConfig
from ..config.run_config import RunConfig
from ..costs import linear_layers
from ..costs.attention import cache_slots
from ..costs.mixers import cache_bytes
from ..costs.stages import model_parameters, stage_layers, stage_parameters
from ..data.chat.chat_template import ChatTemplate, read_template
from ..host import allocator
from ..tokenizers.tokenizer import Tokenizer
from .generation import (
    Conversation,
    Finished,
    PromptEncoder,
    Sampling,
    StopCondition,
    check_request,
    prompts_of,
    steps,
)
from .loading import Q8, LoadedModel, Source, add_source_flags, load_model
from .tokenizer_choice import tokenizer_note

MIB = 2**20

Answer = Callable[[list[int], Finished], Iterator[list[Tensor]]]  # prompt -> as `steps`


def describe(
    run: RunConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, q8: bool = False
) -> str:
    """Return the text of --dry-run: parameters, and a rank's weights and cache in MiB."""
    tp = run.tp
    pp = run.pp
    stages = range(pp)

    def weight_bytes(stage: int) -> int:
        saved = linear_layers.q8_inference_savings(run, stage) if q8 else 0
        return stage_parameters(run, stage) * run.element_bytes - saved

    weights = max(map(weight_bytes, stages))
    positions = max(map(len, prompts)) + max_new_tokens
    kinds = [
        [run.model.layer_kinds[layer] for layers in stage_layers(run, stage) for layer in layers]
        for stage in stages
    ]
    cache = max(cache_bytes(run, len(prompts), positions, own) for own in kinds)
    slots = max(cache_slots(kind, positions) for own in kinds for kind in own)
    precision = f"{run.precision.name} and {Q8}" if q8 else run.precision.name
    return (
        f"{model_parameters(run):,} parameters in {precision}, tensor parallel {tp}, pipeline parallel {pp}\n"
        f"a rank holds at most {weights / MIB:.1f} MiB of weights and {cache / MIB:.1f} MiB of cache: "
        f"{max(map(len, kinds))} layers, {len(prompts)} samples, {slots} positions"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_flags(parser)
    add_fields(parser, Request)
    add_fields(parser, Sampling)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompts, and settings of the continuation, from the command line."""

    source: Source
    sampling: Sampling = Sampling()
    prompt: tuple[str, ...] = option(
        (), "text to continue; repeated: a batch of texts", repeated=True, metavar="TEXT"
    )
    prompts: str | None = optional(
        "texts to continue, one a line, or a JSON list in FILE.json", metavar="FILE"
    )
    interactive: bool = switch("continue line after line; Ctrl-C ends an answer, Ctrl-D all")
    max_new_tokens: int = option(
        100, "tokens to add", aliases=("--tokens", "--num-tokens-to-generate")
    )
    stop: tuple[str, ...] = option(
        (), "an answer ends before this text; may be repeated", repeated=True, metavar="TEXT"
    )
    chat: bool = switch(
        "prompts are the user's turns, rendered with the tokenizer's chat "
        "template, and the answer ends where the template ends a turn; FILE.json may hold lists of messages, and "
        "--interactive is one conversation"
    )
    system: str | None = optional("what the system says first, with --chat", metavar="TEXT")
    chat_template: str | None = optional(
        "jinja template of --chat (default: the tokenizer's)", metavar="FILE"
    )
    dry_run: bool = switch("print what a rank would hold, in any layout, and stop")

    def __post_init__(self) -> None:
        for name in ("system", "chat_template"):
            check(
                self.chat or getattr(self, name) is None,
                f"{flag(name)} goes with --chat: pass both",
            )
        check_request(self.max_new_tokens, self.stop)
        given = bool(self.prompt) or self.prompts is not None
        check(
            given or self.interactive,
            "nothing to continue: pass --prompt TEXT, --prompts FILE or --interactive",
        )
        check(
            not self.dry_run or given,
            "--dry-run needs prompts, whose lengths count: pass --prompt TEXT or --prompts FILE",
        )
        check(
            not given or not self.interactive,
            "--interactive asks for prompts: leave out --prompt and --prompts",
        )

    @classmethod
    def of(cls, options: argparse.Namespace) -> Request:
        return from_options(
            cls,
            options,
            source=Source.of(options),
            sampling=from_options(Sampling, options),
        )

    def encoder(self, tokenizer: Tokenizer, model: ModelConfig) -> PromptEncoder:
        template = ChatTemplate(tokenizer, read_template(self.chat_template)) if self.chat else None
        return PromptEncoder(
            tokenizer, model, self.max_new_tokens, self.stop, template, self.system
        )


def layout_of(
    source: Source, world: Comm, saved: Manifest, dry_run: bool = False
) -> tuple[int, int] | None:
    """Return (tensor, pipeline) parallel size, or None for the training layout."""
    tp, pp = source.sizes
    if tp is not None or pp is not None:
        tp = tp or 1
        pp = pp or 1
        check(
            dry_run or world.size == tp * pp,
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} = "
            f"{tp * pp}, but {world.size} ranks were started: start {tp * pp}, or change the sizes",
        )
        return tp, pp
    if world.size == 1:
        return 1, 1
    tp = saved["tensor_model_parallel_size"]
    pp = saved["pipeline_model_parallel_size"]
    shards = saved["zero_shards"]
    ranks = tp * pp * shards
    check(
        world.size == ranks,
        f"--load {source.load} was written with tensor x pipeline parallel size x ZeRO-1 shards "
        f"{tp} x {pp} x {shards} = {ranks}, but {world.size} ranks were started: pass --tensor-model-parallel-size or "
        f"--pipeline-model-parallel-size, or start {'it without mpiexec' if ranks == 1 else f'{ranks} or one'}",
    )
    return None


def continue_prompts(request: Request, world: Comm) -> None:
    """Print the continuations on rank 0. Collective."""
    source = request.source
    iteration, manifest = source.manifest(world)
    with everywhere():
        run = source.run(manifest, layout_of(source, world, manifest["layout"], request.dry_run))

    def open_encoder() -> PromptEncoder | None:
        if world.rank > 0:  # rank 0 reads the files and prints
            return None
        return request.encoder(source.open_tokenizer(manifest), run.model)

    def encode_prompts() -> list[list[int]]:
        if encoder is None or request.interactive:
            return []
        listed = [] if request.prompts is None else prompts_of(request.prompts, request.chat)
        return encoder.encode(*request.prompt, *listed)

    encoder = agree(world, open_encoder, name_rank=False)
    prompts = on_root(world, encode_prompts)
    if request.dry_run:
        if encoder:
            print(describe(run, prompts, request.max_new_tokens, source.q8))
        return
    loaded = load_model(run, world, source.load, iteration, manifest, source.q8)
    if encoder:
        if note := tokenizer_note(encoder.tokenizer, manifest):
            print(note)
        brackets = "" if request.interactive else ", prompt in brackets"
        print(f"--- iteration {iteration}{brackets} ---", flush=True)
    if request.interactive:
        _converse(request, loaded, encoder)
    else:
        _print_continuations(request, loaded, encoder, prompts)


def _print_continuations(
    request: Request, loaded: LoadedModel, encoder: PromptEncoder | None, prompts: list[list[int]]
) -> None:
    finished = encoder.finished if encoder else _never
    *_, ids = steps(loaded, prompts, request.max_new_tokens, request.sampling, finished)
    if encoder:
        for prompt, own in zip(prompts, ids, strict=True):
            print(f"[{encoder.tokenizer.decode(prompt)}]{encoder.stop_condition.text(own)}")


def _never(sample: int, ids: Tensor) -> bool:
    """Let the first rank decide."""
    return False


def _converse(request: Request, loaded: LoadedModel, encoder: PromptEncoder | None) -> None:
    def answer(prompt: list[int], finished: Finished) -> Iterator[list[Tensor]]:
        return steps(loaded, [prompt], request.max_new_tokens, request.sampling, finished)

    world = loaded.groups.world
    if encoder is None:
        return converse(world, None, None, answer)
    stop = encoder.stop_condition
    if request.chat:
        chat = Conversation(encoder)
        return converse(world, chat.encode, stop, answer, chat.answered)
    return converse(world, lambda line: encoder.encode(line)[0], stop, answer)


def main(options: argparse.Namespace) -> int:
    request = Request.of(options)
    allocator.tune("tuned")  # its huge pages: every token reads all weights
    run_or_abort(lambda world: continue_prompts(request, world))
    return 0


class Interrupt:
    """SIGINT handler that sets `pressed`, so that an answer ends after the current token."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record Ctrl-C instead of raising KeyboardInterrupt."""
        self.pressed = False
        before = signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def read_line() -> str | None:
    """Return the next line that is not empty, None at the end. Ctrl-C discards a line."""
    while True:
        try:
            if line := input("> " if sys.stdin.isatty() else ""):
                return line
        except KeyboardInterrupt:
            print()
        except EOFError:
            return None


def converse(
    world: Comm,
    encode: Callable[[str], list[int]] | None,
    stop: StopCondition | None,
    answer: Answer,
    answered: Callable[[str], None] | None = None,
) -> None:
    """Continue line after line. Collective.

    encode: raises ValueError for a bad line; on the first rank, as `stop`
    answer: (prompt, finished) -> generated tokens, after each step
    """
    while (prompt := world.broadcast_object(_next_prompt(encode) if encode else None)) is not None:
        if stop:
            text = _show(prompt, stop, answer)
            if answered:
                answered(text)
        else:
            for _ in answer(prompt, _never):
                pass


def _next_prompt(encode: Callable[[str], list[int]]) -> list[int] | None:
    while (line := read_line()) is not None:
        try:
            return encode(line)
        except ValueError as error:
            print(one_line(error), file=sys.stderr)
    return None


def _show(prompt: list[int], stop: StopCondition, answer: Answer) -> str:
    interrupt = Interrupt()
    written = 0
    with interrupt.noted():
        for (ids,) in answer(prompt, lambda sample, ids: interrupt.pressed or stop.is_met(ids)):
            text = stop.stable_text(ids)
            print(text[written:], end="", flush=True)
            written = max(written, len(text))
    print(stop.text(ids)[written:], flush=True)
    return stop.text(ids)
