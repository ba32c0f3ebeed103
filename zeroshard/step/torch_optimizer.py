"""The interface of `torch.optim.Optimizer` besides `step`: state, `state_dict`, copies, `Join`, methods of the class.

The state is sharded; here it has torch's own form.
"""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from zeroshard.comm.ranges import phase
from zeroshard.comm.same import expect_same
from zeroshard.comm.together import together
from zeroshard.errors import InvalidState, InvalidType, InvalidValue
from zeroshard.full_model.from_rank0 import FromRank0
from zeroshard.full_model.full_state import PASS_THE_SAME, Destination
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.plain_model import names_by_id
from zeroshard.step.agreement import Agreement
from zeroshard.step.assignment import numbered, options_in
from zeroshard.step.control import Control
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step.state_view import StateView
from zeroshard.step.stepper import stepped
from zeroshard.step.steppers import Steppers, expect_to_step
from zeroshard.step.uneven_inputs import FollowerHook, UnevenInputs


class TorchOptimizer(torch.optim.Optimizer, Joinable):
    """See the module's note. The subclass sets the attributes below, after torch's own constructor."""

    engine: Engine
    groups: ParamGroups
    agreement: Agreement
    _steppers: Steppers
    _uneven_inputs: UnevenInputs

    def __init__(self, params: list[Any], defaults: dict[str, Any]) -> None:
        self._is_built = False
        # Wrappers of frameworks (Lightning, Fabric) inherit from this class, and have the attributes of this object.
        self._itself: Callable[[], Any] = weakref.ref(self)
        Joinable.__init__(self)
        super().__init__(params, defaults)

    @abstractmethod
    def adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take parameters that no optimizer has."""

    @abstractmethod
    def agree(self, norm_type: float | None = None) -> Control:
        """The control exchange of `clip_grad_norm_` and `step`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The list of param groups. Groups may be assigned that begin with those that are there, as some loops do to
        resume: hyper-parameters are set, and further groups added (collective).

        Raises:
            RuntimeError: (when assigned) one of the groups has other parameters.
        """
        return self._param_groups

    @param_groups.setter
    def param_groups(self, assigned: list[dict[str, Any]]) -> None:
        if not self._is_built:
            self._param_groups = assigned
            return
        self.groups.expect_to_begin(assigned)
        for mine, group in zip(list(self.param_groups), assigned, strict=False):
            mine.update(options_in(group))
        for group in assigned[len(self.param_groups) :]:
            self.add_param_group(group)

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = False, device: torch.device | str | None = None) -> dict[str, Any]:
        """The state in torch's own layout, with full tensors: a plain optimizer of the class can load it. Collective.

        The loss scaler's state, if there is one, is under "loss_scale".

        Args:
            rank0_only: True: only rank 0 gets the state; the other ranks take part, and get an empty dict.
            device: of the tensors ("cpu" for example); None: main's device. With another device, and on ranks that
                get nothing, at most one item of a unit's state is in full on main's device at a time.
        """
        self.engine.check_open("state_dict")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result = self._collect(Destination(rank0_only, device))
        for after in self._optimizer_state_dict_post_hooks.values() if result else ():
            result = after(self, result) or result
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any] | None, *, broadcast_from_rank0: bool = False) -> None:
        """Load a state dict of this class, or of a plain optimizer of the user's class. Collective.

        Args:
            state_dict: the same on every rank.
            broadcast_from_rank0: True: only rank 0 has a state dict; the other ranks pass {} or None, and receive the
                state unit by unit.

        Raises:
            ValueError: on every rank, before anything has been changed: param groups that do not fit; an item of
                another shape; state dicts that differ between ranks.
        """
        self.engine.check_open("load_state_dict")
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)  # as in torch: hooks may remove keys from theirs
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict or {}) or state_dict
        if broadcast_from_rank0:
            self._load_from_rank0(state_dict)
        else:
            self._load(dict(state_dict or {}))
        self.agreement.half_done = False
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @phase("state_dict")
    def _collect(self, destination: Destination) -> dict[str, Any]:
        state = self._steppers.gather(destination=destination)
        if not destination.includes(self.engine.collectives.mesh.world.rank):
            return {}
        of_each = {number: state[p] for number, p in enumerate(self.groups.parameters()) if p in state}
        scale = self.agreement.losses.state_dict()
        return {
            "state": of_each,
            "param_groups": numbered(self.groups.lists),
            **({"loss_scale": scale} if scale else {}),
        }

    @phase("load_state_dict")
    def _load(self, state_dict: dict[str, Any]) -> None:
        self._expect_same(state_dict)
        self.adopt(self.groups.to_adopt_for(state_dict))
        self._steppers.load(self.groups.state_by_parameter(state_dict), as_main=True)
        self._load_rest(state_dict)

    @phase("load_state_dict")
    def _load_from_rank0(self, state_dict: dict[str, Any] | None) -> None:
        source = FromRank0(self.engine.collectives, state_dict, self._expect_fitting)
        self.adopt(self.groups.to_adopt_for(source.state_dict))
        state, done = self.groups.state_by_parameter(source.state_dict), stepped(self._steppers.all)
        self._steppers.waiting.clear()
        of_units = [unit.parameters for unit in self._steppers.units]
        for params in [*of_units, [p for p in state if p not in done]]:
            received = {p: source.receive(state[p]) for p in params if p in state}
            self._steppers.load(state | received, dict.fromkeys(params), as_main=True)
        self._load_rest({**source.state_dict, "param_groups": source.receive(source.state_dict["param_groups"])})

    def _load_rest(self, state_dict: dict[str, Any]) -> None:
        for group, saved in zip(self.groups.lists, state_dict["param_groups"], strict=True):
            group.update(copy.deepcopy(options_in(saved)))
        self.agreement.losses.load_state_dict(state_dict.get("loss_scale", {}))

    def _expect_fitting(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: param groups differ, an item of state has another shape, or it is the state of another class.
        """
        if not {"state", "param_groups"} <= state_dict.keys():
            raise InvalidValue(
                "a state_dict with 'state' and 'param_groups' is needed on every rank; where rank 0 alone has it, pass "
                f"broadcast_from_rank0=True. Found the keys {sorted(map(str, state_dict))}"
            )
        state = self.groups.state_by_parameter(state_dict)
        saved = [*map(options_in, state_dict["param_groups"])]
        expect_to_step(self._steppers.all, state, self.groups.options(), saved)
        self._steppers.expect_fitting(state)  # behind that: of another class, items have other shapes as well

    def _expect_same(self, state_dict: dict[str, Any]) -> None:
        """Check that it fits, and is the same on every rank. Collective.

        Raises:
            ValueError: on every rank.
        """
        collectives, what = self.engine.collectives, "load_state_dict"
        together(collectives, what, partial(self._expect_fitting, state_dict))
        names = names_by_id(self.engine.units)
        values = {
            f"state {key!r} of {names.get(id(p), '(unknown)')}": value
            for p, of_one in self.groups.state_by_parameter(state_dict).items()
            for key, value in of_one.items()
        }
        for number, group in enumerate(state_dict["param_groups"]):
            values |= {f"{key!r} of param group {number}": value for key, value in group.items()}
        values["loss_scale"] = state_dict.get("loss_scale", {})
        expect_same(collectives, values, what, PASS_THE_SAME)

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """The state of each parameter, gathered when it is read: collective (see `state_view`)."""
        self.engine.check_open("state")
        return StateView(self.groups.parameters(), self._steppers)

    @state.setter
    def state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        if self._is_built:  # torch's constructor sets an empty one
            values = {parameter: dict(of_one) for parameter, of_one in state.items()}
            self.state.clear()
            self.state.update(values)

    def __getstate__(self) -> NoReturn:
        raise InvalidType("a ShardedOptimizer cannot be copied or pickled: save its state_dict()")

    # Methods of the user's class ----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """A method that the user's class has and this one does not (`train` and `eval` of schedule-free classes). A
        call runs it on all of main, and sets the weights. Collective."""
        if not name.startswith("_") and "_steppers" in self.__dict__ and self._steppers.have_method(name):
            return partial(self._call, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises for an attribute that the user's instances have, and this one has not: they would not see it."""
        is_new = not name.startswith("_") and name not in self.__dict__ and not hasattr(type(self), name)
        if is_new and "_steppers" in self.__dict__:
            self._steppers.have_method(name)
        super().__setattr__(name, value)

    @torch.no_grad()
    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.engine.check_open(name)
        self.engine.gatherer.settle()
        # All ranks must have read the weights before any rank writes them. Gradients may wait: they stay as they are.
        together(self.engine.collectives, name, lambda: None)
        with self.agreement.updating():
            return self._steppers.call(name, (args, kwargs), self.param_groups)

    # In a join (`runtime/join.py`, `uneven_inputs.py`) -----------------------------------------------------------

    def step_values(self) -> dict[str, Any]:
        """The values that a step depends on besides gradients, state and loss scales, JSON-able."""
        clipping = self.agreement.clipping
        return {"groups": self.groups.hyper_parameters(), "clip": clipping.factor, "clip_value": clipping.value}

    def _step_as(self, values: Mapping[str, Any]) -> None:
        """On a follower: step with the `step_values` of another rank."""
        self.groups.set_hyper_parameters(values["groups"])
        self.agreement.clipping.factor, self.agreement.clipping.value = values["clip"], values["clip_value"]
        with self.agreement.following():
            self.step()

    def _agree_as(self, norm_type: float) -> None:
        """On a follower: take part in the control exchange of the other ranks' `clip_grad_norm_`."""
        with self.agreement.following():
            self.agree(norm_type)

    # Torch's own tools -------------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """`torch.amp.GradScaler` reads this attribute first, so raise the explanation here."""
        raise InvalidState(
            "torch.amp.GradScaler decides on each rank alone whether to skip a step, by the gradients in p.grad, of "
            "which a rank may hold a part: pass loss_scale='dynamic' to ShardedOptimizer, and call "
            "optimizer.backward(loss) in place of the scaler"
        )

    def _optimizer_step_code(self) -> None:
        """Called by torch behind each step. Where torch's own runs, a profiler that records stacks reads the state of
        every parameter there: collective here, and it may record on one rank only. It knows that one by its code."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join([ddp, optimizer])`, under OPTIMIZER_ONLY. There must be one step for each forward of DDP.

        Raises:
            ValueError: the plan is another one.
        """
        if not self.engine.plan.external_gradients:
            raise InvalidValue("Join: this optimizer belongs to a sharded model: use `with handle.join():`")
        self._uneven_inputs.divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        return FollowerHook(self, self._uneven_inputs)

    @property
    def join_device(self) -> torch.device:
        return self.engine.collectives.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.engine.collectives.mesh.world.group
