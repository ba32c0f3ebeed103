"""A checksum of a tensor's bytes, for comparisons between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor) -> int:
    """A checksum of the bytes and their positions: words times odd numbers, so that every change of a single word
    changes it. Needs 16 MB temporarily."""
    words = tensor.detach().contiguous().view(-1).view(_INTEGERS.get(tensor.element_size(), torch.uint8))
    total = 0
    for piece in torch.split(words, _CHUNK):
        odd = torch.arange(piece.numel(), device=piece.device).mul_(2).add_(1)
        total = (total * 31 + int((piece.to(torch.int64) * odd).sum())) % 2**64
    return total
