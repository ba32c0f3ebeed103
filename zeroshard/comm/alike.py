"""Whether all ranks have the same number, found by a sum over the ranks.

    of each rank    1     w     w * w
    summed          n    sum w   sum w * w         all alike: n * (sum w * w) = (sum w)^2

Equality holds in Cauchy-Schwarz's inequality only where all w are the same; in whole numbers, nothing is rounded. A
number has `_WORDS` such w of 16 bits, so that squares of 2^31 ranks fit into int64. What this takes does not grow with
the number of ranks, and every rank finds the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 16
_MASK = (1 << _BITS) - 1
_WORDS = 3
BITS = _BITS * _WORDS
"""Of a number; more are left out."""
WIDTH = 1 + 2 * _WORDS


def as_terms(numbers: Tensor) -> Tensor:
    """[n, WIDTH] int64 for a sum over the ranks, of [n] int64; a number below 0 does not count."""
    told = (numbers >= 0).to(torch.int64)
    shifts = torch.arange(0, BITS, _BITS, device=numbers.device)
    words = (numbers.unsqueeze(1) >> shifts & _MASK) * told.unsqueeze(1)
    return torch.cat([told.unsqueeze(1), words, words * words], 1)


def are_alike(sums: Sequence[int]) -> bool:
    """Whether those ranks that count have the same number.

    Args:
        sums: [WIDTH] over all ranks.
    """
    count, words, squares = sums[0], sums[1 : 1 + _WORDS], sums[1 + _WORDS : WIDTH]
    return all(count * square == word * word for word, square in zip(words, squares, strict=True))
