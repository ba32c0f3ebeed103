"""`tests.grids.grid` contains every pair of values of two factors."""

from __future__ import annotations

import itertools

import pytest

from tests import grids


@pytest.mark.parametrize("sizes", [(4, 7, 2, 4), (4, 6, 4), (3, 5), (2, 2, 2, 2, 2)])
def test_every_pair_of_values_occurs(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "EVERYTHING", False)
    factors = [[f"{letter}{i}" for i in range(size)] for letter, size in zip("abcde", sizes, strict=False)]
    for cases in (grids.grid(*factors), grids.pairs_of(*factors)):
        for one, other in itertools.combinations(factors, 2):
            for pair in itertools.product(one, other):
                assert any(set(pair) <= set(case) for case in cases), pair
        assert len(cases) <= 2 * max(len(a) * len(b) for a, b in itertools.combinations(factors, 2))
    fewer = grids.grid(*factors, apart=(0, 1))
    for one, other in itertools.combinations(range(len(factors)), 2):
        met = {(case[one], case[other]) for case in fewer}
        assert met == {*itertools.product(factors[one], factors[other])} or (one, other) == (0, 1)
    assert len(fewer) <= len(grids.grid(*factors))
    cases = [(*case[:-1], 1 + int(case[-1][1:])) for case in grids.grid(*factors)]
    cheaper = grids.on_fewest_ranks(cases)
    of = lambda some: {pair for case in some for pair in itertools.combinations(enumerate(case), 2)}  # noqa: E731
    assert of(cheaper) == of(cases) and sum(case[-1] for case in cheaper) <= sum(case[-1] for case in cases)
    monkeypatch.setattr(grids, "EVERYTHING", True)
    assert grids.grid(*factors) == list(itertools.product(*factors))
