"""Signals, time limit, clock, summary."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from fugaku_megatron.host import machine, runtime
from fugaku_megatron.host.cpu_binding import CpuBinding
from fugaku_megatron.host.runtime import ExitTimer
from fugaku_megatron.start.signals import STOP_SIGNALS, StopSignals

pytestmark = pytest.mark.system


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_only_asks_to_stop_and_handlers_come_back(number):
    before = {n: signal.getsignal(n) for n in STOP_SIGNALS}
    with StopSignals() as signals:
        assert not signals.stop_requested and signals.received is None
        os.kill(os.getpid(), number)
        assert signals.stop_requested and signals.received == number
    assert {n: signal.getsignal(n) for n in STOP_SIGNALS} == before


CHILD = """
import sys, time
from fugaku_megatron.start.signals import StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    while not signals.stop_requested:
        time.sleep(0.01)
    print("stopping", flush=True)
    time.sleep(float(sys.argv[1]))
print("saved", flush=True)
"""


def child(seconds):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    return process


def test_after_one_signal_a_process_can_save_and_leave_with_code_0():
    process = child(0)
    assert process.stdout.read() == "saved\n"  # communicate would not see what was read ahead
    assert process.wait(timeout=200) == 0


def test_a_second_signal_ends_at_once():
    process = child(600)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=120)[0] == ""
    assert process.returncode == -signal.SIGTERM


def test_outside_the_main_thread_nothing_is_installed():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with StopSignals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.stop_requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_exit_timer_counts_minutes():
    now = [100.0]
    timer = ExitTimer(1.5, lambda: now[0])
    now[0] += 89.9
    assert not timer.expired
    now[0] += 0.2
    assert timer.expired and not ExitTimer(None).expired
    with pytest.raises(ValueError, match="--exit-duration-in-mins must be above 0, got 0"):
        ExitTimer(0)


@pytest.mark.parametrize(
    "text, name",
    {
        "processor\t: 0\nmodel name\t: AMD EPYC 9554\nflags\t\t: fpu\n": "AMD EPYC 9554",
        "processor\t: 0\nCPU implementer\t: 0x46\nCPU part\t: 0x001\n": "Fujitsu A64FX",
        "CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n": "Arm Neoverse V2",
        "CPU implementer\t: 0x41\nCPU part\t: 0xfff\n": "Arm CPU, implementer 0x41 part 0xfff",
    }.items(),
)
def test_cpu_models(text, name):
    assert machine.cpu_model(text) == name


def test_the_summary_is_one_line_with_what_matters():
    line = machine.summary(
        "MPICH Version:\t4.3\nrelease",
        12,
        ranks_on_node=2,
        binding=CpuBinding(6, tuple(range(6))),
        memory="glibc 2.28",
        ghz=2.0,
    )
    assert "\n" not in line and line.endswith("MPI MPICH Version: 4.3 release")
    for part in (
        "12 of ",
        "2 ranks x 6 pinned threads",
        machine.cpu_model(),
        "at 2.00 GHz",
        "allocator glibc 2.28",
        f"torch {torch.__version__}",
    ):
        assert part in line


def test_the_clock_is_measured_and_held_to_what_was_asked_for():
    assert 0.3 < machine.clock_ghz() < 8
    assert runtime.check_clock(None, [], 2.01) == 2.01
    assert runtime.check_clock(2.0, [], 2.01) == 2.01
    message = r"--cpu-frequency 2.2: this core runs at 2.00 GHz: .*freq=2200,eco_state=0"
    with pytest.raises(ValueError, match=message):
        runtime.check_clock(2.2, [], 2.0)


def test_the_clock_is_set_where_the_system_has_a_governor(tmp_path):
    assert not runtime.set_clock(2.0, [0], tmp_path)
    policy = tmp_path / "cpu0" / "cpufreq"
    policy.mkdir(parents=True)
    (policy / "scaling_min_freq").write_text("2200000")
    (policy / "scaling_max_freq").write_text("2200000")
    assert runtime.set_clock(2.0, [0], tmp_path)
    assert {(policy / f"scaling_{name}_freq").read_text() for name in ("min", "max")} == {"2000000"}
