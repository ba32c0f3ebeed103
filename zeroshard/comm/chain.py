"""Exchanges that follow each other: each begins with the result of the one before it.

A CPU has to wait for an exchange before it can start the next one. `Chain.advance` is a moment at which it may do so,
chosen by the caller: in the same order on all ranks. On an accelerator all exchanges of a chain are queued at once, on
a stream beside the current one, which waits for none of them before it needs the result:

    current stream | compute ... | reduce | compute ...................................... | wait
    side stream                           |  wait, divide, gather .............. |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from zeroshard.comm.comm_log import CommLog, Flight
from zeroshard.comm.pending import Owner, Pending
from zeroshard.comm.transport import Gather, Reduction, Sum, Transport
from zeroshard.failures.positions import HERE, Wait
from zeroshard.layout.portions import Portions
from zeroshard.layout.sums import in_shards
from zeroshard.ranks.mesh import Axis


class Beside(Protocol):
    """What a chain needs of a stream. Simulated streams have the same methods."""

    def inside(self) -> AbstractContextManager[None]: ...

    def event(self) -> Any: ...


class SideStream:
    """A stream beside the one on which a device computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, it is the current stream, and continues after what the stream outside has queued. Waits for works
        make only this stream wait."""
        if self._stream is None:
            self._stream = torch.Stream(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def event(self) -> Any:
        """Stands for all that has been queued here. Its `wait` makes the current stream wait."""
        assert self._stream is not None, "nothing has been queued"
        return self._stream.record_event()


class Chain(Pending):
    """Exchanges one after the other."""

    def __init__(self, owner: Owner, first: Pending, beside: Beside | None = None) -> None:
        """`beside`: the stream on which all of them are queued at once; None: `advance` starts the next one."""
        super().__init__()
        self._of, self._now, self._beside = owner, first, beside
        self._following: deque[Callable[[], Pending]] = deque()

    def follow(self, start: Callable[[], Pending]) -> Chain:
        """Add an exchange at the end. Returns self.

        Args:
            start: starts it. Called when the exchange before it has its result, and the peers have read what this rank
                gave to that one.
        """
        if self._beside is None:
            self._following.append(start)
            return self
        with self._beside.inside():
            if self._following:
                last = self._following.pop()()
                last.release()
            else:
                self._now = self._queued(self._now)
            last = start()
        self._following.append(lambda: last)
        return self

    def _queued(self, pending: Pending) -> Pending:
        """The same exchange, waited for on the side stream: the caller waits for an event there."""
        assert self._beside is not None
        flight, pending.flight = pending.flight, None
        pending.release()
        return Pending(self._of, [self._beside.event()]).at_place(pending.at, flight)

    @property
    def goes_on(self) -> bool:
        return bool(self._following)

    @property
    def has_arrived(self) -> bool:
        return self._now.has_arrived

    def wait_for_one(self) -> None:
        self._now.wait()

    def release_one(self) -> None:
        self._now.release()

    def advance(self) -> bool:
        if not self._following or self._of.messages.failed:  # after a failure the peers may never come
            return False
        self._now.release()
        self._now = self._following.popleft()()
        return True

    def wait(self, *, stale: bool = False) -> None:
        while self.advance():
            pass
        self._now.wait(stale=stale)

    def release(self) -> None:
        while self.advance():
            pass
        self._now.release()


class Replicas:
    """The sum of a shard over its replicas, on a 2-D mesh: a reduction among the replicas, and then a gather."""

    def __init__(self, axis: Axis, log: CommLog, mesh: str) -> None:
        """`mesh`: its name, for the watch."""
        self._axis, self._log, self._mesh = axis, log, mesh
        self._last = Pending()  # the last reduction that was started

    def follow(
        self, chain: Chain, of_shards: Sum, reduction: Reduction, transport: Transport, unit: str, phase: str
    ) -> Chain:
        """Add to a chain, which begins with `of_shards`, the sum of its result over the replicas, in place.

        Args:
            reduction: its `of_replicas` is the scratch.
        """
        axis, out, key = self._axis, of_shards.out, f"reduce_replicas {self._mesh}"
        scratch = reduction.scratch if reduction.of_replicas is None else reduction.of_replicas
        moved = Portions.of(of_shards.portions.inside[of_shards.axis.rank], out.numel(), axis.size)
        own = in_shards(out, axis.size)[axis.rank]
        place: list[tuple[Wait, Flight]] = []

        def reduce() -> Pending:
            if scratch.numel():
                self._last.wait()  # it uses the same scratch
            text = f"sum over replicas of unit {unit} ({phase})"
            at = Wait(key, HERE.begin(key), axis.ranks, text)
            itemsize = reduction.wire.itemsize
            num_bytes = (moved.sent_to_reduce(axis.rank) + moved.sent_to_gather(axis.rank)) * itemsize
            common = of_shards.portions.total * itemsize
            flight = self._log.start("reduce_replicas", unit, phase, num_bytes, common=common)
            place.append((at, flight))
            sum_ = Sum(axis, moved, out, own, replace(reduction, scratch=scratch), "replicate")
            self._last = transport.reduce(sum_).at_place(at, flight.part())
            return self._last

        def gather() -> Pending:
            return transport.gather(Gather(axis, moved, out, own, "replicate")).at_place(*place[0])

        return chain.follow(reduce).follow(gather)
