"""Token-by-token generation: sampling, stop conditions, and the decoder that computes the next
logits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.autograd import gather_from_tensor_parallel
from ..config.fields import check, option
from ..config.model import ModelConfig
from ..data.chat.chat_template import ChatTemplate
from ..data.chat.chats import ASSISTANT, Messages, check_messages, user_turn
from ..nn.attention.heads import Angles
from ..nn.attention.kv_cache import Cache
from ..nn.attention.rotary_angles import rotary_angles
from ..nn.forward_context import Pass, Rows
from ..text.named_files import read_text
from ..tokenizers.tokenizer import Tokenizer
from .loading import FEW_ROWS, LoadedModel, through_stages
from .recorded_step import RecordedStep, RecordingKernels

MIN_TEMPERATURE = 1e-6  # above 0: logits divided by less are not finite in FP32
MAX_SEED = 2**63 - 1  # what torch's generator takes
NEXT_SAMPLE = 0x9E3779B97F4A7C15  # between the seeds of two samples: 2^64 over the golden ratio (Steele et al. 2014, SplitMix64)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; ValueError if out of range. Temperature 0 is greedy; ties go to the
    first token.
    """

    temperature: float = option(0.8, "0: always the likeliest token")
    top_k: int = option(
        40, "choose among the likeliest tokens, this many; 0: all", aliases=("--top_k",)
    )
    top_p: float = option(
        0.0,
        "choose among the likeliest tokens that together have this probability; 0: all",
        aliases=("--top_p",),
    )
    seed: int = option(1234, f"seed of the choice among tokens, from 0 to {MAX_SEED}")

    def __post_init__(self) -> None:
        temperature = self.temperature
        check(0 <= temperature < math.inf, f"--temperature is {temperature}: pass 0 or more")
        check(
            temperature == 0 or temperature >= MIN_TEMPERATURE,
            f"--temperature is {temperature}: pass 0, which always takes the "
            f"likeliest token, or at least {MIN_TEMPERATURE}",
        )
        check(self.top_k >= 0, f"--top-k is {self.top_k}: pass a number of tokens, or 0 for all")
        check(
            0 <= self.top_p <= 1,
            f"--top-p is {self.top_p}: pass a probability up to 1, or 0 for all tokens",
        )
        check(
            0 <= self.seed <= MAX_SEED, f"--seed is {self.seed}: pass a number from 0 to {MAX_SEED}"
        )

    def generator(self, sample: int) -> torch.Generator:
        """Return a generator, independent of the number of samples."""
        return torch.Generator().manual_seed((self.seed + sample * NEXT_SAMPLE) % 2**63)

    def pick(self, logits: Tensor, generator: torch.Generator) -> int:
        """Sample from logits (v,), with one random number whatever their last bits are."""
        if self.temperature == 0.0:
            return int(logits.numpy().argmax())  # 5 us for 50257 tokens, where torch takes 58
        best, tokens = logits.topk(min(self.top_k or len(logits), len(logits)))
        cumulative = torch.softmax((best - best[0]) / self.temperature, 0).cumsum(0)
        if 0 < self.top_p < 1:  # the tokens before which less than top_p is reached
            cumulative = cumulative[
                : 1 + int((cumulative[:-1] < self.top_p * cumulative[-1]).sum())
            ]
        place = torch.searchsorted(
            cumulative, torch.rand(1, generator=generator) * cumulative[-1], right=True
        )
        return int(tokens[min(int(place), len(cumulative) - 1)])


Prompt = str | Messages


def prompts_of(path: str, chat: bool = False) -> list[Prompt]:
    """Read one prompt a line, or a .json list."""
    remedy = "pass a UTF-8 file of lines, or a JSON list of texts (.json)"
    text = read_text(path, "--prompts", remedy)
    try:
        prompts = (
            json.loads(text)
            if path.endswith(".json")
            else [line for line in text.splitlines() if line]
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--prompts {path}: {error}: {remedy}") from None
    kinds = (str, list) if chat else str
    kind_names = "texts or lists of messages" if chat else "texts"
    check(
        isinstance(prompts, list) and all(isinstance(prompt, kinds) for prompt in prompts),
        f'--prompts {path}: it is not a JSON list of {kind_names}: pass one, such as ["a", "b"]',
    )
    check(len(prompts) > 0, f"--prompts {path} has no prompt: pass at least one line")
    return prompts


class StopCondition:
    """End tokens and stop words.

    more: end tokens besides `eod`

    Tokens of an answer are int64 (tokens,).
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        eod: int | None,
        words: Sequence[str],
        more: Collection[int] = (),
    ) -> None:
        self.decode = decode
        self.ends = {eod, *more} - {None}
        self.words = tuple(words)

    def text(self, ids: Tensor) -> str:
        text = self.decode([token for token in ids.tolist() if token not in self.ends])
        ends = [place for word in self.words if (place := text.find(word)) >= 0]
        return text[: min(ends)] if ends else text

    def is_met(self, ids: Tensor) -> bool:
        if int(ids[-1]) in self.ends:
            return True
        return bool(self.words) and any(word in self.decode(ids.tolist()) for word in self.words)

    def stable_text(self, ids: Tensor) -> str:
        """Decode without a partial stop word or character at the end."""
        text = self.text(ids).rstrip("\N{REPLACEMENT CHARACTER}")
        held = max(
            (n for word in self.words for n in range(1, len(word)) if text.endswith(word[:n])),
            default=0,
        )
        return text[: len(text) - held]


PREFILL_ROWS = (
    4096  # tokens of prompts that go through the model at once, unless one prompt has more
)


class Decoder:
    """KV-cached decoder. All ranks call `logits` with the same tokens.

    positions: maximum length of each sample
    """

    def __init__(self, loaded: LoadedModel, positions: Sequence[int]) -> None:
        model = loaded.run.model
        self.loaded = loaded
        self.lengths = torch.zeros(len(positions), dtype=torch.int64)
        self._angles: dict[str, Angles] = {
            name: rotary_angles(rope, torch.arange(max(positions)), 0)
            for name, rope in model.ropes.items()
            if not rope.rope_follows_length
        }
        self.cache: Cache = {
            layer.layer: layer.self_attention.empty_cache(
                len(positions), max(positions), loaded.dtype
            )
            for layer in loaded.stage.layers
            if layer.self_attention is not None
        }
        alone = loaded.groups.tp.size == loaded.groups.pp.size == 1
        self._recorder = (
            loaded.stage.ops.kernels
            if alone and isinstance(loaded.stage.ops.kernels, RecordingKernels)
            else None
        )
        self._recorded: dict[int, RecordedStep] = {}  # by the number of samples

    @torch.no_grad()
    def logits(self, samples: Tensor, lengths: Sequence[int], tokens: Tensor) -> Tensor | None:
        """Append tokens to samples (n,) and return FP32 logits (n, v) after each sample's last.

        lengths: new tokens of each sample
        tokens: int64 (sum of lengths,), sample after sample

        Valid on last-stage ranks until the next call; None elsewhere.
        """
        results = []
        row = 0
        for batch in _prefill_batches(lengths):
            part = lengths[batch]
            end = row + sum(part)
            logits = self._forward(samples[batch], part, tokens[row:end])
            row = end
            if logits is not None:
                results.append(logits)
        if len(results) > 1:
            return torch.cat(results)
        return results[0] if results else None

    def _forward(self, samples: Tensor, lengths: Sequence[int], tokens: Tensor) -> Tensor | None:
        first = self.lengths.index_select(0, samples)
        model = self.loaded.run.model
        rows = Rows.of(model, self.cache, samples.clone(), first, lengths, self._angles)
        self.lengths.index_add_(0, samples, torch.tensor(lengths))
        tokens = tokens.unsqueeze(1)  # (r, 1)
        logits: Tensor | None
        if self._recorder and rows.one_each and len(tokens) <= FEW_ROWS:
            logits = self._replay(self._recorder, tokens, rows)
        else:
            logits = self._compute(tokens, rows)
        if logits is None:
            return None
        logits = gather_from_tensor_parallel(logits, self.loaded.groups.tp)
        return logits[:, 0, : self.loaded.vocab_size].float()

    def _compute(self, tokens: Tensor, rows: Rows) -> Tensor | None:
        """Return this rank's columns of logits (samples, 1, v) for tokens (r, 1); None before the
        last stage.
        """
        x = through_stages(self.loaded, tokens, Pass(first_sample=0, training=False, rows=rows))
        return (
            None
            if x is None
            else self.loaded.logits(x if rows.one_each else x[rows.last]).contiguous()
        )

    def _replay(self, recorder: RecordingKernels, tokens: Tensor, rows: Rows) -> Tensor:
        """Return `_compute`'s result for one token a sample (r, 1), replaying recorded calls."""
        known = self._recorded.get(len(tokens))
        if known:
            return known((tokens, *rows.tensors))
        # Later calls overwrite them.
        inputs = (tokens.clone(), *rows.tensors)

        def compute() -> Tensor:
            logits = self._compute(inputs[0], rows)
            assert logits is not None, "a recorder has all stages"
            return logits

        step = self._recorded[len(tokens)] = recorder.record(compute, inputs)
        return step.result


def _prefill_batches(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield ranges with at most PREFILL_ROWS tokens, or of one sample."""
    begin = 0
    rows = 0
    for sample, length in enumerate(lengths):
        if sample > begin and rows + length > PREFILL_ROWS:
            yield slice(begin, sample)
            begin = sample
            rows = 0
        rows += length
    yield slice(begin, len(lengths))


def check_lengths(
    model: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Raise ValueError if prompt and answer need more positions than the model learned."""
    if not model.learned_positions:
        return
    for number, prompt in enumerate(prompts):
        length = len(prompt) + max_new_tokens
        check(
            length <= model.max_position_embeddings,
            f"prompt {number + 1} has {len(prompt)} tokens and --max-new-tokens is "
            f"{max_new_tokens}, {length} positions in all, and the model learned {model.max_position_embeddings} "
            "(--max-position-embeddings): shorten one",
        )


def check_request(max_new_tokens: int, stop: Sequence[str]) -> None:
    check(max_new_tokens >= 0, f"--max-new-tokens is {max_new_tokens}: pass 0 or more")
    check(all(stop), "--stop is empty: pass a text")


class PromptEncoder:
    """Tokenizer and stop condition.

    template: if prompts are chats
    system: message in front of a chat that is a text
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: ModelConfig,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        template: ChatTemplate | None = None,
        system: str | None = None,
    ) -> None:
        check_request(max_new_tokens, stop)
        self.tokenizer = tokenizer
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.template = template
        self.before = [] if system is None else [{"role": "system", "content": system}]
        self.stop_condition = StopCondition(
            tokenizer.decode, tokenizer.eod, stop, template.ends if template else ()
        )

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, list) and self.template:
            return self.template.prompt(check_messages(prompt, "a prompt"))
        assert isinstance(prompt, str), "only chats are lists of messages"
        return (
            self.template.prompt([*self.before, user_turn(prompt)])
            if self.template
            else self.tokenizer.encode(prompt)
        )

    def encode(self, *prompts: Prompt) -> list[list[int]]:
        ids = [self._ids(prompt) for prompt in prompts]
        check(all(ids), "a prompt is empty: pass at least one character")
        check_lengths(self.model, ids, self.max_new_tokens)
        return ids

    def finished(self, sample: int, ids: Tensor) -> bool:
        return self.stop_condition.is_met(ids)


class Conversation:
    """Chat history."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder = encoder
        self._said: Messages = [*encoder.before]
        self._asked = self._said

    def encode(self, line: str) -> list[int]:
        asked = [*self._said, user_turn(line)]
        (ids,) = self.encoder.encode(asked)
        self._asked = asked
        return ids

    def answered(self, text: str) -> None:
        self._said = [*self._asked, {"role": ASSISTANT, "content": text}]


Finished = Callable[[int, Tensor], bool]  # (sample, its generated tokens) -> True at the end


def steps(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    finished: Finished,
) -> Iterator[list[Tensor]]:
    """Yield every prompt's generated tokens, int64, after each step, at least once. Collective.

    finished: called on the world's first rank

    Finished samples are computed no further.
    """
    generated = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64)
    if max_new_tokens == 0:
        yield [*generated]
        return
    counts = torch.zeros(len(prompts), dtype=torch.int64)
    decoder = Decoder(loaded, [len(prompt) + max_new_tokens for prompt in prompts])
    generators = [sampling.generator(sample) for sample in range(len(prompts))]
    samples = torch.arange(len(prompts))
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
    for count in range(1, max_new_tokens + 1):
        logits = decoder.logits(samples, lengths, tokens)
        numbers = samples.tolist()
        tokens = _sample(loaded, logits, sampling, [generators[sample] for sample in numbers])
        generated[samples, count - 1] = tokens
        counts[samples] = count
        running = _running(loaded, numbers, generated[:, :count], finished)
        if not running.all():
            tokens = tokens[running]
            samples = samples[running]
        lengths = [1] * len(samples)
        yield [own[:length] for own, length in zip(generated, counts.tolist(), strict=True)]
        if not len(samples):
            return


def _sample(
    loaded: LoadedModel,
    logits: Tensor | None,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """Sample int64 (samples,) from the last stage's logits (samples, v), on all stages."""
    tokens = torch.zeros(len(generators), dtype=torch.int64)
    if logits is not None:
        for sample, generator in enumerate(generators):
            tokens[sample] = sampling.pick(logits[sample], generator)
    return loaded.groups.pp.broadcast(tokens, root=loaded.stage.placement.last_stage)


def _running(
    loaded: LoadedModel,
    samples: Sequence[int],
    generated: Tensor,
    finished: Finished,
) -> Tensor:
    """Return bool (samples,): continue, as the world's first rank decides."""
    world = loaded.groups.world
    running = torch.ones(len(samples), dtype=torch.int64)
    if world.rank == 0:
        running = torch.tensor([int(not finished(each, generated[each])) for each in samples])
    return world.broadcast(running).bool()
