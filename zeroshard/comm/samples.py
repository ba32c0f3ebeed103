"""Samples of weights that must be equal on all ranks, so that ranks whose weights differ find out at the next step.

After each gather, and from weights that rest in full, every rank keeps the bits of a few elements. The number of the
gather chooses the elements: the same ones on every rank, and different ones each time. The control exchange compares a
digest of the bits (so a NaN equals itself). The ranks exchange the samples themselves only if the digests differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor

_LIMIT = 256
"""The most samples that are kept between two steps; later samples replace the oldest."""
_OF_MEANS = 64
"""The same for samples of means, which interleave with gathers of weights differently on each rank."""
_ROW_BYTES = 128
_ELEMENTS = 16
_STEP = 2_654_435_761  # odd and large: the elements of one gather say little about those of the next
_MASK = (1 << 48) - 1

Listing = list[tuple[int, str, list[int]]]
"""For each sample: the number of the gather, the name of the unit, and the bits."""


class Samples:
    """The samples of one rank of a mesh since its last step.

    Attributes:
        turn: how often they have been compared.
        written: the units that this rank has written to since.
    """

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.zeros(_LIMIT + _OF_MEANS, _ROW_BYTES, dtype=torch.uint8, device=device)
        generator, size = torch.Generator().manual_seed(0), (_LIMIT + _OF_MEANS, _ROW_BYTES // 4)
        factors = torch.randint(-(1 << 62), 1 << 62, size, generator=generator, device="cpu")
        self._factors = (factors * 2 + 1).to(device)
        self._products = torch.empty_like(self._factors)
        self._places: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._taken: dict[int, tuple[int, str]] = {}  # row -> (number, unit)
        self._numbers = self._of_means = 0
        self.written: set[str] = set()
        self.turn = 0

    def next_number(self, *, of_mean: bool = False) -> int:
        """The number of a gather that starts now; below 0 for that of a mean. Ranks that run the same gathers count the
        same numbers."""
        if of_mean:
            self._of_means += 1
            return -self._of_means
        self._numbers += 1
        return self._numbers - 1

    def take(self, number: int, unit: str, full: Tensor) -> None:
        """Take a sample of `full` [numel], which has arrived and should be equal on all ranks."""
        if not full.numel():
            return
        stride = -(-full.numel() // min(_ELEMENTS, _ROW_BYTES // full.element_size()))
        sample = full[number * _STEP % stride :: stride]
        # A copy on the device. Do not read the sample here: `.item()` would make the host wait for the GPU at every
        # gather.
        row = number % _LIMIT if number >= 0 else _LIMIT + number % _OF_MEANS
        self._place(row, sample.numel(), full.dtype).copy_(sample)
        self._taken[row] = number, unit

    def _place(self, row: int, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], the first bytes of a row. (Made once: this runs in every gather.)"""
        key = row, numel, dtype
        if key not in self._places:
            # In inference mode a view of another dtype could not be written to by the training that follows.
            with torch.inference_mode(False):
                self._places[key] = self._rows[row, : numel * dtype.itemsize].view(dtype)
        return self._places[key]

    def digest(self) -> Tensor:
        """0-d int64: upper bits of a sum of products with odd factors; they depend on all bits of the samples. (Not of
        words of 64 bits: their highest bits, the signs of float64, are the same in all products, and two cancel.) And
        they depend on which units have been written to."""
        total = torch.mul(self._rows.view(torch.int32), self._factors, out=self._products).sum()
        if self.written:
            total = total + (crc32(repr(sorted(self.written)).encode()) << 16)
        return (total >> 16) & _MASK

    def listing(self) -> Listing:
        words = self._rows.view(torch.int64).cpu()
        return [(number, unit, words[row].tolist()) for row, (number, unit) in sorted(self._taken.items())]

    def forget(self) -> None:
        """Drop the samples: they have been compared."""
        self._rows.zero_()
        self._taken.clear()
        self.written.clear()

    def compared(self) -> None:
        """The samples are equal on all ranks."""
        self.turn += 1
        self.written.clear()


def first_difference(listings: Mapping[int, Listing]) -> tuple[int, str] | None:
    """(rank, unit) of the first sample that differs from that of the first rank. Gathers that have not completed on
    both ranks are skipped. `listings`: by global rank."""
    first = {number: (unit, bits) for number, unit, bits in next(iter(listings.values()))}
    differences = [
        (number, rank, unit)
        for rank, listing in listings.items()
        for number, unit, bits in listing
        if number in first and first[number][1] != bits
    ]
    return min(differences)[1:] if differences else None
