"""`optimizer.state`: the state of each parameter in full, gathered when it is read.

Reading is collective: `state[p]`, `p in state`, `len(state)`, iterating. (Who has a part of a parameter knows its
state, the other ranks do not.) Writing is not, but every rank must do it: `state[p] = {...}`, `state[p]["step"] = ...`,
`del state[p]`, `state.clear()`. What has been read is a copy. To write into its tensors would change nothing, and
raises: they are inference tensors.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from typing import Any

import torch
from torch import Tensor

from zeroshard.collectives import Collectives
from zeroshard.flat_step import FlatStep
from zeroshard.optimizer_state import (
    FullState,
    full_state,
    load_full_state,
    parameters_with_state,
    recognised,
    set_full_state,
)
from zeroshard.owner_step import OwnerStep


def gather_state(
    steppers: Iterable[FlatStep | OwnerStep], collectives: Collectives, only: Collection[Tensor] | None = None
) -> FullState:
    """Parameter -> state in full, of `only` these parameters. Collective.

    Raises:
        ValueError: on every rank, state that cannot be put together.
    """
    state: FullState = {}
    for stepper in steppers:
        flat = isinstance(stepper, FlatStep)
        state |= full_state(stepper, collectives, only) if flat else stepper.full_state(only)  # type: ignore[arg-type, union-attr]
    return state


def take_state(
    steppers: Sequence[FlatStep | OwnerStep],
    state: Mapping[Tensor, Mapping[str, Any]],
    only: Collection[Tensor] | None = None,
) -> FullState:
    """As `gather_state` gives it, the same on every rank; a parameter that is not in it has none. Of `only` these
    parameters, whole units; that of the others stays.

    Returns:
        That of parameters that nobody steps now (they are frozen), copied.

    Raises:
        ValueError: state of another shape.
    """
    for stepper in steppers:
        if isinstance(stepper, FlatStep):
            load_full_state(stepper, state, only)
        else:
            stepper.load_full_state(state, only)
    done = stepped(steppers)
    return {
        parameter: copy.deepcopy(dict(of_one))
        for parameter, of_one in state.items()
        if parameter not in done and (only is None or parameter in only)
    }


def expect_shapes(steppers: Sequence[FlatStep | OwnerStep], state: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Before anything is taken.

    Raises:
        ValueError: state of another shape.
    """
    for stepper in steppers:
        if isinstance(stepper, FlatStep):
            recognised(stepper, state)


def stepped(steppers: Sequence[FlatStep | OwnerStep]) -> set[Tensor]:
    return {
        parameter
        for stepper in steppers
        for unit, groups in stepper.groups.items()
        for parameter, group in zip(unit.parameters, groups, strict=True)
        if group is not None
    }


class StateView(MutableMapping[Tensor, Any]):
    """See the module's note. Of one optimizer: `params` are its parameters, by no other a state is kept; `waiting`: the
    state of those that are frozen, in full."""

    def __init__(
        self,
        params: Sequence[Tensor],
        steppers: Sequence[FlatStep | OwnerStep],
        waiting: FullState,
        collectives: Collectives,
    ) -> None:
        self._params, self._steppers, self._collectives = params, steppers, collectives
        self._waiting = waiting

    def __getitem__(self, parameter: Tensor) -> ParameterState:
        self._expect_mine(parameter)
        return ParameterState(self, parameter, self._gather({parameter}).get(parameter, {}))

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: an item of another shape.
        """
        self._expect_mine(parameter)
        self._waiting.pop(parameter, None)
        if state and parameter not in stepped(self._steppers):
            self._waiting[parameter] = copy.deepcopy(dict(state))
        for stepper in self._steppers:
            if isinstance(stepper, FlatStep):
                set_full_state(stepper, parameter, state)
            else:
                stepper.set_full_state(parameter, state)

    def __delitem__(self, parameter: Tensor) -> None:
        self[parameter] = {}

    def __iter__(self) -> Iterator[Tensor]:
        found = {*self._waiting}
        for stepper in self._steppers:
            flat = isinstance(stepper, FlatStep)
            found |= {*(parameters_with_state(stepper, self._collectives) if flat else stepper.full_state())}  # type: ignore[arg-type, union-attr]
        return iter([parameter for parameter in self._params if parameter in found])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is one for one in self)

    def items(self) -> ItemsView[Tensor, Any]:
        """All of it at once: unit by unit, not parameter by parameter."""
        full = self._gather(None)
        return {p: ParameterState(self, p, full[p]) for p in self._params if p in full}.items()

    def values(self) -> ValuesView[Any]:
        return dict(self.items()).values()

    def clear(self) -> None:
        """As if no step had been taken."""
        self._waiting.clear()
        for stepper in self._steppers:
            stepper.optimizer.state.clear()

    def __repr__(self) -> str:
        return f"<the state of {len(self._params)} parameters, gathered when it is read: optimizer.state[parameter]>"

    def _gather(self, only: Collection[Tensor] | None) -> FullState:
        full = {p: dict(state) for p, state in self._waiting.items() if only is None or p in only}
        full |= gather_state(self._steppers, self._collectives, only)
        with torch.inference_mode():
            for state in full.values():
                state.update({key: v.clone() for key, v in state.items() if isinstance(v, Tensor)})
        return full

    def _expect_mine(self, parameter: Tensor) -> None:
        if not any(parameter is one for one in self._params):
            raise KeyError("optimizer.state: no parameter of this optimizer")


class ParameterState(UserDict[str, Any]):
    """Of one parameter: a copy; items that are set or deleted are set or deleted in the optimizer."""

    def __init__(self, view: StateView, parameter: Tensor, state: Mapping[str, Any]) -> None:
        self._view, self._parameter = view, parameter
        self.data = dict(state)

    def __setitem__(self, key: str, value: Any) -> None:
        self._replace({**self.data, key: value})

    def __delitem__(self, key: str) -> None:
        if key not in self.data:
            raise KeyError(key)
        self._replace({name: value for name, value in self.data.items() if name != key})

    def clear(self) -> None:
        self._replace({})

    def _replace(self, state: dict[str, Any]) -> None:
        self._view[self._parameter] = state
        self.data = state
