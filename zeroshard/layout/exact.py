"""Exact sums of floating-point numbers, computed in integers: bit-equal in any order and on any number of ranks.

A float64 is an integer multiple of 2^-1126. Its bits are spread over `LIMBS` int64, 32 bits in each, so that 2^30
numbers can be added before one overflows (Kulisch's accumulator; R. M. Neal, "Fast exact summation using small and
large superaccumulators", 2015). Integers can be added by any tree, by atomics on a GPU, and by a backend's all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 32
_MASK = (1 << _BITS) - 1
_MANTISSA = 53
_LEAST = 1126
"""2^-1126 is the last bit of the smallest float64, in the 53-bit mantissa that `frexp` gives."""
LIMBS = 68
WIDTH = LIMBS + 1
"""Length of one sum: the limbs, and the count of numbers that were not finite."""


def add_exactly(values: Tensor, places: Tensor, count: int) -> Tensor:
    """The exact sum of the values of each place, [count, WIDTH] int64. The host does not wait for the device.

    Args:
        values: [n] float64.
        places: [n] int64, the index of each value's sum, below `count`.
    """
    finite = values.isfinite()
    mantissa, exponent = torch.frexp(torch.where(finite, values, 0.0))
    whole = (mantissa * 2.0**_MANTISSA).to(torch.int64)  # not `ldexp`, whose power of 2 a GPU may round
    position = torch.where(whole == 0, 0, exponent.to(torch.int64) + (_LEAST - _MANTISSA))
    limb, shift = position // _BITS, position % _BITS
    sign, size = whole.sign(), whole.abs()
    low, high = (size & _MASK) << shift, (size >> _BITS) << shift
    parts = torch.stack([low & _MASK, (low >> _BITS) + (high & _MASK), high >> _BITS]) * sign
    where = places * WIDTH + limb
    sums = torch.zeros(count * WIDTH, dtype=torch.int64, device=values.device)
    for number, part in enumerate(parts):
        sums.scatter_add_(0, where + number, part)
    sums.scatter_add_(0, places * WIDTH + LIMBS, (~finite).to(torch.int64))
    return sums.view(count, WIDTH)


def exact_sum(values: Sequence[float]) -> float:
    """As `rounded`, of the values themselves, none of which is negative: a single rank needs no limbs."""
    if not all(map(math.isfinite, values)):
        return math.nan
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def rounded(limbs: Sequence[int]) -> float:
    """The float64 nearest to an exact sum; NaN if a number in it was not finite, inf if the sum is too large.

    Args:
        limbs: [WIDTH], from `add_exactly`, or sums of these.
    """
    if limbs[LIMBS]:
        return float("nan")
    total = sum(limb << (_BITS * number) for number, limb in enumerate(limbs[:LIMBS]) if limb)
    try:
        return total / (1 << _LEAST)
    except OverflowError:
        return float("inf") if total > 0 else float("-inf")
