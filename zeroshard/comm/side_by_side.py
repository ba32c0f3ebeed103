"""Lays the shards of the ranks of one host side by side, in common memory (`common.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.shared_transport import SharedTransport
from zeroshard.comm.together import tell_together, together
from zeroshard.ranks.common import Common


def lay_side_by_side(
    collectives: Collectives, sizes: Sequence[int], words: Callable[[Exception], str]
) -> list[Common | None]:
    """For `shard`: common memory for full buffers of so many bytes. None for an empty one, and for all if ranks do not
    share memory. Collective. It takes no memory before it is written to.

    Raises:
        ValueError: on all ranks, if it fails on any. Nothing is left behind.
    """
    transport, axis = collectives.transport, collectives.mesh.shard
    is_possible = transport.has_common_shards(axis.size, collectives.device.type)
    if not isinstance(transport, SharedTransport) or not is_possible:
        return [None] * len(sizes)
    # Descriptors are closed when all ranks have mapped the segments, or one of them has failed.
    with ExitStack() as descriptors:

        def create() -> tuple[None, list[tuple[int, int]]]:
            created = []
            for size in sizes if axis.rank == 0 else ():
                segment, fd = transport.memory.create(size)
                descriptors.callback(os.close, fd)
                created.append((segment, fd))
            return None, created

        _, of_ranks = tell_together(collectives, "shard", create, words=words)
        of_axis = of_ranks[collectives.mesh.world.ranks.index(axis.ranks[0])]

        def map_all() -> list[Common | None]:
            pairs = zip(of_axis, sizes, strict=True)
            return [transport.map_common(axis, segment, fd, size) if size else None for (segment, fd), size in pairs]

        return together(collectives, "shard", map_all, words=words)
