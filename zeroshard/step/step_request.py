"""What is asked of the next step, between backward and it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zeroshard.comm.settings import Items, plain
from zeroshard.step.stepper import Update


@dataclass
class StepRequest:
    """Of one optimizer, until its step is done.

    Attributes:
        clip: factor for the gradient, so that its norm is small enough.
        clip_value: bound on the absolute value of the mean gradient.
        notes: how it was asked for, for all ranks to compare.
    """

    clip: float = 1.0
    clip_value: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def update(self, mean: float) -> Update:
        """`mean`: factor from the sum to the mean gradient."""
        return Update(mean * self.clip, self.clip_value)

    def settings(self) -> Items:
        return ("clip_grad_value_", plain(self.clip_value)), *self.notes.items()
