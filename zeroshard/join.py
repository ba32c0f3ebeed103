"""Inputs for different numbers of steps: ranks that have run out take part, with nothing of their own, until all have.

    rank 0   forward  backward  step   forward  backward  step   forward  backward  step     leaves
    rank 1   forward  backward  step   leaves the loop: gather ... reduce zeros ... step     leaves
                                    ^ all ranks meet before each forward: who goes on?

A rank that has run out computes nothing: it has no inputs, and random numbers, buffers and hooks are not its own affair
any more. It does what the collectives of the others need, in their order (`orders.py`): gives its shard, reduces zeros,
and steps its part of main with the others' hyper-parameters. So all ranks end with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import _get_process_group_store

from zeroshard.backends import timeout_of
from zeroshard.collectives import Collectives
from zeroshard.gather import Gatherer
from zeroshard.orders import Orders
from zeroshard.reduce import Reducer
from zeroshard.unit import Unit
from zeroshard.weights import Residency


class Stepping(Protocol):
    """An optimizer, as a join sees it."""

    @property
    def agreement(self) -> object: ...
    def hyper_parameters(self) -> list[dict[str, Any]]: ...
    def take_hyper_parameters(self, groups: Sequence[Mapping[str, Any]]) -> None: ...
    def what_steps(self) -> dict[str, Any]: ...
    def step_as(self, values: Mapping[str, Any]) -> None: ...
    def agree_as(self, norm_type: float, weight: float) -> None: ...
    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any: ...
    def register_step_post_hook(self, hook: Callable[..., None]) -> Any: ...


class Joined(Protocol):
    """A handle, as a join sees it."""

    units: tuple[Unit, ...]
    collectives: Collectives
    gatherer: Gatherer
    reducer: Reducer

    def owners(self) -> list[Any]: ...


@contextmanager
def join(handle: Joined, divide_by_initial_world_size: bool, throw_on_early_termination: bool) -> Iterator[None]:
    """See `Handle.join`."""
    if handle.collectives.orders is not None:
        raise RuntimeError("join: this handle is inside of another `with handle.join():` already")
    one = Join(handle, divide_by_initial_world_size, throw_on_early_termination)
    try:
        yield
        one.follow()
    finally:
        one.close()


class Join:
    """Of one handle, from entering the block to leaving it."""

    def __init__(self, handle: Joined, divide_by_initial_world_size: bool, throw: bool) -> None:
        self._handle, self._throw = handle, throw
        self._weight = 1.0 if divide_by_initial_world_size else 0.0
        self._units = {unit.name: unit for unit in handle.units}
        self._optimizers: list[Stepping] = handle.owners()
        for optimizer in self._optimizers:
            optimizer.what_steps()  # raises where nobody could follow
        collectives = handle.collectives
        world = collectives.mesh.world
        self._orders = Orders(
            _get_process_group_store(world.group),
            collectives.name_of_join(),
            world.rank,
            world.ranks,
            timeout_of(world.group, collectives.device),
        )
        self._orders.before_forward = self._meet_as_active
        collectives.orders = self._orders
        self._hooks = [hook for optimizer in self._optimizers for hook in self._watch(optimizer)]

    def follow(self) -> None:
        """This rank has run out of inputs: take part until all have."""
        self._give_meeting()
        while self._meet(active=False):
            self._follow_until_the_next_meeting()

    def close(self) -> None:
        self._handle.collectives.orders = None
        for hook in self._hooks:
            hook.remove()

    # Meeting ---------------------------------------------------------------------------------------------------------

    def _meet_as_active(self) -> None:
        self._give_meeting()
        self._meet(active=True)

    def _give_meeting(self) -> None:
        """With the hyper-parameters, which a scheduler may have changed after the last step."""
        self._orders.give("meet", *(optimizer.hyper_parameters() for optimizer in self._optimizers))

    def _meet(self, *, active: bool) -> bool:
        """Who goes on? Collective. False: nobody.

        Raises:
            RuntimeError: a rank has run out, and that was not to be.
        """
        collectives = self._handle.collectives
        with self._orders.told():
            rows = collectives.exchange(torch.tensor([active], dtype=torch.uint8, device=collectives.device))
        followers = [rank for rank, goes_on in enumerate(rows[:, 0].tolist()) if not goes_on]
        self._orders.meet(followers)
        if self._throw and 0 < len(followers) < len(rows):
            ranks = ", ".join(str(collectives.mesh.world.ranks[rank]) for rank in followers)
            raise RuntimeError(f"join: rank {ranks} has run out of inputs (throw_on_early_termination)")
        return len(followers) < len(rows)

    def _watch(self, optimizer: Stepping) -> Sequence[Any]:
        index = self._optimizers.index(optimizer)

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._orders.followers and (len(args) > 1 or kwargs.get("closure") is not None):
                raise RuntimeError("join: step(closure) cannot be followed: call forward and backward before step()")
            self._orders.expect_no_edits(self._handle.reducer.visible.version)
            self._orders.give("step", index, optimizer.what_steps())
            self._orders.begin_told()

        def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._orders.end_told()

        self._orders.names[id(optimizer.agreement)] = index
        return optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)

    # Following -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _follow_until_the_next_meeting(self) -> None:
        acts: dict[str, Callable[..., None]] = {
            "gather": self._gather,
            "backward": self._begin_backward,
            "open": self._open,
            "reduce": self._reduce,
            "end": self._end_backward,
            "agree": self._agree,
            "step": self._step,
        }
        while (order := self._orders.take())[0] != "meet":
            with self._orders.told():
                acts[order[0]](*order[1:])
        for optimizer, groups in zip(self._optimizers, order[1:], strict=True):
            optimizer.take_hyper_parameters(groups)

    def _gather(self, unit: str, phase: str) -> None:
        """Give the own shard; what arrives goes where it would."""
        weights = self._units[unit].weights
        if weights.state is not Residency.SHARDED:
            weights.drop()
        self._handle.gatherer.start(self._units[unit], phase)

    def _begin_backward(self, waiting: list[str]) -> None:
        """`waiting`: units whose gradients add to what is there; all others begin anew."""
        for unit in self._handle.reducer.order:
            if unit.name not in waiting and unit.grads is not None:
                unit.grads.consume(set(unit.grads.waiting))
        self._handle.reducer.begin_backward()

    def _open(self, unit: str) -> None:
        """A bucket; the others may wait until this rank has read the one before."""
        self._handle.reducer.open_empty(self._units[unit])

    def _reduce(self, unit: str) -> None:
        self._handle.reducer.reduce_next(self._units[unit])

    def _end_backward(self) -> None:
        self._handle.reducer.end_following()

    def _agree(self, optimizer: int, norm_type: float, weighted: bool) -> None:
        self._settle()
        self._optimizers[optimizer].agree_as(norm_type, self._weight_of(weighted))

    def _step(self, optimizer: int, values: dict[str, Any]) -> None:
        self._settle()
        self._optimizers[optimizer].step_as({**values, "weight": self._weight_of(values["weighted"])})

    def _weight_of(self, weighted: bool) -> float:
        return 0.0 if weighted else self._weight

    def _settle(self) -> None:
        for unit in self._handle.units:
            if unit.weights.state is Residency.GATHERING:
                unit.weights.arrive()
