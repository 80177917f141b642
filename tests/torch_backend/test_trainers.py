"""trl's trainers with peft's LoRA, accelerated and not: the same losses and metrics."""

import random

import pytest
import torch
import transformers

from fugaku_megatron.torch_backend.accelerate import accelerate, restore
from tests.checks.tiny_transformers import VOCABULARY, model_of

pytestmark = [pytest.mark.unit, pytest.mark.slow]
STEPS = 4


def tokenizer():
    import tokenizers

    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", eos_token="w2", unk_token="w1"
    )


def texts(*fields):
    generator = random.Random(1)

    def text():
        count = generator.randrange(4, 12)
        return "".join(f" w{generator.randrange(3, VOCABULARY)}" for _ in range(count))

    return [{field: text() for field in fields} for _ in range(16)]


FIELDS = {
    "SFT": ["text"],
    "DPO": ["prompt", "chosen", "rejected"],
    "KTO": ["prompt", "completion"],
    "Reward": ["chosen", "rejected"],
}


def samples(program):
    rows = texts(*FIELDS[program])
    if program == "KTO":
        for number, row in enumerate(rows):
            row["label"] = number % 2 == 0
    return rows


def model_for(program, kind):
    if program != "Reward":
        return model_of(kind)
    config = model_of(kind).config
    config.num_labels = 1
    torch.manual_seed(3)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def training_arguments(folder):
    """Return the arguments of a trainer of transformers that takes a few steps."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def history(kind, program, fast, folder, lora=True, **options):
    """Return the log of a few steps."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    arguments = getattr(trl, f"{program}Config")(
        **training_arguments(folder), bf16=False, **options
    )
    task = "SEQ_CLS" if program == "Reward" else "CAUSAL_LM"
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type=task)
    model = model_for(program, kind)
    torch.manual_seed(0)
    trainer = getattr(trl, f"{program}Trainer")(
        model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(samples(program)),
        processing_class=tokenizer(),
        peft_config=adapters if lora else None,
    )
    if fast:
        accelerate(trainer.model)
    trainer.train()
    restore(trainer.model)
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("program", ["SFT", "DPO"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "qwen3_moe"])
def test_lora(kind, program, tmp_path):
    compare(kind, program, tmp_path)


@pytest.mark.parametrize("program", ["KTO", "Reward"])
def test_other_preferences(program, tmp_path):
    compare("qwen3", program, tmp_path)


def test_full_training(tmp_path):
    compare("qwen3", "SFT", tmp_path, lora=False)


def test_packed_samples(tmp_path):
    compare("qwen3", "SFT", tmp_path, packing=True, max_length=32)


def compare(kind, program, folder, **options):
    slow, fast = (history(kind, program, each, folder, **options) for each in (False, True))
    assert len(slow) == len(fast) == STEPS
    for expected, row in zip(slow, fast):
        for name in ("loss", "entropy", "mean_token_accuracy", "rewards/margins", "grad_norm"):
            if name in expected:
                assert row[name] == pytest.approx(expected[name], abs=1e-4, rel=1e-3), name


def embedding_losses(folder, fast):
    """Return the losses of sentence-transformers' own trainer."""
    datasets = pytest.importorskip("datasets")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    model_of("qwen3").model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    encoder = modules.Transformer(str(folder))
    pooling = modules.Pooling(encoder.model.config.hidden_size, "lasttoken")
    embedder = sentence_transformers.SentenceTransformer(modules=[encoder, pooling], device="cpu")
    if fast:
        accelerate(embedder)
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        **training_arguments(folder)
    )
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=embedder,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(texts("anchor", "positive")),
        loss=losses.MultipleNegativesRankingLoss(embedder),
    )
    trainer.train()
    restore(embedder)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_embedding(tmp_path, monkeypatch):
    # scikit-learn sets these at its import.
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")
    slow, fast = (embedding_losses(tmp_path, fast) for fast in (False, True))
    assert len(slow) == len(fast) == STEPS
    assert fast == pytest.approx(slow, abs=1e-4)
