"""Exact sums of floating-point numbers, computed in integers: bit-equal in any order and on any number of ranks.

A float64 is an integer multiple of 2^-1126. Its bits are spread over `LIMBS` int64, 32 bits in each, so that 2^30
numbers can be added before one overflows (Kulisch's accumulator; R. M. Neal, "Fast exact summation using small and
large superaccumulators", 2015). Integers can be added by any tree, by atomics on a GPU, and by a backend's all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

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


@lru_cache(maxsize=64)
def alone(value: float) -> tuple[int, ...]:
    """As `add_exactly`, of one number that the host knows: [WIDTH]."""
    sums = [0] * WIDTH
    if not math.isfinite(value):
        sums[LIMBS] = 1
    elif value:
        mantissa, exponent = math.frexp(value)
        limb, shift = divmod(exponent + _LEAST - _MANTISSA, _BITS)
        size, sign = int(abs(mantissa) * 2.0**_MANTISSA), int(math.copysign(1, value))
        low, high = (size & _MASK) << shift, (size >> _BITS) << shift
        for number, part in enumerate((low & _MASK, (low >> _BITS) + (high & _MASK), high >> _BITS)):
            sums[limb + number] = sign * part
    return tuple(sums)


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


# The same number on the host and on a device. `rounded` needs integers of any length, which a device has not. These
# functions need a few additions of float64, in a fixed order, and each number that they multiply by is a power of 2.

_PARTS, _LEVELS = 4, 5
_PER_PART = LIMBS // _PARTS
_WEIGHTS = [_BITS * _PER_PART * part - _LEAST for part in range(_PARTS)]


def nearly(limbs: Sequence[int]) -> float:
    """As `rounded`, of an exact sum of numbers that are not negative, up to a few units in the last place."""
    if limbs[LIMBS]:
        return math.nan
    parts = []
    for start in range(0, LIMBS, _PER_PART):
        part = limbs[start : start + _PER_PART]
        if not any(part):  # most are 0
            parts.append(0.0)
            continue
        values = [*map(float, part), *[0.0] * (2**_LEVELS - _PER_PART)]
        for level in range(_LEVELS):
            factor = 2.0 ** (_BITS << level)
            values = [low + high * factor for low, high in zip(values[::2], values[1::2], strict=True)]
        parts += values
    total = parts[0] * 2.0 ** (_WEIGHTS[0] // 2) * 2.0 ** (_WEIGHTS[0] // 2)
    for value, weight in zip(parts[1:], _WEIGHTS[1:], strict=True):
        total += value * 2.0**weight
    return total


def nearly_on_device(sums: Tensor) -> Tensor:
    """As `nearly`, with the same bits: 0-d float64, for `sums` [WIDTH]. The host does not wait for the device."""
    parts = sums[:LIMBS].to(torch.float64).view(_PARTS, _PER_PART)
    values = torch.nn.functional.pad(parts, (0, 2**_LEVELS - _PER_PART))
    for level in range(_LEVELS):
        values = torch.add(values[:, ::2], values[:, 1::2], alpha=2.0 ** (_BITS << level))
    total = values[0, 0] * 2.0 ** (_WEIGHTS[0] // 2) * 2.0 ** (_WEIGHTS[0] // 2)
    for part, weight in zip(values[1:, 0].unbind(), _WEIGHTS[1:], strict=True):
        total = torch.add(total, part, alpha=2.0**weight)
    return torch.where(sums[LIMBS] != 0, math.nan, total)


def folded(values: Sequence[float]) -> float:
    """The sum of some numbers, by adding the upper half of them to the lower half."""
    found = [*values, *[0.0] * (_power_of_2(len(values)) - len(values))]
    while len(found) > 1:
        half = len(found) // 2
        found = [low + high for low, high in zip(found[:half], found[half:], strict=True)]
    return found[0]


def folded_on_device(values: Tensor) -> Tensor:
    """As `folded`, with the same bits: 0-d, for `values` [n] float64. The host does not wait for the device."""
    found = torch.nn.functional.pad(values, (0, _power_of_2(values.numel()) - values.numel()))
    while found.numel() > 1:
        found = found[: found.numel() // 2] + found[found.numel() // 2 :]
    return found[0]


def _power_of_2(number: int) -> int:
    """The smallest one that is not below `number`, and not below 1."""
    return 1 << max(0, number - 1).bit_length()
