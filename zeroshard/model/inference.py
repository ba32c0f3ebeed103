"""Calls in inference mode: tensors that are made there cannot be trained with, and cannot be changed outside of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_inference(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function whose tensors live longer than the call (weights, buffers, the optimizer's state): in a
    block of `torch.inference_mode()` it runs as under `torch.no_grad()`."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return wrapper
