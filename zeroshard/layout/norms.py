"""Norms by rows, for accuracy: on a CPU, torch adds the squares of a long fp32 tensor in a few running sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

ROW_NUMEL = 1024


def norms_of_rows(flat: Tensor) -> Tensor:
    """The 2-norm of each row of `ROW_NUMEL` elements, and of the rest, if there is one.

    The norm of these norms is the norm of `flat`. With one running sum over all elements, the error is 1e-5 for a
    quarter of a million elements and 1e-3 for 25 million. By rows it was within 1e-6 of fp64 in all comparisons, at the
    same speed.
    """
    rows, rest = rows_and_rest(flat)
    norms: Tensor = vector_norm(rows, dim=1)
    return torch.cat([norms, vector_norm(rest).view(1)]) if rest.numel() else norms


def rows_and_rest(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Views: the rows, [rows, ROW_NUMEL], and what is left, [less than ROW_NUMEL]."""
    numel = flat.numel()
    end = numel // ROW_NUMEL * ROW_NUMEL
    return (flat if end == numel else flat[:end]).view(-1, ROW_NUMEL), flat[end:]
