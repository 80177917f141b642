"""A row in the format of the published A64FX tables (document 002): one home for its columns and number formats."""

from __future__ import annotations

from dataclasses import dataclass

from . import iteration


def header() -> tuple[str, ...]:
    """The printed columns of the tables of document 002."""
    return ("Nodes", "Freq", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Est. Aggr. PetaFLOPs", "Notes")


def size_name(parameters: int) -> str:
    """124M, 1.3B, 30B."""
    unit, letter = (10**9, "B") if parameters >= 10**9 else (10**6, "M")
    return f"{parameters / unit:.{0 if parameters >= 10 * unit else 1}f}{letter}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def seconds_text(value: float | None) -> str:
    """Seconds as the tables print them, with more decimals for small models: four below 0.1, two below 100, else one."""
    return _or_dash(value, ".1f" if value and value >= 100 else ".2f" if value is None or value >= 0.1 else ".4f")


def rate_text(value: float | None) -> str:
    """TFLOPs as the log prints them, which is as the tables do; "-" when unknown."""
    return "-" if value is None else iteration.rate_text(value)


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One run; None is printed as "-". seconds are per iteration, tflops per rank, memory_mib is the largest rank's."""

    nodes: int | None
    ranks: int | None
    ghz: float | None
    size: str
    dp: int | None
    tp: int | None
    pp: int | None
    mbs: int | None
    gbs: int | None
    memory_mib: float | None
    seconds: float | None
    tflops: float | None
    notes: str = "-"

    @property
    def petaflops(self) -> float | None:
        """PFLOPs of all ranks, TFLOPs x ranks / 1024 as in the tables (which have one rank per node)."""
        return None if self.tflops is None or self.ranks is None else self.tflops * self.ranks / 1024

    def cells(self) -> tuple[str, ...]:
        """The cells under header()."""
        ghz, mib = (_or_dash(value, ".1f") + (unit if value is not None else "")
                    for value, unit in ((self.ghz, "GHz"), (self.memory_mib, " MiB")))
        layout = (_or_dash(value, "d") for value in (self.dp, self.tp, self.pp, self.mbs, self.gbs))
        return (_or_dash(self.nodes, "d"), ghz, self.size, *layout, mib, seconds_text(self.seconds), rate_text(self.tflops),
                _or_dash(self.petaflops, ".4f"), self.notes)


# The printed title of a column -> the column's name here.
HEADERS = {
    "Nodes": "nodes", "GPUs": "gpus", "Ranks per node": "ranks_per_node", "Freq": "freq", "Size": "size", "Layers": "layers",
    "hidden-size": "hidden",
    "NHIDDEN": "hidden", "num-attention-heads": "heads", "NHEADS": "heads", "ZS": "zero", "async": "async", "DP": "dp", "TP": "tp",
    "MP": "tp", "PP": "pp", "MBS": "mbs", "GBS": "gbs", "AC": "ac", "Mem": "mem", "Sec/it": "seconds", "TFLOPs": "tflops",
    "TFLOPs*": "tflops", "Est. Aggr. PetaFLOPs": "petaflops", "Notes": "notes",
}
