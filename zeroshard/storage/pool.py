"""Full-size buffers: they come when a phase needs them, and go when none does.

| kind    | holds                                    | how many at once                      |
|---------|------------------------------------------|---------------------------------------|
| ring    | gathered weights of a unit               | two, and one for each outer unit      |
| buckets | gradients of a unit before the reduction | one or two, and one for each outer unit |
| scratch | what is received or cast in a reduction  | one for each reduction under way      |

A *pool buffer* is one storage. It exists from the beginning and costs nothing until it is used (`PoolBuffer.tensor`).
Its *occupant* is the unit whose values it has; units of one queue take turns (`Turns`, `pool_plan.py`). It stays
held through forward and backward; `Pool.rest`, at the beginning of a step, gives back what no phase needs until the
next forward. On a CPU the system clears every page that is given back and comes again, which takes time: so up to
`KEPT_BYTES` stay there, buckets first: peers map them, which makes them the slowest to get, and in a step reduced
gradients may lie there (`Pool.lodge`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.shared_memory import Segment, prefer_huge_pages
from zeroshard.errors import InvalidState
from zeroshard.layout.pool_plan import PoolPlan, Request, beyond_turns, kept
from zeroshard.model.units import UnitSpec
from zeroshard.storage.buffer import FlatBuffer

Kind = Literal["ring", "buckets", "scratch"]
KINDS: tuple[Kind, ...] = get_args(Kind)

KEPT_IN_STEP = 12 << 20
"""How much of what stays held may be idle while a step has gradients and the optimizer's state: of more, gradients take
some."""


class User(Protocol):
    """Whoever uses buffers. `vacate`: nobody refers to it any more, or False where its values are still needed."""

    def vacate(self, buffer: PoolBuffer) -> bool: ...


class Memory(Protocol):
    """Where the storage of a buffer comes from."""

    def take(self) -> Tensor: ...

    def give_back(self) -> None: ...


class PoolBuffer:
    """One full-size storage of a pool.

    Attributes:
        occupant: whoever's values it has.
        lasting: it stays held between steps, whatever its size.
    """

    def __init__(self, pool: Pool, kind: Kind, num_bytes: int, user: User, memory: Memory) -> None:
        self.kind, self.num_bytes = kind, num_bytes
        self.occupant: Any = None
        self.lasting = False
        self._guests: list[FlatBuffer] = []
        self._memory = memory
        self._pool_ref, self._user_ref = weakref.ref(pool), weakref.ref(user)  # both refer to their buffers
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
            # Autograd refuses to save what was made in inference mode; FSDP fails so when it is evaluated before it is
            # trained (pytorch/pytorch#113203).
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

    def occupy(self, occupant: Any) -> None:
        """From now on it has somebody's values."""
        self.send_away()  # reduced gradients of others may lie here since the last step: the new values overwrite them
        self.occupant = occupant

    @property
    def is_idle(self) -> bool:
        """Whether it has nobody's values."""
        self._guests = [shard for shard in self._guests if shard.is_guest]
        return self.occupant is None and not self._guests

    def lodge(self, shard: FlatBuffer, start: int) -> None:
        """Values that belong elsewhere lie here, from that byte on, while it is idle."""
        shard.move(self.storage[start : start + shard.shard.nbytes])
        self._guests.append(shard)

    def send_away(self) -> None:
        """What lodges here has a storage of its own again."""
        for shard in self._guests:
            if shard.is_guest:
                shard.move()
        self._guests.clear()

    def try_to_give_back(self) -> None:
        """Unless its values are still needed."""
        self.send_away()
        user = self._user_ref()
        if user is None or user.vacate(self):
            self.give_back()

    def give_back(self) -> None:
        """Its values are lost."""
        if self._bytes is not None:
            self._bytes = self.occupant = None
            # Cached views own their storage: as long as they live, nothing is given back. Those of an emptied storage
            # stay, as autograd holds some of them too.
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
            # See [Note: storage that autograd holds] in `weights.py`.
            self._bytes.untyped_storage().resize_(0)


class Pool:
    """All full-size buffers of one model.

    Attributes:
        limit: the most bytes that they, and the scratch of optimizers, may take (None: no limit).
        besides: bytes of scratch that optimizers hold.
        expect_units: raises where units of these specs would need more than the limit (`planner.check_limit`).
        most: kind -> the most bytes that were held at once.
    """

    def __init__(self, collectives: Collectives, limit: int | None = None) -> None:
        self._collectives, self._device = collectives, collectives.device
        self.limit = limit
        self.besides: Callable[[], int] = lambda: 0
        self.expect_units: Callable[[Sequence[UnitSpec]], None] = lambda specs: None
        self.most: dict[Kind, int] = {}
        self._buffers: list[PoolBuffer] = []

    def buffer(self, kind: Kind, num_bytes: int, user: User, why: str = "") -> PoolBuffer:
        """One more. Buckets lie where peers can read them, if the ranks share memory.

        Args:
            why: what needs it, for the message.

        Raises:
            RuntimeError: the limit is less than all buffers together.
        """
        self.expect_room(num_bytes, why)
        memory: Memory = (Emptied if kind == "ring" else Plain)(num_bytes, self._device)
        if kind == "buckets" and self._collectives.shared is not None and num_bytes:
            # The same segment each time: peers map it once. A new one for every backward would be mapped by every peer
            # anew.
            memory = Segment(self._collectives.shared, num_bytes)
        self._buffers.append(PoolBuffer(self, kind, num_bytes, user, memory))
        return self._buffers[-1]

    def expect_room(self, num_bytes: int, why: str, remedy: str = "choose smaller units") -> None:
        """Raises:
        RuntimeError: that many more bytes would exceed the limit."""
        needed = sum(buffer.num_bytes for buffer in self._buffers) + self.besides() + num_bytes
        if self.limit is not None and needed > self.limit:
            raise InvalidState(
                f"max_transient_bytes={self.limit}: {why} needs {num_bytes} bytes more, {needed} in all. Allow that "
                f"much, or {remedy}"
            )

    def rest(self, *kinds: Kind) -> None:
        """Give back what no phase needs until the next forward; `kinds`: only of these."""
        held = sorted(self.held(), key=lambda buffer: buffer.kind != "buckets")
        spare = [buffer for buffer in held if not buffer.lasting]
        keep = kept(buffer.num_bytes for buffer in spare) if self._device.type == "cpu" else [False] * len(spare)
        for buffer, stays in zip(spare, keep, strict=True):
            if not stays and (buffer.kind in kinds or not kinds):
                buffer.try_to_give_back()

    def lodge(self, shards: Iterable[FlatBuffer]) -> None:
        """A step begins, and buckets that are held for the next backward (to take them anew would cost more than these
        copies) would come on top of the optimizer's state: reduced gradients move there. They leave before a bucket is
        used."""
        too_much = sum(buffer.num_bytes for buffer in self.held()) - KEPT_IN_STEP
        moving = list(shards)
        for buffer in self.held():
            free = buffer.num_bytes if buffer.kind == "buckets" and buffer.is_idle else 0
            for shard in list(moving):
                num_bytes = shard.shard.nbytes
                if 0 < num_bytes <= free and too_much > 0:
                    free, too_much = free - num_bytes, too_much - num_bytes
                    buffer.lodge(shard, free)
                    moving.remove(shard)

    def held(self) -> list[PoolBuffer]:
        return [buffer for buffer in self._buffers if buffer.is_held]

    def empty(self) -> None:
        """Give back everything."""
        for buffer in self.held():
            buffer.try_to_give_back()

    def clear(self) -> None:
        """The same, and forget the buffers: others will be made."""
        self.empty()
        self._buffers.clear()

    def tensors(self, kind: Kind) -> list[Tensor]:
        """The storages that are held."""
        return [buffer.storage for buffer in self._buffers if buffer.kind == kind and buffer.is_held]

    def took(self, buffer: PoolBuffer) -> None:
        held = sum(other.num_bytes for other in self._buffers if other.kind == buffer.kind and other.is_held)
        self.most[buffer.kind] = max(self.most.get(buffer.kind, 0), held)


class Turns:
    """The buffers of one use (weights, gradients) and who may occupy them, as a plan says: a few have one for good, all
    others take turns.

    Attributes:
        shared: queue -> the buffers that its requests take turns in.
    """

    def __init__(self, pool: Pool, kind: Kind, plan: PoolPlan, requests: Mapping[Any, Request], user: User) -> None:
        """`requests`: of each that may become an occupant, in the order of the plan's."""
        self._pool, self._kind, self._user, self._requests = pool, kind, user, requests
        self._given: dict[Any, PoolBuffer] = {
            occupant: pool.buffer(kind, plan.own[request.key], user)
            for occupant, request in requests.items()
            if request.key in plan.own
        }
        self.shared = {
            queue: [pool.buffer(kind, num_bytes, user) for _ in range(count)]
            for queue, (count, num_bytes) in plan.shared.items()
        }
        self._num_assigned: dict[Hashable, int] = {}

    def given(self, occupant: Any) -> PoolBuffer | None:
        """The one that it has for good; None where it takes turns."""
        return self._given.get(occupant)

    def give(self, occupant: Any, why: str) -> PoolBuffer:
        """One more, for good. `why`: see `Pool.buffer`."""
        num_bytes = self._requests[occupant].num_bytes
        buffer = self._given[occupant] = self._pool.buffer(self._kind, num_bytes, self._user, why)
        return buffer

    def assigned(self, occupant: Any) -> PoolBuffer:
        """Always the same: its own, or one that it shares with others. These are assigned in turns, in the order in
        which they are first asked for."""
        if occupant not in self._given:
            queue = self._requests[occupant].queue
            turn = self._num_assigned.get(queue, 0)
            self._num_assigned[queue] = turn + 1
            self._given[occupant] = self.shared[queue][turn % len(self.shared[queue])]
        return self._given[occupant]

    def is_alone(self, occupant: Any) -> bool:
        """Whether nobody else is assigned the same."""
        given = self._given.get(occupant)
        return given is None or sum(buffer is given for buffer in self._given.values()) == 1

    def free(self, occupant: Any) -> PoolBuffer | None:
        """One of its queue that nobody occupies, rather one that is held."""
        free = [buffer for buffer in self.shared[self._requests[occupant].queue] if buffer.occupant is None]
        return max(free, key=lambda buffer: buffer.is_held, default=None)

    def occupied_by(self, occupant: Any) -> PoolBuffer | None:
        """The one that has its values now; None also for somebody who needs none."""
        request, given = self._requests.get(occupant), self._given.get(occupant)
        if request is None:
            return None
        mine = [given] if given is not None else self.shared[request.queue]
        return next((buffer for buffer in mine if buffer.occupant is occupant), None)

    def expect_room(self, occupants: Iterable[Any], why: str, remedy: str) -> None:
        """For all of these at once.

        Raises:
            RuntimeError: the pool's limit does not allow that many.
        """
        without = [self._requests[occupant] for occupant in occupants if occupant not in self._given]
        more = beyond_turns(without, {queue: len(buffers) for queue, buffers in self.shared.items()})
        self._pool.expect_room(sum(request.num_bytes for request in more), why, remedy)
