"""The state of one optimizer: the state in its steppers and, in full, the state of parameters that no stepper has."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from zeroshard.runtime.full_state import EVERYWHERE, Destination
from zeroshard.step.stepper import FullState, as_saved, stepped
from zeroshard.step.steppers import Steppers


class OptimizerState:
    """See the module's note.

    Attributes:
        steppers: replaced by new ones when parameters begin to train.
        waiting: the state of frozen parameters, in full on every rank, until they begin to train.
    """

    def __init__(self, steppers: Steppers) -> None:
        self.steppers = steppers
        self.waiting: FullState = {}

    def gather(self, only: Collection[Tensor] | None = None, destination: Destination = EVERYWHERE) -> FullState:
        """Parameter -> full state (`only`: of these parameters) on the ranks that the destination includes. Collective.

        Raises:
            ValueError: on every rank: state that cannot be gathered.
        """
        state: FullState = {}
        for parameter, items in self.waiting.items():
            if self.steppers.include(destination) and (only is None or parameter in only):
                state[parameter] = {key: _copied(item, destination) for key, item in items.items()}
        for stepper in self.steppers.all:
            state |= stepper.state.gather(only, destination)
        return state

    def load(
        self,
        state: Mapping[Tensor, Mapping[str, Any]],
        only: Collection[Tensor] | None = None,
        *,
        as_main: bool = False,
    ) -> None:
        """Replace the state by `state`, in the form of `gather`, the same on every rank. Parameters that are not in it
        have no state afterwards. `only`: keep the state of all other parameters. `as_main`: see `as_saved`.

        Raises:
            ValueError: an item has another shape; nothing has been changed.
        """
        saved = [as_saved(stepper, state, as_main=as_main) for stepper in self.steppers.all]
        done = stepped(self.steppers.all)
        for stepper, of_one in zip(self.steppers.all, saved, strict=True):
            stepper.state.load(of_one, only)
        for parameter in [*self.waiting] if only is None else only:
            self.waiting.pop(parameter, None)
        for parameter, items in state.items():
            if parameter not in done and (only is None or parameter in only):
                self.waiting[parameter] = copy.deepcopy(dict(items))

    def expect_fitting(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Raises:
        ValueError: `load` would raise."""
        for stepper in self.steppers.all:
            as_saved(stepper, state)

    def parameters(self) -> set[Tensor]:
        """The parameters that have state. Collective."""
        return {*self.waiting}.union(*(stepper.state.parameters() for stepper in self.steppers.all))

    def clear(self) -> None:
        """Remove all state, as before the first step."""
        self.waiting.clear()
        for stepper in self.steppers.all:
            stepper.state.clear()

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors held, by kind."""
        kinds: dict[str, list[Tensor]] = {}
        for stepper in self.steppers.all:
            for kind, tensors in stepper.tensors().items():
                kinds.setdefault(kind, []).extend(tensors)
        return kinds


def _copied(item: Any, destination: Destination) -> Any:
    """An item of state that this rank holds in full, at its destination."""
    return destination.copy(item) if isinstance(item, Tensor) and destination != EVERYWHERE else item
