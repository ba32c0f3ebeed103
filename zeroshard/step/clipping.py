"""What is asked of the next step's gradient, between backward and the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroshard.comm.settings import Items, plain
from zeroshard.step.stepper import Update


@dataclass
class Clipping:
    """Of one optimizer, until its step is done.

    Attributes:
        factor: multiplies the gradient, so that its norm is at most what was asked for.
        value: bound on the absolute value of each element of the mean gradient, after that.
        asked: `max_norm` and `norm_type` of `clip_grad_norm_`, for all ranks to compare.
    """

    factor: float = 1.0
    value: float | None = None
    asked: tuple[float, float] | None = None

    def clear(self) -> None:
        """As it began. In place: frameworks wrap an optimizer in an object that has its methods, and attributes of its
        own, which would hide a new record."""
        self.factor, self.value, self.asked = 1.0, None, None

    def limit(self, norm: float, max_norm: float) -> None:
        """`norm`: of the mean gradient. One that is not finite is left to the step."""
        self.factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    def update(self, mean: float) -> Update:
        """`mean`: factor from the sum to the mean gradient."""
        return Update(mean * self.factor, self.value)

    def settings(self) -> Items:
        """What all ranks must have asked for alike."""
        asked = () if self.asked is None else (("clip_grad_norm_(max_norm, norm_type)", self.asked),)
        return ("clip_grad_value_", plain(self.value)), *asked
