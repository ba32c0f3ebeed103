"""Which collectives the ranks have reached, and whether they wait for each other forever.

A rank that waits says for which collective: the n-th of a kind. It *needs* every member that has not begun that one
yet, if that member waits too or has left. Ranks that need each other in a circle, and a rank that needs one that has
left, wait forever:

    rank 0   if rank == 0: optimizer.state_dict()    waits for gather 7;  rank 1 has begun 6
    rank 1   dist.barrier()                          waits for rank 0, which is not there
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any

import torch.distributed as dist

LONG_SECONDS = 2.0
"""A wait that the others are told of."""

_SYNCHRONISING = {
    *("barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single"),
    *("all_gather_object", "all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor"),
    "reduce_scatter_single",
}
"""Functions of torch.distributed that come back when all members have called them."""


@dataclass(frozen=True)
class Wait:
    """For the collective number `number` (from 0) of the kind `key`, among the global ranks `ranks`; `text` says it in
    words. Of a function of torch.distributed `number` is -1."""

    key: str
    number: int
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Position:
    """Of a rank that has been waiting for long. `begun`: how many collectives of each kind."""

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
    """What tells these ranks from others: "0-16383", "0-56:8" where each is 8 after the one before, else all of
    them."""
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
    """Of this process."""

    begun: Counter[str] = field(default_factory=Counter)
    _wait: Wait | None = None
    _since: float = 0.0
    _meshes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _foreign: tuple[object, float] = (None, 0.0)

    def name_of_mesh(self, ranks: tuple[int, ...]) -> str:
        """The same on all its ranks, and another for each: ranks build their handles in one order."""
        self._meshes[ranks] += 1
        return f"{self._meshes[ranks]} of {in_short(ranks)}"

    def begin(self, key: str) -> int:
        """The number of a collective that begins here."""
        number = self.begun[key]
        self.begun[key] = number + 1
        return number

    def begin_wait(self, wait: Wait | None) -> tuple[Wait | None, float]:
        """It waits from now on (None: for nothing new). Returns what `end_wait` takes."""
        before = self._wait, self._since
        if wait is not None:
            self._wait, self._since = wait, time.monotonic()
        return before

    def end_wait(self, before: tuple[Wait | None, float]) -> None:
        self._wait, self._since = before

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        before = self.begin_wait(wait)
        try:
            yield
        finally:
            self.end_wait(before)

    @property
    def wait(self) -> Wait | None:
        return self._wait

    def position(self, main: FrameType | None) -> Position | None:
        """Where nothing has moved for long. `main`: of the main thread, which may wait in torch.distributed itself."""
        wait, since = self._wait, self._since
        if wait is None:
            wait, frame = _foreign_wait(main)
            if self._foreign[0] is not frame:
                self._foreign = frame, time.monotonic()
            since = self._foreign[1]
        if wait is None or time.monotonic() - since < LONG_SECONDS:
            return None
        return Position(wait, dict(self.begun))


HERE = Here()
"""A process is at one place at a time, whoever asks."""


def knot(positions: Mapping[int, Position], left: Mapping[int, Mapping[str, int]]) -> list[int]:
    """Ranks that wait for each other in a circle, or one that waits for a rank that has left, and this; in order. Empty
    where it cannot be said that anybody waits in vain.

    Args:
        positions: of the ranks that wait.
        left: of the ranks that have ended their work: how many collectives of each kind they had begun.
    """
    needs = _needs(positions, left)
    for rank, needed in sorted(needs.items()):
        gone = [other for other in needed if other in left]
        if gone:
            return sorted({rank, gone[0]})
        path = _way_back(rank, needs)
        if path:
            return sorted(path)
    return []


def _way_back(start: int, needs: Mapping[int, Sequence[int]]) -> list[int]:
    """A way from a rank to itself, by those that are needed."""
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
    """Whom each rank waits for. All that wait for the same need the same: they are looked at once."""
    of_waits: dict[tuple[str, int, int], list[int]] = {}
    needs = {}
    for rank, position in positions.items():
        wait = position.wait
        key = wait.key, wait.number, id(wait.ranks)  # to hash them all takes long
        if key not in of_waits:
            of_waits[key] = _needed(wait, positions, left)
        needs[rank] = of_waits[key]
    return needs


def _needed(wait: Wait, positions: Mapping[int, Position], left: Mapping[int, Mapping[str, int]]) -> list[int]:
    """Whom those that wait there wait for, as far as they wait themselves or have left."""
    begun = {**{other: position.begun for other, position in positions.items()}, **left}
    if wait.number >= 0:
        return [rank for rank in wait.ranks if rank in begun and begun[rank].get(wait.key, 0) <= wait.number]
    elsewhere = [rank for rank in wait.ranks if rank not in positions or positions[rank].wait.key != wait.key]
    return elsewhere if all(rank in begun for rank in elsewhere) else []  # else somebody is on the way


def _foreign_wait(frame: FrameType | None) -> tuple[Wait | None, FrameType | None]:
    """In a function of torch.distributed that somebody else than this engine has called."""
    while frame is not None:
        code = frame.f_code
        # By the stack: nothing of torch is patched in order to hear of collectives that are not the engine's.
        if code.co_name in _SYNCHRONISING and code.co_filename.endswith("distributed_c10d.py"):
            group = frame.f_locals.get("group")
            ranks = dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD)
            text = f"torch.distributed.{code.co_name}"
            return Wait(text, -1, tuple(ranks), text), frame
        frame = frame.f_back
    return None, None
