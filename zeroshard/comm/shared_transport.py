"""The shared transport: buffers lie in memory that all ranks of one host map, and each rank reads what it needs.

Messages tell the peers where a buffer lies and that it may be read and, after a reduction, that it has been read. Sums
are taken in the same order as in `pairwise_transport.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.messages import Announcement, Doubts, Messages
from zeroshard.comm.pairwise_transport import PairwiseTransport
from zeroshard.comm.pending import Pending
from zeroshard.comm.transport import Gather, Sum, is_same_place
from zeroshard.layout.sums import CACHED_NUMEL, in_shards, parts
from zeroshard.ranks.common import Common
from zeroshard.ranks.mesh import Axis
from zeroshard.ranks.pipes import PeerGone
from zeroshard.ranks.shared_memory import NOWHERE, Location, Process, SharedMemory
from zeroshard.ranks.trial import Probe, connect, connected, make_pipes, start


class SharedTransport(PairwiseTransport):
    """A pairwise transport, except for what is announced, lies in shared memory, and needs no cast."""

    name = "shared"
    reads_peers = True
    memory: SharedMemory

    def __init__(
        self, messages: Messages, log: CommLog, memory: SharedMemory, processes: Mapping[int, Process]
    ) -> None:
        """`processes`: global rank -> process, in the order of the mesh, including this rank."""
        super().__init__(messages, log)
        self.memory, self._processes = memory, processes

    @classmethod
    def between(
        cls, world: Axis, messages: Messages, log: CommLog, exchange: Callable[[Any], list[Any]]
    ) -> SharedTransport | None:
        """The shared transport, or None if some rank cannot read another's memory: the same answer on all ranks.
        Collective.

        Args:
            exchange: gathers a JSON-able value of every rank, in rank order.
        """
        known = connected(world.group)
        if known is not None:  # another mesh of the same group has made the trial already
            messages.pipes = known
            return cls(messages, log, SharedMemory(known.processes[world.here]), known.processes)
        memory = SharedMemory()
        probe = Probe(memory, world.rank, world.size)
        pipes = make_pipes(world.group, rank := world.here, world.ranks)
        cards = exchange([probe.card(), pipes.card(world.ranks) if pipes is not None else None])
        of_memory, of_pipes = zip(*cards, strict=True)
        processes = {
            other: Process(pid, identity) for other, (pid, identity, *_) in zip(world.ranks, of_memory, strict=True)
        }
        answers = exchange([probe.answer(of_memory), connect(pipes, rank, processes, of_pipes)])
        # Three exchanges are needed: answers are checked only after all ranks have written theirs, and one refusal must
        # decide for all ranks. Ranks with different transports would wait for messages that nobody sends.
        can_read, are_connected = (all(answer) for answer in zip(*answers, strict=True))
        if not all(exchange(can_read and probe.is_answered(of_memory))):
            return None
        if pipes is not None and are_connected:
            start(pipes, world.group, processes)
            messages.pipes = pipes
        return cls(messages, log, memory, processes)

    def gather(self, gather: Gather) -> Pending:
        if not gather.about:  # small rows, and sums over replicas
            return super().gather(gather)
        common = self.memory.common_of(gather.own)  # each rank then only announces that its own shard is complete
        location = self.memory.locate(gather.own) if common is None else NOWHERE
        if location is None:
            return super().gather(gather)
        axis, full, moved = gather.axis, gather.full, gather.portions
        # [Note: who may write to shared memory]
        # A peer reads the announced memory at any later time, and computes with it if shards lie side by side. Nothing
        # may write to it until the peers have acknowledged (`release`), or until all ranks have met in an exchange that
        # each of them enters after its last use. So whatever writes to shards of weights begins with an exchange: a
        # step with the control exchange; a load, and `load_full_state_dict`, with the comparison of what was found;
        # `set_main_parts` and `unsharded(write=True)` with one of their own. The user cannot write to them: the full
        # weights are private pages ([Note: two mappings] in `common.py`) or copies. Buckets are reused within a
        # backward, so reductions always acknowledge.
        announced = self.messages.announce(axis, gather.kind, gather.about, gather.num_bytes, location)

        def copy_from_peers() -> Sequence[Any]:
            if common is None or not is_same_place(full, common.full):  # a scope of `unsharded` has a tensor of its own
                shards = in_shards(full, axis.size)
                side_by_side = None if common is None else in_shards(common.everyone.view(full.dtype), axis.size)
                for rank in axis.peers:
                    theirs = self._peer(announced, rank, shards[rank]) if side_by_side is None else side_by_side[rank]
                    inside = moved.inside[rank]
                    for to, value in zip(parts(shards[rank], inside), parts(theirs, inside), strict=True):
                        to.copy_(value)
            return self.messages.acknowledge(axis, gather.kind) if gather.acknowledge else []

        return Pending(self, (), copy_from_peers, announced)

    def reduce(self, sum_: Sum) -> Pending:
        # A peer reads the buffer in the dtype in which it is held: terms that must be cast have to be sent.
        location = None if sum_.is_cast or not sum_.about else self.memory.locate(sum_.full)
        if location is None:
            return super().reduce(sum_)
        axis, full = sum_.axis, sum_.full
        announced = self.messages.announce(axis, sum_.kind, sum_.about, sum_.num_bytes, location)
        # The rank that sums tells of doubts when it acknowledges. In place, its sum overwrites its own terms.
        doubts = None if sum_.is_in_place or sum_.reduction.look is None else Doubts(sum_.reduction.look)
        if doubts is None:
            sum_.look()

        def sum_from_peers() -> Sequence[Any]:
            own = sum_.portions.of_shard[axis.rank]
            of_peers = [parts(self._peer(announced, rank, full), own) for rank in axis.peers]
            sum_.take(of_peers, sum_.totals_in(sum_.reduction.scratch) if sum_.is_in_place else sum_.places, doubts)
            return self.messages.acknowledge(axis, sum_.kind, doubts)  # See [Note: who may write to shared memory]

        return Pending(self, (), sum_from_peers, announced)

    def _peer(self, announced: Announcement, rank: int, like: Tensor) -> Tensor:
        """The memory that a rank of the axis has announced. Callers must only read it.

        Raises:
            PeerGone: the process of that rank has ended.
        """
        number = announced.axis.ranks[rank]
        try:
            return self.memory.peer(self._processes[number], announced.location(rank), like)
        except (FileNotFoundError, ProcessLookupError) as error:
            # Its announcement is still in the pipe, but its files are closed: without this, the watch would take the
            # error for this rank's own, and report this rank as the one that has failed.
            raise PeerGone(f"connection closed by rank {number}: {error}") from None

    @classmethod
    def scratch_of_each(
        cls, numel: int, grad: torch.dtype, wire: torch.dtype, num_shards: int, num_replicas: int, *, in_place: bool
    ) -> tuple[int, int]:
        sizes = super().scratch_of_each(numel, grad, wire, num_shards, num_replicas, in_place=in_place)
        if wire != grad:
            return sizes
        # In place, the running sum is kept for one cache-sized block at a time; with two ranks it needs no scratch.
        block = min(CACHED_NUMEL, numel // num_shards) * wire.itemsize if in_place and num_shards > 2 else 0
        return block, sizes[1]

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return self.memory.allocate(num_bytes) if device.type == "cpu" else super().allocate(num_bytes, device)

    def is_shared(self, tensor: Tensor) -> bool:
        return self.memory.locate(tensor) is not None or self.memory.common_of(tensor) is not None

    def map_common(self, axis: Axis, segment: int, fd: int, num_bytes: int) -> Common:
        """Map a segment that the first rank of the axis has created, with the shards of its ranks side by side.

        Raises:
            OSError: there is no such segment.
        """
        shard = num_bytes // axis.size
        own = slice(axis.rank * shard, (axis.rank + 1) * shard)
        return self.memory.map_common(self._processes[axis.ranks[0]], Location(segment, fd, num_bytes, 0), own)

    def map_peers(self, exchange: Callable[[Any], list[Any]], meet: Callable[[], Any]) -> None:
        # A rank may free its buffers while a slower peer still reads them, provided that the peer has mapped them. So
        # there are two exchanges: the first lists the segments, and no rank frees anything before all have reached the
        # second.
        kept, own = self.memory.own_segments()
        everyone = exchange(own)
        for process, segments in zip(self._processes.values(), everyone, strict=True):
            if process != self.memory.process:
                self.memory.map_segments(process, segments)
        meet()
        self.memory.close_files(kept)
