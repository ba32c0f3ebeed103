"""The pool: full-size buffers that hold memory only while a phase needs them.

| kind    | holds                                    | how many at once                      |
|---------|------------------------------------------|---------------------------------------|
| ring    | gathered weights of a unit               | two, and one for each outer unit      |
| buckets | gradients of a unit before the reduction | one or two, and one for each outer unit |
| scratch | received or cast terms of a reduction    | one for each reduction in progress    |

A *pool buffer* is one storage. It is planned at the start, and takes memory from its first use on
(`PoolBuffer.tensor`). Its *occupant* is the unit whose values it has; units of one queue take turns (`Turns`,
`pool_plan.py`). A pool buffer keeps its memory through forward and backward. `Pool.rest`, at the beginning of a step,
gives back what no phase needs until the next forward. On a CPU the system clears every page that is given back and
taken again, which takes time: so up to `KEPT_BYTES` stay held, buckets first. Peers map buckets, which makes them the
slowest to take again; and during a step, reduced gradients may lie in them (`Pool.lodge`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.errors import InvalidState
from zeroshard.layout.pool_plan import PoolPlan, Request, beyond_turns, kept
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.ranks.shared_memory import Segment
from zeroshard.storage.gradient_buffer import GradientBuffer
from zeroshard.storage.host_memory import keep_freed_memory, prefer_huge_pages

Kind = Literal["ring", "buckets", "scratch"]
KINDS: tuple[Kind, ...] = get_args(Kind)

KEPT_IN_STEP = 12 << 20
"""How many bytes of pool buffers may be held during a step without a use. If more are held, reduced gradients move into
them (`Pool.lodge`)."""


class User(Protocol):
    """A user of pool buffers. `vacate` drops all references to a buffer; it returns False if its values are still
    needed."""

    def vacate(self, buffer: PoolBuffer) -> bool: ...


class PoolBuffer:
    """One full-size storage of a pool.

    Attributes:
        occupant: the unit (or other object) whose values it has; None: nobody's.
        lasting: whether it stays held between steps, whatever its size.
    """

    def __init__(self, pool: Pool, kind: Kind, num_bytes: int, user: User, segment: Segment | None) -> None:
        """`segment`: the memory, if peers map it."""
        self.kind, self.num_bytes = kind, num_bytes
        self.occupant: Any = None
        self.lasting = False
        self._guests: list[GradientBuffer] = []
        self._device, self._segment = pool.device, segment
        # Weak: pool and user refer to their buffers. A cycle would keep full-size memory until the garbage collector
        # runs.
        self._pool_ref, self._user_ref = weakref.ref(pool), weakref.ref(user)
        self._bytes: Tensor | None = None
        self._emptied: Tensor | None = None  # of a ring: the storage whose memory has been given back
        self._tensors: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def is_held(self) -> bool:
        return self._bytes is not None

    @property
    def is_shared(self) -> bool:
        """Whether peers map it."""
        return self._segment is not None

    @property
    def storage(self) -> Tensor:
        """uint8 [num_bytes], held from now on."""
        if self._bytes is None:
            # Autograd refuses to save tensors that were made in inference mode, and this one, made in an evaluation, is
            # used by the training after it. (FSDP fails so if it is evaluated first: pytorch/pytorch#113203.)
            with torch.inference_mode(False):
                self._bytes = self._take()
            if (pool := self._pool_ref()) is not None:
                pool.took(self)
        return self._bytes

    def _take(self) -> Tensor:
        if self._segment is not None:
            return self._segment.take()
        if self._emptied is None:
            return plain_bytes(self.num_bytes, self._device)
        self._emptied.untyped_storage().resize_(self.num_bytes)
        prefer_huge_pages(self._emptied)
        return self._emptied

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], from the front of the storage, held from now on. The same tensor object each time, until the buffer
        is given back."""
        storage, key = self.storage, (numel, dtype)
        # Cached, because `FlatBuffer` recognises a tensor whose views it has by identity.
        if key not in self._tensors:
            with torch.inference_mode(False):
                self._tensors[key] = storage[: numel * dtype.itemsize].view(dtype)
        return self._tensors[key]

    def occupy(self, occupant: Any) -> None:
        """Set the occupant."""
        # Before any write: reduced gradients may lie here since the last step, and new values would overwrite them.
        self.send_away()
        self.occupant = occupant

    @property
    def is_idle(self) -> bool:
        """Whether it holds no values that are needed."""
        self._guests = [shard for shard in self._guests if shard.is_guest]
        return self.occupant is None and not self._guests

    def lodge(self, shard: GradientBuffer, start: int) -> None:
        """Move a shard's values into this idle buffer, from byte `start` on."""
        place = self.storage[start : start + shard.shard.nbytes]
        self._guests.append(shard)  # first: if the move is interrupted, it may be here
        shard.move(place)

    def send_away(self) -> None:
        """Move the shards that lie here back into storages of their own."""
        for shard in self._guests:
            if shard.is_guest:
                shard.move()
        self._guests.clear()

    def try_to_give_back(self) -> None:
        """Give the memory back, unless the values are still needed."""
        self.send_away()
        user = self._user_ref()
        if user is None or user.vacate(self):
            self.give_back()

    def give_back(self) -> None:
        """Give the memory back. The values are lost."""
        if self._bytes is None:
            return
        if self.kind == "ring":
            # One storage for good, as autograd holds views of it: see [Note: storage that autograd holds] in
            # `weights.py`.
            self._emptied = self._bytes
        else:
            self._tensors.clear()  # these views would keep the memory; those of the user stay valid
        self._bytes = self.occupant = None  # before the memory goes: if this is interrupted, it is taken again
        if self._emptied is not None:
            self._emptied.untyped_storage().resize_(0)
        if self._segment is not None:
            self._segment.give_back()


def plain_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes], uninitialised."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    prefer_huge_pages(tensor)
    return tensor


class Pool:
    """All full-size buffers of one model.

    Attributes:
        device: of all buffers.
        limit: the most bytes that all buffers and the optimizers' scratch may take (None: no limit).
        besides: returns the bytes of the optimizers' scratch.
        expect_units: raises if units of these specs would need more than the limit (`planner.expect_within`).
        most: kind -> the most bytes that were held at once.
    """

    def __init__(self, collectives: Collectives, limit: int | None) -> None:
        self._collectives, self.device = collectives, collectives.device
        self.limit = limit
        self.besides: Callable[[], int] = lambda: 0
        self.expect_units: Callable[[Sequence[UnitSpec]], None] = lambda specs: None
        self.most: dict[Kind, int] = {}
        self._buffers: list[PoolBuffer] = []
        if self.device.type == "cpu":
            keep_freed_memory()

    def buffer(self, kind: Kind, num_bytes: int, user: User, why: str = "") -> PoolBuffer:
        """A new pool buffer. Buckets lie in memory that peers can read, if the ranks share memory.

        Args:
            why: what needs the buffer, for the message.

        Raises:
            RuntimeError: all buffers together would exceed the limit.
        """
        self.expect_room(num_bytes, why)
        shared = self._collectives.transport.memory
        # One segment for good: peers map it once. Every peer would have to map a new segment in each backward.
        segment = Segment(shared, num_bytes) if kind == "buckets" and shared is not None and num_bytes else None
        self._buffers.append(PoolBuffer(self, kind, num_bytes, user, segment))
        return self._buffers[-1]

    def expect_room(self, num_bytes: int, why: str, remedy: str = "choose smaller units") -> None:
        """Raises:
        RuntimeError: `num_bytes` more would exceed the limit."""
        if self.limit is None:
            return
        needed = sum(buffer.num_bytes for buffer in self._buffers) + self.besides() + num_bytes
        if needed > self.limit:
            raise InvalidState(
                f"max_transient_bytes={self.limit}: {why} needs {num_bytes} bytes more, {needed} in all. Allow that "
                f"much, or {remedy}"
            )

    def rest(self, *kinds: Kind) -> None:
        """Give back buffers that no phase needs until the next forward; `kinds`: only buffers of these kinds."""
        held = sorted(self.held(), key=lambda buffer: buffer.kind != "buckets")
        spare = [buffer for buffer in held if not buffer.lasting]
        keep = kept(buffer.num_bytes for buffer in spare) if self.device.type == "cpu" else [False] * len(spare)
        for buffer, stays in zip(spare, keep, strict=True):
            if not stays and (buffer.kind in kinds or not kinds):
                buffer.try_to_give_back()

    def lodge(self, shards: Iterable[GradientBuffer]) -> None:
        """Move reduced gradients into idle buckets, at the beginning of a step. These buckets stay held for the next
        backward (taking them again would cost more than these copies), and their memory would add to the optimizer's
        state. The gradients leave before a bucket is used (`PoolBuffer.occupy`)."""
        too_much = sum(buffer.num_bytes for buffer in self.held()) - KEPT_IN_STEP
        moving = list(shards) if too_much > 0 else []
        for buffer in self.held() if moving else ():
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
        """Give back all buffers whose values are not needed."""
        for buffer in self.held():
            buffer.try_to_give_back()

    def clear(self) -> None:
        """Like `empty`, and forget the buffers: new ones will be made."""
        self.empty()
        self._buffers.clear()

    def tensors(self, kind: Kind) -> list[Tensor]:
        """The storages of that kind that are held."""
        return [buffer.storage for buffer in self.held() if buffer.kind == kind]

    def took(self, buffer: PoolBuffer) -> None:
        held = sum(other.num_bytes for other in self.held() if other.kind == buffer.kind)
        self.most[buffer.kind] = max(self.most.get(buffer.kind, 0), held)


class Turns:
    """The pool buffers of one kind (weights, gradients), and which occupant may use which, by a `PoolPlan`: a few
    occupants have a buffer of their own, all others take turns.

    Attributes:
        shared: queue -> the buffers in which its requests take turns.
    """

    def __init__(self, pool: Pool, kind: Kind, plan: PoolPlan, requests: Mapping[Any, Request], user: User) -> None:
        """`requests`: occupant -> its request, in the order of the plan's requests."""
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
        """The occupant's own buffer; None if it takes turns."""
        return self._given.get(occupant)

    def give(self, occupant: Any, why: str) -> PoolBuffer:
        """Make a buffer of its own for the occupant. `why`: see `Pool.buffer`."""
        num_bytes = self._requests[occupant].num_bytes
        buffer = self._given[occupant] = self._pool.buffer(self._kind, num_bytes, self._user, why)
        return buffer

    def assigned(self, occupant: Any) -> PoolBuffer:
        """A fixed buffer for the occupant: its own, or one of its queue's, assigned in turn in the order of the first
        calls."""
        if occupant not in self._given:
            queue = self._requests[occupant].queue
            turn = self._num_assigned.get(queue, 0)
            self._num_assigned[queue] = turn + 1
            self._given[occupant] = self.shared[queue][turn % len(self.shared[queue])]
        return self._given[occupant]

    def is_alone(self, occupant: Any) -> bool:
        """Whether no other occupant is assigned the same buffer."""
        given = self._given.get(occupant)
        return given is None or sum(buffer is given for buffer in self._given.values()) == 1

    def free(self, occupant: Any) -> PoolBuffer | None:
        """A buffer of the occupant's queue that has no occupant, preferably one that is held; None if all have one."""
        free = [buffer for buffer in self.shared[self._requests[occupant].queue] if buffer.occupant is None]
        return max(free, key=lambda buffer: buffer.is_held, default=None)

    def occupied_by(self, occupant: Any) -> PoolBuffer | None:
        """The buffer that has the occupant's values now; None if there is none, or if it needs no buffer."""
        request, given = self._requests.get(occupant), self._given.get(occupant)
        if request is None:
            return None
        mine = [given] if given is not None else self.shared[request.queue]
        return next((buffer for buffer in mine if buffer.occupant is occupant), None)

    def expect_room(self, occupants: Iterable[Any], why: str, remedy: str) -> None:
        """Check that all of these could have a buffer at once.

        Raises:
            RuntimeError: this would exceed the pool's limit.
        """
        without = [self._requests[occupant] for occupant in occupants if occupant not in self._given]
        more = beyond_turns(without, {queue: len(buffers) for queue, buffers in self.shared.items()})
        self._pool.expect_room(sum(request.num_bytes for request in more), why, remedy)
