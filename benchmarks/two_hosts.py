"""Two hosts on one machine: data-, tensor-, context- or expert-parallel training over a slow link, blocking and overlapped in turn.

    python -m benchmarks two_hosts --rate 1gbit
    python -m benchmarks two_hosts --tensor-parallel
    python -m benchmarks two_hosts --context-parallel
    python -m benchmarks two_hosts --experts

Two network namespaces with host names of their own hold one MPI rank and one computing thread each, joined by a veth pair whose
ends a token bucket (tc tbf) limits. Each rank holds the trainers, which take turns iteration by iteration: data-parallel ones,
blocking, overlapped, and overlapped with BF16 gradients; two with sequence parallelism, blocking and with --tp-comm-overlap;
one for each way in which hosts that share a sequence exchange it; or two whose hosts have different experts and no shared one, all
rows sent at once or one group of experts after another. The last two kinds leave the sums of gradients out, so that
the link has what attention or experts exchange, and nothing else. Every other iteration of each leaves all that it exchanges out
(computation). What a host sends is read from the counters of its end of the link. Both directions have the rate to themselves, so
that the link needs as long as the link of the host that sends more: wire, without the headers of packets, 4 per cent.
Communication can overlap with computation for as long as the shorter of the two takes: hideable = min(computation, wire).
exposed is the median over the rounds of step - max(computation, wire), with the computation of the same round. waiting is the time
of the step in which a host's computing thread waits, of the host that waits longer; the other one may compute meanwhile.

Hosts of a cluster leave a core to the thread that calls MPI (host/runtime.py). So by default one core here computes for both
hosts, and the other one has both of these threads; with --own-cores each host has one core for all.
The ranks run this module as a program (child.py); one JSON line per round on rank 0: {job: {"seconds", "computation", "waiting",
"sent" by each host, "loss"}}. Left out: more hosts. Needs Linux, root, iproute2 and MPICH.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.comm.base import DONE, Comm, SoloComm
from fugaku_megatron.comm.engine import Engine, Steps
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.comm.job import run_or_abort
from fugaku_megatron.comm.mpi import MPIComm
from fugaku_megatron.config.fields import check
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.parallel import A2A, CP_COMM_TYPES, P2P
from fugaku_megatron.host.observed import NONBLOCKING, PHASES, REDUCTIONS, VERBS, Observed, Phases
from fugaku_megatron.text.table import Column

from . import child, core, disturbance, shapes

HOSTS = ("fm-host0", "fm-host1")
DEVICE = "wire"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
# MPICH's ranks see two hosts: no shared memory between them, messages by TCP through the namespaces' only link.
NETWORK = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DEVICE}
# 21 M parameters in many thin layers, one in a bucket: the last bucket, which cannot be overlapped, is small.
DEEP = {"num_layers": 26, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1024}
# 25 M parameters in few wide layers: a matmul takes longer than the rows that it reads or writes need on the link.
WIDE = {"num_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 1024}
PARTS = {**WIDE, "tensor_model_parallel_size": 2, "sequence_parallel": True}
# 16 experts in each of two layers, two for each token: those of a rank compute longer than their rows need on the link.
EXPERTS = {
    **WIDE,
    "hidden_size": 512,
    "num_attention_heads": 4,
    "swiglu": True,
    "disable_bias_linear": True,
    "num_experts": 16,
    "moe_ffn_hidden_size": 1024,
    "moe_router_topk": 2,
    "expert_model_parallel_size": 2,
}
# 6 M parameters and a long sequence: attention takes longer than keys and values need on the link.
LONG = {
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "context_parallel_size": 2,
}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Layout of the hosts. jobs: fields of each trainer's run; tokens of a sequence; micro-batches of a rank; replicas of the model."""

    jobs: dict[str, dict[str, Any]]
    tokens: int
    microbatches: int
    replicas: int


MODES = {
    "data": Mode(
        jobs={
            "blocking": DEEP,
            "overlapped": {**DEEP, "overlap_grad_reduce": True},
            "overlapped, BF16": {**DEEP, "overlap_grad_reduce": True, "grad_reduce_in_bf16": True},
        },
        tokens=704,
        microbatches=4,
        replicas=2,
    ),
    "tensor": Mode(
        jobs={"blocking": PARTS, "overlapped": {**PARTS, "tp_comm_overlap": True}},
        tokens=704,
        microbatches=4,
        replicas=1,
    ),
    "context": Mode(
        jobs={name: {**LONG, "cp_comm_type": (name,)} for name in CP_COMM_TYPES},
        tokens=4096,
        microbatches=1,
        replicas=1,
    ),
    "experts": Mode(
        jobs={"blocking": EXPERTS, "overlapped": EXPERTS}, tokens=2048, microbatches=2, replicas=2
    ),
}

COLUMNS: tuple[Column, ...] = (
    ("job", "<18", "job"),
    ("s", ">8.3f", "seconds"),
    ("alone s", ">8.3f", "computation_seconds"),
    ("MB sent", ">12", lambda row: " ".join(f"{sent / 1e6:.1f}" for sent in row["sent"])),
    ("wire s", ">7.3f", "wire_seconds"),
    ("exposed s", ">10.3f", "exposed_seconds"),
    ("of hideable", ">12.1%", "exposed_share"),
    ("waiting s", ">10.3f", "waiting_seconds"),
    ("x first", ">8.3f", "ratio"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this family."""
    parser.add_argument(
        "--rate", default="1gbit", help="of the link, as tc writes it (default: %(default)s)"
    )
    parser.set_defaults(mode="data")
    shared = parser.add_mutually_exclusive_group()
    for name, mode, words in (
        ("--tensor-parallel", "tensor", "share each layer's matrices instead of the batch"),
        ("--context-parallel", "context", "share each sequence instead of the batch"),
        ("--experts", "experts", "have different experts"),
    ):
        shared.add_argument(
            name, dest="mode", action="store_const", const=mode, help=f"the hosts {words}"
        )
    parser.add_argument(
        "--cp-comm-type",
        nargs="+",
        default=[A2A, P2P],
        choices=CP_COMM_TYPES,
        metavar="TYPE",
        help=f"with --context-parallel: of {', '.join(CP_COMM_TYPES)} (default: {A2A} {P2P})",
    )
    parser.add_argument(
        "--own-cores",
        action="store_true",
        help="a core for each host, which computes and communicates on it",
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        help="(default: 704, with --context-parallel 4096, with --experts 2048)",
    )
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument(
        "--micro-batches",
        type=int,
        help="of each rank in an iteration (default: 4, with --context-parallel 1, "
        "with --experts 2)",
    )
    parser.add_argument(
        "--bucket-size",
        type=int,
        default=500_000,
        help="elements of a gradient bucket (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="an iteration of each job (default: %(default)s, one more warms up)",
    )


def why_not() -> str:
    """Return the reason why there can be no two hosts here, or nothing."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc") and shutil.which("unshare")):
        return "two hosts need root and the programs ip, tc and unshare (packages iproute2, util-linux)"
    if len(os.sched_getaffinity(0)) < 2:
        return "two hosts need two cores"
    try:
        with two_hosts("1gbit"):
            return ""
    except RuntimeError as error:
        return str(error)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the jobs in turn. ValueError for a rate that is none and sizes that do not divide, RuntimeError without two hosts."""
    rate = bits_per_second(options.rate)
    for values in order(options)["jobs"].values():
        Layout.from_run(shapes.run_from_json(None, values), len(HOSTS))
    if reason := why_not():
        raise RuntimeError(reason)
    watch = disturbance.Watch(len(HOSTS))
    with two_hosts(options.rate):
        rounds = measured(options)
    return report(options, rounds, rate, watch.disturbed())


def bits_per_second(text: str) -> float:
    """Return bits per second of a rate in tc's words. ValueError for another."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text)
    check(match is not None and float(match[1]) > 0, f"--rate {text}: write it as 1gbit or 500mbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


@contextlib.contextmanager
def two_hosts(rate: str, hosts: Sequence[str] = HOSTS) -> Iterator[None]:
    """Make the namespaces and their link; remove them at the end. RuntimeError with the system's words if they cannot be made.

    Another process that has hosts of these names is waited for.
    """
    with contextlib.ExitStack() as stack:
        name = Path(tempfile.gettempdir()) / f"{hosts[0]}.lock"
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o600)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        stack.callback(_remove, hosts)
        _remove(hosts)
        for host in hosts:
            _system("ip netns add", host)
        _system(
            "ip link add", DEVICE, "netns", hosts[0], "type veth peer", DEVICE, "netns", hosts[1]
        )
        for host, address in zip(hosts, ADDRESSES, strict=True):
            _system("ip -n", host, f"addr add {address}/24 dev {DEVICE}")
            for device in ("lo", DEVICE):
                _system("ip -n", host, f"link set {device} up")
            limit = f"tbf rate {rate} burst 256kb latency 50ms"
            _system("ip netns exec", host, f"tc qdisc add dev {DEVICE} root {limit}")
        _wait_for_link(hosts)
        yield


def _wait_for_link(hosts: Sequence[str]) -> None:
    """Wait until the system reports the link as up, some time after both ends were set up: an MPI refuses it until then."""
    for _ in range(600):
        if all(" UP " in _system("ip -br -n", host, "link show", DEVICE) for host in hosts):
            return
        time.sleep(0.1)
    raise RuntimeError(f"two hosts cannot be made here: their link {DEVICE} is not up after 60 s")


def _remove(hosts: Sequence[str]) -> None:
    for host in hosts:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


def _system(*parts: str) -> str:
    """Run a command of words without spaces and return what it prints."""
    command = " ".join(parts)
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"two hosts cannot be made here: {command}: {done.stderr.strip()}")
    return done.stdout


def trainers(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the fields of each trainer's run that differ from another's."""
    jobs = MODES[options.mode].jobs
    return (
        {name: jobs[name] for name in options.cp_comm_type} if options.mode == "context" else jobs
    )


def order(options: argparse.Namespace) -> dict[str, Any]:
    """Return what both ranks are told, see `main`."""
    mode = MODES[options.mode]
    microbatches = options.micro_batches or mode.microbatches
    common = {
        "seq_length": options.seq_length or mode.tokens,
        "mock_data": True,
        "train_iters": 2 * (options.rounds + 1),
        "micro_batch_size": options.micro_batch_size,
        "global_batch_size": microbatches * options.micro_batch_size * mode.replicas,
        "eval_iters": 0,
        "kernels": "native",
        "ddp_bucket_size": options.bucket_size,
    }
    planned = {name: {**common, **flags} for name, flags in trainers(options).items()}
    return {"jobs": planned, "rounds": options.rounds, "cores": cores(options)}


def cores(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return the computing and the communicating core of each host."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    return (
        [(first, first), (second, second)] if options.own_cores else [(first, second)] * len(HOSTS)
    )


def on_host(host: str, program: Sequence[str]) -> list[str]:
    """Return mpiexec's words for one rank of a program on a host."""
    name_host = f"-n 1 ip netns exec {host} unshare --uts sh -c".split()
    return [*name_host, 'hostname "$0" && exec "$@"', host, *program]


def command(options: argparse.Namespace) -> list[str]:
    """Return mpiexec with a rank in each namespace."""
    ranks = [on_host(host, child.python("two_hosts", order(options))) for host in HOSTS]
    return [child.mpiexec(), *ranks[0], ":", *ranks[1]]


def measured(options: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """Run the rounds: {job: {"seconds", "computation", "waiting", "sent", "loss"}}.

    RuntimeError when the job fails.
    """
    rounds = []
    with child.Child(
        command(options), {**os.environ, **NETWORK, "OMP_NUM_THREADS": "1"}, "two hosts"
    ) as job:
        for record in job.records():
            rounds.append(record)
            steps = ", ".join(
                f"{name} {record[name]['seconds']:.3f} s (alone {record[name]['computation']:.3f})"
                for name in trainers(options)
            )
            print(f"  round {len(rounds)} of {options.rounds}: {steps}", flush=True)
    return rounds


def report(
    options: argparse.Namespace, rounds: list[dict[str, dict[str, Any]]], rate: float, busy: bool
) -> dict[str, Any]:
    """Return the medians over the rounds. wire: seconds of the link for the bytes sent. exposed and hideable: see the module's text."""

    def median(name: str, field: str) -> float:
        return statistics.median(each[name][field] for each in rounds)

    rows = []
    names = [*trainers(options)]
    for name in names:
        seconds = median(name, "seconds")
        computation = median(name, "computation")
        sent = [
            statistics.median(host)
            for host in zip(*(each[name]["sent"] for each in rounds), strict=True)
        ]
        wire = 8 * max(sent) / rate
        exposed = statistics.median(
            each[name]["seconds"] - max(each[name]["computation"], wire) for each in rounds
        )
        hideable = min(computation, wire)
        rows.append(
            {
                "job": name,
                "seconds": seconds,
                "computation_seconds": computation,
                "sent": sent,
                "wire_seconds": wire,
                "hideable_seconds": hideable,
                "exposed_seconds": exposed,
                "exposed_share": exposed / hideable,
                "waiting_seconds": median(name, "waiting"),
                "loss": rounds[-1][name]["loss"],
                "ratio": median(names[0], "seconds") / seconds,
                "measured": True,
            }
        )
    return {
        "rows": rows,
        "rate": options.rate,
        "rounds": rounds,
        "busy": busy,
        "own_cores": options.own_cores,
    }


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the table."""
    return "\n".join(
        [
            f"link {result['rate']}; seconds of an iteration, and of one without its sums and gathers (alone)",
            core.table(COLUMNS, result["rows"]),
            f"{result['cpu']}, measured" + core.mark(result["busy"]),
        ]
    )


# A rank ---------------------------------------------------------------------------------------------------------------------------


class Silence:
    """While `on`, the verbs of a communicator that it observes do nothing: what a rank computes, and nothing of what it sends."""

    def __init__(self, on: bool = False) -> None:
        self.on = on

    def observe(self, name: str, verb: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call the verb, or return what it would."""
        if not self.on:
            return verb(*args, **kwargs)
        return DONE if name in NONBLOCKING else args[0]

    def alone(self, comm: Comm, engine: Engine) -> Observed:
        """Return `comm`, while `on` with this rank's own numbers and rows in place of others', because experts' work depends on them.

        The engine's thread copies them where it would otherwise send them.
        """
        solo = SoloComm(comm.rank, comm.size)

        def observe(name: str, verb: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            do = getattr(solo, name) if self.on else verb
            return (
                engine.start(_one_step(do, args))
                if self.on and name in NONBLOCKING
                else do(*args, **kwargs)
            )

        return Observed(comm, VERBS, observe)


def _one_step(function: Callable[..., Any], args: tuple) -> Steps:
    """Call `function`, as one operation of the engine."""
    function(*args)
    yield []


def build(
    world: MPIComm, name: str, values: dict[str, Any], phases: Phases, silence: Silence
) -> Any:
    """Build the trainer `name` over `world`. values: fields of its run. phases: the clock of its waiting. silence: of its groups."""
    run = shapes.run_from_json(None, values)
    layout = Layout.from_run(run, world.size)
    groups = Grid(*layout.sizes).groups(world)
    silent = {
        "tp": silence,
        "cp": silence,
        "dp": Silence(on=True) if max(layout.cp, layout.ep) > 1 else silence,
    }
    if layout.ep > 1:
        groups.ep.inside_node = (
            name == "blocking"
        )  # as if the hosts shared memory, which sends all rows at once
        groups = replace(groups, ep=silence.alone(groups.ep, world.engine))
    groups = replace(
        groups,
        **{
            group: Observed(getattr(groups, group), VERBS, each.observe)
            for group, each in silent.items()
        },
    )
    return shapes.trainer_of(run, world, phases.groups(groups))


def sent_bytes() -> int:
    """Return the bytes that this host has sent since its link exists."""
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


def turn(world: Comm, trainer: Any, phases: Phases) -> dict[str, Any]:
    """Train one iteration once both ranks are there; return the seconds of the slower rank, and the bytes that each rank sent."""
    phases.begin()
    world.barrier()
    before = sent_bytes()
    begin = time.perf_counter()
    loss = trainer.train_step().loss
    seconds = time.perf_counter() - begin
    sent = sent_bytes() - before
    waiting = phases.of_iteration(seconds)[PHASES.index(REDUCTIONS)]
    own = torch.tensor([seconds, waiting, sent], dtype=torch.float64)
    each = world.all_gather(own.new_empty(world.size, len(own)), own)
    return {
        "seconds": each[:, 0].max().item(),
        "waiting": each[:, 1].max().item(),
        "sent": each[:, 2].tolist(),
        "loss": loss,
    }


def pair(
    world: Comm, trainer: Any, phases: Phases, silence: Silence, number: int
) -> dict[str, Any]:
    """Train an iteration, and one without its communication, in an order that the round's number chooses."""
    turns = {}
    for silence.on in (True, False) if number % 2 else (False, True):
        turns[silence.on] = turn(world, trainer, phases)
    return {**turns[False], "computation": turns[True]["seconds"]}


def place(world: MPIComm, computing: int, communicating: int) -> None:
    """Place this thread on one core, and the thread that calls MPI on its own or the same."""
    os.sched_setaffinity(0, {computing})
    world.engine.call(lambda: os.sched_setaffinity(0, {communicating}))
    world.engine.own_core = computing != communicating


def main(world: MPIComm) -> None:
    """Answer the rounds, on rank 0, after one that is not measured. The order: see `order`."""
    from fugaku_megatron.costs.plan import Plan
    from fugaku_megatron.run.assemble import configure_process

    order, answer = child.order()
    names = list(order["jobs"])
    first = shapes.run_from_json(None, order["jobs"][names[0]])
    configure_process(Plan.of(first, world.size), world)
    place(world, *order["cores"][world.rank])
    phases = Phases()
    silence = Silence()
    trainers = {
        name: build(world, name, values, phases, silence) for name, values in order["jobs"].items()
    }
    for number in range(order["rounds"] + 1):
        first = number % len(names)  # every job comes first as often as the others
        measured = {
            name: pair(world, trainers[name], phases, silence, number)
            for name in names[first:] + names[:first]
        }
        if world.rank == 0 and number > 0:
            answer(measured)
    for trainer in trainers.values():
        trainer.close()


if __name__ == "__main__":
    run_or_abort(main)
