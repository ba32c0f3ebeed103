"""Full-size storages: they come when a phase needs them, and go when none does.

| kind    | holds                                    | how many at once                      |
|---------|------------------------------------------|---------------------------------------|
| ring    | gathered weights of a unit               | two, and one for each outer unit      |
| buckets | gradients of a unit before the reduction | one or two, and one for each outer unit |
| scratch | what is received or cast in a reduction  | one for each reduction under way      |

A *place* is one storage. It exists from the beginning and costs nothing until it is used (`Place.tensor`). It stays
held through forward and backward; `Pool.rest`, at the beginning of a step, gives back what no phase needs until the
next forward. On a CPU the system clears every page that is given back and comes again, which takes time: so up to
`KEPT_BYTES` stay there, buckets first: peers map them, which makes them the slowest to get, and in a step reduced
gradients may lie there (`Reducer.use_idle_buckets`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from zeroshard.collectives import Collectives, Transport
from zeroshard.shared_memory import Segment, prefer_huge_pages

Kind = Literal["ring", "buckets", "scratch"]
KINDS: tuple[Kind, ...] = get_args(Kind)

KEPT_BYTES = 32 << 20
"""What stays held between two steps on a CPU: about one unit of the default size."""

KEPT_IN_STEP = 12 << 20
"""How much of it may be idle while a step has gradients and the optimizer's state: of more, gradients take some."""


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
    def of(cls, borrowers: Iterable[Borrower], turns: Callable[[int, int], int]) -> Allotment:
        """`turns`: number of borrowers of a kind, and the most bytes of one -> how many storages they take turns in."""
        borrowers = list(borrowers)
        sizes: dict[Hashable, list[int]] = {}
        for borrower in borrowers:
            if not borrower.alone:
                sizes.setdefault(borrower.kind, []).append(borrower.num_bytes)
        return cls(
            {borrower.key: borrower.num_bytes for borrower in borrowers if borrower.alone},
            {kind: (turns(len(of_kind), max(of_kind)), max(of_kind)) for kind, of_kind in sizes.items()},
        )

    @classmethod
    def of_places(cls, borrowers: Iterable[Borrower]) -> Allotment:
        """For weights: one place in use, one for the unit to come."""
        return cls.of(borrowers, lambda num_units, num_bytes: min(2, num_units))

    @classmethod
    def of_buckets(cls, borrowers: Iterable[Borrower], transport: Transport) -> Allotment:
        """For gradients: two buckets, so that one is reduced while the next fills. But the last unit waits for the
        bucket of the one before, as no other fills meanwhile. In shared memory nothing moves meanwhile: two let a rank
        be late now and then, as long as that is cheap."""

        def turns(num_units: int, num_bytes: int) -> int:
            if transport == "shared":
                return min(2, num_units) if 2 * num_bytes <= KEPT_BYTES else 1
            return min(2, max(1, num_units - 1))

        return cls.of(borrowers, turns)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage, in the order in which they are made."""
        return [*self.own.values(), *(size for count, size in self.shared.values() for _ in range(count))]


def beyond_turns(borrowers: Iterable[Borrower], turns: Mapping[Hashable, int]) -> list[Borrower]:
    """Those that need a storage more where all of them need one at once. `turns`: how many there are of each kind."""
    left = dict(turns)
    more = []
    for borrower in borrowers:
        if borrower.alone:
            continue
        if left.get(borrower.kind, 0):
            left[borrower.kind] -= 1
        else:
            more.append(borrower)
    return more


def kept(sizes: Iterable[int]) -> list[bool]:
    """Which of these storages stay held between two steps, in the order of preference."""
    total, result = 0, []
    for size in sizes:
        result.append(total + size <= KEPT_BYTES)
        total += size * result[-1]
    return result


class User(Protocol):
    """Whoever uses places. `vacate`: nobody refers to it any more, or False where its values are still needed."""

    def vacate(self, place: Place) -> bool: ...


class Memory(Protocol):
    """Where the storage of a place comes from."""

    def take(self) -> Tensor: ...

    def give_back(self) -> None: ...


class Place:
    """One full-size storage of a pool.

    Attributes:
        holder: whoever's values it has.
        lasting: it stays held between steps, whatever its size.
    """

    def __init__(self, pool: Pool, kind: Kind, num_bytes: int, user: User, memory: Memory) -> None:
        self.kind, self.num_bytes = kind, num_bytes
        self.holder: Any = None
        self.lasting = False
        self._memory = memory
        self._pool_ref, self._user_ref = weakref.ref(pool), weakref.ref(user)  # both refer to their places
        self._bytes: Tensor | None = None
        self._tensors: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def is_held(self) -> bool:
        return self._bytes is not None

    @property
    def is_shared(self) -> bool:
        """Whether peers map it."""
        return isinstance(self._memory, Segment)

    @property
    def storage(self) -> Tensor:
        """uint8 [num_bytes], held from now on."""
        if self._bytes is None:
            with torch.inference_mode(False):  # what is made inside an evaluation serves the training after it as well
                self._bytes = self._memory.take()
            if (pool := self._pool_ref()) is not None:
                pool.took(self)
        return self._bytes

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], from the front, held from now on; the same tensor object each time until it is given back."""
        storage, key = self.storage, (numel, dtype)
        if key not in self._tensors:
            with torch.inference_mode(False):
                self._tensors[key] = storage[: numel * dtype.itemsize].view(dtype)
        return self._tensors[key]

    def try_to_give_back(self) -> None:
        """Unless its values are still needed."""
        user = self._user_ref()
        if user is None or user.vacate(self):
            self.give_back()

    def give_back(self) -> None:
        """Its values are lost."""
        if self._bytes is not None:
            self._bytes = self.holder = None
            if not isinstance(self._memory, Emptied):
                self._tensors.clear()
            self._memory.give_back()


def plain_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes], any values."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    prefer_huge_pages(tensor)
    return tensor


class Plain:
    """Another storage each time: who has kept a view of the last one still has it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.take = partial(plain_bytes, num_bytes, device)

    def give_back(self) -> None:
        pass


class Emptied:
    """One storage, emptied in between: from forward to backward autograd holds views of it, and must find the weights
    there again."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = num_bytes, device
        self._bytes: Tensor | None = None

    def take(self) -> Tensor:
        if self._bytes is None:
            self._bytes = plain_bytes(self._num_bytes, self._device)
        else:
            self._bytes.untyped_storage().resize_(self._num_bytes)
            prefer_huge_pages(self._bytes)
        return self._bytes

    def give_back(self) -> None:
        if self._bytes is not None:
            self._bytes.untyped_storage().resize_(0)


class Pool:
    """All places of one model.

    Attributes:
        limit: the most bytes that its places, and the scratch of optimizers, may take (None: no limit).
        besides: bytes of scratch that optimizers hold.
        most: kind -> the most bytes that were held at once.
    """

    def __init__(self, collectives: Collectives, limit: int | None = None) -> None:
        self._collectives, self._device = collectives, collectives.device
        self.limit = limit
        self.besides: Callable[[], int] = lambda: 0
        self.most: dict[Kind, int] = {}
        self._places: list[Place] = []

    def place(self, kind: Kind, num_bytes: int, user: User, why: str = "") -> Place:
        """One more. Buckets lie where peers can read them, if the ranks share memory.

        Args:
            why: what needs it, for the message.

        Raises:
            RuntimeError: the limit is less than all places together.
        """
        self.expect_room(num_bytes, why)
        memory: Memory = (Emptied if kind == "ring" else Plain)(num_bytes, self._device)
        if kind == "buckets" and self._collectives.shared is not None and num_bytes:
            memory = Segment(self._collectives.shared, num_bytes)
        self._places.append(Place(self, kind, num_bytes, user, memory))
        return self._places[-1]

    def expect_room(self, num_bytes: int, why: str, remedy: str = "choose smaller units") -> None:
        """Raises:
        RuntimeError: that many more bytes would exceed the limit."""
        needed = sum(place.num_bytes for place in self._places) + self.besides() + num_bytes
        if self.limit is not None and needed > self.limit:
            raise RuntimeError(
                f"max_transient_bytes={self.limit}: {why} needs {num_bytes} bytes more, {needed} in all. Allow that "
                f"much, or {remedy}"
            )

    def rest(self, *kinds: Kind) -> None:
        """Give back what no phase needs until the next forward; `kinds`: only of these."""
        held = sorted(self.held(), key=lambda place: place.kind != "buckets")
        spare = [place for place in held if not place.lasting]
        keep = kept(place.num_bytes for place in spare) if self._device.type == "cpu" else [False] * len(spare)
        for place, stays in zip(spare, keep, strict=True):
            if not stays and (place.kind in kinds or not kinds):
                place.try_to_give_back()

    def held_beside_a_step(self) -> int:
        """Bytes that are held, beyond what may be idle in a step (perhaps less than none)."""
        return sum(place.num_bytes for place in self.held()) - KEPT_IN_STEP

    def held(self) -> list[Place]:
        return [place for place in self._places if place.is_held]

    def empty(self) -> None:
        """Give back everything."""
        for place in self.held():
            place.try_to_give_back()

    def clear(self) -> None:
        """The same, and forget the places: others will be made."""
        self.empty()
        self._places.clear()

    def tensors(self, kind: Kind) -> list[Tensor]:
        """The storages that are held."""
        return [place.storage for place in self._places if place.kind == kind and place.is_held]

    def took(self, place: Place) -> None:
        held = sum(other.num_bytes for other in self._places if other.kind == place.kind and other.is_held)
        self.most[place.kind] = max(self.most.get(place.kind, 0), held)
