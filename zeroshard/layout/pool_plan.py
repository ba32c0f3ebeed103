"""Which full-size buffers a model needs: for some requests one for good, for others a few that they take turns in.

Arithmetic alone: the engine makes the buffers that are planned here (`pool.py`), and the planner counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

KEPT_BYTES = 32 << 20
"""What stays held between two steps on a CPU: about one unit of the default size."""


@dataclass(frozen=True)
class Request:
    """For a full-size buffer, for a while. Those of one queue take turns; `alone`: it needs one for good."""

    key: Hashable
    queue: Hashable
    num_bytes: int
    alone: bool


@dataclass(frozen=True)
class PoolPlan:
    """Which buffers a set of requests needs.

    Attributes:
        own: key -> bytes, for those who need one for good.
        shared: queue -> (how many, bytes of each), for those who take turns.
    """

    own: dict[Hashable, int]
    shared: dict[Hashable, tuple[int, int]]

    @classmethod
    def of(cls, requests: Iterable[Request], turns: Callable[[int, int], int]) -> PoolPlan:
        """`turns`: number of requests in a queue, and the most bytes of one -> how many buffers they take turns in."""
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
        """One buffer in use, one for the unit to come."""
        return cls.of(requests, lambda num_units, num_bytes: min(2, num_units))

    @classmethod
    def for_gradients(cls, requests: Iterable[Request], *, reads_peers: bool) -> PoolPlan:
        """Two buckets, so that one is reduced while the next fills. But the last unit waits for the bucket of the one
        before, as no other fills meanwhile. Where ranks read each other's memory (`reads_peers`) nothing moves
        meanwhile: two let a rank be late now and then, as long as that is cheap."""

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
    """Those that need a buffer more where all of them need one at once. `turns`: how many there are for each queue."""
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
    """Which of these buffers stay held between two steps on a CPU, in the order of preference."""
    total, result = 0, []
    for size in sizes:
        result.append(total + size <= KEPT_BYTES)
        total += size * result[-1]
    return result
