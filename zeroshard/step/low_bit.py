"""Dequantises and quantises optimizer state held in few bits (torchao's: codes, a scale per block, a codebook).

The codebook of signed codes has 1, but not -1. torchao scales a block by its largest absolute value. If that is of a
negative element, torchao stores 0.993 of it (4 bits: 0.89), and all values of the block would shrink each time they are
dequantised and quantised again. So `quantise` also tries the scale that maps the lowest code to the lowest value, and
uses it if it reproduces all values of the block: values that were quantised once are then quantised to the same values,
bit for bit. torchao computes the codebook by kernels whose last bit depends on the type of processor: state quantised
on another type has the same codes here, and values that differ in their last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_LAST_BITS = 1e-6
"""Relative tolerance: codebooks of one class on different processors differ by less, neighbouring codes by more."""


def dense(value: Any) -> Tensor:
    """The values as a plain tensor; `value` may be quantised."""
    if not is_traceable_wrapper_subclass(value):
        assert isinstance(value, Tensor)
        return value
    held: Any = value
    return torch.empty(held.shape, dtype=held.dtype, device=held.device).copy_(held)


def quantise(held: Any, value: Tensor) -> Any:
    """Copy the values [numel] into `held`, a quantised or plain tensor, and return it."""
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
    # The element `at` determines the scale. After a multiplication and a division the scale may be off by its last bit,
    # so its neighbours are tried, too.
    for candidate in (scale, torch.nextafter(scale, largest), torch.nextafter(scale, 2 * scale)):
        trial = torch.where(negative, blocks.scatter(1, at, -candidate), blocks)
        found = dense(held.copy_(trial.view(value.shape))).float().view_as(blocks)
        error = ((found - blocks).abs() / blocks.abs().clamp(min=torch.finfo(found.dtype).tiny)).amax(1, keepdim=True)
        best = torch.where(error < least, trial, best)
        least = torch.minimum(error, least)
    return held.copy_(best.view(value.shape))
