"""Two ranks in two containers, each of them process 1: each rank looked for its peer's memory under /proc/1/fd and
found its own. It gathered from itself and reduced with itself, and ended with exit status 0 but with other weights and
another norm than its peer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zeroshard
from tests.failures.hosts import on_hosts
from tests.kit import PLANS, Job, Outcome, same_bits, train
from zeroshard.ranks import shared_memory
from zeroshard.ranks.shared_memory import Process, SharedMemory
from zeroshard.ranks.trial import Probe
from zeroshard.testing import run_ranks


def train_all(rank: int) -> tuple[int, bool, list[Outcome]]:
    shared = zeroshard.shard(torch.nn.Linear(2, 2), "zero3").engine.collectives.transport.memory is not None
    return os.getpid(), shared, [train(Job(), plan, rank) for plan in PLANS]


def test_in_containers_with_equal_process_numbers_ranks_train_together() -> None:
    alone = on_hosts(train_all, [0, 1])
    assert alone.statuses == [0, 0], alone.said
    together = run_ranks(train_all, 2)
    (pid, shared, outcomes), (other_pid, _, others) = alone.values
    assert pid == other_pid and not shared, alone
    assert all(shared for _, shared, _ in together)
    for index in range(len(PLANS)):
        assert outcomes[index].norms == others[index].norms == together[0][2][index].norms
        assert same_bits(outcomes[index].weights, others[index].weights)
        assert same_bits(outcomes[index].weights, together[0][2][index].weights)


@pytest.fixture
def every_rank_is_process_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: the process id of every rank is 1, and /proc/1 is the rank itself."""
    number = os.getpid
    monkeypatch.setattr(shared_memory.os, "getpid", lambda: 1)
    for name in ("open", "readlink"):
        original = getattr(os, name)

        def redirected(path: Any, *args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            at_1 = isinstance(path, str) and path.startswith("/proc/1/")
            return original(path.replace("/proc/1/", f"/proc/{number()}/") if at_1 else path, *args, **kwargs)

        monkeypatch.setattr(shared_memory.os, name, redirected)
    mapped = shared_memory._map
    monkeypatch.setattr(shared_memory, "_map", lambda path, n: mapped(path.replace("/proc/1/", "/proc/self/"), n))


@pytest.mark.usefixtures("every_rank_is_process_1")
def test_a_rank_that_finds_its_own_memory_under_the_number_of_a_peer_does_not_share() -> None:
    """The case of containers without namespaces."""
    for pid, shared, outcomes in run_ranks(train_all, 2):
        assert pid == 1 and not shared
        assert len({tuple(outcome.norms) for outcome in outcomes}) == 1


def test_the_probe_wants_the_peers_label_its_number_and_an_answer() -> None:
    here, there = SharedMemory(), SharedMemory()
    probes = [Probe(here, 0, 2), Probe(there, 1, 2)]
    cards = [probe.card() for probe in probes]
    assert not probes[0].is_answered(cards)  # the peer has not answered yet
    assert probes[0].answer(cards) and probes[1].answer(cards)
    assert probes[0].is_answered(cards) and probes[1].is_answered(cards)

    own = cards[0]
    as_a_peer = [own[0], cards[1][1], *own[2:]]  # the location of the own segment with the peer's identity
    assert not Probe(SharedMemory(), 0, 2).answer([own, as_a_peer])
    del probes, there  # closes its files
    assert not Probe(SharedMemory(), 0, 2).answer(cards)


def test_a_segment_is_mapped_under_its_own_label_only() -> None:
    """A descriptor that a peer has closed and reused leads to other bytes."""
    one, other = SharedMemory(), SharedMemory()
    first = one.allocate(64)
    location = one.locate(first)
    assert location is not None
    del first
    second = one.allocate(64).fill_(7)
    again = one.locate(second)
    assert again is not None and again.fd == location.fd and again.segment != location.segment
    assert int(other.peer(one.process, again, torch.empty(1, dtype=torch.uint8))) == 7
    with pytest.raises(OSError, match=r"expected the segment zeroshard-.* of a peer, found"):
        SharedMemory().peer(one.process, location, torch.empty(1, dtype=torch.uint8))
    stranger = Process(one.process.pid, one.process.identity ^ 1)
    with pytest.raises(OSError, match="expected the segment"):
        other.peer(stranger, again, torch.empty(1, dtype=torch.uint8))
