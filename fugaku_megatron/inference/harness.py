"""Checkpoint interface for the lm-eval harness, which runs on the first rank; other ranks execute
its calls (`serve`). lm_eval.py has the harness class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..cli.parser import Parser
from ..comm.agreement import everywhere, on_root
from ..comm.base import Comm
from ..config.fields import check
from ..tokenizers.tokenizer import Tokenizer
from . import evaluate
from .generation import Sampling, StopCondition, steps
from .loading import LoadedModel, load_model
from .scoring import Request, encode_after, encode_pair, rolling, score

NEW_TOKENS = 256  # where a task does not say; the harness's own default


def read_arguments(values: Mapping[str, Any]) -> evaluate.Model:
    parser = Parser()
    evaluate.add_model_arguments(parser)
    words = [
        f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None
    ]
    return evaluate.Model.of(parser.parse_args(words))


class Model:
    """Loaded checkpoint. Constructor, `score` and `generate` are collective.

    tokenizer: on the first rank
    """

    def __init__(self, model: evaluate.Model, world: Comm) -> None:
        source = model.source
        iteration, manifest = source.manifest(world)
        with everywhere():
            run = source.run(manifest, evaluate.sizes_of(source, world, manifest["layout"]))
            self.window = model.window(run.model)
        self.batch = model.micro_batch_size
        self.tokenizers: list[Tokenizer] = []
        on_root(world, lambda: self.tokenizers.append(source.open_tokenizer(manifest)))
        self.loaded: LoadedModel = load_model(
            run, world, source.load, iteration, manifest, source.q8
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers[0]

    def stop_condition(self, words: Sequence[str]) -> StopCondition:
        return StopCondition(self.tokenizer.decode, self.tokenizer.eod, words)

    def score(self, requests: Sequence[Request]) -> list[tuple[float, float]]:
        """Return a pair of `scoring.score` per request. Collective."""
        if not requests:
            return []
        scores = score(self.loaded, requests, self.batch, "requests")
        return [(likelihood, hits) for likelihood, hits in scores.tolist()]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        sampling: Sampling,
        words: Sequence[str],
    ) -> list[Tensor]:
        """Continue until a stop word or the end of text. Collective."""
        stop = (
            self.stop_condition(words) if self.tokenizers else None
        )  # the first rank alone is asked
        *_, ids = steps(
            self.loaded,
            prompts,
            new_tokens,
            sampling,
            lambda sample, ids: stop is not None and stop.is_met(ids),
        )
        return ids


def serve(world: Comm) -> None:
    """Execute the first rank's calls until it is done."""
    model: Model | None = None
    while (order := world.broadcast_object(None)) is not None:
        name, arguments = order
        if model is None:
            model = Model(arguments[0], world)
        else:
            getattr(model, name)(*arguments)


class Asker:
    """First rank's model, broadcasting every call. values: --model_args"""

    def __init__(self, world: Comm, values: Mapping[str, Any]) -> None:
        model = read_arguments(values)
        self.world = world
        world.broadcast_object(("open", (model,)))
        self.model = Model(model, world)

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        self.world.broadcast_object((name, arguments))
        found: list[Any] = getattr(self.model, name)(*arguments)
        return found

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        requests = [encode_pair(self.model.tokenizer, *pair, self.model.window) for pair in pairs]
        scores = self._ask("score", requests)
        return [
            (value, hits == request.scored)
            for (value, hits), request in zip(scores, requests, strict=True)
        ]

    def rolling_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Return log-likelihoods, in windows without overlap."""
        parts = [
            rolling(encode_after(self.model.tokenizer, text), self.model.window) for text in texts
        ]
        scores = iter(self._ask("score", [request for part in parts for request in part]))
        return [sum(next(scores)[0] for _ in part) for part in parts]

    def texts_until(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return continuations of (prompt, settings); prompts with equal settings share batches."""
        results = [""] * len(asked)
        groups: dict[str, list[int]] = {}
        for number, (_, settings) in enumerate(asked):
            groups.setdefault(repr(sorted(settings.items())), []).append(number)
        for numbers in groups.values():
            words, new_tokens, sampling = read_settings(asked[numbers[0]][1])
            for start in range(0, len(numbers), self.model.batch):
                some = numbers[start : start + self.model.batch]
                prompts = [self._prompt(asked[number][0], new_tokens) for number in some]
                for number, ids in zip(
                    some, self._ask("generate", prompts, new_tokens, sampling, words), strict=True
                ):
                    results[number] = self.model.stop_condition(words).text(ids)
        return results

    def _prompt(self, context: str, new_tokens: int) -> list[int]:
        most = self.model.loaded.run.model.max_position_embeddings - new_tokens
        check(
            most > 0,
            f"{new_tokens} new tokens fill all positions of the model: pass fewer as --gen_kwargs max_gen_toks=N",
        )
        return (self.model.tokenizer.encode(context) or encode_after(self.model.tokenizer, ""))[
            -most:
        ]


def read_settings(settings: Mapping[str, Any]) -> tuple[list[str], int, Sampling]:
    """Return (stop words, most new tokens, sampling) from the harness's settings of a request."""
    until = settings.get("until") or []
    words = [word for word in ([until] if isinstance(until, str) else until) if word]
    temperature = (
        float(settings.get("temperature") or 0.0) if settings.get("do_sample", True) else 0.0
    )
    sampling = Sampling(
        temperature,
        int(settings.get("top_k") or 0),
        float(settings.get("top_p") or 0.0),
        int(settings.get("seed") or 0),
    )
    return words, int(settings.get("max_gen_toks") or NEW_TOKENS), sampling
