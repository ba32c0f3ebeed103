"""Memory for full weights in a block of `handle.unsharded()`.

Each block takes memory, and gives it back when it ends. But the user may keep a tensor that lies there (`p.detach()`, a
`state_dict()`) for the next block, as averages of the weights do that look for the model's tensors once. In plain torch
it would have the new weights then. So as long as such a tensor is alive, the next block gathers into the same memory.
(A graph that keeps weights keeps this memory, too: values that differ have another version by then. And so does the
work of a gather that is not gone yet.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zeroshard.storage.buffer import FlatBuffer


class KeptMemory:
    """See the module's note."""

    def __init__(self, buffer: FlatBuffer) -> None:
        """`buffer`: of the weights."""
        self._buffer = buffer
        self._last: StorageWeakRef | None = None
        self._address = 0

    def take(self) -> Tensor:
        """[layout.numel]: new, or that of the block before if a tensor that lies there is alive."""
        if self._last is not None:
            storage = torch.UntypedStorage._new_with_weak_ptr(self._last.cdata)
            if storage is not None:
                return self._buffer.shard.new_empty(0).set_(storage, 0, (self._buffer.layout.numel,), (1,))
        full = self._buffer.shard.new_empty(self._buffer.layout.numel)
        self._last = StorageWeakRef(full.untyped_storage())  # type: ignore[no-untyped-call]
        self._address = full.data_ptr()
        return full

    def held(self) -> list[Tensor]:
        """What the weights lie in now, if it is this memory."""
        full = self._buffer.full
        return [] if full is None or full.data_ptr() != self._address else [full]
