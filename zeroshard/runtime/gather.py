"""When weights are gathered: before the module that needs them, one step ahead, into a few buffers.

    forward    buffer 0 | gather u0 | compute u0 | gather u2  | compute u2 ...
               buffer 1             | gather u1  | compute u1 | gather u3 ...

Each unit keeps one pool buffer (autograd holds views of it), and two neighbours in execution order have different ones.
Nothing is freed on the way: a unit whose forward is over is hidden, and the next unit that needs its buffer becomes the
occupant. If none has, backward finds the weights still there; so the last units of a forward are not gathered again.
A step gives all buffers back (`pool.py`).

Backward runs the nodes of the graph in the reverse of the order in which forward made them. So when it reaches the
output of a unit, every unit that ran later in forward is done, and only what was reached last is protected.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.pending import Pending
from zeroshard.comm.profiling import of_unit, phase
from zeroshard.errors import InvalidState
from zeroshard.layout.pool_plan import PoolPlan
from zeroshard.storage.pool import Pool, PoolBuffer, Turns
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency

During = Literal["forward", "backward", "unshard"]
"""What a unit is gathered for."""


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Gatherer:
    """Unshards and hides the weights of all units of a model."""

    def __init__(self, units: Sequence[Unit], collectives: Collectives, pool: Pool) -> None:
        self.units = units
        self.collectives = collectives
        self._follower: dict[tuple[During, Unit | None], Unit] = {}
        self._last: tuple[During, Unit | None] = ("forward", None)
        self._protected: tuple[Unit, ...] = ()
        self._called: set[Unit] = set()  # since they were updated
        self._uncalled: set[Unit] = set()  # not between the last two updates, though they got gradients
        self._begun: list[Unit] = []  # updated, and perhaps not read from the peers yet
        self._read_by_peers = Pending()  # what this rank gave them then
        self._own_thread = os.getpid(), threading.get_ident()
        requests = {unit: unit.spec.weight_request(unit.layout.numel) for unit in units if unit.weights.buffer.borrows}
        self._turns = Turns(pool, "ring", PoolPlan.for_weights(requests.values()), requests, self)
        for unit in units:
            if unit not in requests:
                unit.weights.absent.bring = partial(_bring, weakref.ref(self), unit)

    def begin_forward(self) -> None:
        """The model is called. Weights that rest in full, of units that no module has been called for, may be read by
        other modules (a head that uses the weight of a layer): nobody else would wait for them."""
        self._wait_for_readers()
        for unit in self._uncalled:
            if unit.weights.state is Residency.GATHERING:
                unit.weights.arrive()
                unit.weights.show()

    def enter(self, units: Sequence[Unit]) -> None:
        """A forward that needs these units begins."""
        self._called.update(units)
        for unit in units:  # all of them before the first gather, which looks ahead
            unit.weights.in_use += 1
        for unit in units:
            if not unit.weights.shown:
                with torch.no_grad():
                    self._unshard(unit, "backward" if in_backward() else "forward")

    def leave(self, units: Sequence[Unit]) -> list[Unit]:
        """That forward is over. Returns the units that no forward needs any more, and backward may have to gather."""
        for unit in units:
            unit.weights.in_use -= 1
        free = [unit for unit in units if unit.weights.is_passing]
        if free and not in_backward():
            for unit in free:
                unit.weights.put_away()
        return free

    def gather_for_backward(self, units: Sequence[Unit]) -> None:
        """Backward has reached the output of a module whose forward needed these units. They begin to arrive."""
        inner = tuple([unit for unit in units if not unit.spec.outer])
        # Only what backward reached last is protected, and before the gather, which looks ahead: everything that ran
        # later in forward is done. If the unit before were still protected, the next prefetch would find both pool
        # buffers needed, and backward would gather nothing ahead.
        if inner:
            self._protected = inner
        for unit in units:
            if unit.weights.state is Residency.SHARDED:
                self.start(unit, "backward")

    def enter_backward(self, units: Sequence[Unit]) -> None:
        """The same, and they are here."""
        self.gather_for_backward(units)
        for unit in units:
            if not unit.weights.shown:
                self._unshard(unit, "backward")

    def expect_to_stay(self, units: Sequence[Unit]) -> None:
        """A second backward will read these weights through views of their buffers.

        Raises:
            RuntimeError: other units take turns in one.
        """
        for unit in units:
            if not self._turns.is_alone(unit):
                raise InvalidState(
                    f"create_graph: a gradient of a gradient needs the weights of unit {unit.name} again, and under "
                    "this plan other units take turns in their place. Use a plan with replicated weights (zero2), or "
                    "units= a number of bytes that the whole model fits into"
                )

    def end_backward(self) -> None:
        self._protected = ()
        for unit in self.units:
            if unit.weights.is_passing:
                unit.weights.put_away()

    @phase(of_unit("step: updated"))
    def updated(self, unit: Unit, slots: Collection[int] | None = None) -> None:
        """The optimizer has changed the own interval, or just what these slots have of it: weights that rest in full
        start arriving from the others."""
        were_there = unit.weights.state is not Residency.SHARDED
        unit.weights.drop()
        if unit.weights.buffer.rests_in_full:
            # Weights that were not all here (a write inside `unsharded` has failed, say) miss more than these slots.
            unit.weights.gather(self.collectives, "step", slots=slots if were_there else None)
            self._begun.append(unit)
            (self._uncalled.discard if unit in self._called else self._uncalled.add)(unit)
        self._called.discard(unit)

    @phase("step: read from peers")
    def read(self) -> None:
        """All ranks have updated their intervals, and are still in the same call: what they have updated is read."""
        begun, self._begun = self._begun, []
        # [Note: reading weights inside the step]
        # In shared memory nothing moves by itself, and a peer's weights lie where its user may write to them once they
        # are shown. So they are copied now, while every rank is in this call. Later nobody may wait for a peer: one
        # rank may run the model alone (an evaluation on rank 0).
        if begun and self.collectives.transport.reads_peers:
            self._wait_for_readers()
            for unit in begun:
                unit.weights.arrive()
            self._read_by_peers = self.collectives.acknowledge()
        if any(not unit.spec.modules for unit in begun):  # no forward will wait for them
            self.settle()

    def _wait_for_readers(self) -> None:
        """Before weights that rest in full are shown."""
        self._read_by_peers.wait()

    def bring(self, unit: Unit) -> None:
        """Somebody reads weights that rest in full, and are hidden since a step so that they can arrive behind the
        next forward. All ranks have been in that step, so this one may wait for them alone."""
        # Not in a worker ([Note: forked workers] in `watch.py`), where no message arrives, nor on a thread beside the
        # one that may be showing them at this moment.
        is_own_thread = (os.getpid(), threading.get_ident()) == self._own_thread
        if is_own_thread and unit not in self._begun and unit.weights.state is not Residency.SHARDED:
            with torch.no_grad():
                unit.weights.arrive()
                self._wait_for_readers()
                unit.weights.show()

    def finish(self) -> None:
        """Wait for everything that is arriving (what was expected to be needed next, say, and was not)."""
        self.read()
        for unit in self.units:
            if unit.weights.state is Residency.GATHERING:
                unit.weights.arrive()

    def settle(self) -> None:
        """The same; and weights that rest in full are shown."""
        self.finish()
        self._wait_for_readers()
        for unit in self.units:
            if unit.weights.is_resting_in_full:
                unit.weights.expect_in_place()
                unit.weights.show()

    @phase(of_unit("unshard"))
    def unshard(self, unit: Unit, *, apart: bool = False) -> None:
        """Gather one unit outside of any forward. `apart`: not in a pool buffer, which others may need meanwhile."""
        self._wait_for_readers()
        unit.weights.expect_in_place()
        if apart and unit.weights.buffer.borrows:
            unit.weights.drop()
            unit.weights.gather(self.collectives, "unshard", unit.weights.own().new_empty(unit.layout.numel))
        elif unit.weights.state is Residency.SHARDED:
            self.start(unit, "unshard")
        unit.weights.arrive()

    @phase(of_unit("read in full"))
    def read_in_full(self, unit: Unit, *, main: bool = True) -> list[Tensor]:
        """Values of each slot, in the parameter's shape, from all ranks: main's, or the weights' (as of a frozen unit
        always). They may be gone when the next unit is read. Collective."""
        if main and unit.trainable:
            full = unit.gather_main(self.collectives)
        else:
            self.unshard(unit)
            full = unit.weights.full
        return [full[slot.world.slice].view(slot.shape) for slot in unit.layout.slots]

    def vacate(self, buffer: PoolBuffer) -> bool:
        """Nobody needs the weights in it any more, unless a forward or a scope that shows them is under way."""
        unit: Unit | None = buffer.occupant
        if unit is None or unit.weights.state is Residency.SHARDED:
            return True
        if unit.weights.in_use:
            return False
        unit.weights.drop()
        return True

    @phase(of_unit("gather"))
    def _unshard(self, unit: Unit, during: During) -> None:
        weights = unit.weights
        if weights.state is Residency.SHARDED:
            self.start(unit, during)
        weights.arrive()
        # Their peers may still be reading this rank's weights, which its user may write to once they are shown.
        self._wait_for_readers()
        weights.show()
        before, previous = self._last
        self._follower[during, previous if before == during else None] = unit
        self._last = (during, unit)
        # [Note: prefetch order]
        # The unit that came next in the last step, not the next one in the model: what runs may skip units, or run
        # them in another order. A guess from anything that differs between ranks (time, what has arrived) would make
        # them issue gathers in different orders; all of them have gone this way last time. If the order is another
        # one this time, a gather starts late, or another unit takes its buffer over: the values are right all the same.
        follower = self._follower.get((during, unit))
        if follower is not None and follower.weights.state is Residency.SHARDED:
            self._prefetch(follower, during, unit)

    def _prefetch(self, unit: Unit, during: During, current: Unit) -> None:
        """Start gathering unless the buffer is needed now."""
        occupant = self._turns.assigned(unit).occupant if unit.weights.buffer.borrows else None
        if occupant is None or occupant is unit or not self._needed(occupant, current):
            self.start(unit, during)

    def start(self, unit: Unit, during: During) -> None:
        """Let the weights of a unit that is SHARDED arrive, in its buffer."""
        if during in ("forward", "backward"):
            # Before this rank gathers: a follower joins in only when it has read the order (`orders.py`).
            self.collectives.give_order("gather", unit.name, during)
        if unit.weights.buffer.rests_in_full:
            unit.weights.gather(self.collectives, during)
            return
        # The same one each time, though another may be free: see [Note: storage that autograd holds] in `weights.py`.
        buffer = self._turns.assigned(unit)
        if buffer.occupant is not None and buffer.occupant is not unit:
            # [Note: who may take over a pool buffer]
            # The occupant's values are overwritten. A forward that is under way still computes with them, so a unit
            # that runs inside another one gets a buffer of its own. Once a forward is over backward needs them again,
            # but it gathers what is not there (`gather_for_backward`): so nothing else has to be asked, and nothing is
            # freed before a step.
            if buffer.occupant.weights.in_use:  # units that run inside one another cannot take turns
                why = f"unit {unit.name}, which runs inside another one and so can't take turns with it,"
                buffer = self._turns.give(unit, why)
            elif buffer.occupant.weights.state is not Residency.SHARDED:
                buffer.occupant.weights.drop()
        buffer.occupy(unit)
        unit.weights.gather(self.collectives, during, buffer.tensor(unit.layout.numel, unit.weights.buffer.dtype))

    def _needed(self, occupant: Unit, current: Unit) -> bool:
        return occupant is current or occupant in self._protected or occupant.weights.in_use > 0


def _bring(gatherer: weakref.ref[Gatherer], unit: Unit) -> None:
    """For a parameter, which may outlive the model and must not hold its memory."""
    if (living := gatherer()) is not None:
        living.bring(unit)
