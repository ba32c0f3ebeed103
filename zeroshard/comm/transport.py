"""What a transport is asked: to gather, to sum, to exchange parts, and how much scratch that takes.

`Collectives` says what is exchanged, logs it, watches it, and agrees with the other ranks. A transport says how the
bytes go. There are three (`transports.py`): shared, pairwise and native.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.mesh import Axis
from zeroshard.comm.messages import Messages
from zeroshard.comm.pending import Pending
from zeroshard.comm.shared_memory import SharedMemory
from zeroshard.layout.portions import Portions
from zeroshard.layout.sums import divide, in_shards, parts, sum_in_rank_order

TransportName = Literal["shared", "pairwise", "native"]


class Gather(NamedTuple):
    """Every rank of an axis gives its portions to all others.

    Attributes:
        portions: what moves.
        full: [numel]: the own shard is filled in, the others arrive.
        own: [numel / d], the same values where they rest: inside `full`, or elsewhere.
        kind: of message; messages of one kind arrive in order.
        about: what is announced to the peers (see `messages.label`); "" where nothing is.
        acknowledge: whether to learn when the peers have read `own`.
    """

    axis: Axis
    portions: Portions
    full: Tensor
    own: Tensor
    kind: str
    about: str = ""
    acknowledge: bool = False

    @property
    def num_bytes(self) -> int:
        """The same on all ranks."""
        return self.portions.total * self.full.element_size()


@dataclass(frozen=True, slots=True)
class Reduction:
    """How terms are summed.

    Attributes:
        scratch: uint8, `Transport.reduce_scratch_bytes(...)` or more, exclusive until the result is waited for.
        wire: the dtype that travels. Sums are taken in the wider of it and the terms' own.
        divisor: of the sum, once it has been rounded to the terms' dtype.
    """

    scratch: Tensor
    wire: torch.dtype
    divisor: int = 1


@dataclass(frozen=True)
class Sum:
    """One sum over the ranks of an axis.

    Attributes:
        portions: what is summed.
        full: [numel], this rank's terms.
        out: [numel / d], where the sum of the own portions goes; it may be the own shard inside `full`.
        kind, about: as of a `Gather`.
    """

    axis: Axis
    portions: Portions
    full: Tensor
    out: Tensor
    reduction: Reduction
    kind: str
    about: str = ""

    @property
    def num_bytes(self) -> int:
        """Of all terms of one rank as they are held: the same on all ranks."""
        return self.portions.total * self.full.element_size()

    @property
    def is_cast(self) -> bool:
        """Whether terms travel in another dtype than they are held in."""
        return self.reduction.wire != self.full.dtype

    @property
    def is_in_place(self) -> bool:
        return is_same_place(self.out, in_shards(self.full, self.axis.size)[self.axis.rank])

    @cached_property
    def own(self) -> list[Tensor]:
        """This rank's own terms of its own portions, in `full`."""
        return parts(self.full, self.portions.of_shard[self.axis.rank])

    @cached_property
    def places(self) -> list[Tensor]:
        """Of the own portions, in `out`."""
        return parts(self.out, self.portions.inside(self.axis.rank))

    def take(self, of_peers: Sequence[Sequence[Tensor]], totals: Sequence[Tensor]) -> None:
        """Add up, for each of the own portions.

        Args:
            of_peers: the terms of each, in rank order.
            totals: where the sum so far is put (see `sum_in_rank_order`).
        """
        # See [Note: sums in rank order] in `pairwise_transport.py`.
        for number, (place, total) in enumerate(zip(self.places, totals, strict=True)):
            terms = [of_peer[number] for of_peer in of_peers]
            sum_in_rank_order(self.own[number], terms, self.axis.rank, total, place, self.reduction.divisor)

    def put(self, sums: Sequence[Tensor]) -> None:
        """Somebody else has added up: these, of the own portions, are divided and put where they go."""
        for place, value in zip(self.places, sums, strict=True):
            divide(place if is_same_place(place, value) else place.copy_(value), self.reduction.divisor)

    def totals_in(self, scratch: Tensor) -> list[Tensor]:
        """For `take`, one after the other in bytes that nobody needs any more."""
        return [scratch.view(self.full.dtype)] * len(self.places)


def is_same_place(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


class Transport(ABC):
    """One way to move bytes. Every axis that it is given has more than one rank, and every buffer some elements.

    It asks a process group for what it needs (messages with tags, a reduce-scatter), never for the name of its backend.

    Attributes:
        name: for `plan_memory`.
        reads_peers: whether ranks read each other's memory. Then nothing moves until a result is waited for, and what
            this rank gives must not be written to before the peers have read it.
        memory: what peers map, if they do.
        messages, log: of the mesh.
    """

    name: ClassVar[TransportName]
    reads_peers: ClassVar[bool] = False
    memory: SharedMemory | None = None

    def __init__(self, messages: Messages, log: CommLog) -> None:
        self.messages, self.log = messages, log

    @property
    def fallback(self) -> Transport:
        """What serves where this one does not: small rows, and what is not announced."""
        return self

    @classmethod
    def fallback_type(cls) -> type[Transport]:
        return cls

    @abstractmethod
    def gather(self, gather: Gather) -> Pending:
        """Start it. The own shard of `full` is filled in already."""

    @abstractmethod
    def reduce(self, sum_: Sum) -> Pending:
        """Start it. Nothing may write to the terms until the result has been waited for."""

    @abstractmethod
    def all_to_all(
        self, axis: Axis, out: Tensor, data: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        """The first `sent[0]` elements of `data` go to rank 0, the next `sent[1]` to rank 1, ...; `out` takes
        `received[r]` elements from each rank r, in rank order."""

    @abstractmethod
    def add_up(self, axis: Axis, numbers: Tensor) -> Pending:
        """`numbers` int64 [n] become their sums over the ranks of an axis. Whole numbers: any order gives the same."""

    @staticmethod
    @abstractmethod
    def sent_to_add_up(num_bytes: int, num_ranks: int) -> int:
        """What each rank of so many sends for an `add_up` of so many bytes."""

    @staticmethod
    @abstractmethod
    def scratch_bytes(numel: int, num_ranks: int, grad: torch.dtype, wire: torch.dtype, *, in_place: bool) -> int:
        """What one `reduce` of all of `numel` elements needs on an axis of more than one rank: received terms, and what
        is cast to be sent. `in_place`: the sum goes to the own shard of what is reduced."""

    @classmethod
    def reduce_scratch_bytes(
        cls, numel: int, grad: torch.dtype, wire: torch.dtype, num_shards: int, num_replicas: int, *, in_place: bool
    ) -> int:
        """Scratch that one `Collectives.reduce_scatter` of `numel` elements needs: shards are summed in it and then, in
        the same bytes, over their replicas."""
        shard, over_shards, over_replicas = numel // num_shards, 0, 0
        if num_shards > 1:
            over_shards = cls.scratch_bytes(numel, num_shards, grad, wire, in_place=in_place)
        if num_replicas > 1:
            over_replicas = cls.fallback_type().scratch_bytes(shard, num_replicas, grad, wire, in_place=True)
        return max(over_shards, over_replicas)

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 zeros [num_bytes] for buffers that peers gather or reduce from."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether it lies in memory that peers map."""
        return False

    def broadcast(self, axis: Axis, tensor: Tensor, source: int) -> None:
        """The values of rank `source` of an axis, in place, now."""
        dist.broadcast(tensor, group=axis.group, group_src=source)

    def map_peers(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Map what the peers have allocated so far. Collective. `exchange`: a JSON-able value of every rank."""
        return None  # nobody reads anybody's memory

    def meet_at(self, point: str, axes: Mapping[str, Axis]) -> None:
        """All ranks come to the same point of the program. One that gathers or reduces meanwhile raises, as do those
        that are here, where collectives are announced (elsewhere they wait). Collective.

        Args:
            axes: kind of collective -> the ranks that it is among.

        Raises:
            OutOfOrder: a peer is elsewhere.
        """
        return None  # nothing is announced
