"""Waiting for a rank that works alone for long: through the watch, and not in a collective, which would give up.

rank 0   verifies a checkpoint, ten minutes ...   wait_for_all
rank 1   wait_for_all ........................... goes on: rank 0 was heard of all the time
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from zeroshard.comm import watch
from zeroshard.comm.positions import HERE, Wait, in_short


def wait_for_all(ranks: Sequence[int] | None = None, name: str = "") -> None:
    """Returns when every rank has called it, however long that takes, as long as those that are missing are heard of.
    Collective. Put it after what one rank does alone for longer than the timeout of a collective. Without a watch
    (`init` starts it) it returns at once, and the next collective waits.

    Args:
        ranks: global ranks; None: all.
        name: which handle of these ranks this is for.

    Raises:
        LostPeer: a rank has failed, or has not been heard of for the timeout.
    """
    current = watch.current()
    if current is None:
        return
    everyone = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
    key = f"all {name} {in_short(everyone)}"
    number = HERE.begin(key)
    with HERE.waiting(Wait(key, number, everyone, "a wait for all ranks")):
        current.wait_for_all(key, number + 1, everyone)
