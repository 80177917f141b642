"""Audits (`--audit-interval`): every N iterations another rank repeats each rank's iteration and a part of its update, bit by bit.

In every iteration the weights of data-parallel ranks are compared, and state that one rank has is compared with its last update.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence

import torch

from ...comm.agreement import differing, everywhere, first_text
from ...config.faults import AUDIT_INTERVAL
from ...config.fields import check
from ...host import kernels
from ...host.machine import cpu_model
from ...host.other_cores import other_cores
from ...optim.seals import Seals, weight_sums
from ...optim.update_audit import PARTS, UpdateAudit
from ...training.replicas import STATES, Difference
from ...training.trainer import Trainer
from ..observer import Say
from .fingerprints import (
    KEY_LENGTH,
    TOKENS,
    Fingerprints,
    Sums,
    contradicted,
    cores,
    first_difference,
    neighbour_distance,
    of_own_samples,
    search_key,
)
from .rerun import Rerun

SHARE = 0.003  # of an iteration's time, at most, for what every iteration compares
BALANCE = 20  # FLOPs of matmuls in the time of reading a byte


class Audit:
    """Audits of one rank. All methods are collective.

    distance: data-parallel ranks to the rank whose iteration this rank repeats; 0: its own, on other cores
    clean: last iteration before which no fault is known: of the last audit without a difference, or of the start
    parts: iterations that compare all weights and states once
    """

    def __init__(self, trainer: Trainer, fingerprints: Fingerprints, say: Say) -> None:
        self.trainer = trainer
        self.fingerprints = fingerprints
        self.say = say
        self.interval = trainer.run.numbers.audit_interval
        self.distance = neighbour_distance(trainer.run, trainer.groups)
        self.seals = Seals(trainer.optimizer)
        self.update = UpdateAudit(trainer.optimizer)
        self.clean = trainer.progress.iteration
        self._always = fingerprints.active
        self._loads = trainer.optimizer.loads
        self._repeated: Sums | None = None
        nbytes = 2 * self.seals.nbytes
        if trainer.groups.dp.size > 1:
            nbytes += trainer.optimizer.flat.values.nbytes
        seconds = nbytes * BALANCE / (trainer.plan.flops.hardware / trainer.world.size)
        self.parts = max(1, math.ceil(seconds / SHARE))

    @property
    def line(self) -> str:
        """Line for the log."""
        by = "another rank" if self.distance else "each rank, on other cores,"
        each = "iteration" if self.parts == 1 else f"{self.parts} iterations"
        return (
            f"audits: every {self.interval} iterations {by} repeats a rank's iteration; weights of "
            f"data-parallel ranks, and states without a copy, are compared once in every {each}"
        )

    def before_gradients(self, consumed: int) -> None:
        """Repeat another rank's iteration before this rank's own, if an audit is due."""
        iteration = self.trainer.progress.iteration + 1
        if self._loads != self.trainer.optimizer.loads:
            self._loads = self.trainer.optimizer.loads
            self.clean = iteration - 1
        if self.interval and iteration % self.interval == 0:
            self.update.part = iteration // self.interval % PARTS
            self._repeated = self._repeat(consumed, self.distance)
            self.fingerprints.active = True

    def before_update(self, consumed: int) -> Difference | None:
        """Compare state, and the results of an audited iteration."""
        found = self._changed_state()
        repeated = self._repeated
        if found is None and repeated is not None:
            found = self._compare(consumed, dict(self.fingerprints.sums), repeated)
        if not self._always:
            self.fingerprints.take()
            self.fingerprints.active = False
        return found

    def after_update(self) -> Difference | None:
        """Compare an audited update, and seal the new state."""
        self.seals.seal(self.parts)
        if self._repeated is None:
            return None
        self._repeated = None
        self.update.part = None  # of a skipped update
        found = self.update.found
        iteration = self.trainer.progress.iteration
        if not self._any(found is not None):
            self.clean = iteration
            return None
        groups = self.trainer.groups
        places = [comm.all_gather_object(self._place()) for comm in (groups.dp, groups.edp)]

        def text() -> str:
            assert found is not None
            comm = groups.edp if found.expert else groups.dp
            of_group = places[int(found.expert)]
            pair = [of_group[comm.rank], of_group[(comm.rank + 1) % comm.size]]
            return f"{_either(pair)} computed other bits in {found.text}"

        return self._wrong_results(iteration, self._first_text(found is not None, text))

    def broken_seal(self) -> Difference | None:
        """Compare state that one rank has with the last update's."""
        found = self.seals.broken()
        return self._broken(found) if self._any(found is not None) else None

    def _broken(self, found: str | None) -> Difference:
        """Return the difference of the first rank whose seal is broken; `found` is this rank's."""
        place = self._place()
        text = f"{place} holds other bits in {found} than its last update wrote"
        return Difference(STATES, self._first_text(found is not None, lambda: text))

    def _changed_state(self) -> Difference | None:
        """Compare state with the last update's, and a part of the weights with other ranks, in one sum over all ranks."""
        trainer = self.trainer
        optimizer = trainer.optimizer
        found = self.seals.broken()
        optimizer.buckets.await_weights()
        sums = weight_sums(optimizer, optimizer.steps % self.parts, self.parts)
        differs = False
        for own, comm in zip(sums, (trainer.groups.dp, trainer.groups.edp), strict=True):
            largest, of_complements = comm.all_reduce(torch.stack([own, ~own]), "max")
            differs |= bool(largest != ~of_complements)
        seen = torch.tensor([int(found is not None), int(differs)])
        broken, different = trainer.world.all_reduce(seen, "max").tolist()
        if broken:
            return self._broken(found)
        if different:
            return trainer.replicas.difference(trainer.progress.iteration, again=True)
        return None

    def _repeat(self, consumed: int, distance: int) -> Sums:
        """Compute the iteration of the rank `distance` data-parallel ranks after this one."""
        trainer = self.trainer
        self.fingerprints.active = True
        with other_cores(distance == 0):
            trainer.repeat(consumed, trainer.optimizer.scaler.scale, shift=distance)
        return self.fingerprints.take()

    def _compare(self, consumed: int, own: Sums, repeated: Sums) -> Difference | None:
        """Compare an iteration's results with another rank's; a third computation says which of the two is wrong."""
        groups = self.trainer.groups
        iteration = self.trainer.progress.iteration + 1
        others = of_own_samples(groups, own, repeated, self.distance)
        key = first_difference(own, others)
        if not self._any(key is not None):
            return None
        if self._any(key is not None and key[1] == TOKENS):
            self.interval = 0
            self.say(
                iteration,
                "warning: no audits from now on: the data's samples were not the same when another "
                "rank read them, and an audit needs data that do not change",
            )
            return None
        self.fingerprints.take()
        computing = groups.data_size // self.distance if self.distance else 1
        distance = 2 * self.distance if computing > 2 else 0
        third = of_own_samples(groups, own, self._repeat(consumed, distance), distance)
        places = groups.dp.all_gather_object(self._place())
        before = self.distance * groups.cp.size
        pair = (places[groups.dp.rank], places[(groups.dp.rank - before) % groups.dp.size])
        pairs = groups.ep.all_gather_object(pair)
        order: tuple[int, ...] | None = None
        suspects = ""
        if key is not None:
            wrong = contradicted([each[key] for each in (own, others, third)])
            if computing == 2 and wrong == 1:
                wrong = None  # the third computation is this rank's second
            if not self.fingerprints.of_experts(key):
                pairs = [pair]
            both = (0, 1) if wrong is None else (wrong,)
            suspects = _either([each[index] for each in pairs for index in both])
            order = search_key(key, own)
        # A reduction over tensor-parallel ranks hides which of them is wrong, unless a tensor before it differs.
        of_layer = groups.tp.all_gather_object((order, suspects))
        named = _either([each for other, each in of_layer if other == order])

        def text() -> str:
            assert key is not None
            return f"{named} computed other bits in {self.fingerprints.describe(key)}"

        first = first_text(self.trainer.world, order, KEY_LENGTH, text)
        assert first is not None, "a difference was found"
        return self._wrong_results(iteration, first)

    def _wrong_results(self, iteration: int, text: str) -> Difference:
        return Difference(f"results of iteration {iteration}", text, self.clean + 1)

    def _place(self) -> str:
        return f"rank {self.trainer.world.rank} (node {platform.node()}, {cores()})"

    def _any(self, flag: bool) -> bool:
        return bool(self.trainer.world.all_reduce(torch.tensor(int(flag)), "max"))

    def _first_text(self, found: bool, text: Callable[[], str]) -> str:
        """Return the text of the first rank with a finding."""
        first = first_text(self.trainer.world, (0,) if found else None, 1, text)
        assert first is not None, "a difference was found"
        return first


def _either(places: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(places))


def watch_numbers(trainer: Trainer, say: Say) -> str | None:
    """Attach --rerun-on-spike and --audit-interval to a trainer; return the log's line. Collective.

    Raise ValueError if ranks of different machines are to be audited, unless by default.
    """
    numbers = trainer.run.numbers
    if not numbers.rerun_on_spike and not numbers.audit_interval:
        return None
    fingerprints = Fingerprints(trainer)
    if numbers.rerun_on_spike:
        trainer.before_update = Rerun(trainer, fingerprints, say).before_update
    if not numbers.audit_interval:
        return None
    machine = {
        "the CPU": cpu_model(),
        "the instruction set": kernels.instruction_set(),
        "torch": f"{torch.__version__} ({torch.backends.cpu.get_cpu_capability()})",
        "the number of threads": torch.get_num_threads(),
    }
    different = differing(trainer.world, machine)
    by_default = numbers.audit_interval == AUDIT_INTERVAL
    if different and by_default:
        return f"note: no audits, because ranks compare bits: {different}"
    with everywhere():
        check(
            not different,
            f"--audit-interval {numbers.audit_interval} compares the bits of ranks, and {different}: "
            "pass 0, or start equal machines with equal threads",
        )
    audit = Audit(trainer, fingerprints, say)
    trainer.audit = audit
    return None if by_default and trainer.world.size == 1 else audit.line
