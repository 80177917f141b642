"""`benchmarks formats` on a model of one layer: losses by format and seed, gradients against FP64, tables and the figure."""

from dataclasses import asdict

import numpy as np
import pytest

from benchmarks import formats
from fugaku_megatron.data.indexed import IndexedDatasetWriter
from tests.checks.benchmarks import options

pytestmark = pytest.mark.parallel

ITERATIONS = 4
SEEDS = (1, 2)
NAMES = ("fp32", "bf16", "int8-wgrad")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Options and the result that `formats.measure` returns, with every process's work done in this process."""
    folder = tmp_path_factory.mktemp("formats")
    prefix = folder / "text"
    with IndexedDatasetWriter(prefix, "<i4") as writer:
        for document in range(40):
            writer.add_document(np.arange(document, document + 280))
    command = (
        f"formats --data-path {prefix} --train-iters {ITERATIONS} --evaluations 2 --eval-iters 2 "
        f"--num-layers 1 --formats {' '.join(NAMES)} --seeds {' '.join(map(str, SEEDS))}"
    )
    chosen = options(command)

    def run_task(task, threads):
        records = []
        formats.main(asdict(task), records.append)
        return records

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(formats, "run_task", run_task)
        return chosen, {**formats.measure(chosen), "cpu": "a CPU"}


def test_every_format_and_seed_has_a_curve(study):
    _, result = study
    assert [(run["format"], run["seed"]) for run in result["runs"]] == [
        (name, seed) for name in NAMES for seed in SEEDS
    ]
    for run in result["runs"]:
        assert [point["iteration"] for point in run["curve"]] == [2, 4]
    losses = {
        (run["format"], run["seed"]): run["curve"][-1]["valid_loss"] for run in result["runs"]
    }
    assert len(set(losses.values())) == len(losses)
    rows = {row["format"]: row for row in result["losses"]}
    assert rows["bf16"]["difference_percent"] == 0
    for name in NAMES:
        percent = [100 * (losses[name, seed] / losses["bf16", seed] - 1) for seed in SEEDS]
        assert rows[name]["difference_percent"] == pytest.approx(sum(percent) / len(percent))
        assert rows[name]["most_percent"] == pytest.approx(max(map(abs, percent)))
        assert rows[name]["most_percent"] < 0.5


def test_errors_of_gradients_order_the_formats(study):
    _, result = study
    assert [row["parameter"] for row in result["gradients"]] == list(formats.MATMULS)
    for row in result["gradients"]:
        assert row["fp32"] < 1e-5
        assert 1e-3 < row["bf16"] < 1e-2
        assert row["bf16"] < row["int8-wgrad"] < 5e-2


def test_tables_and_the_figure(study, tmp_path):
    chosen, result = study
    printed = formats.text(chosen, result)
    assert "int8-wgrad" in printed and "2 seeds" in printed and "a CPU" in printed
    pytest.importorskip("matplotlib")
    formats.draw(tmp_path / "formats.png", result)
    assert (tmp_path / "formats.png").read_bytes().startswith(b"\x89PNG")


def test_bf16_is_compared_with_and_the_data_must_exist(tmp_path):
    with pytest.raises(ValueError, match="--data-path .* does not exist: run make train first"):
        formats.measure(options(f"formats --data-path {tmp_path}/none"))
    (tmp_path / "a.idx").touch()
    with pytest.raises(ValueError, match="--formats: bf16 is what the others are compared with"):
        formats.measure(options(f"formats --data-path {tmp_path}/a --formats fp32"))
