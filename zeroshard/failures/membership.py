"""The group that a watch is for: its store, the keys of the watch there, and whether the program has left it.

torch's launcher keeps its store when it starts ranks again. `zeroshard.init` gives each group that it makes keys of its
own. A group that the program has made (Lightning, Accelerate, the Trainer) has none, and its watch would read of the
failure for which the ranks have been started again. So its keys begin with the number of the attempt. (Not with a name
on which the ranks agree: only some of them may have a watch. With several launchers they have no common number; there
torch's own group fails, too, unless each attempt has a store of its own: docs/clusters.md, "When a machine fails".)
"""

from __future__ import annotations

import itertools
import threading
import weakref

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from zeroshard.failures.found import attempt
from zeroshard.failures.lost import handles_error
from zeroshard.failures.positions import HERE
from zeroshard.failures.whereabouts import saves_in_background
from zeroshard.ranks.groups import let_go_of_left

_numbers = itertools.count()
"""Of the watches of this process over groups that the program has made."""


class Membership:
    """Attributes:
    store: of the group; None once the watch is over.
    rank, world_size: in the group.
    prefix: of all keys of the watch.
    ending: held while the watch is closed.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store, *, is_new: bool) -> None:
        """`is_new`: whether the store has keys of this group only."""
        self.store: Store | None = store
        self.rank, self.world_size, self.ending = group.rank(), group.size(), threading.Lock()
        self._group = weakref.ref(group)
        self.prefix = "zeroshard/watch" if is_new else f"zeroshard/watch-{attempt(self.world_size)}-{next(_numbers)}"

    @property
    def is_over(self) -> bool:
        """Whether the watch has been closed, or has ended by itself."""
        return self.store is None

    @property
    def is_in_group(self) -> bool:
        """Whether the program has not destroyed the group."""
        group = self._group()
        return group is not None and dist.group.WORLD is group

    def is_left(self) -> bool:
        """Whether the program has destroyed the group, and nothing is to be told to the other ranks any more: it may do
        that while it handles an error, which it then raises, and while a save is being written."""
        if self.is_in_group:
            return False
        threads = threading.main_thread().ident, HERE.thread
        return not saves_in_background() and not any(map(handles_error, threads))

    def end(self) -> None:
        """Hold nothing of the group: its store ends with the last holder, and its port is free."""
        self.store = None
        let_go_of_left()
