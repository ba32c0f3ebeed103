"""Flat buffers: one contiguous 1-D tensor per unit and kind, its views, and the placement of its values.

[Note: placement] A buffer has two placements. The one in which it *rests* between steps decides which storage the
buffer keeps, and therefore whether it needs a pool buffer for a full tensor (`borrows`) or keeps all values on this
rank (`rests_in_full`). `placement` is where the values are now. `redistribute` changes it by an exchange; until
`arrive`, `placement` is where they will be (`is_arriving`). `become` changes it without an exchange: when values have
been written, or are no longer needed. Nothing else records where values are: the states of weights and gradients are
derived from these (`Weights.state`, `Gradients.state`), so they cannot contradict them.

[Note: lent views] In plain torch a view of a weight, or `p.detach()`, has the new values after a step. Under a plan
with replicated weights and sharded main they are still on their way then, and nothing tells who reads such a tensor.
But a storage counts its tensors. So replicated parameters lie in a storage of their own, a second one for the memory of
the buffer: if it has more tensors than the buffer has made, somebody else keeps one. Then the step waits for the values
of this unit (`Gatherer.read`), and `park` leaves the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.dlpack import from_dlpack

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.pending import Pending
from zeroshard.comm.transport import Reduction
from zeroshard.errors import InvalidState
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import BufferLayout
from zeroshard.layout.portions import Portions
from zeroshard.placement import SHARDED, Move, Placement, moves

Allocate = Callable[[int], Tensor]
"""Number of bytes -> uint8 zeros."""


def refuse_after_close(unit: str) -> NoReturn:
    """
    Raises:
        RuntimeError: the handle has been closed or abandoned, and a graph from before is still here.
    """
    raise InvalidState(
        f"backward: unit {unit} is not sharded any more, as its handle has been closed or abandoned, and this graph "
        "was made before: call backward before handle.close(), or the model again after it"
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """Views of a full tensor.

    Attributes:
        whole: the slots are views of it: the full tensor, or the same memory as another storage ([Note: lent views]).
        slots: one for each, in the parameter's shape.
        padding: the elements that belong to no slot, 1-D.
        offsets: of the slots, in bytes.
        own_uses: how many tensors lie in the storage of `whole` while nobody else has any.
    """

    full: Tensor
    whole: Tensor
    slots: list[Tensor]
    padding: list[Tensor]
    offsets: list[int]
    own_uses: int

    @classmethod
    def of(cls, full: Tensor, layout: BufferLayout, *, lent: bool = False) -> Cut:
        whole = _as_another_storage(full) if lent else full
        # `detach`: else these would be views for autograd, and `p.grad.detach_()`, which scripts call, would raise.
        slots = [whole[slot.world.slice].view(slot.shape).detach() for slot in layout.slots]
        padding = [full[interval.slice] for interval in layout.padding]
        offsets = [slot.world.start * full.element_size() for slot in layout.slots]
        return cls(full, whole, slots, padding, offsets, _uses_of_memory(whole))

    def addresses(self) -> list[int]:
        """Where the slots lie now: elsewhere each time the storage of a pool buffer is emptied and refilled."""
        return [*map(self.full.data_ptr().__add__, self.offsets)]


class FlatBuffer:
    """A buffer under a layout. See [Note: placement].

    Attributes:
        layout: shared by the weights, gradients and main of a unit.
        full: [layout.numel], or None while only the shard is held.
        shard: [layout.shard_numel], the own interval: a view of `full` if the buffer owns `full`, else a storage of its
            own (then a borrowed `full` comes by `attach` and goes by `detach`). Empty while no storage is held.
        borrows: whether a full tensor is always borrowed: the buffer rests in a shard that is not the whole.
        rests_in_full: whether it owns its full tensor instead: gathered values then stay.
        lends: whether it is known if others keep tensors in the memory of `views` ([Note: lent views]).
        placement: where its values are now (during a redistribution: where they will be); None: it has no values.
        is_arriving: whether a redistribution is in progress.
        pending: the last redistribution.
    """

    def __init__(
        self,
        layout: BufferLayout,
        rank: int,
        dtype: torch.dtype,
        resting: Placement,
        allocate: Allocate,
        *,
        holds: bool = True,
        lends: bool = False,
    ) -> None:
        """`resting`: SHARDED allocates only the shard, others the full buffer (also SHARDED, if there is one shard).
        `holds`: False allocates nothing before `hold`. `lends`: see the attributes; no effect where the full tensor is
        borrowed."""
        self.layout, self.rank, self.dtype = layout, rank, dtype
        self.borrows = resting is SHARDED and layout.num_shards > 1
        self.rests_in_full = not self.borrows
        self.lends = lends and not self.borrows
        self.placement: Placement | None = resting
        self.is_arriving = False
        self.pending = Pending()
        self._cut: Cut | None = None
        self._allocate, self._storage = allocate, allocate(0)
        self.full: Tensor | None = None
        self.shard = self._storage.view(dtype)
        if holds:
            self.hold()

    @cached_property
    def own_interval(self) -> Interval:
        """The interval of the full buffer that is the own shard."""
        return self.layout.shard(self.rank)

    def hold(self) -> None:
        """Allocate the buffer's own storage, if it holds none."""
        if self._storage.numel():
            return
        numel = self.layout.shard_numel if self.borrows else self.layout.numel
        storage = self._allocate(numel * self.dtype.itemsize)
        held = storage.view(self.dtype)
        if self.borrows:
            self.shard = held
        else:
            self.full, self.shard = held, held[self.own_interval.slice]
        self._storage = storage  # last: if this is interrupted, the next call does it again

    def free(self) -> None:
        """Free the buffer's own storage, and give a borrowed full tensor back. The values are lost."""
        self.placement = self.full = self._cut = None
        self._storage = self._allocate(0)
        self.shard = self._storage.view(self.dtype)

    def attach(self, full: Tensor) -> None:
        """Borrow a full-size tensor [layout.numel], until `detach`."""
        assert self.borrows and self.full is None and full.numel() == self.layout.numel, "not a borrower"
        self.full = full

    def detach(self, *, forget: bool = False) -> None:
        """Give a borrowed full tensor back. The views of the full tensor are kept, unless `forget`."""
        if self.borrows:
            self.full = None
        if forget:
            # The cached views keep the storage alive: whoever wants its memory freed must pass `forget`.
            self._cut = None

    def become(self, placement: Placement | None) -> None:
        """Set the placement without an exchange: the caller has written values; None: the values are not needed any
        more.

        Raises:
            RuntimeError: a redistribution is in progress.
        """
        if self.is_arriving:
            raise InvalidState("the values of this buffer are arriving: wait for them before others are written")
        self.placement = placement

    def redistribute(
        self,
        to: Placement,
        collectives: Collectives,
        *,
        unit: str,
        phase: str,
        portions: Portions | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        """Start the exchanges that change the placement to `to`; `arrive` waits for them. If there are several, each
        follows the one before it: by `pending.advance`, or in `arrive`.

        Args:
            portions: the intervals that move; None: everything.
            reduction: how PARTIAL values are summed.

        Raises:
            ValueError: no such transition.
            RuntimeError: there are no values, or a redistribution is in progress.
        """
        if self.placement is None:
            raise InvalidState(f"a buffer of unit {unit} has no values: it cannot be redistributed ({phase})")
        if self.is_arriving:
            raise InvalidState(
                f"a buffer of unit {unit} waits for values that are arriving: it cannot be redistributed ({phase}). "
                "Does another thread call the model meanwhile? A threading.Lock around calls lets them take turns"
            )
        pending, path, full = None, moves(self.placement, to), self.full
        described: Any = {"unit": unit, "phase": phase, "portions": portions}
        if Move.REDUCE_SCATTER in path:
            assert full is not None and reduction is not None, "a sum needs all terms, and scratch"
            pending = collectives.reduce_scatter(full, self.shard, reduction, **described)
        if Move.ALL_GATHER in path:
            assert full is not None, "a gather needs the full tensor"
            gather = partial(collectives.all_gather, full, self.shard, **described)
            if pending is None:
                pending = gather()
            elif collectives.mesh.shard.size > 1:  # else the only shard is all of it
                pending = collectives.chain(pending).follow(partial(gather, of_mean=True))
        self.pending, self.placement, self.is_arriving = pending or Pending(), to, bool(path)

    def arrive(self, *, stale: bool = False) -> None:
        """Wait for the redistribution in progress, if there is one. `stale`: its result will not be used."""
        self.pending.wait(stale=stale)
        self.is_arriving = False

    def abandon(self) -> None:
        """Drop the redistribution in progress, if any, and the values."""
        # What gloo has to receive is still waited for, unless something has failed (`Pending.__del__`).
        self.pending, self.is_arriving, self.placement = Pending(), False, None

    def release(self) -> None:
        """Like `arrive`, and wait until the peers have read what this rank gave: only then may it be written to."""
        self.pending.release()
        self.is_arriving = False

    def views(self) -> list[Tensor]:
        """One view per slot of the full buffer, in the parameter's shape."""
        return self._cut_up().slots

    def addresses(self) -> list[int]:
        """Where `views` lie."""
        return self._cut_up().addresses()

    def num_uses(self) -> int:
        """How many tensors lie in the memory of `views`."""
        return _uses_of_memory(self._cut_up().whole)

    @property
    def is_lent(self) -> bool:
        """Whether others keep tensors in the memory of `views`, if parameters have none there; False where it is not
        known ([Note: lent views])."""
        cut = self._cut
        return cut is not None and cut.whole is not cut.full and _uses_of_memory(cut.whole) > cut.own_uses

    def padding(self) -> list[Tensor]:
        """The elements of the full buffer that belong to no slot, as 1-D views."""
        return self._cut_up().padding

    def _cut_up(self) -> Cut:
        assert self.full is not None, "the full buffer is not here"
        # Compared by identity: a pool buffer returns the same tensor object each time (`PoolBuffer.tensor`), so that a
        # gather does not create new views, one per parameter.
        if self._cut is None or self._cut.full is not self.full:
            self._cut = Cut.of(self.full, self.layout, lent=self.lends)
        return self._cut

    def own_part_of_full(self) -> Tensor:
        """[shard_numel]: the own interval inside the full buffer."""
        assert self.full is not None, "the full buffer is not here"
        return self.full[self.own_interval.slice]

    def storages(self) -> list[Tensor]:
        """The storage that this buffer owns; nothing that it borrows."""
        return [self._storage]


def uses_of(storage: torch.UntypedStorage) -> int:
    """How many tensors lie in it, and one more for this object."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _uses_of_memory(tensor: Tensor) -> int:
    """A number that is higher by one for each tensor in its storage, and for whoever keeps the storage itself."""
    storage = tensor.untyped_storage()  # one object of Python, which counts once, however many keep it
    return uses_of(storage) + sys.getrefcount(storage)


def _as_another_storage(tensor: Tensor) -> Tensor:
    """A tensor in the same memory, whose storage counts its tensors by itself. The tensor itself on devices for which
    torch has no such exchange."""
    try:
        with torch.inference_mode(False):
            return from_dlpack(torch._C._to_dlpack(tensor.view(torch.uint8))).view(tensor.dtype)
    except (BufferError, NotImplementedError, RuntimeError, ValueError):
        return tensor


def live_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors."""
    plain = plain_parts(tensors)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in plain}
    return sum(storages.values())


def plain_parts(tensors: Iterable[Any]) -> Iterator[Tensor]:
    """The inner tensors of wrapper subclasses (quantised state: codes, scales); other tensors as they are."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from plain_parts(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor
