"""When gradients are reduced: unit by unit during backward, in one fixed order on every rank.

    accumulated   u3 u2 u1 u0            (as backward produces them, maybe differently on each rank)
    reduced          u3 u2 u1 u0         (always this order: reverse registration; an early unit waits)

A unit is *ready* when all its parameters that train have a gradient in this backward. What is not ready at the end of
backward takes part with zeros: no collective ever depends on what one rank's graph happens to contain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zeroshard.collectives import Collectives
from zeroshard.gradients import Gradients, GradState
from zeroshard.loss_ledger import LossLedger
from zeroshard.origins import Origins
from zeroshard.pool import Allotment, Place, Pool, beyond_turns
from zeroshard.sums import reduce_scratch_bytes
from zeroshard.unit import Unit
from zeroshard.visible import VisibleGradients

IN_FLIGHT = 2
"""Reductions under way at a time: one arriving, one starting. Where each needs memory of its own (a bucket, scratch)
there is one, while the gradients of the next unit come."""


class Reducer:
    """Accumulates and reduces the gradients of all trainable units of a model.

    Attributes:
        order: units of which something is summed, in the order in which they are reduced.
        local: units whose gradients are accumulated, in full-size buckets, and not reduced.
        ledger: what the buckets' values are multiplied by.
        visible: what the user finds in `p.grad`.
        origins: which gradients of this rank were not finite.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives, pool: Pool, ledger: LossLedger) -> None:
        self._trainable = [unit for unit in reversed(units) if unit.grads is not None]
        self.find_order()
        self.collectives = collectives
        self.local: frozenset[Unit] = frozenset()
        self.ledger = ledger
        self.visible = VisibleGradients(self._trainable, collectives, ledger)
        self.origins = Origins()
        self._pool = pool
        self._cursor = 0
        self._complete_but_seen = False  # a unit whose last gradient hooks of the user still look at
        self._in_flight: deque[tuple[Unit, Place]] = deque()
        self._read_by_peers: deque[Unit] = deque()  # reduced here, perhaps not yet everywhere
        self._buckets: dict[Hashable, list[Place]] = {}  # that units take turns in; a free one has no holder
        self._bucket_of: dict[Unit, Place] = {}  # of its own, for good
        self._last_two: dict[Hashable, list[Unit]] = {}  # of those that take turns, see `Allotment.of_buckets`
        self._borrowed: dict[Unit, Place] = {}
        self._guests: dict[Place, list[Gradients]] = {}  # reduced gradients in idle buckets, see `use_idle_buckets`
        borrowers = [unit for unit in self._trainable if unit.grads is not None and unit.grads.needs_bucket]
        allotment = Allotment.of_buckets(
            (unit.spec.bucket_borrower(unit.layout.numel) for unit in borrowers), collectives.transport
        )
        for unit in borrowers:
            if unit.name in allotment.own:
                self._bucket_of[unit] = self._new_bucket(unit)
        for dtype, (count, num_bytes) in allotment.shared.items():
            self._buckets[dtype] = [pool.place("buckets", num_bytes, self) for _ in range(count)]
            if count > 1 and collectives.transport != "shared":
                of_kind = [unit for unit in borrowers if unit not in self._bucket_of and _kind(unit) == dtype]
                self._last_two[dtype] = of_kind[-2:]
        scratch_bytes = max(
            (_scratch_bytes(unit, collectives, in_place=not borrowers) for unit in self._trainable), default=0
        )
        most_in_flight = 1 if borrowers and (scratch_bytes or collectives.transport != "shared") else IN_FLIGHT
        self._free_scratch = [pool.place("scratch", scratch_bytes, self) for _ in range(most_in_flight)]

    def find_order(self) -> None:
        """Between two backwards: what is summed has changed. Units of which nothing is have no gradients."""
        self.order = [unit for unit in self._trainable if unit.grads is not None and unit.grads.summed]
        self._place_in_order = {unit: place for place, unit in enumerate(self.order)}

    def accumulate_locally(self, units: frozenset[Unit]) -> None:
        """From now on just these are not reduced.

        Raises:
            RuntimeError: the pool's limit does not allow that many buckets.
        """
        borrowers = [u for u in self._trainable if u in units and u.grads is not None and not u.grads.buffer.owns_full]
        without = (u.spec.bucket_borrower(u.layout.numel) for u in borrowers if u not in self._bucket_of)
        more = beyond_turns(without, {kind: len(places) for kind, places in self._buckets.items()})
        self._pool.expect_room(
            sum(borrower.num_bytes for borrower in more),
            "no_sync, which keeps a gradient of full size,",
            "reduce in every backward",
        )
        self.local = units

    def begin_backward(self) -> None:
        """Gradients are going to be accumulated."""
        self.visible.withdraw()
        self.forget_losses()
        loss = self.ledger.loss
        self.collectives.give_order("backward", self.waiting(), loss.scale, loss.is_weighted)
        self.ledger.begin()

    def forget_losses(self) -> None:
        """Once all gradients have been used or discarded."""
        if not self.has_gradients():
            self.ledger.forget_gradients()
            self.origins.clear()

    def waiting(self) -> list[str]:
        """Units of which gradients wait for a step."""
        return [u.name for u in self.order if u.grads is not None and u.grads.state is not GradState.EMPTY]

    def keep_only(self, waiting: Sequence[str]) -> None:
        """Discard the gradients of all other units."""
        for unit in self.order:
            if unit.name not in waiting and unit.grads is not None:
                unit.grads.consume(set(unit.grads.waiting))

    def has_gradients(self, *, reduced: bool = False) -> bool:
        """Whether any wait for a step; `reduced`: only those that have been reduced."""
        states = {unit.grads.state for unit in self._trainable if unit.grads is not None} - {GradState.EMPTY}
        return GradState.REDUCED in states if reduced else bool(states)

    def begins_anew(self) -> bool:
        """Whether what there was has been discarded, perhaps by `model.zero_grad()`."""
        return bool(self.order) and not (self.notice() or self.has_gradients())

    def notice(self) -> dict[tuple[int, int], Tensor]:
        """See `VisibleGradients.notice`."""
        by_hand = self.visible.notice()
        self.forget_losses()
        return by_hand

    @torch.no_grad()
    def reduce_by_hand(self, terms: dict[tuple[int, int], Tensor]) -> None:
        """Gradients that were set by hand become the mean over ranks of what each has set (zeros where it has not).
        Collective.

        Args:
            terms: (index of the unit, slot) -> this rank's.
        """
        wanted = {
            tuple(key)
            for keys in self.collectives.exchange_objects(sorted(terms), "a step with gradients set by hand")
            for key in keys
        }
        for unit in self._trainable:
            slots = sorted(index for of_unit, index in wanted if of_unit == unit.index)
            if slots:
                self._reduce_slots(unit, {index: terms.get((unit.index, index)) for index in slots})

    def set_gradient(self, unit: Unit, index: int, values: Tensor) -> None:
        """The reduced gradient of one slot becomes `values` (in its shape, unscaled, the same on every rank).

        Raises:
            RuntimeError: the step would not take it as it is.
        """
        grads, world = unit.grads, unit.layout.slots[index].world
        assert grads is not None
        self.notice()
        if not self.ledger.has_final and self.ledger.scale == 1.0:
            raise RuntimeError("set_gradient: this step's losses were weighted, and the step divides by their weights")
        held = (world & grads.held_interval).relative_to(world.start)
        self._assign(unit, index, values.reshape(-1)[held.slice] * self.ledger.scale)
        self.collectives.log.record("set gradient", f"{unit.name}: {unit.layout.slots[index].name}", "step", 0)
        self.visible.show()

    def _assign(self, unit: Unit, index: int, part: Tensor) -> None:
        grads = unit.grads
        assert grads is not None
        if grads.state is GradState.EMPTY:
            self._close(unit, grads)
        self.visible.assign(unit, index, part)

    def _reduce_slots(self, unit: Unit, terms: dict[int, Tensor | None]) -> None:
        """In storage of its own: this is rare, and buckets may hold what other slots wait with."""
        grads = unit.grads
        assert grads is not None
        dtype, device, numel = grads.buffer.dtype, unit.weights.own().device, unit.layout.numel
        storage = self.collectives.allocate(numel * dtype.itemsize, device)  # peers can read it as long as this lives
        full = storage.view(dtype)
        for index, term in terms.items():
            if term is not None:
                view = full[unit.layout.slots[index].world.slice].view(term.shape)
                view.copy_(term.to_dense() if term.layout is not torch.strided else term)
        own = full[grads.own_interval.slice]
        scratch = torch.empty(_scratch_bytes(unit, self.collectives, in_place=True), dtype=torch.uint8, device=device)
        self.collectives.meet()
        portions = unit.layout.portions(terms)
        self.collectives.reduce_scatter(
            full,
            own,
            scratch,
            wire=unit.spec.precision.wire,
            unit=unit.name,
            phase="step",
            divisor=grads.num_ranks,
            portions=portions,
        ).release()
        if grads.replicates:
            self.collectives.all_gather(
                full, unit=unit.name, phase="step", acknowledge=True, portions=portions
            ).release()
        for index in terms:
            self._assign(unit, index, full[(unit.layout.slots[index].world & grads.held_interval).slice])
        self.collectives.exchange_objects(None)  # nobody reads any more what is freed here

    def accumulate(self, unit: Unit, index: int, parameter: nn.Parameter) -> None:
        """Backward has left a parameter's gradient: move it into the unit's bucket."""
        grads = unit.grads
        assert grads is not None, "only trainable units accumulate"
        name = unit.layout.slots[index].name
        place = self._place_in_order.get(unit)
        if place is None or index not in grads.summed:
            raise RuntimeError(
                f"parameter {name} has a gradient, and did not require grad when the model was called last: let it "
                "require grad before the model (not only a part of it) is called"
            )
        if place < self._cursor and unit not in self.local:
            raise RuntimeError(
                f"{name} got a second gradient in one backward, after its unit has been reduced: its module runs in "
                "several reentrant checkpoints. Use checkpoint(..., use_reentrant=False) (torch DDP asks for the same)"
            )
        if self._complete_but_seen:  # hooks of the user have seen, by now, the last gradient of the unit before
            self._advance()
        seen_by_others = len(parameter._post_accumulate_grad_hooks or ()) > 1
        if not seen_by_others:
            self._take(unit, index, grads)
        grads.ready.add(index)
        if unit not in self.local and grads.summed <= grads.ready:
            self._complete_but_seen = seen_by_others
            if not seen_by_others:
                self._advance()

    def _take(self, unit: Unit, index: int, grads: Gradients) -> None:
        """Move what lies in `p.grad` into the bucket."""
        parameter = unit.parameters[index]
        if parameter.grad is None:
            return
        grad, parameter.grad = parameter.grad.detach(), None
        if grad.layout is not torch.strided:  # nn.Embedding(sparse=True)
            grad = grad.to_dense()
        if grads.state is not GradState.PARTIAL:
            self._open(unit, grads)
        grads.accumulate(index, self.ledger.add(grad, grads.buffer.dtype))

    def complete(self, unit: Unit, *, at_end: bool = False) -> bool:
        """Backward is done with the unit: parameters without a gradient by now have none on this rank. False where the
        graph says that one is still to come (`at_end`: it has been run, and none is)."""
        grads = unit.grads
        if unit in self.local or grads is None or self._place_in_order.get(unit, -1) < self._cursor:
            return True
        missing = [p for i, p in enumerate(unit.parameters) if i not in grads.ready and p.requires_grad]
        if not at_end and any(torch._C._will_engine_execute_node(get_gradient_edge(p).node) for p in missing):
            return False
        grads.ready.update(range(len(unit.parameters)))
        self._advance()
        return True

    @torch.no_grad()
    def end_backward(self) -> None:
        """Reduce what is left, with zeros for what is missing, and wait for all of it. Then `p.grad` shows it."""
        for index, unit in enumerate(self.order):
            if unit in self.local:
                self._take_all(unit)
                self._look(unit)
            elif index >= self._cursor:
                self._launch(unit)
        self.origins.next_backward()
        self.collectives.give_order("end")
        self._finish()
        for unit in self.order:  # all have been started: they arrive together
            assert unit.grads is not None
            if unit.grads.state is GradState.REDUCED:
                unit.grads.release()
        self.visible.show()
        if self.collectives.orders is not None:
            self.collectives.orders.version = self.visible.version

    def open_empty(self, unit: Unit) -> None:
        """Be ready to reduce a unit in which this rank has nothing new (see `join.py`)."""
        assert unit.grads is not None
        if unit.grads.state is not GradState.PARTIAL:
            self._open(unit, unit.grads)

    def reduce_next(self, unit: Unit) -> None:
        """Take part in the reduction of that unit, whatever is in it."""
        self._launch(unit)

    def end_following(self) -> None:
        """The others have reduced what they wanted to."""
        self._cursor = len(self.order)
        self.end_backward()

    @torch.no_grad()
    def abandon_backward(self) -> None:
        """A backward has raised half way: wait for what is under way, and discard all gradients, as they are no sum of
        whole losses. (Plain torch keeps them, and `zero_grad` of any kind discards them; what the user has called
        meanwhile cannot be told.)"""
        self._finish()
        for unit in self._trainable:
            assert unit.grads is not None
            unit.grads.consume(set(unit.grads.waiting))
            for parameter in unit.parameters:
                parameter.grad = None
        self.visible.changed()
        self.forget_losses()

    def _finish(self) -> None:
        """Backward has ended."""
        self._wait()
        self._cursor = 0
        self._complete_but_seen = False
        for unit in self._trainable:
            assert unit.grads is not None
            unit.grads.ready.clear()

    def _wait(self) -> None:
        """For all reductions under way."""
        while self._in_flight:
            self._finish_oldest()
        while self._read_by_peers:
            self._release_oldest()

    def use_idle_buckets(self) -> None:
        """A step begins, and buckets that are held for the next backward (to take them anew would cost more than these
        copies) would come on top of the optimizer's state: reduced gradients move there. They leave before a bucket is
        used."""
        too_much = self._pool.held_beside_a_step()
        moving = [grads for unit in self._trainable if (grads := unit.grads) is not None and grads.may_move]
        for place in self._pool.held():
            free = place.num_bytes if place.kind == "buckets" and self._is_idle(place) else 0
            for grads in list(moving):
                num_bytes = grads.buffer.shard.nbytes
                if 0 < num_bytes <= free and too_much > 0:
                    grads.buffer.move(place.storage[free - num_bytes : free])
                    self._guests[place].append(grads)
                    moving.remove(grads)
                    free, too_much = free - num_bytes, too_much - num_bytes

    def _is_idle(self, place: Place) -> bool:
        guests = self._guests[place] = [grads for grads in self._guests.get(place, ()) if grads.buffer.is_guest]
        return place.holder is None and not guests

    def _send_away(self, place: Place) -> None:
        """The gradients that no step has used yet."""
        for grads in self._guests.pop(place, ()):
            if grads.buffer.is_guest:
                grads.buffer.move()

    def vacate(self, place: Place) -> bool:
        """Nobody refers to it any more, unless it holds gradients that have not been reduced."""
        self._send_away(place)
        unit: Unit | None = place.holder
        if unit is not None and unit.grads is not None and unit.grads.state is GradState.EMPTY:
            self._close(unit, unit.grads)  # they have been discarded
        if place.holder is not None or any(place is scratch for _, scratch in self._in_flight):
            return False
        for unit in self.order if place.kind == "buckets" else ():
            if unit not in self._borrowed and unit.grads is not None:
                unit.grads.close(forget=True)
        return True

    def _advance(self) -> None:
        while self._cursor < len(self.order):
            unit = self.order[self._cursor]
            assert unit.grads is not None
            if unit not in self.local and not unit.grads.summed <= unit.grads.ready:
                return
            if unit not in self.local:
                self._launch(unit)
            self._cursor += 1

    def _take_all(self, unit: Unit) -> None:
        """What hooks of the user have left in `p.grad`, or the user has put there before this backward. (Where it is
        not summed it stays there, as set by hand.)"""
        assert unit.grads is not None
        for index in sorted(unit.grads.summed):
            if unit.parameters[index].grad is not None:
                self._take(unit, index, unit.grads)

    def _look(self, unit: Unit) -> None:
        assert unit.grads is not None
        if unit.grads.state is GradState.PARTIAL:
            self.origins.look(unit, unit.grads)

    def _launch(self, unit: Unit) -> None:
        assert unit.grads is not None
        self._take_all(unit)
        if unit.grads.state is not GradState.PARTIAL:
            self._open(unit, unit.grads)
        self._look(unit)
        self.collectives.give_order("reduce", unit.name)  # before this rank waits for one whose reduction is not over
        if not self._free_scratch:
            self._finish_oldest()
        if unit in self._last_two.get(unit.grads.buffer.dtype, ())[:1]:
            self._wait()
            for place in self._buckets[unit.grads.buffer.dtype]:
                place.try_to_give_back()
        scratch = self._free_scratch.pop()
        unit.grads.reduce(self.collectives, scratch.storage)
        self._in_flight.append((unit, scratch))

    def _finish_oldest(self) -> None:
        unit, scratch = self._in_flight.popleft()
        assert unit.grads is not None
        unit.grads.arrive()
        self._free_scratch.append(scratch)
        self._read_by_peers.append(unit)

    def _release_oldest(self) -> None:
        unit = self._read_by_peers.popleft()
        assert unit.grads is not None
        unit.grads.release()
        unit.grads.replicate(self.collectives)
        self._close(unit, unit.grads)

    def _close(self, unit: Unit, grads: Gradients) -> None:
        """Give a borrowed bucket back."""
        grads.close()
        if unit in self._borrowed:
            self._borrowed.pop(unit).holder = None

    def _open(self, unit: Unit, grads: Gradients) -> None:
        if unit not in self.local:
            self.collectives.give_order("open", unit.name)
        if not grads.needs_bucket:
            grads.open()
            return
        place = self._bucket_of.get(unit) or self._bucket_in_turn(unit, grads.buffer.dtype)
        if place is None:  # local sums wait for more, or earlier units for gradients that may never come
            place = self._bucket_of[unit] = self._new_bucket(unit)
            place.lasting = place.is_shared
        self._send_away(place)
        place.holder, self._borrowed[unit] = unit, place
        grads.open(place.tensor(unit.layout.numel, grads.buffer.dtype))

    def _bucket_in_turn(self, unit: Unit, dtype: torch.dtype) -> Place | None:
        """The one that is free, or will be when a reduction under way is over."""
        if unit in self._last_two.get(dtype, ())[1:]:
            self._wait()
        place = self._free_bucket(dtype)
        while place is None and (self._in_flight or self._read_by_peers):
            if not self._read_by_peers:
                self._finish_oldest()
            self._release_oldest()
            place = self._free_bucket(dtype)
        return place

    def _free_bucket(self, dtype: torch.dtype) -> Place | None:
        free = [place for place in self._buckets[dtype] if place.holder is None]
        return max(free, key=lambda place: place.is_held, default=None)

    def _new_bucket(self, unit: Unit) -> Place:
        num_bytes = unit.spec.bucket_borrower(unit.layout.numel).num_bytes
        why = f"a bucket for unit {unit.name}, while others wait for gradients or a backward that reduces,"
        return self._pool.place("buckets", num_bytes, self, why)


def _kind(unit: Unit) -> Hashable:
    return unit.spec.bucket_borrower(0).kind


def _scratch_bytes(unit: Unit, collectives: Collectives, *, in_place: bool) -> int:
    precision, mesh = unit.spec.precision, collectives.mesh
    return reduce_scratch_bytes(
        unit.layout.numel,
        precision.grad,
        precision.wire,
        mesh.reduce.size,
        mesh.replicate.size,
        collectives.transport,
        in_place=in_place,
    )
