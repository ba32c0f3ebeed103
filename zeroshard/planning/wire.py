"""A simulated wire: how long each collective takes by the alpha-beta model, and when it ends behind those before it.

A collective is a sequence of steps, and a step takes `latency + bytes / bandwidth` (alpha and beta; Hockney, 1994). The
algorithms and their costs are those of Thakur, Rabenseifner and Gropp (2005), for N bytes on n ranks, depth = log2 n
rounded up:

| collective | algorithm: steps, bytes that a rank sends |
|---|---|
| all-gather, reduce-scatter, all-to-all | ring: n - 1, N (n - 1) / n |
| all-reduce | the quicker of a ring: 2 (n - 1), 2 N (n - 1) / n, and a tree: 2 depth, 2 depth N |
| broadcast, reduce | the quicker of halves and a ring: depth + n - 1, 2 N (n - 1) / n, and a tree: depth, depth N |

A rank has one wire. A collective begins when it is issued, or when the wire is free:

    program   | issue a | compute ... | issue b | compute ... | wait for b      |
    wire      | a ..................................| b ........................|
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from zeroshard.errors import InvalidValue


def _depth(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _ring(ranks: int) -> Sequence[tuple[int, float]]:
    return [(ranks - 1, (ranks - 1) / ranks)]


def _ring_or_tree(ranks: int) -> Sequence[tuple[int, float]]:
    return [(2 * (ranks - 1), 2 * (ranks - 1) / ranks), (2 * _depth(ranks), 2 * _depth(ranks))]


def _from_or_to_one(ranks: int) -> Sequence[tuple[int, float]]:
    return [(_depth(ranks) + ranks - 1, 2 * (ranks - 1) / ranks), (_depth(ranks), _depth(ranks))]


ALGORITHMS: dict[str, Callable[[int], Sequence[tuple[int, float]]]] = {
    "all_gather": _ring,
    "reduce_scatter": _ring,
    "all_to_all": _ring,
    "all_reduce": _ring_or_tree,
    "broadcast": _from_or_to_one,
    "reduce": _from_or_to_one,
}
"""Collective -> function of the number of ranks -> (steps, bytes sent as a multiple of N) of each algorithm."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """What connects the ranks.

    Attributes:
        latency: seconds per step of a collective, in addition to its bytes.
        bandwidth: bytes per second that one rank sends; `math.inf` for a network that takes no time.
        overlaps: whether collectives go on while a rank computes. If not, each is waited for where it is issued.

    Raises:
        ValueError: a negative latency, or a bandwidth that is not positive.
    """

    latency: float
    bandwidth: float
    overlaps: bool = True

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0:
            raise InvalidValue(
                "a network needs a latency of at least 0 seconds and a positive bandwidth, found "
                f"latency={self.latency} and bandwidth={self.bandwidth}"
            )

    def seconds(self, collective: str, num_bytes: int, ranks: int) -> float:
        """The time of one collective.

        Args:
            collective: a key of `ALGORITHMS`.
            num_bytes: N, of the full buffer: of all ranks' shards together.
        """
        return min(
            steps * self.latency + sent * num_bytes / self.bandwidth for steps, sent in ALGORITHMS[collective](ranks)
        )


class Clock(Protocol):
    """The time of a fabric, in seconds from an arbitrary start."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None:
        """Return when it is `moment`, at once if that has passed."""

    def call_at(self, moment: float, action: Callable[[], None]) -> None:
        """Call `action` at that moment, on another thread."""


class WallClock:
    """Real time: a wait sleeps. Other programs that use the cores make the computation longer, and the simulated
    network seem faster."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        while (rest := moment - time.perf_counter()) > 0:
            time.sleep(rest)

    def call_at(self, moment: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(max(0.0, moment - time.perf_counter()), action)
        timer.daemon = True
        timer.start()


class ProcessorClock:
    """The processor time of this process, plus the waits, which are skipped instead of slept: `now` jumps to their end.
    Other programs on the machine do not count, and a slow network costs no real time.

    A wait that this clock is not told of cannot be skipped. torch DDP waits for futures in C++, at the end of backward:
    its futures are complete at once, so call `Fabric.settle()` after each backward.

    Args:
        source: seconds of computation so far.
    """

    def __init__(self, source: Callable[[], float] = time.process_time) -> None:
        self._source = source
        self._skipped = 0.0

    def now(self) -> float:
        return self._source() + self._skipped

    def wait_until(self, moment: float) -> None:
        self._skipped += max(0.0, moment - self.now())

    def call_at(self, moment: float, action: Callable[[], None]) -> None:
        action()


@dataclass(slots=True)
class Transfer:
    """One collective on the wire.

    Attributes:
        collective, num_bytes, ranks: as for `Network.seconds`.
        issued, begin, end: moments of the clock.
        waited: seconds for which the program has waited for it.
    """

    collective: str
    num_bytes: int
    ranks: int
    issued: float
    begin: float
    end: float
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Fabric:
    """The wire of one rank.

    Attributes:
        network: may be replaced between two collectives; those that have been issued keep their times.
        log: all collectives, in the order of issue. You may clear it.
    """

    def __init__(self, network: Network, clock: Clock | None = None) -> None:
        self.network = network
        self.clock: Clock = WallClock() if clock is None else clock
        self.log: list[Transfer] = []
        self._free_at = -math.inf
        self._inside: SideOfFabric | None = None

    def issue(self, collective: str, num_bytes: int, ranks: int) -> Transfer:
        """Put a collective on the wire, behind those that were issued before."""
        now = self.clock.now()
        begin = max(now, self._free_at)
        if self._inside is not None and self._inside.last is not None:
            begin = max(begin, self._inside.last.end)
        seconds = self.network.seconds(collective, num_bytes, ranks)
        transfer = Transfer(collective, num_bytes, ranks, now, begin, begin + seconds)
        self._free_at = transfer.end
        self.log.append(transfer)
        if not self.network.overlaps:
            self.wait(transfer)
        return transfer

    def is_over(self, transfer: Transfer) -> bool:
        return self.clock.now() >= transfer.end

    def wait(self, transfer: Transfer) -> None:
        """Return when the collective has ended."""
        if self._inside is not None:
            if self._inside.last is None or transfer.end > self._inside.last.end:
                self._inside.last = transfer
            return
        start = self.clock.now()
        self.clock.wait_until(transfer.end)
        transfer.waited += max(0.0, transfer.end - start)

    def settle(self) -> None:
        """Wait for all collectives in the log."""
        for transfer in self.log:
            self.wait(transfer)


class SideOfFabric:
    """A stream beside the program, as a GPU has (`zeroshard.comm.chain.SideStream`): what waits for a collective inside
    delays only the collectives that are issued inside.

    Attributes:
        last: the collective with the latest end for which it has waited.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.last: Transfer | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        self._fabric._inside = self
        try:
            yield
        finally:
            self._fabric._inside = None

    def event(self) -> _End:
        return _End(self._fabric, self.last)


@dataclass(frozen=True)
class _End:
    """The end of what a stream has waited for."""

    fabric: Fabric
    last: Transfer | None

    def wait(self) -> None:
        if self.last is not None:
            self.fabric.wait(self.last)
