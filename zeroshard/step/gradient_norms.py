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

from zeroshard.layout.exact import add_exactly, rounded
from zeroshard.layout.norms import ROW_NUMEL, norms_of_rows


def norms_of_pieces(pieces: Sequence[Tensor], norm_type: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The norm of each piece (none may be empty), [pieces] float64. `dtype`: the least precision of the sums. The host
    does not wait for the device."""
    for piece_dtype in {piece.dtype for piece in pieces}:
        dtype = torch.promote_types(dtype, piece_dtype)
    if not pieces:
        return torch.empty(0, dtype=torch.float64)
    if pieces[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(pieces), norm_type, dtype=dtype)).to(torch.float64)
    found: list[Tensor] = [torch.empty(0)] * len(pieces)
    short = [index for index, piece in enumerate(pieces) if piece.numel() <= ROW_NUMEL]
    if short:  # one row each, and together one operation
        for index, norm in zip(short, torch._foreach_norm([pieces[i] for i in short], norm_type, dtype), strict=True):
            found[index] = norm.to(torch.float64)
    for index, piece in enumerate(pieces):
        if piece.numel() > ROW_NUMEL:  # see `norms.py`
            found[index] = vector_norm(norms_of_rows(piece, norm_type, dtype), norm_type, dtype=torch.float64)
    return torch.stack(found)


def norm_terms(norms: Tensor, groups: Tensor, num_groups: int, norm_type: float) -> Tensor:
    """[num_groups, WIDTH] int64: per group the exact sum of |g|^p over the own shard. For inf-norms, which cannot be
    added, only the number of norms that are not finite is meaningful.

    Args:
        norms: [pieces] float64, p-norms (`norms_of_pieces`).
        groups: [pieces] int64, the param group of each.
    """
    return add_exactly(norms if math.isinf(norm_type) else norms.pow(norm_type), groups, num_groups)


def largest(norms: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """The largest norm of each group, [num_groups] float64, for inf-norms; 0 for groups without pieces."""
    terms = torch.zeros(num_groups, dtype=torch.float64, device=norms.device)
    return terms.scatter_reduce_(0, groups, norms, "amax")


def norms_of_sums(sums: Sequence[Sequence[int]], norm_type: float) -> tuple[float, ...]:
    """Per group, the norm over all shards; NaN if a term is not finite. Not for inf-norms.

    Args:
        sums: `norm_terms`, summed over the ranks.
    """
    return tuple(rounded(of_group) ** (1 / norm_type) for of_group in sums)
