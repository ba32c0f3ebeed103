"""Communication in flight: when its result may be used, and when this rank may write to what it gave again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Protocol

from zeroshard.comm.comm_log import CommLog, Flight
from zeroshard.comm.messages import Announcement, Failing, Messages
from zeroshard.failures.positions import HERE, ON_WATCH, Wait
from zeroshard.ranks.pipes import is_by_pipe


class Owner(Protocol):
    """The owner of a communication: its messages are compared, its log counts the seconds of waiting."""

    messages: Messages
    log: CommLog


class Pending:
    """A collective in flight. `wait()` returns when the result may be used (on CUDA: by the current stream only).

    Attributes:
        at: names this collective for the watch.
        flight: names it for timelines. None: it is a part of another collective, and waited for in that one's wait.
    """

    _owner: Owner | None = None  # of the class, for `__del__`: an interrupt may end `__init__` at its first line

    def __init__(
        self,
        owner: Owner | None = None,
        works: Sequence[Any] = (),
        finish: Callable[[], Sequence[Any] | None] | None = None,
        announced: Announcement | None = None,
    ) -> None:
        """`announced`: compared before the works are waited for. `finish`: runs after them, and may return further
        works, which only `release` waits for. Without an owner the collective is finished: nothing had to move."""
        self._works, self._finish, self._announced = works, finish, announced
        self._acknowledgements: Sequence[Any] = ()
        self._owner = owner  # behind all that `__del__` reads
        self._look: Callable[[], None] | None = None
        self.at: Wait | None = None
        self.flight: Flight | None = None

    def wait(self, *, stale: bool = False) -> None:
        """`stale`: the result will not be used. It is not sampled either, as peers may already be changing it."""
        look, self._look = self._look, None
        self._arrive()
        if self.flight is not None:
            self.flight.land()
        if look is not None and not stale:
            look()

    def _arrive(self) -> None:
        # Clear the fields before anything can raise: `__del__` must not wait a second time for works that have failed.
        works, self._works = self._works, ()
        announced, self._announced = self._announced, None
        finish, self._finish = self._finish, None
        if self._owner is None or not (works or finish or announced):
            return
        start = time.perf_counter()
        with Failing(self._owner.messages, self.at), nullcontext() if self.flight is None else self.flight.waiting():
            # Messages first: they show whether the peers are in this collective. If they are not, the receives posted
            # for the data never complete, and a wait for them would hang.
            if announced is not None:
                self._owner.messages.compare(announced)
            for work in works:
                work.wait()
            if finish is not None:
                self._acknowledgements = finish() or ()
        if self._acknowledgements and self.at is not None:
            HERE.has_read(self.at)
        self._owner.log.wait_seconds += time.perf_counter() - start

    def at_place(self, at: Wait | None, flight: Flight | None) -> Pending:
        """Set `at` and `flight`. Returns self."""
        self.at, self.flight = at, flight
        return self

    def then(self, look: Callable[[], None]) -> Pending:
        """Set a function that is called once the result may be used. Returns self."""
        self._look = look
        return self

    @property
    def has_arrived(self) -> bool:
        """Whether `wait_for_one` has to wait for no peer. False where this is not known without waiting."""
        return not self._works and (self._announced is None or self._announced.has_arrived)

    def release(self) -> None:
        """Wait for the result, and until the peers have read what this rank gave: only then may it be written to."""
        self.wait()
        works, self._acknowledgements = self._acknowledgements, ()
        if self._owner is None or not works:
            return
        read = nullcontext() if self.flight is None else self.flight.waiting("peers have read")
        at = None if self.at is None else self.at.until_read()
        with Failing(self._owner.messages, at), read:
            for work in works:
                work.wait()

    # For exchanges that follow each other (`Chain`). A single one is the first and the last.

    @property
    def goes_on(self) -> bool:
        """Whether exchanges follow the one in progress."""
        return False

    def wait_for_one(self) -> None:
        """Wait for the exchange in progress, and start none."""
        self.wait()

    def release_one(self) -> None:
        """Like `wait_for_one`, and wait until the peers have read what this rank gave to it."""
        self.release()

    def advance(self) -> bool:
        """Wait for the exchange in progress, and start the one that follows it, without waiting for that one. False,
        without effect, if none follows."""
        return False

    def __del__(self) -> None:
        # gloo: a message whose receive no longer exists blocks its connection for all later messages, whatever their
        # tag ("Timed out waiting ... for send operation to complete"). So a result is waited for even if nobody uses
        # it. But not after a failure: then the messages may never come.
        if self._owner is None or self._owner.messages.failed:
            return
        if not (self._works or self._announced or self._acknowledgements):
            return
        # Not for what comes through pipes, which keep its receive; and not until the peers have read what this rank
        # gave: a peer says so when it waits for this exchange, or drops it. Garbage collection does that at another
        # moment on each rank, and here it may run in the middle of a later exchange, for which that peer waits.
        self._owner.messages.keep(self._acknowledgements)
        announced = self._announced
        waits = [] if announced is None or all(map(is_by_pipe, announced.works)) else [announced.arrive]
        waits += [work.wait for work in self._works if not is_by_pipe(work)]
        if waits and ON_WATCH.here:  # garbage collection runs in any thread
            threading.Thread(target=_wait_for_all, args=(waits,), name="zeroshard waits", daemon=True).start()
        else:
            _wait_for_all(waits)


def _wait_for_all(waits: Sequence[Callable[[], object]]) -> None:
    for wait in waits:
        with suppress(RuntimeError):
            wait()
