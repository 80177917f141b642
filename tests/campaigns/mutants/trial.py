"""Check of one program, original or mutant, in a process of its own."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

LAYOUTS = {
    "tp2 pp2 dp2 sequence overlap": {"global_batch_size": 8},
    "tp2 dp2 ep2 sequence zero": {
        "num_experts": 4,
        "moe_layer_freq": "([0]+[1]*3)",
        "moe_aux_loss_coeff": (0.01,),
        "disable_bias_linear": True,
        "swiglu": True,
    },
    "cp2 p2p dp2": {"untie_embeddings_and_output_weights": True},
    "tp2 pp2 zbv full": {"global_batch_size": 8},
}
WAIT = 30.0  # s that a rank waits for others before the mutant counts as hung
# Kinds of results.
NAMED = "named"
STOPPED = "stopped"
ALIKE = "alike"
NO_EFFECT = "no effect"


class Result(NamedTuple):
    """Result of a trial. text: the report's line, or the error"""

    kind: str
    text: str


def check_all(folder: Path, against: Path | None, record: Path | None) -> Result | None:
    """Check every layout; return the first layout's difference or error, or None if all agree.

    folder: contains the package
    against, record: folders with a record for each layout
    """
    sys.path.insert(0, str(folder))
    import torch

    import fugaku_megatron
    from fugaku_megatron.config.layout import Layout
    from fugaku_megatron.layout_check.check import Files, Tools, check_layout
    from fugaku_megatron.run.check_layout import connect, small_ops
    from tests.helpers import DROPOUT, lay_out
    from tests.threads import ThreadWorld

    assert fugaku_megatron.__file__.startswith(str(folder)), fugaku_megatron.__file__
    torch.set_num_threads(1)
    for number, (layout, flags) in enumerate(LAYOUTS.items()):
        run, ranks = lay_out(layout, {**DROPOUT, **flags})
        files = Files(
            record=record and record / str(number), against=against and against / str(number)
        )

        def check(world: Any, run: Any = run, files: Any = files) -> Any:
            layout = Layout.from_run(run, world.size)
            return check_layout(run, layout, world, Tools(small_ops, connect), files)

        report = ThreadWorld(ranks, timeout=WAIT).run(check)[0]
        if not report.agrees:
            return Result(NAMED, f"{layout}: {report.lines[-1]}")
    return None


def reached_functions(folder: Path, record: Path) -> dict[str, set[int]]:
    """Record the original's tensors; return the first lines of the functions that the layouts call, by file."""
    reached: dict[str, set[int]] = {}
    package = str(folder / "fugaku_megatron")

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            reached.setdefault(code.co_filename[len(package) + 1 :], set()).add(code.co_firstlineno)

    threading.setprofile(profile)
    try:
        wrong = check_all(folder, against=None, record=record)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]  # Python before 3.12 declares no None
    assert wrong is None, wrong
    return reached


def try_mutant(folder: Path, record: Path) -> Result:
    """Return how the check finds a mutant."""
    try:
        found = check_all(folder, against=None, record=None)
        if found is not None:
            return found
        found = check_all(folder, against=record, record=None)
    except BaseException as error:
        text = next(iter(str(error).splitlines()), "")
        return Result(STOPPED, f"{type(error).__name__}: {text:.200}")
    return Result(NO_EFFECT, "") if found is None else Result(ALIKE, found.text)
