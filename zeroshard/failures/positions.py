"""Which collectives the ranks have reached, and whether they wait for each other forever.

A waiting rank reports which collective it waits for: the n-th of a kind. It *needs* every member that has not begun
that collective and that itself waits or has left. Ranks that need each other in a circle, and a rank that needs one
that has left, wait forever:

    rank 0   if rank == 0: optimizer.state_dict()    waits for gather 7;  rank 1 has begun 6
    rank 1   dist.barrier()                          waits for rank 0, which is not there
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.failures.frames import calls_of, frames_of, variables_of

LONG_SECONDS = 2.0
"""A rank that has waited for this long reports its position."""

_SYNCHRONISING = {
    *("barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single"),
    *("all_gather_object", "all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor"),
    *("reduce_scatter_single", "destroy_process_group"),
}
"""Functions of torch.distributed that return only when all members of the group have called them. (With NCCL
`destroy_process_group` waits for what has been queued. A rank that fails may call it in a `finally`, and its error is
printed only after that.)"""
_OF_ONE = dict.fromkeys(("broadcast", "broadcast_object_list", "scatter", "scatter_object_list"), "group_src")
_OF_ONE |= dict.fromkeys(("reduce", "gather", "gather_object"), "group_dst")
"""Functions of torch.distributed in which one rank sends to all, or all to one, and the variable that has this rank. A
rank that is not in one may have left it long ago: only the numbers of calls show that it has not come."""
_WORLD = "calls of the default group"
"""The key of these numbers. It is absent where they are not known."""
_SEEN = "seen by zeroshard since"
"""The name, among the variables of a call of torch.distributed, of the time at which it was first seen."""
_COUNTED = ("all_gather", "reduce_scatter", "all_to_all")
"""Kinds of collectives of which all ranks have begun the same number when they come to an exchange among all."""


@dataclass(frozen=True)
class Wait:
    """A wait for collective number `number` (from 0) of the kind `key`, among the global ranks `ranks`; `text` names it
    for people. For a function of torch.distributed that needs all its members there, `number` is -1."""

    key: str
    number: int
    ranks: tuple[int, ...]
    text: str

    def until_read(self) -> Wait:
        """The wait until the peers have read what this rank gave: a peer that has begun the collective may still wait
        elsewhere before it reads."""
        return Wait(f"read_{self.key}", self.number, self.ranks, f"{self.text}, until the other ranks have read it")


@dataclass(frozen=True)
class Position:
    """The position of a rank that has waited for long. `begun`: how many collectives of each kind it has begun."""

    wait: Wait
    begun: Mapping[str, int]

    def as_list(self) -> list[Any]:
        wait = self.wait
        return [wait.key, wait.number, in_short(wait.ranks), wait.text, dict(self.begun)]

    @classmethod
    def of(cls, found: Sequence[Any]) -> Position:
        key, number, ranks, text, begun = found
        return cls(Wait(key, number, _in_full(ranks), text), begun)


@lru_cache(maxsize=64)
def in_short(ranks: tuple[int, ...]) -> str:
    """These ranks in short: "0-16383"; "0-56:8" for steps of 8; else a list of all."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}{f':{step}' * (step > 1)}"
    return ",".join(map(str, ranks))


@lru_cache(maxsize=64)
def _in_full(text: str) -> tuple[int, ...]:
    start, dash, rest = text.partition("-")
    stop, _, step = rest.partition(":")
    return tuple(range(int(start), int(stop) + 1, int(step or 1)) if dash else map(int, text.split(",")))


@dataclass
class Here:
    """The position of this process.

    Attributes:
        begun: how many collectives of each kind this rank has begun.
        thread: the thread that has called the model, or begun a collective, last: usually the main thread.
        device_since: since when it waits for its device, where no error of a collective can end the wait; else None.
    """

    begun: Counter[str] = field(default_factory=Counter)
    thread: int = 0
    device_since: float | None = None
    _wait: Wait | None = None
    _since: float = 0.0
    _meshes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _ended: dict[tuple[int, ...], tuple[list[str], list[str]]] = field(default_factory=dict)

    def name_of_mesh(self, ranks: tuple[int, ...], user: object) -> tuple[str, list[str]]:
        """A name that is the same on all ranks of a mesh, and different for each mesh. (All ranks build their handles
        in the same order.) And the names whose counts are forgotten now, as their users are gone. `user`: of the new
        name."""
        # A rank whose peer has forgotten a mesh would take it for one that never comes there. So a name is forgotten
        # when two more meshes are built: the ranks have met for the first of these, and none is in the old one.
        old, ended = self._ended.setdefault(ranks, ([], []))
        forgotten, old[:] = list(old), [ended.pop() for _ in range(len(ended))]
        for key in [key for key in self.begun.copy() if any(f" {name} " in f"{key} " for name in forgotten)]:
            del self.begun[key]
        self._meshes[ranks] += 1
        name = f"{self._meshes[ranks]} of {in_short(ranks)}"
        weakref.finalize(user, ended.append, name).atexit = False
        return name, forgotten

    def begin(self, key: str) -> int:
        """Count a collective that begins here, and return its number."""
        self.note_thread()
        number = self.begun[key]
        self.begun[key] = number + 1
        return number

    def has_read(self, wait: Wait) -> None:
        """This rank has read what its peers gave to the collective of this wait. They wait in `Wait.until_read`."""
        key = f"read_{wait.key}"
        self.begun[key] = max(self.begun[key], wait.number + 1)

    def note_thread(self) -> None:
        """Set `thread` to the current one, but not to a thread of torch that runs a backward."""
        if torch._C._current_graph_task_id() == -1:
            self.thread = threading.get_ident()

    def begin_wait(self, wait: Wait | None) -> tuple[Wait | None, float]:
        """Note that this process waits from now on (None: no change). Returns the argument for `end_wait`."""
        before = self._wait, self._since
        if wait is not None:
            self._since, self._wait = time.monotonic(), wait  # in this order, as the watch reads them in the other one
        return before

    def end_wait(self, before: tuple[Wait | None, float]) -> None:
        self._wait, self._since = before

    @contextmanager
    def waiting(self, wait: Wait, *, on_device: bool = False) -> Iterator[None]:
        """`on_device`: see `device_since`."""
        before, since = self.begin_wait(wait), self.device_since
        self.device_since = self._since if on_device else since
        try:
            yield
        finally:
            self.end_wait(before)
            self.device_since = since

    @property
    def wait(self) -> Wait | None:
        return self._wait

    def position(self) -> Position | None:
        """The position, if this process has waited for long; else None. The main thread may also wait in a function of
        torch.distributed that this package has not called."""
        wait, since = self._wait, self._since
        if wait is None:
            wait, since = _foreign_wait(threading.main_thread().ident)
        if wait is None or time.monotonic() - since < LONG_SECONDS:
            return None
        return Position(wait, self.counts())

    def counts(self) -> dict[str, int]:
        """How many collectives of each kind this rank has begun, with those of torch's default group."""
        calls = _calls_of_world()
        return dict(self.begun) if calls is None else {**self.begun, _WORLD: calls}


HERE = Here()
"""One per process: all handles count here."""


class _OnWatch(threading.local):
    """`here`: whether this thread is one of the watch. It must wait for no other rank: while it does, it sends no
    heartbeat."""

    here = False


ON_WATCH = _OnWatch()


def knot(positions: Mapping[int, Position], left: Mapping[int, Mapping[str, int]]) -> list[int]:
    """The ranks of a deadlock, sorted: ranks that wait for each other in a circle, or a rank and the rank that it waits
    for and that has left. Empty if no deadlock is certain.

    Args:
        positions: of the ranks that wait.
        left: for ranks whose work has ended: how many collectives of each kind they had begun.
    """
    needs = _needs(positions, left)
    for rank, needed in sorted(needs.items()):
        gone = [other for other in needed if other in left]
        if gone:
            return sorted({rank, gone[0]})
        path = _way_back(rank, needs)
        if path:
            return sorted(path)
    return _apart(positions)


def _apart(positions: Mapping[int, Position]) -> list[int]:
    """Two ranks that have begun different numbers of collectives of one kind, and wait in the same exchange, as all
    ranks do: on a device, where nothing compares what ranks have begun, it never ends."""
    waits = {(position.wait.key, position.wait.number): position.wait for position in positions.values()}
    for (key, number), wait in waits.items():
        there = {rank: positions[rank] for rank in wait.ranks if rank in positions}
        are_here = all((one.wait.key, one.wait.number) == (key, number) for one in there.values())
        if not key.startswith("exchange ") or len(there) < len(wait.ranks) or not are_here:
            continue
        first = wait.ranks[0]
        for rank, position in there.items():
            if counted(position) != counted(there[first]):
                return sorted([first, rank])
    return []


def counted(position: Position) -> dict[str, int]:
    """Kind -> how many collectives of that kind a rank has begun on the mesh for which it waits."""
    mesh = position.wait.key.partition(" ")[2]
    return {kind: position.begun.get(f"{kind} {mesh}", 0) for kind in _COUNTED}


def _way_back(start: int, needs: Mapping[int, Sequence[int]]) -> list[int]:
    """A path from a rank back to itself along needed ranks; empty if there is none."""
    ways, seen = [[start]], set[int]()
    while ways:
        way = ways.pop()
        for rank in reversed(needs.get(way[-1], ())):
            if rank == start:
                return way
            if rank not in seen:
                seen.add(rank)
                ways.append([*way, rank])
    return []


def _needs(positions: Mapping[int, Position], left: Mapping[int, Mapping[str, int]]) -> dict[int, list[int]]:
    """The ranks that each rank needs. Ranks that wait for the same collective need the same: computed once for all."""
    of_waits: dict[tuple[str, int, int], list[int]] = {}
    needs = {}
    for rank, position in positions.items():
        wait = position.wait
        key = wait.key, wait.number, id(wait.ranks)  # by identity: hashing thousands of ranks takes long
        if key not in of_waits:
            of_waits[key] = _needed(wait, positions, left)
        needs[rank] = of_waits[key]
    return needs


def _needed(wait: Wait, positions: Mapping[int, Position], left: Mapping[int, Mapping[str, int]]) -> list[int]:
    """The ranks that a rank in this wait needs: they have not begun it, and wait elsewhere or have left."""
    begun = {**{other: position.begun for other, position in positions.items()}, **left}
    if wait.number >= 0:
        unknown = wait.number + 1 if wait.key == _WORLD else 0
        return [rank for rank in wait.ranks if rank in begun and begun[rank].get(wait.key, unknown) <= wait.number]
    elsewhere = [rank for rank in wait.ranks if rank not in positions or positions[rank].wait.key != wait.key]
    return elsewhere if all(rank in begun for rank in elsewhere) else []  # else a running rank may still come


def _foreign_wait(thread: int | None) -> tuple[Wait | None, float]:
    """The wait in a function of torch.distributed that the program has called, and when it was first asked for. Found
    on the stack, so that torch need not be patched to see collectives that are not the engine's."""
    if not any(_is_foreign(code) for code, _ in calls_of(thread)):
        return None, 0.0
    frame = next((frame for frame in frames_of(thread) if _is_foreign(frame.f_code)), None)
    if frame is None:  # it has returned meanwhile
        return None, 0.0
    # Noted in the call itself: a reference to its frame would keep the variables of all its callers after their return.
    name, variables = frame.f_code.co_name, variables_of(frame)
    since = float(variables.get(_SEEN, time.monotonic()))
    variables[_SEEN] = since
    group = variables.get("group")
    group = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    if group is None:  # it has been destroyed
        return None, 0.0
    if name not in _SYNCHRONISING:
        return _wait_of_one(name, group, variables.get(_OF_ONE[name])), since
    text = f"torch.distributed.{name}"
    return Wait(text, -1, tuple(dist.get_process_group_ranks(group)), text), since


def _is_foreign(code: CodeType) -> bool:
    is_one = code.co_name in _SYNCHRONISING or code.co_name in _OF_ONE
    return is_one and code.co_filename.endswith("distributed_c10d.py")


def _wait_of_one(name: str, group: dist.ProcessGroup, one: object) -> Wait | None:
    """The wait in a function of `_OF_ONE`: of the rank `one` for the others, or of another rank for that one. None in a
    group whose calls are not counted."""
    calls = _calls_of_world()
    if calls is None or group is not dist.group.WORLD or not isinstance(one, int):
        return None
    ranks = (one,) if one != dist.get_rank() else tuple(rank for rank in range(dist.get_world_size()) if rank != one)
    return Wait(_WORLD, calls - 1, ranks, f"torch.distributed.{name}")


def _calls_of_world() -> int | None:
    """How many functions of torch.distributed this rank has called on the default group; None if it is not known.
    (Gloo counts messages from rank to rank, too.)"""
    group: Any = dist.group.WORLD
    if group is None:
        return None
    try:
        backends = [group._get_backend(device) for device in group._device_types]  # maybe one for several devices
        numbers = {id(backend): int(backend._get_sequence_number_for_group()) for backend in backends}
        return sum(numbers.values())
    except (RuntimeError, AttributeError):  # a backend without such a number
        return None
