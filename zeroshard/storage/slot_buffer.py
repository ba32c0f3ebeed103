"""A buffer of gradients on a single rank: the tensors that autograd has made, one per slot, without a copy.

With several ranks, the gradients of a unit lie side by side in a bucket, so that one exchange moves all of them. A
single rank exchanges nothing. So its buffer takes the tensors over, under every plan, and frees them after the step, as
plain torch does. Padding is not held.

[Note: whose memory a gradient is] A step multiplies gradients in place, and a backward adds to them. autograd may put
a tensor into `p.grad` whose memory is also another's: a part of the gradient of a concatenation, what a hook of the
user has kept, the gradient of an output. So once a backward is over, when the tensors inside of it are gone, each new
one that is not the only one in its storage, or that does not fill it, is copied (`settle`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import BufferLayout
from zeroshard.placement import Placement
from zeroshard.storage.buffer import uses_of
from zeroshard.storage.gradient_buffer import GradientBuffer


class SlotBuffer(GradientBuffer):
    """See the module's note. There is one shard, which is the whole; `full` is always None."""

    is_apart: ClassVar[bool] = True

    def __init__(self, layout: BufferLayout, dtype: torch.dtype, resting: Placement, device: torch.device) -> None:
        assert layout.num_shards == 1, "the gradients of several ranks lie in a bucket"
        allocate = partial(torch.zeros, dtype=torch.uint8, device=device)
        super().__init__(layout, 0, dtype, resting, allocate)
        self._places: dict[tuple[int, int], list[tuple[int, slice | None]]] = {}
        self._nothing = self.shard
        self._tensors = [self._nothing] * len(layout.slots)
        self._flat: dict[int, Tensor] = {}  # a step reads them twice: for the norm, and for the update
        self._fresh: set[int] = set()  # slots whose tensor the current backward has made

    def hold(self) -> None:
        """Nothing is allocated before there are values."""

    def let_go(self) -> None:
        self._tensors = [self._nothing] * len(self.layout.slots)
        self._flat.clear()
        self._fresh.clear()

    def views(self) -> list[Tensor]:
        """The tensor of each slot, in the parameter's shape; empty and 1-D, if there is none."""
        return self._tensors

    def padding(self) -> list[Tensor]:
        return []

    def put(self, index: int, value: Tensor) -> None:
        """Take a value over."""
        if type(value) is not Tensor or value.dtype != self.shard.dtype or not value.is_contiguous() or value.is_neg():
            value = torch.empty(value.shape, dtype=self.dtype, device=self.shard.device).copy_(value)
        # `detach`: whoever has kept the tensor is then another user of its storage, for `settle`.
        self._tensors[index] = value.detach()
        self._fresh.add(index)

    def add(self, index: int, value: Tensor) -> None:
        if index in self._fresh:  # two gradients in one backward
            self._settle([index])
        super().add(index, value)

    def clear(self, index: int) -> None:
        if self._tensors[index] is self._nothing:
            slot = self.layout.slots[index]
            self._tensors[index] = torch.zeros(slot.shape, dtype=self.dtype, device=self.shard.device)
        else:
            self._settle([index])
            self._tensors[index].zero_()

    def clear_all(self) -> None:
        for index in range(len(self._tensors)):
            self.clear(index)
        self._note_most()

    def keep_own(self, factor: int) -> set[int]:
        return set(range(len(self._tensors)))  # everything is the own interval, of the one rank

    def part(self, world: Interval) -> Tensor:
        parts = self.parts(world)
        assert len(parts) == 1, "slots lie apart: no interval of several is one tensor"
        return parts[0]

    def part_of_shard(self, world: Interval) -> Tensor:
        return self.part(world)

    def parts(self, world: Interval) -> Sequence[Tensor]:
        places = self._places.get((world.start, world.stop)) or self._find(world)
        return [self._in_one_row(index) if place is None else self._in_one_row(index)[place] for index, place in places]

    def _in_one_row(self, index: int) -> Tensor:
        """The tensor of a slot, flat."""
        tensor, flat = self._tensors[index], self._flat.get(index)
        if flat is None or flat.data_ptr() != tensor.data_ptr():  # another one, or `p.grad.data = values`
            flat = self._flat[index] = tensor.view(-1)
        return flat

    def _find(self, world: Interval) -> list[tuple[int, slice | None]]:
        """The slots that the interval touches, and the part of each; None: all of it."""
        fragments = self.layout.fragments_in(world)
        places = [(one.index, None if one.world == one.slot.world else one.param.slice) for one in fragments]
        self._places[world.start, world.stop] = places  # the same intervals are read in every step
        return places

    def copy_to(self, world: Interval, out: Tensor) -> Tensor:
        out.zero_()
        for fragment in self.layout.fragments_in(world):
            out[fragment.local.slice] = self.part(fragment.world)
        return out

    @property
    def is_here(self) -> bool:
        return any(tensor is not self._nothing for tensor in self._tensors)

    @property
    def version(self) -> int:
        return sum([tensor._version for tensor in self._tensors])

    def settle(self) -> None:
        """See [Note: whose memory a gradient is]."""
        if not self._fresh:
            return
        self._settle(self._fresh)
        self._fresh.clear()
        self._flat.clear()  # the storages of tensors that others have replaced
        self._note_most()

    def _note_most(self) -> None:
        self.most = max(self.most, sum([tensor.nbytes for tensor in self._tensors]))

    def _settle(self, indices: Iterable[int]) -> None:
        for index in indices:
            tensor = self._tensors[index]
            storage = tensor.untyped_storage()
            if uses_of(storage) > _OWN_COUNT or storage.nbytes() != tensor.nbytes:
                self._tensors[index] = tensor.clone()

    def storages(self) -> list[Tensor]:
        return [tensor for tensor in self._tensors if tensor is not self._nothing]


_ALONE = torch.empty(1, device="cpu")
_OWN_COUNT = uses_of(_ALONE.untyped_storage())
