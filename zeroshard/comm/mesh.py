"""The ranks a model is sharded over and replicated over, on top of torch's process groups.

one axis (the usual case)          two axes (HSDP): shard inside a node, replicate between nodes

    shard ->                               shard ->
    0  1  2  3                     repl.   0  1
                                     |     2  3
                                     v
"""

from __future__ import annotations

import hashlib
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, cached_property
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm import watch
from zeroshard.comm.backends import (
    DEFAULT_TIMEOUT,
    accelerator,
    backends_of,
    device_for,
    expect_usable,
    has_tagged_messages,
    shared_device,
    take_device,
    take_timeout,
    timeout_of,
)
from zeroshard.comm.found import is_refused, stopped_of_this_job, wake
from zeroshard.errors import InvalidState, InvalidType, InvalidValue, TookTooLong
from zeroshard.io.logger import LOGGER, tell

REPLICATE = ("replicate", "dp_replicate")
SHARD = ("shard", "dp_shard", "dp_shard_cp", "fsdp")
"""Accepted names of the two axes: our own, and those that PyTorch's documentation and torchtitan use."""


def init(backend: str | None = None, timeout: float | timedelta = DEFAULT_TIMEOUT) -> torch.device:
    """Join the process group of the launcher (`torchrun` sets its environment); without a launcher, a world of one.

        device = zeroshard.init()
        model.to(device)

    Args:
        backend: "gloo" or "nccl"; by default gloo for CPU tensors and, if an accelerator is available, torch's backend
            for its tensors (NCCL for CUDA, XCCL for XPU).
        timeout: seconds (or a timedelta) after which a collective that cannot complete raises on the waiting ranks
            (gloo). With NCCL no call can raise: after nine tenths of it a rank that waits for its device in a step says
            which rank has not come, and all end. Where it waits in a line of the program (`loss.item()`), torch's
            watchdog ends its process after the timeout.

    If `torch.distributed` is initialised already, its group and timeout are kept. In both cases a watch starts: when a
    rank fails, the other ranks exit within seconds instead of waiting for the timeout.

    Returns:
        The device for this rank's model and data: the current one of the accelerator if the group has a backend for it,
        else the CPU. Unless the group existed before, `init` has made device LOCAL_RANK the current one; device 0 if
        the process sees only one. (Without LOCAL_RANK: what srun or mpirun tell, or RANK by the number of devices.)

    Raises:
        ValueError: a timeout that is not positive; a LOCAL_RANK for which there is no device; one GPU for two ranks; or
            as `launched`.
        TimeoutError: not all ranks have come within the timeout.
        RuntimeError: whoever holds the store of the group has ended.
    """
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise InvalidValue(f"timeout must be positive, found {timeout.total_seconds()} s")
    if not dist.is_initialized():
        _join(backend, timeout)
    watch.start()
    device = device_for(_default_group(), None)
    rank, group = dist.get_rank(), dist.get_backend_config(_default_group())
    tell(rank, "%d ranks by %s, each on its %s", dist.get_world_size(), group, device.type)
    return device


def _join(backend: str | None, timeout: timedelta) -> None:
    kind, own = accelerator()
    # Both backends: a model that stays on the CPU of a machine with GPUs can be trained as well.
    backend = backend or (f"cpu:gloo,{kind}:{own}" if kind else "gloo")
    options: dict[str, Any] = {"timeout": timeout}
    if kind and own in backend:
        # Must come before the group is created: NCCL makes its communicator on the current device, which by default is
        # GPU 0 on every rank.
        take_device(kind)
        options |= _for_nccl(timeout) if own == "nccl" else {}
    if (given := launched()) is None:
        warn_of_other_tasks()
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **options)
        return
    rank, world_size = given
    if watch.has_one_launcher(world_size) and is_refused(*_store_place()):
        # It has served the store since before it started this process; torch would try to connect for two timeouts.
        raise watch.LostPeer("the launcher has ended before all ranks had started", None, [])
    try:
        if (store := _store_of_this_attempt(world_size)) is not None:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
        else:
            dist.init_process_group(backend, **options)
    except RuntimeError as error:  # DistNetworkError, DistStoreError, DistBackendError
        if problem := shared_device(error):
            raise InvalidValue(problem) from None
        why = (str(error).splitlines() or [""])[0].rstrip(".")
        if not re.search(r"tim(ed|e) ?out", why, re.IGNORECASE):
            if isinstance(error, dist.DistNetworkError):
                error.add_note("rank 0 or the launcher, whichever holds the store of the process group, has ended")
            raise
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        wake(stopped := stopped_of_this_job())
        had = " and ".join(f"rank {one} ({who})" for one, who in stopped.items())
        raise TookTooLong(
            f"rank {rank} of {world_size} did not meet the others at {place} within the timeout of "
            f"{timeout.total_seconds():g} s: {why}. {f'{had} had been stopped by a signal. ' if had else ''}"
            "All ranks have to start within that time, init(timeout=...)"
        ) from None


def _store_place() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def launched() -> tuple[int, int] | None:
    """(rank, number of ranks) that a launcher has given to this process by its environment; None: there is no launcher.

    Raises:
        ValueError: what it has given is no such pair, or does not tell where rank 0 is.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
    except ValueError:
        rank, world_size = 0, 0
    if not (0 <= rank < world_size and all(given.values())):
        found = ", ".join(f"{name}={value}" for name, value in given.items())
        raise InvalidValue(
            "the environment of a rank: expected a RANK below WORLD_SIZE, and the MASTER_ADDR and MASTER_PORT of rank "
            f"0, found {found}. Start with torchrun, or set all four; without a launcher unset RANK and WORLD_SIZE"
        )
    return rank, world_size


_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where srun, and mpirun or mpiexec of Open MPI and MPICH, tell a process how many of them they have started."""


def warn_of_other_tasks() -> None:
    """Warn where these ranks are a world of their own, and a launcher that does not set RANK has started several."""
    for name in _TASKS:
        if os.environ.get(name, "1") not in ("0", "1"):
            LOGGER.warning(
                "%s is %s, and RANK and WORLD_SIZE are not set: each of these processes trains alone, on all of the "
                "data. Start them with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
                name, os.environ[name],
            )  # fmt: skip
            return


def _for_nccl(timeout: timedelta) -> dict[str, Any]:
    """Options of the default group: bound to the current device, so that its communicator is created at once; and with
    streams of high priority, as it gathers: a forward waits for gathers. (Reductions have a group of their own.)"""
    if not hasattr(dist, "ProcessGroupNCCL"):
        return {}  # torch says what its build lacks
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout  # torch warns if it is another one than `timeout=`
    return {"pg_options": options, "device_id": torch.device("cuda", torch.cuda.current_device())}


def _store_of_this_attempt(world_size: int) -> Store | None:
    """The store for ranks that the elastic launcher has restarted, with a prefix per attempt: the launcher's store
    still holds the addresses of the ended processes (pytorch/pytorch#135712). None for the first attempt, and with
    several launchers: only with one launcher do all ranks have the same attempt number."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or not watch.has_one_launcher(world_size):
        return None
    store = TCPStore(*_store_place(), is_master=False)
    return PrefixStore(f"attempt-{attempt}", store)


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh: a process group, this process's rank in it, and the global rank of each member.

    Attributes:
        downward: the group for messages to lower ranks; None: `group` carries these, too (`Mesh.with_two_ways`).
    """

    group: dist.ProcessGroup
    rank: int
    ranks: tuple[int, ...]
    downward: dist.ProcessGroup | None = None

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

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
    def of(cls, group: dist.ProcessGroup) -> Axis:
        return cls(group, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))


@dataclass(frozen=True)
class Mesh:
    """`shard` x `replicate`, and `world`: all ranks of both.

    `reduce` has the ranks of `shard`. On NCCL it is a separate communicator. Gathers have the same order on all ranks,
    and so do reductions, but the two may interleave differently: a rank on which a parameter is unused reduces that
    unit later. `device`: of the tensors that the groups communicate. `made`: the groups that were made for this mesh.
    """

    shard: Axis
    replicate: Axis
    world: Axis
    reduce: Axis
    device: torch.device
    made: tuple[dist.ProcessGroup, ...] = ()

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
        device, world, made = device_for(shard.group, device), shard, _Made()
        for axis in (shard, replicate) if isinstance(mesh, DeviceMesh) else ():
            take_timeout(axis.group, _default_group())
        if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
            ranks = tuple(sorted(mesh.mesh.flatten().tolist()))  # the order of the default group
            world = Axis.of(_default_like(ranks, shard.group) or made.get(ranks, shard.group, device))
        expect_usable(world.group, device)
        # [Note: two communicators]
        # NCCL runs the operations of one communicator in the order of issue (NVIDIA/nccl#574). On one communicator,
        # gathers and reductions together would need the same order on all ranks. Two communicators have another hazard:
        # a kernel of one may occupy the GPU while it waits for a peer that waits in the other (NVIDIA/nccl#195). This
        # has not been tried on GPUs.
        own_reduce_group = shard.size > 1 and not has_tagged_messages(shard.group, device)
        if own_reduce_group and device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            _warn_of_one_connection()
        reduce = Axis.of(made.get(shard.ranks, shard.group, device)) if own_reduce_group else shard
        return cls(shard, replicate, world, reduce, device, tuple(made.groups))

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
            if axis.group not in _DOWNWARD:
                _DOWNWARD[axis.group] = _new_group(axis.ranks, axis.group, self.device)
            return replace(axis, downward=_DOWNWARD[axis.group])

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
        spare = _SPARE.setdefault(self.shard.group, [])
        spare += [group for group in self.made if group not in spare]

    def place(self) -> tuple[int, Place]:
        """The global rank of this process, and its `Place`."""
        return self.shard.ranks[self.shard.rank], (list(self.shard.ranks), list(self.replicate.ranks))


Place = tuple[list[int], list[int]]
"""The global ranks of a rank's shard axis and of its replicate axis, each in the group's order."""


def problem_of(places: Mapping[int, Place]) -> str:
    """What is wrong with a mesh in which the ranks have these places, in words; "" if nothing is. The members of a
    replicate group must hold the same shard, and the members of a shard group must belong to the same replica."""
    for rank, (shard, replicate) in places.items():
        for other in set(replicate) & set(places):
            theirs = places[other][0]
            if theirs.index(other) != shard.index(rank):
                return (
                    f"ranks {rank} and {other} are replicas of each other, but rank {rank} holds shard "
                    f"{shard.index(rank)} of {shard} and rank {other} shard {theirs.index(other)} of {theirs}: order "
                    "the shard groups alike (new_group without sort_ranks=False, or init_device_mesh)"
                )
        for other in set(shard) & set(places):
            theirs = places[other][1]
            if theirs.index(other) != replicate.index(rank):
                return (
                    f"ranks {rank} and {other} hold shards of one replica, but rank {rank} is number "
                    f"{replicate.index(rank)} of {replicate} and rank {other} number {theirs.index(other)} of {theirs}"
                    ": order the replicate groups alike (new_group without sort_ranks=False, or init_device_mesh)"
                )
    return ""


def _axes_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> tuple[Axis, Axis]:
    """The shard axis and the replicate axis; errors as of `Mesh.of`."""
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
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh or _default_group()
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


_SPARE: weakref.WeakKeyDictionary[Any, list[dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""The group of a shard axis -> groups that were made for meshes with that axis, and that no mesh uses now. They are not
destroyed: torch would give the next group the same name, whose keys in the store are those of the old communicator."""


_DOWNWARD: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""The group of an axis -> the group for its messages to lower ranks, of all models on that axis."""


class _Made:
    """The groups that are made for one mesh. A group of a closed model is used again: its communicator exists already.
    Not one of a living model: two models may interleave their reductions differently on each rank."""

    def __init__(self) -> None:
        self.groups: list[dist.ProcessGroup] = []

    def get(self, ranks: tuple[int, ...], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
        """A group with these ranks, in this order, that is like `like`, the group of the shard axis."""
        spare = _SPARE.get(like, [])
        found = next((group for group in spare if tuple(dist.get_process_group_ranks(group)) == ranks), None)
        if found is None:
            found = _new_group(ranks, like, device)
        else:
            spare.remove(found)
        self.groups.append(found)
        return found


@cache  # once in a process
def _warn_of_one_connection() -> None:
    LOGGER.warning(
        "CUDA_DEVICE_MAX_CONNECTIONS is 1: the GPU starts kernels in the order in which the host queues them, whatever "
        "their stream, so gathers and reductions of two ranks can wait for each other for ever. Unset it before the "
        "program starts (Megatron sets it for its own order of kernels)"
    )


def _default_like(ranks: tuple[int, ...], like: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The default group if it has exactly these ranks and the same backends as `like`."""
    default = _default_group()
    same_backends = dist.get_backend_config(default) == dist.get_backend_config(like)
    return default if sorted(ranks) == list(range(dist.get_world_size())) and same_backends else None


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "initialised"
    return group


def _new_group(ranks: tuple[int, ...], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
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


_NUMBERS: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""The default group -> how many groups of some ranks this process has made."""


@contextmanager
def _named_alike(ranks: tuple[int, ...]) -> Iterator[None]:
    """Inside, a new group of these ranks has the same name on all of them."""
    # A name with which torch's members find each other in the store contains how many groups their process has. That
    # differs if the program has made groups of only some ranks, and they would wait for each other until the timeout.
    numbers = _NUMBERS.setdefault(_default_group(), Counter())
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
    default = _default_group()
    bound = default.bound_device_id
    if bound is None or len(ranks) == dist.get_world_size():
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
