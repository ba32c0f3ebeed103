"""The group that a watch is for: its store, the keys of the watch there, and whether the program has left it.

torch's launcher keeps its store when it starts ranks again. `zeroshard.init` gives each group that it makes keys of its
own. A group that the program has made (Lightning, Accelerate, the Trainer) has none, and its watch would read of the
failure for which the ranks have been started again. There, all keys of the watch begin with a name (`names.py`).
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from zeroshard.errors import TookTooLong
from zeroshard.failures.bell import connection_of_its_own
from zeroshard.failures.found import launcher_holds_store
from zeroshard.failures.lost import handles_error
from zeroshard.failures.positions import HERE
from zeroshard.failures.whereabouts import saves_in_background
from zeroshard.ranks.groups import let_go_of_left
from zeroshard.ranks.names import Answers, ask_for_name, new_name

_last_name = ""
"""Of the last watch of this process that had one."""


class Membership:
    """Attributes:
    store: of the group; None once the watch is over.
    prefix: of all keys of the watch.
    ending: held while the watch is closed.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store, timeout: float, *, is_new: bool) -> None:
        """Where torch's launcher holds the store of a group that the program has made, the other ranks wait here for
        rank 0.

        Args:
            timeout: seconds for which whoever holds the store may be stopped.
            is_new: whether the store has keys of this group only.

        Raises:
            TimeoutError: rank 0 has not come within the timeout of the store, or the store takes no connection.
        """
        self.store: Store | None = store
        self.rank, self.world_size, self.ending = group.rank(), group.size(), threading.Lock()
        self._group = weakref.ref(group)
        self._answers: Answers | None = None
        has_own_keys = is_new or not launcher_holds_store()
        self.prefix = "zeroshard/watch" if has_own_keys else self._named(store, timeout)

    def _named(self, store: Any, timeout: float) -> str:
        """A prefix that no earlier watch has had."""
        global _last_name
        prefix = "zeroshard/watch-{}".format
        if self.rank == 0:
            _last_name = new_name()
            self._answers = Answers(connection_of_its_own(store, timeout), self.world_size, _last_name)
            return prefix(_last_name)
        try:
            _last_name = ask_for_name(store, self.rank, _last_name)
        except dist.DistStoreError:
            raise TookTooLong(
                f"init: rank 0 has not called it within {store.timeout.total_seconds():g} s: call zeroshard.init() on "
                "every rank"
            ) from None
        return prefix(_last_name)

    def is_left(self) -> bool:
        """Whether the program has destroyed the group, and nothing is to be told to the other ranks any more: it may do
        that while it handles an error, which it then raises, and while a save is being written."""
        group = self._group()
        if group is not None and dist.group.WORLD is group:
            return False
        threads = threading.main_thread().ident, HERE.thread
        return not saves_in_background() and not any(map(handles_error, threads))

    def answer_no_more(self) -> None:
        """All other ranks have the name, or none of them will get it."""
        if self._answers is not None:
            self._answers.close()

    def end(self) -> None:
        """Hold nothing of the group: its store ends with the last holder, and its port is free."""
        self.store = None
        let_go_of_left()
