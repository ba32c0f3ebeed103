"""Samples of what must be the same on every rank, so that ranks that train apart hear of it at their next step.

Of everything that has been gathered, and of weights that rest in full, each rank keeps the bits of a few elements:
others each time, and the same ones on every rank, because it is the number of the gather that chooses them. The control
exchange compares a digest of the bits (a NaN is equal to itself there), and only where it differs the samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIMIT = 256
"""Samples between two steps; of more, the last ones count."""
_ROW_BYTES = 128
_ELEMENTS = 16
_STEP = 2_654_435_761  # odd and large: the elements of one gather say little about those of the next
_MASK = (1 << 48) - 1

Listing = list[tuple[int, str, list[int]]]
"""For each sample: the number of the gather, what it was of, and the bits."""


class Samples:
    """Of one rank of a mesh, since its last step.

    Attributes:
        turn: how often they have been compared.
    """

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.zeros(_LIMIT, _ROW_BYTES, dtype=torch.uint8, device=device)
        factors = torch.randint(
            -(1 << 62), 1 << 62, (_LIMIT, _ROW_BYTES // 8), generator=torch.Generator().manual_seed(0)
        )
        self._factors = (factors * 2 + 1).to(device)
        self._products = torch.empty_like(self._factors)
        self._taken: dict[int, tuple[int, str]] = {}  # row -> (number, unit)
        self._numbers = 0
        self.turn = 0

    def next_number(self) -> int:
        """For what begins to arrive now; ranks that do the same count alike."""
        self._numbers += 1
        return self._numbers - 1

    def take(self, number: int, unit: str, full: Tensor) -> None:
        """`full` [numel] is there, and should be the same on all ranks."""
        if not full.numel():
            return
        stride = -(-full.numel() // min(_ELEMENTS, _ROW_BYTES // full.element_size()))
        sample = full[number * _STEP % stride :: stride]
        # Copied on the device, never read here: `.item()` would make every gather wait for the GPU.
        self._rows[number % _LIMIT, : sample.nbytes].view(full.dtype).copy_(sample)
        self._taken[number % _LIMIT] = number, unit

    def digest(self) -> Tensor:
        """0-d int64: the upper bits of a sum of products, which depend on all bits of a sample."""
        total = torch.mul(self._rows.view(torch.int64), self._factors, out=self._products).sum()
        return (total >> 16) & _MASK

    def listing(self) -> Listing:
        words = self._rows.view(torch.int64).cpu()
        return [(number, unit, words[row].tolist()) for row, (number, unit) in sorted(self._taken.items())]

    def tensors(self) -> list[Tensor]:
        return [self._rows, self._factors, self._products]

    def forget(self) -> None:
        """They have been compared."""
        self._rows.zero_()
        self._taken.clear()
        self.turn += 1


def first_difference(listings: list[Listing]) -> tuple[int, str] | None:
    """The first rank that has other values of something than rank 0 has, and of what. What has not arrived everywhere
    yet is passed over."""
    first = {number: (unit, bits) for number, unit, bits in listings[0]}
    differences = [
        (number, rank, unit)
        for rank, listing in enumerate(listings)
        for number, unit, bits in listing
        if number in first and first[number][1] != bits
    ]
    return min(differences)[1:] if differences else None
