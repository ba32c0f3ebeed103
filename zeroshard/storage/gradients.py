"""The gradients of one unit: accumulated in a bucket, reduced into the shard, consumed by the step.

    EMPTY --open()--> PARTIAL --reduce()--> REDUCING --arrive()--> REDUCED --consume()--> EMPTY
                         ^                                            |
                         +------------- open(), next micro-batch -----+

The *bucket* is the full-size buffer that backward writes to. Plans whose gradients rest in full own it. Plans with
sharded gradients borrow one and keep only the shard. A reduction leaves the mean over ranks, as torch DDP does.
Reduction at every micro-batch follows the same rule under all plans, so that they stay bit-identical: the mean reduced
so far enters the next sum, times the number of ranks, as part of the owner's own term.

The states are derived from the buffer's placement ([Note: placement] in `buffer.py`): EMPTY is none; PARTIAL is
PARTIAL; REDUCING is every other while it arrives: the sum over ranks, and the exchanges that follow it (over the
replicas of a 2-D mesh; the mean to the ranks that do not own it); REDUCED is the mean, where it rests.

Frozen slots are not summed. Their gradient is zero in the shard and in a buffer that is held in full; in a borrowed
bucket their values are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.packets import on_device
from zeroshard.comm.transport import Reduction
from zeroshard.errors import InvalidState
from zeroshard.layout.interval import Interval
from zeroshard.placement import PARTIAL, REPLICATED, SHARDED, Placement
from zeroshard.storage.buffer import refuse_after_close
from zeroshard.storage.gradient_buffer import GradientBuffer


class GradState(Enum):
    """See the module's note."""

    EMPTY = "empty"
    PARTIAL = "partial"
    REDUCING = "reducing"
    REDUCED = "reduced"


@dataclass(frozen=True, slots=True)
class Mean:
    """How the mean over ranks is taken.

    Attributes:
        wire: the dtype in which terms are sent.
        num_ranks: number of ranks in the mean.
        carries: whether this rank adds the mean reduced so far to the next sum (one of several replicas does).
        rests: placement afterwards: REPLICATED means are gathered.
    """

    wire: torch.dtype
    num_ranks: int = 1
    carries: bool = True
    rests: Placement = SHARDED


class Gradients:
    """See the module's note.

    Attributes:
        is_external: whether other code reduces them, and a step leaves them in `p.grad` (`external_gradients.py`).
        is_apart: whether each slot has a tensor of its own; no piece may then span two slots.
        buffer: the flat buffer in the gradient dtype. PARTIAL: the terms of this rank, summed over micro-batches.
            REDUCED: the mean over ranks of such sums.
        mean: how the mean is taken.
        is_of_all: whether the terms of this rank are the mean: there is no other rank.
        means_in_full: whether every rank holds the means of all slots.
        summed: slots that reductions sum; the same on every rank.
        stale: slots (by index) whose interval of the bucket still holds old values: the first gradient overwrites them.
        ready: slots accumulated in the current backward.
        present: slots that got a gradient on this rank since the last step; may differ between ranks.
        waiting: slots that no step has consumed yet; the same on every rank, and a subset of `summed`.
    """

    is_external: ClassVar[bool] = False

    def __init__(self, unit: str, buffer: GradientBuffer, mean: Mean) -> None:
        self._unit, self.buffer, self.mean = unit, buffer, mean
        self.is_apart = buffer.is_apart
        self.is_of_all, self.means_in_full = mean.num_ranks == 1, mean.rests is REPLICATED
        buffer.become(None)
        self._reduced_before = self._is_over = False
        self.stale: set[int] = set()
        self.ready: set[int] = set()
        self.present: set[int] = set()
        self.waiting: set[int] = set()
        self.sum_only(set(range(len(buffer.layout.slots))))

    @property
    def state(self) -> GradState:
        buffer = self.buffer
        if buffer.placement is None:
            return GradState.EMPTY
        if buffer.placement is PARTIAL:
            return GradState.PARTIAL
        return GradState.REDUCING if buffer.is_arriving else GradState.REDUCED

    def sum_only(self, slots: set[int]) -> None:
        """Set the slots that reductions sum. Call it between two backwards, with the same slots on every rank."""
        assert self.waiting <= slots, "what waits for a step is added to"
        self.summed = slots
        self._portions = self.buffer.layout.portions(slots)
        if self.state is GradState.PARTIAL:
            self.waiting = set(slots)

    @property
    def needs_bucket(self) -> bool:
        """Whether the next accumulation has to borrow a full-size bucket first."""
        return self.buffer.full is None and self.buffer.borrows

    def open(self, bucket: Tensor | None = None) -> None:
        """EMPTY or REDUCED -> PARTIAL. `bucket`: [numel], borrowed until `close`; its old values do not matter."""
        self._expect((GradState.EMPTY, GradState.REDUCED), "accumulate into")
        if self._is_over and not self.means_in_full:  # else they are those of plain torch, in `p.grad`
            refuse_after_close(self._unit)
        self._reduced_before = self.state is GradState.REDUCED
        # A guest shard lies in a pool buffer, which may be the very bucket that is about to be written to.
        if self.buffer.is_guest:
            self.buffer.move()
        if bucket is not None:
            self.buffer.attach(bucket)
        else:
            self.buffer.hold()
        self.stale = set(range(len(self.buffer.layout.slots)))
        if self._reduced_before and self.mean.carries:
            # The mean so far, multiplied by the number of ranks, as the division after the next sum divides it again.
            # (Adding the two means afterwards would be simpler, but plans with the sum in one bucket round elsewhere.)
            self.stale -= self.buffer.keep_own(self.mean.num_ranks)
        # Padding takes part in the reduction: old bytes of a borrowed or unparked bucket could be NaN there. (Unless it
        # lies between portions: then nothing but this makes it the same on all ranks.)
        if padding := self.buffer.padding():
            torch._foreach_zero_(padding)
        self.waiting = set(self.summed)
        self.buffer.become(PARTIAL)

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add one parameter's gradient (any shape-equal float tensor) to its slot, in the buffer's dtype."""
        if index in self.stale:
            self.stale.remove(index)
            self.buffer.put(index, grad)
        else:
            self.buffer.add(index, grad)
        self.ready.add(index)
        self.present.add(index)

    @property
    def is_local(self) -> bool:
        """Whether the bucket holds this rank's terms and nothing else."""
        return self.state is GradState.PARTIAL and not self._reduced_before

    @property
    def may_move(self) -> bool:
        """Whether the shard may move into a pool buffer: nothing else is held, and it is not a guest already."""
        buffer = self.buffer
        return self.state is GradState.REDUCED and buffer.borrows and buffer.full is None and not buffer.is_guest

    def reduce(
        self,
        collectives: Collectives,
        scratch: Tensor,
        of_replicas: Tensor | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """PARTIAL -> REDUCING. Summed slots without a gradient on this rank contribute `NOTHING`. Collective.
        `scratch`, `of_replicas`, `look`: see `Reduction`."""
        self._expect((GradState.PARTIAL,), "reduce")
        self._fill_with_nothing()
        if self.means_in_full:
            self._tell_from_nothing()
        self.buffer.hold()
        if self.buffer.borrows and not self._portions.is_whole:
            self._clear_between_portions()
        self.buffer.redistribute(
            self.mean.rests,
            collectives,
            unit=self._unit,
            phase="backward",
            portions=self._portions,
            reduction=Reduction(scratch, self.mean.wire, self.mean.num_ranks, of_replicas, look),
        )

    def keep(self) -> None:
        """PARTIAL -> REDUCED, on a single rank: nothing is exchanged, and the mean lies where the terms lie."""
        assert self.is_of_all and not self.buffer.borrows, "other ranks have terms, too"
        self._expect((GradState.PARTIAL,), "keep")
        self._fill_with_nothing()
        self.buffer.become(self.mean.rests)

    def _fill_with_nothing(self) -> None:
        """Slots without a gradient on this rank still hold old values of the bucket, which would be added to the
        sum. All that is summed waits for a step then, also what had been discarded before this backward."""
        self.waiting = set(self.summed)
        for index in self.stale if self.buffer.rests_in_full else self.stale & self.summed:
            self.buffer.clear(index)
        self.stale.clear()

    def _tell_from_nothing(self) -> None:
        """[Note: nothing]
        Ranks do not tell each other which slots have a gradient, before a step. A rank without one adds -0.0, which
        changes no sum, and a sum of nothing else is -0.0. Here the first element of each gradient of this rank becomes
        0.0 if it is -0.0. So all ranks see in the sum whether any of them had a gradient, even one of zeros."""
        full = self.buffer.full
        assert full is not None, "a mean that all ranks hold in full begins as a sum in full"
        places = [self.buffer.layout.slots[index].world for index in self.present]
        first = on_device([place.start for place in places if place.numel], full.device)  # not kept: bytes of no plan
        full.index_add_(0, first, full.new_zeros(()).expand(len(first)))

    def is_nothing(self, gradient: Tensor) -> Tensor:
        """Whether no rank had a gradient of a slot, by its mean over ranks. 0-d. (A mean may round to -0.0.)"""
        return gradient.reshape(-1)[:1].signbit().any() & ~gradient.any()

    def _clear_between_portions(self) -> None:
        """Zero the shard outside of the portions: frozen slots, whose values the reduction does not write."""
        end = 0
        for portion in self._portions.inside[self.buffer.rank]:
            self.buffer.shard[end : portion.start].zero_()
            end = portion.stop
        self.buffer.shard[end:].zero_()

    def arrive(self) -> None:
        """REDUCING -> REDUCED: wait for everything, also until the peers have read what this rank gave."""
        self._expect((GradState.REDUCING,), "wait for")
        self.buffer.release()

    def arrive_in_part(self) -> None:
        """Wait for the sum over ranks. REDUCING -> REDUCED, unless exchanges follow. The scratch may be reused."""
        self._expect((GradState.REDUCING,), "wait for")
        self.buffer.arrive_in_part()

    def settle(self) -> None:
        """A backward is over."""
        self.ready.clear()
        self.buffer.settle()

    def close(self, *, forget: bool = False) -> None:
        """Give a borrowed bucket back."""
        self.buffer.detach(forget=forget)

    def free(self) -> None:
        """Free the buffer for good."""
        if self.buffer.is_arriving:
            self.buffer.release()
        self.buffer.free()
        self._is_over = True

    def consume(self, slots: set[int] | None = None) -> None:
        """Drop the gradients of these slots (None: all): a step has used them, or they are discarded."""
        if self.state is GradState.EMPTY:
            return
        slots = set(self.waiting) if slots is None else slots
        self.present -= slots
        self.waiting -= slots
        if not self.waiting:
            if self.buffer.is_arriving:  # else a late mean would overwrite what is written to the buffer next
                self.buffer.release()
            self.buffer.become(None)
            self.buffer.let_go()
            return
        for index in slots:
            if self.buffer.is_here:
                self.buffer.clear(index)
            else:
                self.own_part(index).zero_()

    def assign(self, index: int, part: Tensor) -> None:
        """Set the reduced gradient of one slot to `part`: flat, the slot's elements inside `held_interval`."""
        if self.state is GradState.EMPTY:
            self.buffer.hold()
            self.buffer.clear_all()
            self.stale.clear()
            self.buffer.become(self.mean.rests)
        self._expect((GradState.REDUCED,), "assign")
        if index not in self.summed:  # a frozen slot: a backward before the step must carry it
            self.sum_only(self.summed | {index})
        self.held_part(index).copy_(part)
        self.present.add(index)
        self.waiting.add(index)

    @property
    def held_interval(self) -> Interval:
        """The interval of the full buffer in which this rank has reduced values."""
        return Interval(0, self.buffer.layout.numel) if self.means_in_full else self.buffer.own_interval

    def own_part(self, index: int) -> Tensor:
        """Flat: the part of one slot's reduced gradient in this rank's shard; may be empty."""
        world = self.buffer.layout.slots[index].world & self.buffer.own_interval
        return self.buffer.part_of_shard(world) if world else self.buffer.shard[:0]

    def held_part(self, index: int) -> Tensor:
        """Flat: the part of one slot's reduced gradient that this rank holds."""
        return self.buffer.views()[index].view(-1) if self.means_in_full else self.own_part(index)

    def zero(self, index: int) -> None:
        """Zero all that this rank holds of one slot: its part of the mean, and terms that are not reduced yet."""
        self.held_part(index).zero_()
        if self.state is GradState.PARTIAL and index not in self.stale:
            self.buffer.views()[index].zero_()

    @property
    def held_in(self) -> torch.dtype | None:
        """The dtype of what `read` returns without scratch; None: `read` needs scratch."""
        return self.buffer.dtype

    def read(self, world: Interval, scratch: Tensor | None = None) -> Tensor:
        """[world.numel] of the reduced gradient, in `held_interval`: a view of the buffer (of one slot, where
        slots lie apart), or, with `scratch` (any float dtype), a copy in it (zeros if there is no gradient)."""
        if scratch is None:
            return self.buffer.part(world)
        return scratch.zero_() if self.state is GradState.EMPTY else self.buffer.copy_to(world, scratch)

    def views(self, world: Interval) -> Sequence[Tensor]:
        """Views of the existing gradients of these elements."""
        return () if self.buffer.placement is None else self.buffer.parts(world)

    def in_full(self, index: int) -> Tensor | None:
        """The reduced gradient of one slot in full, if gradients are replicated; None: there is none."""
        is_there = self.state is GradState.REDUCED and index in self.waiting
        return self.buffer.views()[index] if is_there else None

    @property
    def most(self) -> int:
        """The most bytes held at once so far."""
        return self.buffer.most

    def storages(self) -> list[Tensor]:
        return self.buffer.storages()

    def _expect(self, states: tuple[GradState, ...], verb: str) -> None:
        if self.state not in states:
            allowed = " or ".join(state.value for state in states)
            raise InvalidState(
                f"unit {self._unit}: cannot {verb} gradients that are {self.state.value}: they must be {allowed}"
            )
