"""When gradients are reduced: unit by unit during backward, in one fixed order on every rank.

    accumulated   u3 u2 u1 u0            (as backward produces them, maybe differently on each rank)
    reduced          u3 u2 u1 u0         (always this order: reverse registration; an early unit waits)

A unit is *ready* when all its parameters have a gradient in this backward. What is not ready at the end of backward
takes part with zeros: no collective ever depends on what one rank's graph happens to contain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zeroshard.buffer import Allotment, Place
from zeroshard.collectives import Collectives
from zeroshard.gradients import Gradients, GradState
from zeroshard.loss_scale import LossScaler, ScaleState
from zeroshard.sums import reduce_scratch_bytes
from zeroshard.unit import Unit

IN_FLIGHT = 2
"""Reductions under way at a time: one arriving, one starting. Each has its own scratch (and bucket)."""


Watch = Callable[[str, Tensor], None]


class Reducer:
    """Accumulates and reduces the gradients of all trainable units of a model.

    Attributes:
        order: trainable units, in the order in which they are reduced.
        sync: whether the backward under way reduces (else it accumulates locally, see `no_sync`).
        scale: what the buckets' values are multiplied by: the scale of the first loss since they were empty.
        num_backwards: how many have ended.
        settled: scalers that have been adjusted since the last backward: the state before, and whether any optimizer of
            the model has found an overflow.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives) -> None:
        self.order = [unit for unit in reversed(units) if unit.grads is not None]
        self.collectives = collectives
        self.sync = True
        self.scale: float | None = None
        self.num_backwards = 0
        self.settled: dict[LossScaler, tuple[ScaleState, bool]] = {}
        self._backward_scale = 1.0
        self._watch: Watch | None = None
        self._cursor = 0
        self._in_flight: deque[tuple[Unit, Tensor]] = deque()
        self._read_by_peers: deque[Unit] = deque()  # reduced here, perhaps not yet everywhere
        self._buckets: dict[Hashable, list[Place]] = {}  # that units take turns in; a free one has no holder
        self._bucket_of: dict[Unit, Place] = {}  # of its own, for good
        self._borrowed: dict[Unit, Place] = {}
        borrowers = [unit for unit in self.order if unit.grads is not None and unit.grads.needs_bucket]
        allotment = Allotment.of((unit.spec.bucket_borrower(unit.layout.numel) for unit in borrowers), IN_FLIGHT)
        device = self.order[0].weights.own().device if self.order else None
        for unit in borrowers:
            if unit.name in allotment.own:
                self._bucket_of[unit] = self._new_bucket(unit)
        for dtype, (count, num_bytes) in allotment.shared.items():
            self._buckets[dtype] = [self._new_place(num_bytes) for _ in range(count)]
        scratch_bytes = max((_scratch_bytes(unit, collectives) for unit in self.order), default=0)
        self._scratch = [torch.empty(scratch_bytes, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]
        self._free_scratch = list(self._scratch)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally, in full-size buckets, and do not communicate."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextmanager
    def scaled(self, scale: float, watch: Watch | None) -> Iterator[None]:
        """The backward inside is that of a loss times `scale`; `watch(name, gradient)` sees each gradient first."""
        self.settled.clear()
        self._backward_scale, self._watch = scale, watch
        try:
            yield
        finally:
            self._backward_scale, self._watch = 1.0, None

    def begin_backward(self) -> None:
        if self.scale is None:
            self.scale = self._backward_scale

    def forget_scale(self) -> None:
        """Once all gradients have been used or discarded."""
        if all(unit.grads is None or unit.grads.state is GradState.EMPTY for unit in self.order):
            self.scale = None

    def accumulate(self, unit: Unit, index: int, parameter: nn.Parameter) -> None:
        """Backward has left a parameter's gradient: move it into the unit's bucket."""
        grads = unit.grads
        assert grads is not None and parameter.grad is not None, "only trainable units accumulate"
        grad, parameter.grad = parameter.grad.detach(), None
        if grad.layout is not torch.strided:  # nn.Embedding(sparse=True)
            grad = grad.to_dense()
        if grads.state is not GradState.PARTIAL:
            self._open(unit, grads)
        if self._watch is not None:
            self._watch(unit.layout.slots[index].name, grad)
        if self.scale is not None and self.scale != self._backward_scale:  # losses with scales of their own
            grad = grad.to(grads.buffer.dtype, copy=True).mul_(self.scale / self._backward_scale)
        grads.accumulate(index, grad)
        if self.sync and len(grads.ready) == len(unit.parameters):
            self._advance()

    def complete(self, unit: Unit) -> None:
        """Backward is done with the unit: parameters without a gradient by now have none on this rank (unless the graph
        says that theirs is still to come)."""
        grads = unit.grads
        if not self.sync or grads is None or unit in self.order[: self._cursor]:
            return
        missing = [p for i, p in enumerate(unit.parameters) if i not in grads.ready and p.requires_grad]
        if any(torch._C._will_engine_execute_node(get_gradient_edge(p).node) for p in missing):
            return
        if grads.state is not GradState.PARTIAL:
            self._open(unit, grads)
        grads.ready.update(range(len(unit.parameters)))
        self._advance()

    @torch.no_grad()
    def end_backward(self) -> None:
        """Reduce what is left, with zeros for what is missing, and wait for all of it."""
        for unit in self.order[self._cursor :] if self.sync else ():
            assert unit.grads is not None
            if unit.grads.state is not GradState.PARTIAL:
                self._open(unit, unit.grads)
            self._launch(unit)
        self.num_backwards += 1
        self.abandon_backward()

    @torch.no_grad()
    def abandon_backward(self) -> None:
        """Wait for what is under way, and be ready for the next backward."""
        while self._in_flight:
            self._finish_oldest()
        while self._read_by_peers:
            self._release_oldest()
        self._cursor = 0
        for unit in self.order:
            assert unit.grads is not None
            unit.grads.ready.clear()

    def tensors(self) -> dict[str, list[Tensor]]:
        """Buckets and scratch, by kind."""
        shared = [place for places in self._buckets.values() for place in places]
        places = dict.fromkeys([*shared, *self._bucket_of.values(), *self._borrowed.values()])
        return {"buckets": [place.storage for place in places], "scratch": self._scratch}

    def _advance(self) -> None:
        while self._cursor < len(self.order):
            unit = self.order[self._cursor]
            assert unit.grads is not None
            if len(unit.grads.ready) < len(unit.parameters):
                return
            self._launch(unit)
            self._cursor += 1

    def _launch(self, unit: Unit) -> None:
        assert unit.grads is not None
        if not self._free_scratch:
            self._finish_oldest()
        scratch = self._free_scratch.pop()
        unit.grads.reduce(self.collectives, scratch)
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
        unit.grads.close()
        if unit in self._borrowed:
            self._borrowed.pop(unit).holder = None

    def _open(self, unit: Unit, grads: Gradients) -> None:
        if not grads.needs_bucket:
            grads.open()
            return
        if not self.sync and unit not in self._bucket_of:  # local accumulation: the price is a full gradient
            self._bucket_of[unit] = self._new_bucket(unit)
        place = self._bucket_of.get(unit)
        if place is None:
            place = self._free_bucket(grads.buffer.dtype)
            while place is None and (self._in_flight or self._read_by_peers):
                if not self._read_by_peers:
                    self._finish_oldest()
                self._release_oldest()
                place = self._free_bucket(grads.buffer.dtype)
            if place is not None:
                place.holder, self._borrowed[unit] = unit, place
            else:  # earlier units wait for gradients that may never come: this one gets a bucket of its own, for good
                place = self._bucket_of[unit] = self._new_bucket(unit)
        grads.open(place.tensor(unit.layout.numel, grads.buffer.dtype))

    def _new_bucket(self, unit: Unit) -> Place:
        return self._new_place(unit.spec.bucket_borrower(unit.layout.numel).num_bytes)

    def _new_place(self, num_bytes: int) -> Place:
        return Place(num_bytes, partial(self.collectives.allocate, device=self.order[0].weights.own().device))

    def _free_bucket(self, dtype: torch.dtype) -> Place | None:
        return next((place for place in self._buckets[dtype] if place.holder is None), None)


def _scratch_bytes(unit: Unit, collectives: Collectives) -> int:
    precision, mesh = unit.spec.precision, collectives.mesh
    return reduce_scratch_bytes(
        unit.layout.numel, precision.grad, precision.wire, mesh.reduce.size, mesh.replicate.size, collectives.pairwise
    )
