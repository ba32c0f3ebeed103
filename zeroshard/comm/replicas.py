"""The sum of a shard over its replicas, on a 2-D mesh: a reduction among the replicas, and then a gather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zeroshard.comm.comm_log import Flight
from zeroshard.comm.mesh import Axis
from zeroshard.comm.pending import Pending
from zeroshard.comm.positions import Wait
from zeroshard.comm.transport import Gather, Reduction, Sum, Transport
from zeroshard.layout.portions import Portions
from zeroshard.layout.sums import in_shards


class SumOverReplicas:
    """Follows the sum over the shard axis.

    Attributes:
        num_bytes: what this rank sends.
    """

    def __init__(self, axis: Axis, of_shards: Sum, reduction: Reduction) -> None:
        """
        Args:
            axis: of the replicas.
            of_shards: the sum over the shard axis. Its result is summed in place.
            reduction: its `of_replicas` is the scratch.
        """
        scratch = reduction.scratch if reduction.of_replicas is None else reduction.of_replicas
        self._axis, self._out = axis, of_shards.out
        self._portions = Portions.of(of_shards.portions.inside(of_shards.axis.rank), self._out.numel(), axis.size)
        part = in_shards(self._out, axis.size)[axis.rank]
        self._sum = Sum(axis, self._portions, self._out, part, replace(reduction, scratch=scratch), "replicate")
        num_elements = self._portions.sent_to_reduce(axis.rank) + self._portions.sent_to_gather(axis.rank)
        self.num_bytes = num_elements * reduction.wire.itemsize
        self._place: tuple[Wait, Flight]

    def reduce(self, transport: Transport, before: Pending, begin: Callable[[], tuple[Wait, Flight]]) -> Pending:
        """Start the reduction.

        Args:
            before: the last reduction among replicas that was started.
            begin: counts and logs the sum.
        """
        if self._sum.reduction.scratch.numel():
            before.wait()  # it uses the same scratch
        self._place = at, flight = begin()
        return transport.reduce(self._sum).at_place(at, flight.part())

    def gather(self, transport: Transport) -> Pending:
        """Start the gather of the result, after the reduction."""
        gather = Gather(self._axis, self._portions, self._out, self._sum.out, "replicate")
        return transport.gather(gather).at_place(*self._place)
