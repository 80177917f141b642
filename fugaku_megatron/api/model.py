"""Model in memory for texts and tokens, from this program, Hugging Face or Megatron-LM."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch
from torch import Tensor

from ..config.fields import check
from ..config.model import ModelConfig
from ..config.precision import PrecisionConfig
from ..config.run_config import RunConfig
from ..config.training import BatchConfig
from ..convert.hugging_face.conversion import save_hugging_face
from ..convert.new_directory import new_directory
from ..convert.open_weights import open_weights
from ..convert.weights import Weights
from ..inference.generation import PromptEncoder, Sampling, steps
from ..inference.loading import Q8, WEIGHTS_FORMATS, model_of, through_stages
from ..inference.scoring import EVALUATION, rolling, score
from ..inference.tokenizer_choice import choose_tokenizer
from ..text.named_files import StrPath
from ..tokenizers.tokenizer import Tokenizer, TokenizerFlags
from .config import Config

if TYPE_CHECKING:
    from typing_extensions import Unpack

SHARD_BYTES = 5 * 10**9  # of a safetensors file, as Hugging Face writes them
SIDE_BY_SIDE = 4  # windows of a text that are scored together


class TokenizerFiles(TypedDict, total=False):
    """Tokenizer keywords for `load`."""

    tokenizer_type: str | None
    vocab_file: StrPath | None
    merge_file: StrPath | None
    tokenizer_model: StrPath | None


def load(
    path: StrPath,
    *,
    ckpt_step: int | None = None,
    pretrained_checkpoint: StrPath | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    **tokenizer: Unpack[TokenizerFiles],
) -> Model:
    """Load the weights of a checkpoint of this program or Megatron-LM, or of a directory of Hugging Face.

    Every calling process has the whole model. A checkpoint of adapters is loaded with its model, and merged into it.
    Raise ValueError for a model that is missing, damaged or not supported.

    ckpt_step: iteration; None: the latest.
    pretrained_checkpoint: place of the adapters' model, if it has moved.
    dtype: "fp32", "bf16" or "fp16" of weights and activations, or "q8", as saved but the linear layers and the head in
    eight bits; None: as saved.
    vocab_size: tokens, if a checkpoint of Megatron-LM has the padded number alone.
    vocab_file and merge_file, or tokenizer_model (a folder of Hugging Face or a file of SentencePiece) and perhaps
    tokenizer_type: replace the tokenizer that came with the model.
    """
    check(
        dtype is None or dtype in WEIGHTS_FORMATS,
        f"dtype is {dtype!r:.40}: pass {' or '.join(WEIGHTS_FORMATS)}",
    )
    files: Mapping[str, Any] = tokenizer
    given = {name: os.fspath(value) for name, value in files.items() if value is not None}
    if "tokenizer_type" not in given and "tokenizer_model" in given:
        is_folder = Path(given["tokenizer_model"]).is_dir()
        given["tokenizer_type"] = "HuggingFaceTokenizer" if is_folder else "SentencePieceTokenizer"
    flags = TokenizerFlags(**given)
    base = None if pretrained_checkpoint is None else os.fspath(pretrained_checkpoint)
    weights = open_weights(os.fspath(path), ckpt_step, vocab_size, base).without_predictions()
    model = Model(weights, dtype, flags, os.fspath(path))
    if flags.named:
        _ = model.tokenizer  # raises now for a mistake in the flags
    return model


class Model:
    """Model returned by `load`. architecture: its flags."""

    def __init__(
        self, weights: Weights, dtype: str | None, tokenizer: TokenizerFlags, where: str
    ) -> None:
        self.architecture: ModelConfig = weights.model
        self._weights = weights
        self._flags = tokenizer
        self._where = where
        self._q8 = dtype == Q8
        if dtype is not None and not self._q8:
            precision = PrecisionConfig.of(dtype)
        elif "precision" in weights.config:
            precision = PrecisionConfig(**weights.config["precision"])
        else:
            precision = weights.precision
        run = RunConfig(
            model=weights.model, batch=BatchConfig(micro_batch_size=1), precision=precision
        )
        self._loaded = model_of(run, weights.dtypes, weights.read, self._q8)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer with encode(text) -> token ids and decode(ids) -> text. ValueError if there is none."""
        carried = self._weights.carried or Path(os.devnull)
        data = self._weights.config.get("data", {})
        return choose_tokenizer(self._flags, data, carried, self._loaded.vocab_size, self._where)

    def config(self, **flags: Any) -> Config:
        """Return a config that trains this model, with other flags such as micro_batch_size and lr."""
        own = {
            f.name: value
            for f in fields(ModelConfig)
            if (value := getattr(self.architecture, f.name)) not in (None, f.default)
        }
        return Config(**{**own, **flags})

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts as well, and this signature counts
        self,
        prompt: str,
        max_new_tokens: int = ...,
        *,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        seed: int = ...,
        stop: Sequence[str] = ...,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str],
        max_new_tokens: int = ...,
        *,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        seed: int = ...,
        stop: Sequence[str] = ...,
    ) -> list[str]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 100,
        *,
        temperature: float = Sampling.temperature,
        top_k: int = Sampling.top_k,
        top_p: float = Sampling.top_p,
        seed: int = Sampling.seed,
        stop: Sequence[str] = (),
    ) -> str | list[str]:
        """Return the continuation of a prompt, or of each of several prompts, as fugaku-megatron generate does.

        temperature: 0 selects the likeliest token.
        top_k, top_p: number or total probability of the likeliest tokens that are sampled; 0: all.
        stop: texts before which a continuation ends.
        """
        prompts = [prompt] if isinstance(prompt, str) else [*prompt]
        stop = [stop] if isinstance(stop, str) else [*stop]
        sampling = Sampling(temperature, top_k, top_p, seed)
        encoder = PromptEncoder(self.tokenizer, self.architecture, max_new_tokens, stop)
        tokens = encoder.encode(*prompts)
        check(bool(tokens), "there is no prompt: pass at least one text")
        *_, added = steps(self._loaded, tokens, max_new_tokens, sampling, encoder.finished)
        results = [encoder.stop_condition.text(ids) for ids in added]
        return results[0] if isinstance(prompt, str) else results

    def loss(self, text: str) -> float:
        """Return the mean negative log-likelihood (natural logarithm) of a text's tokens, without the first.

        A text longer than the model's sequence length is read in windows of that length.
        """
        ids = self.tokenizer.encode(text)
        check(
            len(ids) > 1,
            f"the text has {len(ids)} tokens: pass one of at least two, each of which follows another",
        )
        scores = score(self._loaded, rolling(ids, self.architecture.seq_length), SIDE_BY_SIDE)
        return -float(scores[:, 0].sum()) / (len(ids) - 1)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return FP32 logits (s, v) for the token after each in `tokens` (s,)."""
        ids = torch.as_tensor(tokens)
        model = self.architecture
        vocab_size = self._loaded.vocab_size
        check(
            ids.dim() == 1 and len(ids) > 0 and not ids.is_floating_point(),
            f"tokens have shape {tuple(ids.shape)} and type {ids.dtype}: pass a list of token ids",
        )
        check(
            0 <= int(ids.min()) <= int(ids.max()) < vocab_size,
            f"tokens are {int(ids.min())} to {int(ids.max())}, outside "
            f"the vocabulary of {vocab_size}",
        )
        check(
            not model.learned_positions or len(ids) <= model.max_position_embeddings,
            f"{len(ids)} tokens were passed, and the "
            f"model has {model.max_position_embeddings} positions: pass fewer",
        )
        x = through_stages(self._loaded, ids.long()[:, None], EVALUATION)
        assert x is not None, "this process has all stages"
        return self._loaded.logits(x)[:, 0, :vocab_size].float().contiguous()

    def save_hf(self, directory: StrPath) -> None:
        """Write a new directory for Hugging Face's from_pretrained, with the tokenizer's files, if any.

        Raise ValueError for a directory that is not empty, for a block without an architecture of Hugging Face, and for
        weights in eight bits.
        """
        check(not self._q8, f"the model was loaded with dtype {Q8}: load it without to save it")
        weights = self._loaded.weights
        rows = {name: len(tensor) for name, tensor in self._weights.like().items()}
        in_memory = Weights(
            self.architecture,
            dict.fromkeys(self._weights.dtypes, self._loaded.dtype),
            lambda name: weights[name][: rows[name]],
            self._weights.carried,
        )
        with new_directory("save_hf", os.fspath(directory)) as target:
            save_hugging_face(in_memory, target, SHARD_BYTES)
