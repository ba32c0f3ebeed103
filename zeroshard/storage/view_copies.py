"""Copies that have been put in place of views of borrowed weights (`weight_views.py`).

A module may look at its weight once, keep the view, and use it in every forward. A view has the new values after a
step. So the copy in its place gets them, too, when they are here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NumberOf = Callable[[int], int]
"""The version of the parameter of a slot."""


@dataclass
class _Copy:
    """Of which part of a parameter: `offset` in bytes, and `strides` in elements of the copy's dtype, which may be
    another one (`view_as_complex`). `number`: the version of the parameter that it has the values of."""

    tensor: weakref.ref[Tensor]
    slot: int
    strides: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool
    number: int

    def values_in(self, parameter: Tensor, like: Tensor) -> Tensor:
        """The view. `like`: the copy."""
        storage = parameter.untyped_storage()
        first = (parameter.data_ptr() - storage.data_ptr() + self.offset) // like.element_size()
        view = like.new_empty(0).set_(storage, first, like.size(), self.strides)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


class ViewCopies:
    """Those of one unit that are alive."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def add(self, view: Tensor, copy: Tensor, parameters: Sequence[nn.Parameter], number_of: NumberOf) -> None:
        """The parameters are here."""
        slot = next((index for index, parameter in enumerate(parameters) if _begins_in(view, parameter)), None)
        if slot is not None:
            offset, marks = view.data_ptr() - parameters[slot].data_ptr(), (view.is_conj(), view.is_neg())
            self._copies.append(_Copy(weakref.ref(copy), slot, view.stride(), offset, *marks, number_of(slot)))

    def renew(self, parameters: Sequence[nn.Parameter], number_of: NumberOf) -> None:
        """The parameters are here again."""
        if not self._copies:
            return
        alive = [(copy, tensor) for copy in self._copies if (tensor := copy.tensor()) is not None]
        self._copies = [copy for copy, _ in alive]
        for copy, tensor in alive:
            if (number := number_of(copy.slot)) != copy.number:
                copy.number = number
                with torch.no_grad():
                    tensor.copy_(copy.values_in(parameters[copy.slot], tensor))


def _begins_in(view: Tensor, parameter: Tensor) -> bool:
    first = parameter.data_ptr()  # autograd knows no base of `p.detach()`
    return first <= view.data_ptr() < first + parameter.nbytes
