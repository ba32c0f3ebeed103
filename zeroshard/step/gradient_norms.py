"""Norms of a step's gradients, per param group: this rank's terms, and what the terms of all shards make together.

Norms are those of the own shard under every plan, also where gradients are replicated, and terms are added in rank
order: so they are bit-equal on every rank, and under every plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from zeroshard.layout.norms import norms_of_rows


def norm_terms(
    gradients: Sequence[tuple[int, Tensor]], num_groups: int, norm_type: float, device: torch.device
) -> Tensor:
    """[num_groups] float64: per group the sum of |g|^p over the own shard (the maximum where p is inf).

    Args:
        gradients: (param group, piece of the own shard of the gradient), all groups together.
        norm_type: p.
    """
    terms = torch.zeros(num_groups, dtype=torch.float64, device=device)
    pieces = [(group, piece) for group, piece in gradients if piece.numel()]
    if not pieces:
        return terms
    groups = torch.tensor([group for group, _ in pieces], device=device)
    norms = _norms([piece for _, piece in pieces], norm_type, torch.float32)
    if not bool(torch.isfinite(norms).all()):  # an element, or just the fp32 sum of squares
        norms = _norms([piece for _, piece in pieces], norm_type, torch.float64)
    if math.isinf(norm_type):
        return terms.scatter_reduce_(0, groups, norms, "amax")
    return terms.index_add_(0, groups, norms.pow_(norm_type))


def norms_of_terms(terms: Tensor, norm_type: float) -> tuple[float, ...]:
    """Per group, the norm over all shards; NaN where a term is not finite.

    Args:
        terms: [shards, num_groups], one row of `norm_terms` for each shard.
    """
    if math.isinf(norm_type):
        return tuple(terms.amax(0).tolist())
    return tuple(
        sum(column) ** (1 / norm_type) if all(map(math.isfinite, column)) else math.nan for column in terms.t().tolist()
    )


def _norms(pieces: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """[pieces] float64. On a CPU by rows (see `norms.py`)."""
    for piece_dtype in {piece.dtype for piece in pieces}:
        dtype = torch.promote_types(dtype, piece_dtype)
    if pieces[0].is_cuda:
        return torch.stack(torch._foreach_norm(pieces, norm_type, dtype=dtype)).to(torch.float64)
    by_rows = [norms_of_rows(piece, norm_type, dtype) for piece in pieces]
    return torch.stack([vector_norm(rows, norm_type, dtype=torch.float64) for rows in by_rows])
