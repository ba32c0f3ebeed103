"""A thread that makes all calls to a store, so that no other thread blocks if the store does not answer.

A store's socket waits without a timeout for a host that packets no longer reach. Only this thread blocks in it. Other
threads queue a job and wait as long as they choose, and can see for how long a call has been open.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import Store

from zeroshard.errors import Error
from zeroshard.failures.positions import ON_WATCH
from zeroshard.ranks.clock import Clock, Patience
from zeroshard.ranks.living import Living

T = TypeVar("T")
_GONE = "the store of the process group is gone"


class Silent(Error, RuntimeError):
    """The store has not answered in time, or is gone."""


class Closed(Silent):
    """The store has closed the connection."""


class Attended:
    """The calls of one thread to a store, which has the methods of that store. Each waits for the answer; the
    `silent_for` of the `StoreLine` tells since when.

    Attributes:
        asked: start of the call that is open, by the clock of its line.
        error: what the store has raised last.
    """

    def __init__(self, store: Store, clock: Clock | None = None) -> None:
        self._store: Store | None = store
        self._clock = clock or Clock()
        self.asked: float | None = None
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.asked = self._clock.seconds()
            try:
                return getattr(self._store, name)(*arguments)
            except Exception as error:  # torch's stores: DistError, a RuntimeError. Others (torch's EtcdStore): any
                self.error = error
                raise
            finally:
                self.asked = None

        return call

    def let_go(self) -> None:
        """Hold the store no longer: a TCPStore ends with its last holder. There are no calls after this."""
        self._store = None


class StoreLine:
    """Attributes:
    gone: a call to the store has failed, as it has closed the connection, for example.
    is_over: the thread has ended, or is about to: it takes no further job.
    clock: of the time for which this process has run.
    """

    def __init__(self, store: Store, beat: Callable[[Store], None], beat_seconds: float) -> None:
        """`beat` is called on the thread every `beat_seconds`, until `close`."""
        self.gone, self.is_over, self.clock = False, False, Clock()
        self._beat, self._beat_seconds = beat, beat_seconds
        self._jobs: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._last: Callable[[Store], Any] | None = None
        self._attended: Living[Attended] = Living()
        self._store = self.attend(store)
        # A daemon: a call that the store never answers must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="zeroshard store", daemon=True)
        self._thread.start()

    def ask(self, job: Callable[[Store], T], patience: float) -> T:
        """Run `job(store)` on the thread, and return its result.

        Raises:
            Silent: there was no result within `patience` seconds, or the store is gone (`Closed`).
        """
        future: Future[T] = Future()
        self._jobs.put((job, future))
        if self.is_over:  # only now: it may end while the job is queued
            self._refuse_all()
        waits = Patience(patience)
        while not wait([future], waits.pause).done:
            if waits.left <= 0:
                raise Silent(f"the store of the process group has not answered for {self.silent_for():.0f} s")
        return future.result()

    def hurry(self) -> None:
        """Make the next beat due now. Any thread may call it."""
        self._jobs.put(None)

    def attend(self, store: Store) -> Attended:
        """The store, for calls of other threads, so that `silent_for` includes them."""
        attended = Attended(store, self.clock)
        self._attended.add(attended)
        return attended

    def silent_for(self) -> float:
        """Seconds since the oldest call that the store has not answered yet; 0 if no call is open. Time for which this
        process was stopped is left out, provided that this is called every second."""
        now = self.clock.seconds()
        asked = [asked for one in self._attended.all() if (asked := one.asked) is not None]
        return max(0.0, now - min(asked)) if asked else 0.0

    @property
    def error(self) -> str:
        """What the store has raised, if it is `gone`."""
        return str(self._store.error)

    def close(self, last: Callable[[Store], Any], patience: float) -> None:
        """Run `last(store)`, after which there is neither a beat nor another job, and end the thread.

        Raises:
            Silent: as `ask`; the thread ends once the store has answered.
        """
        self._last = last
        self.ask(last, patience)
        self._thread.join(patience)

    def _run(self) -> None:
        ON_WATCH.here = True
        next_beat = time.monotonic() + self._beat_seconds
        while not self.gone:
            entry = None
            with suppress(queue.Empty):
                entry = self._jobs.get(timeout=max(0.0, next_beat - time.monotonic()))
            if entry is None:
                next_beat = time.monotonic() + self._beat_seconds
                try:
                    with suppress(Silent):
                        self._do(self._beat)
                except Exception:  # a fault of ours: without this thread, this rank would hear of no failure any more
                    traceback.print_exc()
                continue
            job, future = entry
            try:
                future.set_result(self._do(job))
            except Exception as error:
                future.set_exception(error)
            if job is self._last:  # here, not by a further job: a beat may be due already
                self._store.let_go()
                break
        self.is_over = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        """Whoever waits for a queued job need not wait on."""
        with suppress(queue.Empty):
            while True:
                if entry := self._jobs.get_nowait():
                    entry[1].set_exception(Closed(_GONE))

    def _do(self, job: Callable[[Store], T]) -> T:
        try:
            return job(cast(Store, self._store))
        except Exception as error:
            # What a store raises when its connection is closed. Any other error is a fault of the job, and says nothing
            # about the store.
            if error is not self._store.error:
                raise
            self.gone = True
            raise Closed(_GONE) from error
