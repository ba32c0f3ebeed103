"""Whether all ranks have the same number, found by a sum over the ranks.

    each rank       1     w     w * w
    the sums        n    sum w   sum w * w         all alike: n * (sum w * w) = (sum w)^2

The Cauchy-Schwarz inequality becomes an equality only if all w are the same, and integers are not rounded. A number is
split into `_WORDS` words w of 16 bits, so that the sum of the squares of 2^31 ranks fits into int64. The cost does not
grow with the number of ranks, and every rank computes the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 16
_MASK = (1 << _BITS) - 1
_WORDS = 3
BITS = _BITS * _WORDS
"""How many bits of a number are compared; higher bits are ignored."""
WIDTH = 1 + 2 * _WORDS


def as_terms(numbers: Tensor) -> Tensor:
    """The terms that each rank adds to the sum, [n, WIDTH] int64, for `numbers` [n] int64. A negative number takes no
    part in the comparison: all its terms are 0."""
    told = (numbers >= 0).to(torch.int64)
    shifts = torch.arange(0, BITS, _BITS, device=numbers.device)
    words = (numbers.unsqueeze(1) >> shifts & _MASK) * told.unsqueeze(1)
    return torch.cat([told.unsqueeze(1), words, words * words], 1)


def differ(sums: Tensor) -> Tensor:
    """As `are_alike`, negated, on the device: 0-d bool, whether any of several numbers differs. `sums`: [n, WIDTH]."""
    count, words, squares = sums[:, :1], sums[:, 1 : 1 + _WORDS], sums[:, 1 + _WORDS :]
    return torch.any(count * squares != words * words)


def are_alike(sums: Sequence[int]) -> bool:
    """Whether all ranks that take part in the comparison have the same number.

    Args:
        sums: [WIDTH], the terms of one number, summed over all ranks.
    """
    count, words, squares = sums[0], sums[1 : 1 + _WORDS], sums[1 + _WORDS : WIDTH]
    return all(count * square == word * word for word, square in zip(words, squares, strict=True))
