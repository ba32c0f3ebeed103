"""Cuts main into pieces for the optimizer, at the same places under every plan; lists the pieces, or counts them.

    world     0        256       512       768      1024
    shards    |         rank 0    |        rank 1     |
    groups    |  decay     |        no decay          |
    pieces    |   a    |b1| b2   |       c           |      b1: from the group's cut to the next multiple of 256

A fused kernel rounds the tail of a vector differently from its body. So every piece starts at a multiple of ALIGNMENT,
except for a short one from the start of a group to the next multiple. No cut depends on the plan or on the rank.

On a single rank gradients lie in one tensor per parameter. There pieces end where parameters end (`by_slot`), and leave
the padding out: they are cut as plain torch cuts, at each parameter, and further where they are large.

The engine lists its own pieces. The planner counts those of thousands of ranks: within a group, neighbouring shards
have the same pieces, and a shard has few different ones (`Pattern`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from zeroshard.layout.interval import Interval, round_up
from zeroshard.layout.layout import ALIGNMENT, BufferLayout

SCRATCH_ALIGNMENT = 64
"""In the scratch of a step, each piece starts at a multiple of this many bytes."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many elements a step processes at once.

    Attributes:
        piece: the most of a piece; a multiple of ALIGNMENT.
        batch: the most of a batch: the pieces of one call of the optimizer. Scratch for gradients and joined main, and
            the temporaries of the user's class, have at most so many elements.
        at_once: the most of one operation around that call (casts, the factor, rounding). Its temporaries have so many.
        in_place: the most of a batch that needs no scratch and is followed by no gather. It saves calls of the class;
            a gather should start early.
    """

    piece: int
    batch: int
    at_once: int
    in_place: int


SIZES = {
    # A piece in fp32, its gradient and two moments fit into a core's cache, and a batch into the processor's.
    "cpu": Sizes(piece=1 << 18, batch=1 << 20, at_once=1 << 20, in_place=1 << 22),
    # Each operation costs the host several microseconds, however small it is: few, large ones. A piece ends only with
    # its shard or param group, unless it is larger than a batch. What is done at once fits into the second-level cache:
    # rounding and splitting are several operations on the same elements.
    "cuda": Sizes(piece=1 << 26, batch=1 << 26, at_once=1 << 22, in_place=1 << 26),
}
"""By type of device; other accelerators have the sizes of CUDA."""


def sizes_for(device_type: str) -> Sizes:
    return SIZES.get(device_type, SIZES["cuda"])


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive pieces of `numel` elements each; none is empty."""

    numel: int
    count: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """`times` consecutive shards with the same pieces."""

    runs: tuple[Run, ...]
    times: int


def cut(
    layout: BufferLayout,
    keys: Sequence[Hashable | None],
    within: Interval,
    piece_numel: int,
    *,
    by_slot: bool = False,
) -> Iterator[Interval]:
    """The pieces, as intervals of the full buffer. `keys`: one per slot; neighbours with equal keys are cut as one.

    A slot whose key is None is left out. Padding belongs to the slot before it.

    Args:
        within: one shard, or all of them.
        piece_numel: a multiple of ALIGNMENT.
        by_slot: whether slots are cut apart, and padding is left out.
    """
    for section in _sections(layout, keys, by_slot=by_slot):
        start, stop = (section & within).start, (section & within).stop
        while start < stop:
            for run in _runs(_in_one_shard(start, stop, layout), piece_numel, by_slot=by_slot):
                for _ in range(run.count):
                    yield Interval(start, start + run.numel)
                    start += run.numel


def count(
    layout: BufferLayout,
    keys: Sequence[Hashable | None],
    within: Interval,
    piece_numel: int,
    *,
    by_slot: bool = False,
) -> Iterator[Pattern]:
    """The pieces of `cut` in the same order, counted, in a time that does not depend on the number of shards or pieces.

    Args: as of `cut`. Pieces that are only padding are left out.
    """
    end, size = layout.end, layout.shard_numel
    for section in _sections(layout, keys, by_slot=by_slot):
        start, stop = (section & within).start, min((section & within).stop, round_up(end, size))
        while start < stop:
            part = _in_one_shard(start, stop, layout)
            times = max(1, min(stop, end) // size - start // size) if part.numel == size else 1
            runs, at = [], start
            for run in _runs(part, piece_numel, by_slot=by_slot):
                num_pieces = min(run.count, -(-(end - at) // run.numel)) if times == 1 else run.count
                if num_pieces > 0:
                    runs.append(Run(run.numel, num_pieces))
                at += run.numel * run.count
            if len(runs) == 1:  # one long run, across the shards
                yield Pattern((Run(runs[0].numel, runs[0].count * times),), 1)
            else:
                yield Pattern(tuple(runs), times)
            start += part.numel * times


def _sections(layout: BufferLayout, keys: Sequence[Hashable | None], *, by_slot: bool) -> Iterator[Interval]:
    if by_slot:
        yield from (slot.world for key, slot in zip(keys, layout.slots, strict=True) if key is not None and slot.world)
        return
    start = 0
    for index, key in enumerate(keys):
        last = index == len(keys) - 1
        if last or keys[index + 1] != key:
            stop = layout.numel if last else layout.slots[index + 1].world.start
            if key is not None and stop > start:
                yield Interval(start, stop)
            start = stop


def _in_one_shard(start: int, stop: int, layout: BufferLayout) -> Interval:
    """The interval from `start` to `stop` or the end of the shard, whichever comes first."""
    return Interval(start, min(stop, (start // layout.shard_numel + 1) * layout.shard_numel))


def _runs(part: Interval, piece_numel: int, *, by_slot: bool) -> Iterator[Run]:
    """The pieces of a part of one shard: up to the next multiple of ALIGNMENT (not `by_slot`), full pieces, and the
    rest."""
    aligned = part.start if by_slot else min(round_up(part.start, ALIGNMENT), part.stop)
    whole, rest = divmod(part.stop - aligned, piece_numel)
    for run in (Run(aligned - part.start, 1), Run(piece_numel, whole), Run(rest, 1)):
        if run.numel and run.count:
            yield run


def batches(numels: Sequence[int], limit: int) -> list[range]:
    """Batches of neighbouring pieces: each at most `limit` elements, at least one piece."""
    result: list[range] = []
    start = total = 0
    for index, numel in enumerate(numels):
        if index > start and total + numel > limit:
            result.append(range(start, index))
            start, total = index, 0
        total += numel
    return [*result, range(start, len(numels))]


def most_in_a_batch(patterns: Iterable[tuple[Pattern, int]], limit: int) -> int:
    """The most bytes of one of the `batches` of these pieces. `patterns`: with the bytes per element of each."""
    open_batch, most = _Batch(), 0
    for pattern, itemsize in patterns:
        left, known = pattern.times, dict[_Batch, int]()
        while left:
            if open_batch in known:  # the batches repeat from here: skip whole periods
                left %= known[open_batch] - left
                known.clear()
                continue
            known[open_batch] = left
            for run in pattern.runs:
                open_batch, of_run = open_batch.followed_by(run, itemsize, limit)
                most = max(most, of_run)
            left -= 1
    return most


@dataclass(frozen=True, slots=True)
class _Batch:
    """The current, incomplete batch."""

    numel: int = 0
    num_bytes: int = 0

    def followed_by(self, run: Run, itemsize: int, limit: int) -> tuple[_Batch, int]:
        """The incomplete batch after the run, and the most bytes of any batch up to there."""
        at_once = max(1, limit // run.numel)
        joining = min(run.count, max(0, (limit - self.numel) // run.numel) if self.numel else at_once)
        of_piece = round_up(run.numel * itemsize, SCRATCH_ALIGNMENT)
        batch = _Batch(self.numel + joining * run.numel, self.num_bytes + joining * of_piece)
        left = run.count - joining
        if not left:
            return batch, batch.num_bytes
        most, last = min(left, at_once) * of_piece, (left - 1) % at_once + 1
        return _Batch(last * run.numel, last * of_piece), max(batch.num_bytes, most)
