"""Communication under way: when its result may be used, and when what this rank gave may be written to again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.messages import Announcement, Messages
from zeroshard.comm.positions import Wait


class Owner(Protocol):
    """Whose communication it is: its messages are compared, its log counts the seconds."""

    messages: Messages
    log: CommLog


class Pending:
    """`wait()` returns when the result may be used (on CUDA: by the current stream).

    Attributes:
        at: which collective this is, for the watch.
    """

    def __init__(
        self,
        owner: Owner | None = None,
        works: Sequence[Any] = (),
        finish: Callable[[], Sequence[Any] | None] | None = None,
        announced: Announcement | None = None,
    ) -> None:
        """`announced`: compared before the works are waited for; `finish`: runs after, and may return further works,
        for `release`. Without an owner it is finished: nothing had to move."""
        self._owner, self._works, self._finish, self._announced = owner, works, finish, announced
        self._acknowledgements: Sequence[Any] = ()
        self._look: Callable[[], None] | None = None
        self.at: Wait | None = None

    def wait(self, *, stale: bool = False) -> None:
        """`stale`: the result will not be used. A peer may have begun to replace it, so nobody looks at it."""
        look, self._look = self._look, None
        self._arrive()
        if look is not None and not stale:
            look()

    def _arrive(self) -> None:
        # Taken before anything can raise: `__del__` must not wait a second time for what has failed.
        works, self._works = self._works, ()
        announced, self._announced = self._announced, None
        finish, self._finish = self._finish, None
        if self._owner is None or not (works or finish or announced):
            return
        start = time.perf_counter()
        with self._owner.messages.failing(self.at):
            # Messages first: they say whether the peers are in this very collective. If they are not, what has been
            # posted for the data belongs to another one, and to wait for it would be to wait without end.
            if announced is not None:
                self._owner.messages.compare(announced)
            for work in works:
                work.wait()
            if finish is not None:
                self._acknowledgements = finish() or ()
        self._owner.log.wait_seconds += time.perf_counter() - start

    def then(self, look: Callable[[], None], at: Wait) -> Pending:
        """This one, at that place; `look` is called as soon as the result may be used."""
        self._look, self.at = look, at
        return self

    def at_place(self, at: Wait) -> Pending:
        self.at = at
        return self

    def release(self) -> None:
        """Waits until the peers have read what this rank gave, too: only then may it be written to."""
        self.wait()
        works, self._acknowledgements = self._acknowledgements, ()
        if self._owner is None or not works:
            return
        with self._owner.messages.failing(self.at):
            for work in works:
                work.wait()

    def __del__(self) -> None:
        # gloo: a message whose receive is gone has nowhere to go, and blocks its connection for everything after it,
        # whatever the tag ("Timed out waiting ... for send operation to complete"). So a result that nobody wants is
        # waited for all the same; but once something has failed, nobody may wait for what will never come.
        if self._owner is not None and not self._owner.messages.failed:
            with suppress(RuntimeError):
                if self._announced is not None:
                    self._announced.arrive()
                for work in [*self._works, *self._acknowledgements]:
                    work.wait()
