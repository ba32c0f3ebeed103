"""Process groups beside those of the user: made for a mesh, like a group that it has, and given to the next one."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zeroshard.errors import InvalidState
from zeroshard.ranks.backends import timeout_of


class OwnGroup:
    """A process group that zeroshard has made. Whoever uses it holds this object. Behind the last holder (a model that
    is dropped, or abandoned, without `close`; a group of the user's that is destroyed) the next `take` ends the group
    on this rank: its connections, or its communicator. Peers may do so later, as a garbage collector runs when it
    likes; so such a group is not used again."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        weakref.finalize(self, _UNUSED.append, group).atexit = False


_SPARE: weakref.WeakKeyDictionary[Any, list[OwnGroup]] = weakref.WeakKeyDictionary()
"""The group of a shard axis -> groups that were made for meshes with that axis, and that no mesh uses now."""
_DOWNWARD: weakref.WeakKeyDictionary[Any, OwnGroup] = weakref.WeakKeyDictionary()
"""The group of an axis -> the group for its messages to lower ranks, of all models on that axis."""
_UNUSED: list[dist.ProcessGroup] = []
"""Groups that are to be ended: nobody holds their `OwnGroup` any longer."""
_NUMBERS: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""The default group -> how many groups of some ranks this process has made."""


def default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "initialised"
    return group


def expect_there(group: dist.ProcessGroup, what: str) -> None:
    """Raises:
    RuntimeError: the program has destroyed the group. `what`: the call that needs its store."""
    if group not in distributed_c10d._world.pg_map:
        raise InvalidState(
            f"{what}: the process group of this handle has been destroyed: call it before destroy_process_group(), or "
            "load the newest step into a model that is sharded in the new group"
        )


def default_like(ranks: tuple[int, ...], like: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The default group if it has exactly these ranks and the same backends as `like`."""
    default = default_group()
    same_backends = dist.get_backend_config(default) == dist.get_backend_config(like)
    return default if sorted(ranks) == list(range(dist.get_world_size())) and same_backends else None


def take(ranks: tuple[int, ...], like: dist.ProcessGroup, device: torch.device) -> OwnGroup:
    """A group with these ranks, in this order, that is like `like`, the group of the shard axis. A group of a closed
    model is used again: its communicator exists already. Not one of a living model: two models may interleave their
    reductions differently on each rank."""
    end_unused()
    spare = _SPARE.get(like, [])
    found = next((own for own in spare if tuple(dist.get_process_group_ranks(own.group)) == ranks), None)
    if found is None:
        return OwnGroup(new_group(ranks, like, device))
    spare.remove(found)
    return found


def give_back(made: Iterable[OwnGroup], like: dist.ProcessGroup) -> None:
    """Let the next `take` with this `like` have groups that no mesh uses any longer."""
    spare = _SPARE.setdefault(like, [])
    spare += [own for own in made if own not in spare]


def downward(ranks: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The second group of an axis: see `Mesh.with_two_ways`."""
    if group not in _DOWNWARD:
        _DOWNWARD[group] = OwnGroup(new_group(ranks, group, device))
    return _DOWNWARD[group].group


def end_unused() -> None:
    """End the groups that nobody holds any longer."""
    # NCCL's way to destroy a communicator may wait for the peers on this host, which end theirs at another moment, or
    # never. To abort it is a matter of this process alone. Nothing that anybody waits for is in flight.
    end = getattr(distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    while _UNUSED:
        group = _UNUSED.pop()
        if group in distributed_c10d._world.pg_map:  # else the program has left that world
            end(group)


def let_go_of_left() -> None:
    """Hold no unused group of a world that the program has left: with the last group its store ends."""
    _UNUSED[:] = [group for group in _UNUSED if group in distributed_c10d._world.pg_map]


def new_group(ranks: tuple[int, ...], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A new group with the backends and the timeout of `like`, in the order of `ranks`."""
    order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}  # torch 2.11 may lack it
    with _without_a_split(ranks), _named_alike(ranks):
        group = dist.new_group(
            list(ranks),
            backend=dist.get_backend_config(like),
            timeout=timeout_of(like, device),
            # Only the members call this function. Without this flag `new_group` would wait for every rank of the world.
            use_local_synchronization=True,
            **order,
        )
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group


@contextmanager
def _named_alike(ranks: tuple[int, ...]) -> Iterator[None]:
    """Inside, a new group of these ranks has the same name on all of them."""
    # A name with which torch's members find each other in the store contains how many groups their process has. That
    # differs if the program has made groups of only some ranks, and they would wait for each other until the timeout.
    numbers = _NUMBERS.setdefault(default_group(), Counter())
    numbers[ranks] += 1
    name = f"zeroshard-{hashlib.sha1(repr((ranks, numbers[ranks])).encode(), usedforsecurity=False).hexdigest()}"
    own = getattr(distributed_c10d, "_hash_ranks_to_str", None)
    if own is None:  # another torch than those that are known
        yield
        return
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = own


@contextmanager
def _without_a_split(ranks: tuple[int, ...]) -> Iterator[None]:
    """Inside, a group of only some ranks of the world gets a communicator from scratch."""
    # If the default group is bound to a device, torch makes the communicators of all other groups by `ncclCommSplit`.
    # All ranks of the world have to call that, and those that are not members do not: the members would hang.
    default = default_group()
    bound = default.bound_device_id
    if bound is None or len(ranks) == dist.get_world_size():
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
