"""llama.cpp on this machine: tokens of texts, and log-probabilities of the next token, from a GGUF file.

The optional package xllamacpp has llama.cpp as a server in the process. Comparisons: make.py, and
tests/convert/test_llama_cpp.py.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from fugaku_megatron.convert.gguf.tokens import GgufTokenizer

HIDDEN = 32
ALL = 100_000  # tokens whose log-probability is asked for


class LlamaCpp:
    """A server for one file, until the block ends."""

    def __init__(self, file: Path, context: int = 256):
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.warmup = False
        settings.n_ctx = context
        settings.n_parallel = 1
        settings.verbosity = -1
        settings.cpuparams.n_threads = 1
        settings.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(settings)

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        del self._server

    def _post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self._server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def tokens(self, text: str, parse_special: bool) -> list[int]:
        """Return a text's token ids, with begin and end tokens."""
        asked = {"content": text, "add_special": True, "parse_special": parse_special}
        return self._post("/tokenize", **asked)["tokens"]

    def next_token(self, ids: list[int], letter: int) -> dict[int, float]:
        """Return each token's log-probability after `ids`. letter: a token that is a letter, and is chosen"""
        answer = self._post(
            "/completion",
            prompt=ids,
            n_predict=1,
            n_probs=ALL,
            cache_prompt=False,
            logit_bias=[[letter, 100.0]],
        )
        row = answer["completion_probabilities"][0]["top_logprobs"]
        return {token["id"]: token["logprob"] for token in row}


def write_model(tokenizer: GgufTokenizer, file: Path) -> None:
    """Write a one-layer model with this tokenizer."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokenizer.tokens))
    tokenizer.write(writer)
    vector = np.ones(HIDDEN, np.float32)
    matrix = np.eye(HIDDEN, dtype=np.float32)
    writer.add_tensor("token_embd.weight", np.ones((len(tokenizer.tokens), HIDDEN), np.float32))
    writer.add_tensor("output_norm.weight", vector)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", vector)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
