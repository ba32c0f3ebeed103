"""An optimizer in a join: the values that followers need for a step, and the step of a follower.

`handle.join()` (`runtime/join.py`) and torch's `Join` (`uneven_inputs.py`) use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from zeroshard.runtime.loss_ledger import LossAccount
from zeroshard.step.agreement import Agreement
from zeroshard.step.clipping import Clipping
from zeroshard.step.control import Control
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step_result import StepResult


class Optimizer(Protocol):
    """The part of a `ShardedOptimizer` that this file uses."""

    groups: ParamGroups
    agreement: Agreement
    clipping: Clipping

    def agree(self, norm_type: float | None = None) -> Control: ...
    def step(self) -> StepResult: ...
    def look_for_newcomers(self) -> None: ...
    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any: ...
    def register_step_post_hook(self, hook: Callable[..., None]) -> Any: ...


class JoinedOptimizer:
    """See the module's note.

    Attributes:
        groups: the param groups.
        agreement: the optimizer's agreement with the other ranks.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups, self.agreement = optimizer.groups, optimizer.agreement
        self._optimizer = optimizer

    @property
    def losses(self) -> LossAccount:
        """The losses since the last step."""
        return self.agreement.losses

    def around_steps(self, before: Callable[..., None], after: Callable[..., None]) -> tuple[Any, Any]:
        """Register hooks before and after `step`. Returns their handles, to remove them."""
        return self._optimizer.register_step_pre_hook(before), self._optimizer.register_step_post_hook(after)

    # On a rank that has inputs -----------------------------------------------------------------------------------

    def step_values(self) -> dict[str, Any]:
        """The values that a step depends on besides gradients, state and loss scales, JSON-able."""
        clipping = self._optimizer.clipping
        return {"groups": self.groups.hyper_parameters(), "clip": clipping.factor, "clip_value": clipping.value}

    # On a follower -----------------------------------------------------------------------------------------------

    def look_for_newcomers(self) -> None:
        """Look for parameters that begin to train, as the other ranks do before each exchange of a step."""
        self._optimizer.look_for_newcomers()

    def agree_as(self, norm_type: float) -> None:
        """Take part in the control exchange of the other ranks' `clip_grad_norm_`."""
        with self.agreement.following():
            self._optimizer.agree(norm_type)

    def step_as(self, values: Mapping[str, Any]) -> None:
        """Step with the `step_values` of another rank."""
        self.groups.set_hyper_parameters(values["groups"])
        clipping = self._optimizer.clipping
        clipping.factor, clipping.value = values["clip"], values["clip_value"]
        with self.agreement.following():
            self._optimizer.step()
