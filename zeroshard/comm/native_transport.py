"""The native transport: the backend's own collectives, in place (NCCL and others)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.pending import Pending
from zeroshard.comm.transport import Gather, Sum, Transport
from zeroshard.layout.sums import carve, in_shards, parts, split_like
from zeroshard.precision import FLOATS
from zeroshard.ranks.backends import moves_nothing
from zeroshard.ranks.mesh import Axis

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_LARGE = 32 << 20
"""Bytes of a gather for which NCCL takes the way through a switch, if there is one."""


class NativeTransport(Transport):
    """Uses a group's reduce-scatter, all-gather, all-to-all and all-reduce, all asynchronous. Nothing is announced: a
    backend runs collectives in order, but does not say where a peer is.

    If only some portions take part, each portion has a `broadcast` or `reduce` of its own: this needs no extra memory
    and no padding to equal chunks.
    """

    name = "native"
    announces = False
    orders_by_streams = True

    def warm_up(self, axes: Sequence[Axis], device: torch.device) -> None:
        # [Note: first collectives]
        # NCCL creates a communicator in the first collective of a group, and makes its connections when they are first
        # needed: of a tree, of a ring, through a switch (NVLS, which it takes for large tensors), between pairs of
        # ranks. The host waits there for all ranks of the group. In the middle of the first backward it would do so in
        # an order that may differ between ranks, and a rank that has to come there may wait for one that is held up.
        for axis in _different(axes):
            dist.all_reduce(torch.zeros(1, device=device), group=axis.group, async_op=True).wait()
            for num_bytes in (axis.size, _LARGE) if device.type == "cuda" else (axis.size,):
                full = torch.zeros(num_bytes // axis.size * axis.size, dtype=torch.uint8, device=device)
                _all_gather(full, in_shards(full, axis.size)[axis.rank], group=axis.group, async_op=True).wait()

    def connect_pairs(self, axes: Sequence[Axis], device: torch.device) -> None:
        for axis in _different(axes):
            sent = torch.zeros(axis.size, dtype=torch.uint8, device=device)
            dist.all_to_all_single(torch.empty_like(sent), sent, group=axis.group, async_op=True).wait()

    def gather(self, gather: Gather) -> Pending:
        axis, full, moved = gather.axis, gather.full, gather.portions
        if moved.is_whole:
            if full.dtype not in FLOATS:  # a frozen unit may have any dtype; NCCL has no 16-bit integers, for example
                full = full.view(torch.uint8)
            own = in_shards(full, axis.size)[axis.rank]
            return Pending(self, [_all_gather(full, own, group=axis.group, async_op=True)])
        works = [
            dist.broadcast(part, group=axis.group, group_src=rank, async_op=True)
            for rank, intervals in enumerate(moved.of_shard)
            for part in parts(full, intervals)
        ]
        return Pending(self, works)

    def reduce(self, sum_: Sum) -> Pending:
        sum_.look()
        axis, moved, full, wire = sum_.axis, sum_.portions, sum_.full, sum_.reduction.wire
        if sum_.is_cast and wire.itemsize <= full.element_size():
            return self._reduce_narrow(sum_)
        if sum_.is_cast:
            terms = carve(sum_.reduction.scratch, 1, full.numel(), wire)[0][0]
            own = in_shards(terms, axis.size)[axis.rank]
            for intervals in moved.of_shard:
                for place, part in zip(parts(terms, intervals), parts(full, intervals), strict=True):
                    place.copy_(part)
        else:
            terms, own = full, sum_.out if moved.is_whole else in_shards(full, axis.size)[axis.rank]
        if moved.is_whole:
            # In place on NCCL (`own` is inside of `terms`). It may leave partial sums in the other ranks' shards of
            # `terms`: nothing may read these afterwards.
            works = [_reduce_scatter(own, terms, group=axis.group, async_op=True)]
        else:
            works = [
                dist.reduce(part, group=axis.group, group_dst=rank, async_op=True)
                for rank, intervals in enumerate(moved.of_shard)
                for part in parts(terms, intervals)
            ]
        return Pending(self, works, lambda: sum_.put(parts(own, moved.inside[axis.rank])))

    def _reduce_narrow(self, sum_: Sum) -> Pending:
        """Send the terms in the narrower dtype by all-to-all, and add them up on this rank."""
        axis, moved, full, wire = sum_.axis, sum_.portions, sum_.full, sum_.reduction.wire
        own = moved.numels[axis.rank]
        # Not the backend's reduce-scatter: it would add in `wire`, and sums in bf16 would lose the precision of fp32
        # gradients.
        scratch = sum_.reduction.scratch
        room, rest = carve(scratch, 1, full.numel(), wire)  # `totals_in` reuses these bytes once the terms are sent
        sent = room[0][: moved.total]
        received, _ = carve(rest, axis.size, own, wire)
        terms = [part for intervals in moved.of_shard for part in parts(full, intervals)]
        for place, term in zip(split_like(sent, terms), terms, strict=True):
            place.copy_(term)
        into = rest[: axis.size * own * wire.itemsize].view(wire)
        work = dist.all_to_all_single(into, sent, [own] * axis.size, [*moved.numels], group=axis.group, async_op=True)
        of_peers = [split_like(received[rank], sum_.places) for rank in axis.peers]
        return Pending(self, [work], lambda: sum_.take(of_peers, sum_.totals_in(scratch)))

    def all_to_all(
        self, axis: Axis, out: Tensor, data: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        if not data.numel() and moves_nothing(axis.group):
            return Pending()  # torch's fake group derives the output from the input, and fails if the input is empty
        sizes = list(received), list(sent)
        return Pending(self, [dist.all_to_all_single(out, data, *sizes, group=axis.group, async_op=True)])

    def add_up(self, axis: Axis, numbers: Tensor) -> Pending:
        return Pending(self, [dist.all_reduce(numbers, group=axis.group, async_op=True)])

    @staticmethod
    def sent_to_add_up(num_bytes: int, num_ranks: int) -> int:
        return 2 * num_bytes * (num_ranks - 1) // num_ranks  # of a ring or a tree: the backend chooses the algorithm

    @staticmethod
    def scratch_bytes(numel: int, num_ranks: int, grad: torch.dtype, wire: torch.dtype, *, in_place: bool) -> int:
        return 0 if wire == grad else 2 * numel * wire.itemsize


def _different(axes: Sequence[Axis]) -> list[Axis]:
    """One axis for each group of more than one rank, in order."""
    return [*{axis.group: axis for axis in axes if axis.size > 1}.values()]
