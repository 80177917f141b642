"""trl's SFTTrainer with peft and bitsandbytes, as their users run it: the baseline trl of `benchmarks step`.

    pip install -c requirements.txt -r requirements-trl.txt

The trainer loads a directory of Hugging Face with our initial weights, reads our tokens through a collator and starts from our
adapters: its losses equal ours. Full fine-tuning has FP32 weights, with autocast in BF16; frozen weights have the run's precision,
or 8 or 4 bits of bitsandbytes. Unlike trl's defaults nothing is recomputed, because we recompute nothing either. A step's time
includes trl's logging and the next batch. Left out: whole models of other programs (contestant.py).
"""

from __future__ import annotations

import importlib.util
import logging
import re
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fugaku_megatron.config.fields import check
from fugaku_megatron.config.layer_kinds import FC1, FC2, QKV
from fugaku_megatron.config.lora import ALL_LINEAR, MATRICES
from fugaku_megatron.config.run_config import ModelConfig, RunConfig
from fugaku_megatron.convert.hugging_face.config_json import architecture_of
from fugaku_megatron.convert.hugging_face.tensor_mapping import tensor_mappings
from fugaku_megatron.data.dataset import MockDataset

REQUIREMENTS = "requirements-trl.txt"
LOAD_IN = {
    "8bit": {"load_in_8bit": True},
    "4bit": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },  # as in QLoRA: Dettmers et al. 2023 (arXiv:2305.14314)
}
ADAPTER = re.compile(r"base_model\.model\.(.+)\.lora_A\.default\.weight")


class Turns(Protocol):
    """Steps that somebody asks for."""

    def begin(self) -> bool:
        """Wait for the next request. False: there is none."""

    def end(self, loss: float) -> None:
        """Answer the request."""


def check_packages(adapters: bool, load_in: str | None) -> None:
    """Raise ValueError with the remedy if a package is missing."""
    needed = ["trl", *(["peft"] if adapters else []), *(["bitsandbytes"] if load_in else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    check(
        not missing,
        f"--baseline trl: {' and '.join(missing)} missing: pip install -c requirements.txt -r {REQUIREMENTS}",
    )


def adapted_matrices(model: ModelConfig) -> str:
    """Return the --lora-target with an A for each linear layer of Hugging Face's model, as peft has it."""
    table = tensor_mappings(architecture_of(model, {}), model)
    separate = any(part.number and f".{QKV}." in part.ours for part in table.values())
    own = {*model.mixer_linears, FC1, FC2}
    return ALL_LINEAR if separate else ",".join(name for name in MATRICES if name in own)


class SFTBaseline:
    """SFTTrainer on our tokens.

    build: returns transformers' model with our initial weights.
    ours: returns our initial value of a parameter by its global name.
    """

    def __init__(
        self,
        run: RunConfig,
        build: Callable[[], Any],
        ours: Callable[[str], Tensor],
        load_in: str | None = None,
        compiled: bool = False,
    ) -> None:
        import trl

        quiet_logs()
        self.folder = tempfile.TemporaryDirectory(prefix="benchmarks_trl_")
        model = Path(self.folder.name) / "model"
        dtype = torch.bfloat16 if run.lora.on and run.precision.bf16 else torch.float32
        build().to(dtype).save_pretrained(model)
        self.trainer = trl.SFTTrainer(
            model=str(model),
            args=settings(run, self.folder.name, dtype, compiled),
            train_dataset=samples(run),
            data_collator=collate,
            processing_class=tokenizer(),
            peft_config=adapters(run),
            quantization_config=quantization(load_in, dtype),
        )
        if run.lora.on:
            take_adapters(self.trainer.model, run.model, ours)

    def train(self, turns: Turns) -> None:
        """Train a step for each request."""
        train_on_request(self.trainer, turns)

    def close(self) -> None:
        self.folder.cleanup()


def train_on_request(trainer: Any, turns: Turns) -> None:
    """Take a step of a trainer of transformers for each request; the log line of the step ends the request."""
    import transformers

    class Answer(transformers.TrainerCallback):
        """Answers with the step's loss."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                turns.end(logs["loss"])
                control.should_training_stop = not turns.begin()

    trainer.remove_callback(transformers.PrinterCallback)
    if turns.begin():
        trainer.add_callback(Answer)
        trainer.train()


def quiet_logs() -> None:
    """Turn off progress bars and notes, which would be printed between the rounds."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def settings(run: RunConfig, folder: str, dtype: torch.dtype, compiled: bool) -> Any:
    """Return the SFTConfig of the run."""
    import trl

    optimizer = run.optimizer
    batch = run.batch
    return trl.SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=run.precision.bf16,
        model_init_kwargs={"dtype": dtype},
        torch_compile=compiled,
        gradient_checkpointing=False,
        per_device_train_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.global_batch_size // batch.micro_batch_size,
        max_steps=run.training.train_iters,
        train_sampling_strategy="sequential",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_epsilon=optimizer.adam_eps,
        max_grad_norm=optimizer.clip_grad,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def samples(run: RunConfig) -> Any:
    """Return the data set with the run's tokens, s + 1 of each sample."""
    import datasets

    count = run.training.train_iters * run.batch.global_batch_size
    data = MockDataset(run.model.vocab_size, run.model.seq_length, count, run.training.seed)
    return datasets.Dataset.from_dict({"input_ids": [data[i] for i in range(count)]})


def collate(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return tokens and their labels, (b, s) each. trl's own collator leaves a sample's last label out."""
    tokens = torch.tensor([example["input_ids"] for example in examples])
    inputs = tokens[:, :-1]
    return {
        "input_ids": inputs,
        "attention_mask": torch.ones_like(inputs),
        "labels": inputs,
        "shift_labels": tokens[:, 1:],
    }


def tokenizer() -> Any:
    """Return a tokenizer, which the trainer demands and does not use."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), pad_token="a"
    )


def adapters(run: RunConfig) -> Any:
    """Return peft's config, or None if all weights are trained."""
    if not run.lora.on:
        return None
    import peft

    return peft.LoraConfig(
        r=run.lora.rank,
        lora_alpha=run.lora.lora_alpha,
        target_modules=ALL_LINEAR,
        task_type="CAUSAL_LM",
    )


def quantization(load_in: str | None, dtype: torch.dtype) -> Any:
    """Return transformers' config of frozen weights, or None."""
    if load_in is None:
        return None
    import transformers

    compute = {"bnb_4bit_compute_dtype": dtype} if load_in == "4bit" else {}
    return transformers.BitsAndBytesConfig(**LOAD_IN[load_in], **compute)


def take_adapters(theirs: Any, model: ModelConfig, ours: Callable[[str], Tensor]) -> None:
    """Copy our A into peft's. B is zero in both."""
    parts = tensor_mappings(architecture_of(model, {}), model)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if found := ADAPTER.fullmatch(name):
                part = parts[f"{found[1]}.weight"]
                every = ours(part.ours.replace(".weight", ".lora_A.weight"))  # (p, r, in)
                parameter.copy_(every[part.number])


def versions(adapted: bool, load_in: str | None) -> dict[str, str]:
    """Return the versions of the packages that take part."""
    names = ["trl", "transformers"]
    if adapted:
        names.append("peft")
    if load_in:
        names.append("bitsandbytes")
    return {name: version(name) for name in names}
