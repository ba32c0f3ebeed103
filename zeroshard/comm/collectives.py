"""What is exchanged among the ranks of a mesh: each collective is logged, and the watch knows where this rank is.

How the bytes go says a transport (`transports.py`). Not all of a buffer has to move: `Portions` say what of each shard
does.

Everything returns a `Pending` at once. A group of one has nothing to move and returns a finished one: there is no
other special path for a single rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.alike import are_alike, as_terms
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.mesh import Axis, Mesh, problem_of
from zeroshard.comm.messages import Messages, label
from zeroshard.comm.native_transport import NativeTransport
from zeroshard.comm.orders import Voice
from zeroshard.comm.packets import (
    PACKET,
    ROOM,
    ROOM_BYTES,
    Elsewhere,
    differences,
    head_of,
    is_one_place,
    number_of,
    on_device,
    pack,
)
from zeroshard.comm.pairwise_transport import PairwiseTransport
from zeroshard.comm.patience import wait_for_all
from zeroshard.comm.pending import Pending
from zeroshard.comm.positions import HERE, Wait
from zeroshard.comm.profiling import span
from zeroshard.comm.samples import Samples
from zeroshard.comm.shared_memory import SharedMemory
from zeroshard.comm.shared_transport import SharedTransport
from zeroshard.comm.transport import Gather, Reduction, Sum, Transport
from zeroshard.errors import InvalidValue
from zeroshard.layout.portions import Portions, everything
from zeroshard.layout.sums import in_shards

SOME_EXCHANGE = "an exchange among all ranks"
_TOGETHER_BYTES = 1 << 20
"""Of tensors that are broadcast as one: each broadcast costs a round trip, however little it moves."""


class Collectives:
    """The collectives of one mesh, logged.

    Attributes:
        transport: how whole buffers go. Small rows, and sums over replicas, go by its fallback.
        device: where control data travels, and tensors are expected.
        samples: of what has been gathered.
        orders: inside of a join, for the ranks that have run out of inputs.
    """

    def __init__(self, mesh: Mesh, log: CommLog) -> None:
        self.mesh = mesh
        self.log = log
        self.device = mesh.device
        self._name = HERE.name_of_mesh(mesh.world.ranks)
        self.messages = Messages(mesh.world.rank, self._name)
        self.orders: Voice | None = None
        self.samples = Samples(self.device)
        transport = PairwiseTransport if mesh.is_pairwise else NativeTransport
        self.transport: Transport = transport(self.messages, log)
        if mesh.is_pairwise and mesh.world.size > 1 and hasattr(os, "memfd_create"):
            self._try_to_share()

    def _try_to_share(self) -> None:
        """Read each other's memory, where every rank can."""
        self.transport = (
            SharedTransport.between(self.mesh.world, self.transport, self.exchange_objects) or self.transport
        )
        self.log.clear()

    @property
    def shared(self) -> SharedMemory | None:
        """What all ranks can read, where they can: buffers allocated in it do not move."""
        return self.transport.memory

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 zeros [num_bytes] for buffers that peers gather or reduce from."""
        return self.transport.allocate(num_bytes, device)

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether it lies in memory that peers map."""
        return self.transport.is_shared(tensor)

    def map_peers(self) -> None:
        """Map what the peers have allocated so far, where they read each other's memory. Collective."""
        self.transport.map_peers(self.exchange_objects)

    # Full buffers -----------------------------------------------------------------------------------------------

    def all_gather(
        self,
        full: Tensor,
        source: Tensor | None = None,
        *,
        unit: str,
        phase: str,
        acknowledge: bool = False,
        portions: Portions | None = None,
    ) -> Pending:
        """SHARDED -> REPLICATED, in place. `full` [numel]: the own shard is filled in, the others arrive.

        Args:
            source: [numel / d], the same values where they rest, if that is not inside `full`.
            portions: what arrives; the rest of `full` is the same on all ranks already.
            acknowledge: the own shard will be written to before the ranks meet again; call `release` first. (Weights
                are written by a step, and a step begins with an exchange among all ranks.)
        """
        if phase not in ("forward", "backward"):
            self._expect_followed(f"a gather of unit {unit} ({phase})")
        axis = self.mesh.shard
        at = self._begin("all_gather", axis, f"all_gather of unit {unit} ({phase})")
        # The number is taken now, not on arrival: gathers may arrive in another order on each rank, and the number
        # chooses which elements are sampled.
        look = partial(self.samples.take, self.samples.next_number(), unit, full)
        if axis.size == 1 or not full.numel():
            return Pending().then(look, at)
        moved = portions or everything(full.numel(), axis.size)
        own = in_shards(full, axis.size)[axis.rank] if source is None else source
        gather = Gather(axis, moved, full, own, "all_gather", label(unit, phase), acknowledge)
        self._record_gather(gather, unit, phase)
        with span(f"all_gather({unit})"):
            return self.transport.gather(gather).then(look, at)

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
        """PARTIAL -> SHARDED: `out` becomes the sum over ranks of the own shard of `full`, divided.

        Args:
            full: [numel], this rank's terms. Nothing may write to it until the result has been waited for. (The
                backend's own collectives may leave other values in the shards of others.)
            out: [numel / d], `full`'s dtype; may be the own shard inside `full` (then it happens in place).
            portions: what is summed; the rest of `out` stays as it is.

        Under a 2-D mesh the shard is then summed over its replicas as well, before it is divided.
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
            self.log.record("reduce_scatter", unit, phase, num_bytes, common=moved.total * itemsize)
            with span(f"reduce_scatter({unit})"):
                pending = self.transport.reduce(sum_).at_place(at)
        else:
            sum_.put(sum_.own)
            pending = Pending()
        if replicas.size == 1 or not full.numel():
            return pending
        return Pending(self, (), partial(self._sum_over_replicas, pending, sum_, reduction, unit, phase)).at_place(at)

    def _sum_over_replicas(self, pending: Pending, of_shards: Sum, reduction: Reduction, unit: str, phase: str) -> None:
        """When `of_shards` is there: of its result, by a reduction and a gather."""
        pending.release()
        axis, out, moved, itemsize = self.mesh.replicate, of_shards.out, of_shards.portions, reduction.wire.itemsize
        of_own = Portions.of(moved.inside(of_shards.axis.rank), out.numel(), axis.size)
        num_elements = of_own.sent_to_reduce(axis.rank) + of_own.sent_to_gather(axis.rank)
        self.log.record("reduce_replicas", unit, phase, num_elements * itemsize, common=moved.total * itemsize)
        part, transport = in_shards(out, axis.size)[axis.rank], self.transport.fallback
        transport.reduce(Sum(axis, of_own, out, part, reduction, "replicate")).wait()
        with span(f"replicate({unit})"):
            gathering = transport.gather(Gather(axis, of_own, out, part, "replicate"))
        gathering.wait()

    def acknowledge(self) -> Pending:
        """This rank has read all that its peers on the shard axis have given it. Waited for, so have they."""
        axis = self.mesh.shard
        key = f"read {self._name}"
        at = Wait(key, HERE.begin(key), axis.ranks, "the ranks that read its weights")
        return Pending(self, self.messages.acknowledge(axis)).at_place(at)

    def all_to_all(
        self, out: Tensor, data: Tensor, received: Sequence[int], sent: Sequence[int], *, unit: str, phase: str
    ) -> Pending:
        """Over the shard axis: the first `sent[0]` elements of `data` go to rank 0, the next `sent[1]` to rank 1, ...;
        `out` takes `received[r]` elements from each rank r, in rank order."""
        axis = self.mesh.shard
        at = self._begin("all_to_all", axis, f"all_to_all of unit {unit} ({phase})")
        total = sum(sent)
        out, data = out[: sum(received)], data[:total]
        self.log.record("all_to_all", unit, phase, (total - sent[axis.rank]) * data.element_size(), common=0)
        if axis.size == 1:
            out.copy_(data)
            return Pending().at_place(at)
        with span(f"all_to_all({unit})"):
            return self.transport.all_to_all(axis, out, data, received, sent).at_place(at)

    def broadcast(self, tensors: Sequence[Tensor], axis: Axis | None = None, source: int = 0) -> None:
        """The values of rank `source` of an axis (all ranks), in place. Not logged: it belongs to no step."""
        axis = axis or self.mesh.world
        for batch in _batches(tensors) if axis.size > 1 else ():
            dense = [tensor.contiguous() for tensor in batch]
            parts = [tensor.view(-1).view(torch.uint8) for tensor in dense]  # gloo knows no 8-bit floats
            data = torch.cat(parts) if len(parts) > 1 else parts[0]
            self.transport.broadcast(axis, data, source)
            for tensor, copy, part, found in zip(
                batch, dense, parts, torch.split(data, [*map(len, parts)]), strict=True
            ):
                if len(parts) > 1:
                    part.copy_(found)
                if copy is not tensor:
                    tensor.copy_(copy)

    # Small things -----------------------------------------------------------------------------------------------

    def add_up(self, numbers: Tensor, what: str = SOME_EXCHANGE) -> Tensor:
        """Sums over all ranks of the mesh, on the host: the same on all of them. What this costs does not grow with
        the number of ranks, but for the depth of a tree. One wait for the device, if the numbers fit into a packet.

        Args:
            numbers: int64 [n].
            what: this is for, in words: the call that every rank must make.

        Raises:
            Elsewhere: on all ranks: they are not in the same exchange.
            Uneven: on all ranks: they are, with rows of different lengths.
        """
        at = self._begin_exchange(what)
        sums = self._meet(what, numbers.nbytes, numbers[:ROOM], at)
        return sums if numbers.numel() <= ROOM else torch.cat([sums, self._sum(numbers[ROOM:].clone(), at)])

    def are_alike(self, value: Any, what: str = SOME_EXCHANGE) -> bool:
        """Whether all ranks have the same JSON-able value: a sum over the ranks, of a digest. `what`: as above."""
        number = number_of(json.dumps(value).encode())
        return are_alike(self.add_up(as_terms(on_device([number], self.device))[0], what).tolist())

    def count(self, of_this_rank: int, what: str = SOME_EXCHANGE) -> int:
        """The sum over all ranks of one number. `what`: as above."""
        return int(self.add_up(on_device([of_this_rank], self.device), what)[0])

    def exchange(self, row: Tensor, what: str = SOME_EXCHANGE) -> Tensor:
        """`row` [n] of every rank of the mesh, as [world, n], equal on all of them. It grows with the number of ranks:
        where a sum, or a comparison, will do, take that.

        Args, Raises: as `add_up`.
        """
        at = self._begin_exchange(what)
        data = row.detach().contiguous().view(torch.uint8)
        self._meet(what, data.numel(), self._nothing, at)
        return self._from_all(data, at).view(row.dtype)

    def exchange_objects(self, value: Any, what: str = SOME_EXCHANGE) -> list[Any]:
        """A JSON-able value of every rank of the mesh, in rank order, on all of them. `what`: as above."""
        at = self._begin_exchange(what)
        self._meet(what, 0, self._nothing, at)
        text = json.dumps(value).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        packet = torch.zeros(8 + ROOM_BYTES, dtype=torch.uint8)
        packet[:8].view(torch.int64)[0] = len(text)
        packet[8 : 8 + len(text)] = data[:ROOM_BYTES]
        rows = self._from_all(packet.to(self.device), at).cpu()
        sizes = rows[:, :8].contiguous().view(torch.int64)[:, 0].tolist()
        rows = rows[:, 8:]
        if max(sizes) > ROOM_BYTES:
            rest = torch.zeros(max(sizes) - ROOM_BYTES, dtype=torch.uint8)
            rest[: max(0, len(text) - ROOM_BYTES)] = data[ROOM_BYTES:]
            rows = torch.cat([rows, self._from_all(rest.to(self.device), at).cpu()], 1)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]

    @property
    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.device)

    def _begin_exchange(self, what: str) -> Wait:
        self._expect_followed(what)
        return self._begin("exchange", self.mesh.world, what)

    def _meet(self, what: str, num_bytes: int, numbers: Tensor, at: Wait) -> Tensor:
        """The sums of some numbers, once all ranks are known to be at the same place."""
        sums = self._sum(pack(what, num_bytes, numbers), at)
        if not is_one_place(sums):
            heads = self._from_all(head_of(what, num_bytes).to(self.device), at)
            problem = differences(heads.cpu(), self.mesh.world.ranks)
            self.messages.failed |= isinstance(problem, Elsewhere)  # the ranks no longer expect the same messages
            raise problem
        return sums[PACKET - ROOM :][: numbers.numel()]

    def _sum(self, numbers: Tensor, at: Wait) -> Tensor:
        """Over all ranks, on the host. `numbers` are written to."""
        world, transport = self.mesh.world, self.transport.fallback
        if world.size > 1:
            sent = transport.sent_to_add_up(numbers.nbytes, world.size)
            self.log.record("exchange", "control", "step", sent, common=numbers.nbytes)
            with span("exchange(control)"):
                pending = transport.add_up(world, numbers).at_place(at)
            pending.wait()
        # A wait for NCCL's work returns at once: the host would stand where it reads the sums, unseen by the watch.
        with HERE.waiting(at):
            return numbers.cpu().mul_(self.mesh.stands_for)

    def _from_all(self, data: Tensor, at: Wait) -> Tensor:
        """uint8 [n] of every rank, as [world, n]."""
        world = self.mesh.world
        rows = data.expand(world.size, -1).contiguous()  # a fake backend sends nothing: then all are as this one's
        if world.size > 1 and rows.numel():
            full = rows.view(-1)
            own = in_shards(full, world.size)[world.rank]
            gather = Gather(world, everything(full.numel(), world.size), full, own, "exchange")
            self._record_gather(gather, "control", "step")
            with span("exchange(control)"):
                pending = self.transport.fallback.gather(gather).at_place(at)
            pending.wait()
        if self.device.type != "cpu":
            with HERE.waiting(at):
                torch.accelerator.current_stream(self.device).synchronize()
        return rows

    def give_order(self, what: str, *arguments: Any) -> None:
        """This rank is about to do so; see `orders.py`."""
        if self.orders is not None:
            self.orders.give(what, *arguments)

    def name_of_join(self) -> str:
        """The same on all ranks, and another for each."""
        return f"{self._name} {HERE.begin(f'join {self._name}')}"

    def _expect_followed(self, what: str) -> None:
        if self.orders is not None:
            self.orders.refuse(what)

    def wait_for_all(self) -> None:
        """Until every rank has come here, however long one of them works alone (a collective gives up after its
        timeout): as long as the watch hears of it. Without a watch it returns at once."""
        self._expect_followed("a wait for all ranks")
        world = self.mesh.world
        wait_for_all(world.ranks, self._name)

    def _begin(self, kind: str, axis: Axis, text: str) -> Wait:
        """A collective begins here."""
        key = f"{kind} {self._name}"
        return Wait(key, HERE.begin(key), axis.ranks, text)

    def expect_grid(self) -> None:
        """Shards and replicas fit together. Collective.

        Raises:
            ValueError: groups whose ranks are in different orders.
        """
        if self.mesh.replicate.size > 1:
            problem = problem_of(dict(self.exchange_objects(self.mesh.place())))
            if problem:
                raise InvalidValue(f"mesh: {problem}")

    def meet_at(self, point: str) -> None:
        """All ranks come to the same point of the program. One that gathers or reduces meanwhile raises, as do those
        that are here, where collectives are announced (on gloo; elsewhere they wait). Collective.

        Raises:
            RuntimeError: a peer is elsewhere.
        """
        self._expect_followed(f"a meeting at {point}")
        self.transport.meet_at(point, {"all_gather": self.mesh.shard, "reduce_scatter": self.mesh.reduce})

    def _record_gather(self, gather: Gather, unit: str, phase: str) -> None:
        num_elements, itemsize = gather.portions.sent_to_gather(gather.axis.rank), gather.full.element_size()
        self.log.record(gather.kind, unit, phase, num_elements * itemsize, common=gather.num_bytes)


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, without empty ones; what is small travels together."""
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
