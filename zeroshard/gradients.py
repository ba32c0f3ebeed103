"""The gradients of one unit: accumulated in a bucket, reduced into the shard, consumed by the step.

    EMPTY --open()--> PARTIAL --reduce()--> REDUCING --arrive()--> REDUCED --consume()--> EMPTY
                         ^                                            |
                         +------------- open(), next micro-batch -----+

The *bucket* is the full-size buffer that backward writes to. Plans whose gradients rest in full own it; plans with
sharded gradients borrow one and keep the shard alone. Reducing at every micro-batch follows one rule under all plans,
so that they stay bit-identical: what has been reduced so far enters the next sum as part of the owner's own term.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from zeroshard.buffer import FlatBuffer
from zeroshard.collectives import Collectives, Pending
from zeroshard.interval import Interval
from zeroshard.placement import PARTIAL, REPLICATED, SHARDED
from zeroshard.sums import add


class GradState(Enum):
    EMPTY = "empty"
    PARTIAL = "partial"
    REDUCING = "reducing"
    REDUCED = "reduced"


class Gradients:
    """See the module's note.

    Attributes:
        buffer: the flat buffer in the gradient dtype. Holds sums over ranks and micro-batches, not means: the step
            divides, once.
        carries: whether what has been reduced so far enters the next sum here (of several replicas: at one of them).
        state: the life cycle above.
        stale: slots (by index) whose interval of the bucket still holds old values: the first gradient overwrites.
        ready: slots accumulated in the backward under way.
        present: slots that got a gradient on this rank since the last step.
        waiting: slots that no step has used yet; the same on every rank, as `present` need not be.
    """

    def __init__(self, unit: str, buffer: FlatBuffer, wire: torch.dtype, carries: bool = True) -> None:
        self._unit, self._wire, self.carries = unit, wire, carries
        self._pending = Pending()
        self._carry = False
        self.buffer = buffer
        self.state = GradState.EMPTY
        self.stale: set[int] = set()
        self.ready: set[int] = set()
        self.present: set[int] = set()
        self.waiting: set[int] = set()

    @property
    def needs_bucket(self) -> bool:
        """Whether the next accumulation has to borrow a full-size bucket first."""
        return self.buffer.full is None

    def open(self, bucket: Tensor | None = None) -> None:
        """EMPTY or REDUCED -> PARTIAL. `bucket`: [numel], borrowed until `close`; its old values do not matter."""
        self._expect((GradState.EMPTY, GradState.REDUCED), "accumulate into")
        carries = self.state is GradState.REDUCED and self.carries
        if bucket is not None:
            self.buffer.attach(bucket)
        assert self.buffer.full is not None, "accumulation needs a bucket"
        if padding := self.buffer.padding():  # borrowed buckets and unparked ones have any values there
            torch._foreach_zero_(padding)
        self._carry = carries and not self.buffer.owns_full
        if carries and self.buffer.owns_full:  # the own interval carries the sum so far, the others start anew
            own = self.buffer.layout.shard(self.buffer.rank)
            self.buffer.full[: own.start].zero_()
            self.buffer.full[own.stop :].zero_()
        else:
            self.stale = set(range(len(self.buffer.layout.slots)))
        self.waiting = set(range(len(self.buffer.layout.slots)))
        self.buffer.placement = PARTIAL
        self.state = GradState.PARTIAL

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add one parameter's gradient (any shape-equal float tensor) to its slot, in the buffer's dtype."""
        view = self.buffer.views()[index]
        if index in self.stale:
            self.stale.discard(index)
            view.copy_(grad)
        elif grad.dtype == view.dtype:
            view.add_(grad)
        else:
            flat = view.view(-1)
            add(flat, grad.reshape(-1), out=flat)
        self.ready.add(index)
        self.present.add(index)

    def reduce(self, collectives: Collectives, scratch: Tensor) -> None:
        """PARTIAL -> REDUCING. Slots without a gradient take part with zeros."""
        self._expect((GradState.PARTIAL,), "reduce")
        assert self.buffer.full is not None, "reducing needs the bucket"
        for index in self.stale:
            self.buffer.views()[index].zero_()
        self.stale.clear()
        if self._carry:
            self.buffer.own_part_of_full().add_(self.buffer.shard)
        self._pending = collectives.reduce_scatter(
            self.buffer.full, self.buffer.shard, scratch, wire=self._wire, unit=self._unit, phase="backward"
        )
        self.state = GradState.REDUCING

    def arrive(self) -> None:
        """REDUCING -> REDUCED: the shard holds the sum. A borrowed bucket may be given back (`close`)."""
        self._expect((GradState.REDUCING,), "wait for")
        self._pending.wait()
        self._carry = False
        self.buffer.placement = SHARDED
        self.state = GradState.REDUCED

    def release(self) -> None:
        """Wait until no peer reads the bucket any more."""
        self._pending.release()

    def close(self, *, forget: bool = False) -> None:
        """Give a borrowed bucket back."""
        if not self.buffer.owns_full:
            self.buffer.detach(forget=forget)

    def replicate(self, collectives: Collectives) -> Pending:
        """SHARDED -> REPLICATED, for a plan whose optimizer updates everything on every rank."""
        self._expect((GradState.REDUCED,), "replicate")
        assert self.buffer.full is not None, "replicated gradients own their buffer"
        if self.buffer.placement is REPLICATED:
            return Pending()
        self.buffer.placement = REPLICATED
        return collectives.all_gather(self.buffer.full, unit=self._unit, phase="step", acknowledge=True)

    def consume(self, slots: set[int]) -> None:
        """REDUCED -> EMPTY for these slots: the step has used them, or `zero_grad` discards them."""
        if self.state is GradState.EMPTY:
            return
        self.present -= slots
        self.waiting -= slots
        if not self.waiting:
            self.state = GradState.EMPTY
            return
        for index in slots:
            if self.buffer.full is not None:
                self.buffer.views()[index].zero_()
            else:
                part = self.buffer.layout.slots[index].world & self.own_interval
                self.buffer.shard[part.relative_to(self.own_interval.start).slice].zero_() if part else None

    @property
    def own_interval(self) -> Interval:
        return self.buffer.layout.shard(self.buffer.rank)

    def piece(self, world: Interval) -> Tensor:
        """[world.numel] of the reduced gradient; `world` must lie in what this rank holds."""
        if self.buffer.full is not None:
            return self.buffer.full[world.slice]
        return self.buffer.shard[world.relative_to(self.own_interval.start).slice]

    def _expect(self, states: tuple[GradState, ...], verb: str) -> None:
        if self.state not in states:
            allowed = " or ".join(state.value for state in states)
            raise RuntimeError(
                f"unit {self._unit}: cannot {verb} gradients that are {self.state.value}: they must be {allowed}"
            )
