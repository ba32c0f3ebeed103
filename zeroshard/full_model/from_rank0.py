"""Distributes a state that only rank 0 has, of an optimizer or a module: its structure at once, tensors on request.

The structure is small: hyper-parameters, names, shapes, and the values of one-element tensors (step counts). Larger
tensors are broadcast one by one when they are requested, so that no rank holds more of them than it can use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.together import together
from zeroshard.io.tensor_file import DTYPE_NAMES, DTYPES
from zeroshard.io.values import decode, encode


class FromRank0:
    """See the module's note.

    Attributes:
        state_dict: the same on every rank, with meta tensors in place of tensors that are no single real number.
    """

    def __init__(
        self, collectives: Collectives, state_dict: Mapping[str, Any] | None, check: Callable[[dict[str, Any]], None]
    ) -> None:
        """Collective.

        Args:
            state_dict: rank 0's; ignored on the other ranks.
            check: called on rank 0 with it; raises if something is wrong.

        Raises:
            ValueError: on every rank: `check` has raised, or a value cannot be encoded.
        """
        self._collectives = collectives
        self._tensors: list[Tensor] = []  # rank 0's
        self._number_of: dict[int, int] = {}  # id of each meta tensor -> its number in `_tensors`

        def look() -> Any:
            if collectives.mesh.world.rank != 0:
                return None
            check(dict(state_dict or {}))
            return [encode(dict(state_dict or {}), self._keep, "state_dict"), [*map(_described, self._tensors)]]

        told = together(collectives, "load_state_dict(broadcast_from_rank0=True)", look)
        values, self._described = collectives.exchange_objects(told)[0]
        self.state_dict: dict[str, Any] = decode(values, self._placeholder)

    def receive(self, tree: Any) -> Any:
        """A part of `state_dict` with the values of all its tensors. Collective: every rank must pass the same part."""
        return pytree.tree_map_only(Tensor, self._receive, tree)

    def _keep(self, tensor: Tensor) -> str:
        self._tensors.append(tensor)
        return str(len(self._tensors) - 1)

    def _placeholder(self, name: str) -> Tensor:
        shape, dtype, number = self._described[int(name)]
        if number is not None:
            return torch.full(shape, number, dtype=DTYPES[dtype], device="cpu")
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
    """Shape, dtype, and the value if it is one real number."""
    is_number = tensor.numel() == 1 and not tensor.is_complex()
    return [list(tensor.shape), DTYPE_NAMES[tensor.dtype], tensor.item() if is_number else None]
