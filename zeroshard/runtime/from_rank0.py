"""A plain optimizer's `state_dict` that rank 0 alone has: what is in it, told to all ranks; its tensors, when they ask.

What is told is small: hyper-parameters, names, shapes, and tensors of one number (counts of steps) themselves. Larger
tensors travel when they are asked for, so that no rank has more of them than it can use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.together import together
from zeroshard.io.tensor_file import DTYPE_NAMES, DTYPES
from zeroshard.io.values import decode, encode
from zeroshard.model.trees import map_tensors


class FromRank0:
    """See the module's note.

    Attributes:
        state_dict: the same on every rank, with empty tensors on the meta device in place of those of many numbers.
    """

    def __init__(
        self, collectives: Collectives, state_dict: Mapping[str, Any] | None, check: Callable[[dict[str, Any]], None]
    ) -> None:
        """Collective.

        Args:
            state_dict: rank 0's; what the others have is not looked at.
            check: called on rank 0; may raise what is wrong with it.

        Raises:
            ValueError: on every rank, what is wrong with it, or cannot be told.
        """
        self._collectives = collectives
        self._tensors: list[Tensor] = []  # rank 0's
        self._number_of: dict[int, int] = {}  # id of each empty tensor -> that of the tensor

        def look() -> Any:
            if collectives.mesh.world.rank != 0:
                return None
            check(dict(state_dict or {}))
            return [encode(dict(state_dict or {}), self._keep, "state_dict"), [*map(_described, self._tensors)]]

        told = together(collectives, "load_state_dict(broadcast_from_rank0=True)", look)
        values, self._described = collectives.exchange_objects(told)[0]
        self.state_dict: dict[str, Any] = decode(values, self._placeholder)

    def receive(self, tree: Any) -> Any:
        """A part of `state_dict`, with all its tensors. Collective."""
        return map_tensors(self._receive, tree)

    def _keep(self, tensor: Tensor) -> str:
        self._tensors.append(tensor)
        return str(len(self._tensors) - 1)

    def _placeholder(self, name: str) -> Tensor:
        shape, dtype, number = self._described[int(name)]
        if number is not None:
            return torch.full(shape, number, dtype=DTYPES[dtype])
        empty = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        self._number_of[id(empty)] = int(name)
        return empty

    def _receive(self, tensor: Tensor) -> Tensor:
        number = self._number_of.get(id(tensor))
        if number is None:
            return tensor
        value = torch.empty_like(tensor, device=self._collectives.device)
        if self._tensors:
            value.copy_(self._tensors[number])
        self._collectives.broadcast([value])
        return value


def _described(tensor: Tensor) -> list[Any]:
    """Shape, dtype, and the value if it is one number."""
    return [list(tensor.shape), DTYPE_NAMES[tensor.dtype], tensor.item() if tensor.numel() == 1 else None]
