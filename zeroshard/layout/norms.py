"""Norms by rows: torch on a CPU adds the squares of a long fp32 tensor in a few running sums, and drifts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

ROW_NUMEL = 1024


def norms_of_rows(flat: Tensor, norm_type: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
    """[rows + 1] norms of each row of `ROW_NUMEL` elements, and of what is left at the end (0 for nothing).

    The norm of these is that of `flat`. One running sum over all of it is off by 1e-5 at a quarter of a million
    elements, by 1e-3 at 25 million; by rows it was within 1e-6 of fp64 wherever it was compared, at the same speed.
    """
    end = flat.numel() // ROW_NUMEL * ROW_NUMEL
    rows = vector_norm(flat[:end].view(-1, ROW_NUMEL), norm_type, dim=1, dtype=dtype)
    rest = vector_norm(flat[end:], norm_type, dtype=dtype) if end < flat.numel() else rows.new_zeros(())
    return torch.cat([rows, rest.view(1)])
