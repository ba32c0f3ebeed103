"""Uneven inputs under plan OPTIMIZER_ONLY, inside torch's `Join([ddp, optimizer])`.

Torch's DDP reduces the gradients of the ranks that have inputs, but does not pass the result to the other ranks. So
before each exchange of a step all ranks announce what they are about to do. If some have run out of inputs, one rank
that continues sends them its gradients (all ranks that continue have the same), and they take the same step. Their part
of main is thus updated too.

    rank 0   forward  backward  step      forward  backward  step
    rank 1   forward  backward  step      hook of DDP        hook of the optimizer: gradients of rank 0, step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from zeroshard.errors import InvalidState
from zeroshard.gradients.loss_ledger import Loss
from zeroshard.runtime.claims import Owner
from zeroshard.runtime.engine import Engine


class UnevenInputs:
    """Uneven inputs of one optimizer.

    Attributes:
        divides_by_all: whether DDP divides the sum of gradients by the number of all ranks (else by the number of ranks
            that have inputs).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.divides_by_all = True

    def announce(self, optimizer: Owner, norm_type: float | None, arguments: Mapping[str, Any]) -> None:
        """Called on a rank that has inputs, before the control exchange. Collective.

        Args:
            norm_type: of `clip_grad_norm_`; None for a step.
            arguments: of the step.

        Raises:
            RuntimeError: a rank has run out of inputs, and cannot follow this call.
        """
        losses = optimizer.agreement.losses
        optimizer.agreement.ahead.forget()  # a rank without inputs carries out orders
        told = {
            "norm_type": norm_type,
            "step": optimizer.step_values(),
            "scaled": bool(losses.used),
            "scale": self._engine.ledger.scale,
            "weighted": losses.weight is not None,
            "present": [p.grad is not None for unit in self._engine.units for p in unit.parameters],
        }
        rows = self._engine.collectives.exchange_objects(told)
        if any(scaler is not losses.default for scaler in losses.used):
            raise InvalidState(
                "Join: a loss has a scaler of its own, which a rank that runs out of inputs does not know: scale "
                "losses by the optimizer's (loss_scale=, and backward(loss) without scaler=)"
            )
        if None in rows:
            if told["weighted"] and not self.divides_by_all:
                raise InvalidState("Join: losses with weights need divide_by_initial_world_size=True")
            if arguments:
                raise InvalidState(
                    f"Join: a rank that has run out of inputs does not know step({', '.join(arguments)}=...)"
                )
            self._give(rows, follows=False)

    def follow(self, optimizer: Owner) -> None:
        """Called on a rank that has run out of inputs: take part in one step of the others. Collective."""
        try:
            while not self._follow_once(optimizer):
                pass
        finally:
            for unit in self._engine.units:
                for parameter in unit.parameters:
                    parameter.grad = None

    def _follow_once(self, optimizer: Owner) -> bool:
        """Take part in one exchange of the others. Returns whether it was the step."""
        optimizer.look_for_newcomers()
        rows = self._engine.collectives.exchange_objects(None)
        told = next(row for row in rows if row is not None)
        self._give(rows, follows=True)
        with self._engine.ledger.backward(Loss(told["scale"], told["weighted"])):
            self._engine.reducer.begin_backward()
        losses = optimizer.agreement.losses
        used = [losses.default] if told["scaled"] and losses.default is not None else []
        losses.use_as(used, 0.0 if told["weighted"] else 1.0)
        is_step = told["norm_type"] is None
        if is_step:
            optimizer._step_as(told["step"])
        else:
            optimizer._agree_as(told["norm_type"])
        return is_step

    @torch.no_grad()
    def _give(self, rows: Sequence[Any], *, follows: bool) -> None:
        """Send the gradients of the first rank with inputs to ranks without inputs. (Before each exchange of a step: a
        clip, and the user, may change them in between.)"""
        source = next(rank for rank, row in enumerate(rows) if row is not None)
        collectives = self._engine.collectives
        parameters = [p for unit in self._engine.units for p in unit.parameters]
        for parameter, present in zip(parameters, rows[source]["present"], strict=True):
            value = None
            # Every rank takes part in the broadcast; ranks that have inputs keep their own gradient.
            if present:
                value = parameter.grad if collectives.mesh.world.rank == source else torch.empty_like(parameter)
                assert value is not None
                collectives.broadcast([value], source=source)
            if follows:
                parameter.grad = value


class FollowerHook(JoinHook):
    """What torch's `Join` calls on a rank that has run out of inputs, once for each forward of the others."""

    def __init__(self, optimizer: Any, inputs: UnevenInputs) -> None:
        self._optimizer, self._inputs = optimizer, inputs

    def main_hook(self) -> None:
        self._inputs.follow(self._optimizer)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out of inputs: disable torch's join in the optimizer, so that later steps are normal."""
        self._optimizer._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
