"""What the experts of a run have to do: the tokens of each one and the balancing losses, gathered once an iteration.

Left out: where they are counted (`nn.router.Router`), the metrics of the log line (`logs.iteration`).
Legend: l layers of the model, e experts of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.grid import Groups
from ..config.run_config import ModelConfig, RunConfig
from ..logs.metrics import MetricsWriter
from ..nn.experts import Experts
from ..nn.model import Stage
from ..nn.router import Router

NAMED = 8  # experts without tokens that a line names


def routers(stage: Stage) -> dict[int, Router]:
    """Those of a stage, by the layer, from 0."""
    return {layer.layer - 1: layer.mlp.router for layer in stage.layers if isinstance(layer.mlp, Experts)}


def forget(stage: Stage) -> None:
    """Before an iteration: what was counted before belongs to none."""
    for router in routers(stage).values():
        router.loads.clear()


def gather(stage: Stage, run: RunConfig, groups: Groups, microbatches: int) -> Tensor | None:
    """(l, e + 2) of an iteration in FP64, on every rank: each expert's tokens, the balancing losses and the z-loss, both means over
    micro-batches; zeros in layers without experts. None for a model without. Collective.
    """
    model = run.model
    if model.num_experts is None:
        return None
    table = torch.zeros(model.num_layers, model.num_experts + 2, dtype=torch.float64)
    for layer, router in routers(stage).items():
        table[layer] = router.take_load()
    if run.parallel.sequence_parallel:  # a rank has routed its part of the sequence
        groups.tp.all_reduce(table)
    groups.dp.all_reduce(table)
    groups.pp.all_reduce(table)
    table[:, -2:] /= microbatches * groups.dp.size
    return table


class ExpertWatch:
    """The tokens of every expert since the last report, (layers with experts, e). ep: ranks that have different experts."""

    def __init__(self, model: ModelConfig, ep: int = 1) -> None:
        self.model, self.ep = model, ep
        self.layers = [layer for layer, mlp in enumerate(model.mlps) if mlp == "experts"]
        self.tokens = torch.zeros(len(self.layers), model.num_experts or 0, dtype=torch.float64)

    def add(self, table: Tensor) -> dict[str, Any]:
        """Count an iteration's table (l, e + 2); returns its values for `logs.iteration.IterationMetrics`."""
        own = table[self.layers]
        counts = own[:, :-2]
        self.tokens += counts
        values = {"largest_load": (counts.amax(1) / counts.mean(1)).max().item()}
        if self.model.balances:
            values["load_balancing_loss"] = own[:, -2].mean().item()
        if self.model.moe_z_loss_coeff:
            values["router_z_loss"] = own[:, -1].mean().item()
        return values

    def report(self, writer: MetricsWriter, iteration: int) -> None:
        """Keep every expert's load since the last report in the history, and print the extremes and experts without a token."""
        loads = self.tokens / self.tokens.mean(1, keepdim=True)
        writer.keep("experts", iteration, layers=self.layers, loads=[[round(x, 3) for x in row] for row in loads.tolist()])
        most, least = (self._named(index) + f" {loads.flatten()[index].item():.2f}" for index in (loads.argmax(), loads.argmin()))
        writer.print(f"load of the experts, 1 being the mean: {most} at most, {least} at least" + self._ranks())
        idle = (self.tokens == 0).flatten().nonzero().flatten()
        if len(idle):
            named = ", ".join(map(self._named, idle[:NAMED])) + (f" and {len(idle) - NAMED} more" if len(idle) > NAMED else "")
            writer.event(iteration, f"without a token since the last report: {named}: raise "
                         "--moe-aux-loss-coeff, or pass --moe-router-enable-expert-bias")
        self.tokens.zero_()

    def _ranks(self) -> str:
        """What the fullest of the ranks with different experts computes, which the others wait for."""
        if self.ep == 1:
            return ""
        each = self.tokens.shape[1] // self.ep
        loads = self.tokens.view(len(self.layers), self.ep, each).sum((0, 2)) / self.tokens.sum() * self.ep
        first, load = int(loads.argmax()) * each, loads.max().item()
        return f"; the rank with experts {first} to {first + each - 1} computes {load:.2f} of the mean"

    def _named(self, index: Tensor) -> str:
        row, expert = divmod(int(index), self.tokens.shape[1])
        return f"expert {expert} of layer {self.layers[row]}"
