"""LoRA fields: low-rank adapters for frozen weights.

y = x W^T + scale dropout(x) A^T B^T, with A (rank, inputs) and B (outputs, rank). Sources: Hu et
al. 2021 (arXiv:2106.09685); for --lora-use-rslora Kalajdzievski 2023 (arXiv:2312.03732). Targets
are named as in peft and as in Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

from .fields import (
    FRACTION,
    cached_hash,
    check,
    course_option,
    course_optional,
    course_switch,
    free_option,
    free_optional,
)
from .layer_kinds import (
    FC1,
    FC2,
    IN_PROJ,
    KV_DOWN,
    KV_UP,
    OUT_PROJ,
    PROJ,
    Q_DOWN,
    Q_PROJ,
    Q_UP,
    QKV,
)
from .model import ModelConfig
from .rules import CheckedFields

ALL_LINEAR = "all-linear"
INT8_BASE = "int8"
BASE_FORMATS = (INT8_BASE,)  # of frozen weights, besides the model's own
DROPOUT_COLUMNS = 8  # block size of a dropout mask over a sharded input
# Matrix of a gated delta net's input projection -> its `ModelConfig.key_head_parts`. The last two are Qwen3-Next's.
IN_PROJ_PARTS = {
    "in_proj_qkv": (0, 1, 2),
    "in_proj_z": (3,),
    "in_proj_b": (4,),
    "in_proj_a": (5,),
    "in_proj_qkvz": (0, 1, 2, 3),
    "in_proj_ba": (4, 5),
}
_FUSED = ("in_proj_qkvz", "in_proj_ba")
# A linear layer of the block -> its matrices in Hugging Face's models, in the order of its rows.
MATRICES = {
    QKV: ("q_proj", "k_proj", "v_proj"),
    Q_PROJ: ("q_proj",),
    Q_DOWN: ("q_a_proj",),
    Q_UP: ("q_b_proj",),
    KV_DOWN: ("kv_a_proj_with_mqa",),
    KV_UP: ("kv_b_proj",),
    PROJ: ("o_proj",),
    FC1: ("gate_proj", "up_proj"),
    FC2: ("down_proj",),
    IN_PROJ: tuple(IN_PROJ_PARTS),
    OUT_PROJ: (OUT_PROJ,),
}
_NAMES = tuple(name for names in MATRICES.values() for name in names if name not in _FUSED)
TARGETS = tuple(dict.fromkeys((ALL_LINEAR, *_NAMES, *_FUSED, *MATRICES)))


@cached_hash
@dataclass(frozen=True, kw_only=True)
class LoraConfig(CheckedFields):
    """Low-rank adapters: the model's weights are frozen, and small matrices next to them are trained."""

    lora_rank: int | None = free_optional(
        "train only adapters of this rank; the model's weights come from "
        "--pretrained-checkpoint, or from --finetune --load (default: all weights are trained)",
        maximum=2**16,
    )
    lora_alpha: float = course_option(8.0, "scale adapters by this / rank", needs="lora_rank")
    lora_dropout: float = course_option(
        0.0, "dropout of the adapters' input", range=FRACTION, needs="lora_rank"
    )
    lora_target: str = free_option(
        ALL_LINEAR,
        "matrices with an adapter, separated by commas: q_proj, k_proj, v_proj, o_proj, gate_proj, "
        "up_proj, down_proj as in peft, of latent attention q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, "
        "and of gated delta nets in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj; "
        "linear_qkv, linear_q_proj, linear_q_down_proj, linear_q_up_proj, linear_kv_down_proj, linear_kv_up_proj, linear_proj, "
        "linear_fc1, linear_fc2, in_proj, with one adapter for all their matrices; in_proj_qkvz, "
        "in_proj_ba with one for two of them, as in Qwen3-Next; or all-linear, all of peft's",
        needs="lora_rank",
    )
    lora_base_format: str | None = course_optional(
        "with --lora-rank, storage of the frozen weights of the linear layers: int8, eight bits with a "
        "BF16 scale per 64 numbers, rounded on loading (default: the model's own format)",
        choices=BASE_FORMATS,
    )
    lora_use_rslora: bool = course_switch(
        "scale adapters by alpha / sqrt(rank) instead of alpha / rank",
        needs="lora_rank",
    )

    def _check(self) -> None:
        check(
            self.on or self.lora_base_format is None,
            f"--lora-base-format {self.lora_base_format} is for the frozen weights of adapters: pass "
            "--lora-rank too, or leave it out",
        )
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
        both = [
            f"{whole} holds {part}"
            for whole, parts in MATRICES.items()
            for part in parts
            if whole in names and part in names and part != whole
        ]
        check(
            not both,
            f"--lora-target {self.lora_target}: {''.join(both[:1])}: leave one of them out",
        )
        rows = [row for name in names for row in IN_PROJ_PARTS.get(name, ())]
        check(
            len(set(rows)) == len(rows),
            f"--lora-target {self.lora_target} names rows of in_proj twice: in_proj_qkvz holds in_proj_qkv and in_proj_z, "
            "in_proj_ba holds in_proj_b and in_proj_a: leave one of them out",
        )
        check(
            ALL_LINEAR not in names or len(names) == 1,
            f"--lora-target {self.lora_target}: pass all-linear without other names",
        )

    @cached_property
    def on(self) -> bool:
        return self.lora_rank is not None

    @cached_property
    def base_in_int8(self) -> bool:
        """True if the frozen weights of linear layers are stored in eight bits."""
        return self.lora_base_format == INT8_BASE

    @cached_property
    def rank(self) -> int:
        assert self.lora_rank is not None
        return self.lora_rank

    @cached_property
    def scale(self) -> float:
        divisor = self.rank**0.5 if self.lora_use_rslora else self.rank
        return self.lora_alpha / divisor

    @cached_property
    def targets(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.lora_target.split(","))

    def parts(self, linear: str, model: ModelConfig) -> tuple[str, ...]:
        """Return the adapted matrices of a linear layer, none for layers that cannot be adapted."""
        if not self.on or linear not in MATRICES:
            return ()
        if linear not in (FC1, FC2) and linear not in model.mixer_linears:
            return ()
        names = _NAMES if self.targets == (ALL_LINEAR,) else self.targets
        if linear in names:
            return (linear,)
        if linear == FC1 and not model.gated:
            return (FC1,) if "up_proj" in names else ()
        return tuple(name for name in MATRICES[linear] if name in names)

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError if targets, dropout or rank do not fit the model's matrices."""
        if not self.on:
            return
        attention = ",".join(MATRICES[QKV] + MATRICES[PROJ])
        adapts_experts = model.num_experts and self.of_mlps(model)
        check(
            not self.lora_dropout or not adapts_experts,
            f"--lora-dropout {self.lora_dropout}: adapters of experts have no dropout, "
            f"as in peft: pass 0, or --lora-target {attention}",
        )
        check(
            model.gated or "gate_proj" not in self.targets,
            "--lora-target gate_proj: the MLP has no gate: leave it out, or pass --swiglu",
        )
        used = {
            name
            for linear in (FC1, FC2, *model.mixer_linears)
            for name in (ALL_LINEAR, linear, *MATRICES[linear])
        }
        unused = sorted({*self.targets} - used)
        check(
            not unused,
            f"--lora-target {','.join(unused[:1])}: no layer of the model has it: leave it out",
        )
        # Strengths and decays are one row a head, and adapters of any rank are peft's.
        names = [
            name
            for linear in MATRICES
            for name in self.parts(linear, model)
            if name not in ("in_proj_b", "in_proj_a", "in_proj_ba")
        ]
        for name, width in product(names, model.mlp_widths):
            rows, columns = shape(name, model, width)
            check(
                self.rank <= min(rows, columns),
                f"--lora-rank {self.rank} is larger than the smaller side of {name}, "
                f"{rows} x {columns}: lower it to {min(rows, columns)} or less",
            )

    def of_mlps(self, model: ModelConfig) -> bool:
        return bool(self.parts(FC1, model) or self.parts(FC2, model))


def shape(name: str, model: ModelConfig, f: int) -> tuple[int, int]:
    """Return (outputs, inputs) for the matrix `name`. f: width of the MLP or expert"""
    h = model.hidden_size
    keys = model.query_groups * model.kv_channels
    if name in IN_PROJ_PARTS:
        rows = sum(model.key_head_parts[part] for part in IN_PROJ_PARTS[name])
        return model.linear_num_key_heads * rows, h
    shapes = {
        **model.linear_shapes,
        FC1: (model.fc1_widths * f, h),
        FC2: (h, f),
        "k_proj": (keys, h),
        "v_proj": (keys, h),
        "gate_proj": (f, h),
        "up_proj": (f, h),
    }
    whole = next((linear for linear, names in MATRICES.items() if names == (name,)), name)
    return shapes[whole]
