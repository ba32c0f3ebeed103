"""Storages that the ranks of one host read in each other's memory: no socket, no copy on the way.

Each is an anonymous file (memfd) that a peer maps by way of /proc/<pid>/fd. Nothing has a name in a file system, so
nothing stays behind, however a process ends. Where this does not work (several hosts, another system, a forbidden
/proc) the ranks notice at the start and exchange by messages.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

_MAGIC = 0x7A65726F


@dataclass(frozen=True, slots=True)
class Location:
    """Where some bytes lie, for a peer. `segment` is unique in its process; `fd` is not, over time."""

    segment: int
    fd: int
    num_bytes: int
    offset: int


class SharedMemory:
    """The segments that this process has, and those of its peers that it has mapped."""

    def __init__(self) -> None:
        self._own: dict[int, tuple[int, int]] = {}  # address -> (segment, fd)
        self._mapped: dict[tuple[int, int], Tensor] = {}  # (pid, segment) -> bytes
        self._count = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 zeros [num_bytes] that peers can map as long as the tensor lives."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        fd = os.memfd_create("zeroshard")
        os.ftruncate(fd, num_bytes)
        tensor = _map(f"/proc/self/fd/{fd}", num_bytes)
        address = tensor.untyped_storage().data_ptr()
        self._own[address] = self._count, fd
        self._count += 1
        weakref.finalize(tensor, _forget, self._own, address)
        return tensor

    def locate(self, tensor: Tensor) -> Location | None:
        """For a contiguous tensor in one of the own segments; None for any other."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._own:
            return None
        return Location(*self._own[address], storage.nbytes(), tensor.data_ptr() - address)

    def peer(self, pid: int, location: Location, like: Tensor) -> Tensor:
        """The bytes of a peer at that location, with the shape and dtype of `like`. Read only."""
        key = pid, location.segment
        if key not in self._mapped:
            self._mapped[key] = _map(f"/proc/{pid}/fd/{location.fd}", location.num_bytes)
        return self._mapped[key][location.offset : location.offset + like.nbytes].view(like.dtype).view(like.shape)

    def own_segments(self) -> list[list[int]]:
        """[segment, fd, number of bytes] of each."""
        return [[segment, fd, os.fstat(fd).st_size] for segment, fd in self._own.values()]

    def meet(self, pid: int, segments: list[list[int]]) -> None:
        """Map these of a peer now: what is mapped stays readable when the peer has freed it."""
        for segment, fd, num_bytes in segments:
            self.peer(pid, Location(segment, fd, num_bytes, 0), torch.empty(0, dtype=torch.uint8))

    def mapped(self) -> list[Tensor]:
        """What has been mapped of peers (it is their memory, and no second copy of it)."""
        return list(self._mapped.values())

    def probe(self) -> tuple[Tensor, list[int]]:
        """A segment to try with: the tensor to keep, and what a peer needs to know of it."""
        tensor = self.allocate(8)
        tensor.view(torch.int64)[0] = _MAGIC + os.getpid()
        location = self.locate(tensor)
        assert location is not None
        return tensor, [os.getpid(), *astuple(location)]

    def can_read(self, probe: list[int]) -> bool:
        """Whether a peer's probe can be mapped and holds what it should (it may be another host's process)."""
        pid, *location = probe
        with contextlib.suppress(OSError, RuntimeError):
            value = self.peer(pid, Location(*location), torch.empty(1, dtype=torch.int64))
            return int(value[0]) == _MAGIC + pid
        return False


def _map(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _forget(own: dict[int, tuple[int, int]], address: int) -> None:
    _, fd = own.pop(address)
    os.close(fd)
