"""Published model sizes, each a function that returns a RunConfig; the flag of a value overrides it.

124M and 30B are the runs of the benchmark tables, 1.3B is GPT-3 XL, 13B is Fugaku-LLM's; `demo` trains in minutes on two cores.
Left out: the parallel layout, which depends on the number of nodes. Test: pytest tests/test_arguments.py
"""

from __future__ import annotations

from collections.abc import Callable

from .config import BatchConfig, ModelConfig, OptimizerConfig, OutputConfig, RunConfig, TrainingConfig

GPT2_VOCABULARY = 50257


def demo() -> RunConfig:
    """0.8 M parameters on the standard library's text: for `make train`."""
    return RunConfig(
        model=ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=128,
                          make_vocab_size_divisible_by=64, hidden_dropout=0.0, attention_dropout=0.0),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=8),
        optimizer=OptimizerConfig(lr=3e-3, min_lr=3e-4, lr_decay_style="cosine", lr_warmup_fraction=0.03, weight_decay=0.1,
                                  adam_beta2=0.95),
        training=TrainingConfig(train_iters=1600, eval_interval=400, eval_iters=16),
        output=OutputConfig(log_interval=20, save_interval=400),
    )


def _published(num_layers: int, hidden_size: int, heads: int, seq_length: int, lr: float, batch: BatchConfig,
               init_method_std: float = 0.02) -> RunConfig:
    return RunConfig(
        model=ModelConfig(num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=heads, seq_length=seq_length,
                          vocab_size=GPT2_VOCABULARY, init_method_std=init_method_std),
        batch=batch,
        optimizer=OptimizerConfig(lr=lr, min_lr=lr / 10, lr_decay_style="cosine", lr_warmup_fraction=0.01, weight_decay=0.1,
                                  adam_beta2=0.95),
        training=TrainingConfig(train_iters=95367),
        output=OutputConfig(log_interval=1, save_interval=250),
    )


def gpt_124m() -> RunConfig:
    """GPT-2 124M, sequence 1024, global batch 1024: the 124M tables."""
    return _published(12, 768, 12, 1024, 6e-4, BatchConfig(micro_batch_size=1, global_batch_size=1024))


def gpt_1b3() -> RunConfig:
    """GPT-3 XL, 1.3B, sequence 2048."""
    return _published(24, 2048, 16, 2048, 2e-4, BatchConfig(micro_batch_size=1, global_batch_size=512), 0.013)


def gpt_13b() -> RunConfig:
    """13B as Fugaku-LLM trained it: 40 layers, h 5184, 36 heads, global batch 2016."""
    return _published(40, 5184, 36, 2048, 1e-4, BatchConfig(micro_batch_size=1, global_batch_size=2016), 0.008)


def gpt_30b() -> RunConfig:
    """30B of the tables: 48 layers, h 7168, 56 heads, sequence 2048, global batch 1536."""
    return _published(48, 7168, 56, 2048, 1e-4, BatchConfig(micro_batch_size=1, global_batch_size=1536), 0.006)


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "demo": demo, "124m": gpt_124m, "1.3b": gpt_1b3, "13b": gpt_13b, "30b": gpt_30b,
}
