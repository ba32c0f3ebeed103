"""Which types of device a process group can communicate, and which device this rank uses.

A group has one backend per type of device, "cpu:gloo,cuda:nccl" for example: `init_process_group()` and DeviceMesh make
such groups. The device of the model decides which backend is used.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.distributed_c10d import _get_process_group_store

from zeroshard.errors import InvalidValue

DEFAULT_TIMEOUT = timedelta(seconds=120)
_TORCHS_OWN = (default_pg_timeout, default_pg_nccl_timeout)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Type of device -> name of the backend that moves its tensors. (A group of gloo alone lists gloo for CUDA too, but
    gloo cannot send CUDA tensors from rank to rank, so that entry is left out.)"""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs if backend != "gloo" or device == "cpu"}


def accelerator() -> tuple[str, str]:
    """The type of the accelerator of this machine, and torch's backend for it: ("cuda", "nccl") for example. ("", "")
    if there is none, or none with a backend of its own."""
    found = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.Backend.default_device_backend_map.get(found.type, "gloo") if found is not None else "gloo"
    return (found.type, backend) if found is not None and backend != "gloo" else ("", "")


_LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
"""Where srun, and mpirun of Open MPI, MPICH and Cray, tell a process its number on its machine."""


def local_rank() -> tuple[str, int]:
    """(the variable that tells it, the number of this rank among those of its machine): LOCAL_RANK, or, where RANK has
    been set without it, what the launcher tells. ("", 0) if nothing does."""
    names = ("LOCAL_RANK", *(_LOCAL_RANKS if "RANK" in os.environ else ()))
    name = next((name for name in names if os.environ.get(name)), "")
    return name, int(os.environ[name]) if name else 0


def take_device(kind: str) -> torch.device:
    """Make the device of this rank the current one: number `local_rank`, or the only one that this process sees. Where
    nothing tells that number, it is taken from RANK, as if all machines had one rank for each device; a device that two
    ranks have then taken is found (`shared_device`, `expect_usable`).

    Raises:
        ValueError: there is no such device.
    """
    devices = getattr(torch, kind)
    count, (name, number) = devices.device_count(), local_rank()
    if count == 1:  # a launcher may show each process its own device alone (Slurm, Ray)
        number = 0
    elif not name and count:
        number = int(os.environ.get("RANK", "0")) % count
    elif number >= count:
        raise InvalidValue(
            f"{name} is {number}, and this process sees {count} {kind} devices: start at most {count} ranks on a "
            "machine, or let each process see all devices of the machine, or only its own"
        )
    devices.set_device(number)
    return torch.device(kind, number)


def shared_device(error: Exception) -> str:
    """What is wrong if NCCL has found two ranks on one GPU, in words; "" for another error."""
    found = re.search(r"Duplicate GPU detected : rank (\d+) and rank (\d+)", str(error))
    if found is None:
        return ""
    first, second = sorted(map(int, found.groups()))
    return (
        f"ranks {first} and {second} use the same GPU: set LOCAL_RANK to the number of each rank on its machine "
        "(torchrun does), or show each process a GPU of its own (CUDA_VISIBLE_DEVICES)"
    )


def has_tagged_messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether two ranks may have many point-to-point messages with tensors of that device in flight, told apart by
    tags. Then ranks exchange slices by messages (`pairwise_transport.py`). torch has no query for this: it is true of
    gloo, and of every other backend only the collectives are used."""
    return backends_of(group).get(device.type) == "gloo"


def moves_nothing(group: dist.ProcessGroup) -> bool:
    """Whether this is torch's fake backend: its collectives return at once, and nothing is received."""
    return "fake" in backends_of(group).values()


def device_for(group: dist.ProcessGroup, model: torch.device | None) -> torch.device:
    """The device for tensors that this group communicates: the model's device if the group has a backend for it, else a
    device that it has a backend for. `model`: None if the model is on no device yet."""
    movable = backends_of(group)
    if model is not None and model.type in movable:
        return model
    for device_type in sorted(movable.keys() - {"cpu"}):
        module = getattr(torch, device_type, None)
        if module is not None and module.is_available():
            return torch.device(device_type, module.current_device())
    return torch.device("cpu")


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of this group's collectives."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # a backend without such options
        timeout = None
    return timeout if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT


def take_timeout(group: dist.ProcessGroup, default: dist.ProcessGroup) -> None:
    """Give a group the timeout of the default group, if it has torch's own (10 or 30 minutes): a mesh takes none,
    `new_group` does not take that of the default group, and a rank that does not come would be noticed only then."""
    for kind in backends_of(group):
        device = torch.device(kind)
        try:
            backend, wanted = group._get_backend(device), timeout_of(default, device)
        except RuntimeError:  # it has none for each device
            continue
        if timeout_of(group, device) in _TORCHS_OWN and hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(wanted)


def expect_usable(group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks use the same type of device, each its current device, and no two the same one. Collective,
    through the store: a collective of the group would hang if a device is wrong.

    Raises:
        ValueError: on every rank, with the same message.
    """
    names = set(backends_of(group).values())
    if names <= {"gloo"} or moves_nothing(group) or dist.get_world_size(group) == 1:
        problem = _not_current(device)
    else:
        problem = _judged_by_first(group, [device.type, _hardware(device), _not_current(device)])
    if problem:
        raise InvalidValue(problem)


def _not_current(device: torch.device) -> str:
    if device.type == "cpu" or device.index is None:
        return ""
    current = getattr(torch, device.type).current_device()
    if device.index == current:
        return ""
    return (
        f"the model is on {device}, and the current device is {device.type}:{current}: call "
        f"torch.{device.type}.set_device({device.index}) before anything is put there (zeroshard.init() does it, by "
        "LOCAL_RANK)"
    )


def _hardware(device: torch.device) -> str:
    """A name that is unique to this device in the whole cluster; empty for a CPU, which ranks may share."""
    if device.type == "cpu":
        return ""
    properties = getattr(torch, device.type).get_device_properties(device)
    return f"{socket.gethostname()} {getattr(properties, 'uuid', device.index)}"


def kernels(device: torch.device) -> str:
    """Whose arithmetic a rank computes with, in words: other kernels may round differently."""
    if device.type == "cpu":
        return f"torch {torch.__version__}, a CPU with {torch.backends.cpu.get_cpu_capability()}"
    name = getattr(torch.get_device_module(device).get_device_properties(device), "name", device.type)
    return f"torch {torch.__version__}, {name}"


def _shared_or_mixed(found: Mapping[int, tuple[str, ...]]) -> str:
    """What is wrong with the ranks' devices, in words; "" if nothing is. `found`: (type, hardware, problem) by global
    rank."""
    one, of_one = next(iter(found.items()))
    first: dict[str, int] = {}
    for rank, (device_type, hardware, problem) in found.items():
        if problem:
            return f"rank {rank}: {problem}"
        if device_type != of_one[0]:
            return (
                f"the ranks have the model on different devices: rank {one} on {of_one[0]}, rank {rank} on "
                f"{device_type}. Move it to the same type of device on every rank before shard()"
            )
        if hardware and hardware in first:
            return (
                f"ranks {first[hardware]} and {rank} use the same {device_type} device ({hardware}): call "
                f"torch.{device_type}.set_device(int(os.environ['LOCAL_RANK'])) before the model is put there, or "
                "zeroshard.init(), which does it"
            )
        first[hardware] = rank
    return ""


def _judged_by_first(group: dist.ProcessGroup, own: Sequence[str]) -> str:
    """`_shared_or_mixed` of the values of all ranks. Rank 0 of the group calls it and writes the result for the others.
    (If every rank read the values of all ranks, the store would serve n * n reads.)"""
    rank, store = dist.get_rank(group), PrefixStore("zeroshard/devices", _get_process_group_store(group))
    # Not a collective of the group: NCCL would create a communicator on whatever devices are current, and these may be
    # wrong.
    # Each rank counts its own rounds: the keys of an earlier call must not answer this one.
    number = store.add(f"round-{rank}", 1)
    store.set(f"{number}-{rank}", json.dumps(own))
    if rank == 0:
        found = store.multi_get([f"{number}-{other}" for other in range(dist.get_world_size(group))])
        of_ranks = zip(dist.get_process_group_ranks(group), map(tuple, map(json.loads, found)), strict=True)
        store.set(f"{number}-problem", json.dumps(_shared_or_mixed(dict(of_ranks))))
    return str(json.loads(store.get(f"{number}-problem")))
