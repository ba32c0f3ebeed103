"""The norms of a rank's pieces, and their exact sums: those of a single rank are those of several ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zeroshard.layout.norms import ROW_NUMEL
from zeroshard.step.gradient_norms import norm_terms, norms_alone, norms_of_pieces, norms_of_sums, powers_of

SIZES = (1, ROW_NUMEL - 1, ROW_NUMEL, ROW_NUMEL + 1, 5 * ROW_NUMEL, 5 * ROW_NUMEL + 7, 3)
KINDS = (0.5, 1.0, 2.0, 3.0, math.inf)


def pieces_of(sizes: tuple[int, ...]) -> list[tuple[int, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(number % 3, torch.randn(size, generator=generator)) for number, size in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:2], SIZES[2:3], ()])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_of_fp64(sizes: tuple[int, ...], kind: float) -> None:
    pieces = pieces_of(sizes)
    norms, groups = norms_of_pieces(pieces, kind)
    assert norms.dtype == torch.float64 and norms.shape == (len(groups),)
    found = norms_alone(powers_of(norms, kind).tolist(), groups, 3, kind)
    for group in range(3):
        of_group = torch.cat([torch.empty(0), *(piece for index, piece in pieces if index == group)]).double()
        expected = torch.linalg.vector_norm(of_group, kind).item() if len(of_group) else 0.0
        assert found[group] == pytest.approx(expected, rel=1e-6), group


@pytest.mark.parametrize("special", [None, math.nan, math.inf, 1e200, 1e-300])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_single_rank_has_the_bits_of_several(kind: float, special: float | None) -> None:
    norms, groups = norms_of_pieces(pieces_of(SIZES), kind)
    if special is not None:
        norms[2] = special
    sums = norm_terms(norms, torch.tensor(groups), 4, kind).tolist()
    several = norms_of_sums(sums, kind)
    alone = norms_alone(powers_of(norms, kind).tolist(), groups, 4, kind)
    overflows = special in (math.nan, math.inf) or (special == 1e200 and kind > 1.5)
    assert any(map(math.isnan, alone)) == any(of_group[-1] for of_group in sums) == overflows
    assert [x.hex() for x in alone] == [x.hex() for x in several]
    assert alone[3] == 0.0


@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_seen_wherever_it_is(special: float) -> None:
    for kind in KINDS:
        for place in (0, 4 * ROW_NUMEL, 5 * ROW_NUMEL + 6):
            piece = torch.ones(5 * ROW_NUMEL + 7)
            piece[place] = special
            norms, groups = norms_of_pieces([(0, piece)], kind)
            assert not math.isfinite(norms_alone(powers_of(norms, kind).tolist(), groups, 1, kind)[0])
