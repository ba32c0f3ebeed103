"""A piece: one flat parameter of the inner optimizer; and the scratch of a step. (`cuts.py` decides where to cut.)"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.layout.cuts import SCRATCH_ALIGNMENT
from zeroshard.layout.interval import Interval, round_up
from zeroshard.storage.unit import Unit


@dataclass(eq=False, slots=True)
class Piece:
    """One flat parameter of the inner optimizer.

    Attributes:
        world: its range in the unit's buffers.
        group: index of the param group.
        tensor: [world.numel] in the main dtype; the key of the inner optimizer's state. A view of main; or, if main
            must be joined, pointed to scratch during the step.
        active: whether it takes part in the next step (its parameters have gradients).
    """

    unit: Unit
    world: Interval
    group: int
    tensor: Tensor
    active: bool = True


def scratch_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that a piece needs in a `Scratch`, rounded up so that the next piece is aligned."""
    return round_up(numel * dtype.itemsize, SCRATCH_ALIGNMENT)


class Scratch:
    """One storage that is divided among the pieces of a batch, and reused by the next batch."""

    def __init__(self, device: torch.device) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8, device=device)
        self._at = 0

    def reserve(self, num_bytes: int) -> None:
        """Make the storage at least this large. A larger one replaces it: its values are lost."""
        if num_bytes > self.storage.numel():
            self.storage = self.storage.new_empty(num_bytes)

    def rewind(self) -> None:
        self._at = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], uninitialised."""
        start, self._at = self._at, self._at + scratch_bytes(numel, dtype)
        return self.storage[start : start + numel * dtype.itemsize].view(dtype)
