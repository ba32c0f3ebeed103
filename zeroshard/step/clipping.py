"""The clips that are requested between backward and step, for the next step's gradient.

A factor, and then a bound: the step applies them together with everything else that it multiplies by. Another order,
and clips of a gradient that is looked at before the step: `clips.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroshard.gradients.settings import Items, plain
from zeroshard.step.stepper import Update
from zeroshard.storage.external_gradients import SeenGradients


@dataclass
class Clipping:
    """The clips of one optimizer, until its step is done.

    Attributes:
        factor: multiplies the gradient, so that its norm is at most `max_norm`, that of the last clip by norm.
        value: bound on the absolute value of each element of the mean gradient, applied after `factor`.
        bounds: that `clip_grad_value_` has asked for, for the comparison between ranks.
        asked: `max_norm` and `norm_type` of `clip_grad_norm_`, for the comparison between ranks.
        awaits_norm: whether the host does not know the norm yet, from which `factor` follows.
        needs_host: whether the host needs the norm at once.
        of: the gradients that other code has left in `p.grad`, and that the clip is for; None: there are none.
    """

    factor: float = 1.0
    value: float | None = None
    bounds: tuple[float, ...] = ()
    asked: tuple[float, float] | None = None
    awaits_norm: bool = False
    needs_host: bool = False
    of: SeenGradients | None = None

    @property
    def waits(self) -> bool:
        """Whether a clip has not changed the gradient yet."""
        return self.factor != 1.0 or self.value is not None or self.awaits_norm

    @property
    def is_late(self) -> bool:
        """Whether a clip waits whose gradients have been changed or added to since."""
        return self.waits and self.of is not None and not self.of.are_current()

    def limit(self, norm: float) -> None:
        """Set the factor. `norm`: of the mean gradient; if it is not finite, the step deals with it."""
        assert self.asked is not None, "a clip by norm has asked"
        self.factor = min(1.0, self.asked[0] / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        self.awaits_norm = False

    def clamp(self, value: float) -> None:
        """Clip each element."""
        self.value = value if self.value is None else min(self.value, value)
        self.bounds += (value,)

    def update(self, mean: float) -> Update:
        """The factor and bound for the step. `mean`: the factor from the buffers' values to the mean gradient."""
        return Update(mean * self.factor, self.value)

    def settings(self) -> Items:
        """The settings that all ranks must have alike."""
        asked = () if self.asked is None else (("clip_grad_norm_(max_norm, norm_type)", self.asked),)
        bound = self.bounds if len(self.bounds) > 1 else next(iter(self.bounds), None)
        return ("clip_grad_value_", plain(bound)), *asked
