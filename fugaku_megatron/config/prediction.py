"""Fields of multi-token prediction (MTP), DeepSeek-V3's modules that predict further tokens (arXiv:2412.19437, section 2.2).

Names, meaning and limits follow Megatron-LM (megatron/core/transformer/multi_token_prediction.py,
megatron/training/arguments.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from .fields import (
    NOT_NEGATIVE,
    SAME,
    check,
    course_option,
    weight_optional,
)
from .rows import NO_POSITIONS, ROPE

MAX_MODULES = 4  # the log has a column for the loss of each


@dataclass(frozen=True, kw_only=True)
class PredictionFields:
    """Flags of the MTP modules behind the last layer."""

    mtp_num_layers: int | None = weight_optional(
        "MTP modules behind the last layer: module k predicts the token k + 1 places ahead, with a layer of its own and the "
        "model's embedding and head; in training alone (default: none)",
        maximum=MAX_MODULES,
        megatron=SAME,
        part_of="all_layer_kinds",
    )
    mtp_loss_scaling_factor: float = course_option(
        0.1,
        "factor of the MTP modules' mean loss, which is added to the training loss",
        needs="mtp_num_layers",
        range=NOT_NEGATIVE,
        megatron=SAME,
    )

    @property
    def predictions(self) -> int:
        """Number of MTP modules."""
        return self.mtp_num_layers or 0

    def _check_predictions(
        self, seq_length: int, position_embedding_type: str, layer_types: str | None
    ) -> None:
        given = f"--mtp-num-layers {self.mtp_num_layers}"
        if not self.mtp_num_layers:
            return
        check(
            self.mtp_num_layers < seq_length,
            f"{given} is not below --seq-length {seq_length}, so that no token is left to predict: lower it",
        )
        check(
            position_embedding_type in (ROPE, NO_POSITIONS),
            f"{given} is not supported with --position-embedding-type {position_embedding_type}: "
            f"pass {ROPE} or {NO_POSITIONS}",
        )
        check(
            layer_types is None,
            f"{given} is for layers with an attention and an MLP: leave out --layer-types and "
            "--hybrid-layer-pattern",
        )
