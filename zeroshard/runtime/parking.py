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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.together import together
from zeroshard.errors import InvalidState, SystemRefused
from zeroshard.runtime.claims import Owner
from zeroshard.storage.buffer import live_bytes, plain_parts
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency

_MADV_REMOVE = 9  # frees the pages of a shared mapping, which then reads as zeros


@dataclass(frozen=True)
class Copies:
    """The values that are kept.

    Attributes:
        moved: tensor, and its values on the other device.
        shards: of replicated weights.
    """

    moved: Sequence[tuple[Tensor, Tensor]]
    shards: Mapping[Unit, Tensor]


class Parking:
    """Parks one model. While it is not parked, there are no copies, and nothing is emptied."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._copies = Copies([], {})
        self._emptied: list[tuple[Tensor, int]] = []  # tensor, and the bytes of its storage

    def copy(self, units: Sequence[Unit], owners: Sequence[Owner], device: torch.device) -> None:
        """Copy values that are needed to `device`, of storages that do not lie there already. Collective.

        Raises:
            RuntimeError: on all ranks: there was no memory on one of them.
        """
        copies = partial(self._copies_of, units, owners, device)
        self._copies = together(self._collectives, "park", copies, errors=(InvalidState,))

    def empty(self, units: Sequence[Unit], owners: Sequence[Owner]) -> None:
        """Empty all storages, after `copy`."""
        try:
            self._empty_all(units, owners)
        except BaseException:  # an interrupt: half of the memory would stay
            self._empty_all(units, owners)
            raise

    def _copies_of(self, units: Sequence[Unit], owners: Sequence[Owner], device: torch.device) -> Copies:
        shards, kept = {}, []
        for unit in units:
            unit.weights.expect_in_place()
            buffer = unit.weights.buffer
            if buffer.rests_in_full:
                shards[unit] = unit.weights.own().to(device, copy=True)
            else:
                kept += buffer.storages()
            kept += unit.main.storages()
        for owner in owners:
            kept += [tensor for kind, tensors in owner.tensors().items() if kind != "scratch" for tensor in tensors]
        elsewhere = [tensor for tensor in plain_parts(kept) if tensor.device.type != device.type]
        return Copies([(tensor, tensor.detach().to(device)) for tensor in elsewhere], shards)

    def _empty_all(self, units: Sequence[Unit], owners: Sequence[Owner]) -> None:
        """If this is interrupted, another call goes on."""
        emptied = [tensor for tensor, _ in self._copies.moved]
        for unit in units:
            buffer = unit.weights.buffer
            unit.weights.drop()
            if not buffer.is_lent:  # else somebody keeps a tensor in that memory, which must not be freed
                emptied += buffer.storages() if buffer.rests_in_full else []
                buffer.detach(forget=True)  # cached views of a pool buffer would keep its memory
            emptied += unit.grads.storages()
        for owner in owners:
            emptied += owner.tensors().get("scratch", [])
        for tensor in plain_parts(emptied):
            self._empty(tensor)

    def unpark(self) -> None:
        """Restore the sizes of all storages and the values that were kept, and start to gather replicated weights.
        Collective. If this is interrupted or raises, another call goes on.

        Raises:
            RuntimeError: on all ranks: there was no memory on one of them.
        """
        # Peers read shards in shared memory: they must not start before every rank has restored its own.
        together(self._collectives, "unpark", self._restore, errors=(InvalidState,))
        for unit in self._copies.shards:
            if unit.weights.state is Residency.SHARDED:
                unit.weights.gather(self._collectives, "unshard")
        self._copies, self._emptied = Copies([], {}), []

    def _restore(self) -> None:
        for tensor, num_bytes in self._emptied:
            # Storages in shared memory were not resized (`_empty`), and cannot be.
            if not tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(num_bytes)
        for tensor, value in self._copies.moved:
            tensor.copy_(value)
        for unit, values in self._copies.shards.items():
            unit.weights.own().copy_(values)

    def live_bytes(self, kinds: dict[str, list[Tensor]]) -> dict[str, int]:
        """Bytes by kind on the model's device, without emptied storages."""
        empty = {tensor.untyped_storage().data_ptr() for tensor, _ in self._emptied}
        found = {
            kind: live_bytes([part for part in plain_parts(tensors) if part.untyped_storage().data_ptr() not in empty])
            for kind, tensors in kinds.items()
        }
        device = self._collectives.device
        shards = [shard for shard in self._copies.shards.values() if shard.device.type == device.type]
        found["weights"] += live_bytes(shards)
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
