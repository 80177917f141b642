"""LoRA: low-rank adapters of frozen weights, as fields of a run's config.

y = x W^T + scale dropout(x) A^T B^T, with A (rank, inputs) and B (outputs, rank). Source: Hu et al. 2021, "LoRA: Low-Rank
Adaptation of Large Language Models" (arXiv:2106.09685); the scale of --lora-use-rslora: Kalajdzievski 2023 (arXiv:2312.03732).
Names of targets are those of peft for Hugging Face's models, and those of Megatron-LM. Left out: the layers (`nn.adapters`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .fields import check, check_fraction, check_numbers, check_positive, hashed_once, opt
from .model import ModelConfig

ALL_LINEAR = "all-linear"
DROPOUT_COLUMNS = 8  # of an input that ranks share: a mask goes by blocks of so many
QKV, PROJ, FC1, FC2 = "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"
# A linear layer of the block -> the matrices of Hugging Face's models that it holds, in the order of its rows.
MATRICES = {
    QKV: ("q_proj", "k_proj", "v_proj"),
    PROJ: ("o_proj",),
    FC1: ("gate_proj", "up_proj"),
    FC2: ("down_proj",),
}
_NAMES = tuple(name for names in MATRICES.values() for name in names)
TARGETS = (ALL_LINEAR, *_NAMES, *MATRICES)


@hashed_once
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: the weights of the model stay as they are, and small matrices next to them are trained."""

    lora_rank: int | None = opt(
        None,
        "train adapters of this rank, and nothing else; the model's weights come from "
        "--pretrained-checkpoint, or from --finetune --load (default: all weights are trained)",
        type=int,
        maximum=2**16,
    )
    lora_alpha: float = opt(8.0, "adapters are scaled by this / rank")
    lora_dropout: float = opt(0.0, "dropout of what goes into adapters")
    lora_target: str = opt(
        ALL_LINEAR,
        "matrices with an adapter, separated by commas: q_proj, k_proj, v_proj, o_proj, gate_proj, "
        "up_proj, down_proj as in peft; linear_qkv, linear_proj, linear_fc1, linear_fc2, which have one adapter "
        "for all matrices in them; or all-linear, all seven of peft's",
    )
    lora_use_rslora: bool = opt(
        False, "scale adapters by alpha / sqrt(rank) instead of alpha / rank"
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(self, "lora_rank", "lora_alpha")
        check_fraction(self, "lora_dropout")
        names = self.targets
        unknown = next((name for name in names if name not in TARGETS), None)
        check(
            unknown is None,
            f"--lora-target {unknown} is not known: pass {', '.join(TARGETS)}, separated by commas",
        )
        check(
            len(set(names)) == len(names),
            f"--lora-target {self.lora_target} names a matrix twice: leave one out",
        )
        for whole, parts in MATRICES.items():
            both = [part for part in parts if whole in names and part in names]
            check(
                not both,
                f"--lora-target {self.lora_target}: {whole} holds {''.join(both[:1])}: leave one of them out",
            )
        check(
            ALL_LINEAR not in names or len(names) == 1,
            f"--lora-target {self.lora_target}: all-linear goes alone",
        )

    @property
    def on(self) -> bool:
        """Whether the run trains adapters."""
        return self.lora_rank is not None

    @property
    def rank(self) -> int:
        """Of each adapter; the run has some."""
        assert self.lora_rank is not None
        return self.lora_rank

    @property
    def scale(self) -> float:
        """What A^T B^T is multiplied by."""
        return self.lora_alpha / (self.rank**0.5 if self.lora_use_rslora else self.rank)

    @property
    def targets(self) -> tuple[str, ...]:
        """The names that were given."""
        return tuple(name.strip() for name in self.lora_target.split(","))

    def parts(self, linear: str, model: ModelConfig) -> tuple[str, ...]:
        """The adapters of a linear layer of the block, by name of what they adapt; none where it has no adapter."""
        if not self.on:
            return ()
        names = _NAMES if self.targets == (ALL_LINEAR,) else self.targets
        if linear in names:
            return (linear,)
        if linear == FC1 and not model.gated:
            return (FC1,) if "up_proj" in names else ()
        return tuple(name for name in MATRICES[linear] if name in names)

    def check_model(self, model: ModelConfig) -> None:
        """ValueError for a model whose matrices cannot have these adapters."""
        if not self.on:
            return
        attention, of_experts = (
            ",".join(MATRICES[QKV] + MATRICES[PROJ]),
            model.num_experts and self.of_mlps(model),
        )
        check(
            not self.lora_dropout or not of_experts,
            f"--lora-dropout {self.lora_dropout}: adapters of experts have no dropout, "
            f"as in peft: pass 0, or --lora-target {attention}",
        )
        check(
            model.gated or "gate_proj" not in self.targets,
            "--lora-target gate_proj: the MLP has no gate: leave it out, or pass --swiglu",
        )
        sides = [
            (part, *shape(part, model, width))
            for linear in MATRICES
            for part in self.parts(linear, model)
            for width in model.mlp_widths
        ]
        for part, rows, columns in sides:
            check(
                self.rank <= min(rows, columns),
                f"--lora-rank {self.rank} is larger than the smaller side of {part}, "
                f"{rows} x {columns}: lower it to {min(rows, columns)} or less",
            )

    def of_mlps(self, model: ModelConfig) -> bool:
        """Whether MLPs, or experts, have adapters."""
        return bool(self.parts(FC1, model) or self.parts(FC2, model))


def shape(name: str, model: ModelConfig, f: int) -> tuple[int, int]:
    """(outputs, inputs) of a matrix that a target names, of an MLP or expert of width f."""
    h, d = model.hidden_size, model.kv_channels
    keys = model.query_groups * d
    return {
        "q_proj": (model.context_width, h),
        "k_proj": (keys, h),
        "v_proj": (keys, h),
        QKV: (model.qkv_width, h),
        "o_proj": (h, model.context_width),
        PROJ: (h, model.context_width),
        "gate_proj": (f, h),
        "up_proj": (f, h),
        FC1: (model.fc1_widths * f, h),
        "down_proj": (h, f),
        FC2: (h, f),
    }[name]
