"""Intervals, layouts and pieces: examples by hand, and properties for random shapes."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.layout import pool_plan
from zeroshard.layout.cuts import SCRATCH_ALIGNMENT, batches, count, cut, most_in_a_batch
from zeroshard.layout.interval import Interval, round_up
from zeroshard.layout.layout import ALIGNMENT, SLOT_ALIGNMENT, BufferLayout, Fragment, Slot
from zeroshard.layout.owners import balance, cost

Shapes = list[tuple[int, ...]]

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 16, 31, 127, 256, 257, 509])
SHAPES = st.lists(st.lists(SIZES, max_size=2).map(tuple), max_size=7)  # () is 0-d
BOUNDS = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted)
INTERVALS = BOUNDS.map(lambda bounds: Interval(*bounds))


def packed(
    shapes: Shapes,
    num_shards: int,
    alignment: int = ALIGNMENT,
    num_replicas: int = 1,
    slot_alignment: int = SLOT_ALIGNMENT,
) -> BufferLayout:
    named = [(f"p{index}", shape) for index, shape in enumerate(shapes)]
    return BufferLayout.pack(
        named, num_shards, alignment=alignment, slot_alignment=slot_alignment, num_replicas=num_replicas
    )


SLOT_ALIGNMENTS = st.sampled_from([1, 3, 64])
LAYOUTS = st.builds(packed, SHAPES, st.integers(1, 9), st.sampled_from([1, 3, 256]), st.integers(1, 3), SLOT_ALIGNMENTS)


# Portions -------------------------------------------------------------------------------------------------------------


@given(LAYOUTS, st.data())
def test_portions_are_the_slots_and_padding_at_most(layout: BufferLayout, data: st.DataObject) -> None:
    slots = data.draw(st.sets(st.sampled_from(range(len(layout.slots))))) if layout.slots else set()
    portions = layout.portions(slots)
    found = [element for of_shard in portions.of_shard for one in of_shard for element in range(one.start, one.stop)]
    assert found == sorted(set(found)) and portions.total == len(found)
    wanted = {e for i in slots for e in range(layout.slots[i].world.start, layout.slots[i].world.stop)}
    others = {e for slot in layout.slots for e in range(slot.world.start, slot.world.stop)} - wanted
    assert wanted <= set(found) and not others & set(found)
    assert len(found) <= len(wanted) + len(slots) * SLOT_ALIGNMENT or len(slots) == len(layout.slots)
    for rank, of_shard in enumerate(portions.of_shard):
        assert all(one and one in layout.shard(rank) for one in of_shard)
        assert all(a.stop < b.start for a, b in itertools.pairwise(of_shard))  # neighbours are merged
        start = layout.shard(rank).start
        assert [one.start + start for one in portions.inside[rank]] == [one.start for one in of_shard]
    ranks = range(layout.num_shards)
    by_all = (layout.num_shards - 1) * portions.total
    assert sum(map(portions.sent_to_reduce, ranks)) == sum(map(portions.sent_to_gather, ranks)) == by_all
    assert layout.portions(range(len(layout.slots))).is_whole


# Intervals ------------------------------------------------------------------------------------------------------------


@given(INTERVALS, INTERVALS)
def test_an_intersection_holds_the_common_elements(a: Interval, b: Interval) -> None:
    common = set(range(a.start, a.stop)) & set(range(b.start, b.stop))
    found = a & b
    assert set(range(found.start, found.stop)) == common
    assert bool(found) == bool(common)
    assert (b & a).numel == found.numel == len(common)
    if found:
        assert found in a and found in b and found == (b & a)


@given(INTERVALS, INTERVALS)
def test_containment_is_that_of_sets(a: Interval, b: Interval) -> None:
    if b:
        assert (b in a) == (set(range(b.start, b.stop)) <= set(range(a.start, a.stop)))


@given(INTERVALS, st.integers(0, 20))
def test_moving_the_origin_keeps_the_elements(a: Interval, origin: int) -> None:
    moved = Interval(a.start + origin, a.stop + origin).relative_to(origin)
    assert moved == a
    assert list(range(60))[a.slice] == list(range(a.start, a.stop))


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_rounding_up_reaches_the_next_multiple(value: int, multiple: int) -> None:
    result = round_up(value, multiple)
    assert result % multiple == 0 and value <= result < value + multiple


@pytest.mark.parametrize("bounds", [(3, 2), (-1, 2)])
def test_an_interval_is_checked_at_birth(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Interval(*bounds)


def test_an_origin_behind_the_start_is_refused() -> None:
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Interval(2, 5).relative_to(3)


# Layouts --------------------------------------------------------------------------------------------------------------


def test_the_example_of_four_parameters_on_four_ranks() -> None:
    """Sixteen elements, no alignment: `b` begins at element 3, has 5 elements, and spans the shards of ranks 0 and
    1."""
    layout = BufferLayout.pack([("a", (3,)), ("b", (5,)), ("c", (2, 3)), ("d", (2,))], 4, alignment=1, slot_alignment=1)
    assert (layout.numel, layout.shard_numel) == (16, 4)
    of_b = {rank: [f for f in layout.fragments(rank) if f.slot.name == "b"] for rank in range(4)}
    b = Slot("b", (5,), Interval(3, 8))
    assert of_b[0] == [Fragment(1, b, world=Interval(3, 4), local=Interval(3, 4), param=Interval(0, 1))]
    assert of_b[1] == [Fragment(1, b, world=Interval(4, 8), local=Interval(0, 4), param=Interval(1, 5))]
    assert of_b[2] == of_b[3] == []
    assert [[f.slot.name for f in layout.fragments(rank)] for rank in range(4)] == [
        ["a", "b"],
        ["b"],
        ["c"],
        ["c", "d"],
    ]


def expect_partition(layout: BufferLayout, fragments: list[list[Fragment]]) -> None:
    """Every element of every parameter is in exactly one fragment, and the three ranges of each fragment agree."""
    seen: dict[str, list[int]] = {slot.name: [] for slot in layout.slots}
    for rank, of_rank in enumerate(fragments):
        shard = layout.shard(rank)
        for fragment in of_rank:
            assert fragment.world and fragment.world in shard and fragment.world in fragment.slot.world
            assert fragment.local == fragment.world.relative_to(shard.start)
            assert fragment.param == fragment.world.relative_to(fragment.slot.world.start)
            seen[fragment.slot.name] += range(fragment.param.start, fragment.param.stop)
        assert of_rank == sorted(of_rank, key=lambda fragment: fragment.world)
    for slot in layout.slots:
        assert seen[slot.name] == list(range(math.prod(slot.shape)))


@given(LAYOUTS)
def test_fragments_cover_every_element_once(layout: BufferLayout) -> None:
    expect_partition(layout, [list(layout.fragments(rank)) for rank in range(layout.num_shards)])


def test_the_partition_check_sees_a_lost_and_a_shifted_fragment() -> None:
    layout = packed([(5,), (7,)], 3, alignment=1, slot_alignment=1)
    good = [list(layout.fragments(rank)) for rank in range(3)]
    expect_partition(layout, good)
    with pytest.raises(AssertionError):
        expect_partition(layout, [good[0][1:], *good[1:]])
    first = good[0][0]
    shifted = replace(first, param=Interval(first.param.start + 1, first.param.stop + 1))
    with pytest.raises(AssertionError):
        expect_partition(layout, [[shifted, *good[0][1:]], *good[1:]])


@given(SHAPES, st.integers(1, 9), st.sampled_from([1, 3, 256]), st.integers(1, 3), SLOT_ALIGNMENTS)
def test_slots_and_shards_are_aligned_and_padded_by_less_than_a_block_each(
    shapes: Shapes, num_shards: int, alignment: int, num_replicas: int, slot_alignment: int
) -> None:
    layout = packed(shapes, num_shards, alignment, num_replicas, slot_alignment)
    assert [layout.shard(rank).numel for rank in range(num_shards)] == [layout.shard_numel] * num_shards
    assert [layout.shard(rank).start for rank in range(num_shards)] == [
        r * layout.shard_numel for r in range(num_shards)
    ]
    assert layout.shard_numel % (alignment * num_replicas) == 0
    end = 0
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.world.start % slot_alignment == 0 and 0 <= slot.world.start - end < slot_alignment
        assert slot.world.numel == math.prod(shape)
        end = slot.world.stop
    assert 0 <= layout.numel - end < num_shards * alignment * num_replicas


@given(LAYOUTS)
def test_padding_is_what_no_slot_holds(layout: BufferLayout) -> None:
    held = [False] * layout.numel
    for slot in layout.slots:
        held[slot.world.slice] = [True] * slot.world.numel
    assert [i for part in layout.padding for i in range(part.start, part.stop)] == [
        i for i, is_held in enumerate(held) if not is_held
    ]
    assert all(layout.padding)


@given(LAYOUTS, INTERVALS)
def test_fragments_in_any_range_are_those_of_its_elements(layout: BufferLayout, offset: Interval) -> None:
    interval = offset & Interval(0, layout.numel)
    expected = [(slot.name, i - interval.start) for slot in layout.slots
                for i in range(slot.world.start, slot.world.stop) if interval.start <= i < interval.stop]  # fmt: skip
    found = [(f.slot.name, i) for f in layout.fragments_in(interval) for i in range(f.local.start, f.local.stop)]
    assert found == expected
    touched = [index for index, slot in enumerate(layout.slots) if slot.world & interval]
    assert layout.slots_in(interval) == (range(touched[0], touched[-1] + 1) if touched else range(0))


def test_empty_slots_at_the_ends_of_a_range_are_not_in_it() -> None:
    layout = packed([(3,), (0,), (2,), (0,)], 1, alignment=16, slot_alignment=4)
    assert [slot.world.start for slot in layout.slots] == [0, 4, 4, 8]
    assert layout.slots_in(Interval(0, 16)) == range(3)
    assert layout.slots_in(Interval(3, 16)) == range(2, 3)


def test_a_piece_that_is_larger_than_a_batch_is_one() -> None:
    assert batches([5, 1, 2, 1], 3) == [range(1), range(1, 3), range(3, 4)]


def test_more_ranks_than_elements_leaves_whole_ranks_empty() -> None:
    layout = packed([(), (0, 4), (2,)], 8, alignment=1, slot_alignment=1)
    assert (layout.numel, layout.shard_numel) == (8, 1)
    assert [[f.slot.name for f in layout.fragments(rank)] for rank in range(8)] == [["p0"], ["p2"], ["p2"], *[[]] * 5]


def test_a_layout_without_elements_is_empty_everywhere() -> None:
    for shapes in ([], [(0,)], [(0,), (3, 0)]):
        layout = packed(shapes, 3)
        assert layout.numel == 0
        assert [layout.fragments(rank) for rank in range(3)] == [()] * 3


def test_a_layout_is_checked_at_birth() -> None:
    slot = Slot("a", (3,), Interval(0, 3))
    with pytest.raises(ValueError, match="cannot be cut into 4 equal shards"):
        BufferLayout((slot,), 6, 4)
    with pytest.raises(ValueError, match="the slots need 3 elements, the buffer has 2"):
        BufferLayout((slot,), 2, 1)
    with pytest.raises(ValueError, match=r"slot b .* must lie behind 3"):
        BufferLayout((slot, Slot("b", (2,), Interval(2, 4))), 8, 4)
    with pytest.raises(ValueError, match=r"slot a .* must lie behind 0"):
        BufferLayout((Slot("a", (4,), Interval(0, 3)),), 8, 4)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 4\), found 4"):
        packed([(3,)], 4).shard(4)


# Pieces ---------------------------------------------------------------------------------------------------------------

KEYS = st.lists(st.sampled_from(["decay", "plain", None]), min_size=7, max_size=7)


@given(LAYOUTS.filter(lambda layout: layout.numel), KEYS, st.sampled_from([256, 512, 1 << 18]))
def test_pieces_cover_what_has_a_key_and_stay_inside_shards(
    layout: BufferLayout, keys: list[str | None], piece_numel: int
) -> None:
    keys = keys[: len(layout.slots)]
    pieces = list(cut(layout, keys, Interval(0, layout.numel), piece_numel))
    owner: list[str | None] = [None] * layout.numel
    for world in pieces:
        key = [key for key, slot in zip(keys, layout.slots, strict=True) if slot.world.start <= world.start][-1]
        assert 0 < world.numel <= piece_numel
        assert any(world in layout.shard(rank) for rank in range(layout.num_shards))
        assert owner[world.slice] == [None] * world.numel
        owner[world.slice] = [key] * world.numel
    for key, slot in zip(keys, layout.slots, strict=True):
        assert owner[slot.world.slice] == [key] * slot.world.numel
    for part in layout.padding:
        before = [key for key, slot in zip(keys, layout.slots, strict=True) if slot.world.start < part.stop]
        assert owner[part.slice] == [before[-1]] * part.numel
    assert pieces == sorted(pieces)


ALIGNED = st.builds(packed, SHAPES.filter(len), st.integers(1, 5))


@given(ALIGNED, KEYS, st.sampled_from([256, 512, 1 << 18]))
def test_pieces_start_at_a_block_unless_a_param_group_does(
    layout: BufferLayout, keys: list[str | None], piece_numel: int
) -> None:
    """The rule that keeps fused kernels bit-equal: an incomplete vector occurs only at the end of a param group."""
    keys = keys[: len(layout.slots)]
    group_starts = {slot.world.start for i, slot in enumerate(layout.slots) if i == 0 or keys[i] != keys[i - 1]}
    for world in cut(layout, keys, Interval(0, layout.numel), piece_numel):
        assert world.start % ALIGNMENT == 0 or world.start in group_starts
        assert world.stop % ALIGNMENT == 0 or world.stop in group_starts
        assert world.start % SLOT_ALIGNMENT == world.stop % SLOT_ALIGNMENT == 0


@given(ALIGNED, KEYS, st.sampled_from([256, 512, 1 << 18]), st.data())
def test_counted_pieces_are_those_that_are_cut(
    layout: BufferLayout, keys: list[str | None], piece_numel: int, data: st.DataObject
) -> None:
    """For one shard or all of them: `count` gives the lengths of `cut` in the same order, without pieces of padding
    only; and for several such buffers, stepped in batches, the same maximum of bytes. On a single rank by slot, too,
    also if all slots are empty."""
    keys, itemsizes = keys[: len(layout.slots)], data.draw(st.lists(st.sampled_from([0, 2, 4]), min_size=1, max_size=3))
    limit, by_slot = data.draw(st.integers(1, 4000)), layout.num_shards == 1 and data.draw(st.booleans())
    everything = Interval(0, layout.numel)
    for within in (everything, *(layout.shard(rank) for rank in range(layout.num_shards))):
        pieces = list(cut(layout, keys, within, piece_numel, by_slot=by_slot))
        assert pieces == [
            world for world in cut(layout, keys, everything, piece_numel, by_slot=by_slot) if world in within
        ]
        stepped = [world.numel for world in pieces if any(layout.fragments_in(world))]
        patterns = list(count(layout, keys, within, piece_numel, by_slot=by_slot))
        runs = [run for pattern in patterns for _ in range(pattern.times) for run in pattern.runs]
        assert [run.numel for run in runs for _ in range(run.count)] == stepped
        num_bytes = [round_up(numel * itemsize, SCRATCH_ALIGNMENT) for itemsize in itemsizes for numel in stepped]
        most = max(sum(num_bytes[i] for i in batch) for batch in batches(stepped * len(itemsizes), limit))
        assert most_in_a_batch([(p, itemsize) for itemsize in itemsizes for p in patterns], limit) == most


def test_counting_takes_no_longer_for_more_ranks() -> None:
    """The pattern of pieces repeats from shard to shard; `count` returns each repeated pattern once."""
    layout = packed([(1 << 40,)], 5 * 1365)
    pattern, *last = count(layout, ["a"], Interval(0, layout.numel), 1 << 18)
    assert pattern.times > 6000 and len(pattern.runs) == 2 and len(last) <= 1
    small = packed([((1 << 18) * 3 + 256,)] * 7, 7)
    pieces = [world.numel for world in cut(small, ["a"] * 7, Interval(0, small.numel), 1 << 18)]
    most = max(4 * sum(pieces[i] for i in batch) for batch in batches(pieces, 1 << 20))
    patterns = count(small, ["a"] * 7, Interval(0, small.numel), 1 << 18)
    assert most_in_a_batch([(p, 4) for p in patterns], 1 << 20) == most
    assert most_in_a_batch([(pattern, 4)], 1 << 20) <= 4 << 20


def test_pieces_of_a_shard_are_those_of_the_whole_buffer() -> None:
    """The cuts are the same for all ranks: a rank that updates everything steps the same pieces as one that owns a
    shard."""
    layout = packed([(700,), (900,), (300,)], 3)
    everything = list(cut(layout, ["a", "b", "b"], Interval(0, layout.numel), 512))
    assert everything == [
        Interval(0, 512),
        Interval(512, 704),  # 700 elements, and padding up to where the next slot starts: another group begins there
        Interval(704, 768),
        Interval(768, 1280),
        Interval(1280, 1536),
        Interval(1536, 2048),
        Interval(2048, 2304),
    ]


# Owners and pools -----------------------------------------------------------------------------------------------------


def test_owners_have_about_the_same_to_do() -> None:
    assert [cost(shape) for shape in ((), (6,), (2, 3), (4, 2, 3), (0, 3))] == [1, 6, 12, 48, 0]
    assert balance([3, 8, 5, 3, 1], 2) == [1, 0, 1, 0, 1]  # 8, 5, then 3 and 3 in the order of their numbers, and 1


def test_buffers_are_kept_until_there_are_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_plan, "KEPT_BYTES", 10)
    assert pool_plan.kept([4, 7, 6, 1, 0]) == [True, False, True, False, True]


@pytest.mark.parametrize(("reads_peers", "own"), [(True, {"norms", "bias"}), (False, {"bias"})])
def test_units_that_accumulate_at_once_have_buckets_of_their_own(reads_peers: bool, own: set[str]) -> None:
    """They would get one in the middle of a backward, which was in no plan. All others take turns."""
    places = {"head": (9, 9), "block": (2, 8), "norms": (3, 7), "bias": (1, 5), "first": (0, 0)}
    num_bytes = pool_plan.KEPT_BYTES
    requests = [pool_plan.Request(name, "fp32", num_bytes, False, place) for name, place in places.items()]
    plan = pool_plan.PoolPlan.for_gradients(requests, reads_peers=reads_peers)
    assert plan == pool_plan.PoolPlan(dict.fromkeys(own, num_bytes), {"fp32": (1 if reads_peers else 2, num_bytes)})
    weights = [pool_plan.Request(name, "fp32", num_bytes, False) for name in places]
    assert pool_plan.PoolPlan.for_weights(weights) == pool_plan.PoolPlan({}, {"fp32": (2, num_bytes)})
