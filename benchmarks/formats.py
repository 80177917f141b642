"""Losses and gradients of one model in several formats of its matmuls, on real text: what INT8 costs in accuracy.

    make train; python -m benchmarks formats --png formats.png

The model has 10.6 M parameters in its layers: 6 of 384 columns. Each format trains it with each seed, on one rank in a process of
its own, with the same samples in the same order. Then the gradients of every format are computed at the weights that FP32 training
reached, and compared with those of plain PyTorch in FP64 (plain_gpt.py). Needs matplotlib for --png.
Left out: the speed of formats (gemm.py, step.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.cli.output_files import picture
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.config.fields import check
from fugaku_megatron.costs.sizes import padded_vocab_size
from fugaku_megatron.costs.stages import model_parameters
from fugaku_megatron.data.sampler import micro_batches
from fugaku_megatron.text.table import Column

from . import child, core, shapes
from .plain_gpt import PlainGPT

FP32 = "fp32"
BF16 = "bf16"
FORMATS: dict[str, dict[str, Any]] = {
    FP32: {},
    BF16: {"bf16": True},
    "int8": {"bf16": True, "int8": True},
    "int8-wgrad": {"bf16": True, "int8": True, "int8_wgrad": True},
    "stochastic": {
        "bf16": True,
        "int8": True,
        "int8_wgrad": True,
        "int8_stochastic_rounding": True,
    },
}
MODEL: dict[str, Any] = {"num_layers": 6, "hidden_size": 384, "num_attention_heads": 6}
LOSSES: tuple[Column, ...] = (
    ("format", "<12", "format"),
    ("validation loss", ">16.4f", "loss"),
    ("of each seed", "<32", "losses"),
    ("to BF16, %", ">11.2f", "difference_percent"),
)
ERRORS: tuple[Column, ...] = (
    ("gradient of", "<12", "parameter"),
    *((name, ">11.1e", name) for name in FORMATS),
)
# Weights whose gradients are compared, by the names of their matmuls.
MATMULS = {
    "qkv": "self_attention.linear_qkv.weight",
    "projection": "self_attention.linear_proj.weight",
    "fc1": "mlp.linear_fc1.weight",
    "fc2": "mlp.linear_fc2.weight",
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """Work of a process: a training, or gradients at the weights in `checkpoint`, which a training writes unless it is empty.

    values: fields of the run.
    """

    format: str
    values: dict[str, Any]
    gradients: bool = False
    checkpoint: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this family."""
    parser.add_argument(
        "--data-path",
        default="demo/corpus_text_document",
        help="prefix of the tokens' .bin and .idx (default: %(default)s, of `make train`)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=320,
        help="of the tokens' tokenizer (default: %(default)s)",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        default=[FP32, BF16, "int8", "int8-wgrad"],
        choices=FORMATS,
        help="stochastic: int8-wgrad with random rounding (default: all others)",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--train-iters", type=int, default=3000)
    parser.add_argument("--global-batch-size", type=int, default=4, help="samples of 128 tokens")
    parser.add_argument("--evaluations", type=int, default=12)
    parser.add_argument("--eval-iters", type=int, default=50, help="batches of an evaluation")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate, decayed to a tenth")
    parser.add_argument("--num-layers", type=int, default=MODEL["num_layers"])
    parser.add_argument(
        "--at-once", type=int, default=1, help="processes at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of a process (default: %(default)s)"
    )


def values_of(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the fields of the run without its format."""
    return {
        **MODEL,
        "num_layers": options.num_layers,
        "vocab_size": options.vocab_size,
        "mask_vocab_padding": "no",  # as in `exact_gradients`
        "data_path": (options.data_path,),
        "micro_batch_size": options.global_batch_size,
        "global_batch_size": options.global_batch_size,
        "train_iters": options.train_iters,
        "lr": options.lr,
        "min_lr": options.lr / 10,
        "seed": seed,
        "eval_iters": options.eval_iters,
        "eval_interval": max(1, options.train_iters // options.evaluations),
        "kernels": "native",
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the curves of every format and seed, and the errors of gradients. RuntimeError when a process fails."""
    data = Path(f"{options.data_path}.idx")
    check(
        data.exists(),
        f"--data-path {options.data_path}: {data} does not exist: run make train first",
    )
    check(BF16 in options.formats, "--formats: bf16 is what the others are compared with: add it")
    first = options.seeds[0]
    run = make_run("demo", values_of(options, first))

    def values(name: str, seed: int) -> dict[str, Any]:
        return {**values_of(options, seed), **FORMATS[name]}

    with tempfile.TemporaryDirectory() as folder:
        trainings = [
            Task(
                format=name,
                values=values(name, seed),
                checkpoint=folder if (name, seed) == (options.formats[0], first) else "",
            )
            for name in options.formats
            for seed in options.seeds
        ]
        with ThreadPoolExecutor(options.at_once) as pool:
            curves = list(pool.map(lambda task: run_task(task, options.threads), trainings))
            gradients = [
                Task(format=name, values=values(name, first), gradients=True, checkpoint=folder)
                for name in options.formats
            ]
            errors = list(pool.map(lambda task: run_task(task, options.threads), gradients))
    runs = [
        {"format": task.format, "seed": task.values["seed"], "curve": curve}
        for task, curve in zip(trainings, curves, strict=True)
    ]
    return {
        "runs": runs,
        "losses": summary(runs, options.formats),
        "gradients": by_parameter(errors, options.formats),
        "layers": dict(zip(options.formats, errors, strict=True)),
        "parameters": model_parameters(run),
        "tokens": options.global_batch_size * run.model.seq_length,
    }


def run_task(task: Task, threads: int) -> list[dict[str, Any]]:
    """Run a task in its own process; print and return its records."""
    name = f"{task.format}, seed {task.values['seed']}"
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    records = []
    with child.Child(child.python("formats", asdict(task)), environment, name) as process:
        for record in process.records():
            records.append(record)
            line = ", ".join(f"{key} {value}" for key, value in record.items())
            print(f"{name}: {line}", flush=True)
    return records


def summary(runs: Sequence[dict[str, Any]], formats: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row of final validation losses for each format, compared with BF16's, seed by seed."""
    last = {(run["format"], run["seed"]): run["curve"][-1]["valid_loss"] for run in runs}
    rows = []
    for name in formats:
        losses = {seed: loss for (each, seed), loss in last.items() if each == name}
        differences = [100 * (loss / last[BF16, seed] - 1) for seed, loss in losses.items()]
        rows.append(
            {
                "format": name,
                "loss": statistics.fmean(losses.values()),
                "losses": " ".join(f"{loss:.4f}" for loss in losses.values()),
                "difference_percent": statistics.fmean(differences),
                "most_percent": max(map(abs, differences)),
            }
        )
    return rows


def by_parameter(
    errors: Sequence[Sequence[dict[str, Any]]], formats: Sequence[str]
) -> list[dict[str, Any]]:
    """Return a row for each kind of matmul: the mean over layers of the relative error in each format."""
    rows = []
    for matmul in MATMULS:
        row: dict[str, Any] = {"parameter": matmul}
        for name, records in zip(formats, errors, strict=True):
            found = [record["error"] for record in records if record["matmul"] == matmul]
            row[name] = statistics.fmean(found)
        rows.append(row)
    return rows


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return both tables."""
    errors = [column for column in ERRORS if column[2] in ("parameter", *options.formats)]
    return (
        f"{core.table(LOSSES, result['losses'])}\n\n{core.table(errors, result['gradients'])}\n"
        f"{result['parameters']} parameters, {options.train_iters} iterations of {result['tokens']} tokens, "
        f"{len(options.seeds)} seeds; gradients: Frobenius norm of the difference from FP64 relative to FP64's, mean over "
        f"layers; measured, {result['cpu']}"
    )


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw validation losses, their differences from BF16's and the gradients' errors by layer.

    A curve of losses is the mean over seeds; differences have a line for each seed. ValueError if
    `path` cannot be written.
    """
    names = list(dict.fromkeys(run["format"] for run in result["runs"]))
    colors = {name: f"C{number}" for number, name in enumerate(names)}
    with picture(path, 14, 4.2, dpi=100) as figure:
        losses, differences, errors = figure.subplots(1, 3)
        draw_losses(losses, result["runs"], colors)
        draw_differences(differences, result["runs"], colors)
        draw_gradient_errors(errors, result["layers"], colors)
        for axes in (losses, differences, errors):
            axes.grid(alpha=0.3)
        figure.suptitle(
            f"{result['parameters'] / 1e6:.1f} M parameters, measured, {result['cpu']}",
            fontsize="medium",
        )


def draw_losses(axes: Any, runs: Sequence[dict[str, Any]], colors: dict[str, str]) -> None:
    iterations = sorted(set.intersection(*(set(valid_losses(run)) for run in runs)))
    for name, color in colors.items():
        curves = [valid_losses(run) for run in runs if run["format"] == name]
        means = [statistics.fmean(curve[at] for curve in curves) for at in iterations]
        axes.plot(iterations, means, color=color, linewidth=0.9, label=name)
    axes.set(xlabel="iteration", ylabel="validation loss, mean over seeds")
    axes.legend(fontsize="small")


def draw_differences(axes: Any, runs: Sequence[dict[str, Any]], colors: dict[str, str]) -> None:
    """Draw each seed's loss over BF16's, in per cent."""
    baselines = {run["seed"]: valid_losses(run) for run in runs if run["format"] == BF16}
    for run in runs:
        if run["format"] == BF16:
            continue
        curve = valid_losses(run)
        baseline = baselines[run["seed"]]
        iterations = [at for at in curve if at in baseline]
        percent = [100 * (curve[at] / baseline[at] - 1) for at in iterations]
        axes.plot(iterations, percent, color=colors[run["format"]], linewidth=0.8)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="iteration", ylabel="difference from BF16's loss, %, each seed")


def draw_gradient_errors(
    axes: Any, layers: dict[str, list[dict[str, Any]]], colors: dict[str, str]
) -> None:
    """Draw the errors of weight gradients by layer."""
    for name, records in layers.items():
        for style, matmul in zip(("-", "--", "-.", ":"), MATMULS, strict=True):
            found = [record for record in records if record["matmul"] == matmul]
            axes.plot(
                [record["layer"] for record in found],
                [record["error"] for record in found],
                style,
                color=colors[name],
                label=f"{name} {matmul}",
            )
    axes.set(xlabel="layer", ylabel="relative error of the weight gradient", yscale="log")
    axes.legend(fontsize="xx-small", ncols=2)


def valid_losses(run: dict[str, Any]) -> dict[int, float]:
    """Return the validation loss by iteration."""
    return {point["iteration"]: point["valid_loss"] for point in run["curve"]}


# The process ----------------------------------------------------------------------------------------------------------------------


def trained(trainer: Any, task: Task) -> Iterator[dict[str, Any]]:
    """Train to the end; yield a record at each evaluation, with the mean training loss since the one before."""
    training = trainer.run.training
    start = time.perf_counter()
    losses = []
    for iteration in range(1, training.train_iters + 1):
        losses.append(trainer.train_step().loss)
        if iteration % training.eval_interval == 0 or iteration == training.train_iters:
            yield {
                "iteration": iteration,
                "train_loss": statistics.fmean(losses),
                "valid_loss": trainer.evaluate(trainer.valid, 0, training.eval_iters),
                "seconds": round(time.perf_counter() - start, 1),
            }
            losses.clear()
    if task.checkpoint:
        trainer.save(task.checkpoint)


def gradient_errors(trainer: Any, task: Task) -> Iterator[dict[str, Any]]:
    """Yield a record for each matmul's weight: the error of its gradient over one batch, relative to that in FP64."""
    trainer.load(task.checkpoint, weights_only=True)
    exact = exact_gradients(trainer)
    found = {}

    def keep(_: int, loss: float) -> float:
        found.update((p.spec.name, p.main_grad.double()) for p in trainer.stage.parameters())
        return loss

    trainer.before_update = keep
    trainer.train_step()
    for layer in range(trainer.run.model.num_layers):
        for matmul, name in MATMULS.items():
            full = f"decoder.layers.{layer}.{name}"
            difference = found[full].view(exact[full].shape) - exact[full]
            error = difference.norm() / exact[full].norm()
            yield {"layer": layer, "matmul": matmul, "error": float(error)}


def exact_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the first batch's mean loss by plain PyTorch in FP64, at the trainer's weights."""
    run = trainer.run
    model = PlainGPT(run.model, padded_vocab_size(run.model, 1)).double()
    weights = {p.spec.name: p for p in trainer.stage.parameters()}
    with torch.no_grad():
        model.take(lambda name: weights[name].double())
    size = run.batch.global_batch_size
    samples = next(micro_batches(trainer.train, 0, lambda _: size, size, 0, 1))
    tokens = torch.from_numpy(samples).t()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def main(order: dict[str, Any], answer: child.Answer) -> None:
    """Run the process's own end of the pipe."""
    task = Task(**order)
    run = shapes.run_from_json("demo", task.values)
    world = SoloComm()
    trainer = shapes.trainer_of(run, world, Grid(1).groups(world))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    work = gradient_errors if task.gradients else trained
    for record in work(trainer, task):
        answer(record)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main(*child.order())
