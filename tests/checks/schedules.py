"""Costs of schedules."""

from fugaku_megatron.pipeline.placement import SplitCosts, VirtualStageCosts


def part_costs(parts: int, each: SplitCosts, head: int = 0) -> VirtualStageCosts:
    """Return costs of virtual stages. head: added to F of the last one."""
    return *(each,) * (parts - 1), (each[0] + head, *each[1:])
