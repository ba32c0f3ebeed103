"""Advises a 2-D mesh where gathers over all ranks consist of messages so small that latency dominates.

By the alpha-beta model of `time_model.py` each message of a ring takes `latency + bytes / bandwidth`. It is mostly
latency if it has fewer than latency x bandwidth bytes: 630 kB between nodes with an adapter of 400 Gb/s for each GPU. A
gather over fewer ranks has fewer and larger messages; the other ranks are then replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zeroshard.comm.comm_log import CommEvent
from zeroshard.placement import SHARDED
from zeroshard.planned.training import Training
from zeroshard.planning.in_words import in_units
from zeroshard.planning.time_model import Machine

MACHINE = "nodes-400"
"""The machine for which is advised if none is named."""
WORTH_IT = 0.8
"""A mesh is advised if messages then take at most this part of the time."""


@dataclass(frozen=True)
class Hint:
    """A mesh of `replicas` x `shards` ranks, which is better than more shards.

    Attributes:
        message: bytes of a message in a gather over all ranks: the mean.
        latency_share: the share of latency in the time of these gathers.
        seconds, seconds_there: of all messages of a step, as planned and on the advised mesh.
        peak, peak_there: the most bytes that the engine holds in a step.
    """

    replicas: int
    shards: int
    message: int
    latency_share: float
    seconds: float
    seconds_there: float
    peak: int
    peak_there: int

    def __str__(self) -> str:
        return (
            f"a message of a gather has {in_units(self.message)}, so {self.latency_share:.0%} of the time of gathers "
            f"is latency, by a model. On a 2-D mesh of {self.replicas:,} replicas x {self.shards:,} shards the "
            f"messages of a step take {self.seconds_there:.2g} s instead of {self.seconds:.2g} s, and a rank holds at "
            f"most {in_units(self.peak_there)} instead of {in_units(self.peak)} (without activations)"
        )


@dataclass(frozen=True)
class Gathers:
    """The gathers of a step over the ranks of the shard axis. `num_bytes`: that the rank sends in all of them."""

    ranks: int
    number: int
    num_bytes: int

    @classmethod
    def of(cls, training: Training, events: Mapping[CommEvent, int]) -> Gathers:
        of_step = {event: times for event, times in events.items() if event.op == "all_gather"}
        num_bytes = sum(event.bytes * times for event, times in of_step.items())
        return cls(training.topology.num_shards, sum(of_step.values()), num_bytes)

    def message(self, ranks: int) -> float:
        """Bytes of a message, if the gathers were over so many ranks."""
        return self.num_bytes / max(self.number * (self.ranks - 1), 1) * self.ranks / ranks

    def latency_share(self, machine: Machine, ranks: int) -> float:
        """The share of latency in the time of the gathers, if they were over so many ranks."""
        latency, bandwidth = machine.rates(ranks)
        return latency / (latency + self.message(ranks) / bandwidth)


def shards_to_use(training: Training, gathers: Gathers, machine: Machine) -> int | None:
    """The most ranks, in whole nodes, over which gathers are not mostly latency (or one node); None: the plan's own
    number is good, or it gathers no weights between nodes."""
    own = gathers.ranks
    is_apart = training.plan.weights is SHARDED and own > machine.node and not training.topology.transport.reads_peers
    if not is_apart or not gathers.number or gathers.latency_share(machine, own) <= 0.5:
        return None
    return next(
        (n for n in _in_nodes(own, machine.node) if gathers.latency_share(machine, n) <= 0.5 or n == machine.node), None
    )


def _in_nodes(ranks: int, node: int) -> Iterator[int]:
    """The divisors of `ranks` below it that are whole nodes, the largest first."""
    yield from (ranks // n for n in range(2, ranks // node + 1) if ranks % n == 0 and (ranks // n) % node == 0)
