"""Waits for a rank that works alone for long: through the watch, because a collective would time out.

rank 0   verifies a checkpoint, ten minutes ...   wait_for_all
rank 1   wait_for_all ........................... goes on: rank 0 has sent heartbeats all the time
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from zeroshard.comm import watch
from zeroshard.comm.positions import HERE, Wait, in_short


def wait_for_all(ranks: Sequence[int] | None = None, name: str = "") -> None:
    """Return when every rank has called this. There is no time limit as long as the missing ranks send heartbeats.
    Collective. Call it after work that one rank does alone for longer than the timeout of a collective. Without a watch
    (`init` starts it) it returns at once, and the next collective waits.

    Args:
        ranks: global ranks; None: all.
        name: tells the waits of several handles of the same ranks apart.

    Raises:
        LostPeer: a rank has failed, or has sent no heartbeat for the timeout of a collective.
    """
    current = watch.current()
    if current is None:
        return
    everyone = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
    key = f"all {name} {in_short(everyone)}"
    number = HERE.begin(key)
    with HERE.waiting(Wait(key, number, everyone, "a wait for all ranks")):
        current.wait_for_all(key, number + 1, everyone)
