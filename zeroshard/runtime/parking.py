"""Gives memory back between two phases of training and takes it again: storages are emptied, views stay.

| kind                        | while parked                                                                |
|-----------------------------|-----------------------------------------------------------------------------|
| weights                     | the own shard, on the other device (replicated ones are gathered by unpark) |
| main, optimizer state       | on the other device                                                         |
| gradients, pool buffers     | not kept: their values are not needed between steps                         |
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.errors import SystemRefused
from zeroshard.runtime.claims import Owner
from zeroshard.storage.buffer import live_bytes, plain_parts
from zeroshard.storage.unit import Unit

_MADV_REMOVE = 9  # frees the pages of a shared mapping, which then reads as zeros


class Parking:
    """Parks one model. While it is not parked, all lists are empty."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._moved: list[tuple[Tensor, Tensor]] = []  # tensor, and its values on the other device
        self._emptied: list[tuple[Tensor, int]] = []  # tensor, and the bytes of its storage
        self._shards: dict[Unit, Tensor] = {}  # of replicated weights

    def park(self, units: Iterable[Unit], owners: Iterable[Owner], device: torch.device) -> None:
        """Empty all storages, after copying values that are needed to `device`. Storages that already lie there are not
        touched."""
        kept: list[Tensor] = []
        emptied: list[Tensor] = []
        for unit in units:
            buffer = unit.weights.buffer
            if buffer.rests_in_full:
                self._shards[unit] = unit.weights.own().to(device, copy=True)
            else:
                kept += buffer.storages()
            unit.weights.drop()
            if not buffer.is_lent:  # else somebody keeps a tensor in that memory, which must not be freed
                emptied += buffer.storages() if buffer.rests_in_full else []
                buffer.detach(forget=True)  # cached views of a pool buffer would keep its memory
            emptied += unit.grads.storages()
            kept += unit.main.storages()
        for owner in owners:
            for kind, tensors in owner.tensors().items():
                (emptied if kind == "scratch" else kept).extend(tensors)
        elsewhere = [tensor for tensor in plain_parts(kept) if tensor.device.type != device.type]
        self._moved = [(tensor, tensor.detach().to(device)) for tensor in elsewhere]
        for tensor in [*elsewhere, *plain_parts(emptied)]:
            self._empty(tensor)

    def unpark(self) -> None:
        """Restore the sizes of all storages and the values that were kept, and start to gather replicated weights.
        Collective."""
        for tensor, num_bytes in self._emptied:
            # Storages in shared memory were not resized (`_empty`), and cannot be.
            if not tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(num_bytes)
        for tensor, value in self._moved:
            tensor.copy_(value)
        for unit, values in self._shards.items():
            unit.weights.own().copy_(values)
        # Peers read shards in shared memory: they must not start before every rank has restored its own.
        self._collectives.exchange_objects(None)
        for unit in self._shards:
            unit.weights.gather(self._collectives, "unshard")
        self._moved, self._emptied, self._shards = [], [], {}

    def live_bytes(self, kinds: dict[str, list[Tensor]]) -> dict[str, int]:
        """Bytes by kind on the model's device, without emptied storages."""
        empty = {tensor.untyped_storage().data_ptr() for tensor, _ in self._emptied}
        found = {
            kind: live_bytes([part for part in plain_parts(tensors) if part.untyped_storage().data_ptr() not in empty])
            for kind, tensors in kinds.items()
        }
        device = self._collectives.device
        found["weights"] += live_bytes([shard for shard in self._shards.values() if shard.device.type == device.type])
        return found

    def _empty(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return
        self._emptied.append((tensor, storage.nbytes()))
        # A mapped file cannot be resized as a storage, and peers have mapped it. `madvise` frees its pages, for all
        # ranks, and keeps the mappings.
        if self._collectives.transport.is_shared(tensor):
            page = os.sysconf("SC_PAGE_SIZE")  # whole pages of this rank alone: shards may lie side by side
            start = -(-storage.data_ptr() // page) * page
            stop = (storage.data_ptr() + storage.nbytes()) // page * page
            if start < stop and ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_REMOVE
            ):
                raise SystemRefused("park: the system does not give back shared memory (madvise)")
        else:
            storage.resize_(0)
