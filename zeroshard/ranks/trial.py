"""The trial at the start: whether each rank can read the others' memory, and write to their pipes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.errors import SystemRefused
from zeroshard.ranks.backends import timeout_of
from zeroshard.ranks.pipes import Card, Pipes
from zeroshard.ranks.shared_memory import NOWHERE, Location, Process, SharedMemory

_CONNECTED: weakref.WeakKeyDictionary[Any, Pipes] = weakref.WeakKeyDictionary()
"""The pipes of each group whose ranks share memory."""


class Probe:
    """Tests whether all ranks can read each other's memory, with one small segment per rank: the owner writes its
    identity, every peer that finds it there writes its own beside it, and the owner checks that all have."""

    def __init__(self, shared: SharedMemory, rank: int, num_ranks: int) -> None:
        """
        Raises:
            SystemRefused: this process may not open more files.
        """
        self._shared, self._rank = shared, rank
        self._segment = torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            self._segment = shared.allocate(8 * num_ranks)
        except SystemRefused:
            raise
        except (OSError, RuntimeError, AttributeError):  # the system has no such memory, or no /proc: nobody finds it
            pass
        self._slots = self._segment.view(torch.int64)
        if self._slots.numel():
            self._slots[rank] = shared.process.identity  # a peer that finds another number has mapped a wrong process

    def card(self) -> list[int]:
        """What a peer needs to find the segment: [pid, identity, *location]."""
        location = self._shared.locate(self._slots) if self._slots.numel() else NOWHERE
        assert location is not None
        return [*astuple(self._shared.process), *location]

    def answer(self, cards: Sequence[list[int]]) -> bool:
        """Write the own identity into the segment of each peer. False if a segment cannot be found, or there is none
        of this rank."""
        if not self._slots.numel():
            return False
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
        """Whether all peers have written their identity here. Call it after all peers have run `answer`."""
        return self._slots.tolist() == [identity for _, identity, *_ in cards]


def make_pipes(group: dist.ProcessGroup, rank: int, ranks: Sequence[int]) -> Pipes | None:
    """The pipes of global rank `rank` to the others of a group; None if it has no file descriptors left: then all
    messages go through gloo."""
    with suppress(OSError):
        return Pipes(rank, ranks, timeout_of(group, torch.device("cpu")).total_seconds())
    return None


def connect(pipes: Pipes | None, rank: int, processes: Mapping[int, Process], cards: Sequence[Card | None]) -> bool:
    """Open the pipes to all other ranks. Returns whether that worked.

    Args:
        processes: by global rank.
        cards: of these ranks, in the same order; None: the rank has no pipes.
    """
    place, found = [*processes].index(rank), {}
    for (other, process), card in zip(processes.items(), cards, strict=True):
        if card is None:
            return False
        if other != rank:
            found[other] = process.pid, card[place]
    assert pipes is not None, "all have a card"
    with suppress(OSError):
        pipes.connect(found)
        return True
    return False


def start(pipes: Pipes, group: dist.ProcessGroup, processes: Mapping[int, Process]) -> None:
    """Take the pipes into use, for all meshes of the group. Call it only if `connect` returned True on all ranks."""
    pipes.start()
    pipes.processes = processes
    _CONNECTED[group] = pipes


def connected(group: dist.ProcessGroup) -> Pipes | None:
    """The pipes of a process group, which all its meshes share; None before its first mesh, and in a forked copy of
    this process."""
    found = _CONNECTED.get(group)
    return None if found is None or found.is_forked_copy else found
