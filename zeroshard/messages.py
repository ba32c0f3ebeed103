"""What ranks say to each other beside the data: which unit this is, where it lies, and that it has been read (gloo)."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard import watch
from zeroshard.mesh import Axis
from zeroshard.shared_memory import Location

_TAGS = {
    "all_gather": 1,
    "reduce_scatter": 2,
    "replicate": 3,
    "exchange": 4,
    "all_to_all": 5,
    "read": 6,
    "tell all_gather": 7,
    "tell reduce_scatter": 8,
}
"""Point-to-point tags: messages of one kind arrive in order, kinds do not wait for each other."""


_ON_REQUEST = ("unshard", "state")


def label(unit: str, phase: str) -> str:
    """What is gathered, in a message: weights for the training, or something of the unit that was asked for."""
    return f"{unit} ({phase})" if phase in _ON_REQUEST else unit


@dataclass(eq=False)
class Told:
    """Messages between all ranks of an axis: which unit this is, and where it lies. `works`: not yet waited for."""

    axis: Axis
    kind: str
    unit: str
    num_bytes: int
    works: list[Any]
    messages: dict[int, Tensor]

    def arrive(self) -> None:
        while self.works:  # a work must not be waited for twice
            self.works.pop().wait()


class OutOfOrder(RuntimeError):
    """This rank and a peer are not at the same unit."""


class Messages:
    """Of one rank of a mesh.

    Attributes:
        rank: of this process in the world.
        failed: whether something was waited for in vain.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.failed = False
        self._unit_names: dict[int, str] = {}
        self._unheard: dict[str, deque[Told]] = {}

    def tell(self, axis: Axis, location: Location | None, kind: str, unit: str, num_bytes: int) -> Told:
        """Tell all peers which unit this is, how many bytes of it (and where to read it, if they can), and hear it of
        them."""
        where = astuple(location) if location is not None else (0, 0, 0, 0)
        mine = torch.tensor([*where, num_bytes, self._number_of(unit)], dtype=torch.int64)
        peers = [rank for rank in range(axis.size) if rank != axis.rank]
        messages = {rank: torch.empty_like(mine) for rank in peers}
        works = [receive(axis, messages[rank], rank, f"tell {kind}") for rank in peers]
        works += [send(axis, mine, rank, f"tell {kind}") for rank in peers]
        told = Told(axis, kind, unit, num_bytes, works, messages)
        self._unheard.setdefault(kind, deque()).append(told)
        return told

    def hear(self, told: Told) -> None:
        """Wait for these messages, and for those of the same kind before them: who is on another path is noticed at the
        first one that differs, before anybody waits for something that will never come.

        Raises:
            OutOfOrder: a peer is at another unit.
        """
        unheard = self._unheard[told.kind]
        while told in unheard:
            first = unheard.popleft()
            first.arrive()
            for rank, message in first.messages.items():
                number = int(message[-1])
                if number != self._number_of(first.unit):
                    theirs = self._unit_names.get(number, "one that this rank does not have")
                    raise OutOfOrder(
                        f"{told.kind}: rank {self.rank} is at unit {first.unit}, rank "
                        f"{told.axis.ranks[rank]} at unit {theirs}. Nothing has been updated. Every rank must run the "
                        "same units in the same order; state_dict, save and load are collective, too"
                    )
                if int(message[-2]) != first.num_bytes:
                    raise OutOfOrder(
                        f"{told.kind}: rank {self.rank} gathers {first.num_bytes} bytes of unit {first.unit}, rank "
                        f"{told.axis.ranks[rank]} {int(message[-2])} bytes. Nothing has been updated. Every rank must "
                        "run the same units in the same order; state_dict, save and load are collective, too"
                    )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """An error inside means that the ranks no longer expect the same messages.

        Raises:
            LostPeer: in place of an error of gloo's, where the watch knows whose end has caused it.
        """
        try:
            yield
        except BaseException as error:
            self.failed = True
            ours = isinstance(error, OutOfOrder) or not isinstance(error, RuntimeError)
            lost = None if ours else watch.explain(error)
            if lost is not None:
                raise lost from error
            raise

    def introduce(self, unit: str) -> None:
        """Whose name a message may carry."""
        for phase in ("forward", *_ON_REQUEST):
            self._number_of(label(unit, phase))

    def acknowledge(self, axis: Axis) -> list[Any]:
        """Tell all peers that their memory has been read; the works are done when they have said so too."""
        peers = [rank for rank in range(axis.size) if rank != axis.rank]
        tokens = torch.empty(axis.size, 1, dtype=torch.uint8)
        works = [receive(axis, tokens[rank], rank, "read") for rank in peers]
        return works + [send(axis, tokens[axis.rank], rank, "read") for rank in peers]

    def _number_of(self, unit: str) -> int:
        number = zlib.crc32(unit.encode())
        self._unit_names[number] = unit
        return number


def send(axis: Axis, tensor: Tensor, rank: int, kind: str) -> Any:
    return axis.group.send([tensor], rank, _TAGS[kind])


def receive(axis: Axis, tensor: Tensor, rank: int, kind: str) -> Any:
    return axis.group.recv([tensor], rank, _TAGS[kind])
