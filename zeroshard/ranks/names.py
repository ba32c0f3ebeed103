"""A name that the ranks of a group agree on, over a store that holds what earlier ranks have written.

    rank R    writes its ask: the last name that it had, and a nonce ── waits for the answer to this nonce
    rank 0    makes a name ── answers each new ask with it, until all ranks say that they have it

torch's launcher keeps its store when it starts ranks again, and rank 0 may keep it when the ranks leave a group and
make another one. Under keys that are the same each time, ranks would find addresses of processes that have ended
(pytorch/pytorch#135712), or a failure of long ago. They put the name in front of their keys. Nobody but the rank 0 of
now knows a nonce of now, so no answer can be an old one.
"""

from __future__ import annotations

import json
import threading
import uuid
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

NAMES = "zeroshard/names"
"""In front of the keys of this file."""
_SHORTEST, _LONGEST = 0.002, 0.1
"""Seconds between two looks of rank 0."""


def new_name() -> str:
    return uuid.uuid4().hex


def ask_for_name(store: Store, rank: int, last: str) -> str:
    """The name, on a rank other than 0. `last`: the one of its last group; "" if there was none.

    Raises:
        torch.distributed.DistStoreError: rank 0 has not answered within the timeout of the store.
    """
    store, nonce = PrefixStore(NAMES, store), new_name()
    store.set(f"ask-{rank}", json.dumps([last, nonce]))
    name = store.get(f"answer-{nonce}").decode()
    store.set(f"ask-{rank}", json.dumps([name, ""]))
    store.delete_key(f"answer-{nonce}")
    return name


class Answers:
    """A thread of rank 0 that answers until all other ranks have the name, or until `close`."""

    def __init__(self, store: Store, world_size: int, name: str) -> None:
        """`store`: a connection that nobody else uses."""
        self._over = threading.Event()
        work = (PrefixStore(NAMES, store), [f"ask-{rank}" for rank in range(1, world_size)], name)
        self._thread = threading.Thread(target=self._run, args=work, name="zeroshard names", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all other ranks have the name. False: after so many seconds they have not."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self, patience: float = 2.0) -> None:
        """`patience`: seconds to wait for the store, if it is in a call."""
        self._over.set()
        self._thread.join(patience)

    def _run(self, store: Any, asks: list[str], name: str) -> None:
        have_all_asked, answered, pause = False, set[str](), _SHORTEST
        with suppress(RuntimeError):  # the store is gone, which whoever waits for it sees as well
            while not self._over.wait(pause):
                pause = min(2 * pause, _LONGEST)
                have_all_asked = have_all_asked or store.check(asks)
                found = [json.loads(ask) for ask in store.multi_get(asks)] if have_all_asked else []
                # Who has this name already is in the group, and may ask for its next one.
                missing = [nonce for last, nonce in found if last != name]
                if have_all_asked and not missing:
                    return
                if new := [nonce for nonce in missing if nonce not in answered]:
                    store.multi_set([f"answer-{nonce}" for nonce in new], [name] * len(new))
                    answered.update(new)
                    pause = _SHORTEST
