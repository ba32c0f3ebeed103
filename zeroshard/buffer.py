"""Flat storage: one contiguous 1-D tensor per unit and kind, its views, and the preallocated places for full ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.layout import BufferLayout
from zeroshard.placement import Placement

Allocate = Callable[[int], Tensor]
"""Number of bytes -> uint8 zeros."""


class FlatBuffer:
    """A buffer under a layout.

    Attributes:
        layout: shared by the weights, gradients and main of a unit.
        full: [layout.numel], or None while only the shard is held.
        shard: [layout.shard_numel], the own interval: a view of `full` where `full` is held for good, else a storage
            of its own (then a borrowed `full` comes and goes by `attach` and `detach`).
        placement: which values are valid now.
    """

    __slots__ = (
        "_borrowed",
        "_padding",
        "_storage",
        "_views",
        "_views_of",
        "full",
        "layout",
        "placement",
        "rank",
        "shard",
    )

    def __init__(
        self, layout: BufferLayout, rank: int, dtype: torch.dtype, resident: Placement, allocate: Allocate
    ) -> None:
        """`resident`: SHARDED allocates the shard alone, anything else the full buffer. Zeros."""
        self.layout, self.rank, self.placement = layout, rank, resident
        self._views: list[Tensor] = []
        self._padding: list[Tensor] = []
        self._views_of: Tensor | None = None
        self._borrowed = resident is Placement.SHARDED
        self.full: Tensor | None = None
        numel = layout.shard_numel if self._borrowed else layout.numel
        self._storage = allocate(numel * dtype.itemsize)
        held = self._storage.view(dtype)
        if self._borrowed:
            self.shard = held
        else:
            self.full = held
            self.shard = held[layout.shard(rank).slice]

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.dtype

    @property
    def owns_full(self) -> bool:
        return not self._borrowed

    def attach(self, full: Tensor) -> None:
        """Borrow a full-size tensor [layout.numel] for a while."""
        assert self._borrowed and self.full is None and full.numel() == self.layout.numel, "not a borrower"
        self.full = full

    def detach(self, *, forget: bool = False) -> None:
        """Give the full tensor back. Its views are kept for the next time, unless it is to be forgotten."""
        assert self._borrowed, "the full buffer is held for good"
        self.full = None
        if forget:
            self._views, self._padding, self._views_of = [], [], None

    def views(self) -> list[Tensor]:
        """One view per slot of the full buffer, in the parameter's shape."""
        self._look()
        return self._views

    def padding(self) -> list[Tensor]:
        """The elements of the full buffer that belong to no slot, as 1-D views."""
        self._look()
        return self._padding

    def _look(self) -> None:
        assert self.full is not None, "the full buffer is not here"
        if self._views_of is not self.full:
            self._views = [self.full[slot.world.slice].view(slot.shape) for slot in self.layout.slots]
            self._padding = [self.full[interval.slice] for interval in self.layout.padding]
            self._views_of = self.full

    def own_part_of_full(self) -> Tensor:
        """[shard_numel]: the own interval inside the full buffer."""
        assert self.full is not None, "the full buffer is not here"
        return self.full[self.layout.shard(self.rank).slice]

    def storages(self) -> list[Tensor]:
        """What this buffer owns (not what it borrows)."""
        return [self._storage]


@dataclass(frozen=True)
class Borrower:
    """Someone who needs a full-size storage for a while. Those of one kind take turns; `alone`: needs one for good."""

    key: Hashable
    kind: Hashable
    num_bytes: int
    alone: bool


@dataclass(frozen=True)
class Allotment:
    """Which storages a set of borrowers needs.

    Attributes:
        own: key -> bytes, for those who need one for good.
        shared: kind -> (how many, bytes of each), for those who take turns.
    """

    own: dict[Hashable, int]
    shared: dict[Hashable, tuple[int, int]]

    @classmethod
    def of(cls, borrowers: Iterable[Borrower], turns: int) -> Allotment:
        """`turns`: how many storages a kind needs at the same time, at most."""
        borrowers = list(borrowers)
        sizes: dict[Hashable, list[int]] = {}
        for borrower in borrowers:
            if not borrower.alone:
                sizes.setdefault(borrower.kind, []).append(borrower.num_bytes)
        return cls(
            {borrower.key: borrower.num_bytes for borrower in borrowers if borrower.alone},
            {kind: (min(turns, len(of_kind)), max(of_kind)) for kind, of_kind in sizes.items()},
        )

    @property
    def num_bytes(self) -> int:
        return sum(self.own.values()) + sum(count * size for count, size in self.shared.values())


class Place:
    """One preallocated full-size storage. `holder` is whoever's values it has."""

    __slots__ = ("_tensors", "holder", "storage")

    def __init__(self, num_bytes: int, allocate: Allocate) -> None:
        self.storage = allocate(num_bytes)
        self.holder: Any = None
        self._tensors: dict[tuple[int, torch.dtype], Tensor] = {}

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], from the front; the same tensor object each time."""
        key = numel, dtype
        if key not in self._tensors:
            self._tensors[key] = self.storage[: numel * dtype.itemsize].view(dtype)
        return self._tensors[key]


def live_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors."""
    plain = plain_parts(tensors)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in plain}
    return sum(storages.values())


def plain_parts(tensors: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors inside those that are made of several (quantised state: codes, scales), the others themselves."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from plain_parts(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor
