"""Loss curves of small runs that later versions must repeat: python -m tests.recorded.curves [--write] [--png FILE]

--write computes them with the portable kernels, whose sums have the same order on every CPU, and writes curves.json: losses of every
fifth iteration as hexadecimal numbers, and by how much other kernels may differ from them, which is MARGIN times the difference of
this machine's. --png draws the recorded curves next to those of this machine's kernels.

A curve's text is the licence of this project, in bytes; its paragraphs are the documents, and the odd ones answers of chats.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.data.chat.chat_files import ChatWriter, signed
from fugaku_megatron.data.indexed import IndexedDatasetWriter
from fugaku_megatron.host import kernels
from tests.checks.library_and_command import command_line
from tests.threads import ThreadWorld

RECORD = Path(__file__).with_name("curves.json")
LICENCE = Path(__file__).parents[2] / "LICENSE"
PORTABLE = "portable"
ITERATIONS = 100
BASE_ITERATIONS = 20  # of the weights under adapters
EVERY = 5  # iterations from one recorded loss to the next
END = 127  # token of the end of a document
MARGIN = 4
LEAST = 5e-4  # of the largest relative difference
Losses = list[float]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 128 --make-vocab-size-divisible-by 8 "
    "--tokenizer-type NullTokenizer --split 100,0,0 --eval-iters 0 --micro-batch-size 4 --global-batch-size 8 --lr 1e-2 "
    "--min-lr 1e-3 --lr-decay-style cosine --weight-decay 0.1 --hidden-dropout 0.1 --attention-dropout 0.0 --log-interval 100 "
    f"--kernels native --audit-interval 0 --train-iters {ITERATIONS}"
)
LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.01"
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 16 --linear-value-head-dim 16 "
    "--linear-num-key-heads 2 --linear-num-value-heads 2 --linear-conv-kernel-dim 4"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 "
    "--rope-type rope"
)
LORA = "--lora-rank 4"
# name -> ranks, flags
CURVES = {
    "dense": (1, ""),
    "experts": (1, f"{LLAMA} {EXPERTS}"),
    "delta net": (1, f"{LLAMA} {DELTA}"),
    "latent attention": (1, f"{LLAMA} {LATENT}"),
    "documents": (1, "--reset-position-ids --reset-attention-mask --eod-mask-loss"),
    "chats": (1, f"{LLAMA} --sft"),
    "LoRA": (1, LORA),
    "INT8": (1, f"{LLAMA} --int8 --bf16"),
    "BF16": (1, "--bf16"),
    "Muon": (1, "--optimizer muon"),
    "TP 2 x PP 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "DP 2, ZeRO-1": (2, "--use-distributed-optimizer --overlap-grad-reduce"),
}
# Their weights depend on functions of PyTorch, a router's softmax and the exponentials of decays, whose bits depend on a CPU's vectors.
OF_TORCH = ("experts", "delta net")


def write_data(folder: Path) -> None:
    """Write the licence as `text`, and as chats `chats`."""
    paragraphs = [part.encode() for part in LICENCE.read_text().split("\n\n")]
    with IndexedDatasetWriter(folder / "text", np.uint16) as text:
        for part in paragraphs:
            text.add_document(np.array([*part, END]))
    with ChatWriter(folder / "chats", "<u2") as chats:
        for question, answer in zip(paragraphs[::2], paragraphs[1::2], strict=False):
            ids = np.array([*question[:8], *answer[:24]])
            chats.add_document(signed(ids, np.arange(len(ids)) >= len(question[:8])))


def words_of_base(data: Path) -> str:
    """Return the flags of the run that trains the weights under adapters."""
    return f"{MODEL} --data-path {data} --train-iters {BASE_ITERATIONS}"


def curve(name: str, folder: Path, more: str = "") -> Losses:
    """Return every fifth loss of a run with the data in `folder` and the kernels in use. more: flags"""
    torch.set_num_threads(1)
    ranks, flags = CURVES[name]
    data = folder / ("chats" if "--sft" in flags else "text")
    words = f"{MODEL} {flags} --data-path {data} {more}"
    with contextlib.redirect_stdout(io.StringIO()):
        if flags == LORA:
            base = folder / "base"
            command_line(SoloComm(), f"{words_of_base(data)} --save {base}".split())
            words += f" --pretrained-checkpoint {base}"
        found = ThreadWorld(ranks).run(command_line, words.split())[0]
    losses = found[::2]  # and gradient norms between them
    return losses[EVERY - 1 :: EVERY]


class Curve(NamedTuple):
    """Recorded losses. tolerance: relative, of other kernels"""

    losses: Losses
    tolerance: float


def recorded() -> dict[str, Curve]:
    """Return the recorded curves by name."""
    return {
        name: Curve([float.fromhex(text) for text in row["losses"]], row["tolerance"])
        for name, row in json.loads(RECORD.read_text()).items()
    }


def difference(losses: Losses, expected: Losses) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))


def curves(target: str) -> Iterator[tuple[str, Losses]]:
    """Yield all curves with a target's kernels."""
    with tempfile.TemporaryDirectory() as place, kernels.target(target):
        write_data(Path(place))
        for name in CURVES:
            losses = curve(name, Path(place))
            print(f"{name}: {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
            yield name, losses


def draw(path: Path) -> None:
    """Draw the recorded curves, and those of this machine's kernels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    places = figure.subplots(3, 4)
    before = recorded()
    iterations = range(EVERY, ITERATIONS + 1, EVERY)
    for place, (name, losses) in zip(places.flat, curves(kernels.active()), strict=True):
        place.plot(iterations, before[name].losses, linewidth=4, alpha=0.4, label="recorded")
        place.plot(iterations, losses, label=kernels.active())
        place.set_title(name)
    places.flat[0].legend()
    figure.savefig(path)


def main() -> None:
    """Write or draw."""
    parser = Parser(prog="python -m tests.recorded.curves", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write curves.json")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw all curves")
    options: argparse.Namespace = parser.parse_args()
    if options.write:
        others = dict(curves(kernels.active()))
        rows = {}
        for name, losses in curves(PORTABLE):
            tolerance = max(LEAST, MARGIN * difference(others[name], losses))
            texts = [loss.hex() for loss in losses]
            rows[name] = {"tolerance": float(f"{tolerance:.1e}"), "losses": texts}
        RECORD.write_text(json.dumps(rows, indent=1) + "\n")
    if options.png:
        draw(options.png)


if __name__ == "__main__":
    main()
