"""The state of one optimizer: what its steppers hold and, in full, that of parameters which nobody steps now."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from zeroshard.step.stepper import FullState, as_saved, stepped
from zeroshard.step.steppers import Steppers


class OptimizerState:
    """See the module's note.

    Attributes:
        steppers: who steps what; replaced by others when parameters begin to train.
        waiting: the state of parameters that are frozen, on every rank, until they begin to train.
    """

    def __init__(self, steppers: Steppers) -> None:
        self.steppers = steppers
        self.waiting: FullState = {}

    def gather(self, only: Collection[Tensor] | None = None) -> FullState:
        """Parameter -> state in full, of `only` these parameters. Collective.

        Raises:
            ValueError: on every rank, state that cannot be put together.
        """
        state = {p: dict(of_one) for p, of_one in self.waiting.items() if only is None or p in only}
        for stepper in self.steppers.all:
            state |= stepper.state.gather(only)
        return state

    def load(self, state: Mapping[Tensor, Mapping[str, Any]], only: Collection[Tensor] | None = None) -> None:
        """As `gather` gives it, the same on every rank; a parameter that is not in it has none. `only`: that of other
        parameters stays.

        Raises:
            ValueError: state of another shape; nothing has been changed.
        """
        saved, done = [as_saved(stepper, state) for stepper in self.steppers.all], stepped(self.steppers.all)
        for stepper, of_one in zip(self.steppers.all, saved, strict=True):
            stepper.state.load(of_one, only)
        for parameter in [*self.waiting] if only is None else only:
            self.waiting.pop(parameter, None)
        for parameter, items in state.items():
            if parameter not in done and (only is None or parameter in only):
                self.waiting[parameter] = copy.deepcopy(dict(items))

    def expect_fitting(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Raises:
        ValueError: `load` would."""
        for stepper in self.steppers.all:
            as_saved(stepper, state)

    def parameters(self) -> set[Tensor]:
        """Those that have state. Collective."""
        return {*self.waiting}.union(*(stepper.state.parameters() for stepper in self.steppers.all))

    def clear(self) -> None:
        """As if no step had been taken."""
        self.waiting.clear()
        for stepper in self.steppers.all:
            stepper.state.clear()

    def tensors(self) -> dict[str, list[Tensor]]:
        """What is held, by kind."""
        kinds: dict[str, list[Tensor]] = {}
        for stepper in self.steppers.all:
            for kind, tensors in stepper.tensors().items():
                kinds.setdefault(kind, []).extend(tensors)
        return kinds
