"""How an optimizer's work is cut: pieces of a unit's main, each in one param group, at the same places in every plan.

    world     0        256       512       768      1024
    shards    |         rank 0    |        rank 1     |
    groups    |  decay     |        no decay          |
    pieces    |   a    |b1| b2   |       c           |      b1: from the group's cut to the next multiple of 256

A fused kernel treats the tail of a vector differently from its body. So every piece starts at a multiple of ALIGNMENT,
but for a short one from where a group starts to the next multiple; no cut depends on the plan or on the rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.layout.interval import Interval, round_up
from zeroshard.layout.layout import ALIGNMENT, BufferLayout
from zeroshard.storage.unit import Unit

PIECE_NUMEL = 1 << 18
"""Elements at most: an fp32 piece, its gradient and two moments stay in a core's cache."""


def cut(
    layout: BufferLayout, keys: Sequence[Hashable | None], piece_numel: int = PIECE_NUMEL
) -> Iterator[tuple[Hashable, Interval]]:
    """(key, world range) of each piece, for one key per slot; neighbours with equal keys are cut as one.

    A slot whose key is None is left out. Padding goes with the slot before it.
    """
    for key, section in _sections(layout, keys):
        start = section.start
        while start < section.stop:
            shard_end = (start // layout.shard_numel + 1) * layout.shard_numel
            end = min(
                section.stop, shard_end, start + piece_numel if start % ALIGNMENT == 0 else round_up(start, ALIGNMENT)
            )
            yield key, Interval(start, end)
            start = end


def _sections(layout: BufferLayout, keys: Sequence[Hashable | None]) -> Iterator[tuple[Hashable, Interval]]:
    start = 0
    for index, key in enumerate(keys):
        last = index == len(keys) - 1
        if last or keys[index + 1] != key:
            stop = layout.numel if last else layout.slots[index + 1].world.start
            if key is not None and stop > start:
                yield key, Interval(start, stop)
            start = stop


BATCH_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements stepped at a time, by device: what stays in cache on a CPU, what fills the machine on a GPU."""


@dataclass(eq=False, slots=True)
class Piece:
    """One flat parameter of the inner optimizer.

    Attributes:
        world: its range in the unit's buffers.
        group: index of the param group.
        tensor: [world.numel] in the main dtype; the key of the inner optimizer's state. A view of main, or pointed to
            scratch during the step where main has to be rebuilt.
        active: whether it takes part in the next step (its parameters have gradients).
    """

    unit: Unit
    world: Interval
    group: int
    tensor: Tensor
    active: bool = True


def batches(numels: Sequence[int], limit: int) -> list[range]:
    """Neighbouring pieces stepped together: as many as `limit` elements hold, at least one."""
    result: list[range] = []
    start = total = 0
    for index, numel in enumerate(numels):
        if index > start and total + numel > limit:
            result.append(range(start, index))
            start, total = index, 0
        total += numel
    return [*result, range(start, len(numels))]


def scratch_bytes(numel: int, dtype: torch.dtype) -> int:
    """What a piece needs of a `Scratch`: the next one begins where a vector may."""
    return round_up(numel * dtype.itemsize, 64)


class Scratch:
    """One storage, divided among the pieces of a batch, each in its dtype; the next batch begins anew."""

    def __init__(self) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8)
        self._at = 0

    def reserve(self, num_bytes: int, device: torch.device) -> None:
        """What is there already is enough, or is replaced."""
        if num_bytes > self.storage.numel():
            self.storage = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def rewind(self) -> None:
        self._at = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], with whatever values."""
        start, self._at = self._at, self._at + scratch_bytes(numel, dtype)
        return self.storage[start : start + numel * dtype.itemsize].view(dtype)


def slots_in(unit: Unit, world: Interval) -> range:
    """Indices of the slots that the range touches."""
    touched = [i for i, slot in enumerate(unit.layout.slots) if slot.world & world]
    return range(touched[0], touched[-1] + 1) if touched else range(0)
