"""Clips the next step's gradient by its norm: from the norm on the host, or on the device, ahead of the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeroshard.errors import InvalidState
from zeroshard.step.agreement import Agreement
from zeroshard.step.clipping import Clipping
from zeroshard.step.control import Control


def clip_by_norm(agreement: Agreement, clipping: Clipping, max_norm: float) -> Tensor:
    """The norm of the mean gradient, 0-d float64. `agreement.ask` has been called.

    Raises:
        RuntimeError, ValueError: see `Agreement.answer`; or the norm is not finite, and the caller wants an error.
    """

    def limit(control: Control) -> float:
        norm = control.norm if control.norm_to_clip is None else control.norm_to_clip
        norm *= agreement.mean_factor(control)
        clipping.limit(norm, max_norm)
        return norm

    # Also on a rank that cannot go ahead: it takes part in the gathers of the others before it reads the answer, and so
    # all ranks must read it at the same place of the program.
    at_once = clipping.needs_host or clipping.asked is None or clipping.asked[1] != 2
    verdict = None if at_once else agreement.verdict()
    if verdict is not None:
        clipping.awaits_norm = True
        agreement.when_answered(limit)
        return verdict.norm.clone()  # the caller may write to it, and the update computes its factor from this one
    norm = limit(agreement.answer())
    if clipping.needs_host and not math.isfinite(norm):
        raise InvalidState(f"the gradient norm is {norm}: cannot clip (error_if_nonfinite)")
    return torch.tensor(norm, dtype=torch.float64, device="cpu")
