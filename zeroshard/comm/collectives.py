"""The only caller of torch.distributed collectives: what is exchanged, and how.

Three ways to move the same bytes:

- *shared* (gloo, all ranks on one host): buffers lie in memory that every rank maps; messages say when one may
  be read, and when it has been.
- *pairwise* (gloo): `isend` / `irecv` of slices, straight into place. gloo's own reduce-scatter and all-gather clone
  the whole buffer; the exchange is three to four times faster, needs no hidden memory, and sums in rank order, an
  order that we choose: `((g0 + g1) + g2) + ...` on every rank, whoever owns the shard.
- *native* (NCCL and others): the backend's reduce-scatter and all-gather, in place.

Not all of a buffer has to move: `Portions` say what of each shard does.

Everything returns a `Pending` at once. A group of one has nothing to move and returns a finished one: there is no
other special path for a single rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.mesh import Axis, Mesh, problem_of
from zeroshard.comm.messages import Messages, Told, label, receive, send
from zeroshard.comm.orders import Voice
from zeroshard.comm.packets import HEAD_BYTES, ROOM_BYTES, Elsewhere, expect_same, pack
from zeroshard.comm.patience import wait_for_all
from zeroshard.comm.positions import HERE, Wait
from zeroshard.comm.profiling import span
from zeroshard.comm.samples import Samples
from zeroshard.comm.shared_memory import Location, Probe, Process, SharedMemory
from zeroshard.layout.portions import Portions, everything
from zeroshard.layout.sums import carve, divide, in_shards, parts, split_like, sum_in_rank_order

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Transport = Literal["shared", "pairwise", "native"]
"""One of the three ways above."""
SOME_EXCHANGE = "an exchange among all ranks"


class Pending:
    """Communication under way. `wait()` returns when the result may be used (on CUDA: by the current stream).

    Attributes:
        at: which collective this is, for the watch.
    """

    def __init__(
        self,
        owner: Collectives | None = None,
        works: Sequence[Any] = (),
        finish: Callable[[], Sequence[Any] | None] | None = None,
        told: Told | None = None,
    ) -> None:
        """`told`: messages that are heard before the works are waited for; `finish`: runs after, and may return further
        works, for `release`."""
        self._owner, self._works, self._finish, self._told = owner, works, finish, told
        self._acknowledgements: Sequence[Any] = ()
        self._look: Callable[[], None] | None = None
        self.at: Wait | None = None

    def wait(self, *, stale: bool = False) -> None:
        """`stale`: the result will not be used. A peer may have begun to replace it, so nobody looks at it."""
        look, self._look = self._look, None
        self._arrive()
        if look is not None and not stale:
            look()

    def _arrive(self) -> None:
        # Taken before anything can raise: `__del__` must not wait a second time for what has failed.
        works, self._works = self._works, ()
        told, self._told = self._told, None
        finish, self._finish = self._finish, None
        if self._owner is None or not (works or finish or told):
            return
        start = time.perf_counter()
        with self._failing():
            # Messages first: they say whether the peers are in this very collective. If they are not, what has been
            # posted for the data belongs to another one, and to wait for it would be to wait without end.
            if told is not None:
                self._owner.messages.hear(told)
            for work in works:
                work.wait()
            if finish is not None:
                self._acknowledgements = finish() or ()
        self._owner.log.wait_seconds += time.perf_counter() - start

    def then(self, look: Callable[[], None], at: Wait) -> Pending:
        """This one, at that place; `look` is called as soon as the result may be used."""
        self._look = look
        return self.at_place(at)

    def at_place(self, at: Wait) -> Pending:
        self.at = at
        return self

    def release(self) -> None:
        """Waits until the peers have read what this rank gave, too: only then may it be written to."""
        self.wait()
        works, self._acknowledgements = self._acknowledgements, ()
        if not works:
            return
        with self._failing():
            for work in works:
                work.wait()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """While it is waited for."""
        with nullcontext() if self.at is None else HERE.waiting(self.at):
            with nullcontext() if self._owner is None else self._owner.messages.failing():
                yield

    def __del__(self) -> None:
        # gloo: a message whose receive is gone has nowhere to go, and blocks its connection for everything after it,
        # whatever the tag ("Timed out waiting ... for send operation to complete"). So a result that nobody wants is
        # waited for all the same; but once something has failed, nobody may wait for what will never come.
        if self._owner is not None and not self._owner.messages.failed:
            with suppress(RuntimeError):
                if self._told is not None:
                    self._told.arrive()
                for work in [*self._works, *self._acknowledgements]:
                    work.wait()


@dataclass(frozen=True)
class Sum:
    """One sum over the ranks of an axis.

    Attributes:
        portions: what is summed.
        full: [numel], this rank's terms.
        out: [numel / d], where the sum of the own portions goes.
        scratch: uint8, exclusive until it is there.
        divisor: of the sum.
    """

    axis: Axis
    portions: Portions
    full: Tensor
    out: Tensor
    scratch: Tensor
    divisor: int

    @property
    def is_in_place(self) -> bool:
        return _is_in_place(self.out, in_shards(self.full, self.axis.size)[self.axis.rank])

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
        own = parts(self.full, self.portions.of_shard[self.axis.rank])
        for number, (place, total) in enumerate(zip(self.places, totals, strict=True)):
            terms = [of_peer[number] for of_peer in of_peers]
            sum_in_rank_order(own[number], terms, self.axis.rank, total, place, self.divisor)

    def totals_in(self, scratch: Tensor) -> list[Tensor]:
        """For `take`, one after the other in bytes that nobody needs any more."""
        return [scratch.view(self.full.dtype)] * len(self.places)


class Collectives:
    """The collectives of one mesh, logged.

    Attributes:
        pairwise: whether buffers move by pairwise exchange (gloo) or by the backend's own collectives.
        shared: memory that all ranks can read, where they can: then buffers allocated in it do not move.
        device: where control data travels, and tensors are expected.
        samples: of what has been gathered.
        orders: inside of a join, for the ranks that have run out of inputs.
    """

    def __init__(self, mesh: Mesh, log: CommLog) -> None:
        self.mesh = mesh
        self.log = log
        self.pairwise = mesh.is_pairwise
        self.device = mesh.device
        self.shared: SharedMemory | None = None
        self._processes: dict[int, Process] = {}  # of the peers, by global rank
        self.messages = Messages(mesh.world.rank)
        self._name = HERE.name_of_mesh(mesh.world.ranks)
        self.orders: Voice | None = None
        self.samples = Samples(self.device)
        if self.pairwise and mesh.world.size > 1 and hasattr(os, "memfd_create"):
            self._try_to_share()

    @property
    def transport(self) -> Transport:
        """The way that whole buffers go. (In shared memory, what is cast on the way goes pairwise.)"""
        if self.shared is not None:
            return "shared"
        return "pairwise" if self.pairwise else "native"

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 zeros [num_bytes] for buffers that peers gather or reduce from."""
        if self.shared is not None and device.type == "cpu":
            return self.shared.allocate(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether it lies in memory that peers map."""
        return self.shared is not None and self.shared.locate(tensor) is not None

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
        moved = portions or everything(full.numel(), axis.size)
        at = self._begin("all_gather", axis, f"all_gather of unit {unit} ({phase})")
        # [Note: who may write to shared memory]
        # A peer reads here, when it wants, what this rank has only announced. Nothing may write to it before the peers
        # have answered (`release`), or before all ranks have met otherwise: shards of weights are written by a step,
        # and a step begins with the control exchange. Buckets are used again within a backward, so reductions always
        # answer.
        own = in_shards(full, axis.size)[axis.rank] if source is None else source
        location = self.shared.locate(own) if self.shared is not None else None
        sample = partial(self.samples.take, self.samples.next_number(), unit, full)
        if location is None or axis.size == 1 or not full.numel():
            return self._all_gather(axis, full, "all_gather", unit, phase, moved).then(sample, at)
        self._record_gather(axis, "all_gather", unit, phase, moved, full.element_size())
        with span(f"all_gather({unit})"):
            num_bytes = moved.total * full.element_size()
            told = self.messages.tell(axis, location, "all_gather", label(unit, phase), num_bytes)

        def copy_from_peers() -> Sequence[Any]:
            for rank, place in enumerate(in_shards(full, axis.size)):
                if rank != axis.rank:
                    theirs, inside = self._peer(axis, rank, told.messages[rank], place), moved.inside(rank)
                    for to, value in zip(parts(place, inside), parts(theirs, inside), strict=True):
                        to.copy_(value)
            return self.messages.acknowledge(axis) if acknowledge else []

        return Pending(self, (), copy_from_peers, told).then(sample, at)

    def reduce_scatter(
        self,
        full: Tensor,
        out: Tensor,
        scratch: Tensor,
        *,
        wire: torch.dtype,
        unit: str,
        phase: str,
        divisor: int = 1,
        portions: Portions | None = None,
    ) -> Pending:
        """PARTIAL -> SHARDED: `out` becomes the sum over ranks of the own shard of `full`, divided.

        Args:
            full: [numel], this rank's terms. Nothing may write to it until the result has been waited for. (The
                backend's own collectives may leave other values in the shards of others.)
            out: [numel / d], `full`'s dtype; may be the own shard inside `full` (then it happens in place).
            scratch: `reduce_scratch_bytes(...)` bytes of uint8 or more, exclusive until the result is waited for.
            wire: the dtype that travels. Sums are taken in the wider of `wire` and `full.dtype`.
            divisor: of the sum, once it has been rounded to `full.dtype`.
            portions: what is summed; the rest of `out` stays as it is.

        Under a 2-D mesh the shard is then summed over its replicas as well, before it is divided.
        """
        axis, replicas = self.mesh.reduce, self.mesh.replicate
        moved = portions or everything(full.numel(), axis.size)
        of_shards, of_replicas = (divisor, 1) if replicas.size == 1 else (1, divisor)
        pending, at = Pending(), self._begin("reduce_scatter", axis, f"reduce_scatter of unit {unit} ({phase})")
        if axis.size > 1 and full.numel():
            num_bytes = moved.sent_to_reduce(axis.rank) * wire.itemsize
            self.log.record("reduce_scatter", unit, phase, num_bytes, common=moved.total * wire.itemsize)
            with span(f"reduce_scatter({unit})"):
                sum_ = Sum(axis, moved, full, out, scratch, of_shards)
                shared = self._reduce_shared(sum_, unit) if wire == full.dtype else None
                start = self._reduce_pairwise if self.pairwise else self._reduce_native
                pending = shared or start(sum_, wire, "reduce_scatter", unit)
                pending.at_place(at)
        else:
            for place, own in zip(
                parts(out, moved.inside(axis.rank)), parts(full, moved.of_shard[axis.rank]), strict=True
            ):
                if not _is_in_place(place, own):
                    place.copy_(own)
                divide(place, of_shards)
        if replicas.size == 1 or not full.numel():
            return pending

        def sum_over_replicas() -> None:
            pending.release()
            of_own = Portions.of(moved.inside(axis.rank), out.numel(), replicas.size)
            num_elements = of_own.sent_to_reduce(replicas.rank) + of_own.sent_to_gather(replicas.rank)
            self.log.record(
                "reduce_replicas", unit, phase, num_elements * wire.itemsize, common=moved.total * wire.itemsize
            )
            part = in_shards(out, replicas.size)[replicas.rank]
            start = self._reduce_pairwise if self.pairwise else self._reduce_native
            start(Sum(replicas, of_own, out, part, scratch, of_replicas), wire, "replicate", unit).wait()
            self._all_gather(replicas, out, "replicate", unit, phase, of_own, log=False).wait()

        return Pending(self, (), sum_over_replicas).at_place(at)

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
        parts, places = torch.split(data[:total], list(sent)), torch.split(out[: sum(received)], list(received))
        self.log.record("all_to_all", unit, phase, (total - sent[axis.rank]) * data.element_size(), common=0)
        with span(f"all_to_all({unit})"):
            if not self.pairwise and axis.size > 1:
                arguments = out[: sum(received)], data[:total], list(received), list(sent)
                return Pending(self, [dist.all_to_all_single(*arguments, group=axis.group, async_op=True)]).at_place(at)
            works = []
            for step in range(1, axis.size):
                source, target = (axis.rank - step) % axis.size, (axis.rank + step) % axis.size
                if places[source].numel():
                    works.append(receive(axis, places[source], source, "all_to_all"))
                if parts[target].numel():
                    works.append(send(axis, parts[target], target, "all_to_all"))
            places[axis.rank].copy_(parts[axis.rank])
            return Pending(self, works).at_place(at)

    def broadcast(self, tensors: Sequence[Tensor], axis: Axis | None = None, source: int = 0) -> None:
        """The values of rank `source` of an axis (all ranks), in place. Not logged: it belongs to no step."""
        axis = axis or self.mesh.world
        for tensor in tensors if axis.size > 1 else ():
            if tensor.numel():
                dense = tensor.contiguous()  # its bytes travel: gloo knows no 8-bit floats
                dist.broadcast(dense.view(-1).view(torch.uint8), group=axis.group, group_src=source)
                if dense is not tensor:
                    tensor.copy_(dense)

    # Small things -----------------------------------------------------------------------------------------------

    def exchange(self, row: Tensor, what: str = SOME_EXCHANGE) -> Tensor:
        """`row` [n] of every rank of the mesh, as [world, n], equal on all of them.

        Args:
            what: this is for, in words: the call that every rank must make.

        Raises:
            Elsewhere: on all ranks: they are not in the same exchange.
            Uneven: on all ranks: they are, with rows of different lengths.
        """
        self._expect_followed(what)
        world = self.mesh.world
        at = self._begin("exchange", world, what)
        data = row.detach().contiguous().view(torch.uint8)
        packets = self._from_all(pack(what, data), at)
        try:
            expect_same(packets, world.ranks)
        except Elsewhere:
            self.messages.failed = True  # the ranks no longer expect the same messages
            raise
        rows = packets[:, HEAD_BYTES : HEAD_BYTES + data.numel()]
        if data.numel() > ROOM_BYTES:
            rows = torch.cat([rows, self._from_all(data[ROOM_BYTES:], at)], 1)
        return rows.contiguous().view(row.dtype)

    def _from_all(self, data: Tensor, at: Wait) -> Tensor:
        """uint8 [n] of every rank, as [world, n]."""
        world = self.mesh.world
        rows = data.expand(world.size, -1).contiguous()  # a fake backend sends nothing: then all are as this one's
        moved = everything(rows.numel(), world.size)
        self._all_gather(world, rows.view(-1), "exchange", "control", "step", moved).at_place(at).wait()
        if self.device.type != "cpu":
            # A wait for NCCL's work returns at once: the host would stand where it reads the rows, unseen by the watch.
            with HERE.waiting(at):
                torch.accelerator.current_stream(self.device).synchronize()
        return rows

    def exchange_objects(self, value: Any, what: str = SOME_EXCHANGE) -> list[Any]:
        """A JSON-able value of every rank of the mesh, in rank order, on all of them. `what`: as above."""
        device = self.device
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.exchange(torch.tensor([data.numel()], dtype=torch.int64, device=device), what)[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.exchange(padded.to(device), what).cpu()
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]

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
                raise ValueError(f"mesh: {problem}")

    def meet_at(self, point: str) -> None:
        """All ranks come to the same point of the program. One that gathers or reduces meanwhile raises, as do those
        that are here (on gloo; elsewhere they wait). Collective.

        Raises:
            RuntimeError: a peer is elsewhere.
        """
        self._expect_followed(f"a meeting at {point}")
        if not self.pairwise:
            return
        axes = {"all_gather": self.mesh.shard, "reduce_scatter": self.mesh.reduce}
        told = [self.messages.tell(axis, None, kind, point, 0) for kind, axis in axes.items() if axis.size > 1]
        with self.messages.failing():
            for one in told:
                self.messages.hear(one)

    # The three ways -----------------------------------------------------------------------------------------------

    def _all_gather(
        self, axis: Axis, full: Tensor, kind: str, unit: str, phase: str, moved: Portions, *, log: bool = True
    ) -> Pending:
        if axis.size == 1 or not full.numel():
            return Pending()
        if log:
            self._record_gather(axis, kind, unit, phase, moved, full.element_size())
        with span(f"{kind}({unit})"):
            if not self.pairwise:
                return Pending(self, self._gather_native(axis, full, moved))
            told = None
            if kind == "all_gather":
                num_bytes = moved.total * full.element_size()
                told = self.messages.tell(axis, None, kind, label(unit, phase), num_bytes)
            works = []
            # In step s everybody sends to the rank s places ahead: no rank receives from two at once. gloo's own
            # all-gather clones the whole buffer first. Receives are posted before sends: what arrives goes straight
            # into place.
            for step in range(1, axis.size):
                source, target = (axis.rank - step) % axis.size, (axis.rank + step) % axis.size
                works += [receive(axis, part, source, kind) for part in parts(full, moved.of_shard[source])]
                works += [send(axis, part, target, kind) for part in parts(full, moved.of_shard[axis.rank])]
            return Pending(self, works, told=told)

    def _gather_native(self, axis: Axis, full: Tensor, moved: Portions) -> list[Any]:
        if moved.is_whole:
            return [_all_gather(full, in_shards(full, axis.size)[axis.rank], group=axis.group, async_op=True)]
        return [
            dist.broadcast(part, group=axis.group, group_src=rank, async_op=True)
            for rank, intervals in enumerate(moved.of_shard)
            for part in parts(full, intervals)
        ]

    def _record_gather(self, axis: Axis, kind: str, unit: str, phase: str, moved: Portions, itemsize: int) -> None:
        self.log.record(kind, unit, phase, moved.sent_to_gather(axis.rank) * itemsize, common=moved.total * itemsize)

    def _reduce_shared(self, sum_: Sum, unit: str) -> Pending | None:
        """None where the terms do not lie in shared memory."""
        axis, full = sum_.axis, sum_.full
        location = self.shared.locate(full) if self.shared is not None else None
        if location is None:
            return None
        num_bytes = sum_.portions.total * full.element_size()
        told = self.messages.tell(axis, location, "reduce_scatter", label(unit), num_bytes)

        def sum_from_peers() -> Sequence[Any]:
            own = sum_.portions.of_shard[axis.rank]
            of_peers = [
                parts(self._peer(axis, rank, told.messages[rank], full), own)
                for rank in range(axis.size)
                if rank != axis.rank
            ]
            sum_.take(of_peers, sum_.totals_in(sum_.scratch) if sum_.is_in_place else sum_.places)
            return self.messages.acknowledge(axis)

        return Pending(self, (), sum_from_peers, told)

    def _peer(self, axis: Axis, rank: int, message: Tensor, like: Tensor) -> Tensor:
        assert self.shared is not None
        return self.shared.peer(self._processes[axis.ranks[rank]], Location(*message[:4].tolist()), like)

    def meet(self) -> None:
        """Map what the peers have allocated so far. A fast rank may free its buffers while a slow one still reads
        them, but not before that one has mapped them. Collective."""
        if self.shared is None:
            return
        # Two exchanges: the first says what there is, and nobody frees anything until all have passed the second.
        everyone = self.exchange_objects(self.shared.own_segments())
        for rank, segments in zip(self.mesh.world.ranks, everyone, strict=True):
            if rank in self._processes:
                self.shared.meet(self._processes[rank], segments)
        self.exchange_objects(None)

    def _try_to_share(self) -> None:
        """Whether every rank can read every other's memory: all of them find the same answer."""
        world, shared = self.mesh.world, SharedMemory()
        probe = Probe(shared, world.rank, world.size)
        cards = self.exchange_objects(probe.card())
        answers = self.exchange_objects(probe.answer(cards))
        if all(self.exchange_objects(all(answers) and probe.is_answered(cards))):
            self.shared = shared
            for rank, (pid, identity, *_) in zip(world.ranks, cards, strict=True):
                if rank != world.ranks[world.rank]:
                    self._processes[rank] = Process(pid, identity)
        self.log.clear()

    def _reduce_pairwise(self, sum_: Sum, wire: torch.dtype, kind: str, unit: str) -> Pending:
        # [Note: sums in rank order]
        # ((g0 + g1) + g2) + ... on every rank, whoever owns the element: that is why all plans have the same bits. To
        # add terms as they arrive, or the own one first, would be quicker, and would make them differ
        # (`sum_in_rank_order`; torch's ring and tree algorithms depend on the number of ranks and on the place in the
        # buffer).
        axis, moved, full = sum_.axis, sum_.portions, sum_.full
        peers = [rank for rank in range(axis.size) if rank != axis.rank]
        # One term arrives where the sum goes.
        spared = [sum_.places] if wire == full.dtype and not sum_.is_in_place else []
        carved, rest = carve(sum_.scratch, len(peers) - len(spared), moved.numel_of(axis.rank), wire)
        received = [*spared, *(split_like(term, sum_.places) for term in carved)]
        num_bytes = moved.total * full.element_size()
        told = self.messages.tell(axis, None, kind, label(unit), num_bytes) if kind == "reduce_scatter" else None
        works = [receive(axis, part, peer, kind) for peer, term in zip(peers, received, strict=True) for part in term]
        left = rest
        for peer in peers:
            term = parts(full, moved.of_shard[peer])
            if wire != full.dtype:
                cast, left = carve(left, 1, moved.numel_of(peer), wire)
                for place, part in zip(split_like(cast[0], term), term, strict=True):
                    place.copy_(part)
                term = split_like(cast[0], term)
            works += [send(axis, part, peer, kind) for part in term]
        narrow = wire.itemsize < full.element_size() and len(peers) > 1
        return Pending(self, works, lambda: sum_.take(received, sum_.totals_in(rest) if narrow else received[0]), told)

    def _reduce_native(self, sum_: Sum, wire: torch.dtype, kind: str, unit: str) -> Pending:
        """By the backend's reduce-scatter; where not everything is summed, by a `reduce` for each portion, which needs
        no more memory (equal chunks for a reduce-scatter would). A narrow wire by all-to-all: the backend would add in
        its dtype."""
        axis, moved, full = sum_.axis, sum_.portions, sum_.full
        if wire != full.dtype and wire.itemsize <= full.element_size():
            return self._reduce_narrow(sum_, wire)
        if wire == full.dtype:
            terms, own = full, sum_.out if moved.is_whole else in_shards(full, axis.size)[axis.rank]
        else:
            terms = carve(sum_.scratch, 1, full.numel(), wire)[0][0]
            own = in_shards(terms, axis.size)[axis.rank]
            for intervals in moved.of_shard:
                for place, part in zip(parts(terms, intervals), parts(full, intervals), strict=True):
                    place.copy_(part)
        if moved.is_whole:
            # In place on NCCL (`own` inside of `terms`); it may leave partial sums in the shards of the others.
            works = [_reduce_scatter(own, terms, group=axis.group, async_op=True)]
        else:
            works = [
                dist.reduce(part, group=axis.group, group_dst=rank, async_op=True)
                for rank, intervals in enumerate(moved.of_shard)
                for part in parts(terms, intervals)
            ]

        def take() -> None:
            for place, value in zip(sum_.places, parts(own, moved.inside(axis.rank)), strict=True):
                divide(place if _is_in_place(place, value) else place.copy_(value), sum_.divisor)

        return Pending(self, works, take)

    def _reduce_narrow(self, sum_: Sum, wire: torch.dtype) -> Pending:
        axis, moved, full = sum_.axis, sum_.portions, sum_.full
        own = moved.numel_of(axis.rank)
        # Not the backend's reduce-scatter: it would add in `wire`, and bf16 sums lose what fp32 gradients are there
        # for.
        room, rest = carve(sum_.scratch, 1, full.numel(), wire)  # the sum so far comes here when what is sent has left
        sent = room[0][: moved.total]
        received, _ = carve(rest, axis.size, own, wire)
        terms = [part for intervals in moved.of_shard for part in parts(full, intervals)]
        for place, term in zip(split_like(sent, terms), terms, strict=True):
            place.copy_(term)
        into = rest[: axis.size * own * wire.itemsize].view(wire)
        sizes = [moved.numel_of(rank) for rank in range(axis.size)]
        work = dist.all_to_all_single(into, sent, [own] * axis.size, sizes, group=axis.group, async_op=True)
        of_peers = [split_like(term, sum_.places) for rank, term in enumerate(received) if rank != axis.rank]
        return Pending(self, [work], lambda: sum_.take(of_peers, sum_.totals_in(sum_.scratch)))


def _is_in_place(out: Tensor, own: Tensor) -> bool:
    """Whether a reduction's result goes to the own shard of what is reduced."""
    return out.data_ptr() == own.data_ptr()
