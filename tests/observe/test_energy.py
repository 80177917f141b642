"""Energy counters: a mock /sys tree, a mock Power API, and their use in log, table and plot."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from fugaku_megatron.comm.agreement import find_nodes
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.host import machine
from fugaku_megatron.host.cpu_binding import CpuBinding
from fugaku_megatron.host.energy import Counter, Counters
from fugaku_megatron.observe.log import log_command, loss_plot
from fugaku_megatron.observe.log.iteration_metrics import IterationMetrics, parse_line
from fugaku_megatron.observe.log.run_log import RunLog
from fugaku_megatron.observe.resources.energy import EnergyWatch
from tests.threads import ThreadWorld

pytestmark = pytest.mark.unit

ABSENT = "libpwr_absent.so"


def zone(root, number, name, microjoules, wraps=262143328850):
    """Write a RAPL zone. energy_uj: None if this user may not read it"""
    folder = root / "sys" / "class" / "powercap" / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{wraps}\n")
    if microjoules is not None:
        (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def found(root):
    return Counters.find(str(root), ABSENT)


def test_packages_and_memory_add_up_and_cores_are_in_their_package(tmp_path):
    files = [
        zone(tmp_path, n, name, 1_000_000)
        for n, name in (
            ("0", "package-0"),
            ("0:0", "core"),
            ("0:1", "dram"),
            ("1", "package-1"),
            ("2", "psys"),
        )
    ]
    counters = found(tmp_path)
    assert counters.describe() == "energy from RAPL (package-0, dram, package-1)"
    for file in files:
        file.write_text("5_000_000".replace("_", ""))
    assert counters.joules() == pytest.approx(3 * 4.0) and counters.joules() == 0.0


def test_a_counter_that_wraps_around(tmp_path):
    file = zone(tmp_path, "0", "package-0", 65_000_000_000, wraps=65_532_610_987)
    counters = found(tmp_path)
    file.write_text("467389013")
    assert counters.joules() == pytest.approx(65_532.610987 - 65_000 + 467.389013)
    file.write_text("467389013")
    assert counters.joules() == 0.0


def test_amds_driver_serves_where_rapl_does_not(tmp_path):
    folder = tmp_path / "sys" / "class" / "hwmon" / "hwmon3"
    folder.mkdir(parents=True)
    for name, text in {
        "name": "amd_energy",
        "energy1_label": "Ecore000",
        "energy1_input": "7",
        "energy65_label": "Esocket0",
        "energy65_input": "2000000",
    }.items():
        (folder / name).write_text(text + "\n")
    counters = found(tmp_path)
    assert counters.describe() == "energy from amd_energy (Esocket0)"
    (folder / "energy65_input").write_text("4500000\n")
    assert counters.joules() == pytest.approx(2.5)
    zone(tmp_path, "0", "package-0", 1)
    assert found(tmp_path).source == "RAPL", "and not both, which measure the same"


def test_without_counters_the_start_says_so_once(tmp_path):
    assert found(tmp_path).describe() == "no energy counter" and found(tmp_path).joules() is None
    zone(tmp_path, "0", "package-0", None)
    assert (
        found(tmp_path).describe()
        == "no energy counter (RAPL cannot be read: chmod a+r its energy files as root)"
    )
    line = machine.summary(
        "MPICH", 2, ranks_on_node=1, binding=CpuBinding(2, ()), memory="glibc 2.28", ghz=2.0
    )
    assert ", no energy counter, torch " in line


def test_a_counter_that_fails_is_told_from_one_that_stands(tmp_path):
    file = zone(tmp_path, "0", "package-0", 5)
    counters = found(tmp_path)
    os.remove(file)
    assert counters.joules() is None


HEADER = """
#define PWR_RET_SUCCESS 0 /* all is well */
#define PWR_MAX (3 + 4)
typedef enum { PWR_CNTXT_DEFAULT, PWR_CNTXT_VENDOR = 0x10, PWR_CNTXT_FX1000 } PWR_CntxtType;
typedef enum PWR_Role { // who asks
    PWR_ROLE_NONE = -1, PWR_ROLE_APP, PWR_ROLE_MC, } PWR_Role;
enum attribute { PWR_ATTR_POWER = 5, PWR_ATTR_MEASURED_POWER = 40, PWR_ATTR_MEASURED_ENERGY, PWR_ATTR_LAST = PWR_ATTR_POWER };
"""
LIBRARY = """
#include <stdint.h>
static int context, node;
static double joules = 1000.0;
int PWR_CntxtInit(int type, int role, const char* name, void** result) {
  *result = &context;
  return type == 17 && role == 0 ? 0 : -1;
}
int PWR_CntxtGetObjByName(void* held, const char* name, void** result) {
  *result = &node;
  return held == &context && name[5] == 'n' ? 0 : -1;
}
int PWR_ObjAttrGetValue(void* object, int attribute, void* value, int64_t* stamp) {
  *(double*)value = joules += 150.0;
  return object == &node && attribute == 41 ? 0 : -4;
}
"""


@pytest.mark.system
def test_fugakus_power_api(tmp_path):
    (tmp_path / "pwr.h").write_text(HEADER)
    (tmp_path / "pwr.c").write_text(LIBRARY)
    library = str(tmp_path / "libpwr.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "pwr.c")], check=True)
    counters = Counters.find(
        str(tmp_path), library, (str(tmp_path / "none.h"), str(tmp_path / "pwr.h"))
    )
    assert counters.describe() == "energy from Power API (plat.node)"
    assert counters.joules() is None and counters.joules() == pytest.approx(150.0)
    lacking = Counters.find(str(tmp_path), library, (str(tmp_path / "none.h"),)).describe()
    assert (
        lacking.startswith(f"no energy counter ({library} is there, but none of ")
        and "has its constants" in lacking
    )


def counting(joules):
    """Return counters that use `joules` between two readings."""
    readings = iter(range(1000))
    return Counters("test", [Counter("package-0", lambda: joules * next(readings))])


def test_watts_of_all_nodes(tmp_path):
    def work(world):
        nodes = find_nodes(world, "a" if world.rank < 2 else "b")
        watch = EnergyWatch(world, nodes, counting(30.0 if world.rank < 2 else 50.0))
        for _ in range(3):
            watch.begin()
            watch.end(SimpleNamespace(seconds=2.0))
        return [watch.finish_interval(3)["watts"] for _ in range(2)]

    assert ThreadWorld(4).run(work) == [[pytest.approx((30 + 50) / 2), None]] * 4


def test_watts_need_a_counter_of_every_node():
    def work(world):
        nodes = find_nodes(world, str(world.rank))
        watch = EnergyWatch(world, nodes, counting(30.0) if world.rank else Counters(""))
        watch.begin()
        watch.end(SimpleNamespace(seconds=2.0))
        return watch.finish_interval(1).get("watts")

    assert ThreadWorld(2).run(work) == [None, None]
    failing = Counters("test", [Counter("package-0", iter([1.0, None, 2.0]).__next__)])
    world = SoloComm()
    watch = EnergyWatch(world, find_nodes(world), failing)
    watch.begin()
    watch.end(SimpleNamespace(seconds=1.0))
    assert watch.finish_interval(1)["watts"] is None


def record(iteration, watts):
    return IterationMetrics(
        iteration,
        4,
        consumed_samples=8 * iteration,
        consumed_tokens=800 * iteration,
        elapsed_seconds=2.0,
        global_batch_size=8,
        lm_loss=5.0,
        skipped=0,
        tflops=1.0,
        watts=watts,
    )


def test_the_log_line_its_table_and_the_plot(tmp_path):
    interval = IterationMetrics.from_interval([record(1, None), record(2, 160.0)])
    assert interval.watts == 160.0 and interval.tokens_per_joule == pytest.approx(800 / 2 / 160)
    line = interval.format_line()
    assert (
        " power (W): 160.0 | tokens per joule: 2.5 |" in line
        and parse_line(line).tokens_per_joule == 2.5
    )
    without = IterationMetrics.from_interval([record(1, None)])
    assert (
        "power" not in without.format_line()
        and "joule" not in without.format_line()
        and without.tokens_per_joule is None
    )
    reader = RunLog("run.log")
    reader.read_lines([line, line.replace("160.0", "200.0")])
    assert "loss 5, 180 W, 2.5 tokens per joule |" in log_command.text([reader]), "medians"
    row = log_command.record(reader, "run")
    assert row["watts"] == 180.0 and row["tokens_per_joule"] == 2.5


@pytest.mark.filterwarnings("error")
def test_the_plot_has_panels_of_energy_where_it_was_measured(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    seen = []
    monkeypatch.setattr(
        loss_plot, "_line", lambda axes, records, x, name, **style: seen.append(name)
    )
    for watts, names in (
        (None, ["lm_loss", "lm_loss", "learning_rate", "tflops"]),
        (160.0, ["lm_loss", "lm_loss", "learning_rate", "tflops", "watts", "tokens_per_joule"]),
    ):
        seen.clear()
        records = [
            {
                "kind": "train",
                "iteration": 1,
                "lm_loss": 5.0,
                "watts": watts,
                "tokens_per_joule": 2.5,
            }
        ]
        assert loss_plot.loss_curves(tmp_path / "run.png", {"": records}) and seen == names
