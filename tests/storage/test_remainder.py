"""bf16 weight + 16-bit remainder = fp32 main: every fp32 number is restored, and the weight is the nearest bf16.

The exhaustive test goes block by block, one block for each upper half h of the bits (2^16 patterns). In a block the
weight is h below the middle and h + 1 from the middle on; that these are the nearest bf16 numbers, ties away from zero,
is checked in fp64 at the ends and around the middle of every block. Rounding is monotonic, so it holds in between.
"""

import math
import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeroshard.layout.interval import Interval
from zeroshard.precision import NAMED
from zeroshard.storage.main_weights import MainWeights, join_remainder, split_remainder

BLOCK = 1 << 16
INF = 0x7F80  # upper half of +inf; larger ones, up to 0x7fff, are all NaN
FINITE = [sign | h for sign in (0, 0x8000) for h in range(INF)]
LOWS = [0, 1, 2, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xABCD, 0xFFFE, 0xFFFF]


def from_bits(patterns: list[int] | Tensor) -> Tensor:
    """fp32 numbers of the given bits, 0 to 2^32 - 1."""
    bits = torch.as_tensor(patterns, dtype=torch.int64)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def to_bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    weight, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split_remainder(master.clone(), weight, remainder)
    return weight, remainder


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    master = torch.full(weight.shape, math.nan)
    join_remainder(weight, remainder, master)
    return master


def nearest_ties_away(master: Tensor) -> Tensor:
    """[n] fp64, by value: of the two bf16 neighbours of an fp32 number, the nearer one; of equally near, the larger.

    Beyond the largest bf16 number the next one would be 2^128, which is represented by inf, as IEEE 754 rounds.
    """
    size, sign = master.double().abs(), torch.where(master.signbit(), -1.0, 1.0).double()
    below = from_bits(to_bits(master.abs()) & 0xFFFF0000).double()
    above = from_bits((to_bits(master.abs()) & 0xFFFF0000) + BLOCK).double()
    above = torch.where(above.isinf(), 2.0**128, above)
    nearest = torch.where(above - size <= size - below, above, below)
    nearest = torch.where(nearest == 2.0**128, math.inf, nearest)
    return sign * torch.where(master.isinf(), math.inf, nearest)


def blocks_to(lows: list[int]) -> Tensor:
    """The numbers with these low halves, in every finite block."""
    return from_bits((torch.tensor(FINITE)[:, None] * BLOCK + torch.tensor(lows)).flatten())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# Everything ----------------------------------------------------------------------------------------------------------


def test_every_number_survives_and_every_block_is_cut_in_the_middle() -> None:
    """All 2^32 - 2^24 finite patterns take 12 s on one core, in blocks that fit into its cache. By default every 17th
    block is tested; the tests below check the ends and the middle of all blocks."""
    low = torch.arange(BLOCK, dtype=torch.int32)
    offset = (low >= BLOCK // 2).to(torch.int16)
    bits, expected = torch.empty_like(low), torch.empty_like(offset)
    master = torch.empty(BLOCK)
    weight, remainder = torch.empty(BLOCK, dtype=torch.bfloat16), torch.empty(BLOCK, dtype=torch.int16)
    for h in FINITE if os.environ.get("ZEROSHARD_TEST_EVERYTHING") else FINITE[::17]:
        signed = h - ((h & 0x8000) << 1)
        torch.add(low, signed * BLOCK, out=bits)
        torch.add(offset, signed, out=expected)
        master.view(torch.int32).copy_(bits)
        split_remainder(master, weight, remainder)
        assert torch.equal(weight.view(torch.int16), expected), f"{h:04x}"
        join_remainder(weight, remainder, master)
        assert torch.equal(master.view(torch.int32), bits), f"{h:04x}"


def test_the_weight_is_the_nearest_bf16_with_ties_away_from_zero() -> None:
    master = blocks_to(LOWS)
    weight, remainder = split(master)
    assert torch.equal(weight.double(), nearest_ties_away(master))
    assert torch.equal(weight.signbit(), master.signbit())
    assert same_bits(join(weight, remainder), master)


def test_it_is_torchs_own_rounding_but_for_ties() -> None:
    off_ties = blocks_to([low for low in LOWS if low != 0x8000])
    assert torch.equal(split(off_ties)[0], off_ties.bfloat16())
    ties = blocks_to([0x8000])
    differ = split(ties)[0] != ties.bfloat16()
    even = torch.tensor(FINITE) % 2 == 0
    assert torch.equal(differ, even)  # torch rounds ties to even, zeroshard away from zero


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_any_list_of_numbers(patterns: list[int]) -> None:
    master = from_bits(patterns)
    master = master[~master.isnan()]
    weight, remainder = split(master)
    assert same_bits(join(weight, remainder), master)
    assert torch.equal(weight.double(), nearest_ties_away(master))


SPECIAL = {
    "zero": (0x00000000, 0.0),
    "negative zero": (0x80000000, -0.0),
    "smallest subnormal": (0x00000001, 0.0),
    "largest subnormal that rounds to zero": (0x00007FFF, 0.0),
    "tie between zero and the smallest bf16": (0x00008000, 2.0**-133),
    "largest subnormal": (0x007FFFFF, 2.0**-126),
    "smallest normal": (0x00800000, 2.0**-126),
    "one": (0x3F800000, 1.0),
    "tie above one": (0x3F808000, 1.0078125),
    "tie above minus one": (0xBF808000, -1.0078125),
    "below a tie": (0x3F807FFF, 1.0),
    "largest that is not rounded to inf": (0x7F7F7FFF, (2.0 - 2.0**-7) * 2.0**127),
    "tie with inf": (0x7F7F8000, math.inf),
    "largest fp32": (0x7F7FFFFF, math.inf),
    "inf": (0x7F800000, math.inf),
    "minus inf": (0xFF800000, -math.inf),
}


@pytest.mark.parametrize(("bits", "expected"), SPECIAL.values(), ids=SPECIAL.keys())
def test_special_values(bits: int, expected: float) -> None:
    master = from_bits([bits])
    weight, remainder = split(master)
    assert weight.item() == expected and math.copysign(1.0, weight.item()) == math.copysign(1.0, expected)
    assert same_bits(join(weight, remainder), master)


# NaN -----------------------------------------------------------------------------------------------------------------

NANS = {
    "quiet": 0x7FC00000,
    "what x86 arithmetic gives": 0xFFC00000,
    "payload in the upper half": 0x7FD50000,
    "payload in both halves": 0x7FABCDEF,
    "signalling, payload 1": 0x7F800001,
    "last that rounds to inf": 0x7F807FFF,
    "first that does not": 0x7F808000,
    "last that does not carry into the sign": 0x7FFF7FFF,
    "first that does": 0x7FFF8000,
    "what CUDA arithmetic gives": 0x7FFFFFFF,
    "all ones": 0xFFFFFFFF,
}


def all_nans() -> Tensor:
    """All 2^24 - 2 NaN patterns."""
    positive = torch.arange(INF * BLOCK + 1, 1 << 31)
    return from_bits(torch.cat([positive, positive + (1 << 31)]))


def test_every_nan_is_still_a_nan_when_joined() -> None:
    master = all_nans()
    assert master.isnan().all() and len(master) == 2**24 - 2
    assert join(*split(master)).isnan().all()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7F807FFF, 0x7FFF8000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_nan_master_shows_in_the_weight(bits: int) -> None:
    assert split(from_bits([bits]))[0].isnan().all()


@pytest.mark.parametrize("bits", NANS.values(), ids=NANS.keys())
def test_a_nan_is_joined_to_a_nan(bits: int) -> None:
    assert join(*split(from_bits([bits]))).isnan().all()


def test_there_are_more_nan_masters_than_nan_weights_with_remainders() -> None:
    """Why not every payload can be kept: there are more NaN numbers in fp32 than pairs of a NaN weight and a
    remainder."""
    nan_weights = sum(h & 0x7FFF > INF for h in range(BLOCK))
    assert nan_weights * BLOCK == len(all_nans()) - 2 * (BLOCK - 1)


# Negative controls: near misses, each of which the checks above see --------------------------------------------------


def truncate(master: Tensor) -> tuple[Tensor, Tensor]:
    bits = master.view(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def ties_to_even(master: Tensor) -> tuple[Tensor, Tensor]:
    return master.bfloat16(), master.view(torch.int32).to(torch.int16)


def unsigned_join(weight: Tensor, remainder: Tensor) -> Tensor:
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + (remainder.to(torch.int32) & 0xFFFF)
    return bits.view(torch.float32)


@pytest.mark.parametrize(
    ("cut", "glue", "lost", "misplaced"),
    [
        (split, join, 0, 0),
        (truncate, join, 6, 6),  # from the middle of each block on
        (truncate, unsigned_join, 0, 6),  # lossless, but a weight that is not the nearest
        (split, unsigned_join, 6, 0),
        (ties_to_even, join, 0.5, 0.5),  # half of the ties: an even bf16 number has 2^16 + 1 preimages
    ],
)
def test_near_misses_are_seen(
    cut: Callable[[Tensor], tuple[Tensor, Tensor]],
    glue: Callable[[Tensor, Tensor], Tensor],
    lost: float,
    misplaced: float,
) -> None:
    """`lost` and `misplaced`: the average number of wrong patterns among the 12 that are checked per block."""
    master = blocks_to(LOWS)
    weight, remainder = cut(master)
    found = glue(weight, remainder).view(torch.int32) != master.view(torch.int32)
    assert int(found.sum()) == lost * len(FINITE)
    assert int((weight.double() != nearest_ties_away(master)).sum()) == misplaced * len(FINITE)


# In its place --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 7, 33])
def test_slices_at_odd_places_leave_their_neighbours_alone(numel: int) -> None:
    values = torch.randn(40, generator=torch.Generator().manual_seed(0))
    weights, remainders = torch.full((40,), 5.0).bfloat16(), torch.full((40,), 9, dtype=torch.int16)
    scratch = torch.full((40,), 7.0)
    part = slice(3, 3 + numel)
    split_remainder(values[part].clone(), weights[part], remainders[part])
    join_remainder(weights[part], remainders[part], scratch[part])
    assert same_bits(scratch[part], values[part])
    outside = torch.ones(40, dtype=torch.bool)
    outside[part] = False
    assert bool(
        (weights[outside] == 5.0).all() and (remainders[outside] == 9).all() and (scratch[outside] == 7.0).all()
    )


def test_main_weights_give_back_what_they_were_set_to() -> None:
    master = blocks_to([0x1234, 0x8000])
    everything = Interval(0, len(master))
    main = MainWeights(everything, torch.zeros(len(master), dtype=torch.bfloat16), NAMED["bf16-remainder"])
    kept = master.clone()
    main.set(everything, master)
    assert same_bits(master, kept), "set leaves its argument alone"
    assert torch.equal(main.weights.double(), nearest_ties_away(master))
    scratch = torch.empty(len(master))
    value = main.read(everything, scratch)
    assert same_bits(value, master)
    main.write(everything, value)
    assert same_bits(main.read(everything, scratch), master), "read and write change nothing"
