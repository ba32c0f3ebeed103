"""The reductions in flight, and the buckets and scratch that they need.

fill u3 | reduce u3 ........ | fill u1     bucket 0      a bucket is free when its unit is reduced on this rank,
        | fill u2 | reduce u2 ....         bucket 1      and on every peer that reads the bucket

What follows a reduction (on a 2-D mesh the sum over replicas; under DDP the gather of the mean) goes on during
backward, each exchange beside the computation of another unit (docs/design.md, "What follows a reduction").

[Note: the order of reductions]
Ranks may complete units at different times, and wait for buckets at different times. But each exchange of a reduction
starts at a place that is given by the number of the reduction: in `start`, and in `end`. So the groups of the
reductions have the same order of exchanges on all ranks. Gathers of weights have another group, or are told apart by
their messages. (Their place among the reductions: [Note: one order] in `reduce.py`.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.layout.pool_plan import PoolPlan
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.pool import Pool, PoolBuffer, Turns
from zeroshard.storage.unit import Unit

IN_FLIGHT = 2
"""The most reductions in flight: one arriving, one starting. If each needs memory of its own (a bucket, scratch) there
is only one, while the gradients of the next unit are accumulated. Unless they wait for none: [Note: no wait for a
bucket]."""


class Reductions:
    """The reductions of the trainable units of a model, in the order of reduction."""

    def __init__(self, grads: Mapping[Unit, Gradients], collectives: Collectives, pool: Pool) -> None:
        self._collectives = collectives
        self._borrowing = {unit: of_unit for unit, of_unit in grads.items() if of_unit.needs_bucket}
        requests = {unit: unit.spec.bucket_request(unit.layout.numel) for unit in self._borrowing}
        reads_peers = collectives.transport.reads_peers
        plan = PoolPlan.for_gradients(requests.values(), reads_peers=reads_peers)
        self._buckets = Turns(pool, "buckets", plan, requests, self)
        self._last_two: dict[Hashable, list[Unit]] = {}  # of the units that take turns; see `PoolPlan.for_gradients`
        for queue, buckets in self._buckets.shared.items():
            if len(buckets) > 1 and not reads_peers:
                taking_turns = [unit for unit in requests if self._buckets.given(unit) is None]
                self._last_two[queue] = [unit for unit in taking_turns if requests[unit].queue == queue][-2:]
        way = type(collectives.transport), collectives.mesh.reduce.size, collectives.mesh.replicate.size
        in_place = not self._borrowing
        of_units = [unit.spec.reduce_scratch(*way, in_place=in_place) for unit in grads] or [(0, 0)]
        num_bytes, of_replicas = map(max, zip(*of_units, strict=True))
        is_alone = self._borrowing and (num_bytes or not reads_peers)
        in_flight = 1 if is_alone else min(IN_FLIGHT, len(of_units))
        is_sent = any(unit.spec.precision.is_sent_narrow for unit in grads)
        # [Note: no wait for a bucket]
        # Where ranks read each other's memory, scratch is used only while a sum is taken, so all reductions share it.
        # If each unit keeps its bucket, too, none waits for another one before the end of backward: a rank that has
        # no gradient of a unit reduces it only then, and until then it may wait for this rank elsewhere (in the
        # backward of another handle, in a collective of the user's).
        self.waits_for_none = reads_peers and not self._borrowing and not is_sent
        if is_sent:
            axes = collectives.mesh.reduce, collectives.mesh.replicate
            collectives.transport.connect_pairs(axes, collectives.device)
        self._free_scratch = deque(pool.buffer("scratch", num_bytes, self) for _ in range(in_flight))
        self._of_replicas = pool.buffer("scratch", of_replicas, self)
        # Units of the root have buckets of their own, so a reduction without scratch needs nothing more.
        self._without_scratch = {unit for unit in grads if unit.spec.of_root} if num_bytes == 0 else set()
        self._empty = torch.empty(0, dtype=torch.uint8, device=collectives.device)
        self._arriving: deque[tuple[Unit, Gradients, PoolBuffer | None]] = deque()
        self._read_by_peers: deque[tuple[Unit, Gradients]] = deque()  # reduced here; peers may still read the buckets
        self._not_over: list[tuple[Unit, Gradients]] = []  # started, and exchanges follow the sum over ranks
        # How many reductions start before an exchange goes on. None: it goes on at the end. Where ranks read each
        # other's memory, nothing moves beside the computation, and to go on is to wait for peers.
        self._lag = None if reads_peers else len(self._free_scratch)

    def expect_room(self, units: Collection[Unit]) -> None:
        """Check that all these units could have a bucket at once.

        Raises:
            RuntimeError: the pool's limit does not allow that many buckets.
        """
        self._buckets.expect_room(
            [unit for unit in self._borrowing if unit in units],
            "no_sync, which keeps a gradient of full size,",
            "reduce in every backward",
        )

    def open(self, unit: Unit, grads: Gradients) -> None:
        """Give the unit a bucket: its gradients are about to be accumulated."""
        if not grads.needs_bucket:
            grads.open()
            return
        bucket = self._buckets.given(unit) or self._bucket_in_turn(unit, grads)
        if bucket is None:  # all buckets hold sums that are not reduced yet: under `no_sync`, or incomplete
            why = f"a bucket for unit {unit.name}, while others wait for gradients or a backward that reduces,"
            bucket = self._buckets.give(unit, why)
            bucket.lasting = bucket.is_shared
        place = bucket.tensor(unit.layout.numel, grads.buffer.dtype)  # first: there may be no memory for it
        bucket.occupy(unit)
        grads.open(place)

    def _bucket_in_turn(self, unit: Unit, grads: Gradients) -> PoolBuffer | None:
        """A bucket that is free, or the first that becomes free when reductions complete; None if there is none."""
        # The last unit takes over the bucket of the one before, so that there is one bucket less.
        while unit in self._last_two.get(grads.buffer.dtype, ())[1:] and self._holds_turns():
            self._free_oldest()
        bucket = self._buckets.free(unit)
        while bucket is None and self._holds_turns():
            self._free_oldest()
            bucket = self._buckets.free(unit)
        return bucket

    def _holds_turns(self) -> bool:
        """Whether a reduction, here or on a peer, holds a bucket of units that take turns."""
        return any(self._buckets.given(unit) is None for unit, *_ in (*self._arriving, *self._read_by_peers))

    def must_finish_before(self, unit: Unit) -> Unit | None:
        """The last reduction in flight that must finish before that of the unit starts, or when it starts."""
        if self._lag is not None and len(self._not_over) >= self._lag:
            return self._not_over[-self._lag][0]  # its next exchange starts then
        if self._free_scratch or not self._needs_scratch(unit):
            return None
        return next(other for other, _, scratch in self._arriving if scratch is not None)

    def _needs_scratch(self, unit: Unit) -> bool:
        # Where exchanges follow, they follow the order in which reductions finish here: so all of them take turns.
        return unit not in self._without_scratch or bool(self._not_over)

    def start(self, unit: Unit, grads: Gradients, look: Callable[[], None] | None = None) -> None:
        """Start to reduce the gradients of an opened unit. Collective. `look`: see `Reduction`."""
        if grads.is_of_all:
            grads.keep()
            return
        needs_scratch = self._needs_scratch(unit)
        while needs_scratch and not self._free_scratch:
            self._finish_oldest()
        # No unit accumulates while the last but one is reduced: complete the others, and free their memory first.
        if unit in self._last_two.get(grads.buffer.dtype, ())[:1]:
            self._free_all()
            for bucket in self._buckets.shared[grads.buffer.dtype]:
                bucket.try_to_give_back()
        # In turns, so that what is held does not depend on how early reductions finish.
        scratch = self._free_scratch.popleft() if needs_scratch else None
        if scratch is not None and self.waits_for_none:
            self._free_scratch.append(scratch)
        try:
            room = self._empty if scratch is None else scratch.storage
            grads.reduce(self._collectives, room, self._of_replicas.storage, look)
        except BaseException:  # there is no memory for the sum, for example
            if scratch is not None and not self.waits_for_none:
                self._free_scratch.appendleft(scratch)
            raise
        self._arriving.append((unit, grads, scratch))
        if grads.buffer.pending.goes_on:
            self._not_over.append((unit, grads))
            self._go_on()

    def _go_on(self) -> None:
        """Start what follows the reductions before this one: one exchange of each. After the new reduction, which the
        next units wait for. See [Note: the order of reductions]."""
        if self._lag is None:
            return
        while len(self._arriving) > self._lag:  # reductions that needed no scratch: what goes on has its sum
            self._finish_oldest()
        while self._read_by_peers:  # by nobody: they send
            self._release_oldest()
        for _, grads in self._not_over[: -self._lag]:
            grads.buffer.pending.advance()

    def finish_early(self) -> None:
        """Where ranks read each other's memory, sum what all peers are ready for. Otherwise this rank would do so only
        when it needs a bucket, and would then wait until its peers have done the same."""
        while self._lag is None and self._arriving and self._arriving[0][1].buffer.pending.has_arrived:
            self._finish_oldest()

    def read_peers(self) -> None:
        """Where ranks read each other's memory, sum all that has been started. See [Note: peers wait for a reader]."""
        while self._lag is None and self._arriving:
            self._finish_oldest()

    def _free_all(self) -> None:
        """Wait for all sums over ranks in flight, here and on the peers that read this rank's buckets."""
        while self._arriving:
            self._finish_oldest()
        while self._read_by_peers:
            self._release_oldest()

    def _free_oldest(self) -> None:
        if not self._read_by_peers:
            self._finish_oldest()
        self._release_oldest()

    def end(self) -> None:
        """Wait for everything at the end of a backward. One bucket of each queue stays held for the next one."""
        self._free_all()
        while sum(grads.buffer.pending.advance() for _, grads in self._not_over):
            pass  # one exchange of each, before any is waited for
        for _, grads in self._not_over:
            grads.arrive()
        self._not_over.clear()
        # The others have been given back before the last unit, unless the last two units were open at once: units of
        # two precisions in one block, for example.
        for queue in self._last_two:
            held = [bucket for bucket in self._buckets.shared[queue] if bucket.is_held]
            for bucket in held[1:]:
                bucket.try_to_give_back()

    def _finish_oldest(self) -> None:
        unit, grads, scratch = self._arriving.popleft()
        grads.arrive_in_part()
        if scratch is not None and not self.waits_for_none:
            self._free_scratch.append(scratch)
        self._read_by_peers.append((unit, grads))

    def _release_oldest(self) -> None:
        unit, grads = self._read_by_peers.popleft()
        # Before the bucket is given to another unit, whose gradients overwrite it: a peer may still be reading. See
        # [Note: who may write to shared memory] in `shared_transport.py`.
        grads.buffer.release_in_part()
        self.close(unit, grads)

    def close(self, unit: Unit, grads: Gradients) -> None:
        """Give a borrowed bucket back."""
        grads.close()
        if (bucket := self._buckets.occupied_by(unit)) is not None:
            bucket.occupant = None

    def vacate(self, buffer: PoolBuffer) -> bool:
        """Drop all references to a pool buffer. False if it holds gradients that have not been reduced, or the scratch
        of a reduction in flight."""
        unit: Unit | None = buffer.occupant
        if unit is not None and self._borrowing[unit].state is GradState.EMPTY:
            self.close(unit, self._borrowing[unit])  # its gradients have been discarded
        used = [scratch for *_, scratch in self._arriving] + [self._of_replicas] * bool(self._not_over)
        if buffer.occupant is not None or any(buffer is scratch for scratch in used):
            return False
        for other, grads in self._borrowing.items() if buffer.kind == "buckets" else ():
            if self._buckets.occupied_by(other) is None:
                grads.close(forget=True)  # its views would keep the storage
        return True
