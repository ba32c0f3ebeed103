"""Shards of weights lie side by side in memory that all ranks of a host map: a gather copies nothing.

Under ZERO3 each rank once copied the shards of all ranks into a buffer of its own, in forward and again in backward.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests import kit
from tests.kit import NUM_RANKS, Block, Job, Net, State, loss_of_tokens, make, same_bits
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.shared_transport import SharedTransport
from zeroshard.errors import InvalidState
from zeroshard.planner import plan_memory
from zeroshard.ranks import common as common_module
from zeroshard.ranks.common import Common
from zeroshard.ranks.mesh import Mesh
from zeroshard.ranks.shared_memory import Location, SharedMemory
from zeroshard.storage.unit import Unit
from zeroshard.testing import run_ranks

pytestmark = pytest.mark.by_gloo
PAGE = os.sysconf("SC_PAGE_SIZE")


def pair(num_bytes: int = 4 * PAGE) -> tuple[Common, Common]:
    """The views of two ranks, in one process."""
    memory = SharedMemory()
    segment, fd = memory.create(num_bytes)
    half, location = num_bytes // 2, Location(segment, fd, num_bytes, 0)
    found = [memory.map_common(memory.process, location, slice(at, at + half)) for at in (0, half)]
    os.close(fd)
    for one in found:
        one.hold(half)
    return found[0], found[1]


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:zeroshard")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def without_page_table() -> Iterator[None]:
    """On a system that does not tell which pages are copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Common, "_has_copied_pages", lambda self: None)
        yield


def test_all_ranks_see_what_a_rank_writes_to_its_shard() -> None:
    first, second = pair(4 * 1024)  # shards of less than a page
    for value in (1, 2):  # also in pages that have been read before
        first.own.fill_(value)
        second.own.fill_(10 * value)
        for one in (first, second):
            assert one.full[:2048].eq(value).all() and one.full[2048:].eq(10 * value).all()
            assert torch.equal(one.full, one.everyone)
    assert first.own.untyped_storage().nbytes() == 2048


def test_a_write_to_the_full_weights_stays_in_the_process_until_it_is_given_back() -> None:
    first, second = pair()
    first.own.fill_(1)
    assert second.full[0] == 1 and not second.is_written()
    second.full[:4].fill_(5)
    assert first.own.eq(1).all() and first.full.count_nonzero() == first.own.numel()
    assert second.is_written() and not first.is_written()
    first.own.fill_(2)
    assert second.full[4] == 1, "a copied page does not show what the ranks write: then `renew` would not be needed"
    second.renew()
    assert not second.is_written() and torch.equal(second.full, first.full)


def test_a_write_that_changes_nothing_is_no_write_but_its_page_is_given_back() -> None:
    first, second = pair()
    second.full[:4].fill_(0)
    assert second._has_copied_pages() and not second.is_written()
    first.own.fill_(3)
    assert second._has_copied_pages() is False and second.full[0] == 3


def test_a_system_without_page_tables_gives_all_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Common, "_has_copied_pages", lambda self: None)
        first, second = pair()
    second.full[:4].fill_(5)
    assert second.is_written() is None
    second.begin()
    assert torch.equal(second.full, first.full)


def test_a_page_table_that_cannot_be_read_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *args: Any) -> int:
        raise FileNotFoundError(path)

    first, _ = pair()
    monkeypatch.setattr(common_module.os, "open", refuse)
    assert first._has_copied_pages() is None


def test_forwards_without_a_page_fault_need_no_look() -> None:
    """But every 16th looks: a page that was copied outside of a forward is found, and no fault tells of it."""
    first, second = pair()
    looks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common_module, "_page_faults", lambda: 5)
        look = Common._has_copied_pages
        patch.setattr(Common, "_has_copied_pages", lambda self: looks.append(self) or look(self))
        second.full[0] = 1
        second.watch()
        found = [second.is_written() for _ in range(common_module.LOOKS_EVERY)]
    assert found == [False] * (common_module.LOOKS_EVERY - 1) + [True] and len(looks) == 1
    assert first.is_written() is False


def test_a_write_is_a_page_fault() -> None:
    _, second = pair()
    assert second.full.sum() == 0  # all pages are there
    before = common_module._page_faults()
    second.full[0] = 1
    assert common_module._page_faults() > before


def test_the_end_of_the_process_that_created_it_changes_nothing() -> None:
    ready, go = os.pipe(), os.pipe()
    memory = SharedMemory()
    child = os.fork()
    if not child:
        segment, fd = memory.create(2 * PAGE)
        os.write(ready[1], f"{segment} {fd}".encode())
        os.read(go[0], 1)
        os._exit(0)
    segment, fd = map(int, os.read(ready[0], 100).split())
    process = type(memory.process)(child, memory.process.identity)
    found = memory.map_common(process, Location(segment, fd, 2 * PAGE, 0), slice(0, PAGE))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found.hold(PAGE).fill_(1)
    assert int(found.full.sum()) == PAGE


def test_nothing_is_left() -> None:
    before = mappings(), descriptors()
    first, second = pair()
    view = second.full[1:3]
    for one in (first, second):
        one.free()
    assert mappings() == before[0] + 1, "a view keeps its mapping"
    del view
    assert (mappings(), descriptors()) == before


# In training ----------------------------------------------------------------------------------------------------------


def start(units: Any = Block, model: Callable[[], nn.Module] = Net, mesh: Any = None) -> Any:
    sharded = make(model)
    handle = zeroshard.shard(sharded, "zero3", units=units, mesh=mesh)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=1e-2)
    return sharded, handle, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of_tokens(model, rank, 0, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(handle: zeroshard.Handle) -> State:
    return {name: value.clone() for name, value in handle.full_state_dict().items()}


def mesh_of(num_ranks: int) -> Any:
    if num_ranks < 4:
        return None
    return dist.init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize("num_ranks", [*NUM_RANKS, 4])
def test_training_has_the_same_bits_and_logs_as_with_copies(num_ranks: int) -> None:
    """On 4 ranks: 2 replicas of 2 shards."""

    def run(rank: int) -> tuple[list[float], State, list[Any], dict[str, int]]:
        model, handle, optimizer = start(mesh=mesh_of(num_ranks))
        handle.comm_log.clear()  # `shard` has one exchange more
        losses = train(model, optimizer, rank)
        memory = handle.memory(peak=True)  # before the whole model is read
        return losses, values(handle), list(handle.comm_log.entries), memory

    def check(rank: int) -> None:
        now = run(rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedTransport, "has_common_shards", lambda *_: False)
            before = run(rank)
        assert now[0] == before[0] and same_bits(now[1], before[1]) and now[2] == before[2]
        assert now[3]["ring"] == 0 < before[3]["ring"] and {**before[3], "ring": 0} == now[3]
        shape = {"num_replicas": 2} if num_ranks == 4 else {}
        with torch.device("meta"):
            planned = plan_memory(Net(), "zero3", min(num_ranks, 2 if shape else 3), units=Block, peak=True, **shape)
        assert {**planned, "state": 0, "scalars": 0} == {**now[3], "state": 0, "scalars": 0}

    run_ranks(check, num_ranks)


def test_full_weights_stay_at_one_address_and_take_no_descriptor() -> None:
    def check(rank: int) -> None:
        model, handle, optimizer = start()
        places = [unit.weights.place.data_ptr() for unit in handle.engine.units]
        found: set[int] = set()
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, out: found.add(module.up.weight.data_ptr()))
        train(model, optimizer, rank, 1)
        at_first = descriptors(), mappings()
        train(model, optimizer, rank, 3)
        assert (descriptors(), mappings()) == at_first
        assert len(found) == len(model.blocks)
        assert places == [unit.weights.place.data_ptr() for unit in handle.engine.units]
        handle.close()
        del model, handle, optimizer
        assert mappings() < at_first[1]

    run_ranks(check, 2)


class Writes(nn.Module):
    """Runs `write` on its weight in the forward of that number."""

    def __init__(self, write: Callable[[nn.Parameter], object], forward: int) -> None:
        super().__init__()
        self.linear, self.write, self.in_forward, self.forwards = nn.Linear(64, 64), write, forward, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == self.in_forward:
            with torch.no_grad():
                self.write(self.linear.weight)
        out: Tensor = self.linear(x)
        return out


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(10 * rank + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda p: p.mul_(2),
    "through data": lambda p: p.data.mul_(2),
    "one element": lambda p: p.data[5, 7].add_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_a_forward_raises_and_changes_no_value(write: str) -> None:
    """Through `.data` it was found in the first forward alone, and only in this rank's shard. On shared values it would
    take effect once for each rank."""

    def check(rank: int) -> None:
        for forward in (1, 3):
            torch.manual_seed(0)
            model = Writes(WRITES[write], forward)
            handle = zeroshard.shard(model, "zero3")
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=1e-2)
            steps_of(model, optimizer, rank, forward - 1)
            before = values(handle)
            with pytest.raises(RuntimeError, match="has been written to in a forward or backward"):
                steps_of(model, optimizer, rank, 1)
            assert same_bits(values(handle), before)
            steps_of(model, optimizer, rank, 2)
            assert not same_bits(values(handle), before)

    run_ranks(check, 2)


@pytest.mark.parametrize("tells", [True, False])
def test_a_late_write_through_an_alias_raises_or_is_lost(tells: bool) -> None:
    """After the forward, through a tensor that the forward has left behind. A rank that kept the copied page would
    compute with old values from then on."""

    def check(rank: int) -> None:
        ends = []
        for writes in (False, True):
            left: list[Tensor] = []
            torch.manual_seed(0)
            model = Writes(partial(lambda left, p: left.append(p.data), left), 2)
            handle = zeroshard.shard(model, "zero3")
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.0)
            steps_of(model, optimizer, rank, 2)
            if writes and rank == 0:
                left[0].mul_(2)
            raised = 0
            for _ in range(2 * common_module.LOOKS_EVERY):
                try:
                    end = model(torch.ones(2, 64)).detach().clone()
                except InvalidState as error:
                    assert "has been written to" in str(error)  # noqa: PT017
                    raised += 1
            assert raised == int(writes and rank == 0 and tells)
            ends.append(end)
        assert torch.equal(*ends)

    def with_or_without_page_table(rank: int) -> None:
        with nullcontext() if tells else without_page_table():
            check(rank)

    run_ranks(with_or_without_page_table, 2)


def test_a_write_inside_unsharded_is_made_once() -> None:
    def check(rank: int) -> None:
        model, handle, optimizer = start()
        train(model, optimizer, rank, 1)
        before = values(handle)
        with handle.unsharded(write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        assert same_bits(values(handle), {name: 2 * value for name, value in before.items()})

        def fail() -> None:
            with handle.unsharded(write=True), torch.no_grad():
                next(model.parameters()).mul_(2)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert same_bits(values(handle), {name: 2 * value for name, value in before.items()})

    run_ranks(check, 3)


WRITERS: dict[str, Callable[[zeroshard.Handle, Any, int], object]] = {
    "set_main_parts": lambda handle, optimizer, rank: handle.set_main_parts([p + 1 for p in handle.main_parts()]),
    "load_full_state_dict": lambda handle, optimizer, rank: handle.load_full_state_dict(
        {"head.bias": torch.ones(23)}, strict=False
    ),
    "step": lambda handle, optimizer, rank: optimizer.step(),
}


@pytest.mark.parametrize("writer", [*WRITERS, "control"])
def test_no_rank_writes_before_all_have_read(writer: str) -> None:
    """Rank 1 is slow to read the last weights of `full_state_dict`. Control: without the exchange in `set_main_parts`
    rank 0 writes meanwhile."""

    def check(rank: int) -> None:
        model, handle, optimizer = start()
        loss_of_tokens(model, rank, 0, 0).backward()
        store = dist.distributed_c10d._get_default_store()
        written_while_read: list[bool] = []
        with pytest.MonkeyPatch.context() as patch:
            for name, of in (("write", Unit), ("step", torch.optim.Adam)):
                original = getattr(of, name)

                def note(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                    written_while_read.append(not store.check(["has read"]))
                    if rank == 0:
                        store.set("has written", "")
                    return original(self, *args, **kwargs)

                patch.setattr(of, name, note)
            if writer == "control":
                patch.setattr(Collectives, "count", lambda self, of_this_rank, what="": 0)
            for unit in handle.engine.units:
                handle.engine.gatherer.unshard(unit)
            if rank == 1 and writer == "control":
                store.wait(["has written"])
            if rank == 1:
                time.sleep(0.2)  # a rank that did not wait would write now
                store.set("has read", "")
            WRITERS["set_main_parts" if writer == "control" else writer](handle, optimizer, rank)
        assert any(written_while_read) is (writer == "control" and rank == 0)

    run_ranks(check, 2)


@pytest.mark.parametrize("fails", ["create", "map_common"])
def test_a_rank_that_cannot_map_makes_all_ranks_raise_and_nothing_is_left(fails: str) -> None:
    def check(rank: int) -> None:
        model = make(Net)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        zeroshard.shard(make(Net), "zero3", units=Block).close()  # whatever the first model leaves
        at_first, number = (mappings(), descriptors()), [0]
        with pytest.MonkeyPatch.context() as patch:
            if rank == (0 if fails == "create" else 1):
                original = getattr(SharedMemory, fails)

                def second_fails(self: SharedMemory, *args: Any) -> Any:
                    number[0] += 1
                    if number[0] == 2:
                        raise OSError(24, "Too many open files")
                    return original(self, *args)

                patch.setattr(SharedMemory, fails, second_fails)
            with pytest.raises(ValueError, match="Too many open files"):
                zeroshard.shard(model, "zero3", units=Block)
        assert same_bits(dict(model.state_dict()), before)
        assert (mappings(), descriptors()) == at_first
        handle = zeroshard.shard(model, "zero3", units=Block)
        assert same_bits(values(handle), before)

    run_ranks(check, 2)


def test_a_rank_that_may_not_make_shared_memory_exchanges_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sandbox that forbids it, and where there is no /proc. `shard` raised on that rank, and the others waited for
    it."""

    def check(rank: int, lacks: str) -> Any:
        def forbidden(name: str) -> int:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        def without_proc(path: str, **options: Any) -> Any:
            raise RuntimeError(f"unable to open file <{path}> in read-write mode: No such file or directory (2)")

        if rank == 1 and lacks:
            where, name, fails = {
                "permission": (os, "memfd_create", forbidden),
                "/proc": (torch, "from_file", without_proc),
            }[lacks]
            monkeypatch.setattr(where, name, fails)
            files = descriptors()
            with pytest.raises((PermissionError, RuntimeError)):
                SharedMemory().allocate(8)
            assert descriptors() == files
        assert Collectives(Mesh.of(None), CommLog()).transport.reads_peers == (not lacks)
        return kit.train(Job(steps=2), zeroshard.ZERO3, rank).weights

    shared, *others = (run_ranks(check, 2, lacks) for lacks in ("", "permission", "/proc"))
    for by_messages in others:
        assert all(same_bits(a, b) for a, b in zip(by_messages, shared, strict=True))
