"""The intervals of a full buffer that take part in an exchange: everything, or some intervals of each shard.

        full      |      rank 0      |      rank 1      |      rank 2      |
        trains         ######   #####|####                    ########
        portions       [    ]   [   ]|[  ]              |     [      ]

In a reduction, each rank receives the other ranks' values of its own portions. In a gather, each rank sends its own
portions to the others. The rest of the buffer does not move, so ranks may send different amounts. Only arithmetic on
shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from zeroshard.layout.interval import Interval


@dataclass(frozen=True)
class Portions:
    """`of_shard[rank]`: intervals of the full buffer inside the shard of that rank, in order; none is empty."""

    numel: int
    of_shard: tuple[tuple[Interval, ...], ...]

    @classmethod
    def of(cls, intervals: Iterable[Interval], numel: int, num_shards: int) -> Portions:
        """The intervals, cut at the borders of `num_shards` equal shards of a buffer of `numel` elements."""
        shard = numel // num_shards
        of_shard: list[list[Interval]] = [[] for _ in range(num_shards)]
        for interval in intervals:
            start = interval.start
            while start < interval.stop:
                stop = min(interval.stop, (start // shard + 1) * shard)
                of_shard[start // shard].append(Interval(start, stop))
                start = stop
        return cls(numel, tuple(map(tuple, of_shard)))

    @property
    def num_shards(self) -> int:
        return len(self.of_shard)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Number of elements in the portions of each shard."""
        return tuple(sum(interval.numel for interval in of_rank) for of_rank in self.of_shard)

    @cached_property
    def inside(self) -> tuple[tuple[Interval, ...], ...]:
        """The portions of each shard, counted from its start."""
        shard = self.numel // self.num_shards
        return tuple(
            tuple(interval.relative_to(rank * shard) for interval in of_rank)
            for rank, of_rank in enumerate(self.of_shard)
        )

    @cached_property
    def total(self) -> int:
        """Number of elements in the portions of all shards."""
        return sum(self.numels)

    @property
    def is_whole(self) -> bool:
        return self.total == self.numel

    def sent_to_reduce(self, rank: int) -> int:
        """Elements that a rank sends in a reduction: to each other rank, that rank's portions."""
        return self.total - self.numels[rank]

    def sent_to_gather(self, rank: int) -> int:
        """Elements that a rank sends in a gather: its own portions, to each other rank."""
        return (self.num_shards - 1) * self.numels[rank]


@lru_cache(maxsize=1024)
def everything(numel: int, num_shards: int) -> Portions:
    return Portions.of([Interval(0, numel)], numel, num_shards)
