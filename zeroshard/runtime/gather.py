"""Gathers weights: before the module that needs them, one unit ahead, into a few pool buffers.

    forward    buffer 0 | gather u0 | compute u0 | gather u2  | compute u2 ...
               buffer 1             | gather u1  | compute u1 | gather u3 ...

Each unit always uses the same pool buffer (autograd holds views of it), and two neighbours in execution order have
different ones. No memory is freed during forward: a unit whose forward is over is hidden, and keeps the buffer until
another unit needs it. Units that still have their buffer when backward comes, the last ones of the forward, are not
gathered again. A step gives the buffers back (`pool.py`).

Backward runs the nodes of the graph in the reverse of the order in which forward made them. So when it reaches the
output of a unit, all units that ran later in forward are done, and only the unit reached last must keep its buffer.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.pending import Pending
from zeroshard.comm.ranges import phase
from zeroshard.errors import InvalidState
from zeroshard.layout.pool_plan import PoolPlan
from zeroshard.runtime.prefetch_order import During, Order
from zeroshard.runtime.root_parts import RootParts
from zeroshard.storage.pool import Pool, PoolBuffer, Turns
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency, Weights


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _during() -> During:
    """The phase of a call that is made now."""
    return "backward" if in_backward() else "forward"


class Gatherer:
    """Gathers and hides the weights of all units of a model.

    Attributes:
        number_of: unit -> the number of its last gather.
        before_wait: called before this rank waits for peers that are not at a gather yet.
        turns: which unit uses which pool buffer.
        lock: of the running calls; also held where weights are shown between them, as other threads may evaluate.
    """

    during = staticmethod(_during)
    lock: AbstractContextManager[Any] = nullcontext()

    def __init__(self, units: Sequence[Unit], collectives: Collectives, pool: Pool) -> None:
        self.units, self.collectives = units, collectives
        self.order = Order()
        self._protected: tuple[Unit, ...] = ()
        self._called: set[Unit] = set()  # units whose modules ran since their last update
        self._uncalled: set[Unit] = set()  # units updated twice without a call in between: other modules use them
        self._begun: list[Unit] = []  # updated units whose gather has begun; peers' shards may not be copied yet
        self._read_by_peers = Pending()  # done when the peers have copied this rank's updated shards
        self._own_thread = os.getpid(), threading.get_ident()
        self._parts = RootParts(units, self.start, self._before_waiting_for)
        self.number_of: dict[Unit, int] = {}
        self._numbers = itertools.count(1)
        self.before_wait: Callable[[], None] = lambda: None
        requests = {
            unit: unit.spec.weight_request(unit.layout.numel, in_common=unit.weights.place is not None)
            for unit in units
            if unit.weights.buffer.borrows
        }
        self.turns = Turns(pool, "ring", PoolPlan.for_weights(requests.values()), requests, self)
        # A read may be in a frame that torch.compile has compiled up to here; it must not compile what it calls.
        bring = torch.compiler.disable(_bring)  # type: ignore[no-untyped-call]
        for unit in units:
            if unit not in requests or unit.spec.is_part:
                unit.weights.absent.bring = partial(bring, weakref.ref(self), weakref.ref(unit))

    def begin_forward(self) -> None:
        """Called before a forward of the model. Weights that rest in full may be read by modules of other units (a head
        that uses the weight of a layer). Where a unit's own modules are not called, no hook waits for its weights."""
        self._wait_for_readers()
        for unit in self._uncalled:
            if unit.weights.state is Residency.GATHERING:
                unit.weights.arrive()
                unit.weights.show()

    def enter(self, units: Sequence[Unit], gathers: Sequence[Unit]) -> None:
        """A forward that needs these units begins. `gathers`: those that it gathers now. The others are gathered while
        it runs, and waited for by calls inside it, or by a read (`bring`)."""
        self._called.update(gathers)
        # All counters first: the prefetch in `_unshard` must not take the buffer of another of these units.
        for unit in units:
            unit.weights.in_use += 1
        if not self._parts and all(unit.weights.shown for unit in gathers):
            return
        during = self.during()
        with torch.no_grad():
            if len(gathers) < len(units):
                self._parts.start(None, during)
            for unit in gathers:
                if unit.weights.shown:
                    self._parts.start(unit, during)
                else:
                    self._unshard(unit, during)

    def show_ahead(self, units: Sequence[Unit]) -> None:
        """Gather and show units before the call that needs them: a module around it looks at their parameters."""
        with torch.no_grad():
            for unit in units:
                if not unit.weights.shown:
                    self._unshard(unit, self.during())

    def put_away(self, units: Sequence[Unit]) -> None:
        """Hide the units that no forward needs any more, if they only borrow their full weights."""
        for unit in units if self.during() == "forward" else ():
            if unit.weights.is_passing:
                unit.weights.put_away()

    def leave(self, units: Sequence[Unit], *, waits: bool) -> list[Unit]:
        """A forward that needs these units is over. Returns those that no running forward needs and that only borrow
        their full weights: backward may have to gather them again. `waits`: whether to wait for root parts that are
        still in flight; after an error, which another rank may have caused, they may never arrive."""
        for unit in units:
            unit.weights.in_use -= 1
        free = [unit for unit in units if unit.weights.is_passing]
        if any(unit.spec.is_part for unit in free):
            if waits:
                self._parts.let_arrive()
            # Root parts that were not gathered, as no unit in front of them ran, are not needed in backward either.
            gone = (Residency.SHARDED,) if waits else (Residency.SHARDED, Residency.GATHERING)
            free = [unit for unit in free if not unit.spec.is_part or unit.weights.state not in gone]
        self.put_away(free)
        return free

    def gather_for_backward(self, units: Sequence[Unit]) -> None:
        """Backward has reached the output of a module whose forward needed these units: start to gather them."""
        inner = tuple([unit for unit in units if not unit.spec.outer])
        # Protect only the units that backward reached last, and do so before the gather, which prefetches. All units
        # that ran later in forward are done. If the previous unit stayed protected, the prefetch would find both pool
        # buffers needed, and backward would never gather ahead.
        if inner:
            self._protected = inner
        for unit in units:
            if unit.weights.state is Residency.SHARDED:
                self.start(unit, "backward")

    def enter_backward(self, units: Sequence[Unit]) -> None:
        """Like `gather_for_backward`, and wait for the weights and show them."""
        self.gather_for_backward(units)
        for unit in units:
            if not unit.weights.shown:
                self._unshard(unit, "backward")

    def expect_to_stay(self, units: Sequence[Unit]) -> None:
        """Check that these weights stay in their buffers: a second backward will read them through views.

        Raises:
            RuntimeError: another unit takes turns in one of the buffers.
        """
        for unit in units:
            if not self.turns.is_alone(unit):
                raise InvalidState(
                    f"create_graph: a gradient of a gradient needs the weights of unit {unit.name} again, and under "
                    "this plan those of other units replace them in memory. Run forward and both backwards inside "
                    "`with handle.unsharded():`, or use a plan with replicated weights (zero2)"
                )

    def let_differentiate(self) -> None:
        """A backward begins that adds to no gradients."""
        for unit in self.units:
            unit.weights.versions.may_be_differentiated = not unit.weights.shown

    def end_backward(self, *, has_raised: bool = False) -> None:
        """`has_raised`: what has raised may have written to weights that are shown."""
        self._protected = ()
        for unit in self.units:
            if unit.weights.is_passing:
                if has_raised and unit.weights.shown:
                    unit.weights.drop(may_be_written=True)
                unit.weights.put_away(after_forward=False)

    @phase("step: updated", of_unit=True)
    def updated(self, unit: Unit, slots: Collection[int] | None = None) -> None:
        """The optimizer has changed the own interval (`slots`: only in these slots). Weights that rest in full, or are
        shown by an open scope, start to be gathered from the other ranks. Collective."""
        unit.weights.versions.renew(slots)
        were_there = unit.weights.state is not Residency.SHARDED
        if were_there and self.collectives.mesh.world.size == 1:  # nothing to gather, and nobody to compare with
            self._called.discard(unit)
            return
        unit.weights.drop(forget=unit.weights.scopes > 0 and unit.weights.buffer.borrows)
        if unit.weights.buffer.rests_in_full:
            # If the weights were not complete before (after a failed write inside `unsharded`, for example), more than
            # these slots is missing: gather everything.
            unit.weights.gather(self.collectives, "step", slots=slots if were_there else None)
            self._begun.append(unit)
            # A read of a root part waits for it (`bring`), so `begin_forward` need not.
            is_awaited = unit in self._called or unit.spec.is_part
            (self._uncalled.discard if is_awaited else self._uncalled.add)(unit)
        elif unit.weights.scopes:
            unit.weights.gather(self.collectives, "unshard", unit.apart.take())
            self._begun.append(unit)
        self._called.discard(unit)

    @phase("step: read from peers")
    def read(self) -> None:
        """Copy the peers' updated shards, if ranks read each other's memory. Call it while all ranks are still in the
        call in which they have updated their shards."""
        begun, self._begun = self._begun, []
        # [Note: reading weights inside the step]
        # In shared memory nothing moves before a wait, and the peer's user may write to the peer's weights once they
        # are shown. So copy them now, while every rank is in this call. Later no rank may wait for a peer: one rank may
        # run the model alone (an evaluation on rank 0).
        if begun and self.collectives.transport.reads_peers:
            self._wait_for_readers()
            for unit in begun:
                unit.weights.arrive()
            self._read_by_peers = self.collectives.acknowledge()
        for unit in begun:
            if unit.weights.buffer.is_lent or (unit.weights.scopes and unit.weights.buffer.borrows):
                self._show(unit.weights)
        # No forward hook will wait for them: units without modules, and a replay runs no hook.
        if begun and (self.collectives.is_recorded or any(not unit.spec.modules for unit in begun)):
            self.settle()

    def _show(self, weights: Weights) -> None:
        """Wait for weights whose gather has begun, and show them."""
        weights.arrive()
        self._wait_for_readers()
        weights.show()

    def _wait_for_readers(self) -> None:
        """Wait until the peers have copied this rank's updated shards. Required before weights are shown: the user may
        then write to them."""
        self._read_by_peers.wait()

    def bring(self, unit: Unit) -> None:
        """The user reads weights that are hidden.

        If they rest in full, a step has started to gather them, and they arrive while the next forward runs. All ranks
        have been in that step, so this rank may wait alone. If a running forward keeps them, but they are not gathered
        yet (a root part that it does not call, and no unit in front of it has run), they are gathered now: as in a
        call, every rank has to do so."""
        # Not in a forked worker ([Note: forked workers] in `watch.py`), where no message arrives, and not on another
        # thread, as the main thread may be showing them at the same time. (On an accelerator a backward, and what it
        # computes again, runs on a thread of torch, and the main thread waits for it.)
        self.collectives.come()
        process, thread = self._own_thread
        is_own_thread = process == os.getpid() and (thread == threading.get_ident() or in_backward())
        if unit.weights.buffer.borrows:
            if is_own_thread and unit.weights.in_use:
                with torch.no_grad():
                    self._unshard(unit, self.during())
        elif is_own_thread and unit not in self._begun and unit.weights.state is not Residency.SHARDED:
            with self.lock, torch.no_grad():
                self._show(unit.weights)

    def forget_order(self) -> None:
        """Forget which unit follows which, and drop what is gathered: the ranks have run different forwards (in a
        join), and begin anew alike."""
        self.order = Order()
        for unit in self.units:
            if unit.weights.is_passing:
                unit.weights.drop()

    def finish(self) -> None:
        """Wait for all gathers in flight (for example a prefetch whose weights were not needed)."""
        self.read()
        for unit in self.units:
            if unit.weights.state is Residency.GATHERING:
                unit.weights.arrive()

    def settle(self) -> None:
        """Like `finish`, and show weights that rest in full."""
        with self.lock:
            self.finish()
            self._wait_for_readers()
            for unit in self.units:
                if unit.weights.is_resting_in_full:
                    unit.weights.expect_in_place()
                    unit.weights.show()

    @phase("unshard", of_unit=True)
    def unshard(self, unit: Unit, *, apart: bool = False) -> None:
        """Gather one unit outside of any forward, and wait for it. Collective. `apart`: into a tensor of its own
        instead of a pool buffer, which other units may need in the meantime."""
        self._wait_for_readers()
        unit.weights.expect_in_place()
        if apart and unit.weights.buffer.borrows:
            unit.weights.drop()
            unit.weights.gather(self.collectives, "unshard", unit.apart.take())
        elif unit.weights.state is Residency.SHARDED:
            self.start(unit, "unshard")
        unit.weights.arrive()

    @phase("read in full", of_unit=True)
    def read_in_full(self, unit: Unit, *, main: bool) -> list[Tensor]:
        """Full values of each slot, in the parameter's shape: main's, or the weights' (always, for a frozen unit). They
        are valid only until the next unit is read. Collective."""
        if main and unit.trainable:
            return unit.gather_main(self.collectives).views()
        self.unshard(unit)
        return unit.weights.buffer.views()

    def vacate(self, buffer: PoolBuffer) -> bool:
        """Drop the weights in a pool buffer. False if a running forward or an open scope needs them."""
        unit: Unit | None = buffer.occupant
        if unit is None or unit.weights.state is Residency.SHARDED:
            return True
        if unit.weights.in_use:
            return False
        unit.weights.make_room()
        return True

    @phase("gather", of_unit=True)
    def _unshard(self, unit: Unit, during: During) -> None:
        weights = unit.weights
        if weights.state is Residency.SHARDED:
            self.start(unit, during)
        self._parts.start(unit, during)  # before the prefetch below, as it is needed before what that one gathers
        self._parts.let_arrive(self.number_of.get(unit, 0))
        self._before_waiting_for(weights)
        self._show(weights)
        if unit.spec.is_part:
            return
        follower = self.order.follow(unit, during)
        if follower is not None and follower.weights.state is Residency.SHARDED:
            self._prefetch(follower, during, unit)

    def _before_waiting_for(self, weights: Weights) -> None:
        """See `before_wait`."""
        if not weights.buffer.pending.has_arrived:
            self.before_wait()

    def _prefetch(self, unit: Unit, during: During, current: Unit) -> None:
        """Start to gather a unit, unless the occupant of its buffer is still needed."""
        occupant = self.turns.assigned(unit).occupant if unit.weights.buffer.borrows else None
        protected = occupant is current or occupant in self._protected
        if occupant in (None, unit) or not (protected or occupant.weights.in_use > 0):
            self.start(unit, during)

    def start(self, unit: Unit, during: During) -> int:
        """Start to gather a SHARDED unit into its buffer. Returns the number of this gather. Collective."""
        number = self.number_of[unit] = next(self._numbers)
        if during in ("forward", "backward"):
            # Before the gather: a follower of a join takes part only after it has read the order (`orders.py`).
            self.collectives.give_order("gather", unit.name, during)
        if unit.weights.buffer.rests_in_full:
            unit.weights.gather(self.collectives, during)
            return number
        # Always the same buffer, even if another one is free: see [Note: storage that autograd holds] in `weights.py`.
        buffer = self.turns.assigned(unit)
        if buffer.occupant is not None and buffer.occupant is not unit:
            # [Note: who may take over a pool buffer]
            # The occupant's values are overwritten. A running forward still computes with them, so a unit that runs
            # inside another one gets a buffer of its own. After its forward, only backward needs the occupant again,
            # and it gathers units that are not resident (`gather_for_backward`). So `in_use` is the only condition.
            if buffer.occupant.weights.in_use:
                why = f"unit {unit.name}, which runs inside another one and so can't take turns with it,"
                buffer = self.turns.give(unit, why)
            elif buffer.occupant.weights.state is not Residency.SHARDED:
                self._before_waiting_for(buffer.occupant.weights)
                buffer.occupant.weights.make_room()
        buffer.occupy(unit)
        full = unit.weights.place
        if full is None:
            full = buffer.tensor(unit.layout.numel, unit.weights.buffer.dtype)
        unit.weights.gather(self.collectives, during, full)
        return number


def _bring(gatherer: weakref.ref[Gatherer], unit: weakref.ref[Unit]) -> None:
    """Called by an absent parameter. Weak: a parameter, and its class, which a free-threaded Python 3.13 never frees,
    may outlive the model, and must not keep its memory alive."""
    if (living := gatherer()) is not None and (of := unit()) is not None:
        living.bring(of)
