"""Uneven inputs: ranks that have run out of inputs take part in the others' steps until all have run out.

    rank 0   forward  backward  step   forward  backward  step   forward  backward  step     leaves
    rank 1   forward  backward  step   leaves the loop: gather ... reduce zeros ... step     leaves
                                    ^ all ranks meet before each forward and learn which ranks go on

A rank that has run out of inputs does not run the model: it draws no random numbers, and updates no buffers. It calls
the collectives that the other ranks call, in their order (`orders.py`): it provides its shard, contributes zeros to
reductions, and updates its part of main with the others' hyper-parameters. So all ranks end with the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_process_group_store

from zeroshard.comm.orders import Orders, Voice
from zeroshard.comm.ranges import span
from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.gradients.loss_ledger import Loss
from zeroshard.ranks.backends import timeout_of
from zeroshard.ranks.groups import expect_there
from zeroshard.runtime.claims import Owner
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.prefetch_order import During
from zeroshard.storage.weights import Residency


@contextmanager
def join(
    engines: Sequence[Engine], divide_by_initial_world_size: bool, throw_on_early_termination: bool
) -> Iterator[None]:
    """See `Handle.join`."""
    if any(engine.collectives.orders is not None for engine in engines):
        raise InvalidState("join: this handle is inside of another `with handle.join():` already")
    if len({id(engine) for engine in engines}) < len(engines):
        raise InvalidValue("join: the same handle twice")
    if len({tuple(engine.collectives.mesh.world.ranks) for engine in engines}) > 1:
        raise InvalidValue("join: the handles have different ranks: all of them must have the same")
    for engine in engines:
        expect_there(engine.collectives.mesh.world.group, "join")
    for engine in engines:  # a rank without any input calls no forward, which does these
        engine.schedule.expect_to_begin()
        engine.unfreeze()
    one = Join(engines, divide_by_initial_world_size, throw_on_early_termination)
    try:
        yield
        one.follow()
    finally:
        one.close()


class Join:
    """A join of one or several handles, from entering the block to leaving it."""

    def __init__(self, engines: Sequence[Engine], divide_by_initial_world_size: bool, throw: bool) -> None:
        self._throw, self._collectives = throw, engines[0].collectives
        world = self._collectives.mesh.world
        self._orders = Orders(
            _get_process_group_store(world.group),
            self._collectives.name_of_join(),
            world.rank,
            world.ranks,
            timeout_of(world.group, self._collectives.device),
        )
        weight = 1.0 if divide_by_initial_world_size else 0.0
        self._parts: list[Part] = []
        try:
            for number, engine in enumerate(engines):
                voice = Voice(self._orders, number, self._meet_as_active)
                self._parts.append(Part(engine, self._orders, voice, weight))
        except BaseException:
            self.close()  # the first handles, if another one is refused
            raise

    def follow(self) -> None:
        """This rank has run out of inputs: take part in the others' steps until all ranks have run out."""
        self._give_meeting()
        while self._meet(active=False):
            self._follow_until_the_next_meeting()
        for part in self._parts:
            part.end()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _meet_as_active(self) -> None:
        self._give_meeting()
        self._meet(active=True)

    def _give_meeting(self) -> None:
        """Give the order to meet, with the hyper-parameters: a scheduler may have changed them after the last step; and
        with the gradients that wait for a step: others may have been discarded."""
        self._orders.give("meet", *((part.waiting(), part.hyper_parameters()) for part in self._parts))

    def _meet(self, *, active: bool) -> bool:
        """Exchange which ranks go on. Collective. Returns whether any does.

        Raises:
            RuntimeError: a rank has run out, and `throw_on_early_termination` is set.
        """
        collectives = self._collectives
        # `told`: else `exchange` would be refused while there are followers. They are in this exchange by an order.
        with self._orders.told():
            rows = collectives.exchange(
                torch.tensor([active], dtype=torch.uint8, device=collectives.device), "a forward inside of a join"
            )
        followers = [rank for rank, goes_on in enumerate(rows[:, 0].tolist()) if not goes_on]
        self._orders.meet(followers)
        for part in self._parts:
            part.meet(followers)
        if self._throw and 0 < len(followers) < len(rows):
            ranks = ", ".join(str(collectives.mesh.world.ranks[rank]) for rank in followers)
            raise InvalidState(f"join: rank {ranks} has run out of inputs (throw_on_early_termination)")
        return len(followers) < len(rows)

    def _follow_until_the_next_meeting(self) -> None:
        while (order := self._orders.take())[0] != "meet":
            what, number, *arguments = order
            with self._orders.told():
                self._parts[number].act(what, arguments)
        for part, (waiting, groups) in zip(self._parts, order[1:], strict=True):
            part.keep(waiting)
            part.set_hyper_parameters(groups)


class Part:
    """The part of one engine in a join: what its followers do, by order."""

    def __init__(self, engine: Engine, orders: Orders, voice: Voice, weight: float) -> None:
        """`weight`: the weight of a follower that has no losses in a step."""
        self._engine, self._orders, self._voice, self._weight = engine, orders, voice, weight
        self._units = {unit.name: unit for unit in engine.units}
        self._optimizers: list[Owner] = engine.claims.owners()
        for number, optimizer in enumerate(self._optimizers):
            _expect_tellable(optimizer)
            voice.names[id(optimizer.agreement)] = number
            if optimizer.agreement.losses.default is not None:
                voice.scalers[id(optimizer.agreement.losses.default)] = number
        self._hooks = [hook for number in range(len(self._optimizers)) for hook in self._watch(number)]
        engine.collectives.orders = voice

    def end(self) -> None:
        """All ranks have run out of inputs. They have run different forwards, and would gather ahead differently."""
        self._engine.schedule.begin_alike()

    def close(self) -> None:
        self._engine.collectives.orders = None
        self._engine.ledger.of_some_ranks = False
        for hook in self._hooks:
            hook.remove()

    def meet(self, followers: Sequence[int]) -> None:
        """These ranks have run out of inputs."""
        self._engine.ledger.of_some_ranks = bool(followers) and self._weight == 0.0

    def waiting(self) -> dict[str, list[int]]:
        """Slots whose gradients wait for a step, by the names of their units."""
        self._engine.reducer.notice()
        return {unit.name: sorted(unit.grads.waiting) for unit in self._engine.reducer.order if unit.grads.waiting}

    def keep(self, waiting: Mapping[str, Sequence[int]]) -> None:
        """Discard the gradients of all other slots. (This rank would add those of the next backward to them.)"""
        reducer = self._engine.reducer
        for unit in reducer.order:
            gone = unit.grads.waiting - set(waiting.get(unit.name, ()))
            reducer.visible.forget(unit, gone)
            reducer.grads[unit].consume(gone)
        if not reducer.has_gradients():
            self._engine.ledger.forget_losses()
        reducer.forget_losses()

    def hyper_parameters(self) -> list[Any]:
        """The hyper-parameters of each optimizer."""
        return [optimizer.groups.hyper_parameters() for optimizer in self._optimizers]

    def set_hyper_parameters(self, groups: Sequence[Any]) -> None:
        for optimizer, of_one in zip(self._optimizers, groups, strict=True):
            optimizer.groups.set_hyper_parameters(of_one)

    def _watch(self, number: int) -> Sequence[Any]:
        optimizer = self._optimizers[number]

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._orders.followers and (len(args) > 1 or any(value is not None for value in kwargs.values())):
                raise InvalidState(
                    "join: step(closure) cannot be followed, nor further arguments: call forward and backward before "
                    "step()"
                )
            self._engine.reducer.notice()
            self._voice.expect_no_edits(self._engine.reducer.visible.version)
            self._voice.give("step", number, optimizer.step_values(), optimizer.agreement.situation(self._voice))
            self._orders.is_told = True

        def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._orders.is_told = False
            self._voice.note_step(self._engine.reducer.visible.version)

        return optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)

    # Following -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, what: str, arguments: Sequence[Any]) -> None:
        """Carry out an order: it has the name of one of the methods below."""
        with span(f"join: {what}"):
            getattr(self, f"_{what}")(*arguments)

    def _gather(self, unit: str, during: During) -> None:
        """Take part in a gather, as a rank that runs the model does."""
        self._engine.reducer.read_peers()
        weights = self._units[unit].weights
        if weights.state is not Residency.SHARDED:
            weights.drop()
        self._engine.gatherer.start(self._units[unit], during)

    def _backward(self, waiting: list[str], scale: float, weighted: bool) -> None:
        """`waiting`: units whose gradients are added to existing ones; those of all others are discarded. `scale`: of
        the loss."""
        reducer = self._engine.reducer
        reducer.keep_only(waiting)
        if not waiting:
            # This rank's last micro-batches may have left losses whose gradients the others have discarded.
            self._engine.ledger.forget_losses()
        with self._engine.ledger.backward(Loss(scale, weighted)):
            reducer.begin_backward()

    def _open(self, unit: str) -> None:
        """Open a bucket. This may wait for earlier reductions, which the other ranks wait for as well."""
        self._engine.reducer.read_peers()
        self._engine.reducer.open(self._units[unit])

    def _reduce(self, unit: str) -> None:
        self._engine.reducer.reduce(self._units[unit])

    def _wait(self) -> None:
        self._engine.reducer.wait_for_started()

    def _end(self) -> None:
        self._engine.reducer.end_following()

    def _discard(self, unit: str, slots: list[int]) -> None:
        """The others have removed gradients from `p.grad`, by `model.zero_grad()` for example."""
        for slot in slots:
            self._units[unit].parameters[slot].grad = None
        self._engine.reducer.notice()

    def _agree(self, optimizer: int, norm_type: float, situation: dict[str, Any]) -> None:
        self._come_into(situation, self._optimizers[optimizer])
        self._optimizers[optimizer]._agree_as(norm_type)

    def _step(self, optimizer: int, values: dict[str, Any], situation: dict[str, Any]) -> None:
        self._come_into(situation, self._optimizers[optimizer])
        self._optimizers[optimizer]._step_as(values)

    def _come_into(self, situation: dict[str, Any], optimizer: Owner) -> None:
        """Wait for gathers in flight, and set gradients, loss scales and weights as on a rank that has inputs."""
        for unit in self._engine.units:
            if unit.weights.state is Residency.GATHERING:
                unit.weights.arrive()
        self._engine.reducer.keep_only(situation["waiting"])
        scalers = [self._optimizers[number].agreement.losses.default for number in situation["scalers"]]
        weight = 0.0 if situation["weighted"] else self._weight
        optimizer.agreement.losses.use_as([scaler for scaler in scalers if scaler is not None], weight)
        optimizer.agreement.used_up = situation["used_up"]


def _expect_tellable(optimizer: Owner) -> None:
    """Raises:
    ValueError: a hyper-parameter that cannot be sent as JSON in an order."""
    for group in optimizer.groups.hyper_parameters():
        for key, value in group.items():
            try:
                json.dumps(value)
            except TypeError:
                raise InvalidValue(
                    f"join: the hyper-parameter {key!r} is a {type(value).__name__}, and ranks that have run out of "
                    "inputs step with what the others tell them: only numbers, texts and lists of these can be told"
                ) from None
