"""The ranks a model is sharded over and replicated over, on top of torch's process groups.

one axis (the usual case)          two axes (HSDP): shard inside a node, replicate between nodes

    shard ->                               shard ->
    0  1  2  3                     repl.   0  1
                                     |     2  3
                                     v
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.errors import InvalidState, InvalidType, InvalidValue
from zeroshard.io.logger import LOGGER
from zeroshard.ranks.backends import backends_of, device_for, expect_usable, has_tagged_messages, take_timeout
from zeroshard.ranks.groups import OwnGroup, default_group, default_like, downward, give_back, take

REPLICATE = ("replicate", "dp_replicate")
SHARD = ("shard", "dp_shard", "dp_shard_cp", "fsdp")
"""Accepted names of the two axes: our own, and those that PyTorch's documentation and torchtitan use."""


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh: a process group, this process's rank in it, and the global rank of each member.

    Attributes:
        downward: the group for messages to lower ranks; None: `group` carries these, too (`Mesh.with_two_ways`).
        own: keeps `group` alive, if it was made for this axis.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: tuple[int, ...]
    downward: dist.ProcessGroup | None = None
    own: OwnGroup | None = None

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def here(self) -> int:
        """The global rank of this process."""
        return self.ranks[self.rank]

    @property
    def first(self) -> int:
        """The global rank of the first member, which does what one of them does for all."""
        return self.ranks[0]

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, as ranks of this axis."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    @cached_property
    def rounds(self) -> tuple[tuple[int, int], ...]:
        """(rank to receive from, rank to send to) of each round of an exchange between all ranks. In round n every rank
        sends to the rank n places ahead, so no rank receives from two ranks at once."""
        steps = range(1, self.size)
        return tuple(((self.rank - step) % self.size, (self.rank + step) % self.size) for step in steps)

    def way(self, source: int, target: int) -> dist.ProcessGroup:
        """The group for messages from one rank of the axis to another."""
        return self.group if source < target or self.downward is None else self.downward

    @classmethod
    def of(cls, found: dist.ProcessGroup | OwnGroup) -> Axis:
        own, group = (found, found.group) if isinstance(found, OwnGroup) else (None, found)
        return cls(group, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)), own=own)


@dataclass(frozen=True)
class Mesh:
    """`shard` x `replicate`, and `world`: all ranks of both.

    `reduce` has the ranks of `shard`. On NCCL it is a separate communicator: gathers and reductions go on beside each
    other. All ranks issue both in one order. `device`: of the tensors that the groups communicate.
    """

    shard: Axis
    replicate: Axis
    world: Axis
    reduce: Axis
    device: torch.device

    @property
    def is_pairwise(self) -> bool:
        """Whether ranks can exchange slices by point-to-point messages (gloo); else the backend's collectives are
        used."""
        return has_tagged_messages(self.world.group, self.device)

    @property
    def has_replicas(self) -> bool:
        """Whether it was given with two axes, even if the axis of replicas has a single rank."""
        return self.world is not self.shard

    @cached_property
    def stands_for(self) -> int:
        """The factor for sums over the ranks: the world size on a fake backend, which sends nothing (every rank counts
        as a copy of this one), else 1."""
        return self.world.size if backends_of(self.world.group).get(self.device.type) == "fake" else 1

    @cached_property  # read in every step
    def one_of_each_shard(self) -> list[int]:
        """Indices into the rows of all ranks: those of the own shard axis, so that each shard counts once."""
        position = {rank: index for index, rank in enumerate(self.world.ranks)}
        return [position[rank] for rank in self.shard.ranks]

    @classmethod
    def of(cls, mesh: DeviceMesh | dist.ProcessGroup | None, device: torch.device | None = None) -> Mesh:
        """From a process group (None: the default one) or a `DeviceMesh` with one axis, or with two axes named
        "replicate" and "shard", or "dp_replicate" and "dp_shard" (unnamed: in this order, as for FSDP's hybrid
        sharding). Collective if a group has several backends, or a backend for other devices than the CPU.

        Args:
            device: of the model; None if the model is on no device yet.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            TypeError: neither a group nor a mesh.
            ValueError: a mesh of more than two axes, or with other names; ranks whose devices do not fit together.
        """
        shard, replicate = _axes_of(mesh)
        device, world = device_for(shard.group, device), shard
        for axis in (shard, replicate):
            take_timeout(axis.group, default_group())
        if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
            ranks = tuple(sorted(mesh.mesh.flatten().tolist()))  # the order of the default group
            world = Axis.of(default_like(ranks, shard.group) or take(ranks, shard.group, device))
        expect_usable(world.group, device)
        # [Note: two communicators]
        # NCCL runs the operations of one communicator in the order of issue (NVIDIA/nccl#574). On one communicator,
        # gathers and reductions together would need the same order on all ranks. Two communicators have another hazard:
        # a kernel of one may occupy the GPU while it waits for a peer that waits in the other (NVIDIA/nccl#195). This
        # has not been tried on GPUs.
        own_reduce_group = shard.size > 1 and not has_tagged_messages(shard.group, device)
        if own_reduce_group and device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            _warn_of_one_connection()
        reduce = shard
        if own_reduce_group:
            reduce = Axis.of(take(shard.ranks, shard.group, device))
        return cls(shard, replicate, world, reduce, device)

    def is_of(self, mesh: DeviceMesh | dist.ProcessGroup | None) -> bool:
        """Whether `of` gives these ranks for it; raises as `of` does. Not collective."""
        return [axis.ranks for axis in _axes_of(mesh)] == [self.shard.ranks, self.replicate.ranks]

    def with_two_ways(self) -> Mesh:
        """This mesh with a second group for each axis, which carries the messages to lower ranks. Collective.

        So each connection moves data one way. gloo locks a connection for as long as a send copies into it. If data
        came in on the same connection, the thread that receives would try the lock again and again meanwhile.
        """

        def both_ways(axis: Axis) -> Axis:
            if axis.size == 1:
                return axis
            return replace(axis, downward=downward(axis.ranks, axis.group, self.device))

        shard, replicate = both_ways(self.shard), both_ways(self.replicate)
        world = shard if self.world is self.shard else self.world  # of its own: only control messages
        return replace(self, shard=shard, replicate=replicate, world=world, reduce=shard)

    def expect_grid(self, exchange_objects: Callable[[Any], list[Any]]) -> None:
        """Check that shard groups and replicate groups fit together. Collective.

        Args:
            exchange_objects: returns the value of every rank.

        Raises:
            ValueError: the groups list their ranks in different orders.
        """
        if self.replicate.size > 1:
            problem = problem_of(dict(exchange_objects(self.place())))
            if problem:
                raise InvalidValue(f"mesh: {problem}")

    def release(self) -> None:
        """Give the groups that were made for this mesh to the next one. All ranks call it at the same point of the
        program, with nothing in flight."""
        give_back([axis.own for axis in (self.world, self.reduce) if axis.own], self.shard.group)

    def place(self) -> tuple[int, Place]:
        """The global rank of this process, and its `Place`."""
        return self.shard.here, (list(self.shard.ranks), list(self.replicate.ranks))


Place = tuple[list[int], list[int]]
"""The global ranks of a rank's shard axis and of its replicate axis, each in the group's order."""


def problem_of(places: Mapping[int, Place]) -> str:
    """What is wrong with a mesh in which the ranks have these places, in words; "" if nothing is. The members of a
    replicate group must hold the same shard, and the members of a shard group must belong to the same replica."""
    for rank, place in places.items():
        for axis, (members, are, have) in enumerate(_MEMBERS):
            for other in set(place[1 - axis]) & set(places):
                mine, theirs = place[axis], places[other][axis]
                if theirs.index(other) != mine.index(rank):
                    return (
                        f"ranks {rank} and {other} {are}, but rank {rank} {have} {mine.index(rank)} of {mine} and rank "
                        f"{other} {have.split()[-1]} {theirs.index(other)} of {theirs}: order the {members} groups "
                        "alike (new_group without sort_ranks=False, or init_device_mesh)"
                    )
    return ""


_MEMBERS = (
    ("shard", "are replicas of each other", "holds shard"),
    ("replicate", "hold shards of one replica", "is number"),
)


def _axes_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> tuple[Axis, Axis]:
    """The shard axis and the replicate axis; errors as of `Mesh.of`."""
    given: object = mesh
    if given is dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` returns on ranks that are not in the group
        raise InvalidType("mesh= is a group that this rank is not in: call shard() on the ranks of the group only")
    if not isinstance(mesh, (DeviceMesh, dist.ProcessGroup, NoneType)):
        raise InvalidType(
            f"mesh must be a process group or a DeviceMesh, found {mesh!r}: for 2 x 4 ranks write mesh="
            "torch.distributed.device_mesh.init_device_mesh(device_type, (2, 4), "
            'mesh_dim_names=("replicate", "shard"))'
        )
    if not dist.is_initialized():
        raise InvalidState("torch.distributed is not initialised: call zeroshard.init() first, on every rank")
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 2:
        raise InvalidValue(
            f"expected a mesh of one axis (shard) or two (replicate, shard), found {mesh.ndim}: pass the part of "
            'it that the model is sharded over, mesh["dp_replicate", "dp_shard"] for example'
        )
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        replicate, shard = _dims(mesh.mesh_dim_names)
        return Axis.of(mesh.get_group(shard)), Axis.of(mesh.get_group(replicate))
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh or default_group()
    return Axis.of(group), Axis(group, 0, (dist.get_rank(),))


def _dims(names: Sequence[str] | None) -> tuple[int, int]:
    """(index of the replicate axis, index of the shard axis) of a 2-D mesh."""
    names = names or ("replicate", "shard")
    for replicate, shard in ((0, 1), (1, 0)):
        if names[replicate] in REPLICATE and names[shard] in SHARD:
            return replicate, shard
    raise InvalidValue(
        "a 2-D mesh needs the axes 'replicate' and 'shard' (or 'dp_replicate' and 'dp_shard'), found "
        f"{tuple(names)}: use these names, or pass the part of the mesh that the model is sharded over"
    )


@cache  # once in a process
def _warn_of_one_connection() -> None:
    LOGGER.warning(
        "CUDA_DEVICE_MAX_CONNECTIONS is 1: the GPU starts kernels in the order in which the host queues them, whatever "
        "their stream, so gathers and reductions of two ranks can wait for each other for ever. Unset it before the "
        "program starts (Megatron sets it for its own order of kernels)"
    )
