"""Tells whether some values are still the ones that were written last, without a copy of them.

[Note: marks] A mark consists of sums of the bits of the values, as 64-bit integers that are laid out in rows:

    word word word word | sum of the row
    word word word word | sum of the row       a sum for each row and for each column, modulo 2^64
    -------------------
    sum  sum  sum  sum     of the column

Wherever one, two or three words have changed, there is a row or a column in which only one of them has, and its sum
differs: also if two words were exchanged, which no sum of all words shows. For equal sums, four words or more must have
changed by amounts that cancel in each row and in each column, which does not happen by chance. To take both sums reads
the values once from memory, and once from the cache.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zeroshard.layout.interval import Interval

COLUMNS = 256
"""Words in a row."""
_WORD = 8


def mark_of(values: Tensor) -> int | None:
    """See [Note: marks]. None for values that are not on a CPU, or do not begin at a multiple of 8 bytes.

    Args:
        values: 1-D, contiguous, of a dtype of 8, 4, 2 or 1 bytes.
    """
    if values.device.type != "cpu" or values.data_ptr() % _WORD:
        return None
    per_row = COLUMNS * _WORD // values.element_size()
    in_rows = values.numel() // per_row * per_row
    words, rest = values[:in_rows].view(torch.int64).view(-1, COLUMNS), values[in_rows:]
    found = bytearray(_WORD * (COLUMNS + len(words)))
    sums = torch.frombuffer(found, dtype=torch.int64)
    torch.sum(words, 0, out=sums[:COLUMNS])
    if len(words):
        torch.sum(words, 1, out=sums[COLUMNS:])
    return hash((bytes(found), ctypes.string_at(rest.data_ptr(), rest.nbytes)))


class Marks:
    """The marks of what has been written, by interval."""

    def __init__(self) -> None:
        self._marks: dict[Interval, tuple[int, int | None]] = {}
        self._times_forgotten = 0

    def forget(self) -> None:
        """All that is known is out of date: something else has been written."""
        self._times_forgotten += 1

    def set(self, piece: Interval, values: Tensor) -> None:
        """These values have been written."""
        if piece not in self._marks:  # it may overlap with others, which must not be taken for valid later
            self.forget()
        self._marks[piece] = self._times_forgotten, mark_of(values)

    def are_same(self, piece: Interval, values: Tensor) -> bool:
        """Whether these are known to be the values that were written last. False where it is not known."""
        when, mark = self._marks.get(piece, (-1, None))
        return when == self._times_forgotten and mark is not None and mark == mark_of(values)
