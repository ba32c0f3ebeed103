"""Ranks for `make test-gpu`: one that exchanges with itself, several that share a GPU, one for each GPU; and sleeps."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

import zeroshard
from tests.on_device import ranks_on_cuda
from tests.timed_backend import NAME, register, timed_ranks
from zeroshard.comm import native_transport
from zeroshard.comm.native_transport import NativeTransport
from zeroshard.comm.pending import Pending
from zeroshard.comm.transport import Gather, Sum
from zeroshard.ranks.groups import new_group
from zeroshard.ranks.mesh import Axis, Mesh
from zeroshard.testing import run_ranks

# One rank -------------------------------------------------------------------------------------------------------------


class Lone(int):
    """The number 1 as the number of ranks of a group whose collectives are to run: it is more than 1, and not 1.

    The engine asks `size == 1`, `size > 1`, `num_shards > 1` to find out whether anything has to move, and counts and
    divides by the same numbers."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lone) or (other != 1 and int(self) == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: Any) -> bool:
        return other == 1 or int(self) > other

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __mul__(self, other: Any) -> Any:
        """Times the number of another axis that has one rank, it is still such a number."""
        return Lone(1) if isinstance(other, int) and int(other) == 1 else int(self) * other

    __rmul__ = __mul__


@dataclass(frozen=True)
class LoneAxis(Axis):
    @property
    def size(self) -> Lone:  # type: ignore[override]
        return Lone(1)


_REDUCING: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The group of one rank -> the one for its reductions: communicators take time and memory of a GPU."""


@contextmanager
def exchanging_alone() -> Iterator[None]:
    """Inside, a model that is sharded over one rank borrows pool buffers, and gathers and reduces through its backend,
    as over several ranks."""
    make = Mesh.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[Mesh], mesh: Any, device: torch.device | None = None) -> Mesh:
        found: Mesh = make(cls, mesh, device)
        assert found.world.ranks == (0,), "a world of one"
        shard, world = (LoneAxis(axis.group, axis.rank, axis.ranks) for axis in (found.shard, found.world))
        if shard.group not in _REDUCING:  # see [Note: two communicators] in `mesh.py`
            _REDUCING[shard.group] = new_group(shard.ranks, shard.group, found.device)
        return replace(found, shard=shard, world=world, reduce=LoneAxis(_REDUCING[shard.group], 0, shard.ranks))

    with patch.object(Mesh, "of", classmethod(of)):
        yield


@contextmanager
def one_rank(device: str, timing: str = "late") -> Iterator[None]:
    """A world of one in this process: over NCCL, or on a CPU over the backend of `tests/timed_backend.py`."""
    with pytest.MonkeyPatch.context() as environment:
        if device != "cuda":
            register()
            environment.setenv("ZEROSHARD_TEST_BACKEND", timing)
            dist.init_process_group(NAME, store=HashStore(), rank=0, world_size=1)
        else:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                environment.delenv(name, raising=False)
            zeroshard.init("nccl")
        try:
            yield
        finally:
            dist.destroy_process_group()


# Several ranks --------------------------------------------------------------------------------------------------------


def on_shared_device(timing: str, fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """`run_ranks` with ranks that share a device and exchange through the host. `timing`: see
    `tests/timed_backend.py`."""
    with timed_ranks(timing), ranks_on_cuda():
        return run_ranks(fn, num_ranks, *args, collective_timeout=120)


def on_own_devices(device: str, fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """`run_ranks` over NCCL, each rank on its own GPU; on a CPU as `on_shared_device`."""
    if device != "cuda":
        return on_shared_device("random-3", fn, num_ranks, *args)

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun has one

    def on_gpu(rank: int, *args: Any) -> Any:
        dist.destroy_process_group()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        zeroshard.init("nccl")
        return fn(rank, *args)

    with ranks_on_cuda():
        return run_ranks(on_gpu, num_ranks, *args, collective_timeout=120)


# Sleeps ---------------------------------------------------------------------------------------------------------------


class Sleeps:
    """Random sleeps of the GPU before collectives and before the kernels of modules. Collectives are issued from a
    stream of their own, which sleeps first: so they run late, and the program's kernels ahead of them.

    What a collective receives is NaN until it arrives, and is gathered from a copy. (A single rank's gather in place
    would move nothing: its values would be there already.)
    """

    def __init__(self, device: str, seed: int, *, only_collectives: bool = False) -> None:
        """`only_collectives`: every collective sleeps for about 10 ms, and modules do not."""
        self._random, self._only_collectives = random.Random(seed), only_collectives
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self.num_sleeps = 0

    @contextmanager
    def installed(self) -> Iterator[Sleeps]:
        names = ("reduce", "all_to_all", "add_up")
        with ExitStack() as stack:
            stack.enter_context(patch.object(NativeTransport, "gather", self._late_gather()))
            for name in names:
                stack.enter_context(patch.object(NativeTransport, name, self._late(getattr(NativeTransport, name))))
            if not self._only_collectives:
                hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: self._sleep())
                stack.callback(hook.remove)
            yield self

    def _sleep(self) -> None:
        self.num_sleeps += 1
        cycles = 20_000_000 if self._only_collectives else self._random.choice((0, self._random.randrange(1_000_000)))
        if self._stream is not None and cycles:
            torch.cuda._sleep(cycles)

    def _apart(self) -> AbstractContextManager[Any]:
        """Inside, operations run on the stream of this object, after what has been queued so far, and a sleep."""
        if self._stream is None:
            self._sleep()
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        entered = torch.cuda.stream(self._stream)
        with entered:
            self._sleep()
        return entered

    def _late(self, method: Callable[..., Pending]) -> Callable[..., Pending]:
        def late(transport: NativeTransport, *args: Any) -> Pending:
            for sum_ in args:
                if isinstance(sum_, Sum) and sum_.portions.is_whole and not _overlap(sum_.out, sum_.full):
                    _spoil(sum_.out)
            with self._apart():
                return method(transport, *args)

        return late

    def _late_gather(self) -> Callable[..., Pending]:
        gather_of_engine = NativeTransport.gather

        def gather(transport: NativeTransport, gather: Gather) -> Pending:
            if not gather.portions.is_whole or _overlap(gather.own, gather.full):
                with self._apart():
                    return gather_of_engine(transport, gather)
            _spoil(gather.full)  # before the sleep: whoever does not wait finds it
            with self._apart():
                values = gather.own.clone()
                work = native_transport._all_gather(gather.full, values, group=gather.axis.group, async_op=True)
                kept = [values]  # until the gather is over, as their memory belongs to another stream
                return Pending(transport, [work], kept.clear)

        return gather


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def _spoil(tensor: Tensor) -> None:
    tensor.view(torch.uint8).fill_(255)


@contextmanager
def dropped_waits() -> Iterator[list[Pending]]:
    """The negative control: inside, no program waits for the gathers of one unit, `blocks.1`. Yields these."""
    wait, kept = Pending.wait, list[Pending]()

    def wait_but_for_one(self: Pending, *, stale: bool = False) -> None:
        if self.at is not None and "blocks.1" in self.at.text and "all_gather" in self.at.text:
            kept.append(self)  # else its destructor would wait
            return
        wait(self, stale=stale)

    with patch.object(Pending, "wait", wait_but_for_one):
        yield kept
    kept.clear()
    gc.collect()  # they are in cycles; at the end of the process, they would wait for tensors that are gone
