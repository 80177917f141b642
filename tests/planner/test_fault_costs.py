"""Costs of faults and copies: from a run's hours.jsonl, and from bytes and rates."""

import json
import shlex

import pytest

from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.config.faults import AUDIT_INTERVAL
from fugaku_megatron.costs.stages import model_parameters
from fugaku_megatron.observe.export import spans
from fugaku_megatron.observe.export.hours import HOURS
from fugaku_megatron.planner import plan, search
from fugaku_megatron.planner.fault_costs import (
    ASYNC,
    BEGIN,
    COMPARED,
    COPY,
    LOCAL,
    MEMORY,
    SAVE,
    checkpoint_bytes,
    file_system_rate,
    measured,
    modelled,
    read_history,
)
from fugaku_megatron.planner.fault_model import NODE, PROCESS
from fugaku_megatron.planner.predict import run_of, system_of

pytestmark = pytest.mark.unit

LAYOUT_30B = (
    "plan --recipe 30b --nodes 384 --ranks-per-node 2 --micro-batch-size 1 --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 4 --zero-stage 1 --pipeline-schedule 1f1b"
)


def best_plan(command=LAYOUT_30B):
    parser = Parser(prog="plan")
    plan.add_arguments(parser)
    args = parser.parse_args(shlex.split(command)[1:])
    system = system_of(args)
    run = run_of(args, system, {"micro_batch_size": 1})
    return search.search(run, system, search.held_fields(args)).plans[0]


def test_modelled_seconds_are_bytes_over_rates():
    found = best_plan()
    whole = 12 * model_parameters(found.run)  # weights and two moments in FP32
    assert checkpoint_bytes(found.run) == whole
    machine = found.system.machine
    rate = file_system_rate(found.system, None)
    assert rate == 384 * machine.node_storage_gbs < machine.file_system_gbs
    costs = modelled(found, rate)
    assert costs.load[SAVE] == costs.delay[ASYNC] == whole / rate / 1e9
    assert costs.wait[SAVE] == BEGIN + costs.load[SAVE]
    assert costs.load[LOCAL] == pytest.approx(whole / 384 / machine.node_storage_gbs / 1e9)
    assert costs.wait[ASYNC] < costs.wait[LOCAL]
    assert costs.load[MEMORY] == pytest.approx(whole / 384 / machine.link_gbs / 1e9)
    assert costs.delay[MEMORY] == found.seconds  # an iteration is longer than the message
    assert costs.detect[NODE] == 10 * found.seconds > costs.detect[PROCESS]
    assert costs.besides == 1 / AUDIT_INTERVAL + COMPARED and not costs.measured
    assert modelled(found, 2 * rate).load[SAVE] == costs.load[SAVE] / 2
    without = best_plan(f"{LAYOUT_30B} --audit-interval 0")
    assert modelled(without, rate).besides == 0
    flags = [[each.flag for group in strategy for each in group] for strategy in costs.strategies()]
    assert flags == [[SAVE], [ASYNC], [MEMORY, ASYNC], [LOCAL, COPY]]


def test_moments_of_other_formats_are_saved_as_they_are_and_8_bits_as_fp32():
    parameters = model_parameters(best_plan().run)
    bf16 = f"{LAYOUT_30B} --bf16 --use-precision-aware-optimizer"
    for command, nbytes in (
        (f"{bf16} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 8),
        (f"{bf16} --exp-avg-dtype int8 --exp-avg-sq-dtype int8", 12),
    ):
        assert checkpoint_bytes(best_plan(command).run) == nbytes * parameters


def test_a_machine_without_a_rate_of_its_file_system_needs_the_flag():
    system = best_plan("plan --recipe demo --nodes 2 --machine epyc-2core").system
    with pytest.raises(ValueError, match="epyc-2core has no rate.*pass --file-system-gbs"):
        file_system_rate(system, None)
    assert file_system_rate(system, 3.0) == 3.0


def line(time, event, **values):
    return {"time": time, "event": event, **values}


def iterations(time, last, count, **seconds):
    named = {getattr(spans, name.upper()): value for name, value in seconds.items()}
    saves = int("save" in seconds)
    return line(time, "iterations", iteration=last, count=count, seconds=named, saves=saves)


# An iteration takes 2 s. Two starts of 20 and 24 s, of which the second loads for 4 s. The first ends 3 s after the middle of
# the next log interval, and the second begins 5 s later.
HISTORY = [
    line(21, "start", begun=0, iteration=0, saving="save"),
    iterations(40, 10, 10, startup=18, iteration=20, first_iteration=2),
    iterations(60, 20, 10, iteration=20),
    iterations(86, 30, 10, iteration=20, save=6),
    line(99, "end", code=5),
    line(126, "start", begun=104, iteration=30, saving="save"),
    iterations(148, 40, 10, startup=20, load=4, iteration=20, first_iteration=2),
    iterations(176, 50, 10, iteration=20, save=7, audit=0),
]


def test_a_history_replaces_the_models_seconds(tmp_path):
    (tmp_path / HOURS).write_text("".join(json.dumps(each) + "\n" for each in HISTORY))
    model = modelled(best_plan(), 100.0)
    costs = measured(model, read_history(tmp_path))
    assert costs.iteration == 2
    assert costs.wait[SAVE] == pytest.approx(6.5) and costs.wait[ASYNC] == model.wait[ASYNC]
    assert costs.load[SAVE] == 4
    besides = 1 / 100  # the last line has a second without a cause
    assert costs.besides == pytest.approx(besides)
    assert costs.start == pytest.approx(20 - 20 * besides)
    assert costs.detect[PROCESS] == pytest.approx(13 - 10 * (1 + besides) + 5)
    assert costs.detect[NODE] == model.detect[NODE]
    sources = {meaning: source for _, source, meaning in costs.rows()}
    assert sources["training waits for a copy: --save"] == "measured"
    assert sources["training waits for a copy: --async-save"] == "model"


def test_copies_in_memory_are_measured_by_their_own_seconds(tmp_path):
    """An exchange that begins after one line may end after the next one."""
    begun = iterations(204, 60, 10, iteration=20, copy=2) | {"copies": 1}
    ended = iterations(226, 70, 10, iteration=20, copy_finalize=2) | {"copies": 0}
    text = [json.dumps(each) + "\n" for each in (*HISTORY, begun, ended)]
    (tmp_path / HOURS).write_text("".join(text))
    costs = measured(modelled(best_plan(), 100.0), read_history(tmp_path))
    assert costs.wait[MEMORY] == pytest.approx(4) and f"wait {MEMORY}" in costs.measured
    assert costs.wait[SAVE] == pytest.approx(6.5)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "there is no hours.jsonl in it"),
        ("", "has no iteration"),
        ("{]\n", "has no iteration"),
    ],
)
def test_a_directory_without_a_history_is_refused(content, message, tmp_path):
    if content is not None:
        (tmp_path / HOURS).write_text(content)
    with pytest.raises(ValueError, match=f"--costs-from .*{message}: pass the --save of a run"):
        read_history(tmp_path)
