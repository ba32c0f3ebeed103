"""A simulated fabric: a process group in one process whose collectives take as long as the alpha-beta model says.

This process runs as rank r of d. It computes for real, and the wire (`wire.py`) runs beside it by a clock: a collective
begins when it is issued, and `wait()` returns when the model says that it has ended. zeroshard, torch DDP,
ZeroRedundancyOptimizer, FSDP1 and FSDP2 run over it unchanged.

There are no other ranks, and no values are exchanged. Each collective returns what it would if all ranks had passed the
same values as this one: a sum is d times the own term, and a gather is d copies of the own shard. So torch DDP trains
as with equal batches on all ranks. Where shards are gathered (zeroshard, FSDP), full tensors consist of copies of one
shard, and losses have no meaning.
"""

# mypy: disable-error-code="override, assignment, call-arg"
# torch's stubs declare other forms of these methods as well, which only C++ calls.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.planner import expect_mesh
from zeroshard.planning.wire import Clock, Fabric, Network, Transfer

NAME = "simulated"
"""The name of the backend."""

# `backends.moves_nothing` looks for a fake backend: then the engine starts no watch, and asks no peer for its device.
_BACKENDS = f"cpu:{NAME},cuda:fake"


@contextmanager
def simulated_fabric(ranks: int, network: Network, *, rank: int = 0, clock: Clock | None = None) -> Iterator[Fabric]:
    """A block in which this process is one rank of many, for models on the CPU. The default process group, and all
    groups that are created inside, share one simulated wire.

    No values are exchanged: what other ranks would send is copied from this rank. Losses of sharded models have no
    meaning, so build the optimizer of zeroshard with `non_finite="ignore"`. Checkpoints cannot be saved.

    Args:
        ranks: number of ranks in the world.
        network: may be replaced inside the block, by `fabric.network = ...`.
        rank: the rank of this process.
        clock: real time (`WallClock()`) if None.

    Yields:
        The wire, with the log of its collectives.

    Raises:
        ValueError: `rank` is not a rank of that many.
        RuntimeError: this process has a process group already.
    """
    expect_mesh(ranks, 1, rank)
    if dist.is_initialized():
        raise InvalidState(
            "simulated_fabric: this process is in a process group already: start a fabric in a process of its own"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the fake backend

    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    fabric = Fabric(network, clock)
    dist.init_process_group(_BACKENDS, store=FakeStore(), rank=rank, world_size=ranks, pg_options=fabric)
    try:
        yield fabric
    finally:
        dist.destroy_process_group()


def _create(options: Any, fabric: Fabric | None) -> FabricGroup:
    """`fabric`: None for groups that are created inside the block: they share the wire of the default group."""
    if fabric is None:
        default = dist.group.WORLD
        assert isinstance(default, FabricGroup), "`simulated_fabric` creates the default group"
        fabric = default.fabric
    return FabricGroup(fabric, options.group_rank, options.group_size)


_SAME_AS_EACH_TERM = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR)
"""Operations whose result over equal terms is the term."""


@torch.no_grad()
def _fill(places: Iterable[Tensor], value: Tensor) -> None:
    """Copy the own value to each place, except to where it lies already (in place)."""
    for place in places:
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)


@torch.no_grad()
def _multiply(tensors: Iterable[Tensor], factor: int) -> None:
    for tensor in tensors if factor != 1 else ():
        tensor.mul_(factor)


class Sent(dist.Work):
    """One collective in flight. Its outputs have their values already; they may be used after `wait`."""

    def __init__(self, fabric: Fabric, transfer: Transfer, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._fabric, self._transfer, self._outputs = fabric, transfer, list(outputs)
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._fabric.wait(self._transfer)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._fabric.is_over(self._transfer)

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        """For torch DDP, which waits for the future without calling `wait`."""
        if self._future is None:
            future = self._future = torch.futures.Future()
            self._fabric.clock.call_at(self._transfer.end, lambda: future.set_result(self._outputs))
        return self._future


class FabricGroup(dist.ProcessGroup):
    """A group of ranks of which this process is one, on a simulated wire."""

    def __init__(self, fabric: Fabric, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.fabric = fabric
        self._rank, self._size = rank, size

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _issue(self, collective: str, full: Iterable[Tensor], outputs: Sequence[Tensor]) -> Sent:
        """`full`: the tensors whose bytes are N in the model."""
        transfer = self.fabric.issue(collective, sum(tensor.nbytes for tensor in full), self._size)
        return Sent(self.fabric, transfer, outputs)

    def _factor(self, opts: Any) -> int:
        """What the own term is multiplied by in a reduction over ranks that all have the same term.

        Raises:
            ValueError: an operation that is not supported.
        """
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if operation == dist.ReduceOp.SUM:
            return self._size
        if any(operation == same for same in _SAME_AS_EACH_TERM):  # not `in`, which compares the wrong way round
            return 1
        raise InvalidValue(
            "simulated_fabric: expected a sum, mean, minimum or maximum over ranks, found another reduction"
        )

    # The collectives, by the names that torch calls. Each is issued before its values are written: the copies stand for
    # what a network adapter does, and so must not delay the wire.

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Sent:
        sent = self._issue("all_gather", [output], [output])
        _fill(output.view(-1).chunk(self._size), input.reshape(-1))
        return sent

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Sent:
        sent = self._issue("all_gather", [tensor for of_one in outputs for tensor in of_one], outputs[0])
        for of_one, value in zip(outputs, inputs, strict=True):
            _fill(of_one, value)
        return sent

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Sent:
        factor, sent = self._factor(opts), self._issue("reduce_scatter", [input], [output])
        _fill([output], input.view(-1).chunk(self._size)[self._rank].view_as(output))
        _multiply([output], factor)
        return sent

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Sent:
        factor = self._factor(opts)
        sent = self._issue("reduce_scatter", [tensor for terms in inputs for tensor in terms], outputs)
        for output, terms in zip(outputs, inputs, strict=True):
            _fill([output], terms[self._rank])
        _multiply(outputs, factor)
        return sent

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Sent:
        factor, sent = self._factor(opts), self._issue("all_reduce", tensors, tensors)
        _multiply(tensors, factor)
        return sent

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Sent:
        factor, sent = self._factor(opts), self._issue("reduce", tensors, tensors)
        _multiply(tensors if opts.rootRank == self._rank else [], factor)
        return sent

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Sent:
        return self._issue("broadcast", tensors, tensors)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, to: list[int] | None, of: list[int] | None, opts: Any = None
    ) -> Sent:
        """Each rank sends what this rank would send to itself; zeros where this rank expects another number."""
        sent = self._issue("all_to_all", [max(input, output, key=lambda tensor: tensor.nbytes)], [output])
        own = (torch.split(input, of) if of else input.chunk(self._size))[self._rank]
        for place in torch.split(output, to) if to else output.chunk(self._size):
            _fill([place], own if own.shape == place.shape else torch.zeros_like(place))
        return sent

    def barrier(self, opts: Any = None) -> Sent:
        return self._issue("all_reduce", [], [])

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allreduce_coalesced = allreduce
