"""An optimizer's `state_dict` in torch's own layout: out of the steppers, and back."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from zeroshard.comm.same import expect_same
from zeroshard.comm.together import together
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.from_rank0 import FromRank0
from zeroshard.runtime.full_state import EVERYWHERE, PASS_THE_SAME, Taking
from zeroshard.step.optimizer_state import OptimizerState
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step.stepper import FullState, stepped
from zeroshard.storage.unit import Unit


class StateDicts:
    """Of one optimizer."""

    def __init__(self, groups: ParamGroups, state: OptimizerState, engine: Engine) -> None:
        self._groups, self._state, self._engine = groups, state, engine

    def collect(self, taking: Taking, units: Iterable[Unit]) -> dict[str, Any]:
        """`state` and `param_groups`; unit by unit, where it does not stay here. Collective."""
        state = self._state.gather() if taking == EVERYWHERE else self._gather(taking, units)
        numbered = {number: state[p] for number, p in enumerate(self._groups.parameters()) if p in state}
        return {"state": numbered, "param_groups": self._groups.as_saved()}

    def _gather(self, taking: Taking, units: Iterable[Unit]) -> FullState:
        state: FullState = {}
        keeps = taking.is_taken_by(self._engine.collectives.mesh.world.rank)
        gathered = (self._state.gather(dict.fromkeys(unit.parameters)) for unit in units)
        for part in chain([self._state.waiting], gathered):
            for parameter, items in part.items() if keeps else ():
                state[parameter] = {
                    key: taking.copy(item) if isinstance(item, Tensor) else item for key, item in items.items()
                }
        return state

    def expect_fitting(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: other param groups, or state of another shape.
        """
        if not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError(
                "a state_dict with 'state' and 'param_groups' is needed on every rank; where rank 0 alone has it, pass "
                f"broadcast_from_rank0=True. Found the keys {sorted(map(str, state_dict))}"
            )
        self._state.expect_fitting(self._groups.state_by_parameter(state_dict))

    def expect_same(self, state_dict: dict[str, Any]) -> None:
        """It fits, and is the same on every rank. Collective.

        Raises:
            ValueError: on every rank.
        """
        collectives, what = self._engine.collectives, "load_state_dict"
        together(collectives, what, partial(self.expect_fitting, state_dict))
        values = {
            f"state {key!r} of {self._engine.name_of(p)}": value  # type: ignore[arg-type]
            for p, of_one in self._groups.state_by_parameter(state_dict).items()
            for key, value in of_one.items()
        }
        for number, group in enumerate(state_dict["param_groups"]):
            values |= {f"{key!r} of param group {number}": value for key, value in group.items()}
        values["loss_scale"] = state_dict.get("loss_scale", {})
        expect_same(collectives, values, what, PASS_THE_SAME)

    def from_rank0(self, state_dict: dict[str, Any] | None) -> FromRank0:
        """What rank 0 has, checked. Collective.

        Raises:
            ValueError: on every rank: it does not fit.
        """
        return FromRank0(self._engine.collectives, state_dict, self.expect_fitting)

    def load(self, state_dict: dict[str, Any]) -> None:
        """Replace the state."""
        self._state.load(self._groups.state_by_parameter(state_dict))

    def receive(self, source: FromRank0, units: Iterable[Unit]) -> None:
        """As `load`, unit by unit; then what is frozen. Collective."""
        state, done = self._groups.state_by_parameter(source.state_dict), stepped(self._state.steppers)
        self._state.waiting.clear()
        for params in [*(unit.parameters for unit in units), [p for p in state if p not in done]]:
            received = {p: source.receive(state[p]) for p in params if p in state}
            self._state.load(state | received, dict.fromkeys(params))
