"""Small messages between the ranks of one host, through pipes.

With gloo a thread of its own reads every message and then wakes the thread that waits for it. A rank that waits for a
pipe reads it itself: one switch in place of two. And where ranks outnumber cores, gloo's thread spends much of the time
in a busy loop: `Pair::handleEvents` tries the lock of a connection, whose holder has lost its core, and returns to an
`epoll_wait` that returns at once.

Each rank makes one pipe for each peer. The peer opens its writing end by way of /proc/<pid>/fd, as it maps shared
memory. A message is a header (channel, number of bytes) and its bytes. Messages of one channel are received in the
order in which their receives were posted, as with gloo's tags. Channels do not wait for each other.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.backends import timeout_of
from zeroshard.comm.shared_memory import Process
from zeroshard.errors import Error, InvalidState, SystemRefused

MOST_BYTES = 16 << 10
"""Of a message. What is longer is quicker by gloo, which copies it once less."""

_HEADER = struct.Struct("=QI")
_AT_ONCE = 1 << 16
"""Bytes read from a pipe in one call: all that it holds, by default."""
_LONG, _SHORT = 60.0, 0.01
"""Seconds: of one poll, and between two looks of a thread that wants to write while another one polls."""

Card = list[list[int]]
"""Of a rank: [file number, inode] of the writing end for each rank of the group; its own place is empty."""


class Sent:
    """A message that has been written: there is nothing left to wait for."""

    def wait(self) -> None:
        pass


_SENT = Sent()


class Receive:
    """A message that is expected, or has come."""

    def __init__(self, pipes: Pipes, rank: int, into: Tensor) -> None:
        self._pipes, self._rank, self._into = pipes, rank, into
        self.data: bytes | None = None

    def wait(self) -> None:
        """Fill the tensor.

        Raises:
            PeerGone: the peer has ended, or nothing has come within the timeout.
            RuntimeError: a message of another size.
        """
        self._pipes.wait_until(lambda: self.data is not None, self._rank)
        data = self.data
        if data is None:  # a forked copy of this process: the message is the parent's
            return
        if len(data) != self._into.nbytes:
            raise InvalidState(f"rank {self._rank} sent {len(data)} bytes where {self._into.nbytes} were expected")
        ctypes.memmove(self._into.data_ptr(), data, len(data))


class PeerGone(Error, RuntimeError):
    """A rank has ended, has closed its pipes, or nothing comes from it."""


@dataclass(eq=False)
class _Channel:
    """Of one peer: what has come before anybody expected it, or is expected and has not come. One is empty."""

    early: deque[bytes] = field(default_factory=deque)
    expected: deque[Receive] = field(default_factory=deque)


@dataclass(eq=False)
class _Peer:
    """Another rank, and the files that lead from it and to it.

    Attributes:
        inbox, own_end: both ends of the pipe that it writes to; `own_end` is closed when it has opened that.
        outbox: the writing end of its own pipe.
        rest: of what has been read: a message that has not come as a whole.
        is_gone: it has closed its end, or does not read any more.
    """

    rank: int
    inbox: int
    own_end: int
    outbox: int = -1
    rest: bytes = b""
    is_gone: bool = False
    channels: defaultdict[int, _Channel] = field(default_factory=lambda: defaultdict(_Channel))

    def read(self) -> None:
        """What is there, and whom it is for."""
        try:
            data = os.read(self.inbox, _AT_ONCE)
        except BlockingIOError:
            return
        self.is_gone |= not data
        data, start = self.rest + data, 0
        while len(data) - start >= _HEADER.size:
            key, size = _HEADER.unpack_from(data, start)
            stop = start + _HEADER.size + size
            if stop > len(data):
                break
            self._deliver(self.channels[key], data[start + _HEADER.size : stop])
            start = stop
        self.rest = data[start:]

    def _deliver(self, channel: _Channel, message: bytes) -> None:
        if channel.expected:
            channel.expected.popleft().data = message
        else:
            channel.early.append(message)


class Pipes:
    """Of one process, to all other ranks of a group. Any thread may send, receive and wait."""

    def __init__(self, rank: int, ranks: Sequence[int], timeout: float) -> None:
        """
        Args:
            rank, ranks: global ranks: of this process, and of the group.
            timeout: seconds that one wait lasts.

        Raises:
            OSError: there are no file numbers left.
        """
        self._timeout, self._pid = timeout, os.getpid()
        self._changed = threading.Condition()
        self._polls = False  # some thread does, for all that wait
        self._closed = ""  # why
        self._files: set[int] = set()
        weakref.finalize(self, _close_all, self._files)
        self._peers = {other: _Peer(other, *self._pipe()) for other in ranks if other != rank}
        self._wake, self._bell = self._pipe()
        self._poller = select.poll()
        self._poller.register(self._wake, select.POLLIN)
        for peer in self._peers.values():
            os.set_blocking(peer.inbox, False)
            self._poller.register(peer.inbox, select.POLLIN)

    def card(self, ranks: Sequence[int]) -> Card:
        """What the peers need to know."""
        ends = [self._peers[rank].own_end if rank in self._peers else None for rank in ranks]
        return [[] if end is None else [end, os.fstat(end).st_ino] for end in ends]

    def connect(self, found: Mapping[int, tuple[int, list[int]]]) -> None:
        """Open the writing ends of the pipes that lead to the peers.

        Args:
            found: by global rank: the process, and its card's entry for this rank.

        Raises:
            OSError: one of them cannot be opened.
        """
        for rank, (pid, (end, inode)) in found.items():
            path, name = f"/proc/{pid}/fd/{end}", f"pipe:[{inode}]"
            # Before it is opened, and again after: see [Note: a process number is not a process].
            _expect(path, name)
            outbox = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._files.add(outbox)
            _expect(f"/proc/self/fd/{outbox}", name)
            self._peers[rank].outbox = outbox

    def start(self) -> None:
        """All peers have opened their ends: from now on a pipe ends when its peer does."""
        for peer in self._peers.values():
            self._release(peer.own_end)

    def send(self, rank: int, channel: int, tensor: Tensor) -> Sent:
        """Returns when the pipe has it.

        Raises:
            PeerGone: the peer has ended, or does not read.
        """
        if self.is_forked_copy:
            return _SENT
        peer = self._peers[rank]
        data = _HEADER.pack(channel, tensor.nbytes) + ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while data:
                self._expect_open(peer)
                try:
                    data = data[os.write(peer.outbox, data) :]
                except BlockingIOError:
                    # Its pipe is full. It may be writing, too, to this rank: take that in, or neither goes on.
                    self._take_in(deadline, peer, writes=True)
                except OSError as error:
                    peer.is_gone = True
                    raise PeerGone(f"connection to rank {rank} closed: {error}") from None
        return _SENT

    def receive(self, rank: int, channel: int, into: Tensor) -> Receive:
        """Post a receive; `into` is filled when it is waited for."""
        receive = Receive(self, rank, into)
        with self._changed:
            found = self._peers[rank].channels[channel]
            if found.early:
                receive.data = found.early.popleft()
            else:
                found.expected.append(receive)
        return receive

    def wait_until(self, is_there: Callable[[], bool], rank: int) -> None:
        """Until something has come that rank `rank` sends. At once in a forked copy of this process, whose pipes are
        its parent's.

        Raises:
            PeerGone: the peer has ended, or nothing has come within the timeout.
        """
        if is_there() or self.is_forked_copy:
            return
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while not is_there():
                self._expect_open(self._peers[rank])
                self._take_in(deadline, self._peers[rank])

    def interrupt(self, why: str) -> None:
        """Whoever waits here raises, in whichever thread, and so do the peers that wait for this rank."""
        if not self.is_forked_copy:
            with self._changed:
                self._close(why)

    @property
    def is_forked_copy(self) -> bool:
        """Whether this process is not the one that made them."""
        # See [Note: forked workers]: the pipes are the parent's, and another thread of it may have held the lock.
        return os.getpid() != self._pid

    # Under the lock --------------------------------------------------------------------------------------------------

    def _take_in(self, deadline: float, peer: _Peer, *, writes: bool = False) -> None:
        """Wait until something can be read, or written to the peer, and read it. One thread does so for all."""
        left = deadline - time.monotonic()
        if left <= 0:
            self._close(f"timed out after {self._timeout:.0f} s")
            raise PeerGone(f"timed out waiting for rank {peer.rank}: nothing came for {self._timeout:.0f} s")
        if self._polls:
            self._changed.wait(min(left, _SHORT) if writes else left)
            return
        self._polls = True
        if writes:
            self._poller.register(peer.outbox, select.POLLOUT)
        self._changed.release()
        try:
            ready = self._poller.poll(1000 * min(left, _LONG))
        finally:
            self._changed.acquire()
            if writes:
                self._poller.unregister(peer.outbox)
            self._polls = False
            self._changed.notify_all()
        files = {file for file, _ in ready}
        for other in self._peers.values():
            if other.inbox in files:
                other.read()
                if other.is_gone:
                    self._poller.unregister(other.inbox)

    def _expect_open(self, peer: _Peer) -> None:
        if self._closed:
            raise PeerGone(f"connection to rank {peer.rank} closed: {self._closed}")
        if peer.is_gone:
            raise PeerGone(f"connection closed by rank {peer.rank}")

    def _close(self, why: str) -> None:
        """The peers find out by the end of their pipes."""
        if not self._closed:
            self._closed = why
            os.write(self._bell, b"!")  # who polls returns
            for peer in self._peers.values():
                self._release(peer.outbox)
            self._changed.notify_all()

    def _pipe(self) -> tuple[int, int]:
        files = os.pipe()
        self._files.update(files)
        return files

    def _release(self, file: int) -> None:
        if file in self._files:
            self._files.remove(file)
            os.close(file)


def _expect(path: str, name: str) -> None:
    if os.readlink(path) != name:
        raise SystemRefused(f"{path}: expected {name} of a peer, found {os.readlink(path)}")


def _close_all(files: set[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)


@dataclass(frozen=True)
class Connected:
    """What the ranks of a group know of each other, once they share memory and have pipes. `processes`: by global
    rank."""

    pipes: Pipes
    processes: Mapping[int, Process]


_CONNECTED: weakref.WeakKeyDictionary[Any, Connected] = weakref.WeakKeyDictionary()


def connected(group: dist.ProcessGroup) -> Connected | None:
    """Of all meshes of a process group, as they share its connections; None before the first."""
    found = _CONNECTED.get(group)
    return None if found is None or found.pipes.is_forked_copy else found


class Connecting:
    """What each rank does and says while the pipes of a group are made."""

    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: Sequence[int]) -> None:
        """`rank`, `ranks`: global ranks: of this process, and of the group."""
        self._group, self._rank, self._ranks = group, rank, ranks
        self._pipes: Pipes | None = None
        with suppress(OSError):  # no file numbers are left: messages go by gloo
            self._pipes = Pipes(rank, ranks, timeout_of(group, torch.device("cpu")).total_seconds())

    def card(self) -> Card | None:
        """For the others; None where there is nothing to connect."""
        return self._pipes.card(self._ranks) if self._pipes is not None else None

    def connect(self, pids: Sequence[int], cards: Sequence[Card | None]) -> bool:
        """Whether this rank can write to all others. In the order of the ranks: process numbers, cards."""
        place, found = self._ranks.index(self._rank), {}
        for rank, pid, card in zip(self._ranks, pids, cards, strict=True):
            if card is None:
                return False
            if rank != self._rank:
                found[rank] = pid, card[place]
        try:
            assert self._pipes is not None, "all have a card"
            self._pipes.connect(found)
        except OSError:
            return False
        return True

    def start(self, processes: Mapping[int, Process]) -> Pipes:
        """Called where all ranks are connected: the pipes are in use from now on."""
        assert self._pipes is not None, "connected"
        self._pipes.start()
        _CONNECTED[self._group] = Connected(self._pipes, processes)
        return self._pipes


def interrupt_all(why: str) -> None:
    """Whoever waits for a message from a pipe raises, in whichever thread."""
    for found in list(_CONNECTED.values()):
        found.pipes.interrupt(why)
