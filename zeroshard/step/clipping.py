"""The clips that are requested between backward and step, for the next step's gradient.

A factor, and then a bound: the step applies them together with everything else that it multiplies by. Another order,
and clips of a gradient that is looked at before the step: `clips.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroshard.errors import InvalidState
from zeroshard.gradients.settings import Items, plain
from zeroshard.step.stepper import Update
from zeroshard.storage.external_gradients import SeenGradients

CHANGED_SINCE = (
    "the gradients in p.grad have changed since clip_grad_norm_ or clip_grad_value_ of the optimizer, which acts in "
    "the step: the change would be clipped, too. Call it after the last backward; torch.nn.utils clips p.grad itself"
)


@dataclass
class Clipping:
    """The clips of one optimizer, until its step is done.

    Attributes:
        factor: multiplies the gradient, so that its norm is at most `max_norm`, that of the last clip by norm.
        value: bound on the absolute value of each element of the mean gradient, applied after `factor`.
        bounds: that `clip_grad_value_` has asked for, for the comparison between ranks.
        asked: `max_norm` and `norm_type` of `clip_grad_norm_`, for the comparison between ranks.
        awaits_norm: whether the host does not know the norm yet, from which `factor` follows.
        on_device: whether the device has multiplied by that factor. It has not if the norm was not finite there.
        added_to: whether a backward has added to the gradient since.
        needs_host: whether the host needs the norm at once.
        of: the gradients that other code has left in `p.grad`, and that the clip is for; None: there are none.
    """

    factor: float = 1.0
    value: float | None = None
    bounds: tuple[float, ...] = ()
    asked: tuple[float, float] | None = None
    awaits_norm: bool = False
    on_device: bool = False
    added_to: bool = False
    needs_host: bool = False
    of: SeenGradients | None = None

    @property
    def waits(self) -> bool:
        """Whether a clip has not changed the gradient yet, as far as the host knows."""
        return self.factor != 1.0 or self.value is not None or self.awaits_norm

    @property
    def is_late(self) -> bool:
        """Whether a clip waits whose gradients have been changed or added to since."""
        return self.waits and self.of is not None and not self.of.are_current()

    def limit(self, norm: float) -> None:
        """Set the factor, if the device has not multiplied by it. `norm`: of the mean gradient; if it is not finite,
        the step deals with it.

        Raises:
            RuntimeError: the gradient has been added to in the meantime.
        """
        assert self.asked is not None, "a clip by norm has asked"
        factor = min(1.0, self.asked[0] / (norm + 1e-6)) if math.isfinite(norm) and not self.on_device else 1.0
        if self.added_to and factor != 1.0:
            raise InvalidState(CHANGED_SINCE)
        self.factor = factor
        self.awaits_norm = self.on_device = self.added_to = False

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
