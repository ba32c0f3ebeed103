"""Small messages between the ranks of one host, through pipes.

With gloo, a thread of gloo reads every message and then wakes the thread that waits for it. A rank that waits for a
pipe reads it itself, which needs one thread switch instead of two. With more ranks than cores, gloo's thread also
spends much of the time in a busy loop: `Pair::handleEvents` tries the lock of a connection whose holder has lost its
core, and returns to an `epoll_wait` that returns at once.

Each rank makes one pipe for each peer. The peer opens the pipe's writing end through /proc/<pid>/fd, in the same way as
it maps shared memory. A message consists of a header (channel, number of bytes) and its bytes. The messages of a
channel go to its receives in the order in which these were posted, as with gloo's tags. Channels do not wait for each
other.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ctypes
import os
import select
import signal
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from zeroshard.errors import Error, InvalidState
from zeroshard.ranks.clock import Patience
from zeroshard.ranks.living import Living
from zeroshard.ranks.shared_memory import Process, open_of_peer

MOST_BYTES = 16 << 10
"""The longest message that goes through a pipe. For longer ones gloo is faster, because it copies once less."""

_HEADER = struct.Struct("=QI")
_AT_ONCE = 1 << 16
"""Bytes read from a pipe in one call: the default capacity of a pipe."""
_SHORT = 0.01
"""Seconds: how often a thread that wants to write tries again while another thread polls."""
_UNTIL_FREE = 2.0
"""Seconds for which an `interrupt` tries to have the lock, which is held for moments."""

FORKED = (
    "this process was forked from a rank, and cannot exchange data with the other ranks: call whatever gathers, "
    "reduces or steps in the rank itself, not in a DataLoader worker or another forked process"
)
"""The error message for a copy of a rank. See [Note: forked workers] in `watch.py`."""

T = TypeVar("T", bytes, "Receive")

Card = list[list[int]]
"""What a rank publishes: for each rank of the group [file number, inode] of the writing end; empty for itself."""


class Sent:
    """The work of a send. The message is in the pipe already, so there is nothing to wait for."""

    has_arrived = True

    def wait(self) -> None:
        pass


_SENT = Sent()


class Receive:
    """The work of a receive. `data` is the message, None until it has arrived."""

    def __init__(self, pipes: Pipes, rank: int, num_bytes: int, into: Tensor | None = None) -> None:
        self._pipes, self._rank, self._num_bytes, self._into = pipes, rank, num_bytes, into
        self.data: bytes | None = None

    def wait(self) -> None:
        """Wait for the message, and copy it into the tensor, if there is one.

        Raises:
            PeerGone: the peer has ended, or nothing has arrived within the timeout.
            RuntimeError: the message has another size, or this process is a forked copy.
        """
        data = self.take()
        if self._into is not None:
            ctypes.memmove(self._into.data_ptr(), data, len(data))

    def take(self) -> bytes:
        """Wait for the message, and return it. Raises: as `wait`."""
        if self.data is None:
            self._pipes.wait_until(lambda: self.data is not None, self._rank)
        data = self.data
        assert data is not None, "waited for"
        if len(data) != self._num_bytes:
            raise InvalidState(f"rank {self._rank} sent {len(data)} bytes where {self._num_bytes} were expected")
        return data

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` returns at once."""
        if self.data is None:
            self._pipes.read()
        return self.data is not None


def is_by_pipe(work: object) -> bool:
    """Whether the message of this work comes or goes through a pipe. Nobody has to wait for such a work: a message that
    has been sent is in the pipe, and a receive that is posted stays there until its message has come."""
    return isinstance(work, (Sent, Receive))


class Reentered(Error, RuntimeError):
    """Garbage collection has begun a wait inside of another operation on the same pipes. The message will be received
    all the same: its receive is posted."""


class PeerGone(Error, RuntimeError):
    """A rank has ended, has closed its pipes, or has sent nothing within the timeout."""


@dataclass(eq=False)
class _Peer:
    """Another rank, with the pipe from it and the pipe to it.

    Attributes:
        inbox: reading end of the pipe that the peer writes to.
        own_end: writing end of that pipe, closed here once the peer has opened it.
        outbox: writing end of the pipe that the peer reads.
        unsent: bytes that wait for room in the outbox.
        rest: bytes read so far of a message that has not arrived completely.
        is_gone: the peer has closed its end.
        channels: for each channel either the messages that arrived before their receive was posted, or the receives
            whose message has not arrived. A channel with neither is not here.
    """

    rank: int
    inbox: int
    own_end: int
    outbox: int = -1
    unsent: bytes = b""
    rest: bytes = b""
    is_gone: bool = False
    channels: dict[int, deque[bytes] | deque[Receive]] = field(default_factory=dict)

    def read(self) -> bool:
        """Read what the pipe contains now, and hand each complete message to its channel. Returns whether there was
        anything, if only the end."""
        try:
            found = os.read(self.inbox, _AT_ONCE)
        except BlockingIOError:
            return False
        self.is_gone |= not found  # read(2) returns no bytes only after the last writing end has been closed
        data, start = self.rest + found, 0
        while len(data) - start >= _HEADER.size:
            key, size = _HEADER.unpack_from(data, start)
            stop = start + _HEADER.size + size
            if stop > len(data):
                break
            message = data[start + _HEADER.size : stop]
            receive = self._match(key, message, Receive)
            if receive is not None:
                receive.data = message
            start = stop
        self.rest = data[start:]
        return True

    def post(self, key: int, receive: Receive) -> None:
        """Post a receive in a channel."""
        receive.data = self._match(key, receive, bytes)

    def _match(self, key: int, one: bytes | Receive, other_type: type[T]) -> T | None:
        """Take the first of the other type that waits in the channel; if there is none, `one` waits."""
        waiting: deque[Any] = self.channels.setdefault(key, deque())
        if not waiting or not isinstance(waiting[0], other_type):
            waiting.append(one)
            return None
        first: T = waiting.popleft()
        if not waiting:
            del self.channels[key]
        return first


class _Locked:
    """`with`: under the lock of a condition. (A `contextmanager` takes three times as long.)

    Attributes:
        holder: the thread that is inside.

    Raises:
        Reentered: this thread is inside already.
    """

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self.holder: int | None = None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        # Garbage collection can run in the middle of any of these sections, and so can a wait in a `__del__`. A message
        # that it reads would overtake the one that is being handed over.
        if self.holder == thread:
            raise Reentered("a wait began while the same thread was reading from the pipes or writing to them")
        self._condition.acquire()
        self.holder = thread

    def __exit__(self, *error: object) -> None:
        self.holder = None
        self._condition.release()


class Pipes:
    """The pipes of this process to all other ranks of a group. Any thread may send, receive and wait.

    Attributes:
        processes: of the group, by global rank, once they are connected.
        is_forked_copy: whether this process was forked from the one that made the pipes. See [Note: forked workers].
            They belong to the parent, and another of its threads may have held the lock at the fork, which then stays
            locked in the copy.
    """

    processes: Mapping[int, Process]

    def __init__(self, rank: int, ranks: Sequence[int], timeout: float) -> None:
        """
        Args:
            rank: global rank of this process.
            ranks: global ranks of the group.
            timeout: of one wait, in seconds.

        Raises:
            OSError: the process has no file descriptors left.
        """
        self._timeout = timeout
        self.is_forked_copy = False
        self._changed = threading.Condition()
        self._locked = _Locked(self._changed)
        self._polls: int | None = None  # the thread that is in `poll`, on behalf of all that wait
        self._closed = ""  # the reason, once closed
        self._files: set[int] = set()
        # The callback gets the set, not `self`: a finalizer that refers to its object keeps it alive forever.
        # Not at exit: a slower peer may still confirm what this rank gave it in its last step, and what this rank drops
        # while the interpreter ends waits for that (`pending.py`). The system closes the files of a process that ended.
        weakref.finalize(self, _close_all, self._files).atexit = False
        self._peers = {other: _Peer(other, *self._pipe()) for other in ranks if other != rank}
        self._wake, self._bell = self._pipe()
        _ALL.add(self)
        self._poller = select.poll()
        self._poller.register(self._wake, select.POLLIN)
        for peer in self._peers.values():
            os.set_blocking(peer.inbox, False)
            self._poller.register(peer.inbox, select.POLLIN)

    def card(self, ranks: Sequence[int]) -> Card:
        """What the peers need to open their writing ends, in the order of `ranks`."""
        ends = [self._peers[rank].own_end if rank in self._peers else None for rank in ranks]
        return [[] if end is None else [end, os.fstat(end).st_ino] for end in ends]

    def connect(self, found: Mapping[int, tuple[int, list[int]]]) -> None:
        """Open the writing ends of the pipes that lead to the peers.

        Args:
            found: global rank -> its process number and the entry of its card for this rank.

        Raises:
            OSError: a pipe cannot be opened.
        """
        for rank, (pid, (end, inode)) in found.items():
            name = f"pipe:[{inode}]"
            self._peers[rank].outbox = outbox = open_of_peer(pid, end, name, name, os.O_WRONLY | os.O_NONBLOCK)
            self._files.add(outbox)

    def start(self) -> None:
        """Call this when all peers have opened their ends. From now on a pipe ends when its peer's process ends."""
        # As long as this process has a writing end itself, the kernel reports no end of file when the peer dies, and
        # waits would last until the timeout.
        for peer in self._peers.values():
            self._release(peer.own_end)

    def send(self, rank: int, channel: int, tensor: Tensor) -> Sent:
        """Write a message. Returns when all of it is in the pipe; the tensor may then change.

        Raises:
            PeerGone: the peer has ended, or does not read within the timeout.
            RuntimeError: this process is a forked copy.
        """
        assert tensor.is_contiguous()
        return self.send_bytes(rank, channel, ctypes.string_at(tensor.data_ptr(), tensor.nbytes))

    def send_bytes(self, rank: int, channel: int, message: bytes) -> Sent:
        """`send` for a message that is no tensor."""
        self._expect_original()
        peer = self._peers[rank]
        data = _HEADER.pack(channel, len(message)) + message
        patience: Patience | None = None  # hardly ever needed, and this is called for every message
        with self._locked:
            # Through `unsent`: a full pipe takes a part of a message, and another thread may send before the rest.
            peer.unsent += data
            while peer.unsent:
                self._expect_open(peer)
                try:
                    peer.unsent = peer.unsent[_write(peer.outbox, peer.unsent) :]
                except BlockingIOError:
                    # The peer's pipe is full. The peer may itself be blocked in a write to this rank: unless this rank
                    # reads while it waits, neither continues.
                    patience = patience or Patience(self._timeout)
                    self._take_in(patience, peer, writes=True)
                except OSError as error:
                    raise PeerGone(f"connection to rank {rank} closed: {error}") from None
        return _SENT

    def receive(self, rank: int, channel: int, into: Tensor) -> Receive:
        """Post a receive. `into` is filled by `wait`, not when the message arrives.

        Raises:
            RuntimeError: this process is a forked copy.
        """
        assert into.is_contiguous()
        return self._post(channel, Receive(self, rank, into.nbytes, into), rank)

    def receive_bytes(self, rank: int, channel: int, num_bytes: int) -> Receive:
        """`receive` for a message that is no tensor: `take` returns it."""
        return self._post(channel, Receive(self, rank, num_bytes), rank)

    def _post(self, channel: int, receive: Receive, rank: int) -> Receive:
        self._expect_original()
        with self._locked:
            self._peers[rank].post(channel, receive)
        return receive

    def wait_until(self, is_there: Callable[[], bool], rank: int) -> None:
        """Read from the pipes until `is_there()`, which a message of rank `rank` makes true.

        Raises:
            PeerGone: the peer has ended, or nothing has arrived within the timeout.
            RuntimeError: this process is a forked copy.
        """
        if is_there():
            return
        self._expect_original()
        patience = Patience(self._timeout)
        with self._locked:
            while not is_there():
                self._expect_open(self._peers[rank])
                self._take_in(patience, self._peers[rank])

    def read(self) -> None:
        """Read what has come, without waiting."""
        if self.is_forked_copy:
            return
        with self._locked:
            if self._polls is None and not self._closed:  # a thread that polls reads it
                self._read(self._peers.values())

    def interrupt(self, why: str) -> None:
        """Make all waits here raise, in every thread, and also the waits of peers for this rank."""
        # The watch calls this before it ends the process. Garbage collection may have run a finalizer in a thread that
        # has the lock, and if that waits for what has failed, the lock never comes free.
        if not self.is_forked_copy and self._changed.acquire(timeout=_UNTIL_FREE):
            try:
                self._close(why)
            finally:
                self._changed.release()

    def close_copies(self) -> None:
        """In a forked copy of this process: close its copies of the pipes. Otherwise the peers would see the end of
        their pipes only when the copy has ended, too."""
        self.is_forked_copy = True
        _close_all(self._files)
        self._files.clear()

    def _expect_original(self) -> None:
        if self.is_forked_copy:
            raise InvalidState(FORKED)

    # Under the lock --------------------------------------------------------------------------------------------------

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Others, and garbage collection, may read and write meanwhile."""
        self._locked.holder = None
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
            self._locked.holder = threading.get_ident()

    def _take_in(self, patience: Patience, peer: _Peer, *, writes: bool = False) -> None:
        """Wait until something can be read (or written to the peer, if `writes`), or a second has passed, and read it.
        At most one thread polls, and reads for all threads that wait."""
        pause = patience.pause
        if not pause:
            # This process may have had no processor for all this time: then the message is there.
            if self._read(self._peers.values()):
                return
            self._close(f"timed out after {self._timeout:.0f} s")
            raise PeerGone(f"timed out waiting for rank {peer.rank}: nothing came for {self._timeout:.0f} s")
        if self._polls not in (None, threading.get_ident()):
            self._changed.wait(min(pause, _SHORT) if writes else pause)
            self._locked.holder = threading.get_ident()  # another thread had the lock
            return
        # This thread may be here already, just before its poll: garbage collection can run a `__del__` that waits. To
        # wait for another thread to poll would be to wait forever.
        before = self._polls
        try:
            self._polls = threading.get_ident()
            if writes:
                self._poller.register(peer.outbox, select.POLLOUT)
            with self._unlocked():
                ready = {file for file, _ in self._poller.poll(1000 * pause)}
        finally:
            if writes:
                with suppress(KeyError):  # interrupted before it was registered
                    self._poller.unregister(peer.outbox)
            self._polls = before
            self._changed.notify_all()
        self._read(other for other in self._peers.values() if other.inbox in ready)

    def _read(self, peers: Iterable[_Peer]) -> bool:
        """Read from the pipes of these peers; returns whether there was anything."""
        found = [peer for peer in peers if not peer.is_gone and peer.read()]
        for peer in found:
            if peer.is_gone:
                self._poller.unregister(peer.inbox)
        return bool(found)

    def _expect_open(self, peer: _Peer) -> None:
        if self._closed:
            raise PeerGone(f"connection to rank {peer.rank} closed: {self._closed}")
        if peer.is_gone:
            raise PeerGone(f"connection closed by rank {peer.rank}")

    def _close(self, why: str) -> None:
        """Close the writing ends, so that the peers see the end of their pipes."""
        if not self._closed:
            self._closed = why
            _write(self._bell, b"!")  # ends the poll of the thread that is in it
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


def _write(file: int, data: bytes) -> int:
    """`os.write`, which fails if nobody reads any longer, whatever the process does on SIGPIPE."""
    # Python ignores SIGPIPE. But scripts whose output is piped to `head` restore its default, which ends the process
    # without a message. Sockets have MSG_NOSIGNAL for this; pipes have nothing like it. `signal.getsignal` does not
    # tell: after a fork by `subprocess`, which restores defaults, it still returns SIG_IGN.
    blocked = _set_mask(signal.SIG_BLOCK, _SIGPIPE)
    try:
        return os.write(file, data)
    except BrokenPipeError:
        signal.sigtimedwait(_SIGPIPE, 0)  # take back the signal of this write
        raise
    finally:
        _set_mask(signal.SIG_SETMASK, blocked)


_SIGPIPE = (signal.SIGPIPE,)
_set_mask = _signal.pthread_sigmask
"""`signal.pthread_sigmask`, which takes three times as long, as it makes an enum of each number."""


def _close_all(files: set[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)


_ALL: Living[Pipes] = Living()
"""The pipes of this process, connected or not."""


def _close_copies() -> None:
    for pipes in _ALL.all():
        pipes.close_copies()


os.register_at_fork(after_in_child=_close_copies)


def interrupt_all() -> None:
    """Make every wait for a pipe in this process raise, in all threads: a rank has failed."""
    for pipes in _ALL.all():
        pipes.interrupt("a rank has failed")
