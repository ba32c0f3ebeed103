"""Exact sums of floating-point numbers. They replaced sums in rank order over one row for each rank: the exchanged
bytes grew with the number of ranks, and `index_add_` on CUDA gave different bits in each run."""

from __future__ import annotations

import itertools
import math
import random
from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zeroshard.comm.alike import WIDTH, are_alike, as_terms
from zeroshard.layout import exact
from zeroshard.layout.sums import as_operand, divide

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def total(values: list[float]) -> float:
    numbers = torch.tensor(values, dtype=torch.float64)
    return exact.rounded(exact.add_exactly(numbers, torch.zeros(len(values), dtype=torch.int64), 1)[0].tolist())


@settings(max_examples=100, deadline=None)
@given(st.lists(FLOATS, max_size=12))
def test_sums_are_rounded_once(values: list[float]) -> None:
    """Equal to `math.fsum` over the whole range: subnormal numbers, cancellation, intermediate overflow."""
    try:
        expected = math.fsum(values)
    except OverflowError:
        return  # fsum overflowed in between; our sum may be finite
    assert total(values) == expected


def test_the_ends_of_the_range() -> None:
    largest, smallest = 1.7976931348623157e308, 5e-324
    assert total([largest]) == largest and total([smallest]) == smallest and total([]) == 0.0
    assert total([largest, largest]) == math.inf and total([-largest, -largest]) == -math.inf
    assert total([largest, largest, -largest]) == largest  # floating-point numbers would overflow
    assert total([largest, smallest, -largest]) == smallest
    for bad in (math.nan, math.inf, -math.inf):
        assert math.isnan(total([1.0, bad]))


def test_any_order_and_any_tree_have_the_same_bits() -> None:
    """The control: sums of floating-point numbers depend on the order."""
    chosen = random.Random(0)
    values = torch.tensor([chosen.random() * 2.0 ** chosen.randint(-30, 30) for _ in range(200)], dtype=torch.float64)
    places = torch.tensor([number % 3 for number in range(200)])
    once = exact.add_exactly(values, places, 3)
    floats = set()
    for _ in range(5):
        order = torch.tensor(chosen.sample(range(200), 200))
        shuffled, where = values[order], places[order]
        cut = chosen.randrange(200)
        parts = [exact.add_exactly(shuffled[part], where[part], 3) for part in (slice(cut), slice(cut, None))]
        assert torch.equal(parts[0] + parts[1], once)
        # Not `sum`: since Python 3.12 it compensates rounding errors.
        floats.add(tuple(reduce(add, shuffled[where == place].tolist()) for place in range(3)))
    assert len(floats) > 1
    expected = [math.fsum(values[places == place].tolist()) for place in range(3)]
    assert [exact.rounded(of_place) for of_place in once.tolist()] == expected


def in_one_sum(values: list[float]) -> Tensor:
    return exact.add_exactly(torch.tensor(values, dtype=torch.float64), torch.zeros(len(values), dtype=torch.int64), 1)[
        0
    ]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0, 2.0**1000, allow_subnormal=False), max_size=12), st.integers(1, 2**29))
def test_a_device_finds_the_bits_of_the_host(values: list[float], times: int) -> None:
    """And the exact sum, up to a few units in the last place. (`times`: so many ranks bring the same.)"""
    sums = in_one_sum(values) * times
    found = exact.nearly(sums.tolist())
    assert exact.nearly_on_device(sums).item() == found
    assert found == pytest.approx(exact.rounded(sums.tolist()), rel=1e-15, abs=1e-300)
    folded = exact.folded(values)
    assert exact.folded_on_device(torch.tensor(values, dtype=torch.float64)).item() == folded
    assert folded == pytest.approx(math.fsum(values), rel=1e-15)


def test_a_device_sees_what_is_not_finite() -> None:
    for bad in (math.nan, math.inf):
        sums = in_one_sum([1.0, bad])
        assert math.isnan(exact.nearly(sums.tolist())) and exact.nearly_on_device(sums).isnan()
        assert not math.isfinite(exact.folded([1.0, bad, 2.0]))
    for whole in (0.0, 1.0, 3.0, 2.0**53 - 1, 12345.0):
        assert exact.nearly(in_one_sum([whole, whole]).tolist()) == 2 * whole, "weights are numbers of tokens, mostly"


@given(st.floats())
def test_one_number_alone_is_added_by_the_host_as_by_a_device(value: float) -> None:
    assert list(exact.alone(value)) == in_one_sum([value]).tolist()


def test_the_bits_of_a_device_need_one_order() -> None:
    """The control: `sum` of the same numbers has other bits now and then."""
    chosen = random.Random(0)
    values = [[chosen.random() for _ in range(9)] for _ in range(20)]
    assert any(exact.folded(some) != sum(some) for some in values)


def test_as_many_as_there_can_be() -> None:
    """Sums of 2^30 numbers do not overflow a limb, wherever in it their bits lie."""
    limbs = torch.stack([exact.add_exactly(torch.tensor([x]), torch.tensor([0]), 1)[0] for x in LONGEST])
    assert int(limbs.abs().max()) * 2**30 < 2**63


LONGEST = torch.tensor([float((1 << 53) - 1) * 2.0**shift for shift in range(32)], dtype=torch.float64)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 1000])
def test_ranks_find_out_whether_they_have_the_same(num_ranks: int) -> None:
    chosen = random.Random(num_ranks)
    for _ in range(20):
        number = chosen.getrandbits(48)
        numbers = [number] * num_ranks
        assert are_alike(as_terms(torch.tensor(numbers)).sum(0).tolist())
        if num_ranks > 1:
            numbers[chosen.randrange(num_ranks)] ^= 1 << chosen.randrange(48)
            assert not are_alike(as_terms(torch.tensor(numbers)).sum(0).tolist())
            numbers[numbers.index(next(n for n in numbers if n != number))] = -1  # -1 is not compared
            assert are_alike(as_terms(torch.tensor(numbers)).sum(0).tolist())
    one, three = as_terms(torch.tensor([1, 2, 3])), as_terms(torch.tensor([2, 2, 2]))
    assert torch.equal(one[:, :4].sum(0), three[:, :4].sum(0)), "a sum alone does not tell them apart"
    assert not are_alike(one.sum(0).tolist()) and are_alike(three.sum(0).tolist())


def test_squares_of_as_many_ranks_as_there_can_be_do_not_overflow() -> None:
    (largest,) = as_terms(torch.tensor([(1 << 48) - 1])).tolist()
    assert len(largest) == WIDTH and max(largest) * 2**31 < 2**63


def test_an_accelerator_divides_by_a_tensor_and_so_rounds_once() -> None:
    """torch multiplies CUDA tensors by the reciprocal of a number."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for divisor, dtype in itertools.product((3, 5, 6, 7, 12, 100), (torch.float32, torch.float64, torch.bfloat16)):
        of_dtype = values.to(dtype)
        operand = as_operand(divisor, dtype, values.device)
        assert isinstance(operand, Tensor) and operand.dtype == dtype
        assert torch.equal(of_dtype / operand, of_dtype / divisor)
    assert not torch.equal(values * (1 / 3), values / 3)  # the negative control
    assert [as_operand(divisor, torch.bfloat16, values.device) for divisor in (2, 256, 1001)] == [2, 256, 1001]


def test_division_by_a_power_of_two_has_the_bits_of_a_division() -> None:
    """On a CPU it is a multiplication. Every fp16 and bf16 number; of fp32, all exponents, with random fractions."""
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=torch.Generator().manual_seed(0)).int()
    halves = torch.arange(-(1 << 15), 1 << 15).short()
    for divisor in (2**power for power in range(1, 15)):
        for values in (bits.view(torch.float32), halves.view(torch.float16), halves.view(torch.bfloat16)):
            divided = values.clone()
            divide(divided, divisor)
            assert torch.equal(divided.nan_to_num(7.0), (values / divisor).nan_to_num(7.0)), (divisor, values.dtype)
            assert torch.equal(divided.isnan(), values.isnan())
    thirds = bits.view(torch.float32)
    assert not torch.equal((thirds * (1 / 3)).nan_to_num(7.0), (thirds / 3).nan_to_num(7.0))  # the negative control
