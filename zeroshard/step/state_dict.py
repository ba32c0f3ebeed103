"""Collects and loads an optimizer's `state_dict` in torch's own layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from zeroshard.comm.ranges import phase
from zeroshard.comm.same import expect_same
from zeroshard.comm.together import together
from zeroshard.errors import InvalidValue
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.from_rank0 import FromRank0
from zeroshard.runtime.full_state import PASS_THE_SAME, Destination
from zeroshard.runtime.loss_ledger import LossAccount
from zeroshard.runtime.plain_model import names_by_id
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step.stepper import stepped
from zeroshard.step.steppers import Steppers


class StateDicts:
    """The `state_dict` of one optimizer."""

    def __init__(self, groups: ParamGroups, steppers: Steppers, losses: LossAccount, engine: Engine) -> None:
        self._groups, self._steppers, self._losses, self._engine = groups, steppers, losses, engine

    @phase("state_dict")
    def collect(self, destination: Destination) -> dict[str, Any]:
        """See `TorchOptimizer.state_dict`."""
        state = self._steppers.gather(destination=destination)
        if not destination.includes(self._engine.collectives.mesh.world.rank):
            return {}
        numbered = {number: state[p] for number, p in enumerate(self._groups.parameters()) if p in state}
        scale = self._losses.state_dict()
        return {
            "state": numbered,
            "param_groups": self._groups.as_saved(),
            **({"loss_scale": scale} if scale else {}),
        }

    @phase("load_state_dict")
    def load(self, state_dict: dict[str, Any], adopt: Callable[[Iterable[nn.Parameter]], None]) -> None:
        """See `TorchOptimizer.load_state_dict`. `adopt`: called with parameters that are frozen now, and were trained
        when it was saved."""
        self._expect_same(state_dict)
        adopt(self._groups.adopted_with(state_dict))
        self._steppers.load(self._groups.state_by_parameter(state_dict), as_main=True)
        self._load_rest(state_dict)

    @phase("load_state_dict")
    def load_from_rank0(
        self, state_dict: dict[str, Any] | None, adopt: Callable[[Iterable[nn.Parameter]], None]
    ) -> None:
        """Like `load`, with the state_dict of rank 0."""
        source = FromRank0(self._engine.collectives, state_dict, self._expect_fitting)
        adopt(self._groups.adopted_with(source.state_dict))
        state, done = self._groups.state_by_parameter(source.state_dict), stepped(self._steppers.all)
        self._steppers.waiting.clear()
        of_units = [unit.parameters for unit in self._steppers.units]
        for params in [*of_units, [p for p in state if p not in done]]:
            received = {p: source.receive(state[p]) for p in params if p in state}
            self._steppers.load(state | received, dict.fromkeys(params), as_main=True)
        self._load_rest({**source.state_dict, "param_groups": source.receive(source.state_dict["param_groups"])})

    def _load_rest(self, state_dict: dict[str, Any]) -> None:
        for group, saved in zip(self._groups.lists, state_dict["param_groups"], strict=True):
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})
        self._losses.load_state_dict(state_dict.get("loss_scale", {}))

    def _expect_fitting(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: param groups differ, or an item of state has another shape.
        """
        if not {"state", "param_groups"} <= state_dict.keys():
            raise InvalidValue(
                "a state_dict with 'state' and 'param_groups' is needed on every rank; where rank 0 alone has it, pass "
                f"broadcast_from_rank0=True. Found the keys {sorted(map(str, state_dict))}"
            )
        self._steppers.expect_fitting(self._groups.state_by_parameter(state_dict))

    def _expect_same(self, state_dict: dict[str, Any]) -> None:
        """Check that it fits, and is the same on every rank. Collective.

        Raises:
            ValueError: on every rank.
        """
        collectives, what = self._engine.collectives, "load_state_dict"
        together(collectives, what, partial(self._expect_fitting, state_dict))
        names = names_by_id(self._engine.units)
        values = {
            f"state {key!r} of {names.get(id(p), '(unknown)')}": value
            for p, of_one in self._groups.state_by_parameter(state_dict).items()
            for key, value in of_one.items()
        }
        for number, group in enumerate(state_dict["param_groups"]):
            values |= {f"{key!r} of param group {number}": value for key, value in group.items()}
        values["loss_scale"] = state_dict.get("loss_scale", {})
        expect_same(collectives, values, what, PASS_THE_SAME)
