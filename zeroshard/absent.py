"""What the parameters of a unit read as while their values are not here.

Each parameter has a scalar of its own, expanded to its shape: NaN, or the lowest number of an integer dtype. Most
writes to such a tensor raise in torch, because its elements overlap. Those that fill it with one value do not, and
would be lost. They are seen afterwards: by the parameter's version, or, where it was written to through `.data`, by the
scalar.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeroshard.layout import Slot


class Absent:
    """The placeholders of one unit.

    Attributes:
        views: one per slot, in the parameter's shape.
    """

    def __init__(self, slots: Sequence[Slot], like: Tensor) -> None:
        value = torch.nan if like.is_floating_point() or like.is_complex() else torch.iinfo(like.dtype).min
        scalars = torch.full((len(slots),), value, dtype=like.dtype, device=like.device)
        self._storage = scalars.untyped_storage()._cdata
        self._bytes = scalars.view(torch.uint8)
        self._fresh = self._bytes.clone()
        self._versions: list[int] = []
        self.views = [scalar.expand(slot.shape) for scalar, slot in zip(scalars, slots, strict=True)]

    def index_of(self, tensor: Tensor) -> int | None:
        """Of which slot the tensor is the placeholder, or a view of it."""
        if tensor is self._bytes or not torch._C._has_storage(tensor):
            return None
        if tensor.untyped_storage()._cdata != self._storage:
            return None
        return int(tensor.storage_offset())  # each slot has one element

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """The parameters point here from now on."""
        self._versions = [parameter._version for parameter in parameters]

    def written(self, parameters: Sequence[nn.Parameter], *, through_data: bool) -> list[int]:
        """Indices of those that have been written to since. They are told once: all is as at the beginning after.

        Args:
            through_data: look at the scalars, too; on a GPU this waits for it.
        """
        found = {index for index, old in enumerate(self._versions) if parameters[index]._version != old}
        if through_data and not torch.equal(self._bytes, self._fresh):
            same = (self._bytes == self._fresh).view(len(self.views), -1).all(1)
            found |= {index for index, untouched in enumerate(same.tolist()) if not untouched}
        if found:
            self._bytes.copy_(self._fresh)
            self.begin(parameters)
        return sorted(found)
