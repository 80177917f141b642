"""Log lines and files about expert load."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config.model import ModelConfig
from ...training.trainer import IterationResult
from ..export.metrics_writer import MetricsWriter
from ..observer import MetricValues, Observer

# Shapes: l layers of the model, e experts per layer.

IDLE_NAMED = 8  # idle experts named in a line


def _mean_tokens(counts: Tensor) -> Tensor:
    """Return the mean of counts (l, e) over experts, (l, 1); 1 if every token is padding."""
    mean = counts.mean(1, keepdim=True)
    return mean.masked_fill(mean == 0, 1.0)


class ExpertWatch(Observer):
    """Tokens of every expert since the last report, (layers with experts, e)."""

    def __init__(self, model: ModelConfig, writer: MetricsWriter, ep: int) -> None:
        self.model = model
        self.writer = writer
        self.ep = ep
        kinds = enumerate(model.all_layer_kinds)
        self.layers = [layer for layer, kind in kinds if kind.mlp == "experts"]
        self.tokens = torch.zeros(len(self.layers), model.num_experts or 0, dtype=torch.float64)

    def end(self, result: IterationResult) -> MetricValues:
        """Count tokens by expert; return the largest load, relative to the mean, and the losses."""
        if result.experts is None:
            return {}
        own = result.experts[self.layers]
        counts = own[:, :-2]
        self.tokens += counts
        values = {"largest_load": (counts.amax(1) / _mean_tokens(counts).flatten()).max().item()}
        if self.model.balances:
            values["load_balancing_loss"] = own[:, -2].mean().item()
        if self.model.moe_z_loss_coeff:
            values["router_z_loss"] = own[:, -1].mean().item()
        return values

    def report(self, iteration: int) -> None:
        """Log the loads since the last report and experts without tokens, then reset the counts."""
        loads = self.tokens / _mean_tokens(self.tokens)
        self.writer.record(
            "experts",
            iteration=iteration,
            layers=self.layers,
            loads=[[round(x, 3) for x in row] for row in loads.tolist()],
        )
        most = f"{self._named(loads.argmax())} {loads.max().item():.2f}"
        least = f"{self._named(loads.argmin())} {loads.min().item():.2f}"
        self.writer.print(
            f"load of the experts, 1 being the mean: {most} at most, {least} at least{self._ranks()}"
        )
        idle = (self.tokens == 0).flatten().nonzero().flatten()
        if len(idle):
            named = ", ".join(map(self._named, idle[:IDLE_NAMED]))
            if len(idle) > IDLE_NAMED:
                named += f" and {len(idle) - IDLE_NAMED} more"
            self.writer.event(
                iteration,
                f"without a token since the last report: {named}: raise "
                "--moe-aux-loss-coeff, or pass --moe-router-enable-expert-bias",
            )
        self.tokens.zero_()

    def _ranks(self) -> str:
        if self.ep == 1:
            return ""
        each = self.tokens.shape[1] // self.ep
        tokens = self.tokens.view(len(self.layers), self.ep, each).sum((0, 2))
        loads = tokens / self.tokens.sum().clamp(min=1) * self.ep
        first = int(loads.argmax()) * each
        load = loads.max().item()
        return (
            f"; the rank with experts {first} to {first + each - 1} computes {load:.2f} of the mean"
        )

    def _named(self, index: Tensor) -> str:
        row, expert = divmod(int(index), self.tokens.shape[1])
        return f"expert {expert} of layer {self.layers[row]}"
