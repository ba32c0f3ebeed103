"""Norms of a step's gradients, per param group: the terms of this rank, and the norm from the sum of all ranks' terms.

Under every plan a rank computes terms of its own shard only, also if gradients are replicated. Terms are added exactly
(`layout/exact.py`), so norms are bit-equal on every rank and under every plan, independent of the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from zeroshard.layout.exact import add_exactly, exact_sum, folded, folded_on_device, nearly, nearly_on_device, rounded
from zeroshard.layout.norms import ROW_NUMEL, rows_and_rest


def norms_of_pieces(
    pieces: Sequence[tuple[int, Tensor]], norm_type: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[int]]:
    """Norms of the pieces or of parts of them, whose powers add up to those of the pieces: [n] float64, and the param
    group of each. The host does not wait for the device.

    Args:
        pieces: (param group, gradient); none may be empty.
        dtype: the least precision of the sums.
    """
    for piece_dtype in {piece.dtype for _, piece in pieces}:
        dtype = torch.promote_types(dtype, piece_dtype)
    if not pieces or not pieces[0][1].is_cpu:
        return _together(pieces, norm_type, dtype)
    # On a CPU by rows, see `norms.py`.
    short, rows = [], []
    for group, piece in pieces:
        if piece.numel() < ROW_NUMEL:
            short.append((group, piece))
            continue
        of_piece, rest = rows_and_rest(piece)
        rows.append((group, vector_norm(of_piece, norm_type, dim=1, dtype=dtype)))
        if rest.numel():
            short.append((group, rest))
    if not rows:
        return _together(short, norm_type, dtype)
    of_rows, groups = _together(rows, norm_type, torch.float64)
    if not short:
        return of_rows, groups
    of_short, groups_of_short = _together(short, norm_type, dtype)
    return torch.cat([of_rows, of_short]), groups + groups_of_short


def _together(pieces: Sequence[tuple[int, Tensor]], norm_type: float, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """The norm of each piece, and its group, by one operation."""
    if not pieces:
        return torch.empty(0, dtype=torch.float64, device="cpu"), []
    norms = torch._foreach_norm([piece for _, piece in pieces], norm_type, dtype=dtype)
    return torch.stack(norms).to(torch.float64), [group for group, _ in pieces]


def norm_terms(norms: Tensor, groups: Tensor, num_groups: int, norm_type: float) -> Tensor:
    """[num_groups, WIDTH] int64: per group the exact sum of |g|^p over the own shard. For inf-norms, which cannot be
    added, only the number of norms that are not finite is meaningful.

    Args:
        norms: [n] float64, p-norms (`norms_of_pieces`).
        groups: [n] int64, the param group of each.
    """
    return add_exactly(powers_of(norms, norm_type), groups, num_groups)


def largest(norms: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """The largest norm of each group, [num_groups] float64, for inf-norms; 0 for groups without pieces."""
    terms = torch.zeros(num_groups, dtype=torch.float64, device=norms.device)
    return terms.scatter_reduce_(0, groups, norms, "amax")


def powers_of(norms: Tensor, norm_type: float) -> Tensor:
    """What is added up, |g|^p, [n] float64; for inf-norms the norms, of which the largest counts."""
    return norms if math.isinf(norm_type) else norms.pow(norm_type)


def norms_alone(powers: Sequence[float], groups: Sequence[int], num_groups: int, norm_type: float) -> tuple[float, ...]:
    """Of a single rank, on the host: the norm of each group. Equal to `norms_of_sums`, bit for bit.

    Args:
        powers: [n], `powers_of` the norms of the pieces.
        groups: [n], the param group of each.
    """
    of_groups: list[list[float]] = [[] for _ in range(num_groups)]
    for group, power in zip(groups, powers, strict=True):
        of_groups[group].append(power)
    if math.isinf(norm_type):
        return tuple(max(found, default=0.0) if all(map(math.isfinite, found)) else math.nan for found in of_groups)
    return tuple(exact_sum(found) ** (1 / norm_type) for found in of_groups)


def norms_of_sums(sums: Sequence[Sequence[int]], norm_type: float) -> tuple[float, ...]:
    """Per group, the norm over all shards; NaN if a term is not finite. Not for inf-norms.

    Args:
        sums: `norm_terms`, summed over the ranks.
    """
    return tuple(rounded(of_group) ** (1 / norm_type) for of_group in sums)


# The norm by which a gradient is clipped (p = 2) differs from the exact norm by a few units in the last place. A device
# computes the same one, bit for bit, if its square roots are rounded correctly. Those of GPUs are.


def norm_to_clip(sums: Sequence[Sequence[int]]) -> float:
    """Of all groups and shards. `sums`: as for `norms_of_sums`."""
    return math.sqrt(nearly([sum(numbers) for numbers in zip(*sums, strict=True)]))


def norm_to_clip_alone(powers: Sequence[float]) -> float:
    """Of a single rank. `powers`: as for `norms_alone`."""
    total = folded(powers)
    return math.sqrt(total) if math.isfinite(total) else math.nan


def norm_to_clip_on_device(sums: Tensor) -> Tensor:
    """0-d float64. `sums`: of all ranks, [num_groups, WIDTH] int64; or of a single rank, the powers, [n] float64. The
    host does not wait for the device."""
    if sums.dim() > 1:
        return root(nearly_on_device(sums.sum(0)))
    total = folded_on_device(sums)
    return root(torch.where(total.isfinite(), total, math.nan))


def root(value: Tensor) -> Tensor:
    return value.sqrt()
