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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NoReturn

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
from zeroshard.layout.sums import add
from zeroshard.placement import SHARDED, Move, Placement, moves

Allocate = Callable[[int], Tensor]
"""Number of bytes -> uint8 zeros."""

NOTHING = -0.0
"""What a rank without a gradient adds to a sum: see [Note: nothing] in `gradients.py`."""


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


class FlatBuffer:
    """A buffer under a layout. See [Note: placement].

    Attributes:
        layout: shared by the weights, gradients and main of a unit.
        full: [layout.numel], or None while only the shard is held.
        shard: [layout.shard_numel], the own interval: a view of `full` if the buffer owns `full`, else a storage of its
            own (then a borrowed `full` comes by `attach` and goes by `detach`). Empty after `let_go`.
        is_guest: whether the shard lies in a pool buffer for a while (`Pool.lodge`).
        most: the most bytes of its own storage so far.
        borrows: whether a full tensor is always borrowed: the buffer rests in a shard that is not the whole.
        is_apart: whether each slot has a tensor of its own (`slot_buffer.py`).
        lends: whether it is known if others keep tensors in the memory of `views` ([Note: lent views]).
        placement: where its values are now (during a redistribution: where they will be); None: it has no values.
        is_arriving: whether a redistribution is in progress.
        pending: the last redistribution.
    """

    is_apart: ClassVar[bool] = False

    def __init__(
        self,
        layout: BufferLayout,
        rank: int,
        dtype: torch.dtype,
        resting: Placement,
        allocate: Allocate,
        *,
        lasting: bool = True,
        lends: bool = False,
    ) -> None:
        """`resting`: SHARDED allocates only the shard, others the full buffer (also SHARDED, if there is one shard).
        `lasting`: False allocates nothing before `hold`, and `let_go` frees it again. `lends`: see the attributes; no
        effect where the full tensor is borrowed."""
        self.layout, self.rank = layout, rank
        self.borrows = resting is SHARDED and layout.num_shards > 1
        self.lends = lends and not self.borrows
        self.placement: Placement | None = resting
        self.is_arriving = False
        self.pending = Pending()
        self._cut: Cut | None = None
        self._lasting, self._allocate = lasting, allocate
        self.is_guest = False
        self._storage = allocate(0)
        self.full: Tensor | None = None
        self.shard = self._storage.view(dtype)
        self.most = 0
        if lasting:
            self.hold()

    @cached_property
    def own_interval(self) -> Interval:
        """The interval of the full buffer that is the own shard."""
        return self.layout.shard(self.rank)

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.dtype

    @property
    def rests_in_full(self) -> bool:
        """Whether the buffer owns its full tensor: gathered values then stay."""
        return not self.borrows

    def hold(self) -> None:
        """Allocate the buffer's own storage, if it has none."""
        if self._storage.numel():
            return
        numel = self.layout.shard_numel if self.borrows else self.layout.numel
        storage = self._allocate(numel * self.dtype.itemsize)
        self.most = storage.nbytes
        held = storage.view(self.dtype)
        if self.borrows:
            self.shard = held
        else:
            self.full, self.shard = held, held[self.own_interval.slice]
        self._storage = storage  # last: if this is interrupted, the next call does it again

    def let_go(self) -> None:
        """Free the buffer's own storage, unless it is lasting. The values are lost."""
        if not self._lasting:
            self.is_guest = False
            self._storage = self._allocate(0)
            self.shard = self._storage.view(self.dtype)
            if not self.borrows:
                self.full = self._cut = None

    def free(self) -> None:
        """Free the buffer's own storage for good, and give a borrowed full tensor back."""
        self._lasting, self.placement = False, None
        self.full = self._cut = None
        self.let_go()

    def move(self, storage: Tensor | None = None) -> None:
        """Move the shard's values into `storage`, uint8 [bytes of the shard], part of a pool buffer; None: back into a
        storage of its own."""
        assert self.borrows and not self._lasting, "not a shard that comes and goes"
        is_guest = storage is not None
        self.is_guest |= is_guest  # and until it is out: there may be no memory to move to
        storage = self._allocate(self._storage.nbytes) if storage is None else storage
        self._storage = storage.copy_(self._storage)
        self.shard = self._storage.view(self.dtype)
        self.is_guest = is_guest

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
        if self.placement is None or self.is_arriving:
            what = "has no values" if self.placement is None else "waits for values that are arriving"
            raise InvalidState(f"a buffer of unit {unit} {what}: it cannot be redistributed ({phase})")
        pending, path, full = Pending(), moves(self.placement, to), self.full
        described: Any = {"unit": unit, "phase": phase, "portions": portions}
        if Move.REDUCE_SCATTER in path:
            assert full is not None and reduction is not None, "a sum needs all terms, and scratch"
            pending = collectives.reduce_scatter(full, self.shard, reduction, **described)
        if Move.ALL_GATHER in path:
            assert full is not None, "a gather needs the full tensor"
            gather = partial(collectives.all_gather, full, self.shard, **described)
            if len(path) == 1:
                pending = gather()
            elif collectives.mesh.shard.size > 1:  # else the only shard is all of it
                # Of means, which are written to before the ranks meet again.
                pending = collectives.chain(pending).follow(partial(gather, of_mean=True, acknowledge=True))
        self.pending, self.placement, self.is_arriving = pending, to, bool(path)

    def arrive(self, *, stale: bool = False) -> None:
        """Wait for the redistribution in progress, if there is one. `stale`: its result will not be used."""
        self.pending.wait(stale=stale)
        self.is_arriving = False

    def arrive_in_part(self) -> None:
        """Wait for the exchange in progress, and start none that follows it."""
        self.pending.wait_for_one()
        self.is_arriving = self.pending.goes_on

    def release_in_part(self) -> None:
        """Like `arrive_in_part`, and wait until the peers have read what this rank gave to that exchange."""
        self.pending.release_one()
        self.is_arriving = self.pending.goes_on

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

    def num_uses(self) -> int:
        """How many tensors lie in the memory of `views`."""
        return _uses_of_memory(self._cut_up().whole)

    @property
    def is_lent(self) -> bool:
        """Whether others keep tensors in the memory of `views`, if parameters have none there; False where it is not
        known ([Note: lent views])."""
        cut = self._cut
        return cut is not None and cut.whole is not cut.full and _uses_of_memory(cut.whole) > cut.own_uses

    def renew_view(self, index: int) -> None:
        """From now on, `views` has another tensor for that slot: somebody keeps this one."""
        if self._cut is not None:
            self._cut.slots[index] = self._cut.slots[index].detach()

    @property
    def known_views(self) -> list[Tensor]:
        """The views that `views` has made last; empty if it has made none."""
        return [] if self._cut is None else self._cut.slots

    @property
    def moved_views(self) -> list[int]:
        """The slots whose view lies elsewhere (`view.data = values`)."""
        if self._cut is None:
            return []
        # By addresses, as this is asked of every view in every step. (They change with each storage of a pool buffer.)
        first = self._cut.full.data_ptr()
        found = [view.data_ptr() - first for view in self._cut.slots]
        if found == self._cut.offsets:
            return []
        places = zip(found, self._cut.offsets, self.layout.slots, strict=True)
        return [index for index, (now, place, slot) in enumerate(places) if now != place and slot.world.numel]

    def restore_view(self, index: int) -> Tensor:
        """Put a view that lies elsewhere back. Returns the values that it had there."""
        assert self._cut is not None, "there are views"
        view, slot = self._cut.slots[index], self.layout.slots[index]
        values = view.detach().clone()
        view.data = self._cut.whole[slot.world.slice].view(slot.shape)
        return values

    def put(self, index: int, value: Tensor) -> None:
        """Write a value (shape-equal, any float dtype) to one slot of the full buffer."""
        self._cut_up().slots[index].copy_(value)

    def add(self, index: int, value: Tensor) -> None:
        """Add a value (shape-equal, any float dtype) to one slot of the full buffer."""
        view = self.views()[index]
        if value.dtype == view.dtype:
            view.add_(value)
        else:
            flat = view.view(-1)
            add(flat, value.reshape(-1), out=flat)

    def clear(self, index: int) -> None:
        """Let one slot of the full buffer be `NOTHING`."""
        self.views()[index].fill_(NOTHING)

    def clear_all(self) -> None:
        """Let everything that is held be `NOTHING`."""
        for held in (self.shard, self.full):
            held.fill_(NOTHING) if held is not None else None

    def keep_own(self, factor: int) -> set[int]:
        """Let the own interval of the full buffer be the shard, multiplied by `factor`, and the rest of the slots that
        touch it `NOTHING`. Returns these slots."""
        assert self.full is not None, "the full buffer is not here"
        own, touched = self.own_interval, self.layout.slots_in(self.own_interval)
        if touched:
            first, last = self.layout.slots[touched[0]].world, self.layout.slots[touched[-1]].world
            self.full[first.start : own.start].fill_(NOTHING)
            self.full[own.stop : last.stop].fill_(NOTHING)
        torch.mul(self.shard, factor, out=self.own_part_of_full())
        return set(touched)

    def part(self, world: Interval) -> Tensor:
        """The values of an interval: in the full buffer, if it is here, else in the shard."""
        return self.part_of_shard(world) if self.full is None else self.full[world.slice]

    def part_of_shard(self, world: Interval) -> Tensor:
        """The values of an interval of the own shard."""
        return self.shard[world.relative_to(self.own_interval.start).slice]

    def parts(self, world: Interval) -> Sequence[Tensor]:
        """Views of all values of an interval."""
        return (self.part(world),)

    def copy_to(self, world: Interval, out: Tensor) -> Tensor:
        """Copy the values of an interval to `out` [world.numel], any float dtype. Returns it."""
        return out.copy_(self.part(world))

    @property
    def is_here(self) -> bool:
        """Whether there is a full buffer to read."""
        return self.full is not None

    @property
    def version(self) -> int:
        """A number that changes when the full buffer is written to."""
        return 0 if self.full is None else self.full._version

    def settle(self) -> None:
        """The backward that has written to the buffer is over."""

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
        return [] if self.is_guest else [self._storage]


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
