"""The interface of a transport: gather, sum and exchange buffers, and the scratch that this needs.

`Collectives` decides what is exchanged, logs it, and checks that the ranks agree. A transport moves the bytes. There
are three: shared, pairwise and native.
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
from zeroshard.comm.messages import Messages
from zeroshard.comm.pending import Pending
from zeroshard.layout.portions import Portions
from zeroshard.layout.sums import divide, in_shards, parts, sum_in_rank_order
from zeroshard.ranks.mesh import Axis
from zeroshard.ranks.shared_memory import SharedMemory

TransportName = Literal["shared", "pairwise", "native"]


class Gather(NamedTuple):
    """A gather: every rank of an axis gives its portions to all others.

    Attributes:
        portions: the intervals that move.
        full: [numel]: the own shard is filled in, the other shards are received.
        own: [numel / d], the values of the own shard where they rest: inside `full`, or elsewhere.
        kind: of message; messages of one kind arrive in order.
        about: what is announced to the peers (see `messages.label`); "" if nothing is announced.
        acknowledge: whether peers acknowledge that they have read `own`.
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
        """Bytes of all portions: the same number on all ranks."""
        return self.portions.total * self.full.element_size()


@dataclass(frozen=True, slots=True)
class Reduction:
    """How terms are summed.

    Attributes:
        scratch: uint8, as large as `Transport.scratch_of_each` says: for the sum over shards, or, without
            `of_replicas`, for the larger of the two. Nothing else may use it until the result has been waited for.
        wire: the dtype in which terms are sent. Sums are taken in the wider of it and the terms' own dtype.
        divisor: divides the sum after it has been rounded to the terms' dtype.
        of_replicas: uint8, the scratch of the sum over replicas that follows; None: `scratch`.
        look: looks at this rank's terms, as long as they are here, for the origin of a sum that is not finite: before
            the sum, or, where each rank learns of it in time, only if some rank's sum may not be finite.
    """

    scratch: Tensor
    wire: torch.dtype
    divisor: int = 1
    of_replicas: Tensor | None = None
    look: Callable[[], None] | None = None


@dataclass(frozen=True)
class Sum:
    """One sum over the ranks of an axis.

    Attributes:
        portions: the intervals that are summed.
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
        """Bytes of one rank's terms in the dtype in which they are held: the same number on all ranks."""
        return self.portions.total * self.full.element_size()

    @property
    def is_cast(self) -> bool:
        """Whether terms are sent in another dtype than the one in which they are held."""
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
        """Where the sums of the own portions go, in `out`."""
        return parts(self.out, self.portions.inside[self.axis.rank])

    def look(self) -> None:
        """Look at this rank's terms now."""
        if self.reduction.look is not None:
            self.reduction.look()

    def take(
        self, of_peers: Sequence[Sequence[Tensor]], totals: Sequence[Tensor], doubt: Callable[[], None] | None = None
    ) -> None:
        """Sum each of the own portions in rank order, divide, and write the result to `out`.

        Args:
            of_peers: the terms of each peer, in rank order.
            totals: for each portion, memory for the running sum (see `sum_in_rank_order`).
            doubt: called if the result may not be finite.
        """
        # See [Note: sums in rank order] in `pairwise_transport.py`.
        for number, (place, total) in enumerate(zip(self.places, totals, strict=True)):
            terms = [of_peer[number] for of_peer in of_peers]
            sum_in_rank_order(self.own[number], terms, self.axis.rank, total, place, self.reduction.divisor, doubt)

    def put(self, sums: Sequence[Tensor]) -> None:
        """For sums that the backend has taken: divide the sums of the own portions, and write them to `out`."""
        for place, value in zip(self.places, sums, strict=True):
            divide(place if is_same_place(place, value) else place.copy_(value), self.reduction.divisor)

    def totals_in(self, scratch: Tensor) -> list[Tensor]:
        """`totals` for `take`, in bytes that are free: all portions use the same bytes, one after the other."""
        return [scratch.view(self.full.dtype)] * len(self.places)


def is_same_place(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


class Transport(ABC):
    """One way to move bytes. Callers pass only axes of more than one rank, and buffers that are not empty.

    A transport uses features of a process group (tagged messages, a reduce-scatter), and never checks the name of the
    backend.

    Attributes:
        name: for `plan_memory`.
        announces: whether ranks announce which exchange they begin, and compare that.
        orders_by_streams: whether, on an accelerator, a wait makes only the current stream wait, and not the host.
        reads_peers: whether ranks read each other's memory. Then nothing moves until a result is waited for, and this
            rank must not write to what it gave before the peers have read it.
        memory: the memory that peers map, or None.
        messages, log: of the mesh.
    """

    name: ClassVar[TransportName]
    announces: ClassVar[bool] = True
    reads_peers: ClassVar[bool] = False
    orders_by_streams: ClassVar[bool] = False
    memory: SharedMemory | None = None

    @classmethod
    def has_common_shards(cls, num_shards: int, device_type: str) -> bool:
        """Whether sharded weights lie in common memory (`common.py`), on an axis of so many ranks. Then a gather only
        announces them."""
        return cls.reads_peers and num_shards > 1 and device_type == "cpu"

    def __init__(self, messages: Messages, log: CommLog) -> None:
        self.messages, self.log = messages, log

    @abstractmethod
    def gather(self, gather: Gather) -> Pending:
        """Start a gather. The own shard of `full` is filled in already."""

    @abstractmethod
    def reduce(self, sum_: Sum) -> Pending:
        """Start a sum. Nothing may write to the terms until the result has been waited for. See `Reduction.look`."""

    @abstractmethod
    def all_to_all(
        self, axis: Axis, out: Tensor, data: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        """The first `sent[0]` elements of `data` go to rank 0, the next `sent[1]` to rank 1, ...; `out` takes
        `received[r]` elements from each rank r, in rank order."""

    @abstractmethod
    def add_up(self, axis: Axis, numbers: Tensor) -> Pending:
        """Replace `numbers` int64 [n] by their sums over the ranks of an axis. Integers, so the order does not
        matter."""

    @staticmethod
    @abstractmethod
    def sent_to_add_up(num_bytes: int, num_ranks: int) -> int:
        """Bytes that each of `num_ranks` ranks sends for an `add_up` of `num_bytes`."""

    @staticmethod
    @abstractmethod
    def scratch_bytes(numel: int, num_ranks: int, grad: torch.dtype, wire: torch.dtype, *, in_place: bool) -> int:
        """Scratch bytes of one `reduce` of `numel` elements on an axis of more than one rank: received terms, and terms
        cast for sending. `in_place`: the sum goes to the own shard of the reduced buffer."""

    @classmethod
    def scratch_of_each(
        cls, numel: int, grad: torch.dtype, wire: torch.dtype, num_shards: int, num_replicas: int, *, in_place: bool
    ) -> tuple[int, int]:
        """Scratch bytes of one `Collectives.reduce_scatter` of `numel` elements: of the sum over shards, and of the sum
        over replicas."""
        shard, over_shards, over_replicas = numel // num_shards, 0, 0
        if num_shards > 1:
            over_shards = cls.scratch_bytes(numel, num_shards, grad, wire, in_place=in_place)
        if num_replicas > 1:
            over_replicas = cls.scratch_bytes(shard, num_replicas, grad, wire, in_place=True)
        return over_shards, over_replicas

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 zeros [num_bytes] for buffers that peers gather or reduce from."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory that peers map."""
        return False

    def broadcast(self, axis: Axis, tensor: Tensor, source: int) -> None:
        """Copy the values of rank `source` to all ranks of the axis, in place; returns when they are there."""
        dist.broadcast(tensor, group=axis.group, group_src=source)

    def warm_up(self, axes: Sequence[Axis], device: torch.device) -> None:
        """Create the communicators of these axes now, if the first collective of a group would do it. Collective."""
        return None  # connections exist since the group was made

    def connect_pairs(self, axes: Sequence[Axis], device: torch.device) -> None:
        """The same for the connections that an all-to-all needs: for sums whose terms are sent in a narrower dtype."""
        return None

    def map_peers(self, exchange: Callable[[Any], list[Any]], meet: Callable[[], Any]) -> None:
        """Map what the peers have allocated so far. Collective.

        Args:
            exchange: gathers a JSON-able value of every rank.
            meet: returns when all ranks have called it.
        """
        return None  # ranks do not read each other's memory

    def meet_at(self, point: str, axes: Mapping[str, Axis]) -> None:
        """Check that all ranks are at the same point of the program. Collective. If a rank gathers or reduces instead,
        and this transport announces collectives, that rank raises at once, and the ranks here when they hear of its
        collective or of its end. Otherwise they wait.

        Args:
            axes: kind of collective -> its axis.

        Raises:
            OutOfOrder: a peer is elsewhere.
        """
        return None  # nothing is announced
