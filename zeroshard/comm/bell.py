"""A thread that waits for a key of a store, so that nobody has to ask again and again whether it is there.

A `TCPStore` keeps the question until the key comes: that takes no call and no time meanwhile. (Its daemon answers a
question as soon as there is an answer; the connection is this thread's own.) Other stores are asked now and then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_WITHOUT_END = timedelta(days=20)
"""A question that is given up is a warning on stderr; milliseconds are counted in 32 bits."""


def connection_of_its_own(store: Any) -> Store:
    """To the same store: another thread may be waiting on the other one."""
    try:
        # A TCPStore holds a lock for the length of each call: while one thread waits for a key, no other one could
        # write a heartbeat through the same connection.
        own: Store = store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):  # not every store has that
        return cast(Store, store)
    return own


def can_wait(store: Any) -> bool:
    """Whether a wait for a key costs nothing, and ends when the key comes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return isinstance(store, TCPStore)


class Bell:
    """Attributes:
    blocks: whether a wait costs nothing, and ends when the key comes.
    gone: the store has closed the connection.
    count: how often it has been rung.
    """

    def __init__(self, store: Store, prefix: str, key: str, heard: Callable[[Store], None], pause: float) -> None:
        """
        Args:
            store: a connection of its own.
            heard: called each time the key is there, which is removed then.
            pause: seconds, where the store has to be asked.
        """
        self.gone, self.blocks = False, can_wait(store)
        self.count, self._changed = 0, threading.Condition()
        self._store, self._key, self._heard, self._pause = PrefixStore(prefix, store), key, heard, pause
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeroshard bell", daemon=True)
        self._thread.start()

    def wait(self, count: int, seconds: float) -> None:
        """Until it has been rung more often than `count` times, for so long. Any thread."""
        with self._changed:
            self._changed.wait_for(lambda: self.count > count, seconds)

    def close(self) -> None:
        """The next time is the last: where it blocks, whoever calls this sets the key then, and joins the thread."""
        self._closed.set()

    def join(self, patience: float) -> None:
        # A thread that comes back from the store while the interpreter ends would end the process (SIGABRT).
        self._thread.join(patience)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                if self._comes():
                    self._store.delete_key(self._key)  # before anything is looked at: what comes later rings again
                    if not self._closed.is_set():
                        self._heard(self._store)
                        self._tell()
        except RuntimeError:
            self.gone = True
            self._tell()

    def _tell(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def _comes(self) -> bool:
        if self.blocks:
            self._store.wait([self._key], _WITHOUT_END)
            return True
        self._closed.wait(self._pause)
        return not self._closed.is_set() and self._store.check([self._key])
