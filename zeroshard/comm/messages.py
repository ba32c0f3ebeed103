"""Messages between ranks beside the data (gloo): which unit comes next, where it lies, and that it has been read."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroshard.errors import Error, InvalidState
from zeroshard.failures import watch
from zeroshard.failures.blame import SAME_UNITS
from zeroshard.failures.positions import HERE, Wait
from zeroshard.ranks.living import Living
from zeroshard.ranks.mesh import Axis
from zeroshard.ranks.pipes import FORKED, MOST_BYTES, PeerGone, Pipes, is_by_pipe
from zeroshard.ranks.shared_memory import NOWHERE, Location

_WORDS = struct.Struct("=6q")
"""An announcement: the location (4 words), a number of bytes, and what it is about."""
_READ, _IN_DOUBT = b"\0", b"\1"

ON_REQUEST = {"unshard": "its weights, which a call has asked for", "state": "the optimizer's state"}


def labels(unit: str) -> list[str]:
    """All labels of one unit."""
    return [label(unit, phase) for phase in ("", *ON_REQUEST)]


def label(unit: str, phase: str = "") -> str:
    """The name of an exchange in a message: the unit, and what a call has asked for ("" is training itself)."""
    return f"unit {unit}{f' ({ON_REQUEST[phase]})' if phase in ON_REQUEST else ''}"


class Note(Protocol):
    """A few bytes on their way from a peer."""

    def take(self) -> bytes:
        """Wait for them, and return them."""


class NoteByGloo:
    """A note that gloo receives. `work`: of the receive into `tensor`, uint8."""

    def __init__(self, tensor: Tensor, work: Any) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> None:
        # Removed before the wait: each wait for a message of gloo consumes one completion, and a second wait for the
        # same work would last until the timeout.
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def take(self) -> bytes:
        self.wait()
        return ctypes.string_at(self._tensor.data_ptr(), self._tensor.nbytes)


@dataclass(eq=False)
class Announcement:
    """What this rank has announced to its peers on an axis, and what they announce: a `label` or a point of the
    program, a number of bytes, and a location.

    Attributes:
        number: of `about`, in messages.
        notes: from the peers, by their rank in the axis.
        works: sends and receives that have not been waited for.
    """

    axis: Axis
    kind: str
    about: str
    number: int
    num_bytes: int
    notes: dict[int, Note]
    works: list[Any]

    def words(self, rank: int) -> tuple[int, ...]:
        """What a rank of the axis has announced, once it has arrived: see `_WORDS`."""
        return _WORDS.unpack(self.notes[rank].take())

    def location(self, rank: int) -> Location:
        """Where the memory of a rank of the axis lies, once its note has arrived."""
        return Location(*self.words(rank)[:4])

    def arrive(self) -> None:
        # Removed before the wait, as in `NoteByGloo.wait`: an error must not lead to a second one.
        while self.works:
            self.works.pop().wait()

    @property
    def has_arrived(self) -> bool:
        """Whether `arrive` returns at once. False where this is not known without waiting: works of gloo."""
        # (A list, as a generator takes twice as long, and this is asked at each gradient.)
        return False not in [getattr(work, "has_arrived", False) for work in self.works]


class Doubts:
    """What is not certain about the values that ranks read from each other: whether all are finite.

    Attributes:
        are_here: whether this rank has doubts.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        """`look`: looks at the values of this rank, once, if any rank has doubts."""
        self._look: Callable[[], None] | None = look
        self.are_here = False

    def __call__(self) -> None:
        """This rank has doubts."""
        self.are_here = True
        self.look()

    def look(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            look()


class Read:
    """The work of an acknowledgement, which may come with doubts."""

    def __init__(self, note: Note, doubts: Doubts) -> None:
        self.note, self._doubts = note, doubts

    def wait(self) -> None:
        if self.note.take() == _IN_DOUBT:
            self._doubts.look()


class OutOfOrder(Error, RuntimeError):
    """This rank and a peer are not at the same unit."""


class Failing:
    """Around a wait: marks the messages as failed if it raises, as the ranks no longer expect the same messages.

    Raises:
        LostPeer: in place of an error of gloo, if the watch knows which rank's end has caused it.
    """

    def __init__(self, messages: Messages, at: Wait | None = None) -> None:
        """`at`: what is waited for, for the watch."""
        self._messages, self._at = messages, at

    def __enter__(self) -> None:
        if self._messages.pipes is None:  # else what has come can be read in a copy, too
            self._messages.expect_original()
        self._before = HERE.begin_wait(self._at)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            HERE.end_wait(self._before)
            return
        self._messages.failed = True
        ours = isinstance(error, OutOfOrder) or not isinstance(error, RuntimeError)
        lost = None if ours else watch.explain(error)  # says what this rank waits for
        HERE.end_wait(self._before)
        if lost is not None:
            raise lost from None  # else gloo's message would be printed first, and it names no rank


class Messages:
    """The messages of one rank of a mesh.

    Attributes:
        rank: the global rank of this process.
        name: of the mesh, the same on all its ranks.
        failed: whether a wait has failed. Then the ranks no longer expect the same messages.
        is_forked_copy: whether this process was forked from the rank. It has none of gloo's threads: a message would
            never come.
        pipes: carry the small messages if all ranks are on one host; None: all messages go through gloo.
    """

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.failed = self.is_forked_copy = False
        _ALL.add(self)
        self.pipes: Pipes | None = None
        self._channels: dict[tuple[tuple[int, ...], str], int] = {}
        self._numbers: dict[str, int] = {}
        self._known: dict[int, str] = {}
        self._points_of_steps: set[str] = set()
        self._not_compared: dict[str, deque[Announcement]] = {}
        self._kept: list[Any] = []

    def announce(self, axis: Axis, kind: str, about: str, num_bytes: int, location: Location = NOWHERE) -> Announcement:
        """Tell all peers which exchange begins (`about`), how many bytes it has, and where to read them (shared
        memory); and start to receive the same from the peers."""
        number = self._number_of(about)
        mine = _WORDS.pack(*location, num_bytes, number)
        channel = self._channel(axis, f"announce {kind}")
        notes = {rank: self._expect_note(axis, _WORDS.size, rank, channel) for rank in axis.peers}
        works: list[Any] = [*notes.values()]
        try:
            for rank in axis.peers:
                self._send_note(axis, mine, rank, channel, works)
        except PeerGone as error:
            raise watch.explain(error) or error from None
        announced = Announcement(axis, kind, about, number, num_bytes, notes, works)
        self._not_compared.setdefault(kind, deque()).append(announced)
        return announced

    def compare(self, announced: Announcement) -> None:
        """Wait for the peers' announcements of this exchange and of all earlier ones of its kind, and compare them with
        this rank's. So ranks on different paths raise at the first difference, instead of waiting for data that will
        never come.

        Raises:
            OutOfOrder: a peer is at another unit.
        """
        not_compared = self._not_compared[announced.kind]
        # In the order of announcement: messages of one kind arrive in order, even if a later exchange is waited for
        # first.
        while announced in not_compared:
            first = not_compared.popleft()
            first.arrive()
            for rank in first.notes:
                *_, num_bytes, number = first.words(rank)
                if number != first.number:
                    theirs = self._known.get(number, "something that this rank does not have")
                    raise OutOfOrder(self._apart(announced, rank, f"at {first.about}", f"at {theirs}"))
                if num_bytes != first.num_bytes:
                    sizes = [f"at {size} bytes of {first.about}" for size in (first.num_bytes, num_bytes)]
                    raise OutOfOrder(self._apart(announced, rank, *sizes))

    def _apart(self, announced: Announcement, other: int, mine: str, theirs: str) -> str:
        """`other`: a rank of the axis."""
        peer = announced.axis.ranks[other]
        updates = any(point in mine + theirs for point in self._points_of_steps)
        state = "Some ranks have made their update: load a checkpoint" if updates else "Nothing has been updated"
        return (
            f"{announced.kind}: rank {self.rank} is {mine}{watch.where_is(self.rank)}; rank {peer} is {theirs}"
            f"{watch.where_is(peer)}. {state}. {SAME_UNITS}. "
            "Calls like full_state_dict, unsharded, state_dict, save and load are collective: make them on every rank"
        )

    def expect_original(self) -> None:
        """
        Raises:
            RuntimeError: this process is a forked copy of a rank.
        """
        if self.is_forked_copy:
            raise InvalidState(FORKED)

    def keep(self, works: Sequence[Any]) -> None:
        """Keep works that nobody waits for: gloo needs their receives when the messages come."""
        self._kept += [work for work in works if not is_by_pipe(work.note if isinstance(work, Read) else work)]

    def introduce(self, *abouts: str, updates: bool = False) -> None:
        """Register what a message may be about, so that its number can be turned into words. `updates`: these are
        points of a step; ranks that are not there have begun their update."""
        for about in abouts:
            self._number_of(about)
        self._points_of_steps.update(abouts if updates else ())

    def acknowledge(self, axis: Axis, kind: str, doubts: Doubts | None = None) -> list[Any]:
        """Tell all peers that this rank has read their memory in an exchange of this kind. The works are done when the
        peers have said the same. (Reductions are read at other moments on each rank, so their confirmations must not be
        taken for those of gathers.) `doubts`: of this rank, which are told; those of the peers are heard."""
        channel = self._channel(axis, f"read {kind}")
        note = _IN_DOUBT if doubts is not None and doubts.are_here else _READ
        works: list[Any] = [self._expect_note(axis, len(note), rank, channel) for rank in axis.peers]
        if doubts is not None:
            works = [Read(work, doubts) for work in works]
        for rank in axis.peers:
            # A peer may end right after its last step, while this rank still reads. It does not need to be told then;
            # where this rank needs anything else of it, the wait for that raises.
            with suppress(PeerGone):
                self._send_note(axis, note, rank, channel, works)
        return works

    def _send_note(self, axis: Axis, note: bytes, rank: int, channel: int, works: list[Any]) -> None:
        """`send` of a few bytes. What has to be waited for is added to `works`. Raises PeerGone as it is: not every
        caller needs the peer."""
        if self.pipes is not None:
            self.pipes.send_bytes(axis.ranks[rank], channel, note)
        else:
            works.append(self._send(axis, torch.frombuffer(bytearray(note), dtype=torch.uint8), rank, channel))

    def _expect_note(self, axis: Axis, num_bytes: int, rank: int, channel: int) -> Any:
        """`receive` of a few bytes: a `Note`, which is also the work to wait for."""
        if self.pipes is not None:
            try:
                return self.pipes.receive_bytes(axis.ranks[rank], channel, num_bytes)
            except RuntimeError as error:
                raise watch.explain(error) or error from None
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return NoteByGloo(tensor, self._receive(axis, tensor, rank, channel))

    def send(self, axis: Axis, tensor: Tensor, rank: int, kind: str) -> Any:
        """Send to a rank of an axis. Returns a work to wait for.

        Args:
            rank: in the axis.
            kind: messages of one kind arrive in order; messages of different kinds do not wait for each other.
        """
        return self._send(axis, tensor, rank, self._channel(axis, kind))

    def _send(self, axis: Axis, tensor: Tensor, rank: int, channel: int) -> Any:
        pipes = self._pipes_for(tensor)
        try:
            if pipes is not None:
                return pipes.send(axis.ranks[rank], channel, tensor)
            return axis.way(axis.rank, rank).send([tensor], rank, _tag(channel))
        except RuntimeError as error:  # the connection is closed already
            raise watch.explain(error) or error from None

    def receive(self, axis: Axis, tensor: Tensor, rank: int, kind: str) -> Any:
        """Receive from a rank of an axis, which must send exactly `tensor.nbytes`. Returns a work to wait for.

        Args:
            rank: in the axis.
            kind: messages of one kind arrive in order; messages of different kinds do not wait for each other.
        """
        return self._receive(axis, tensor, rank, self._channel(axis, kind))

    def _receive(self, axis: Axis, tensor: Tensor, rank: int, channel: int) -> Any:
        pipes = self._pipes_for(tensor)
        try:
            if pipes is not None:
                return pipes.receive(axis.ranks[rank], channel, tensor)
            return axis.way(rank, axis.rank).recv([tensor], rank, _tag(channel))
        except RuntimeError as error:
            raise watch.explain(error) or error from None

    def _pipes_for(self, tensor: Tensor) -> Pipes | None:
        # Sender and receiver must choose the same way, so choose only by what both of them know: the size.
        return self.pipes if tensor.nbytes <= MOST_BYTES else None

    def _channel(self, axis: Axis, kind: str) -> int:
        channel = self._channels.get((axis.ranks, kind))
        if channel is None:
            # The meshes of a group share its connections, so a channel must be unique over meshes. Not `hash()`: it
            # differs between processes.
            text = f"{self.name} {axis.ranks} {kind}"
            channel = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
            self._channels[axis.ranks, kind] = channel
        return channel

    def _number_of(self, about: str) -> int:
        number = self._numbers.get(about)
        if number is None:
            number = self._numbers[about] = zlib.crc32(about.encode())
            self._known[number] = about
        return number


_ALL: Living[Messages] = Living()
"""The messages of this process."""


def _mark_copies() -> None:
    for messages in _ALL.all():
        messages.is_forked_copy = messages.failed = True


os.register_at_fork(after_in_child=_mark_copies)


def _tag(channel: int) -> int:
    """gloo's tags have 31 bits."""
    return channel >> 33
