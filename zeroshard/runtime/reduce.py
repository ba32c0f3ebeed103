"""When gradients are reduced: unit by unit during backward, in one fixed order on every rank.

    accumulated   u3 u2 u1 u0            (as backward produces them, maybe differently on each rank)
    reduced          u3 u2 u1 u0         (always this order: reverse registration; an early unit waits)

A unit is *ready* when all its parameters that train have a gradient in this backward. What is not ready at the end of
backward takes part with zeros: no collective ever depends on what one rank's graph happens to contain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.profiling import of_unit, phase
from zeroshard.comm.transport import Reduction
from zeroshard.errors import InvalidState
from zeroshard.placement import PARTIAL
from zeroshard.runtime.loss_ledger import LossLedger
from zeroshard.runtime.origins import Origins
from zeroshard.runtime.reductions import Reductions, scratch_bytes
from zeroshard.runtime.visible import VisibleGradients
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.pool import Pool
from zeroshard.storage.unit import Unit


class Reducer:
    """Accumulates and reduces the gradients of all trainable units of a model.

    Attributes:
        grads: what is reduced here, by unit, the last unit first.
        order: units of which something is summed, in the order in which they are reduced.
        local: units whose gradients are accumulated, in full-size buckets, and not reduced.
        ledger: what the buckets' values are multiplied by.
        visible: what the user finds in `p.grad`.
        origins: which gradients of this rank were not finite.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives, pool: Pool, ledger: LossLedger) -> None:
        self.grads = {unit: unit.grads for unit in reversed(units) if isinstance(unit.grads, Gradients)}
        self.find_order()
        self.collectives = collectives
        self.local: frozenset[Unit] = frozenset()
        self.ledger = ledger
        self.visible = VisibleGradients(tuple(self.grads), collectives, ledger)
        self.origins = Origins()
        self._pool = pool
        self._cursor = 0
        self._complete_but_seen = False  # a unit whose last gradient hooks of the user still look at
        self._reductions = Reductions(self.grads, collectives, pool)

    def find_order(self) -> None:
        """Between two backwards: what is summed has changed. Units of which nothing is have no gradients."""
        self.order = [unit for unit, grads in self.grads.items() if grads.summed]
        self._position_of = {unit: position for position, unit in enumerate(self.order)}

    def accumulate_locally(self, units: frozenset[Unit]) -> None:
        """From now on just these are not reduced.

        Raises:
            RuntimeError: the pool's limit does not allow that many buckets.
        """
        self._reductions.expect_room(units)
        self.local = units

    def expect_backward(self) -> None:
        """An optimizer is going to run one. Nothing to do: hooks of the model say when it begins."""

    @phase("begin of backward")
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
        return [unit.name for unit in self.order if unit.grads.state is not GradState.EMPTY]

    def keep_only(self, waiting: Sequence[str]) -> None:
        """Discard the gradients of all other units."""
        for unit in self.order:
            if unit.name not in waiting:
                unit.grads.consume(set(unit.grads.waiting))

    def has_gradients(self, units: Iterable[Unit] | None = None, *, reduced: bool = False) -> bool:
        """Whether any wait for a step.

        Args:
            units: only of these; None: of all.
            reduced: only those that have been reduced.
        """
        looked_at = self.grads if units is None else units
        states = [unit.grads.state for unit in looked_at]
        return GradState.REDUCED in states if reduced else states.count(GradState.EMPTY) < len(states)

    def begins_anew(self) -> bool:
        """Whether what there was has been discarded, perhaps by `model.zero_grad()`."""
        return bool(self.order) and not (self.notice() or self.has_gradients())

    @property
    def version(self) -> object:
        """Equal as long as no reduced gradient has changed."""
        return self.visible.version

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
        for unit in self.grads:
            slots = sorted(index for of_unit, index in wanted if of_unit == unit.index)
            if slots:
                self._reduce_slots(unit, {index: terms.get((unit.index, index)) for index in slots})

    def set_gradient(self, unit: Unit, index: int, values: Tensor) -> None:
        """The reduced gradient of one slot becomes `values` (in its shape, unscaled, the same on every rank).

        Raises:
            RuntimeError: the step would not take it as it is.
        """
        grads, world = self.grads[unit], unit.layout.slots[index].world
        self.notice()
        if not self.ledger.has_final and self.ledger.scale == 1.0:
            raise InvalidState("set_gradient: this step's losses were weighted, and the step divides by their weights")
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
        """In storage of its own: this is rare, and buckets may hold what other slots wait with."""
        grads = self.grads[unit]
        # Peers can read it as long as this lives.
        sums = unit.new_buffer(grads.buffer.dtype, PARTIAL, self.collectives.allocate)
        assert sums.full is not None
        for index, term in terms.items():
            if term is not None:
                sums.views()[index].copy_(term.to_dense() if term.layout is not torch.strided else term)
        num_bytes = scratch_bytes(unit, self.collectives, in_place=True)
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=sums.full.device)
        self.collectives.map_peers()
        sums.redistribute(
            grads.mean.rests,
            self.collectives,
            unit=unit.name,
            phase="step",
            portions=unit.layout.portions(terms),
            reduction=Reduction(scratch, grads.mean.wire, grads.mean.num_ranks),
            acknowledge=True,
        )
        sums.release()
        for index in terms:
            self._assign(unit, index, sums.full[(unit.layout.slots[index].world & grads.held_interval).slice])
        self.collectives.exchange_objects(None)  # nobody reads any more what is freed here

    def accumulate(self, unit: Unit, index: int, parameter: nn.Parameter) -> None:
        """Backward has left a parameter's gradient: move it into the unit's bucket."""
        grads = self.grads[unit]
        name = unit.layout.slots[index].name
        position = self._position_of.get(unit)
        if position is None or index not in grads.summed:
            raise InvalidState(
                f"parameter {name} has a gradient, and did not require grad when the model was called last: let it "
                "require grad before the model (not only a part of it) is called"
            )
        if position < self._cursor and unit not in self.local:
            raise InvalidState(
                f"{name} got a second gradient in one backward, after its unit has been reduced: its module runs in "
                "several reentrant checkpoints. Use checkpoint(..., use_reentrant=False) (torch DDP asks for the same)"
            )
        if self._complete_but_seen:  # hooks of the user have seen, by now, the last gradient of the unit before
            self._advance()
        # [Note: the user's gradient hooks]
        # Hooks of one parameter run in the order of registration, so those that the user has added after shard() have
        # not seen this gradient yet, and may still change it. It stays in `p.grad`, and is taken when the unit is
        # reduced: not before the next gradient of any unit, or the end of backward.
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
        # Emptied at once: autograd adds to what lies there, and the bucket would get the sum a second time.
        grad, parameter.grad = parameter.grad.detach(), None
        if grad.layout is not torch.strided:  # nn.Embedding(sparse=True)
            grad = grad.to_dense()
        if grads.state is not GradState.PARTIAL:
            self._open(unit, grads)
        grads.accumulate(index, self.ledger.add(grad, grads.buffer.dtype))

    def complete(self, unit: Unit, *, at_end: bool = False) -> bool:
        """Backward is done with the unit: parameters without a gradient by now have none on this rank. False where the
        graph says that one is still to come (`at_end`: it has been run, and none is)."""
        if unit in self.local or self._position_of.get(unit, -1) < self._cursor:
            return True
        grads = self.grads[unit]
        missing = [p for i, p in enumerate(unit.parameters) if i not in grads.ready and p.requires_grad]
        if not at_end and any(torch._C._will_engine_execute_node(get_gradient_edge(p).node) for p in missing):
            return False
        grads.ready.update(range(len(unit.parameters)))
        self._advance()
        return True

    @torch.no_grad()
    @phase("end of backward")
    def end_backward(self) -> None:
        """Reduce what is left, with zeros for what is missing, and wait for all of it. Then `p.grad` shows it."""
        for index, unit in enumerate(self.order):
            if unit in self.local:
                self._take_all(unit)
                self._look(unit)
            elif index >= self._cursor:
                self._launch(unit)
        self.origins.next_backward()
        # Before this rank waits for its reductions: followers must have been told to take part in all of them.
        self.collectives.give_order("end")
        self._finish()
        for unit in self.order:  # all have been started: they arrive together
            if self.grads[unit].state is GradState.REDUCED:
                self.grads[unit].release()
        self.visible.show()
        if self.collectives.orders is not None:
            self.collectives.orders.version = self.visible.version

    def open_empty(self, unit: Unit) -> None:
        """Be ready to reduce a unit in which this rank has nothing new (see `join.py`)."""
        grads = self.grads[unit]
        if grads.state is not GradState.PARTIAL:
            self._open(unit, grads)

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
        for unit, grads in self.grads.items():
            grads.consume(set(grads.waiting))
            for parameter in unit.parameters:
                parameter.grad = None
        self.visible.changed()
        self.forget_losses()

    def _finish(self) -> None:
        """Backward has ended."""
        self._reductions.wait()
        self._cursor = 0
        self._complete_but_seen = False
        for grads in self.grads.values():
            grads.ready.clear()

    def use_idle_buckets(self) -> None:
        """A step begins: reduced gradients may lie where buckets wait for the next backward."""
        self._pool.lodge(grads.buffer for grads in self.grads.values() if grads.may_move)

    def _advance(self) -> None:
        while self._cursor < len(self.order):
            unit = self.order[self._cursor]
            grads = self.grads[unit]
            if unit not in self.local and not grads.summed <= grads.ready:
                return
            if unit not in self.local:
                self._launch(unit)
            self._cursor += 1

    def _take_all(self, unit: Unit) -> None:
        """What hooks of the user have left in `p.grad`, or the user has put there before this backward. (Where it is
        not summed it stays there, as set by hand.)"""
        grads = self.grads[unit]
        for index in sorted(grads.summed):
            if unit.parameters[index].grad is not None:
                self._take(unit, index, grads)

    def _look(self, unit: Unit) -> None:
        grads = self.grads[unit]
        if grads.state is GradState.PARTIAL:
            self.origins.look(unit, grads)

    @phase(of_unit("reduce"))
    def _launch(self, unit: Unit) -> None:
        grads = self.grads[unit]
        self._take_all(unit)
        if grads.state is not GradState.PARTIAL:
            self._open(unit, grads)
        self._look(unit)
        self.collectives.give_order("reduce", unit.name)  # before this rank waits for one whose reduction is not over
        self._reductions.start(unit, grads)

    def _open(self, unit: Unit, grads: Gradients) -> None:
        if unit not in self.local:
            self.collectives.give_order("open", unit.name)
        self._reductions.open(unit, grads)
