"""The norms that this rank contributes to the control exchanges of a step: of the gradients before they are clipped.

A clip may change the gradients before the step: under DDP at once, and under every plan where somebody looks at them.
The step reports the norms before it, raises and skips by these, as where the clip waits for the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zeroshard.runtime.engine import Engine
from zeroshard.step.control import Norms
from zeroshard.step.gradient_norms import norms_of_pieces
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step.steppers import Steppers
from zeroshard.storage.gradients import GradState

Gradients = Sequence[tuple[int, Tensor]]
"""(param group, gradient) of the own shard."""
_NONE_OR_REDUCED = (GradState.EMPTY, GradState.REDUCED)


class OwnNorms:
    """See the module's note."""

    def __init__(self, engine: Engine, groups: ParamGroups, steppers: Steppers) -> None:
        self._engine, self._groups, self._steppers = engine, groups, steppers
        self._known: dict[tuple[float, torch.dtype], Norms] = {}
        self._known_of: object = None
        self._hidden: Tensor | None = None  # of each piece 0; or NaN: a bound hides a gradient that was not finite

    def of(self, gradients: Gradients, kind: float) -> Norms:
        """p-norms with p = `kind`, summed up in fp32."""
        if not gradients or self._known_of != self._now:
            self.forget()
            self._known_of = self._now if gradients else None
        return self._find(gradients, kind, torch.float32)

    def exactly_of(self, gradients: Gradients, kind: float) -> Norms:
        """The same ones, summed up in fp64."""
        return self._find(gradients, kind, torch.float64)

    def forget(self) -> None:
        """The next norms are those of the gradients as they are."""
        self._known, self._known_of, self._hidden = {}, None, None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a clip that changes the gradients before the step."""
        if self._known_of != self._now:
            self.forget()
            are_reduced = all(unit.grads.state in _NONE_OR_REDUCED for unit in self._steppers.units)
            gradients = list(self._steppers.own_gradients()) if are_reduced else []
            for dtype in (torch.float32, torch.float64):
                self._find(gradients, 2.0, dtype)
        *_, last = self._known.values()
        self._hidden = 0 * last.of_pieces
        yield
        self._known_of = self._now

    @property
    def _now(self) -> object:
        """Equal as long as gradients and param groups are the same."""
        return self._engine.reducer.version, self._steppers.num_builds

    def _find(self, gradients: Gradients, kind: float, dtype: torch.dtype) -> Norms:
        if (kind, dtype) not in self._known:
            of_pieces, groups = norms_of_pieces([one for one in gradients if one[1].numel()], kind, dtype)
            if self._hidden is not None:
                of_pieces = of_pieces + self._hidden
            self._known[kind, dtype] = Norms(of_pieces, groups, len(self._groups.lists), kind)
        return self._known[kind, dtype]
