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
    """A request for a pool buffer. Requests of one queue take turns.

    Attributes:
        alone: it needs a buffer of its own.
        places: of gradients: numbers of the first and last parameter. The bucket is needed from the last one to the
            first, as backward comes to them.
    """

    key: Hashable
    queue: Hashable
    num_bytes: int
    alone: bool
    places: tuple[int, int] = (0, 0)


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
        queues: dict[Hashable, list[Request]] = {}
        for request in requests:
            if not request.alone:
                queues.setdefault(request.queue, []).append(request)
        own, shared = {request.key for request in requests if request.alone}, dict[Hashable, tuple[int, int]]()
        for queue, of_queue in queues.items():
            count = turns(len(of_queue), max(request.num_bytes for request in of_queue))
            beyond = _beyond_at_once(of_queue, count)
            own |= beyond
            shared[queue] = count, max(request.num_bytes for request in of_queue if request.key not in beyond)
        return cls({request.key: request.num_bytes for request in requests if request.key in own}, shared)

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


def _beyond_at_once(requests: Iterable[Request], count: int) -> set[Hashable]:
    """The keys of those that find all of `count` buffers in use, because their places overlap: units of two precisions
    in one block, for example, accumulate at the same time."""
    in_use, beyond = list[int](), set[Hashable]()  # the first places of those that have a buffer
    for request in as_backward_comes(requests):
        first, last = request.places
        in_use = [place for place in in_use if place < last]
        if len(in_use) < count:
            in_use.append(first)
        else:
            beyond.add(request.key)
    return beyond


def as_backward_comes(requests: Iterable[Request]) -> list[Request]:
    return sorted(requests, key=lambda request: request.places[1], reverse=True)


def beyond_turns(requests: Iterable[Request], turns: Mapping[Hashable, int]) -> list[Request]:
    """The requests without a buffer, if all need one at once. `turns`: queue -> number of buffers."""
    left = dict(turns)
    more = []
    for request in as_backward_comes(requests):
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
