"""Two hosts on one machine: data-parallel training over a slow link, blocking and overlapped in turn.

    python -m benchmarks two_hosts --rate 1gbit

Two network namespaces with host names of their own hold one MPI rank and one thread each, joined by a veth pair whose ends a token
bucket (tc tbf) limits. Jobs take turns: both ranks alone at once (computation), then data parallel, blocking, overlapped, and
overlapped with BF16 gradients. What crosses the link is read from its counters. Reduction can hide behind computation as long as
the shorter of the two takes: hideable = min(computation, wire), exposed = step - max(computation, wire).
Left out: more hosts. Needs Linux, root, iproute2 and MPICH. Test: pytest tests/mpi/test_two_hosts.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fugaku_megatron.host import runtime
from fugaku_megatron.logs.iteration import parse_log
from fugaku_megatron.logs.run_log import exact_seconds
from fugaku_megatron.run.checks import check

from . import driver, jobs, noise

HOSTS = ("fm-host0", "fm-host1")
DEVICE = "wire"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
# MPICH's ranks see two hosts: no shared memory between them, messages by TCP through the namespaces' only link.
NETWORK = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DEVICE}
MODEL = ("--num-layers", 12, "--hidden-size", 384, "--num-attention-heads", 6, "--vocab-size", 1024)
DATA_PARALLEL = {"blocking": (), "overlapped": ("--overlap-grad-reduce",),
                 "overlapped, BF16": ("--overlap-grad-reduce", "--grad-reduce-in-bf16")}
ALONE = "computation"


@dataclass(frozen=True)
class Measured:
    """Of one job: seconds of an iteration (median without the first), bytes that one host sent in an iteration (mean)."""

    seconds: float
    sent: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it (default: %(default)s)")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4, help="of each rank in an iteration (default: %(default)s)")
    parser.add_argument("--bucket-size", type=int, default=1_000_000, help="elements of a gradient bucket (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=4, help="of each job, the first not measured (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")


def why_not() -> str:
    """Why there can be no two hosts here, or nothing."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc") and shutil.which("unshare")):
        return "two hosts need root and the programs ip, tc and unshare (packages iproute2, util-linux)"
    try:
        with two_hosts("1gbit"):
            return ""
    except RuntimeError as error:
        return str(error)


def run(options: argparse.Namespace) -> None:
    """Measure in turn, print, write --json. ValueError for options that make no job, RuntimeError where there can be no hosts."""
    for name in ("rounds", "micro_batches", "micro_batch_size", "bucket_size"):
        check(getattr(options, name) >= 1, f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more")
    check(options.iterations >= 2, f"--iterations {options.iterations}: give 2 or more, the first is not measured")
    rate = bits_per_second(options.rate)
    if reason := why_not():
        raise RuntimeError(reason)
    watch, turns = noise.Watch(len(HOSTS), jobs.children_seconds), {name: [] for name in (ALONE, *DATA_PARALLEL)}
    with two_hosts(options.rate):
        for turn in range(options.rounds):
            for name, measured in turns.items():
                measured.append(job(options, name))
                print(f"  round {turn + 1} of {options.rounds}: {name} {measured[-1].seconds:.3f} s an iteration", flush=True)
    result = report(options, turns, rate, watch.others() > noise.OTHERS)
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def bits_per_second(text: str) -> float:
    """A rate in tc's words. ValueError for another."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text)
    check(match is not None and float(match[1]) > 0, f"--rate {text}: write it as 1gbit or 500mbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """The namespaces and their link, gone at the end. RuntimeError with the system's words where they cannot be made."""
    _remove()
    try:
        for host in HOSTS:
            _system("ip", "netns", "add", host)
        _system("ip", "link", "add", DEVICE, "netns", HOSTS[0], "type", "veth", "peer", "name", DEVICE, "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            inside = ("ip", "-n", host)
            _system(*inside, "addr", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _system(*inside, "link", "set", device, "up")
            _system("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", "256kb",
                    "latency", "50ms")
        yield
    finally:
        _remove()


def _remove() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


def _system(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"two hosts cannot be made here: {' '.join(command)}: {done.stderr.strip()}")


def sent_bytes(host: str) -> int:
    """What the host has sent since its link exists."""
    command = ["ip", "netns", "exec", host, "cat", f"/sys/class/net/{DEVICE}/statistics/tx_bytes"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def commands(options: argparse.Namespace, name: str) -> list[list[str]]:
    """mpiexec with a program for each host; for computation a program for each host, a world of its own."""
    size = options.micro_batches * options.micro_batch_size * (1 if name == ALONE else len(HOSTS))
    flags = (*MODEL, "--max-position-embeddings", options.seq_length, "--seq-length", options.seq_length, "--mock-data",
             "--train-iters", options.iterations, "--micro-batch-size", options.micro_batch_size, "--global-batch-size", size,
             "--eval-iters", 0, "--log-interval", 1, "--kernels", "native", "--ddp-bucket-size", options.bucket_size,
             *DATA_PARALLEL.get(name, ()))
    programs = [["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, sys.executable,
                 str(jobs.PROGRAM), *map(str, flags)] for host in HOSTS]
    return programs if name == ALONE else [[jobs.mpiexec(), "-n", "1", *programs[0], ":", "-n", "1", *programs[1]]]


def job(options: argparse.Namespace, name: str) -> Measured:
    """Run one. RuntimeError, with the last line of its standard error, when it fails."""
    before, seconds = sent_bytes(HOSTS[0]), []
    started = [subprocess.Popen(command, env={**os.environ, **NETWORK, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) for command in commands(options, name)]
    for process in started:
        output, errors = process.communicate()
        iterations = [i for i in parse_log(output.splitlines()) if i.iteration > 1]
        if process.returncode or not iterations:
            message = (errors.strip() or output.strip() or "nothing").splitlines()[-1]
            raise RuntimeError(f"the job {name} ended with exit code {process.returncode} and said: {message}")
        seconds.append(statistics.median(exact_seconds(i) for i in iterations))
    return Measured(max(seconds), (sent_bytes(HOSTS[0]) - before) / options.iterations)


def report(options: argparse.Namespace, turns: dict[str, list[Measured]], rate: float, busy: bool) -> dict[str, Any]:
    """Medians over the rounds. wire: seconds of the link for the bytes sent. exposed and hideable: see the module's text."""
    medians = {name: Measured(*(statistics.median(column) for column in zip(*((m.seconds, m.sent) for m in measured), strict=True)))
               for name, measured in turns.items()}
    computation, rows = medians.pop(ALONE).seconds, []
    for name, measured in medians.items():
        wire = 8 * measured.sent / rate
        hideable, exposed = min(computation, wire), measured.seconds - max(computation, wire)
        rows.append({"job": name, "seconds": measured.seconds, "bytes": measured.sent, "wire_seconds": wire,
                     "hideable_seconds": hideable, "exposed_seconds": exposed, "exposed_share": exposed / hideable,
                     "ratio": medians["blocking"].seconds / measured.seconds, "measured": True})
    return {"computation_seconds": computation, "rows": rows, "rate": options.rate, "rounds": options.rounds, "busy": busy,
            "cpu": runtime.cpu_model(), "repeat": driver.command_line()}


def show(result: dict[str, Any]) -> None:
    """The table."""
    print(f"computation alone {result['computation_seconds']:.3f} s an iteration; link {result['rate']}")
    print(f"{'job':<18} {'s':>8} {'MB sent':>8} {'wire s':>7} {'exposed s':>10} {'of hideable':>12} {'x blocking':>11}")
    for row in result["rows"]:
        print(f"{row['job']:<18} {row['seconds']:>8.3f} {row['bytes'] / 1e6:>8.1f} {row['wire_seconds']:>7.3f} "
              f"{row['exposed_seconds']:>10.3f} {100 * row['exposed_share']:>10.1f} % {row['ratio']:>11.3f}")
    print(f"{result['cpu']}, measured" + ("  BUSY MACHINE" if result["busy"] else ""))
    print(result["repeat"])
