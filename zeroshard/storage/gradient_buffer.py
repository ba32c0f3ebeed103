"""The buffer of a unit's gradients: a bucket whose slots are written one by one, and the shard of their mean.

Sharded gradients need memory from backward to the step only: their shard comes by `hold` and goes by `let_go`, and may
be a guest in an idle pool buffer in between (`move`). A buffer that rests in full is lasting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import BufferLayout
from zeroshard.layout.sums import add
from zeroshard.placement import SHARDED, Placement
from zeroshard.storage.buffer import Allocate, FlatBuffer

NOTHING = -0.0
"""What a rank without a gradient adds to a sum: see [Note: nothing] in `gradients.py`."""


class GradientBuffer(FlatBuffer):
    """See the module's note.

    Attributes:
        is_apart: whether each slot has a tensor of its own (`slot_buffer.py`).
        is_guest: whether the shard lies in a pool buffer for a while (`Pool.lodge`).
        most: the most bytes of its own storage so far.
    """

    is_apart: ClassVar[bool] = False

    def __init__(
        self,
        layout: BufferLayout,
        rank: int,
        dtype: torch.dtype,
        resting: Placement,
        allocate: Allocate,
    ) -> None:
        self._lasting, self.is_guest, self.most = resting is not SHARDED, False, 0
        super().__init__(layout, rank, dtype, resting, allocate, holds=self._lasting)

    # Memory ----------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        super().hold()
        self.most = max(self.most, self._storage.nbytes)

    def let_go(self) -> None:
        """Free the buffer's own storage, unless it is lasting (and not `free`d). The values are lost."""
        if not self._lasting:
            self.is_guest = False
            self._storage = self._allocate(0)
            self.shard = self._storage.view(self.dtype)
            if not self.borrows:
                self.full = self._cut = None

    def free(self) -> None:
        self._lasting = False
        self.let_go()
        super().free()

    def move(self, storage: Tensor | None = None) -> None:
        """Move the shard's values into `storage`, uint8 [bytes of the shard], part of a pool buffer; None: back into a
        storage of its own."""
        assert self.borrows and not self._lasting, "not a shard that comes and goes"
        is_guest = storage is not None
        self.is_guest |= is_guest  # and until it is out: there may be no memory to move to
        storage = self._allocate(self._storage.nbytes) if storage is None else storage
        self._storage = storage.copy_(self._storage)
        self.shard = self._storage.view(self.dtype)
        self.is_guest = is_guest

    def storages(self) -> list[Tensor]:
        return [] if self.is_guest else [self._storage]

    # Exchanges that follow a reduction -------------------------------------------------------------------------------

    def arrive_in_part(self) -> None:
        """Wait for the exchange in progress, and start none that follows it."""
        self.pending.wait_for_one()
        self.is_arriving = self.pending.goes_on

    def release_in_part(self) -> None:
        """Like `arrive_in_part`, and wait until the peers have read what this rank gave to that exchange."""
        self.pending.release_one()
        self.is_arriving = self.pending.goes_on

    # Values of slots -------------------------------------------------------------------------------------------------

    def put(self, index: int, value: Tensor) -> None:
        """Write a value (shape-equal, any float dtype) to one slot of the full buffer."""
        self._cut_up().slots[index].copy_(value)

    def add(self, index: int, value: Tensor) -> None:
        """Add a value (shape-equal, any float dtype) to one slot of the full buffer."""
        view = self.views()[index]
        if value.dtype == view.dtype:
            view.add_(value)
        else:
            flat = view.view(-1)
            add(flat, value.reshape(-1), out=flat)

    def clear(self, index: int) -> None:
        """Let one slot of the full buffer be `NOTHING`."""
        self.views()[index].fill_(NOTHING)

    def clear_all(self) -> None:
        """Let everything that is held be `NOTHING`."""
        for held in (self.shard, self.full):
            held.fill_(NOTHING) if held is not None else None

    def keep_own(self, factor: int) -> set[int]:
        """Let the own interval of the full buffer be the shard, multiplied by `factor`, and the rest of the slots that
        touch it `NOTHING`. Returns these slots."""
        assert self.full is not None, "the full buffer is not here"
        own, touched = self.own_interval, self.layout.slots_in(self.own_interval)
        if touched:
            first, last = self.layout.slots[touched[0]].world, self.layout.slots[touched[-1]].world
            self.full[first.start : own.start].fill_(NOTHING)
            self.full[own.stop : last.stop].fill_(NOTHING)
        torch.mul(self.shard, factor, out=self.own_part_of_full())
        return set(touched)

    def settle(self) -> None:
        """The backward that has written to the buffer is over."""

    @property
    def is_here(self) -> bool:
        """Whether there is a full buffer to read."""
        return self.full is not None

    @property
    def version(self) -> int:
        """A number that changes when the full buffer is written to."""
        return 0 if self.full is None else self.full._version

    # Values of intervals ---------------------------------------------------------------------------------------------

    def part(self, world: Interval) -> Tensor:
        """The values of an interval: in the full buffer, if it is here, else in the shard."""
        return self.part_of_shard(world) if self.full is None else self.full[world.slice]

    def part_of_shard(self, world: Interval) -> Tensor:
        """The values of an interval of the own shard."""
        return self.shard[world.relative_to(self.own_interval.start).slice]

    def parts(self, world: Interval) -> Sequence[Tensor]:
        """Views of all values of an interval."""
        return (self.part(world),)

    def copy_to(self, world: Interval, out: Tensor) -> Tensor:
        """Copy the values of an interval to `out` [world.numel], any float dtype. Returns it."""
        return out.copy_(self.part(world))

    # Views that users have as `p.grad` -------------------------------------------------------------------------------

    def renew_view(self, index: int) -> None:
        """From now on, `views` has another tensor for that slot: somebody keeps this one."""
        if self._cut is not None:
            self._cut.slots[index] = self._cut.slots[index].detach()

    @property
    def known_views(self) -> list[Tensor]:
        """The views that `views` has made last; empty if it has made none."""
        return [] if self._cut is None else self._cut.slots

    @property
    def moved_views(self) -> list[int]:
        """The slots whose view lies elsewhere (`view.data = values`)."""
        if self._cut is None:
            return []
        # By addresses, as this is asked of every view in every step.
        found, expected = list(map(Tensor.data_ptr, self._cut.slots)), self._cut.addresses()
        if found == expected:
            return []
        places = zip(found, expected, self.layout.slots, strict=True)
        return [index for index, (now, place, slot) in enumerate(places) if now != place and slot.world.numel]

    def restore_view(self, index: int) -> Tensor:
        """Put a view that lies elsewhere back. Returns the values that it had there."""
        assert self._cut is not None, "there are views"
        view, slot = self._cut.slots[index], self.layout.slots[index]
        values = view.detach().clone()
        view.data = self._cut.whole[slot.world.slice].view(slot.shape)
        return values
