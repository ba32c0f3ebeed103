"""Giving memory back between two phases of training, and taking it again: storages are emptied, views stay.

| kind                        | while parked                                                             |
|-----------------------------|--------------------------------------------------------------------------|
| weights                     | the own shard, elsewhere (replicated ones are gathered when they return) |
| main, state of the optimizer| elsewhere                                                                |
| gradients, pool buffers     | nothing: between steps their values do not matter                        |
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from zeroshard.buffer import live_bytes, plain_parts
from zeroshard.collectives import Collectives

_MADV_REMOVE = 9  # frees the pages of a shared mapping; the next access finds zeros


class Parked:
    """What was in these tensors' storages.

    Args:
        kept: whose values matter: they go to `device`, unless they are there already.
        emptied: whose values do not.
    """

    def __init__(
        self, kept: Iterable[Tensor], emptied: Iterable[Tensor], device: torch.device, collectives: Collectives
    ) -> None:
        self._collectives = collectives
        self._device_of_model = collectives.device
        kept, emptied = list(plain_parts(kept)), list(plain_parts(emptied))
        self._moved = [(tensor, tensor.detach().to(device)) for tensor in kept if tensor.device.type != device.type]
        self._emptied: list[tuple[Tensor, int]] = []
        for tensor in [*(tensor for tensor, _ in self._moved), *emptied]:
            self._empty(tensor)

    def memory(self, kinds: dict[str, list[Tensor]], shards: list[Tensor]) -> dict[str, int]:
        """Live bytes by kind where the model lives; `shards`: what is left of replicated weights, wherever it is."""
        empty = {tensor.untyped_storage().data_ptr() for tensor, _ in self._emptied}
        found = {
            kind: live_bytes([part for part in plain_parts(tensors) if part.untyped_storage().data_ptr() not in empty])
            for kind, tensors in kinds.items()
        }
        device = self._device_of_model
        found["weights"] += live_bytes([shard for shard in shards if shard.device.type == device.type])
        return found

    def restore(self) -> None:
        """Every storage has its size again, and those that were kept their values."""
        for tensor, num_bytes in self._emptied:
            if not tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(num_bytes)
        for tensor, value in self._moved:
            tensor.copy_(value)
        self._moved, self._emptied = [], []

    def _empty(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return
        self._emptied.append((tensor, storage.nbytes()))
        if self._collectives.is_shared(tensor):
            if ctypes.CDLL(None).madvise(
                ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), _MADV_REMOVE
            ):
                raise OSError("park: the system does not give back shared memory (madvise)")
        else:
            storage.resize_(0)
