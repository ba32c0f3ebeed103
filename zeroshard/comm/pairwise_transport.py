"""The pairwise transport: ranks send slices to each other as messages, received straight into place (gloo).

gloo's own reduce-scatter and all-gather clone the whole buffer. This exchange is three to four times faster, needs no
hidden memory, and sums in rank order, `((g0 + g1) + g2) + ...`, whichever rank owns the shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.comm.messages import Failing
from zeroshard.comm.pending import Pending
from zeroshard.comm.transport import Gather, Sum, Transport, TransportName
from zeroshard.layout.sums import carve, parts, split_like
from zeroshard.ranks.mesh import Axis


class PairwiseTransport(Transport):
    """Needs a group in which many messages, told apart by tags, may be in flight at once."""

    name: ClassVar[TransportName] = "pairwise"

    def gather(self, gather: Gather) -> Pending:
        axis, full, of_shard = gather.axis, gather.full, gather.portions.of_shard
        announced = None
        if gather.about:
            announced = self.messages.announce(axis, gather.kind, gather.about, gather.num_bytes)
        works = []
        # Each receive is posted before the send of its round, so that data arrives straight in its place.
        for source, target in axis.rounds:
            works += [self.messages.receive(axis, part, source, gather.kind) for part in parts(full, of_shard[source])]
            works += [self.messages.send(axis, part, target, gather.kind) for part in parts(full, of_shard[axis.rank])]
        return Pending(self, works, announced=announced)

    def reduce(self, sum_: Sum) -> Pending:
        sum_.look()
        # [Note: sums in rank order]
        # Every element is ((g0 + g1) + g2) + ..., whichever rank owns it: therefore all plans give the same bits.
        # Adding terms as they arrive, or the own term first, would be faster, but plans would differ
        # (`sum_in_rank_order`). The order of ring and tree algorithms depends on the number of ranks and on the place
        # in the buffer.
        axis, moved, full, wire = sum_.axis, sum_.portions, sum_.full, sum_.reduction.wire
        # One peer's term is received into `out` itself, which saves its scratch. Not in place: there, `out` holds this
        # rank's own term.
        spared = [] if sum_.is_cast or sum_.is_in_place else [sum_.places]
        num_carved = len(axis.peers) - len(spared)
        carved, rest = carve(sum_.reduction.scratch, num_carved, moved.numels[axis.rank], wire)
        received = [*spared, *(split_like(term, sum_.places) for term in carved)]
        announced = None
        if sum_.about:
            announced = self.messages.announce(axis, sum_.kind, sum_.about, sum_.num_bytes)
        works = [
            self.messages.receive(axis, part, peer, sum_.kind)
            for peer, term in zip(axis.peers, received, strict=True)
            for part in term
        ]
        left = rest
        for peer in axis.peers:
            term = parts(full, moved.of_shard[peer])
            if sum_.is_cast:
                cast, left = carve(left, 1, moved.numels[peer], wire)
                for place, part in zip(split_like(cast[0], term), term, strict=True):
                    place.copy_(part)
                term = split_like(cast[0], term)
            works += [self.messages.send(axis, part, peer, sum_.kind) for part in term]
        is_narrow = wire.itemsize < full.element_size() and len(axis.peers) > 1

        def add_up() -> None:
            # Runs after all sends are complete: the bytes of the terms that were cast for sending are free, and hold
            # the running sum in the wider dtype.
            sum_.take(received, sum_.totals_in(rest) if is_narrow else received[0])

        return Pending(self, works, add_up, announced)

    def all_to_all(
        self, axis: Axis, out: Tensor, data: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        terms, places, works = torch.split(data, list(sent)), torch.split(out, list(received)), []
        for source, target in axis.rounds:
            if places[source].numel():
                works.append(self.messages.receive(axis, places[source], source, "all_to_all"))
            if terms[target].numel():
                works.append(self.messages.send(axis, terms[target], target, "all_to_all"))
        places[axis.rank].copy_(terms[axis.rank])
        return Pending(self, works)

    def add_up(self, axis: Axis, numbers: Tensor) -> Pending:
        # `window` is the sum over the `width` ranks that end at this one; every round doubles the width. The binary
        # digits of the number of ranks say which windows make up the whole: for 6 = 4 + 2 ranks, the last four ranks
        # and the two before them.
        #
        #     rank        0    1    2    3    4    5
        #     width 1     a    b    c    d    e    f
        #     width 2    fa   ab   bc   cd   de   ef
        #     width 4    ..   ..   ..   ..  bcde cdef     and from two ranks before, ab: all of them
        def add() -> None:
            window, width, covered = numbers.clone(), 1, 0
            for bit in range(axis.size.bit_length()):
                if axis.size >> bit & 1:
                    if covered:
                        numbers.add_(self._from_before(axis, window, covered))
                    else:
                        numbers.copy_(window)
                    covered += width
                if axis.size >> (bit + 1):
                    window = window + self._from_before(axis, window, width)
                    width *= 2

        return Pending(self, (), add)

    def _from_before(self, axis: Axis, values: Tensor, distance: int) -> Tensor:
        """The values of the rank `distance` places before this one; `values` go to the rank `distance` places after."""
        received = torch.empty_like(values)
        works = [self.messages.receive(axis, received, (axis.rank - distance) % axis.size, "exchange")]
        works.append(self.messages.send(axis, values, (axis.rank + distance) % axis.size, "exchange"))
        for work in works:
            work.wait()
        return received

    @staticmethod
    def sent_to_add_up(num_bytes: int, num_ranks: int) -> int:
        return (num_ranks.bit_length() - 1 + num_ranks.bit_count() - 1) * num_bytes

    @staticmethod
    def scratch_bytes(numel: int, num_ranks: int, grad: torch.dtype, wire: torch.dtype, *, in_place: bool) -> int:
        shard = numel // num_ranks
        if wire != grad:
            return 2 * (numel - shard) * wire.itemsize  # all that is received, and all that is sent
        return (num_ranks - (1 if in_place else 2)) * shard * wire.itemsize

    def meet_at(self, point: str, axes: Mapping[str, Axis]) -> None:
        announced = [self.messages.announce(axis, kind, point, 0) for kind, axis in axes.items() if axis.size > 1]
        with Failing(self.messages):
            for one in announced:
                self.messages.compare(one)
