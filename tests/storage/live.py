"""The storages that are alive, found without the engine's own records, to compare with what it accounts for."""

from __future__ import annotations

import gc
import time
from collections.abc import Collection
from typing import Any

from torch import Tensor

import zeroshard
from zeroshard.model.absent import as_tensors


def storages(tensors: list[Any], foreign: Collection[int] = ()) -> dict[int, int]:
    """Address -> bytes. `foreign`: storages to leave out, by `_cdata`: rank 0's shard has the address of the common
    memory in which it lies."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            with as_tensors():
                storage = tensor.untyped_storage()
            if storage._cdata not in foreign:
                found[storage.data_ptr()] = storage.nbytes()
    return found


def live_storages(foreign: Collection[int] = ()) -> dict[int, int]:
    """Address -> bytes of every storage of a tensor that Python can reach, found without the engine's own records.

    Call `gc.freeze()` first: objects that existed before (all of torch) are then left out of the search.
    """
    gc.collect()
    return storages([thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)], foreign)


def expect_accounted(handle: zeroshard.Handle, before: dict[int, int], stray: int = 0, looks: int = 3000) -> None:
    """The new storages of more than a few numbers add up to `memory()` and `stray` bytes.

    Memory mapped from a peer counts as the peer's; the samples of gathered values are some KB, whatever the model. A
    gloo thread releases the last tensor it has sent a moment after the call has returned, so the search is repeated.
    """
    memory = handle.memory()
    shared = handle.engine.collectives.transport.memory
    foreign = {tensor.untyped_storage()._cdata for tensor in (shared.mapped() if shared is not None else [])}
    same = [optimizer.agreement.same for optimizer in handle.engine.claims.owners()]
    samples = [handle.engine.collectives.samples, *(one for one in same if one is not None)]
    old = before | storages([value for one in samples for value in vars(one).values() if isinstance(value, Tensor)])
    for _ in range(looks):
        new = {at: size for at, size in live_storages(foreign).items() if at not in old and size > 64}
        if sum(new.values()) == sum(memory.values()) - memory["scalars"] + stray:
            return
        time.sleep(0.02)
    raise AssertionError(f"{handle.plan}: found {sorted(new.values())} bytes, accounted for {memory}")
