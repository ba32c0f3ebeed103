"""Gradients that this engine holds in no buffer: of a frozen unit (none), and of OPTIMIZER_ONLY (in `p.grad`).

| class               | of                                  | values                                                  |
|---------------------|-------------------------------------|---------------------------------------------------------|
| `Gradients`         | a unit that trains (`gradients.py`) | in its buffer: accumulated, reduced, freed by a step    |
| `ExternalGradients` | a unit under OPTIMIZER_ONLY         | in `p.grad`, reduced by other code: read, and left there|
| `NoGradients`       | a frozen unit                       | none                                                    |

Code that reads gradients (a step, a norm, the check for found-inf) uses all three in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import BufferLayout
from zeroshard.model.absent import as_tensors
from zeroshard.storage.gradients import Gradients, GradState


class ExternalGradients:
    """The means over ranks that other code (torch DDP for example) leaves in `p.grad`, in full on every rank. A step
    reads them there and leaves them there: they belong to the user, who may change them at any time. Attributes and
    methods are those of `Gradients`."""

    is_external: ClassVar[bool] = True
    is_apart: ClassVar[bool] = False
    state: ClassVar[GradState] = GradState.EMPTY  # nothing to reduce, to show or to consume
    held_in: ClassVar[torch.dtype | None] = None
    most: ClassVar[int] = 0

    def __init__(self, layout: BufferLayout, parameters: Sequence[nn.Parameter]) -> None:
        self._layout, self._parameters = layout, parameters

    @property
    def summed(self) -> set[int]:
        return set()

    @property
    def present(self) -> set[int]:
        """Slots with a `p.grad`. Not cached: `p.grad` may change at any time."""
        with as_tensors():
            return {index for index, parameter in enumerate(self._parameters) if parameter.grad is not None}

    @property
    def waiting(self) -> set[int]:
        return self.present

    def sum_only(self, slots: set[int]) -> None:
        """Nothing is summed here."""

    def free(self) -> None:
        """There is nothing to free."""

    def read(self, world: Interval, scratch: Tensor | None = None) -> Tensor:
        assert scratch is not None, "these gradients lie in no buffer"
        scratch.zero_()
        for fragment in self._layout.fragments_in(world):
            grad = self._parameters[fragment.index].grad
            if grad is not None:
                scratch[fragment.local.slice] = _elements(grad, fragment.param)
        return scratch

    def views(self, world: Interval) -> Sequence[Tensor]:
        return [
            _elements(grad, fragment.param)
            for fragment in self._layout.fragments_in(world)
            if (grad := self._parameters[fragment.index].grad) is not None
        ]

    def storages(self) -> list[Tensor]:
        return []

    def in_full(self, index: int) -> Tensor | None:
        grad = self._parameters[index].grad
        return grad if grad is not None and grad.layout is torch.strided else None

    def in_place(self, index: int) -> Tensor | None:
        """The values of `p.grad`, to be changed in place. Of a sparse one, those that it has: each element once."""
        grad = self._parameters[index].grad
        if grad is None or grad.layout is torch.strided:
            return grad
        if grad.is_sparse and not grad.is_coalesced():
            grad.copy_(grad.coalesce())
        return grad._values() if grad.is_sparse else grad.values()


class NoGradients(ExternalGradients):
    """The gradients of a frozen unit: none."""

    is_external = False

    def __init__(self) -> None:
        super().__init__(BufferLayout((), 0, 1), ())


def _elements(grad: Tensor, part: Interval) -> Tensor:
    """[part.numel] of the flattened gradient. Of a sparse one (`nn.Embedding(sparse=True)`), only their rows are made
    dense."""
    if grad.layout is torch.strided:
        return grad.reshape(-1)[part.slice]
    if not grad.is_sparse:
        return grad.to_dense().reshape(-1)[part.slice]
    row = grad.shape[1:].numel()
    rows = Interval(part.start // row, -(-part.stop // row))
    dense = grad.narrow_copy(0, rows.start, rows.numel).to_dense()
    return dense.view(-1)[part.relative_to(rows.start * row).slice]


class SeenGradients:
    """The gradients in `p.grad` as they were at one time. It holds them: else another tensor could have their ids."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._grads = self._now()
        self._versions = _versions(self._grads)

    def are_current(self) -> bool:
        """Whether nothing has replaced them or written to them since. (Writes through `.data` are not seen.)"""
        now = self._now()
        return [*map(id, now)] == [*map(id, self._grads)] and _versions(now) == self._versions

    def _now(self) -> list[Tensor | None]:
        with as_tensors():
            return [parameter.grad for parameter in self._parameters]


def _versions(grads: Sequence[Tensor | None]) -> list[int]:
    return [grad._version for grad in grads if grad is not None]


AnyGradients = Gradients | ExternalGradients
