"""The ranks a model is sharded over and replicated over, on top of torch's process groups.

one axis (the usual case)          two axes (HSDP): shard inside a node, replicate between nodes

    shard ->                               shard ->
    0  1  2  3                     repl.   0  1
                                     |     2  3
                                     v
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from zeroshard import watch

DEFAULT_TIMEOUT = timedelta(seconds=120)


def init(backend: str | None = None, timeout: float | timedelta = DEFAULT_TIMEOUT) -> None:
    """Join the process group of the launcher (`torchrun` sets its environment); without a launcher, a world of one.

    Args:
        backend: "gloo" or "nccl"; by default nccl where CUDA is available, else gloo.
        timeout: seconds (or a timedelta) after which a collective that cannot complete raises on the ranks that wait.

    Where `torch.distributed` is initialised already, that group is kept with its timeout. Either way a watch over the
    ranks begins (`watch.py`): a rank that fails takes the others along within seconds, instead of the timeout.

    Raises:
        ValueError: a timeout that is not positive.
    """
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, found {timeout.total_seconds()} s")
    if not dist.is_initialized():
        _join(backend, timeout)
    watch.start()


def _join(backend: str | None, timeout: timedelta) -> None:
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    elif (store := _store_of_this_attempt()) is not None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def _store_of_this_attempt() -> Store | None:
    """For ranks that the elastic launcher has started again: its store still holds the addresses of those that have
    ended (pytorch/pytorch#135712). All ranks know the same number of the attempt only where there is one launcher."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or not watch.has_one_launcher(int(os.environ["WORLD_SIZE"])):
        return None
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore(f"attempt-{attempt}", store)


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh: a process group, this process's rank in it, and the global rank of each member."""

    group: dist.ProcessGroup
    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Axis:
        return cls(group, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))


@dataclass(frozen=True)
class Mesh:
    """`shard` x `replicate`, and `world`: all ranks of both.

    `reduce` has the members of `shard`. On NCCL it is a communicator of its own: gathers keep one order among
    themselves on all ranks, and so do reductions, but not the two together (a rank on which a parameter stays unused
    reduces that unit later).
    """

    shard: Axis
    replicate: Axis
    world: Axis
    reduce: Axis

    @classmethod
    def of(cls, mesh: DeviceMesh | dist.ProcessGroup | None) -> Mesh:
        """From a process group (None: the default one) or a `DeviceMesh`: one axis, or two named "replicate" and
        "shard" (unnamed: in this order, as for FSDP's hybrid sharding).

        Raises:
            RuntimeError: torch.distributed is not initialised.
            ValueError: a mesh of more than two axes, or with other names.
        """
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call zeroshard.init() first, on every rank")
        if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
            names = mesh.mesh_dim_names or ("replicate", "shard")
            if set(names) != {"replicate", "shard"}:
                raise ValueError(f"a 2-D mesh needs the axes 'replicate' and 'shard', found {names}")
            shard = Axis.of(mesh.get_group(names.index("shard")))
            replicate = Axis.of(mesh.get_group(names.index("replicate")))
            world = Axis.of(_group_of(tuple(mesh.mesh.flatten().tolist()), shard.group))
        elif isinstance(mesh, DeviceMesh) and mesh.ndim > 2:
            raise ValueError(f"expected a mesh of one axis (shard) or two (replicate, shard), found {mesh.ndim}")
        else:
            group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh or _default_group()
            shard = world = Axis.of(group)
            replicate = Axis(group, 0, (dist.get_rank(),))
        own_reduce_group = shard.size > 1 and not is_gloo(shard.group)
        reduce = Axis.of(_new_group(shard.ranks, shard.group)) if own_reduce_group else shard
        return cls(shard, replicate, world, reduce)


def is_gloo(group: dist.ProcessGroup) -> bool:
    return str(dist.get_backend(group)) == "gloo"


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The time after which a collective of this group gives up."""
    timeout = group._get_backend(device).options._timeout
    return timeout if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT


def _group_of(ranks: tuple[int, ...], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """The default group where it has just these ranks, else a new one with the timeout of `like`."""
    if sorted(ranks) == list(range(dist.get_world_size())):
        return _default_group()
    return _new_group(ranks, like)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "initialised"
    return group


def _new_group(ranks: tuple[int, ...], like: dist.ProcessGroup) -> dist.ProcessGroup:
    device = torch.device("cpu" if is_gloo(like) else "cuda")
    group = dist.new_group(list(ranks), timeout=timeout_of(like, device), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group
