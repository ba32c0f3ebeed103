"""Every step goes ahead of the host, as fused steps do on a GPU: with any elementwise class, on a CPU, over any
transport.

    ZEROSHARD_TEST_AHEAD=1 pytest tests/...        for all tests
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit import DEVICE
from zeroshard.step import ahead, flat_step, gradient_norms

_IS_FUSED, _TRIED_STEP = ahead.is_fused, flat_step.tried_step


def rounded_root(value: Tensor) -> Tensor:
    """The square root as on GPUs: torch's kernels for CPUs do not round it correctly."""
    return torch.tensor(math.sqrt(value.item()) if not value.isnan() else math.nan, dtype=value.dtype)


@contextmanager
def ahead_of_host() -> Iterator[None]:
    tried_step = flat_step.tried_step

    def unless_void(optimizer: Any, arguments: Any = None, is_void: Tensor | None = None) -> Exception | None:
        return tried_step(optimizer, arguments) if is_void is None or not is_void else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "has_queue", lambda device: True)
        patch.setattr(ahead, "is_fused", lambda stepper, options: True)
        patch.setattr(flat_step, "tried_step", unless_void)
        patch.setattr(gradient_norms, "root", rounded_root)
        yield


@contextmanager
def queued(*, is_ahead: bool = True) -> Iterator[None]:
    """Operations on the device are queued, as on a GPU, or they are not. What goes ahead is the engine's own choice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "has_queue", lambda device: is_ahead)
        patch.setattr(ahead, "is_fused", _IS_FUSED)  # whatever all tests do
        patch.setattr(flat_step, "tried_step", _TRIED_STEP)
        if DEVICE.type != "cuda":
            patch.setattr(gradient_norms, "root", rounded_root)
        yield
