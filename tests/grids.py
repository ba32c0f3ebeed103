"""Grids of test cases. By default a grid covers every pair of two values; with `make test-everything`, every
combination.

Most faults depend on one value (a plan that is wrong) or two (a plan that is wrong in one precision), hardly ever on
three. For 4 plans, 7 precisions, 2 optimizers and 4 numbers of ranks that is 28 cases instead of 224. (Kuhn, Wallace
and Gallo, "Software Fault Interactions and Implications for Software Testing", 2004.)
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

EVERYTHING = bool(os.environ.get("ZEROSHARD_TEST_EVERYTHING"))


def grid(*factors: Iterable[Any], apart: tuple[int, int] | None = None) -> list[tuple[Any, ...]]:
    """Cases with one value of each factor: all combinations, or a selection in which every pair of values occurs.
    `apart`: two factors, by their places, of whose values not every pair need occur."""
    values = [list(factor) for factor in factors]
    cases = _chosen([len(of) for of in values], apart)
    return [tuple(of[i] for of, i in zip(values, case, strict=True)) for case in cases]


def pairs_of(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """A selection in which every pair of values occurs, for factors with tens of thousands of combinations. It is
    somewhat longer than the selection of `grid`, which looks at each combination."""
    values = [list(factor) for factor in factors]
    return [tuple(of[i] for of, i in zip(values, case, strict=True)) for case in _built([len(of) for of in values])]


def on_fewest_ranks(cases: list[tuple[Any, ...]], least: int = 1) -> list[tuple[Any, ...]]:
    """The cases, whose last value is a number of ranks, on as few ranks as they can be without losing a pair."""
    if EVERYTHING:
        return cases
    pairs = lambda case: {*itertools.combinations(enumerate(map(str, case)), 2)}  # noqa: E731
    times = Counter(pair for case in cases for pair in pairs(case))
    result = []
    for *others, ranks in cases:
        case = (*others, ranks)
        for fewer in range(least, ranks):
            instead = (*others, fewer)
            if all(times[pair] > 1 for pair in pairs(case) - pairs(instead)):
                times.subtract(pairs(case))
                times.update(pairs(instead))
                case = instead
                break
        result.append(case)
    return result


def at(cases: list[tuple[Any, ...]], last: Any) -> list[tuple[Any, ...]]:
    """The cases whose last value is `last`, without that value. (Used where each number of ranks has its own test,
    say.)"""
    return [case[:-1] for case in cases if case[-1] == last]


def _chosen(sizes: list[int], apart: tuple[int, int] | None) -> list[tuple[int, ...]]:
    """Greedy and deterministic: each next case is the one with the most pairs that no earlier case has."""
    every = list(itertools.product(*map(range, sizes)))
    if EVERYTHING:
        return every
    bits: dict[Any, int] = {}  # one bit for each pair: sets of pairs are integers, as there may be thousands of cases
    pairs = {
        case: sum(
            1 << bits.setdefault(pair, len(bits))
            for pair in itertools.combinations(enumerate(case), 2)
            if (pair[0][0], pair[1][0]) != apart
        )
        for case in every
    }
    left, chosen, times = (1 << len(bits)) - 1, [], Counter[tuple[int, int]]()
    while left:
        # Of equal ones the first; where not all pairs need occur, the one whose values occur least so far.
        rare = (lambda case: -sum(times[at] for at in enumerate(case))) if apart else lambda case: 0
        best = max(every, key=lambda case: ((pairs[case] & left).bit_count(), rare(case)))
        times.update(enumerate(best))
        chosen.append(best)
        left &= ~pairs[best]
    return sorted(chosen)


def _built(sizes: list[int]) -> list[tuple[int, ...]]:
    """Greedy and deterministic: each case begins with a pair that no earlier case has, and takes of every other factor
    the value that adds most such pairs; of equal ones, the value that occurs least so far."""
    places = [(factor, value) for factor, size in enumerate(sizes) for value in range(size)]
    left = {(a, b) for a, b in itertools.combinations(places, 2) if a[0] != b[0]}
    times, chosen = Counter[tuple[int, int]](), []
    while left:
        case = dict(min(left))
        for factor, size in enumerate(sizes):
            if factor not in case:
                news = [sum(_pair((factor, v), other) in left for other in case.items()) for v in range(size)]
                case[factor] = max(range(size), key=lambda v: (news[v], -times[factor, v]))
        left -= {_pair(a, b) for a, b in itertools.combinations(case.items(), 2)}
        times.update(case.items())
        chosen.append(tuple(case[factor] for factor in range(len(sizes))))
    return sorted(chosen)


def _pair(a: tuple[int, int], b: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (a, b) if a < b else (b, a)
