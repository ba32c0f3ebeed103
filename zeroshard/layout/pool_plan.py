"""Plans how many pool buffers a model needs: some requests have a buffer of their own, others share a few.

Only arithmetic: the engine makes the buffers that are planned here (`pool.py`), and the planner counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

KEPT_BYTES = 32 << 20
"""The most bytes of pool buffers that stay held between two steps on a CPU: about one unit of the default size."""


@dataclass(frozen=True)
class Request:
    """A request for a pool buffer. Requests of one queue take turns. `alone`: it needs a buffer of its own."""

    key: Hashable
    queue: Hashable
    num_bytes: int
    alone: bool


@dataclass(frozen=True)
class PoolPlan:
    """The buffers for a set of requests.

    Attributes:
        own: key -> bytes, for requests with a buffer of their own.
        shared: queue -> (number of buffers, bytes of each), for requests that take turns.
    """

    own: dict[Hashable, int]
    shared: dict[Hashable, tuple[int, int]]

    @classmethod
    def of(cls, requests: Iterable[Request], turns: Callable[[int, int], int]) -> PoolPlan:
        """`turns`: (number of requests in a queue, the most bytes of one) -> number of buffers for the queue."""
        requests = list(requests)
        sizes: dict[Hashable, list[int]] = {}
        for request in requests:
            if not request.alone:
                sizes.setdefault(request.queue, []).append(request.num_bytes)
        return cls(
            {request.key: request.num_bytes for request in requests if request.alone},
            {queue: (turns(len(of_queue), max(of_queue)), max(of_queue)) for queue, of_queue in sizes.items()},
        )

    @classmethod
    def for_weights(cls, requests: Iterable[Request]) -> PoolPlan:
        """Two buffers: one in use, one for the unit that is prefetched."""
        return cls.of(requests, lambda num_units, num_bytes: min(2, num_units))

    @classmethod
    def for_gradients(cls, requests: Iterable[Request], *, reads_peers: bool) -> PoolPlan:
        """Two buckets, so that one is reduced while the other fills. With only two units one is enough: the last unit
        waits for the bucket of the one before it. If ranks read each other's memory (`reads_peers`), data move only
        when a result is waited for: then a second bucket only helps if a rank is late, and is used if it is small."""

        def turns(num_units: int, num_bytes: int) -> int:
            if reads_peers:
                return min(2, num_units) if 2 * num_bytes <= KEPT_BYTES else 1
            return min(2, max(1, num_units - 1))

        return cls.of(requests, turns)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer, in the order in which they are made."""
        return [*self.own.values(), *(size for count, size in self.shared.values() for _ in range(count))]


def beyond_turns(requests: Iterable[Request], turns: Mapping[Hashable, int]) -> list[Request]:
    """The requests without a buffer, if all need one at once. `turns`: queue -> number of buffers."""
    left = dict(turns)
    more = []
    for request in requests:
        if request.alone:
            continue
        if left.get(request.queue, 0):
            left[request.queue] -= 1
        else:
            more.append(request)
    return more


def kept(sizes: Iterable[int]) -> list[bool]:
    """Which of these buffers, given in order of preference, stay held between two steps on a CPU."""
    total, result = 0, []
    for size in sizes:
        result.append(total + size <= KEPT_BYTES)
        total += size * result[-1]
    return result
