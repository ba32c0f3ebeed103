"""Reduces gradients unit by unit during backward, in one fixed order on every rank.

    accumulated   u3 u2 u1 u0            (as backward produces them, maybe differently on each rank)
    reduced          u3 u2 u1 u0         (always this order: see `in_order_of_reduction`; an early unit waits)

A unit is *ready* when all its trainable parameters have a gradient in this backward. Parameters without a gradient at
the end of backward contribute zeros. So the sequence of collectives never depends on the graph of one rank.

[Note: one order]
A rank without a gradient for a unit can reduce it no earlier than backward comes to the next unit, behind the gather of
that. So every rank reduces a unit in that place, and no other unit that has all its gradients already, as a peer may
have some to come. Backward comes to that place as soon as it is done with the unit. Else ranks wait for each other:
NCCL wants the operations of several communicators (gathers and reductions have one each) in one order on all ranks, and
in shared memory a rank that needs scratch for its reductions waits for peers that wait for its gather.

[Note: peers wait for a reader]
A gradient needs a bucket. Where ranks read each other's memory, that may have to wait until the peers have read what is
in it. They may need no bucket themselves: without a gradient of the unit, or with one from an earlier micro-batch. So
each rank reads what has been started when backward goes on to another unit, and before it waits for a gather: else it
would wait for a peer that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.ranges import phase
from zeroshard.comm.transport import Reduction
from zeroshard.errors import InvalidState
from zeroshard.gradients.loss_ledger import LossLedger
from zeroshard.gradients.origins import Origins
from zeroshard.gradients.visible import VisibleGradients
from zeroshard.model.unit_spec import in_order_of_reduction
from zeroshard.placement import PARTIAL
from zeroshard.runtime.calls import ToCome
from zeroshard.runtime.reach import is_accumulated
from zeroshard.runtime.reductions import Reductions
from zeroshard.runtime.single_uses import SingleUses
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.pool import Pool
from zeroshard.storage.unit import Unit


@dataclass
class Now:
    """The state of one backward.

    Attributes:
        cursor: how many units of the order have started to be reduced, or need not be.
        done: units that backward is done with.
        complete_but_seen: a unit is complete, and the user's hooks may still change its last gradient.
        in_front: other models, which come first; see [Note: several models in one backward] in `one_backward.py`.
        is_awaited: another model waits for its turn.
    """

    cursor: int = 0
    done: set[Unit] = field(default_factory=set)
    complete_but_seen: bool = False
    in_front: list[Reducer] = field(default_factory=list)
    is_awaited: bool = False


class Reducer:
    """Accumulates and reduces the gradients of all trainable units of a model.

    Attributes:
        grads: unit -> its gradients, in the order in which units are reduced.
        order: units with slots that are summed, in this order.
        local: units whose gradients are only accumulated, in full-size buckets, and not reduced (`no_sync`).
        ledger: the scale of the buckets' values.
        visible: shows gradients in `p.grad`.
        origins: finds gradients of this rank that were not finite.
        single_uses: parameters whose gradients are not cast before they are here.
        to_come: what backward has not come to.
        now: the state of this backward.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives, pool: Pool, ledger: LossLedger) -> None:
        ordered = in_order_of_reduction(units)
        self.grads = {unit: unit.grads for unit in ordered if isinstance(unit.grads, Gradients)}
        self.find_order()
        self.collectives = collectives
        self.local: frozenset[Unit] = frozenset()
        self.ledger = ledger
        self.visible = VisibleGradients(tuple(self.grads), collectives, ledger)
        self.origins = Origins(collectives.mesh.world.size)
        self.single_uses = SingleUses(tuple(self.grads))
        self.to_come = ToCome()
        self._pool = pool
        self.now = Now()
        self._reductions = Reductions(self.grads, collectives, pool)

    def find_order(self) -> None:
        """Compute `order` and positions again. Call it between two backwards, after slots that are summed have
        changed."""
        self.order = [unit for unit, grads in self.grads.items() if grads.summed]
        self._position_of = {unit: position for position, unit in enumerate(self.order)}
        of_root = [position for unit, position in self._position_of.items() if unit.spec.of_root]
        self._root_begins = min(of_root, default=len(self.order))

    def accumulate_locally(self, units: frozenset[Unit]) -> None:
        """Accumulate the gradients of exactly these units without reducing them, from now on.

        Raises:
            RuntimeError: the pool's limit does not allow that many buckets.
        """
        self._reductions.expect_room(units)
        self.local = units

    def expect_backward(self, loss: Tensor, *, is_plain: bool) -> AbstractContextManager[None]:
        """The scope in which an optimizer runs `loss.backward()`. `is_plain`: without arguments that matter."""
        return self.single_uses.within(loss) if is_plain else nullcontext()

    @phase("begin of backward")
    def begin_backward(self) -> None:
        """A backward begins to accumulate gradients."""
        self.single_uses.began()
        before = self.version
        self.origins.take(before)
        # Before any gradient: autograd would add to the view of the bucket that lies in `p.grad`.
        self.visible.withdraw()
        self.forget_losses()
        if self.collectives.orders is not None and self.has_gradients():
            self.collectives.orders.expect_no_edits(before)
        loss = self.ledger.loss
        self.ledger.expect_alike(is_weighted=loss.is_weighted)
        self.collectives.give_order("backward", self.waiting(), loss.scale, loss.is_weighted)
        self.ledger.begin()

    def forget_losses(self) -> None:
        """Forget scale and origins, if all gradients have been used or discarded."""
        if not self.has_gradients():
            self.ledger.forget_gradients()
            self.origins.clear()

    def waiting(self) -> list[str]:
        """Names of the units whose gradients wait for a step."""
        return [unit.name for unit in self.order if unit.grads.state is not GradState.EMPTY]

    def keep_only(self, waiting: Sequence[str]) -> None:
        """Discard the gradients of all other units."""
        for unit in self.order:
            if unit.name not in waiting:
                self.grads[unit].consume()

    def has_gradients(self, *, reduced: bool = False) -> bool:
        """Whether gradients wait for a step. `reduced`: only those that have been reduced."""
        states = [unit.grads.state for unit in self.grads]
        return GradState.REDUCED in states if reduced else states.count(GradState.EMPTY) < len(states)

    @property
    def version(self) -> object:
        """A value that stays equal as long as no reduced gradient changes."""
        return self.visible.version

    def notice(self) -> dict[tuple[int, int], Tensor]:
        """See `VisibleGradients.notice`."""
        by_hand = self.visible.notice()
        self.forget_losses()
        return by_hand

    @torch.no_grad()
    def reduce_by_hand(self, terms: dict[tuple[int, int], Tensor]) -> None:
        """Reduce gradients that users have set in `p.grad`: to the mean over ranks, where a rank that has set none
        contributes zeros. Collective.

        Args:
            terms: (index of the unit, slot) -> this rank's gradient.
        """
        wanted = {
            tuple(key)
            for keys in self.collectives.exchange_objects(sorted(terms), "a step with gradients set by hand")
            for key in keys
        }
        for unit in self.grads:
            slots = sorted(index for of_unit, index in wanted if of_unit == unit.index)
            if slots:
                self._reduce_slots(unit, {index: terms.get((unit.index, index)) for index in slots})
        self.visible.show()

    def set_gradient(self, unit: Unit, index: int, values: Tensor) -> None:
        """Set the reduced gradient of one slot to `values` (in its shape, without the loss scale, the same on every
        rank). Raises RuntimeError if losses have weights."""
        grads, world = self.grads[unit], unit.layout.slots[index].world
        self.notice()
        self.ledger.begin_without_loss()
        held = (world & grads.held_interval).relative_to(world.start)
        self._assign(unit, index, values.reshape(-1)[held.slice] * self.ledger.scale)
        self.collectives.log.record("set gradient", f"{unit.name}: {unit.layout.slots[index].name}", "step", 0)
        self.visible.show()

    def _assign(self, unit: Unit, index: int, part: Tensor) -> None:
        grads = self.grads[unit]
        if grads.state is GradState.EMPTY:
            self._reductions.close(unit, grads)
        self.visible.assign(unit, index, part)

    def _reduce_slots(self, unit: Unit, terms: dict[int, Tensor | None]) -> None:
        """Reduce some slots in a storage of their own: this is rare, and buckets may hold gradients of other slots."""
        sums = _reduced_apart(unit, self.grads[unit], terms, self.collectives)
        for index in terms:
            held = unit.layout.slots[index].world & self.grads[unit].held_interval
            self._assign(unit, index, sums[held.slice])
        self.collectives.exchange_objects(None)  # after this, no peer reads the memory that is freed on return

    def accumulate(self, unit: Unit, index: int, parameter: nn.Parameter) -> None:
        """Backward has written a parameter's gradient: move it into the unit's bucket."""
        grads = self.grads[unit]
        if index not in grads.summed:
            raise InvalidState(
                f"parameter {unit.layout.slots[index].name} has a gradient, and did not require grad when the model "
                "was called last: let it require grad before the model (not only a part of it) is called"
            )
        is_reduced = unit not in self.local
        if is_reduced and self._position_of[unit] < self.now.cursor:
            raise InvalidState(
                f"{unit.layout.slots[index].name} got a second gradient in one backward, after its unit has been "
                "reduced: the unit runs in several reentrant checkpoints, or in parts of a reversible layer. Use "
                "checkpoint(..., use_reentrant=False) (torch DDP asks for the same), or units= the class of the "
                "modules that are checkpointed, or reversible. Or a hook has run a backward of its own inside of this "
                "one: run it before or after"
            )
        if self.now.complete_but_seen:  # the user's hooks have run for the previous gradient by now
            self._advance()
        # [Note: the user's gradient hooks]
        # Hooks of one parameter run in the order of registration. So hooks that the user has added after shard() have
        # not seen this gradient yet, and may still change it. It stays in `p.grad` until the unit is reduced: at the
        # next gradient of any unit at the earliest, or at the end of backward.
        seen_by_others = len(parameter._post_accumulate_grad_hooks or ()) > 1
        if seen_by_others:
            unit.weights.versions.look(index)
        else:
            self._take(unit, index, grads)
        grads.ready.add(index)
        self._reductions.finish_early()
        if is_reduced and grads.summed <= grads.ready and not self.to_come.has_any():  # see [Note: one order]
            self.now.complete_but_seen = seen_by_others
            if not seen_by_others:
                self._advance()

    def _take(self, unit: Unit, index: int, grads: Gradients) -> None:
        """Move `p.grad` into the bucket."""
        parameter = unit.parameters[index]
        if (grad := parameter.grad) is None:
            return
        # At once: autograd would add the next gradient to it, and the bucket would count this one twice.
        parameter.grad = None
        if grad.requires_grad:  # create_graph
            grad, self.visible.had_graphs = grad.detach(), True
        if grad.layout is not torch.strided:  # nn.Embedding(sparse=True)
            grad = grad.to(grads.buffer.dtype).to_dense()  # in the wide dtype, as it adds up the rows of equal indices
        if grads.buffer.placement is not PARTIAL:
            self.open(unit)
        grads.accumulate(index, self.ledger.add(grad, grads.buffer.dtype) if self.ledger.looks_or_scales else grad)

    def complete(self, unit: Unit, *, at_end: bool = False) -> bool:
        """Backward is done with the unit: reduce it, with zeros for parameters without a gradient. False, without
        effect, if the graph still has a gradient for one of them (`at_end`: the graph has been run completely)."""
        if unit in self.local or self._position_of.get(unit, -1) < self.now.cursor:
            return True
        ready = self.grads[unit].ready
        missing = [p for i, p in enumerate(unit.parameters) if i not in ready]
        if not at_end and any(map(is_accumulated, missing)):
            return False
        ready.update(range(len(unit.parameters)))
        self.now.done.add(unit)
        self.read_peers()
        self._advance(self.now.done)
        return True

    @torch.no_grad()
    @phase("end of backward")
    def end_backward(self) -> None:
        """Reduce the remaining units, with zeros for missing gradients, and wait for all reductions. `show` follows."""
        for index, unit in enumerate(self.order):
            if unit in self.local:
                self._take_all(unit)
                if (look := self._origin_of(unit)) is not None:
                    look()  # the next backward adds to these gradients
            elif index >= self.now.cursor:
                self.reduce(unit)
        # Before this rank waits for its reductions: followers of a join must have the order to take part in them.
        self.collectives.give_order("end")
        self._finish()
        self.single_uses.end()  # before `show`: torch checks the dtype of what is put into `p.grad`

    def show(self) -> None:
        """Show gradients in `p.grad`, at the end of a backward."""
        self.visible.show()
        self.origins.end_backward(self.version)
        if self.collectives.orders is not None:
            self.collectives.orders.version = self.visible.version

    def open(self, unit: Unit) -> None:
        """Open the bucket of a unit, unless it is open. (Also if this rank has no new gradients for it.)"""
        grads = self.grads[unit]
        if grads.state is not GradState.PARTIAL:
            if unit not in self.local:
                self.collectives.give_order("open", unit.name)
            self._reductions.open(unit, grads)

    def read_peers(self) -> None:
        """See [Note: peers wait for a reader]."""
        self._reductions.read_peers()

    def end_following(self) -> None:
        """On a follower of a join: end the backward, without reducing further units."""
        self.now.cursor = len(self.order)
        self.end_backward()
        self.show()

    @torch.no_grad()
    def abandon_backward(self) -> bool:
        """A backward has raised: wait for its reductions, and discard all gradients, as they are incomplete. (Plain
        torch keeps them until `zero_grad`. Whether the user has called that in the meantime is not known here.)
        Returns whether it had added to gradients of earlier ones."""
        adds = self.origins.has_ended_backward
        self._finish()
        for unit, grads in self.grads.items():
            grads.consume()
            unit.weights.versions.forget_looks()
            for parameter in unit.parameters:
                parameter.grad = None
        self.visible.changed()
        self.ledger.discard_losses()
        return adds

    def _finish(self) -> None:
        """Wait for all reductions, and reset the records of this backward."""
        self._reductions.end()
        self.now = Now()
        for grads in self.grads.values():
            grads.settle()

    def use_idle_buckets(self) -> None:
        """At the beginning of a step: move reduced gradients into idle buckets (`Pool.lodge`)."""
        self._pool.lodge(grads.buffer for grads in self.grads.values() if grads.may_move)

    def _advance(self, among: Collection[Unit] | None = None) -> None:
        """Reduce units in `order`, up to the first that is not ready or not `among` these: every rank must issue
        reductions in the same order, so a later unit that is ready earlier on this rank must wait."""
        while self.now.cursor < len(self.order):
            unit = self.order[self.now.cursor]
            if unit not in self.local:
                is_ready = self.grads[unit].summed <= self.grads[unit].ready and (among is None or unit in among)
                if not is_ready or self.to_come.has(unit) or not self._may_start(unit) or not self._has_turn():
                    return
                self.reduce(unit)
            self.now.cursor += 1

    def _may_start(self, unit: Unit) -> bool:
        """Whether a reduction may start before the end of backward; see [Note: the root in the order of reduction] in
        `unit_spec.py`. (Those of the root are ready only when backward comes to no unit any more.)"""
        if self.now.cursor < self._root_begins or self.now.is_awaited:
            return True
        waits_for = self._reductions.must_finish_before(unit)
        # Not if it waits for the one before it: computation would wait for all of that one.
        return waits_for is None or self._position_of[waits_for] < min(self._root_begins, self.now.cursor - 1)

    def _has_turn(self) -> bool:
        """Whether the reducers in front of this one leave the turn to it."""
        while self.now.in_front and self.now.in_front[0].leave_turn():
            first = self.now.in_front.pop(0)
            if not self._reductions.waits_for_none:
                first.wait_for_started()
        return not self.now.in_front

    def wait_for_started(self) -> None:
        """Wait for the reductions that have started."""
        self.collectives.give_order("wait")  # as before the end of a backward
        self._reductions.end()

    def leave_turn(self, *, of_visits: bool = False) -> bool:
        """Another model comes: start to reduce what is complete, also of the root. Whether this was all. `of_visits`:
        it has come to all visits of this one, so the root is done, too: where this rank has no gradient, peers may."""
        for unit in self.order[self._root_begins :] if of_visits else ():
            self.complete(unit)
        self.now.is_awaited = True
        self._advance(self.now.done if self.to_come.has_any() else None)
        return self.now.cursor == len(self.order)

    def _take_all(self, unit: Unit) -> None:
        """Move gradients that the user's hooks have left in `p.grad`, or that the user has put there before this
        backward, into the bucket. (Gradients of slots that are not summed stay in `p.grad`.)"""
        grads = self.grads[unit]
        unit.weights.expect_unwritten_by_hooks()
        for index in sorted(grads.summed):
            if unit.parameters[index].grad is not None:
                self._take(unit, index, grads)

    def _origin_of(self, unit: Unit) -> Callable[[], None] | None:
        """See `Origins.remember`."""
        grads = self.grads[unit]
        return self.origins.remember(unit, grads) if grads.state is GradState.PARTIAL else None

    @phase("reduce", of_unit=True)
    def reduce(self, unit: Unit) -> None:
        """Start to reduce the unit, with zeros for missing gradients."""
        grads = self.grads[unit]
        self._take_all(unit)
        self.open(unit)
        look = self._origin_of(unit)
        # Before `start`, which may wait for an earlier reduction: a follower of a join must have the order by then.
        self.collectives.give_order("reduce", unit.name)
        self._reductions.start(unit, grads, look)


def _reduced_apart(unit: Unit, grads: Gradients, terms: dict[int, Tensor | None], collectives: Collectives) -> Tensor:
    """The reduced values of these slots, in a full buffer. Peers may read it until the next exchange."""
    # In memory that peers can map, as they read it. It must live until the last exchange.
    sums = unit.new_buffer(grads.buffer.dtype, PARTIAL, collectives.transport.allocate)
    assert sums.full is not None
    for index, term in terms.items():
        if term is not None:
            sums.views()[index].copy_(term.to_dense() if term.layout is not torch.strided else term)
    transport, mesh = collectives.transport, collectives.mesh
    needed = unit.spec.reduce_scratch(type(transport), mesh.reduce.size, mesh.replicate.size, in_place=True)
    scratch = torch.empty(max(needed), dtype=torch.uint8, device=sums.full.device)
    collectives.map_peers()
    sums.redistribute(
        grads.mean.rests,
        collectives,
        unit=unit.name,
        phase="step",
        portions=unit.layout.portions(terms),
        reduction=Reduction(scratch, grads.mean.wire, grads.mean.num_ranks),
    )
    sums.release()
    return sums.full
