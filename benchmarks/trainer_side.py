"""One side of `benchmarks trainers` in a process of its own: takes a step on request.

    python -m benchmarks.trainer_side '{"side": "ours", "program": "sft", ...}'

A step's answer is {"seconds", "loss", "peak_mib"}. A trainer's step includes its logging and the next batch; generate's has no loss.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import child, sft

MANY_STEPS = 10_000
LEARNING_RATE = 1e-4
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
QWEN3_5 = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    "vocab_size": 4096,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Work of this process: the options of trainers.py."""

    side: str
    program: str
    dtype: str
    layers: int
    length: int
    batch: int
    vocabulary: int | None
    threads: int
    steps: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32


class Turns:
    """Requests on standard input, answered with the time since the last one."""

    def __init__(self, answer: child.Answer) -> None:
        self.answer = answer
        self.began = 0.0

    def begin(self) -> bool:
        """Wait for a request. False: there is none."""
        asked = bool(sys.stdin.readline())
        self.began = time.perf_counter()
        return asked

    def end(self, loss: float) -> None:
        seconds = time.perf_counter() - self.began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.answer({"seconds": seconds, "loss": loss, "peak_mib": peak})


def _model(order: Order, kind: str, shape: dict[str, Any], layers: int | None = None) -> Any:
    """Return a model of transformers with random weights."""
    import transformers

    fields = {**shape, "num_hidden_layers": layers or order.layers, "pad_token_id": 0}
    if order.vocabulary:
        fields["vocab_size"] = order.vocabulary
    config = getattr(transformers, f"{kind}Config")(**fields)
    torch.manual_seed(1)
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).to(
        order.torch_dtype
    )


def _accelerated(order: Order, model: Any) -> Any:
    if order.side != "ours":
        return model
    from fugaku_megatron.torch_backend.accelerate import accelerate

    return accelerate(model)


def _tokens(order: Order, vocabulary: int) -> torch.Tensor:
    """Return samples (steps + 1 batches, s)."""
    count = (order.steps + 1) * order.batch
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, vocabulary, (count, order.length), generator=generator)


def _arguments(order: Order, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": order.batch,
        "max_steps": MANY_STEPS,
        "max_length": None,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }


def _train(order: Order, trainer: Any, turns: Turns) -> None:
    """Take a trainer's step for each request."""
    _accelerated(order, trainer.model)
    sft.train_on_request(trainer, turns)


def _lora() -> Any:
    import peft

    return peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def _sft(order: Order, turns: Turns, model: Any) -> None:
    import datasets
    import trl

    samples = [
        {"input_ids": row, "labels": row}
        for row in _tokens(order, model.config.vocab_size).tolist()
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(**_arguments(order, folder))
        trainer = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=datasets.Dataset.from_list(samples),
            processing_class=sft.tokenizer(),
            peft_config=_lora(),
        )
        _train(order, trainer, turns)


def _dpo(order: Order, turns: Turns, model: Any) -> None:
    """A prompt of half the length, and two answers of the other half."""
    import datasets
    import trl

    half = order.length // 2
    rows = _tokens(order, model.config.vocab_size)
    others = rows.flip(0)
    samples = [
        {"prompt": _text(row[:half]), "chosen": _text(row[half:]), "rejected": _text(other[half:])}
        for row, other in zip(rows.tolist(), others.tolist())
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.DPOConfig(
            **{**_arguments(order, folder), "per_device_train_batch_size": max(1, order.batch // 2)}
        )
        trainer = trl.DPOTrainer(
            model=model,
            args=arguments,
            train_dataset=datasets.Dataset.from_list(samples),
            processing_class=_tokenizer(model.config.vocab_size),
            peft_config=_lora(),
        )
        _train(order, trainer, turns)


def _text(tokens: list[int]) -> str:
    return "".join(f" t{token}" for token in tokens)


def _tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer of texts that list tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1")


def _loop(turns: Turns, step: Callable[[], float]) -> None:
    while turns.begin():
        turns.end(step())


def _experts(order: Order, turns: Turns) -> None:
    """Full training of one layer by a loop."""
    model = _accelerated(order, _model(order, "Qwen3Moe", QWEN3_30B_A3B, layers=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batches = iter(_tokens(order, model.config.vocab_size).split(order.batch))

    def step() -> float:
        tokens = next(batches)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    _loop(turns, step)


def _embedding(order: Order, turns: Turns) -> None:
    """Train sentence-transformers' embedding model on pairs, by its loss, in a loop of its features."""
    import sentence_transformers
    from sentence_transformers.sentence_transformer import losses, modules

    model = _model(order, "Qwen3", QWEN3)
    with tempfile.TemporaryDirectory() as folder:
        model.model.save_pretrained(folder)
        sft.tokenizer().save_pretrained(folder)
        encoder = modules.Transformer(folder)
    pooling = modules.Pooling(model.config.hidden_size, "lasttoken")
    embedder = sentence_transformers.SentenceTransformer(modules=[encoder, pooling], device="cpu")
    _accelerated(order, embedder.to(order.torch_dtype)).train()
    loss_of = losses.MultipleNegativesRankingLoss(embedder)
    optimizer = torch.optim.SGD(embedder.parameters(), lr=LEARNING_RATE)
    batches = iter(_tokens(order, model.config.vocab_size).split(order.batch))

    def step() -> float:
        halves = next(batches).chunk(2, dim=1)
        features = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in halves]
        loss = loss_of(features, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    _loop(turns, step)


def _generate(order: Order, turns: Turns) -> None:
    """Generate 32 tokens with a static cache; the loss is the sum of the tokens' numbers."""
    model = _accelerated(order, _model(order, "Qwen3", QWEN3).eval())
    prompts: Iterator[torch.Tensor] = iter(
        _tokens(order, model.config.vocab_size).split(order.batch)
    )

    def step() -> float:
        tokens = next(prompts)[:1, : order.length // 2]
        made = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            cache_implementation="static",
        )
        return float(made.sum())

    _loop(turns, step)


def main() -> None:
    """Run the program of the command line."""
    fields, answer = child.order()
    order = Order(**fields)
    sft.quiet_logs()
    torch.set_num_threads(order.threads)
    if order.side == "ours":
        import fugaku_megatron.torch_backend  # noqa: F401  # replaces torch's operators
    turns = Turns(answer)
    answer({})
    if order.program == "sft":
        _sft(order, turns, _model(order, "Qwen3", QWEN3))
    elif order.program == "dpo":
        _dpo(order, turns, _model(order, "Qwen3", QWEN3))
    elif order.program == "delta-sft":
        _sft(order, turns, _model(order, "Qwen3_5Text", QWEN3_5))
    else:
        {"experts": _experts, "embedding": _embedding, "generate": _generate}[order.program](
            order, turns
        )


if __name__ == "__main__":
    main()
