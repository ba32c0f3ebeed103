"""Tells whether some values are still the ones that were written last, without a copy of them.

[Note: marks] The bits of the values are taken as words of 64 bits, and laid out in rows of `COLUMNS` words:

    word word word ... word
    word word word ... word
    word word                   the last row may be shorter
    -----------------------
    sum  sum  sum  ... sum      of each column, modulo 2^64
    times a fixed random odd number for each column, added up: half of the mark
    the same of the upper halves of the sums: the other half

So one pass over the values, which takes what it takes to read them. A change of one word is always seen. Others are
seen unless the changes within every column cancel (or, by a chance of 1 in 2^32, the products do). They cancel if words
of one column are exchanged, or the last numbers of two of them change sign, and such words are a multiple of `COLUMNS`
apart. As that is a large prime, no exchange of rows of a matrix does this, unless they are that many words long or that
many rows apart.

Why the upper halves: if sums change by multiples of 2^n only, so do their products, and 64 - n bits are left to tell
changes apart. If two numbers change sign, and both are the last of their words, n is 63 and nothing is left.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zeroshard.layout.interval import Interval

COLUMNS = 16381
"""Words in a row: prime, and so few that their sums stay in a core's cache."""
_WORD = 8


def mark_of(values: Tensor) -> tuple[bytes, bytes] | None:
    """See [Note: marks]: of the words, and the bytes behind the last of them. None for values that are not on a CPU, or
    do not begin at a multiple of 8 bytes.

    Args:
        values: 1-D, contiguous, of a dtype of 8, 4, 2 or 1 bytes.
    """
    if values.device.type != "cpu" or values.data_ptr() % _WORD:
        return None
    in_words = values.nbytes // _WORD * (_WORD // values.element_size())
    words, rest = values[:in_words].view(torch.int64), values[in_words:]
    columns = min(words.numel(), COLUMNS)
    in_rows = words.numel() // COLUMNS * COLUMNS
    # No lock: a garbage collection may run here, and a finalizer that reads another model (or a signal handler) would
    # wait for its own thread. Whoever finds nothing spare, inside of this call or on another thread, makes its own.
    try:
        scratch = _SPARE.pop()
    except IndexError:
        scratch = _new_scratch()
    sums, upper, found = scratch[:columns], scratch[COLUMNS : COLUMNS + columns], scratch[-2:]
    torch.sum(words[:in_rows].view(-1, columns), 0, out=sums) if in_rows else sums.zero_()
    sums[: words.numel() - in_rows].add_(words[in_rows:])
    torch.dot(sums, _FACTORS[:columns], out=found[0])
    torch.dot(torch.bitwise_right_shift(sums, 32, out=upper), _FACTORS[:columns], out=found[1])
    mark = ctypes.string_at(found.data_ptr(), found.nbytes), ctypes.string_at(rest.data_ptr(), rest.nbytes)
    _SPARE.append(scratch)
    return mark


def _new_scratch() -> Tensor:
    """For one call: the sums of the columns, their upper halves, and the two halves of the mark."""
    with torch.inference_mode(False):
        return torch.empty(2 * COLUMNS + 2, dtype=torch.int64, device="cpu")


def _random_factors() -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (COLUMNS,), generator=generator, device="cpu") | 1


with torch.inference_mode(False):
    _FACTORS = _random_factors()
_SPARE = [_new_scratch()]
"""Memory for calls to come."""


class Marks:
    """The marks of what has been written, by interval."""

    def __init__(self) -> None:
        self._marks: dict[Interval, tuple[int, tuple[bytes, bytes] | None]] = {}
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
