"""The agreement of all ranks before a step: all are ready, the norm, which slots have gradients, whether to skip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.orders import Voice
from zeroshard.comm.packets import Unread
from zeroshard.errors import InvalidState, InvalidValue, NotFinite
from zeroshard.gradients.settings import Settings, SettingsReport, plain
from zeroshard.gradients.visible import doubtful
from zeroshard.loss_scale import LossScaler
from zeroshard.model.absent import as_tensors
from zeroshard.placement import REPLICATED
from zeroshard.runtime.engine import Engine
from zeroshard.step.ahead import Ahead, Verdict
from zeroshard.step.assignment import Options
from zeroshard.step.clipping import CHANGED_SINCE, Clipping
from zeroshard.step.control import (
    CONTROL,
    Contribution,
    Control,
    Status,
    ask,
    exchange_norms,
)
from zeroshard.step.own_norms import OwnNorms
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step.same_gradients import SameGradients
from zeroshard.step.same_weights import SameWeights
from zeroshard.step.steppers import Steppers
from zeroshard.storage.gradients import GradState
from zeroshard.storage.unit import Unit

NonFinite = Literal["raise", "skip", "ignore"]


ByHand = dict[tuple[int, int], Tensor]
"""(index of the unit, slot) -> this rank's gradient, which the user's code has set."""


@dataclass(eq=False)
class Asked:
    """A control exchange that has begun, on this rank.

    Attributes:
        about: equal as long as the gradients are those of this exchange, and no weights have been read since (a rank
            may still read its peers' memory then, which a step writes: so the ranks agree anew).
        settings: the first ones are compared; then those of further calls before the step. None: this rank is a
            follower.
        status: of this rank, as told to the others.
        flags: which slots have gradients on this rank.
        gradients: (param group, gradient) of the own shard.
        verdict: what the device concludes, if the step goes ahead.
        is_ahead: whether the update has been queued before the answer.
        control: the answer, once it has come.
    """

    about: object
    settings: list[Settings | None]
    norm_type: float
    by_hand: ByHand
    question: Unread[Control]
    status: Status
    flags: Sequence[bool]
    gradients: Sequence[tuple[int, Tensor]]
    verdict: Verdict | None = None
    is_ahead: bool = False
    control: Control | None = None


class Agreement:
    """The agreement of one optimizer with its counterparts on the other ranks.

    Attributes:
        follows: whether this rank is a follower of a join, and carries out orders (`runtime/join.py`).
        half_done: whether an update has raised, so that only part of main is updated.
        losses: the losses since the last step (`loss_ledger.py`).
        ahead: whether updates go ahead of the answer.
        own_norms: of this rank's gradients.
        clipping: the clips requested for the next step.
        same: samples of the gradients, if there are several ranks, and every rank has them in full; else None.
        used_up: whether a step has consumed the gradients, and `zero_grad` has not been called since.
    """

    def __init__(
        self,
        engine: Engine,
        groups: ParamGroups,
        steppers: Steppers,
        scaler: LossScaler | None,
        non_finite: NonFinite | None,
        skip_norm_above: float | None,
    ) -> None:
        if non_finite not in ("raise", "skip", "ignore", None):
            raise InvalidValue(f"non_finite must be 'raise', 'skip' or 'ignore', found {non_finite!r}")
        self.follows = self.half_done = self.used_up = False
        self._engine, self._groups, self._steppers = engine, groups, steppers
        self.losses = engine.ledger.open_account(scaler)
        are_equal = engine.plan.mean is REPLICATED and engine.collectives.mesh.world.size > 1
        self.same = SameGradients(engine.collectives) if are_equal else None
        self._non_finite, self._skip_norm_above = non_finite, _limit(skip_norm_above)
        self._reported, self.clipping = SettingsReport(), Clipping()
        self.ahead, self.own_norms = Ahead(engine, groups, steppers), OwnNorms(engine, groups, steppers)
        engine.collectives.messages.introduce(_AGAIN, updates=True)
        self._asked: Asked | None = None

    @property
    def units(self) -> dict[Unit, set[int]]:
        """The slots of each unit that are this optimizer's, in the handle's order."""
        return self._steppers.units

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, this rank carries out an order, and has no settings of its own to compare."""
        self.follows = True
        try:
            yield
        finally:
            self.follows = False

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the update of main. After an error inside, it is unknown how much of main is updated."""
        # Not in `finally`: it must stay True if the body raises.
        self.half_done = True
        yield
        self.half_done = False

    def ask(self, arguments: Options, norm_type: float | None = None) -> None:
        """Begin the control exchange: once per step and type of norm. (Repeated for external gradients in `p.grad`,
        whose changes cannot be noticed.) Collective; waits for the device only in a join.

        Args:
            arguments: of the step.
            norm_type: None: the last one used in this step, or 2.

        Raises:
            RuntimeError, ValueError: as `answer`.
        """
        self._ask(None if self.follows else self._settings(arguments), norm_type, needs_host=self.clipping.needs_host)

    def _ask(self, settings: Settings | None, norm_type: float | None, *, needs_host: bool) -> None:
        """`settings`: of this rank; None: it is a follower."""
        if norm_type is None:
            norm_type = self._asked.norm_type if self._asked else 2.0
        by_hand = self._engine.reducer.notice()
        if self._asked and self._asked.about == self._about(norm_type, by_hand):
            self._asked.settings.append(settings)
            return
        if self._asked:
            if self._asked.control is None:
                self.answer()  # a clip depends on the norm before the gradients have changed
            _meet_again(self._engine.collectives, self.units)
        self._reported.begin(settings)
        try:
            with self._told(norm_type):
                self._asked = self._begin(settings, norm_type, by_hand, needs_host=needs_host)
                if self._engine.collectives.orders is not None:
                    self.answer()
        finally:
            self._engine.reducer.visible.edits.clear()  # the settings have a copy

    def answer(self) -> Control:
        """The answer to `ask`. Waits once for the device, and collective if it is not simply yes.

        Raises:
            RuntimeError: on all ranks, if one is not ready.
            ValueError: the weights of all losses are 0.
        """
        asked, self._asked = self._asked, None  # after an error, the next step asks again
        assert asked is not None, "`ask` was called"
        if asked.control is None:
            if self.ahead.goes and not asked.is_ahead:
                self._steppers.take_part(self.ahead.active)  # other ranks may go ahead
            control = asked.question.read()
            self.clipping.on_device &= control.finite and Status.BY_HAND not in control.status
            if not (control.finite or math.isinf(asked.norm_type)):
                # Because of an element, or because the fp32 sum of powers overflowed? fp64 norms tell.
                norms = self.own_norms.exactly_of(asked.gradients, asked.norm_type)
                control = exchange_norms(self._engine.collectives, control, norms)
            if Status.BY_HAND in control.status and not _REFUSED.intersection(control.status):
                self._reduce_by_hand(asked.by_hand)
                self.ahead.forget()
                self._ask(asked.settings[-1], asked.norm_type, needs_host=True)
                return self.answer()
            self._expect_ready(control, asked.status)
            asked.control, asked.gradients, asked.verdict = control, (), None  # a step frees gradients unit by unit
        for settings in asked.settings[1:]:
            self._reported.went_on_with(settings)
        del asked.settings[1:]
        self._asked = asked
        if self.clipping.awaits_norm:
            self.limit()
        return asked.control

    def _reduce_by_hand(self, terms: ByHand) -> None:
        # First: a clip of another optimizer that waits for its norm reduces these, too, and clips those that are its.
        self._engine.reducer.visible.apply_clips()
        waiting = self._engine.reducer.notice()
        self._engine.reducer.reduce_by_hand({at: term for at, term in terms.items() if at in waiting})

    def limit(self) -> float:
        """Clip by the norm in the last answer. Returns it: of the mean gradient, as earlier clips have left it."""
        assert self._asked is not None and self._asked.control is not None, "`answer` was called"
        control = self._asked.control
        norm = (control.norm if control.norm_to_clip is None else control.norm_to_clip) * self.mean_factor(control)
        self.clipping.limit(norm)
        return norm

    def ask_anew(self) -> None:
        """The next `ask` begins an exchange, also if no gradient is known to have changed."""
        self.own_norms.forget()
        if self._asked is not None:
            self._asked.about = None

    @contextmanager
    def _told(self, norm_type: float) -> Iterator[None]:
        """In a join, order the followers to take part in the control exchange that runs inside."""
        orders = self._engine.collectives.orders
        if orders is None:
            yield
            return
        self.ahead.forget()  # on leaders and followers alike: what they remember must stay equal
        if id(self) not in orders.names:
            raise InvalidState("join: build the optimizer before `with handle.join():`")
        orders.expect_no_edits(self._engine.reducer.version)
        orders.give("agree", orders.names[id(self)], norm_type, self.situation(orders))
        with orders.told():
            yield

    def situation(self, orders: Voice) -> dict[str, Any]:
        """What a follower of a join must know before it agrees: see `join.Part`."""
        return {
            "weighted": self.losses.weight is not None,
            "scalers": orders.scalers_used(self.losses.used),
            "waiting": self._engine.reducer.waiting(),
            "used_up": self.used_up,
        }

    def _begin(self, settings: Settings | None, norm_type: float, by_hand: ByHand, *, needs_host: bool) -> Asked:
        status = self._status(by_hand=bool(by_hand))
        flags = [flag for unit in self.units for flag in unit.have_gradients()]
        # A gather in flight would mix old weights and those that the step writes.
        self._engine.gatherer.finish()
        weights = SameWeights(self._engine)
        weights.look()
        if self.same is not None and status is Status.READY:
            self.same.look(self.units)
        gradients = list(self._steppers.own_gradients()) if status is Status.READY else []
        overflows = self.losses.overflows()
        if status is Status.READY:
            is_unscaled = self.losses.default is not None and not self.losses.used  # a step then raises
            needs_host |= overflows is not None or is_unscaled or self._skip_norm_above is not None
            status = self.ahead.status(flags, norm_type, needs_host=needs_host)
        contribution = Contribution(
            status,
            1.0 if self.losses.weight is None else self.losses.weight,
            self.own_norms.of(gradients, norm_type),
            [*flags, *[False] * len(self.losses.used)],
            self._reported,
            overflows,
            self.same,
            weights,
        )
        question = ask(self._engine.collectives, contribution)
        about = self._about(norm_type, by_hand)
        return Asked(about, [settings], norm_type, by_hand, question, status, flags, gradients)

    def _about(self, norm_type: float, by_hand: ByHand) -> object:
        addresses = {at: _address(gradient) for at, gradient in by_hand.items()}
        return self._engine.reducer.version, norm_type, addresses, self._engine.collectives.num_reads

    # Ahead of the answer ---------------------------------------------------------------------------------------------

    def verdict(self, *, updates: bool = False) -> Verdict | None:
        """What the device concludes from the exchange that `ask` has begun; None if the ranks wait for the answer.
        `updates`: None as well if this rank cannot go ahead."""
        asked, world = self._asked, self._engine.collectives.mesh.world
        if asked is None or asked.control is not None or not self.ahead.goes:
            return None
        if (updates or world.size == 1) and asked.status is not Status.READY:
            return None
        if asked.verdict is None:
            scale, num_groups = self._engine.ledger.scale, len(self._groups.lists)
            asked.verdict = Verdict.of(asked.question.on_device, self.losses.weight, scale, num_groups, world.size)
        return asked.verdict

    def went_ahead(self) -> None:
        """The update has been queued."""
        assert self._asked is not None, "`verdict` was called"
        self._asked.is_ahead = True

    @property
    def is_updated(self) -> bool:
        """Whether an update that was queued before the answer has taken effect."""
        asked = self._asked
        return asked is not None and asked.is_ahead and asked.control is not None and asked.control.holds_ahead

    def learn(self, control: Control, active: dict[Unit, list[bool]]) -> None:
        """After an update: whether the next one can go ahead."""
        assert self._asked is not None, "`ask` was called"
        self.ahead.learn(control, active, self._asked.flags)

    def _expect_ready(self, control: Control, of_this_rank: Status) -> None:
        """Raises:
        RuntimeError, ValueError: as `answer`."""
        for status, message in _NOT_READY.items() if not control.is_idle else ():
            if status in control.status:
                mine = of_this_rank, self._engine.reducer.visible.doubtful
                found = self._engine.collectives.by_rank(mine, CONTROL)
                ranks = [rank for rank, (of_rank, _) in found.items() if of_rank == status]
                message = message.replace("{name}", str(found[ranks[0]][1]))
                raise InvalidState(f"step on rank {', '.join(map(str, ranks))}: {message}")
        if control.weight == 0:
            raise InvalidValue("the weights of all losses of this step, on all ranks, are 0: there is no mean to take")

    def _settings(self, arguments: Options) -> Settings:
        """The settings of this step, which must be the same on all ranks."""
        own = (
            ("non_finite", self._non_finite),
            ("skip_norm_above", plain(self._skip_norm_above)),
            ("the losses of this step have weights", self.losses.weight is not None),
            ("the loss scales of this step", tuple(map(repr, self.losses.used))),
        )
        given = (("the arguments of step", plain(arguments)),) if arguments else ()
        return Settings(
            self._groups.settings(),
            self._groups.members(),
            (*own, *self.clipping.settings(), *given),
            self._engine.reducer.visible.edited(),
        )

    def forget(self) -> None:
        """Forget the last control exchange, and the clips: its gradients have been consumed."""
        self._asked, self.clipping = None, Clipping()
        self.own_norms.forget()

    def _status(self, *, by_hand: bool) -> Status:
        if self.half_done:
            return Status.HALF_DONE
        with as_tensors():
            frozen = [p for unit in self._engine.units if not unit.trainable for p in unit.parameters]
            unfrozen = {id(p) for p in frozen if p.grad is not None}
        # Also parameters that would join this optimizer once they require grad.
        if unfrozen and not unfrozen.isdisjoint(map(id, (*self._groups.parameters(), *self._groups.adoptable()))):
            return Status.UNFROZEN
        if self._engine.schedule.has_raised:
            return Status.RAISED
        if self._engine.reducer.visible.doubtful is not None:
            return Status.DOUBTFUL
        if any(unit.grads.state is GradState.PARTIAL for unit in self.units):
            return Status.NOT_REDUCED
        if self.clipping.is_late:
            return Status.CHANGED
        if by_hand:
            return Status.BY_HAND
        if any(unit.grads.waiting & slots for unit, slots in self.units.items()):
            return Status.READY
        return Status.USED_UP if self.used_up else Status.NO_GRADIENTS

    # Conclusions from a control exchange -----------------------------------------------------------------------------

    def mean_factor(self, control: Control) -> float:
        """The factor from the buffers' values (means over ranks of scaled, weighted losses) to the mean gradient."""
        return control.num_ranks / (control.weight * self._engine.ledger.scale)

    def active(self, control: Control) -> dict[Unit, list[bool]]:
        """The slots that have a gradient on any rank."""
        active, position = {}, 0
        for unit in self.units:
            active[unit] = list(control.present[position : position + len(unit.parameters)])
            position += len(unit.parameters)
        return active

    def overflows(self, control: Control) -> list[bool]:
        """For each scaler in use, whether any rank saw its loss overflow."""
        return list(control.present[sum(len(unit.parameters) for unit in self.units) :])

    def stops_at(self, control: Control) -> bool:
        """Whether a step skips, or raises, as the gradient is not finite."""
        return not control.finite and self._non_finite != "ignore"

    def is_skipped(self, control: Control, norm: float) -> bool:
        """Whether the step changes nothing.

        Raises:
            RuntimeError: the gradient is not finite, and such steps are not skipped, or too many were in a row.
        """
        if not self.stops_at(control):
            return self._skip_norm_above is not None and not norm <= self._skip_norm_above
        policy = self._non_finite or ("skip" if self.losses.used else "raise")
        exhausted = self.losses.exhausted(self.overflows(control))
        if policy == "raise" or exhausted is not None:
            many = f" {exhausted} times in a row" if exhausted is not None else ""
            raise NotFinite(f"the gradient was not finite{many}: {self._name_nonfinite()}. Nothing has been updated")
        return True

    def _name_nonfinite(self) -> str:
        """The origin of a gradient that is not finite, in words, as far as it is known. Two exchanges, on the way to an
        error. Collective."""
        collectives = self._engine.collectives
        mine = [
            (-unit.index, fragment.index, fragment.slot.name)  # in the order of backward
            for unit in self.units
            for fragment in unit.layout.fragments_in(unit.own_shard())
            if not all(torch.isfinite(view).all() for view in unit.grads.views(fragment.world))
        ]
        reduced = sorted({tuple(place) for places in collectives.exchange_objects(mine) for place in places})
        names = [name for *_, name in reduced]
        reducer = self._engine.reducer
        reducer.origins.take(reducer.version)
        # None is left if a clip has bounded it.
        of_units = set(names) or {slot.name for unit in self.units for slot in unit.layout.slots}
        found = collectives.by_rank(reducer.origins.first(of_units))
        origins = [(*origin, rank) for rank, origin in found.items() if origin is not None]
        if origins:
            first = min(micro_batch for micro_batch, *_ in origins)
            return "; ".join(f"{what} on rank {rank}" for micro_batch, what, rank in origins if micro_batch == first)
        return f"in the sum over ranks of {', '.join(names[:5]) or 'some parameter'}{' and others' * (len(names) > 5)}"


def _limit(skip_norm_above: float | None) -> float | None:
    """Raises:
    ValueError: it is no number above 0."""
    if skip_norm_above is not None and (isinstance(skip_norm_above, (bool, str)) or not skip_norm_above > 0):
        raise InvalidValue(
            f"skip_norm_above must be a number above 0, found {skip_norm_above!r}: every step would be skipped. None, "
            "or leaving it out, skips none"
        )
    return skip_norm_above


def _address(gradient: Tensor) -> int:
    """Where the values of a gradient lie, which may be sparse. (Not its version: `detach` shares it.)"""
    if gradient.layout is not torch.strided:
        gradient = gradient._values() if gradient.is_sparse else gradient.values()
    return gradient.data_ptr()


def _meet_again(collectives: Collectives, units: Iterable[Unit]) -> None:
    """Before a second exchange of one step. A rank whose gradients have not changed does not come here but steps: then
    it and this rank raise. (With external gradients all ranks always come here.)"""
    if collectives.orders is None and not any(unit.grads.is_external for unit in units):
        collectives.meet_at(_AGAIN)


_AGAIN = "clip_grad_norm_ or step with gradients that have changed since clip_grad_norm_ (change them on every rank)"

_REFUSED = {Status.HALF_DONE, Status.UNFROZEN, Status.RAISED, Status.DOUBTFUL, Status.NOT_REDUCED}
"""If a rank has one of these, the step raises, also if other ranks have gradients set by hand."""

_NOT_READY = {
    Status.HALF_DONE: "an earlier update raised half way, so some weights are one step ahead of others. Load "
    "weights and optimizer state again (a checkpoint, or load_full_state_dict and load_state_dict)",
    Status.UNFROZEN: "a parameter has a gradient that was frozen when the model was called last. Let it require grad "
    "before the model (not only a part of it) is called; under OPTIMIZER_ONLY before the optimizer is built",
    Status.RAISED: "the last backward has raised, so its gradients are incomplete. Call optimizer.zero_grad() after "
    "such an error, and begin with the first micro-batch of the step again",
    Status.DOUBTFUL: doubtful("{name}"),
    Status.NOT_REDUCED: "gradients were accumulated under no_sync() and never reduced. Run the last micro-batch's "
    "backward outside of no_sync()",
    Status.CHANGED: CHANGED_SINCE,
    Status.USED_UP: "the previous step has consumed the gradients (a plain optimizer would apply them once more). Call "
    "backward before step or clip_grad_norm_, or zero_grad() if this step is to do nothing",
    Status.NO_GRADIENTS: "no gradients, although other ranks have some. Call backward on every rank, or on none",
}
