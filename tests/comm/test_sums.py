"""The size of the sums over all ranks does not grow with their number, and a step waits once for the device."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.messages import Messages
from zeroshard.comm.packets import PACKET, ROOM, packet_sizes
from zeroshard.comm.pairwise_transport import PairwiseTransport
from zeroshard.comm.samples import Samples
from zeroshard.gradients.settings import SettingsReport
from zeroshard.ranks.mesh import Axis, Mesh
from zeroshard.step import control
from zeroshard.step.ahead import Verdict
from zeroshard.step.clipping import Clipping
from zeroshard.step.gradient_norms import norms_of_pieces
from zeroshard.testing import run_ranks


def summed(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], int]:
    """The sums that threads, in place of ranks, compute by exchanging messages; and the bytes that each has sent."""
    mail: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
    sent: list[int] = [0] * num_ranks
    results: list[Any] = [None] * num_ranks

    def from_before(self: PairwiseTransport, axis: Axis, values: Tensor, distance: int) -> Tensor:
        mail[axis.rank, (axis.rank + distance) % num_ranks].put(values.clone())
        sent[axis.rank] += values.nbytes
        return mail[(axis.rank - distance) % num_ranks, axis.rank].get()

    def run(rank: int) -> None:
        axis = Axis(None, rank, tuple(range(num_ranks)))  # type: ignore[arg-type]
        numbers = torch.tensor([1, 1 << rank % 40, rank])
        PairwiseTransport(Messages(rank, "sums"), CommLog()).add_up(axis, numbers).wait()
        results[rank] = numbers

    monkeypatch.setattr(PairwiseTransport, "_from_before", from_before)
    for rank in range(num_ranks):
        for to in range(num_ranks):
            mail[rank, to] = queue.SimpleQueue()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(sent)) == 1
    return results, sent[0]


def test_messages_add_up_in_a_number_of_rounds_that_hardly_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_ranks in (2, 3, 4, 5, 6, 7, 8, 13, 16, 31):
        found, sent = summed(num_ranks, monkeypatch)
        expected = [num_ranks, sum(1 << rank % 40 for rank in range(num_ranks)), sum(range(num_ranks))]
        assert all(numbers.tolist() == expected for numbers in found), num_ranks
        assert sent == PairwiseTransport.sent_to_add_up(24, num_ranks)
        assert sent <= 24 * 2 * (num_ranks.bit_length() - 1)


def test_sums_over_ranks_short_and_long() -> None:
    def run(rank: int) -> list[Any]:
        zeroshard.init()
        collectives = Collectives(Mesh.of(None), CommLog())
        for count in (0, 1, ROOM, ROOM + 1, 2000):
            numbers = torch.arange(count) * (rank + 1)
            assert collectives.add_up(numbers, "a test").tolist() == [6 * number for number in range(count)]
            assert torch.equal(numbers, torch.arange(count) * (rank + 1)), "what is passed stays"
            events = [event.bytes for event in collectives.log.entries]
            collectives.log.clear()
            # Messages: twice the packet. A native all-reduce: what a ring sends, on three ranks two thirds of that.
            share = 1.0 if dist.get_backend() == "gloo" else 2 / 3
            assert events == [int(2 * size * share) for size in packet_sizes(count)]
        assert collectives.are_alike({"a": 1}) and not collectives.are_alike(rank // 2)
        assert collectives.count(rank) == 3
        with pytest.raises(RuntimeError, match="a test: rank 0 brings 8 bytes, rank 1 16"):
            collectives.add_up(torch.zeros(1 + rank, dtype=torch.int64), "a test")
        large = ["x" * 300 * rank, {"a": rank}]
        assert collectives.exchange_objects(large) == [["x" * 300 * r, {"a": r}] for r in range(3)]
        with pytest.raises(RuntimeError, match="rank 0 at one thing, rank 2 at another"):
            collectives.add_up(torch.zeros(1, dtype=torch.int64), "another" if rank == 2 else "one thing")
        return []

    run_ranks(run, 3)


def test_a_step_waits_once_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors, so that an operation that needs a value raises. (Before, a step waited five times; the control
    is the first of these waits.)"""
    device, waits = torch.device("meta"), []

    class Waited(SimpleNamespace):
        def wait(self) -> Tensor:
            waits.append(self.on_device.shape)
            return torch.zeros(self.on_device.shape, dtype=self.on_device.dtype)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr("zeroshard.comm.collectives.Reading", lambda numbers: Waited(on_device=numbers))
    pieces = [(0, torch.ones(5000, device=device)), (1, torch.ones(7, device=device))]
    norms, groups = norms_of_pieces(pieces, 2.0)
    with pytest.raises(RuntimeError, match="meta tensors"):
        bool(torch.isfinite(norms).all())
    axis = Axis(None, 1, (0, 1, 2))  # type: ignore[arg-type]
    collectives: Any = object.__new__(Collectives)
    collectives.mesh = SimpleNamespace(world=axis, replicate=SimpleNamespace(rank=1), stands_for=1)
    collectives.device, collectives.log, collectives.samples = device, CommLog(), Samples(device)
    collectives.orders, collectives._name, collectives.messages = None, "a mesh", Messages(1, "a mesh")
    overflows, norms_of_groups = torch.zeros(2, dtype=torch.bool, device=device), control.Norms(norms, groups, 2, 2.0)
    own = control.Contribution(control.Status.READY, 1.0, norms_of_groups, [True] * 300, SettingsReport(), overflows)
    row = control._pack(collectives, own)
    assert row.shape == (control.row_numbers(2, 300, 3),) and len(row) <= ROOM
    assert row.device == device and waits == []
    pending = SimpleNamespace(wait=lambda: None)
    add_up = lambda axis, numbers: SimpleNamespace(at_place=lambda at, flight: pending)  # noqa: E731
    collectives.transport = SimpleNamespace(sent_to_add_up=PairwiseTransport.sent_to_add_up, add_up=add_up)
    sums = collectives.begin_sum(row, control.CONTROL)
    for weight in (None, 2.0):  # what a device concludes before
        Verdict.of(sums.on_device, weight, 1.0, 2, 3).update(Clipping(1.0, 1.0, (1.0, 2.0), awaits_norm=True))
    assert waits == []
    assert sums.read().shape == row.shape
    assert waits == [(PACKET,)]
    assert [event.bytes for event in collectives.log.entries] == [2 * 8 * PACKET]


def test_flags_that_are_known_on_the_device_are_those_of_the_host() -> None:
    """At every place in the packed counts, and for any number of ranks."""
    for num_ranks, num_flags in ((1, 3), (2, 70), (3, 33), (8, 16), (1000, 7)):
        for set_ones in ((False, True, True), (True, False, True), (False, False, False)):
            own: Any = SimpleNamespace(present=[True] * num_flags + [False] * 3, on_device=torch.tensor(set_ones))
            counts = torch.tensor(control._as_counts(own.present, num_ranks))
            expected = control._as_counts([True] * num_flags + list(set_ones), num_ranks)
            assert control._with_flags(counts, own, num_ranks).tolist() == expected, (num_ranks, num_flags, set_ones)
            own.on_device = None
            assert control._with_flags(counts, own, num_ranks) is counts
