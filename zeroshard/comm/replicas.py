"""The sum of a shard over its replicas, on a 2-D mesh: a reduction among the replicas, and then a gather."""

from __future__ import annotations

from dataclasses import replace

from zeroshard.comm.chain import Chain
from zeroshard.comm.comm_log import CommLog, Flight
from zeroshard.comm.mesh import Axis
from zeroshard.comm.pending import Pending
from zeroshard.comm.positions import HERE, Wait
from zeroshard.comm.transport import Gather, Reduction, Sum, Transport
from zeroshard.layout.portions import Portions
from zeroshard.layout.sums import in_shards


class Replicas:
    """The replicate axis of a mesh."""

    def __init__(self, axis: Axis, log: CommLog, mesh: str) -> None:
        """`mesh`: its name, for the watch."""
        self._axis, self._log, self._mesh = axis, log, mesh
        self._last = Pending()  # the last reduction that was started

    def follow(
        self, chain: Chain, of_shards: Sum, reduction: Reduction, transport: Transport, unit: str, phase: str
    ) -> Chain:
        """Add to a chain, which begins with `of_shards`, the sum of its result over the replicas, in place.

        Args:
            reduction: its `of_replicas` is the scratch.
        """
        axis, out, key = self._axis, of_shards.out, f"reduce_replicas {self._mesh}"
        scratch = reduction.scratch if reduction.of_replicas is None else reduction.of_replicas
        moved = Portions.of(of_shards.portions.inside[of_shards.axis.rank], out.numel(), axis.size)
        own = in_shards(out, axis.size)[axis.rank]
        place: list[tuple[Wait, Flight]] = []

        def reduce() -> Pending:
            if scratch.numel():
                self._last.wait()  # it uses the same scratch
            text = f"sum over replicas of unit {unit} ({phase})"
            at = Wait(key, HERE.begin(key), axis.ranks, text)
            itemsize = reduction.wire.itemsize
            num_bytes = (moved.sent_to_reduce(axis.rank) + moved.sent_to_gather(axis.rank)) * itemsize
            common = of_shards.portions.total * itemsize
            flight = self._log.start("reduce_replicas", unit, phase, num_bytes, common=common)
            place.append((at, flight))
            sum_ = Sum(axis, moved, out, own, replace(reduction, scratch=scratch), "replicate")
            self._last = transport.reduce(sum_).at_place(at, flight.part())
            return self._last

        def gather() -> Pending:
            return transport.gather(Gather(axis, moved, out, own, "replicate")).at_place(*place[0])

        return chain.follow(reduce).follow(gather)
