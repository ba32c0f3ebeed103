"""A thread that waits for a key of a store, so that no rank has to poll the store for it.

On a `TCPStore` the thread makes one blocking wait on a connection of its own: the server answers when the key is set,
and no call is made in between. Other stores are polled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from zeroshard.errors import TookTooLong
from zeroshard.failures.found import holder_of, without_prefixes
from zeroshard.failures.positions import ON_WATCH
from zeroshard.failures.store_line import Attended, Closed

_WITHOUT_END = timedelta(days=20)
"""A store wait that times out prints a warning to stderr, so this is nearly as long as 32 bits of milliseconds
allow."""
_CONNECTING = timedelta(seconds=60)
"""How long a further connection to a store may take, if its timeout is shorter."""
_LOOK_SECONDS = 0.5
_NO_KEY = "zeroshard/no key"


def connection_of_its_own(store: Any, patience: float | None = None) -> Store:
    """Another connection to the same store: a thread may be blocked in a wait on the first one.

    Args:
        patience: seconds for which whoever holds the store may be stopped meanwhile; None: the timeout of the store.

    Raises:
        TookTooLong: a TCPStore has accepted no further connection.
        Closed: it has closed the one that there is.
    """
    if not can_wait(store):
        try:
            own: Store = store.clone()
        except (AttributeError, NotImplementedError, RuntimeError):  # not every store has that
            return cast(Store, store)
        return own
    # A TCPStore holds a lock for the length of each call: while the bell waits for its key, no other thread could use
    # the same connection. So there is no going on without another one. To connect has nothing to do with how long a
    # collective may take: with a slow name server it takes five seconds and more, as torch looks up a name for the
    # address (`formatSockAddr` in torch/csrc/distributed/c10d/socket.cpp).
    timeout = store.timeout
    store.set_timeout(max(timeout, _CONNECTING))
    try:
        own = _cloned(store, timeout.total_seconds() if patience is None else patience)
    except (DistNetworkError, TimeoutError) as error:
        raise TookTooLong(
            f"no further connection to the store of the process group: {str(error) or 'timed out'}"
        ) from error
    finally:
        store.set_timeout(timeout)
    own.set_timeout(timeout)
    return own


def _cloned(store: Any, patience: float) -> Store:
    """A clone of a TCPStore; errors and `patience` as of `connection_of_its_own`."""
    result: Future[Store] = Future()

    def clone() -> None:
        try:
            own = store.clone()
        except BaseException as error:
            _settle(result, error)
        else:
            with suppress(InvalidStateError):
                result.set_result(own)

    def look() -> None:
        # Where nobody listens, torch tries to connect until its timeout, as whoever will listen may start later. Here
        # the store was there before, and is gone if it has closed its connections.
        while not wait([result], _LOOK_SECONDS).done:
            try:
                store.check([_NO_KEY])
            except RuntimeError:
                _settle(result, Closed("the store of the process group has closed its connections"))

    for work in (clone, look):
        threading.Thread(target=work, name="zeroshard connects", daemon=True).start()
    begin, limit = time.monotonic(), store.timeout.total_seconds()
    while not wait([result], _LOOK_SECONDS).done:
        waited = time.monotonic() - begin
        holder = holder_of(store) if waited > patience else None
        if waited > limit or (holder is not None and holder.state == "stopped"):
            _settle(result, TimeoutError("timed out"))
    return result.result()


def _settle(result: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):
        result.set_exception(error)


def can_wait(store: Any) -> bool:
    """Whether the store has a blocking wait that ends as soon as the key is set."""
    return isinstance(without_prefixes(store), TCPStore)


class Pauses:
    """The pauses between looks at the store, each until this rank's bell has rung since the last one. Without a bell
    that blocks they are short, and grow."""

    def __init__(self, bell: Bell | None, longest: float) -> None:
        """`longest`: seconds of a pause without a bell."""
        self._bell = bell if bell is not None and bell.blocks else None
        self._heard = 0 if self._bell is None else self._bell.count  # before the first look: no ring is missed
        self._next, self._longest = 0.0005, longest

    def wait(self, seconds: float) -> None:
        """One pause, of at most `seconds`."""
        if self._bell is None:
            time.sleep(min(self._next, max(0.0, seconds)))
            self._next = min(2 * self._next, self._longest)
        else:
            self._bell.wait(self._heard, max(0.0, seconds))
            self._heard = self._bell.count


class Bell:
    """Attributes:
    blocks: whether the thread blocks in the store until the key is set; else it polls.
    gone: the store has closed the connection.
    count: how often the key has been set and handled.
    """

    def __init__(self, store: Store, prefix: str, key: str, heard: Callable[[Store], None], pause: float) -> None:
        """
        Args:
            store: a connection that only this thread uses.
            heard: called by the thread each time the key was found (and removed).
            pause: seconds between two polls, for stores without a blocking wait.
        """
        self.gone, self.blocks = False, can_wait(store)
        self.count, self._changed = 0, threading.Condition()
        self._store, self._key, self._heard, self._pause = Attended(PrefixStore(prefix, store)), key, heard, pause
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeroshard bell", daemon=True)
        self._thread.start()

    def wait(self, count: int, seconds: float) -> None:
        """Wait until the bell has rung more than `count` times, for at most `seconds`. Any thread may call it."""
        with self._changed:
            self._changed.wait_for(lambda: self.count > count, seconds)

    def close(self) -> None:
        """The next ring ends the thread. If the bell blocks, the caller must then set the key, and `join`."""
        self._closed.set()

    def join(self, patience: float) -> None:
        # A thread that comes back from the store while the interpreter ends would end the process (SIGABRT).
        self._thread.join(patience)

    def _run(self) -> None:
        ON_WATCH.here = True
        try:
            while not self._closed.is_set():
                if self._comes():
                    # Delete the key before `_heard` reads the store: a notice written after that read sets the key
                    # again. Deleted afterwards, such a notice would be lost.
                    self._store.delete_key(self._key)
                    if not self._closed.is_set():
                        self._heard(cast(Store, self._store))
                        self._tell()
            self._store.let_go()
        except Exception as error:
            if error is not self._store.error:  # a fault of ours, which says nothing about the store
                raise
            self.gone = True
            self._tell()

    def _tell(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def _comes(self) -> bool:
        if self.blocks:
            try:
                self._store.wait([self._key], _WITHOUT_END)
            except DistStoreError:  # nobody has rung for so long
                return False
            return True
        self._closed.wait(self._pause)
        return not self._closed.is_set() and self._store.check([self._key])
