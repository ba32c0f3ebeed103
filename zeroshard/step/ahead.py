"""Queues an update before the host knows what all ranks have agreed on, so that a device does not wait for the host.

    the host     queues the sums over ranks, the update, the gathers | waits for the sums, and checks them
    the device   backward                                            | the sums, the update, the gathers

The device checks the same sums in the same way (`Verdict`), and computes the norm and the factor of a clip, bit for bit
as the host. If the ranks do not agree, or the gradient is not finite, it makes the update void: fused optimizers of
torch change nothing if `found_inf` is set (`torch.amp.GradScaler` skips in this way), and the gradient is multiplied by
1. The host then raises, skips or updates as always.

All ranks go ahead, or none does: this depends only on earlier answers, which are the same on every rank. A rank that
cannot, although the others do, says so (`Status.NOT_AHEAD`). Their updates are void, and it takes part in their
gathers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from zeroshard.comm import alike
from zeroshard.comm.packets import ROOM, numbers_in
from zeroshard.layout import exact
from zeroshard.runtime.engine import Engine
from zeroshard.step.assignment import Options
from zeroshard.step.clipping import Clipping
from zeroshard.step.control import Control, Row, Status, row_numbers
from zeroshard.step.flat_step import FlatStep
from zeroshard.step.gradient_norms import norm_to_clip_on_device
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step.stepper import Update
from zeroshard.step.steppers import Steppers
from zeroshard.storage.unit import Unit

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Classes whose fused step changes nothing if `found_inf` is set: neither parameters nor state."""


def has_queue(device: torch.device) -> bool:
    """Whether operations on the device are queued, and the host can be ahead of it."""
    return device.type != "cpu"


class Ahead:
    """Whether the updates of one optimizer go ahead of the host, and what it remembers of the last step for that.

    Attributes:
        active: the slots of each unit that took part in the last step.
    """

    def __init__(self, engine: Engine, groups: ParamGroups, steppers: Steppers) -> None:
        self.active: dict[Unit, list[bool]] = {}
        self._engine, self._groups, self._steppers = engine, groups, steppers
        self._flags: Sequence[bool] = ()
        # What has stepped last, if all ranks could go ahead.
        self._after: tuple[int, int] | None = None

    @property
    def goes(self) -> bool:
        """Whether all ranks go ahead in this step."""
        # Only what is equal on all ranks may decide here.
        return self._after == self._now and self._engine.collectives.orders is None

    @property
    def _now(self) -> tuple[int, int]:
        """How often the steppers have been built, and how often what trains has changed: which units are gathered after
        a step depends on it."""
        return self._steppers.num_builds, self._engine.freezing.num_changes

    def forget(self) -> None:
        """No rank goes ahead before the next update."""
        self._after = None

    def status(self, flags: Sequence[bool], norm_type: float, *, needs_host: bool) -> Status:
        """The status of a rank that is ready.

        Args:
            flags: which slots have gradients on this rank: the same ones as in the last step take part.
            norm_type: of the norm that a clip needs.
            needs_host: whether something else in this step does.
        """
        is_known = has_queue(self._engine.collectives.device) and flags == self._flags and norm_type == 2
        is_ahead = is_known and not needs_host and _can_be_void(self._steppers, self._groups.lists)
        return Status.READY if is_ahead else Status.NOT_AHEAD

    def learn(self, control: Control, active: dict[Unit, list[bool]], flags: Sequence[bool]) -> None:
        """After a step. `flags`: as above."""
        self.active, self._flags = active, flags
        self._after = self._now if control.holds_ahead else None


def is_fused(stepper: FlatStep, options: Sequence[Options]) -> bool:
    """Whether the step of the class can be made void on the device, with these options of the user's param groups: a
    state dict, or the user, may have changed them. A step that makes its state is not void: SGD leaves arbitrary values
    in it."""
    is_sgd = isinstance(stepper.optimizer, torch.optim.SGD)
    return (
        type(stepper.optimizer) in _FUSED
        and all(options[index].get("fused") for index in stepper.assignment.options)
        and all(
            stepper.state.inner.state_of(piece.tensor).get("momentum_buffer" if is_sgd else "exp_avg") is not None
            for piece in stepper.state.pieces
            if piece.active and not (is_sgd and options[piece.group]["momentum"] == 0)
        )
    )


def _can_be_void(steppers: Steppers, options: Sequence[Options]) -> bool:
    """Whether these steps can be made void: fused steps of torch's classes, in fp32. `options`: of all param groups."""
    num_groups = sum(len(stepper.assignment.options) for stepper in steppers.all)
    return (
        row_numbers(num_groups, 0, 1) <= ROOM
        and all(
            isinstance(stepper, FlatStep)
            and is_fused(stepper, options)
            and all(unit.main.dtype == torch.float32 for unit in stepper.assignment.groups)
            for stepper in steppers.all
        )
        and not any(unit.grads.is_external for unit in steppers.units)
    )


class Verdict:
    """What the device concludes from the sums of a control exchange.

    Attributes:
        is_void: 0-d bool: the ranks do not agree, or the gradient is not finite.
        mean: float64: the factor from the buffers' values to the mean gradient (`Agreement.mean_factor`).
    """

    def __init__(
        self,
        is_void: Tensor,
        mean: float | Tensor,
        powers: Tensor,
        status: Tensor | None = None,
        num_ranks: int = 1,
    ) -> None:
        """`powers`: as for `norm_to_clip_on_device`. `status`: of all ranks; None: this is the only one."""
        self.is_void, self.mean = is_void, mean
        self._powers, self._status, self._num_ranks = powers, status, num_ranks

    @classmethod
    def of(cls, sums: Tensor, weight: float | None, scale: float, num_groups: int, num_ranks: int) -> Verdict:
        """
        Args:
            sums: on the device, from `control.ask`.
            weight: of this rank's losses; None: on no rank they have one.
            scale: of the gradients.
        """
        if num_ranks == 1:
            return cls._of_one(sums, weight, scale)
        return cls._of_all(sums, weight, scale, num_groups, num_ranks)

    @classmethod
    def _of_one(cls, powers: Tensor, weight: float | None, scale: float) -> Verdict:
        weight = 1.0 if weight is None else weight
        is_void = powers.isfinite().all().logical_not() | (not weight)
        return cls(is_void, 1 / (weight * scale) if weight else math.inf, powers)

    @classmethod
    def _of_all(cls, sums: Tensor, weight: float | None, scale: float, num_groups: int, num_ranks: int) -> Verdict:
        row = Row[Tensor].read(numbers_in(sums, ROOM), num_groups)
        digests, powers = torch.cat([sums[: alike.WIDTH], row.digests]), row.norm_terms.view(-1, exact.WIDTH)
        are_ready = row.status[int(Status.READY)] == num_ranks
        is_void = alike.differ(digests.view(-1, alike.WIDTH)) | ~are_ready | powers[:, exact.LIMBS].any()
        mean: float | Tensor = num_ranks / (num_ranks * scale)
        if weight is not None:
            total = exact.nearly_on_device(row.weight)
            is_void |= ~(total > 0)
            mean = torch.full_like(total, num_ranks) / (total * scale)
        return cls(is_void, mean, powers, row.status, num_ranks)

    @cached_property
    def norm(self) -> Tensor:
        """0-d float64: of the mean gradient, before it is clipped; NaN if a rank is not ready, or its gradients are set
        by hand and still have to be reduced."""
        norm = norm_to_clip_on_device(self._powers)
        if self._status is not None:
            ready = self._status[int(Status.READY)] + self._status[int(Status.NOT_AHEAD)]
            norm = torch.where(ready == self._num_ranks, norm, math.nan)
        return norm if isinstance(self.mean, float) and self.mean == 1.0 else norm * self.mean

    def update(self, clipping: Clipping) -> Update:
        """The update, which changes nothing if it is void. (Nor does it change the gradient then: the host may use it
        again.)"""
        factor, bound = self.mean * clipping.factor, None
        if clipping.asked is not None and clipping.awaits_norm and not clipping.on_device:
            factor = self._limit(clipping.asked[0]) * self.mean  # a norm that is not finite makes the update void
        if isinstance(factor, Tensor) or factor != 1.0:
            factor = self._unless_void(factor, 1.0)
        if clipping.value is not None:
            bound = self._unless_void(clipping.value, math.inf)
        return Update(factor, bound, self.is_void.to(torch.float32))

    def clip_factor(self, max_norm: float) -> Tensor:
        """0-d float32: what a clip multiplies the gradient by; 1 if the norm is not finite."""
        return torch.where(self.norm.isfinite(), self._limit(max_norm), 1.0).to(torch.float32)

    def _limit(self, max_norm: float) -> Tensor:
        limit = torch.full_like(self.norm, max_norm) / (self.norm + 1e-6)  # not `/` of a number, which is inexact
        return limit.clamp_(max=1.0)

    def _unless_void(self, value: float | Tensor, of_void: float) -> Tensor:
        if not isinstance(value, Tensor):  # `where` of two numbers is of the default dtype, which may be bf16
            value = torch.full((), value, dtype=torch.float64, device=self.is_void.device)
        return torch.where(self.is_void, of_void, value).to(torch.float32)
