"""Memory segments that the ranks of one host map from each other: no socket, no intermediate copy.

A segment is an anonymous file (memfd) that a peer maps through /proc/<pid>/fd. It has no name in a file system, so
nothing is left behind, however a process ends. If this does not work (several hosts, another system, no access to
/proc), the ranks find out at the start (`trial.py`), and exchange messages instead.

A pid alone does not identify a rank: in containers every rank may be process 1, and /proc/1 is then the reader itself.
So the label of each file contains a random number of its process, its *identity*, and a peer maps only a file with the
expected label.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.errors import SystemRefused
from zeroshard.ranks.common import Common


class Location(NamedTuple):
    """Where a peer finds some bytes. `segment` is unique in its process for good; an `fd` is reused after a close."""

    segment: int
    fd: int
    num_bytes: int
    offset: int


NOWHERE = Location(0, 0, 0, 0)
"""For bytes that no peer can read. (Segments are numbered from 1.)"""
_View = tuple[int, int, int, torch.dtype, torch.Size]
"""(identity, segment, offset, dtype, shape)."""
_SEGMENTS = itertools.count(1)
"""Numbers for all segments of this process, not per mesh: meshes of one group share one identity, so peers could not
tell two segments of the same number apart."""


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process, for its peers: its pid, which may be ambiguous, and its identity, which is not."""

    pid: int
    identity: int


class _Own(NamedTuple):
    """A segment of this process: its number, its file, the tensor that shows it, and what closes the file."""

    segment: int
    fd: int
    tensor: weakref.ref[Tensor]
    close: Callable[[], object]


class SharedMemory:
    """The segments of this process, and the peers' segments that it has mapped.

    Attributes:
        process: this process.
    """

    def __init__(self, process: Process | None = None) -> None:
        """`process`: this one, as its peers know it already; None: under a new identity."""
        self.process = process or Process(os.getpid(), secrets.randbits(62))
        self._own: dict[int, _Own] = {}  # by address
        self._mapped: dict[tuple[int, int], Tensor] = {}  # (identity, segment) -> bytes
        self._views: dict[_View, Tensor] = {}  # of these bytes, as `peer` has returned them
        # By the address of the own shard. Weak: common memory belongs to the weights that lie in it.
        self._commons: weakref.WeakValueDictionary[int, Common] = weakref.WeakValueDictionary()

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 zeros [num_bytes]. Peers can map them as long as the tensor lives, and until `close_files`."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        segment, fd = self.create(num_bytes)
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            tensor = self.map(segment, fd, num_bytes)
            undo.pop_all()
        # Peers open the descriptor through /proc when they first need it. Their mappings stay valid after the close.
        close = weakref.finalize(tensor, os.close, fd)
        address = tensor.untyped_storage().data_ptr()
        self._own[address] = self._own[address]._replace(close=close)
        return tensor

    def create(self, num_bytes: int) -> tuple[int, int]:
        """A new file of zeros: (segment, fd).

        Raises:
            OSError: this process may not open more files, or none of that size.
        """
        segment = next(_SEGMENTS)
        # Anonymous, not `shm_open`: a name in /dev/shm outlives a process that is killed.
        with within_file_limit(), ExitStack() as undo:
            fd = os.memfd_create(_label(self.process, segment))
            undo.callback(os.close, fd)
            os.ftruncate(fd, num_bytes)
            undo.pop_all()
        return segment, fd

    def map(self, segment: int, fd: int, num_bytes: int) -> Tensor:
        """The file as a tensor, uint8 [num_bytes]. `locate` finds it as long as the tensor lives."""
        tensor = _map(f"/proc/self/fd/{fd}", num_bytes)
        address = tensor.untyped_storage().data_ptr()
        self._own[address] = _Own(segment, fd, weakref.ref(tensor), lambda: None)
        weakref.finalize(tensor, _forget, self._own, address, segment)
        return tensor

    def locate(self, tensor: Tensor) -> Location | None:
        """The location of a contiguous tensor in one of the own segments; None for any other tensor."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._own:
            return None
        own = self._own[address]
        return Location(own.segment, own.fd, storage.nbytes(), tensor.data_ptr() - address)

    def peer(self, process: Process, location: Location, like: Tensor) -> Tensor:
        """A peer's bytes at that location, with the shape and dtype of `like`. Callers must only read it.

        Raises:
            OSError: there is no such file, or it is not that peer's segment.
        """
        # Keyed by segment, not by fd: the peer's system reuses a closed fd for the next file, and this cache would
        # return the pages of the old one.
        key = process.identity, location.segment
        if key not in self._mapped:
            with opened(process, location) as fd:
                self._mapped[key] = _map(f"/proc/self/fd/{fd}", location.num_bytes)
        view = *key, location.offset, like.dtype, like.shape
        if view not in self._views:
            part = self._mapped[key][location.offset : location.offset + like.nbytes]
            self._views[view] = part.view(like.dtype).view(like.shape)
        return self._views[view]

    def own_segments(self) -> tuple[list[Tensor], list[list[int]]]:
        """The own segments, and [segment, fd, number of bytes] of each. Peers can map them as long as the caller keeps
        the tensors."""
        # Of a copy, and of those that can be kept: others are being freed, by a collection or another thread.
        kept = [(tensor, own) for own in list(self._own.values()) if (tensor := own.tensor()) is not None]
        return [tensor for tensor, _ in kept], [[own.segment, own.fd, tensor.nbytes] for tensor, own in kept]

    def close_files(self, tensors: Sequence[Tensor]) -> None:
        """All peers have mapped these own segments, and need their files no more. (A process may often have 1,024.)"""
        for tensor in tensors:
            self._own[tensor.untyped_storage().data_ptr()].close()

    def map_segments(self, process: Process, segments: list[list[int]]) -> None:
        """Map these segments of a peer now: a mapping stays readable after the peer has freed the segment. Its other
        ones, whose memory lasts as long as they are mapped, are forgotten. (A bucket may be mapped again.)"""
        listed = {segment for segment, *_ in segments}
        self._mapped = {key: one for key, one in self._mapped.items() if _is_kept(key, process, listed)}
        self._views = {key: one for key, one in self._views.items() if _is_kept(key, process, listed)}
        for segment, fd, num_bytes in segments:
            self.peer(process, Location(segment, fd, num_bytes, 0), torch.empty(0, dtype=torch.uint8, device="cpu"))

    def map_common(self, process: Process, location: Location, own: slice) -> Common:
        """Map a segment of `process`, in which the bytes `own` are for the shard of this rank.

        Raises:
            OSError: there is no such segment.
        """
        with opened(process, location) as fd, within_file_limit():
            common = Common(fd, location.num_bytes, own)
        self._commons[common.address] = common
        return common

    def common_of(self, tensor: Tensor) -> Common | None:
        """The common memory in which a tensor lies that is part of this rank's shard; None for any other tensor."""
        found = self._commons.get(tensor.untyped_storage().data_ptr())
        # Freed memory may have its address again.
        return found if found is not None and found.own.nbytes else None

    def mapped(self) -> list[Tensor]:
        """The mapped segments of peers (the peers' own memory, not a copy), and common memory. Own shards are not
        listed: their tensors have storages of their own."""
        return [*self._mapped.values(), *(part for one in self._commons.values() for part in (one.full, one.everyone))]


def _is_kept(key: Sequence[Any], process: Process, listed: Set[int]) -> bool:
    """Whether a mapping, which begins with (identity, segment), is of one that is listed, or of another process."""
    return key[0] != process.identity or key[1] in listed


def _forget(own: dict[int, _Own], address: int, segment: int) -> None:
    """A segment has been freed. Another one may have its address already: torch frees a tensor's memory before the
    finalizers run, and they may run in another thread."""
    if address in own and own[address].segment == segment:
        del own[address]


def _label(process: Process, segment: int) -> str:
    return f"zeroshard-{process.identity:x}-{segment}"


@contextmanager
def many_files() -> Iterator[None]:
    """Around the allocation of many segments, up to `close_files`: this process may open as many files as the system
    allows (often 524,288), and not only as many as are set (often 1,024)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def within_file_limit() -> Iterator[None]:
    """Around a call that opens a file, or sets its size.

    Raises:
        OSError: this process may not open more files, or have files of that size; the message says what to do.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if os.strerror(errno.EFBIG) in str(error):
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            raise SystemRefused(
                f"this process may have files of at most {most} bytes: raise the limit (ulimit -f), or take smaller "
                "units, whose buffers in shared memory are files"
            ) from error
        if os.strerror(errno.EMFILE) not in str(error):
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise SystemRefused(
            f"this process has {most} open files, as many as it may: raise the limit (ulimit -n), or take fewer and "
            "larger units, whose buffers in shared memory are files"
        ) from error


@contextmanager
def opened(process: Process, location: Location) -> Iterator[int]:
    """A descriptor of a peer's segment, for the time of the block.

    Raises:
        OSError: there is no such file, or it is not that peer's segment.
    """
    label = _label(process, location.segment)
    fd = open_of_peer(process.pid, location.fd, f"/memfd:{label} ", f"the segment {label}", os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def open_of_peer(pid: int, number: int, name: str, what: str, flags: int) -> int:
    """A descriptor of file `number` of another process, which the caller must close.

    Args:
        name: how the name begins by which the system shows the file.
        what: the file, for the message.

    Raises:
        OSError: there is no such file, or it has another name.
    """
    # [Note: a process number is not a process]
    # In a container every rank may be process 1, and /proc/1 is then this process itself. Or the pid now belongs to a
    # new process. A rank that maps its own memory in place of a peer's would train on wrong values without an error. So
    # the name, with the random number of its owner or the inode of its pipe, is checked before the open (opening a
    # foreign pipe or device has side effects), and again on the opened file (the peer may have closed it in between).
    path = f"/proc/{pid}/fd/{number}"
    _expect(path, name, what)
    with within_file_limit():
        fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        _expect(f"/proc/self/fd/{fd}", name, what)
    except OSError:
        os.close(fd)
        raise
    return fd


def _expect(path: str, name: str, what: str) -> None:
    found = os.readlink(path)
    if not found.startswith(name):
        raise SystemRefused(f"{path}: expected {what} of a peer, found {found}")


class Segment:
    """Memory that peers can map, and that is held only while it is needed. Peers map it once: their mapping stays valid
    when the memory is given back and taken again."""

    def __init__(self, shared: SharedMemory, num_bytes: int) -> None:
        self._shared, self._num_bytes = shared, num_bytes
        self._number, self._fd = shared.create(num_bytes)
        weakref.finalize(self, os.close, self._fd)

    def take(self) -> Tensor:
        """uint8 [num_bytes]: zeros at first, and after `give_back`."""
        return self._shared.map(self._number, self._fd, self._num_bytes)

    def give_back(self) -> None:
        """Return the pages to the system. No peer may be reading them."""
        # The file and the peers' mappings stay. A read past the end of a mapped file is SIGBUS: a peer that still reads
        # between these two calls dies. Call `Pending.release` first.
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, self._num_bytes)


def _map(path: str, num_bytes: int) -> Tensor:
    # shared=True: with the default, a private mapping, peers would not see what is written.
    with within_file_limit():
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
