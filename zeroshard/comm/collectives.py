"""The collectives of a mesh: each is logged, and the watch is told which one this rank is in.

A transport (`TRANSPORTS`) moves the bytes. `Portions` say which intervals of each shard take part; the rest of a
buffer does not move.

Collectives on full buffers return a `Pending` at once. A group of one rank has nothing to move and returns a finished
`Pending`: there is no other special path for a single rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.alike import are_alike, as_terms
from zeroshard.comm.chain import Beside, Chain, Replicas, SideStream
from zeroshard.comm.comm_log import CommEvent, CommLog, Flight
from zeroshard.comm.messages import ON_REQUEST, Messages, label
from zeroshard.comm.native_transport import NativeTransport
from zeroshard.comm.orders import Voice
from zeroshard.comm.packets import (
    ROOM,
    ROOM_BYTES,
    Elsewhere,
    Reading,
    Unread,
    differences,
    head_of,
    is_one_place,
    number_of,
    numbers_in,
    on_device,
    pack,
    to_device,
    to_host,
)
from zeroshard.comm.pairwise_transport import PairwiseTransport
from zeroshard.comm.pending import Pending
from zeroshard.comm.ranges import profiled, span
from zeroshard.comm.samples import Samples
from zeroshard.comm.shared_transport import SharedTransport
from zeroshard.comm.transport import Gather, Reduction, Sum, Transport, TransportName
from zeroshard.comm.user_streams import UserStreams
from zeroshard.errors import InvalidValue
from zeroshard.failures import watch
from zeroshard.failures.positions import HERE, Wait
from zeroshard.layout.portions import Portions, everything
from zeroshard.layout.sums import in_shards
from zeroshard.ranks.mesh import Axis, Mesh

SOME_EXCHANGE = "an exchange among all ranks"
_TOGETHER_BYTES = 1 << 16
"""Small tensors are broadcast together, up to this many bytes: each broadcast costs a round trip, however small."""


class Collectives:
    """The collectives of one mesh, logged.

    Attributes:
        transport: moves the bytes.
        beside: the stream on which exchanges that follow each other are queued; None: the host starts them.
        user_streams: on which the user's program computes; None: there is one order anyway.
        device: of control data, and of all tensors passed in.
        samples: of gathered weights, to compare between ranks.
        is_recorded: whether a CUDA graph contains a forward: where it is replayed, no hook waits for weights.
        orders: inside a join, tells the followers (ranks without inputs) what comes next; else None.
    """

    def __init__(self, mesh: Mesh, log: CommLog) -> None:
        self.mesh = mesh
        self.log = log
        self.device = mesh.device
        self._name, gone = HERE.name_of_mesh(mesh.world.ranks, self)
        watch.forget_waits(mesh.world.ranks, gone)
        self.messages = Messages(mesh.world.here, self._name)
        self.orders: Voice | None = None
        self.samples = Samples(self.device)
        self.is_recorded = False
        self.num_reads = 0  # how often all ranks have begun to read weights in full: calls of the model, and scopes
        self.transport: Transport = (PairwiseTransport if mesh.is_pairwise else NativeTransport)(self.messages, log)
        if mesh.is_pairwise and mesh.world.size > 1:
            self._try_to_share()
            if not self.transport.reads_peers:
                self.mesh = mesh = mesh.with_two_ways()
        in_streams = self.device.type != "cpu" and self.transport.orders_by_streams and mesh.world.size > 1
        self.beside: Beside | None = SideStream(self.device) if in_streams else None
        current = partial(torch.accelerator.current_stream, self.device)
        self.user_streams: UserStreams | None = UserStreams(current) if in_streams else None
        self._replicas = Replicas(mesh.replicate, log, self._name)
        self.transport.warm_up((mesh.world, mesh.shard, mesh.reduce, mesh.replicate), self.device)

    def come(self) -> None:
        """Called at the beginning of each hook, and of each call of the user: see [Note: several streams]."""
        if self.user_streams is not None:
            self.user_streams.come()

    def _try_to_share(self) -> None:
        """Switch to shared memory if every rank can read every other rank's."""
        shared = SharedTransport.between(self.mesh.world, self.messages, self.log, self.exchange_objects)
        self.transport = shared or self.transport
        self.log.clear()

    def map_peers(self) -> None:
        """See `Transport.map_peers`. Collective."""
        self.transport.map_peers(self.exchange_objects, lambda: self.count(0))

    # Full buffers -----------------------------------------------------------------------------------------------

    def all_gather(
        self,
        full: Tensor,
        source: Tensor | None = None,
        *,
        unit: str,
        phase: str,
        portions: Portions | None = None,
        of_mean: bool = False,
    ) -> Pending:
        """SHARDED -> REPLICATED: the other shards of `full` [numel] are received. The own shard of `full` is filled in
        already, also if `source` is given (one transport reads it here, another one there).

        Args:
            source: [numel / d], the values of the own shard where they rest, if they do not rest inside `full`.
            portions: the intervals that are received; the rest of `full` is the same on all ranks already.
            of_mean: it follows a reduction. Its place is in the order of the reductions, and it uses their group: it
                may interleave with other gathers differently on each rank. Peers acknowledge that they have read the
                own shard, which will be written to before the next exchange among all ranks: call `release` before that
                write. (Weights are written by a step, and a step begins with such an exchange.)
        """
        if phase not in ("forward", "backward"):
            self._expect_followed(f"a gather of unit {unit} ({phase})")
        axis, kind = (self.mesh.reduce, "mean") if of_mean else (self.mesh.shard, "all_gather")
        at = self._begin(kind, axis, f"all_gather of unit {unit} ({phase})")
        # The number is taken now, not on arrival: gathers may arrive in another order on each rank, and the number
        # chooses which elements are sampled.
        look = partial(self.samples.take, self.samples.next_number(of_mean=of_mean), unit, full)
        if axis.size == 1 or not full.numel():
            return Pending().then(look)
        if phase in ON_REQUEST and not self.transport.announces:  # else a call of one rank alone would never end
            self._meet(at.text, phase=phase)
        moved = portions or everything(full.numel(), axis.size)
        own = in_shards(full, axis.size)[axis.rank] if source is None else source
        gather = Gather(axis, moved, full, own, kind, label(unit, phase), acknowledge=of_mean)
        flight = self._log_gather("all_gather", gather, unit, phase)
        with profiled("all_gather", unit):
            return self.transport.gather(gather).at_place(at, flight).then(look)

    def reduce_scatter(
        self,
        full: Tensor,
        out: Tensor,
        reduction: Reduction,
        *,
        unit: str,
        phase: str,
        portions: Portions | None = None,
    ) -> Pending:
        """PARTIAL -> SHARDED: `out` becomes the sum over ranks of the own shard of `full`, divided by the divisor.

        Args:
            full: [numel], this rank's terms. Nothing may write to it until the result has been waited for. (Native
                collectives may leave partial sums in the shards of the other ranks.)
            out: [numel / d], `full`'s dtype; may be the own shard inside `full` (an in-place sum).
            portions: the intervals that are summed; the rest of `out` is not changed.

        On a 2-D mesh the shard is then summed over its replicas as well, before the division.
        """
        axis, replicas = self.mesh.reduce, self.mesh.replicate
        moved = portions or everything(full.numel(), axis.size)
        # One division, after the last sum: a division before the sum over replicas would round twice.
        over_shards = reduction if replicas.size == 1 else replace(reduction, divisor=1)
        sum_ = Sum(axis, moved, full, out, over_shards, "reduce_scatter", label(unit))
        at = self._begin("reduce_scatter", axis, f"reduce_scatter of unit {unit} ({phase})")
        if axis.size > 1 and full.numel():
            itemsize = reduction.wire.itemsize
            num_bytes = moved.sent_to_reduce(axis.rank) * itemsize
            flight = self.log.start("reduce_scatter", unit, phase, num_bytes, common=moved.total * itemsize)
            with profiled("reduce_scatter", unit):
                pending = self.transport.reduce(sum_).at_place(at, flight)
        else:
            sum_.look()
            sum_.put(sum_.own)
            pending = Pending()
        if replicas.size == 1 or not full.numel():
            return pending
        return self._replicas.follow(self.chain(pending), sum_, reduction, self.transport, unit, phase)

    def chain(self, pending: Pending) -> Chain:
        """The chain of exchanges that begins with `pending`. What follows a reduction must use its group, or one that
        nothing else uses: gathers and reductions may interleave differently on each rank."""
        return pending if isinstance(pending, Chain) else Chain(self, pending, self.beside)

    def acknowledge(self) -> Pending:
        """Tell the peers on the shard axis that this rank has read all their shared weights. When the result has been
        waited for, the peers have read this rank's."""
        axis = self.mesh.shard
        at = self._begin("read", axis, "the ranks that read its weights")
        unlogged = Flight(CommEvent("peers have read", "", "step", 0))
        return Pending(self, self.messages.acknowledge(axis, "all_gather")).at_place(at, unlogged)

    def all_to_all(self, out: Tensor, data: Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
        """Between owners and holders, over the shard axis; see `Transport.all_to_all`."""
        axis, unit, phase = self.mesh.shard, "owners", "step"
        at = self._begin("all_to_all", axis, f"all_to_all of unit {unit} ({phase})")
        total = sum(sent)
        out, data = out[: sum(received)], data[:total]
        num_bytes = (total - sent[axis.rank]) * data.element_size()
        flight = self.log.start("all_to_all", unit, phase, num_bytes, common=0)
        if axis.size == 1:
            out.copy_(data)
            return Pending().at_place(at, flight)
        with profiled("all_to_all", unit):
            return self.transport.all_to_all(axis, out, data, received, sent).at_place(at, flight)

    def broadcast(self, tensors: Sequence[Tensor], axis: Axis | None = None, source: int = 0) -> None:
        """Copy the values of rank `source` of an axis (default: all ranks) to all its ranks, in place. Not logged: it
        belongs to no step."""
        axis = axis or self.mesh.world
        for batch in _batches(tensors) if axis.size > 1 else ():
            dense = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in batch]
            parts = [tensor.view(-1).view(torch.uint8) for tensor in dense]  # bytes: gloo has no 8-bit floats
            data = torch.cat(parts) if len(parts) > 1 else parts[0]
            self.transport.broadcast(axis, data, source)
            for tensor, copy, part, found in zip(
                batch, dense, parts, torch.split(data, [part.numel() for part in parts]), strict=True
            ):
                if len(parts) > 1:
                    part.copy_(found)
                if copy is not tensor:
                    tensor.copy_(copy)

    # Small things -----------------------------------------------------------------------------------------------

    def add_up(self, numbers: Tensor, what: str = SOME_EXCHANGE) -> Tensor:
        """Sums over all ranks of the mesh, int64 [n] on the host, equal on all ranks. The cost grows with the number of
        ranks only by the depth of a tree. One wait for the device if the numbers fit into a packet.

        Args:
            numbers: int64 [n].
            what: the purpose in words: the call that every rank must make.

        Raises:
            Elsewhere: on all ranks, if the ranks are in different exchanges.
            Uneven: on all ranks, if they are in the same exchange with rows of different lengths.
        """
        return self.begin_sum(numbers, what).read()

    def begin_sum(self, numbers: Tensor, what: str) -> Unread[Tensor]:
        """Begin `add_up`. The host waits for the device when it reads the sums; the device may use them before."""
        at = self._begin_exchange(what)
        reading = self._start_sum(pack(self._name, what, numbers.nbytes, numbers[:ROOM]), at)

        def read() -> Tensor:
            sums, rest = numbers_in(self._met(what, numbers.nbytes, reading, at), numbers.numel()), numbers[ROOM:]
            return torch.cat([sums, self._read(self._start_sum(rest.clone(), at), at)]) if rest.numel() else sums

        return Unread(reading.on_device, read)

    def begin_alone(self, numbers: Tensor, what: str) -> Unread[Tensor]:
        """As `begin_sum`, of a single rank, also of other dtypes: its own numbers."""
        at, reading = self._begin("exchange", self.mesh.world, what), Reading(numbers)
        return Unread(numbers, lambda: self._read(reading, at))

    def are_alike(self, value: Any, what: str = SOME_EXCHANGE) -> bool:
        """Whether all ranks have the same JSON-able value, by a sum of digests over the ranks. `what`: as above."""
        number = number_of(json.dumps(value).encode())
        return are_alike(self.add_up(as_terms(on_device([number], self.device))[0], what).tolist())

    def count(self, of_this_rank: int, what: str = SOME_EXCHANGE) -> int:
        """The sum of one number over all ranks. `what`: as above."""
        return int(self.add_up(on_device([of_this_rank], self.device), what)[0])

    def exchange(self, row: Tensor, what: str = SOME_EXCHANGE) -> Tensor:
        """`row` [n] of every rank of the mesh, as [world, n], equal on all ranks. The cost grows with the number of
        ranks: use `add_up` or `are_alike` where they suffice.

        Args, Raises: as `add_up`.
        """
        data = row.detach().contiguous().view(torch.uint8)
        return self._from_all(data, self._meet(what, data.numel())).view(row.dtype)

    def exchange_objects(self, value: Any, what: str = SOME_EXCHANGE) -> list[Any]:
        """A JSON-able value of every rank of the mesh, in rank order, on all of them. `what`: as above."""
        at = self._meet(what)
        text = json.dumps(value).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        packet = torch.zeros(8 + ROOM_BYTES, dtype=torch.uint8, device="cpu")
        packet[:8].view(torch.int64)[0] = len(text)
        packet[8 : 8 + len(text)] = data[:ROOM_BYTES]
        rows = to_host(self._from_all(to_device(packet, self.device), at))
        sizes = rows[:, :8].contiguous().view(torch.int64)[:, 0].tolist()
        rows = rows[:, 8:]
        if max(sizes) > ROOM_BYTES:
            rest = torch.zeros(max(sizes) - ROOM_BYTES, dtype=torch.uint8, device="cpu")
            rest[: max(0, len(text) - ROOM_BYTES)] = data[ROOM_BYTES:]
            rows = torch.cat([rows, to_host(self._from_all(to_device(rest, self.device), at))], 1)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]

    def by_rank(self, value: Any, what: str = SOME_EXCHANGE) -> dict[int, Any]:
        """`exchange_objects`, by global rank. Messages name those: a group may have other ranks than 0, 1, 2, or have
        them in another order."""
        return dict(zip(self.mesh.world.ranks, self.exchange_objects(value, what), strict=True))

    def _begin_exchange(self, what: str) -> Wait:
        self._expect_followed(what)
        return self._begin("exchange", self.mesh.world, what)

    def _meet(self, what: str, num_bytes: int = 0, phase: str = "step") -> Wait:
        """Begin an exchange. Raises if the ranks are not in the same one."""
        # Every exchange begins with one packet of the same size. So its sum always completes, and a rank that is in
        # another exchange is found before bytes of two different exchanges are mixed.
        at, nothing = self._begin_exchange(what), torch.empty(0, dtype=torch.int64, device=self.device)
        self._met(what, num_bytes, self._start_sum(pack(self._name, what, num_bytes, nothing), at, phase), at)
        return at

    def _met(self, what: str, num_bytes: int, packet: Reading, at: Wait) -> Tensor:
        """The sum of the packets, on the host. Raises if the ranks are not in the same exchange."""
        sums = self._read(packet, at)
        if not is_one_place(sums):
            heads = self._from_all(to_device(head_of(self._name, what, num_bytes), self.device), at)
            problem = differences(to_host(heads), self.mesh.world.ranks)
            self.messages.failed |= isinstance(problem, Elsewhere)  # the ranks no longer expect the same messages
            raise problem
        return sums

    def _start_sum(self, numbers: Tensor, at: Wait, phase: str = "step") -> Reading:
        """Start to sum over all ranks. Overwrites `numbers`."""
        world, transport = self.mesh.world, self.transport
        if world.size > 1:
            sent = transport.sent_to_add_up(numbers.nbytes, world.size)
            flight = self.log.start("exchange", "control", phase, sent, common=numbers.nbytes)
            with profiled("exchange", "control"):
                pending = transport.add_up(world, numbers).at_place(at, flight)
            pending.wait()
        return Reading(numbers if self.mesh.stands_for == 1 else numbers.mul_(self.mesh.stands_for))

    def _read(self, numbers: Reading, at: Wait) -> Tensor:
        with _waiting(at, self.device):
            return numbers.wait()

    def _from_all(self, data: Tensor, at: Wait) -> Tensor:
        """uint8 [n] of every rank, as [world, n]."""
        world = self.mesh.world
        # Every row starts as a copy of the own one: a fake backend receives nothing, and the rows must still parse.
        rows = data.expand(world.size, -1).contiguous()
        if world.size > 1 and rows.numel():
            full = rows.view(-1)
            own = in_shards(full, world.size)[world.rank]
            gather = Gather(world, everything(full.numel(), world.size), full, own, "exchange")
            flight = self._log_gather("exchange", gather, "control", "step")
            with profiled("exchange", "control"):
                pending = self.transport.gather(gather).at_place(at, flight)
            pending.wait()
        if self.device.type != "cpu":
            with _waiting(at, self.device):
                torch.accelerator.current_stream(self.device).synchronize()
        return rows

    def give_order(self, what: str, *arguments: Any) -> None:
        """Tell the followers of a join that this rank is about to do `what`; see `orders.py`."""
        if self.orders is not None:
            self.orders.give(what, *arguments)

    def name_of_join(self) -> str:
        """A name for a join: the same on all ranks, and different for each join."""
        return f"{self._name} {HERE.begin(f'join {self._name}')}"

    def _expect_followed(self, what: str) -> None:
        if self.orders is not None:
            self.orders.refuse(what)

    def wait_for_all(self) -> None:
        """See `watch.wait_for_all`."""
        self._expect_followed("a wait for all ranks")
        watch.wait_for_all(self.mesh.world.ranks, self._name)

    def _begin(self, kind: str, axis: Axis, text: str) -> Wait:
        """Count a collective that begins here, for the watch. Raises in a forked copy of a rank."""
        if axis.size > 1:
            self.messages.expect_original()
        # Ranks are compared by these numbers: every rank must count every collective, so count before any return.
        key = f"{kind} {self._name}"
        return Wait(key, HERE.begin(key), axis.ranks, text)

    def meet_at(self, point: str) -> None:
        """See `Transport.meet_at`."""
        self._expect_followed(f"a meeting at {point}")
        self.transport.meet_at(point, {"all_gather": self.mesh.shard, "reduce_scatter": self.mesh.reduce})

    def _log_gather(self, op: str, gather: Gather, unit: str, phase: str) -> Flight:
        num_bytes = gather.portions.sent_to_gather(gather.axis.rank) * gather.full.element_size()
        return self.log.start(op, unit, phase, num_bytes, common=gather.num_bytes, kind=gather.kind)


TRANSPORTS: dict[TransportName, type[Transport]] = {
    transport.name: transport for transport in (SharedTransport, PairwiseTransport, NativeTransport)
}


def transport_named(name: TransportName) -> type[Transport]:
    """The transport class of that name, for the planner, which has no process group.

    Raises:
        ValueError: there is no transport of that name.
    """
    if name not in TRANSPORTS:
        raise InvalidValue(f"transport must be one of {', '.join(TRANSPORTS)}, found {name!r}")
    return TRANSPORTS[name]


@contextmanager
def _waiting(at: Wait, device: torch.device) -> Iterator[None]:
    # `wait()` of NCCL work returns at once; the host waits for the device inside of this block. The watch must see it.
    is_apart = device.type != "cpu"
    with HERE.waiting(at, on_device=is_apart), span("device", kind="wait") if is_apart else nullcontext():
        yield


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, without empty ones, in batches of at most `_TOGETHER_BYTES` on one device. A larger tensor
    is a batch of its own."""
    batch: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if batch and (num_bytes + tensor.nbytes > _TOGETHER_BYTES or tensor.device != batch[0].device):
            yield batch
            batch, num_bytes = [], 0
        if tensor.numel():
            batch.append(tensor)
            num_bytes += tensor.nbytes
    if batch:
        yield batch
