"""The layout of a unit's flat buffers: where each parameter lies, and which part of it each rank owns.

        slots   |  head  |      mlp.weight       | norm |pad|      parameters in reverse registration order
        world   0        3                       8      ...  16
        shards  |  rank 0   |  rank 1   |  rank 2   |  rank 3   |  equal, contiguous, independent of parameters

(Drawn with an alignment of 1. In a model slots start at multiples of 64, with padding in between, and shards at
multiples of 256. Padding is zero, and stays zero.)

A *fragment* is the part of one parameter inside one shard. It has three ranges: *world* (in the full buffer), *local*
(in the shard) and *param* (in the flattened parameter). Weights, gradients and main of a unit share one layout, so
"my shard" is the same interval in all three, in the optimizer state and on disk. Everything here is arithmetic on
shapes: no tensor, no device, no process group. (The idea of the flat, shard-aligned buffer is ZeRO's, and Megatron's
`DistributedOptimizer` uses the same three ranges.)
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from zeroshard.errors import InvalidValue
from zeroshard.layout.interval import Interval, round_up
from zeroshard.layout.portions import Portions, everything

ALIGNMENT = 256
"""Shards start at multiples of this many elements. So vector kernels have no tail inside a shard, results do not depend
on where shards are cut, and block-quantised optimizer state has whole blocks."""

SLOT_ALIGNMENT = 64
"""Slots start at multiples of this many elements. Kernels are chosen by address: some matrix products round
differently if a weight starts at an odd element, and GPUs load it in smaller pieces. An aligned parameter gets the
same kernels as in the plain model, where the allocator aligns each tensor."""


def numel_multiple(num_shards: int, num_replicas: int = 1) -> int:
    """Full buffers are padded to a multiple of this many elements, so that each shard, and under a 2-D mesh each
    replica's part of it, is a multiple of ALIGNMENT."""
    return ALIGNMENT * num_shards * num_replicas


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the full buffer."""

    name: str
    shape: tuple[int, ...]
    world: Interval


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of `slot`, number `index` of the layout, inside one interval of the buffer. `world`: in the full buffer;
    `local`: counted from the start of the interval; `param`: in the flattened parameter."""

    index: int
    slot: Slot
    world: Interval
    local: Interval
    param: Interval


@dataclass(frozen=True)
class BufferLayout:
    """A buffer of `numel` elements, cut into `num_shards` equal shards. `slots` lie in it in order, with padding
    between and after them."""

    slots: tuple[Slot, ...]
    numel: int
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.numel % self.num_shards:
            raise InvalidValue(f"{self.numel} elements cannot be cut into {self.num_shards} equal shards")
        end = 0
        for slot in self.slots:
            if slot.world.start < end or slot.world.numel != math.prod(slot.shape):
                raise InvalidValue(f"slot {slot.name} {slot.shape} must lie behind {end}, found {slot.world}")
            end = slot.world.stop
        if end > self.numel:
            raise InvalidValue(f"the slots need {end} elements, the buffer has {self.numel}")

    @classmethod
    def pack(
        cls,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        num_shards: int,
        *,
        alignment: int = ALIGNMENT,
        slot_alignment: int = SLOT_ALIGNMENT,
        num_replicas: int = 1,
    ) -> BufferLayout:
        """Lay `(name, shape)` one after the other, in the order given, each at a multiple of `slot_alignment`.

        The end is padded so that each shard is a multiple of `alignment * num_replicas` elements (under a 2-D mesh a
        shard is itself cut once more, over its replicas).
        """
        slots: list[Slot] = []
        end = 0
        for name, shape in shapes:
            start = round_up(end, slot_alignment)
            end = start + math.prod(shape)
            slots.append(Slot(name, tuple(shape), Interval(start, end)))
        return cls(tuple(slots), round_up(end, num_shards * alignment * num_replicas), num_shards)

    @cached_property
    def padding(self) -> tuple[Interval, ...]:
        """The intervals of the full buffer that belong to no parameter, in order; none is empty."""
        ends = [0, *(slot.world.stop for slot in self.slots)]
        starts = [*(slot.world.start for slot in self.slots), self.numel]
        return tuple(Interval(end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    @cached_property
    def filled(self) -> frozenset[int]:
        """The slots (by index) with at least one element."""
        return frozenset(index for index, slot in enumerate(self.slots) if slot.world)

    @cached_property
    def turnable(self) -> tuple[int, ...]:
        """The slots (by index) that keep their shape if two dimensions are exchanged, as square ones do:
        `p.data = p.data.t()` also keeps their address."""
        sizes = [[size for size in slot.shape if size > 1] for slot in self.slots]
        return tuple(index for index, of_slot in enumerate(sizes) if len({*of_slot}) < len(of_slot))

    def portions(self, slots: Collection[int]) -> Portions:
        """The portions that contain these slots (by index); for all slots, the whole buffer with its padding."""
        if len(slots) == len(self.slots):
            return everything(self.numel, self.num_shards)
        return Portions.of(self._runs(sorted(slots)), self.numel, self.num_shards)

    def _runs(self, slots: Iterable[int]) -> Iterator[Interval]:
        """The intervals of these slots, with neighbours merged, each up to where the next slot may start."""
        run = Interval(0, 0)
        for index in slots:
            world = self.slots[index].world
            limit = self.slots[index + 1].world.start if index + 1 < len(self.slots) else self.numel
            stop = min(round_up(world.stop, SLOT_ALIGNMENT), limit)
            if world.start != run.stop:
                yield run
                run = Interval(world.start, stop)
            else:
                run = Interval(run.start, stop)
        yield run

    @cached_property
    def shard_numel(self) -> int:
        return self.numel // self.num_shards

    @cached_property
    def slots_numel(self) -> int:
        """Elements of all slots: everything but the padding."""
        return sum(slot.world.numel for slot in self.slots)

    @property
    def end(self) -> int:
        """The end of the last parameter: the rest of the buffer is padding."""
        return next((slot.world.stop for slot in reversed(self.slots) if slot.world), 0)

    def shard(self, rank: int) -> Interval:
        """The interval of the full buffer that is the shard of `rank`."""
        if not 0 <= rank < self.num_shards:
            raise InvalidValue(f"rank must be in [0, {self.num_shards}), found {rank}")
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """The fragments in the shard of `rank`, in buffer order, without empty ones (and empty parameters)."""
        return tuple(self.fragments_in(self.shard(rank)))

    def fragments_in(self, interval: Interval) -> Iterator[Fragment]:
        """The fragments in any interval of the full buffer; `local` counts from its start."""
        for index in self.slots_in(interval):
            slot = self.slots[index]
            if world := slot.world & interval:
                local, param = world.relative_to(interval.start), world.relative_to(slot.world.start)
                yield Fragment(index, slot, world, local, param)

    def slots_in(self, interval: Interval) -> range:
        """The indices of the slots that the interval touches, from the first to the last: the empty ones at both ends
        are left out."""
        starts, stops = self._borders
        first, end = bisect_right(stops, interval.start), bisect_left(starts, interval.stop)
        touched = [index for index in range(first, end) if starts[index] < stops[index]] if interval else []
        return range(touched[0], touched[-1] + 1) if touched else range(0)

    @cached_property
    def _borders(self) -> tuple[list[int], list[int]]:
        """The starts and the stops of the slots."""
        return [slot.world.start for slot in self.slots], [slot.world.stop for slot in self.slots]
