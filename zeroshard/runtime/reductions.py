"""The reductions in flight, and the buckets and scratch that they need.

fill u3 | reduce u3 ........ | fill u1     bucket 0      a bucket is free when its unit is reduced on this rank,
        | fill u2 | reduce u2 ....         bucket 1      and on every peer that reads the bucket
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping

from zeroshard.comm.collectives import Collectives
from zeroshard.layout.pool_plan import PoolPlan
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.pool import Pool, PoolBuffer, Turns
from zeroshard.storage.unit import Unit

IN_FLIGHT = 2
"""The most reductions in flight: one arriving, one starting. If each needs memory of its own (a bucket, scratch) there
is only one, while the gradients of the next unit are accumulated."""


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
        in_place = not self._borrowing
        num_bytes = max((scratch_bytes(unit, collectives, in_place=in_place) for unit in grads), default=0)
        is_alone = self._borrowing and (num_bytes or not reads_peers)
        self._free_scratch = [pool.buffer("scratch", num_bytes, self) for _ in range(1 if is_alone else IN_FLIGHT)]
        self._arriving: deque[tuple[Unit, Gradients, PoolBuffer]] = deque()
        self._read_by_peers: deque[tuple[Unit, Gradients]] = deque()  # reduced here; peers may still read the buckets

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
        bucket.occupy(unit)
        grads.open(bucket.tensor(unit.layout.numel, grads.buffer.dtype))

    def _bucket_in_turn(self, unit: Unit, grads: Gradients) -> PoolBuffer | None:
        """A bucket that is free, or the first that becomes free when reductions complete; None if there is none."""
        # The last unit takes over the bucket of the one before, so that there is one bucket less.
        if unit in self._last_two.get(grads.buffer.dtype, ())[1:]:
            self.wait()
        bucket = self._buckets.free(unit)
        while bucket is None and (self._arriving or self._read_by_peers):
            if not self._read_by_peers:
                self._finish_oldest()
            self._release_oldest()
            bucket = self._buckets.free(unit)
        return bucket

    def start(self, unit: Unit, grads: Gradients) -> None:
        """Start to reduce the gradients of an opened unit. Collective."""
        if not self._free_scratch:
            self._finish_oldest()
        # No unit accumulates while the last but one is reduced: complete the others, and free their memory first.
        if unit in self._last_two.get(grads.buffer.dtype, ())[:1]:
            self.wait()
            for bucket in self._buckets.shared[grads.buffer.dtype]:
                bucket.try_to_give_back()
        scratch = self._free_scratch.pop()
        grads.reduce(self._collectives, scratch.storage)
        self._arriving.append((unit, grads, scratch))

    def wait(self) -> None:
        """Wait for all reductions in flight, here and on the peers that read this rank's buckets."""
        while self._arriving:
            self._finish_oldest()
        while self._read_by_peers:
            self._release_oldest()

    def end(self) -> None:
        """Wait for all reductions at the end of a backward. One bucket of each queue stays held for the next one."""
        self.wait()
        # The others have been given back before the last unit, unless the last two units were open at once: units of
        # two precisions in one block, for example.
        for queue in self._last_two:
            held = [bucket for bucket in self._buckets.shared[queue] if bucket.is_held]
            for bucket in held[1:]:
                bucket.try_to_give_back()

    def _finish_oldest(self) -> None:
        unit, grads, scratch = self._arriving.popleft()
        grads.arrive()
        self._free_scratch.append(scratch)
        self._read_by_peers.append((unit, grads))

    def _release_oldest(self) -> None:
        unit, grads = self._read_by_peers.popleft()
        # Before the bucket is given to another unit, whose gradients overwrite it: a peer may still be reading. See
        # [Note: who may write to shared memory] in `shared_transport.py`.
        grads.release()
        grads.replicate(self._collectives)
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
        if buffer.occupant is not None or any(buffer is scratch for *_, scratch in self._arriving):
            return False
        for other, grads in self._borrowing.items() if buffer.kind == "buckets" else ():
            if self._buckets.occupied_by(other) is None:
                grads.close(forget=True)  # its views would keep the storage
        return True


def scratch_bytes(unit: Unit, collectives: Collectives, *, in_place: bool) -> int:
    """Scratch bytes for the reduction of a unit. `in_place`: no unit borrows its bucket."""
    precision, mesh = unit.spec.precision, collectives.mesh
    sizes = mesh.reduce.size, mesh.replicate.size
    return collectives.transport.reduce_scratch_bytes(
        unit.layout.numel, precision.grad, precision.wire, *sizes, in_place=in_place
    )
