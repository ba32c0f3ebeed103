"""Where the elements of a tensor lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor


def has_place(tensor: Tensor) -> bool:
    """Whether its elements lie in memory that can be compared."""
    return bool(torch._C._has_storage(tensor) and tensor.numel() and not tensor.is_meta)


def place_of(tensor: Tensor) -> range:
    """The addresses from its first to its last element."""
    start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
    steps = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return range(start, start + (steps + 1) * tensor.element_size())


def overlaps(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """The names of those of these tensors (with their names) that lie in the memory of another one, and of that one."""
    places = sorted((place_of(tensor).start, place_of(tensor).stop, name) for name, tensor in tensors)
    for (_, stop, name), (start, _, other) in pairwise(places):
        if start < stop:
            yield name, other


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one interval of memory, in any order."""
    stride = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != stride:
            return False
        stride *= size
    return True
