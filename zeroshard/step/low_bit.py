"""Optimizer state that a class holds in few bits (torchao's: codes, a scale for each block, a codebook): its values,
and back.

The codebook of signed codes has 1 and no -1. torchao scales a block by its largest absolute value; where that is of a
negative element, it stores 0.993 of it (4 bits: 0.89), and all of the block would shrink each time it is read and
quantised again. So, where a scale by which the lowest code is the lowest value gives back all values of a block, that
is the scale: what was quantised once has the same values again, bit for bit. torchao computes the codebook by kernels
whose last bit depends on the kind of processor: what was quantised on another kind has the same codes here, and values
that differ in their last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_LAST_BITS = 1e-6
"""Relative; two codebooks of the same class on different processors differ by less, two neighbouring codes by more."""


def dense(value: Any) -> Tensor:
    """The values of state that may be quantised."""
    if not is_traceable_wrapper_subclass(value):
        assert isinstance(value, Tensor)
        return value
    held: Any = value
    return torch.empty(held.shape, dtype=held.dtype, device=held.device).copy_(held)


def quantise(held: Any, value: Tensor) -> Any:
    """`held`, with the values [numel] in it; it may be a plain tensor."""
    codebook = getattr(held, "qmap", None)
    lowest = 0.0 if codebook is None else float(codebook.min())
    if lowest >= 0.0:
        return held.copy_(value)
    blocks = value.float().view(-1, held.block_size)
    smallest, at = blocks.min(1, keepdim=True)
    largest = blocks.abs().amax(1, keepdim=True)
    negative = (smallest < 0) & (smallest <= -largest * (1 - _LAST_BITS))
    scale = smallest / lowest
    best, least = blocks, torch.full_like(largest, _LAST_BITS)
    # The element `at` decides the scale. A scale that has been multiplied and divided may be off by its last bit.
    for candidate in (scale, torch.nextafter(scale, largest), torch.nextafter(scale, 2 * scale)):
        trial = torch.where(negative, blocks.scatter(1, at, -candidate), blocks)
        found = dense(held.copy_(trial.view(value.shape))).float().view_as(blocks)
        error = ((found - blocks).abs() / blocks.abs().clamp(min=torch.finfo(found.dtype).tiny)).amax(1, keepdim=True)
        best = torch.where(error < least, trial, best)
        least = torch.minimum(error, least)
    return held.copy_(best.view(value.shape))
