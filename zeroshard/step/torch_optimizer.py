"""What torch and its tools ask of an optimizer beside steps: state, `state_dict`, copies, `Join`, methods of the class.

The state is divided among ranks; here it has the form that torch gives it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from zeroshard.comm.together import together
from zeroshard.errors import InvalidState, InvalidType, InvalidValue
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.full_state import Destination
from zeroshard.step.agreement import Agreement
from zeroshard.step.joined import JoinedOptimizer
from zeroshard.step.optimizer_state import OptimizerState
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step.state_dict import StateDicts
from zeroshard.step.state_view import StateView
from zeroshard.step.uneven_inputs import FollowerHook, UnevenInputs


class TorchOptimizer(torch.optim.Optimizer, Joinable):
    """See the module's note. What it works on is made by the class that steps, after torch's own constructor."""

    engine: Engine
    groups: ParamGroups
    agreement: Agreement
    _state: OptimizerState
    _uneven_inputs: UnevenInputs

    def __init__(self, params: list[Any], defaults: dict[str, Any]) -> None:
        self._is_built = False
        Joinable.__init__(self)
        super().__init__(params, defaults)

    @abstractmethod
    def adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        """Parameters that no optimizer has become this one's."""

    @abstractmethod
    def joined(self) -> JoinedOptimizer:
        """As a join sees it."""

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = False, device: torch.device | str | None = None) -> dict[str, Any]:
        """torch's own layout with full tensors, on every rank: a plain optimizer of the class loads it. Collective.

        The loss scaler's state, if there is one, lies beside it under "loss_scale".

        Args:
            rank0_only: on rank 0 alone; the others take part, and get an empty dict.
            device: where to ("cpu"); None: where main is. At most the state of one unit is there in full meanwhile.
        """
        self.engine.check_open("state_dict")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result = self._state_dicts().collect(Destination(rank0_only, device))
        for after in self._optimizer_state_dict_post_hooks.values() if result else ():
            result = after(self, result) or result
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any] | None, *, broadcast_from_rank0: bool = False) -> None:
        """Load the state that this method's counterpart, or a plain optimizer of the class, has given. Collective.

        Args:
            state_dict: the same on every rank.
            broadcast_from_rank0: rank 0 alone has a state_dict; the others pass {} or None, and get the state unit by
                unit.

        Raises:
            ValueError: on every rank, and nothing has been changed: other param groups; state of another shape; state
                dicts that differ between ranks.
        """
        self.engine.check_open("load_state_dict")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict or {}) or state_dict
        if broadcast_from_rank0:
            self._state_dicts().load_from_rank0(state_dict, self.adopt)
        else:
            self._state_dicts().load(dict(state_dict or {}), self.adopt)
        self.agreement.half_done = False
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _state_dicts(self) -> StateDicts:
        return StateDicts(self.groups, self._state, self.scaling, self.engine)

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """The state of each parameter, gathered when it is read: collective (see `state_view`)."""
        self.engine.check_open("state")
        return StateView(self.groups.parameters(), self._state)

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
        """A method that the class has and this one has not (`train` and `eval` of schedule-free ones): on all of main
        that there is; the weights follow. Collective."""
        if not name.startswith("_") and "_state" in self.__dict__ and self._state.steppers.have_method(name):
            return partial(self._call, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @torch.no_grad()
    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.engine.check_open(name)
        self.engine.gatherer.settle()
        together(self.engine.collectives, name, self.agreement.expect_no_gradients)  # all have read: all may write
        with self.agreement.updating():
            return self._state.steppers.call(name, (args, kwargs), self.param_groups)

    # Torch's own tools -------------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """`torch.amp.GradScaler` asks for this before anything else."""
        raise InvalidState(
            "torch.amp.GradScaler decides on each rank alone whether to skip a step, by the gradients in p.grad, of "
            "which a rank may hold a part: pass loss_scale='dynamic' to ShardedOptimizer, and call "
            "optimizer.backward(loss) in place of the scaler"
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join([ddp, optimizer])`, under OPTIMIZER_ONLY. One step for each forward of DDP.

        Raises:
            ValueError: another plan.
        """
        if not self.engine.plan.external_gradients:
            raise InvalidValue("Join: this optimizer belongs to a sharded model: use `with handle.join():`")
        self._uneven_inputs.divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        return FollowerHook(self, self.joined(), self._uneven_inputs)

    @property
    def join_device(self) -> torch.device:
        return self.engine.collectives.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.engine.collectives.mesh.world.group
