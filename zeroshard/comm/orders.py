"""Orders tell ranks that have run out of inputs which collective comes next (`join.py`).

The *leader*, one of the ranks with inputs, writes an order to the store before each collective. The *followers*, the
ranks without inputs, read the orders and take part. Collectives for which there is no order raise while there are
followers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from zeroshard.errors import InvalidState
from zeroshard.failures import watch
from zeroshard.failures.bell import Pauses
from zeroshard.failures.positions import HERE, Wait
from zeroshard.ranks.clock import Patience


class Orders:
    """The orders of one join, on one rank.

    Attributes:
        followers: ranks (of the mesh) that have run out of inputs, as of the last meeting.
        leader: the first rank that still has inputs; -1 if there is none.
        rank: this rank.
        is_told: whether everything is part of an order that has been given, and nothing gives further orders.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        """`name`: the same on all ranks, and different for each join. `ranks`: global ranks, by rank of the mesh."""
        self.rank, self.followers, self.leader = rank, tuple[int, ...](), -1
        self._store, self._name, self._ranks = watch.attended(PrefixStore(f"zeroshard/join/{name}", store)), name, ranks
        self._timeout = timeout.total_seconds()
        self._next = 0  # index in the current list of orders
        self._lists = 0
        self.is_told = False

    def meet(self, followers: Sequence[int]) -> None:
        """Called on every rank after all ranks have met: sets the followers and begins a new list of orders."""
        # Delete old orders only here: a slow follower may still be reading them, and its coming to this meeting shows
        # that it has read them all.
        if self.rank == self.leader:
            for number in range(self._next):
                self._store.delete_key(self._key(number))
        self.followers = tuple(followers)
        self.leader = next((rank for rank in range(len(self._ranks)) if rank not in followers), -1)
        self._lists, self._next = self._lists + 1, 0

    def give(self, what: str, *arguments: Any) -> None:
        """Write an order. The leader calls it before it does `what` itself. No effect on other ranks, and inside
        `told`."""
        if self.followers and self.rank == self.leader and not self.is_told:
            self._store.set(self._key(self._next), json.dumps([what, *arguments]))
            self._next += 1

    def take(self) -> list[Any]:
        """Wait for the next order, on a follower.

        Raises:
            LostPeer: the watch has lost the leader.
            RuntimeError: without a watch: no order came within the timeout of a collective.
        """
        wait = Wait(
            f"orders {self._name}", self._next, (self._ranks[self.leader],), "a join, for the others' next step"
        )
        pauses, patience = Pauses(None, 0.01), Patience(self._timeout)
        with HERE.waiting(wait):
            while not self._store.check([self._key(self._next)]):
                pauses.wait(self._timeout)
                current = watch.current()
                if current is not None:
                    current.expect_alive([self._ranks[self.leader]])
                elif patience.left <= 0:
                    raise InvalidState(
                        f"join: rank {self._ranks[self.leader]} has inputs left, and has sent no order for "
                        f"{self._timeout:.0f} s (zeroshard.init() would report the reason)"
                    )
        order: list[Any] = json.loads(self._store.get(self._key(self._next)))
        self._next += 1
        return order

    def _key(self, number: int) -> str:
        return f"{self._lists}/{number}"

    @contextmanager
    def told(self) -> Iterator[None]:
        """Sets `is_told` inside."""
        before, self.is_told = self.is_told, True
        try:
            yield
        finally:
            self.is_told = before

    @property
    def speaks(self) -> bool:
        """Whether there are followers, and the next collective is not part of an order that has been given."""
        return bool(self.followers) and not self.is_told

    def refuse(self, what: str) -> None:
        """Raises:
        RuntimeError: there are followers, which would not take part in `what`."""
        if self.speaks:
            ranks = ", ".join(str(self._ranks[rank]) for rank in self.followers)
            raise InvalidState(
                f"{what} inside `with handle.join():`, while rank {ranks} has run out of inputs and takes part in "
                "forward, backward, clip_grad_norm_ and step only: do it after the join, or before any rank has run out"
            )


class Voice:
    """Gives the orders of one handle in a join (which may have several): each order carries the handle's number.

    Attributes:
        names: id of an optimizer's agreement -> its number, the same on all ranks.
        scalers: id of an optimizer's loss scaler -> the number of the optimizer.
        version: the version of the reduced gradients when backward ended.
        before_forward: called before each forward of the model.
    """

    def __init__(self, orders: Orders, number: int, before_forward: Callable[[], None]) -> None:
        self._orders, self._number = orders, number
        self.names: dict[int, int] = {}
        self.scalers: dict[int, int] = {}
        self.version: object = None
        self.before_forward = before_forward

    def give(self, what: str, *arguments: Any) -> None:
        self._orders.give(what, self._number, *arguments)

    def told(self) -> AbstractContextManager[None]:
        return self._orders.told()

    def refuse(self, what: str) -> None:
        self._orders.refuse(what)

    def scalers_used(self, used: Sequence[object]) -> list[int]:
        """The numbers of these loss scalers.

        Raises:
            RuntimeError: a scaler belongs to no optimizer: followers do not know it.
        """
        if any(id(scaler) not in self.scalers for scaler in used):
            raise InvalidState(
                "join: a loss has a scaler of its own, which a rank that runs out of inputs does not know: scale "
                "losses by the optimizer's (loss_scale=, and backward(loss) without scaler=)"
            )
        return [self.scalers[id(scaler)] for scaler in used]

    def note_step(self, version: object) -> None:
        """A step has consumed its gradients, on all ranks. The other optimizers' gradients have not been edited, so
        `version` is the new reference."""
        if self.version is not None:
            self.version = version

    def expect_no_edits(self, version: object) -> None:
        """Raises:
        RuntimeError: there are followers, and reduced gradients were edited since backward: a follower has not made
        the same edit."""
        if self._orders.speaks and self.version not in (None, version):
            raise InvalidState(
                "join: p.grad has been changed, and a rank that has run out of inputs cannot do the same: use "
                "optimizer.clip_grad_norm_ or optimizer.clip_grad_value_, and zero_grad() to discard gradients"
            )
