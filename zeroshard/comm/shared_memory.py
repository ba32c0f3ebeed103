"""Storages that the ranks of one host read in each other's memory: no socket, no copy on the way.

Each is an anonymous file (memfd) that a peer maps by way of /proc/<pid>/fd. Nothing has a name in a file system, so
nothing stays behind, however a process ends. Where this does not work (several hosts, another system, a forbidden
/proc) the ranks notice at the start and exchange by messages.

A process number says nothing by itself: in containers every rank may be process 1, and /proc/1 is then its own. So each
file is labelled with a random number of its process, its *identity*, and mapped only under the label that is expected.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.errors import SystemRefused


class Location(NamedTuple):
    """Where some bytes lie, for a peer. `segment` is unique in its process; `fd` is not, over time."""

    segment: int
    fd: int
    num_bytes: int
    offset: int


NOWHERE = Location(0, 0, 0, 0)
"""That a peer could read: its segments count from 1."""
_SEGMENTS = itertools.count(1)
"""Numbers for all of this process: meshes of one group share its identity."""


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process, for its peers: its number, which may be another process's elsewhere, and what is its alone."""

    pid: int
    identity: int


class SharedMemory:
    """The segments that this process has, and those of its peers that it has mapped.

    Attributes:
        process: this one.
    """

    def __init__(self, process: Process | None = None) -> None:
        """`process`: this one, as its peers know it already; None: under a new identity."""
        self.process = process or Process(os.getpid(), secrets.randbits(62))
        self._own: dict[int, tuple[int, int]] = {}  # address -> (segment, fd)
        self._mapped: dict[tuple[int, int], Tensor] = {}  # (identity, segment) -> bytes

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 zeros [num_bytes] that peers can map as long as the tensor lives."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        segment, fd = self.create(num_bytes)
        tensor = self.map(segment, fd, num_bytes)
        # The descriptor lives as long as the tensor: peers open it through /proc when they first need it. What a peer
        # has mapped stays valid after the close.
        weakref.finalize(tensor, os.close, fd)
        return tensor

    def create(self, num_bytes: int) -> tuple[int, int]:
        """A file of zeros: (segment, fd)."""
        segment = next(_SEGMENTS)
        # Anonymous, not `shm_open`: a name in /dev/shm outlives a process that is killed.
        fd = os.memfd_create(_label(self.process, segment))
        os.ftruncate(fd, num_bytes)
        return segment, fd

    def map(self, segment: int, fd: int, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], which `locate` knows as long as the tensor lives."""
        tensor = _map(f"/proc/self/fd/{fd}", num_bytes)
        address = tensor.untyped_storage().data_ptr()
        self._own[address] = segment, fd
        weakref.finalize(tensor, self._own.pop, address)
        return tensor

    def locate(self, tensor: Tensor) -> Location | None:
        """For a contiguous tensor in one of the own segments; None for any other."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._own:
            return None
        return Location(*self._own[address], storage.nbytes(), tensor.data_ptr() - address)

    def peer(self, process: Process, location: Location, like: Tensor) -> Tensor:
        """The bytes of a peer at that location, with the shape and dtype of `like`. Read only.

        Raises:
            OSError: there is no such file, or it is not that peer's segment.
        """
        # By segment, not by fd: a number of a file is used again for the next file, and the old pages stay mapped here.
        key = process.identity, location.segment
        if key not in self._mapped:
            self._mapped[key] = _map_labelled(process, location)
        return self._mapped[key][location.offset : location.offset + like.nbytes].view(like.dtype).view(like.shape)

    def own_segments(self) -> list[list[int]]:
        """[segment, fd, number of bytes] of each."""
        return [[segment, fd, os.fstat(fd).st_size] for segment, fd in self._own.values()]

    def map_segments(self, process: Process, segments: list[list[int]]) -> None:
        """Map these of a peer now: what is mapped stays readable when the peer has freed it."""
        for segment, fd, num_bytes in segments:
            self.peer(process, Location(segment, fd, num_bytes, 0), torch.empty(0, dtype=torch.uint8))

    def mapped(self) -> list[Tensor]:
        """What has been mapped of peers (it is their memory, and no second copy of it)."""
        return list(self._mapped.values())


class Probe:
    """Whether all ranks can read each other's memory, tried with one small segment of each: its owner has written its
    identity there, every peer that finds it writes its own beside it, and the owner finds those."""

    def __init__(self, shared: SharedMemory, rank: int, num_ranks: int) -> None:
        self._shared, self._rank, self._num_ranks = shared, rank, num_ranks
        self._segment = shared.allocate(8 * num_ranks)
        self._slots = self._segment.view(torch.int64)
        self._slots[rank] = shared.process.identity  # a peer that finds another number has mapped another process

    def card(self) -> list[int]:
        """What a peer needs to know: [process number, identity, where]."""
        location = self._shared.locate(self._slots)
        assert location is not None
        return [*astuple(self._shared.process), *location]

    def answer(self, cards: Sequence[list[int]]) -> bool:
        """Write the own identity into the segment of each peer. False where one of them cannot be found."""
        for rank, (pid, identity, *location) in enumerate(cards):
            if rank != self._rank:
                try:
                    slots = self._shared.peer(Process(pid, identity), Location(*location), self._slots)
                except (OSError, RuntimeError):
                    return False
                if int(slots[rank]) != identity:
                    return False
                slots[self._rank] = self._shared.process.identity
        return True

    def is_answered(self, cards: Sequence[list[int]]) -> bool:
        """Whether all peers have written here, once all of them have tried."""
        return self._slots.tolist() == [identity for _, identity, *_ in cards]


def _label(process: Process, segment: int) -> str:
    return f"zeroshard-{process.identity:x}-{segment}"


def _map_labelled(process: Process, location: Location) -> Tensor:
    # [Note: a process number is not a process]
    # In a container every rank may be process 1, and /proc/1 is then this process itself; elsewhere the number may have
    # been given to a new process. A rank that maps its own memory for a peer's trains on, apart, in silence. So a
    # segment counts only under a label with the random number of its owner: before it is opened (to open a pipe or a
    # device of a stranger has effects), and again of what has been opened (the peer may have closed it in between).
    label, path = _label(process, location.segment), f"/proc/{process.pid}/fd/{location.fd}"
    _expect(label, path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _expect(label, f"/proc/self/fd/{fd}")
        return _map(f"/proc/self/fd/{fd}", location.num_bytes)
    finally:
        os.close(fd)


def _expect(label: str, path: str) -> None:
    found = os.readlink(path)
    if not found.startswith(f"/memfd:{label} "):
        raise SystemRefused(f"{path}: expected the segment {label} of a peer, found {found}")


class Segment:
    """Memory that peers can map, held only now and then: what a peer has mapped stays mapped, and is filled anew."""

    def __init__(self, shared: SharedMemory, num_bytes: int) -> None:
        self._shared, self._num_bytes = shared, num_bytes
        self._number, self._fd = shared.create(num_bytes)
        weakref.finalize(self, os.close, self._fd)

    def take(self) -> Tensor:
        """uint8 [num_bytes], zeros at first and after `give_back`."""
        return self._shared.map(self._number, self._fd, self._num_bytes)

    def give_back(self) -> None:
        """The pages go back to the system. Nobody may be reading them."""
        # The file stays, and so does what peers have mapped of it. To read past the end of a file that is mapped is
        # SIGBUS: a peer that still reads between these two calls dies (see `Pending.release`).
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, self._num_bytes)


_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask for large pages: memory that has just been taken is then cleared in a fraction of the time."""
    if tensor.device.type != "cpu" or tensor.nbytes < _HUGE_PAGE or _libc() is None:
        return
    page = os.sysconf("SC_PAGE_SIZE")
    start = -(-tensor.data_ptr() // page) * page
    stop = (tensor.data_ptr() + tensor.nbytes) // page * page
    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)  # type: ignore[union-attr]


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if os.uname().sysname == "Linux" else None


def _map(path: str, num_bytes: int) -> Tensor:
    # shared=True: a private mapping, which is the default, would keep what is written to itself.
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
