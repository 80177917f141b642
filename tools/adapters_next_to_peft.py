"""Adapters next to peft's, and a run that trains them next to trl's, of random models of transformers without a network.

    pip install peft trl                                                    (neither is needed by anything else here)
    python -m tools.adapters_next_to_peft logits FOLDER [MODEL ...]         MODEL: a row of MODELS; by default all
    python -m tools.adapters_next_to_peft losses FOLDER [--steps 100]

logits: adapters that were trained here are merged by peft, and adapters of peft are read here; prints the largest difference of
logits next to the largest logit. losses: the same chats, first adapters and steps in trl's SFTTrainer and here; prints the largest
relative difference of a step's loss. Every step has all chats, so that their order does not matter. FOLDER must not exist.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fugaku_megatron as fm

from . import flag_chats

TOKENS = torch.arange(12)
RANK = 4
RATE = 1e-3
CHATS = 24
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 36,
    },
    "Qwen3Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "head_dim": 16,
        "mlp_only_layers": [1],
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MATRICES = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def program(*arguments: Any) -> None:
    """Run fugaku-megatron; ends the tool where it fails."""
    done = subprocess.run(
        [Path(sys.executable).with_name("fugaku-megatron"), *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"fugaku-megatron {arguments[0]} failed: {done.stderr[-2000:]}")


def saved_model(kind: str, folder: Path) -> None:
    """Write a random model of transformers, and the checkpoint here that it is."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, **MODELS[kind], attn_implementation="eager"
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.1) if p.dim() > 1 else p.uniform_(0.5, 1.5)
    model.save_pretrained(folder / "model")
    program("convert", "--from-hf", folder / "model", "--save", folder / "base")


def opened(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()


def new_adapters(folder: Path, kind: str, initial: bool) -> Any:
    """Return peft's model with adapters of all matrices, which are zero in effect or random; also write it."""
    import peft

    experts = (
        {"target_modules": ATTENTION, "target_parameters": EXPERTS}
        if "num_experts_per_tok" in MODELS[kind]
        else {"target_modules": MATRICES}
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(
        opened(folder), peft.LoraConfig(r=RANK, lora_alpha=8, init_lora_weights=initial, **experts)
    )
    model.save_pretrained(folder / "theirs")
    program(
        "convert",
        "--load",
        folder / "base",
        "--from-peft",
        folder / "theirs",
        "--save",
        folder / "read",
    )
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS[None]).logits[0].float()


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def compare_logits(kind: str, folder: Path) -> str:
    """Return a line with the differences of logits between adapters here and in peft."""
    import peft

    folder.mkdir(parents=True)
    saved_model(kind, folder)
    theirs = logits(new_adapters(folder, kind, initial=False).merge_and_unload())
    read = difference(fm.load(folder / "read").logits(TOKENS), theirs)
    flags = (folder / "base" / "model.flags").read_text().split()
    program(
        "train",
        *flags,
        "--lora-rank",
        RANK,
        "--lora-alpha",
        16,
        "--pretrained-checkpoint",
        folder / "base",
        "--mock-data",
        "--seq-length",
        32,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        4,
        "--train-iters",
        3,
        "--lr",
        1e-2,
        "--eval-iters",
        0,
        "--lr-decay-style",
        "constant",
        "--save",
        folder / "run",
        "--tokenizer-type",
        "NullTokenizer",
    )
    program("convert", "--load", folder / "run", "--to-peft", folder / "written")
    ours = fm.load(folder / "run").logits(TOKENS)
    merged = peft.PeftModel.from_pretrained(
        opened(folder), str(folder / "written")
    ).merge_and_unload()
    effect = difference(fm.load(folder / "base").logits(TOKENS), ours)
    written = difference(logits(merged), ours)
    return (
        f"{kind}: adapters written for peft {peft.__version__} and merged there {written:.1e}, of peft and read here "
        f"{read:.1e}; what training changed {effect:.1e}"
    )


def compare_losses(folder: Path, steps: int) -> str:
    """Return a line with the largest difference of a step's loss from trl's."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    kind = "Qwen3"
    folder.mkdir(parents=True)
    flag_chats.write(folder / "chats")
    lines = (folder / "chats" / "train.jsonl").read_text().splitlines()[:CHATS]
    (folder / "chats" / "some.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = folder / "chats" / "tokenizer"
    saved_model(kind, folder)
    model = new_adapters(folder, kind, initial=True)
    program(
        "preprocess",
        "--chat",
        "--input",
        folder / "chats" / "some.jsonl",
        "--output-prefix",
        folder / "data",
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        tokenizer,
    )
    flags = (folder / "read" / "model.flags").read_text().split()
    program(
        "train",
        "--sft",
        *flags,
        "--load",
        folder / "read",
        "--finetune",
        "--data-path",
        folder / "data",
        "--split",
        "100,0,0",
        "--eval-iters",
        0,
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        tokenizer,
        "--seq-length",
        4096,
        "--max-position-embeddings",
        4096,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        1,
        "--train-iters",
        steps,
        "--lr",
        RATE,
        "--lr-decay-style",
        "constant",
        "--weight-decay",
        0,
        "--adam-beta2",
        0.999,
        "--log-interval",
        1,
        "--save",
        folder / "run",
        "--save-interval",
        steps,
    )
    ours = [
        json.loads(line)["lm_loss"]
        for line in (folder / "run" / "history.jsonl").read_text().splitlines()
    ]

    settings = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=CHATS,
        learning_rate=RATE,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        fp16=False,
        report_to=[],
        save_strategy="no",
        assistant_only_loss=True,
        max_length=None,
        gradient_checkpointing=False,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
    )
    words = AutoTokenizer.from_pretrained(tokenizer)
    marked = "{% generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}"
    words.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
        + marked
        + "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    )
    words.pad_token = flag_chats.SPECIAL[0]
    trainer = trl.SFTTrainer(
        model=model,
        args=settings,
        processing_class=words,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
    )
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    return (
        f"trl {trl.__version__}: {len(ours)} losses from {ours[0]:.4f} to {ours[-1]:.4f}, largest relative difference of one "
        f"{worst:.1e}"
    )


def main() -> None:
    """Run one comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("logits", "losses"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    if options.what == "losses":
        print(compare_losses(options.folder, options.steps))
    for kind in options.models if options.what == "logits" else ():
        print(compare_logits(kind, options.folder / kind), flush=True)


if __name__ == "__main__":
    main()
