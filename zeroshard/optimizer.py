"""`ShardedOptimizer`: a `torch.optim.Optimizer` over the user's own parameters that updates main shards."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from zeroshard.comm.profiling import phase
from zeroshard.comm.settings import Settings, plain
from zeroshard.comm.together import together
from zeroshard.external import shard_parameters
from zeroshard.handle import Handle, handle_of
from zeroshard.loss_scale import ConstantScale, DynamicScale, LossScalePolicy, LossScaler
from zeroshard.model.absent import as_tensors
from zeroshard.model.right_call import expect_class, expect_parameters
from zeroshard.placement import SHARDED
from zeroshard.runtime.full_state import Taking
from zeroshard.runtime.loss_ledger import LossAccount
from zeroshard.step.agreement import Agreement, NonFinite
from zeroshard.step.control import Control
from zeroshard.step.inner import Options, arguments_for, expect_arguments
from zeroshard.step.optimizer_state import OptimizerState
from zeroshard.step.param_groups import Classes, ParamGroups, defaults_of
from zeroshard.step.state_dict import StateDicts
from zeroshard.step.state_view import StateView
from zeroshard.step.step_request import StepRequest
from zeroshard.step.stepper import FullState, Stepper, Update
from zeroshard.step.steppers import build_steppers, units_of
from zeroshard.step.uneven_steps import Following, UnevenSteps
from zeroshard.step_result import StepResult as StepResult
from zeroshard.storage.gradients import GradState
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency


class ShardedOptimizer(torch.optim.Optimizer, Joinable):
    """Steps any optimizer class on this rank's part of main, and hands the weights round.

    Args:
        handle_or_params: the handle of `shard`: all its trainable parameters, and what requires grad later (it joins
            the first group, unless `add_param_group` or another optimizer has it by then); or parameters, or param
            groups, as for any optimizer. A group may name a class of its own under "optimizer_class" (Muon for
            matrices, AdamW for the rest).
            Parameters that no handle owns are taken under plan OPTIMIZER_ONLY: torch DDP, for example, reduces their
            gradients, and this optimizer shards its state over `process_group`.
        optimizer_class: for example `torch.optim.AdamW`.
        loss_scale: a policy, a number (1: no scaling), or "dynamic". None: dynamic where weights are fp16, else none.
            Scaled losses must go through `backward`.
        non_finite: what a step does with a gradient that is not finite: "raise" (the default where no loss was
            scaled), "skip" (the default where one was), "ignore".
        skip_norm_above: skip steps whose gradient norm is larger.
        elementwise: declares an unknown class; None: it is tried out (see `kinds`).
        process_group: only for parameters without a handle.
        **defaults: the class's own arguments.

    `param_groups` hold the user's parameters: schedulers work as always, and changed hyper-parameters take effect.
    The order of calls is torch's: `zero_grad`, forward, `backward`, perhaps `clip_grad_norm_`, `step`. A step
    consumes the gradients: they are not added to those of the next one.

    Raises:
        TypeError: an optimizer in place of its class; the model in place of its handle.
        ValueError: no parameters; parameters of several handles, or of another optimizer; what the class refuses.
    """

    def __init__(
        self,
        handle_or_params: Handle | Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        loss_scale: LossScalePolicy | float | Literal["dynamic"] | None = None,
        non_finite: NonFinite | None = None,
        skip_norm_above: float | None = None,
        elementwise: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        expect_parameters(handle_or_params)
        expect_class(optimizer_class)
        handle = handle_or_params if isinstance(handle_or_params, Handle) else None
        if handle is not None:
            handle.engine.check_open("build an optimizer")
            handle.engine.unfreeze()
            params: list[Any] = [{"params": handle.trainable_parameters()}]  # perhaps none: it waits for them
        else:
            params = list(handle_or_params)  # type: ignore[arg-type]
        if not params:
            raise ValueError("ShardedOptimizer got an empty parameter list")
        self._classes = Classes(optimizer_class, defaults, elementwise)
        self._state = OptimizerState()
        self._is_built = False
        Joinable.__init__(self)
        super().__init__(params, defaults_of(optimizer_class, defaults))
        self.handle = _find_handle(handle, [p for group in self.param_groups for p in group["params"]], process_group)
        self.engine = self.handle.engine
        self._groups = ParamGroups(self.param_groups, self._classes, self.engine, takes_all=handle is not None)
        with self.engine.claims.claimed(self._groups.parameters(), self):
            self.engine.unfreeze()
            self._state.steppers = build_steppers(self._groups, self.engine)
            self.engine.pool.expect_room(0, "the scratch of this optimizer")
            units = units_of(self._state.steppers, self.engine)
            policy = _policy(loss_scale, units)
            scaler = LossScaler(policy) if policy is not None else None
            self.agreement = Agreement(self.engine, units, scaler, non_finite, skip_norm_above)
        self._uneven = UnevenSteps(self.engine)
        self._request = StepRequest()
        self._follows = False
        self._is_built = True

    # The loop ----------------------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, *, scaler: LossScaler | None = None, weight: float | None = None, **kwargs: Any
    ) -> None:
        """`loss.backward(**kwargs)`, scaled. Where a model has several optimizers, through any one of them.

        Args:
            scaler: this loss's own; several losses, each with its scaler, may meet in the same parameters.
            weight: of this rank's batch, for example its number of tokens: the step then takes the mean over all
                weights of all ranks and micro-batches (of losses that are means over their own batch). Without it
                ranks count alike, and the losses of k micro-batches are divided by k by the caller.

        Raises:
            ValueError: not a scalar (without `gradient=`); a weight that is negative or not finite; under plan
                OPTIMIZER_ONLY, a scale that differs from that of the losses before it.
            RuntimeError: a loss without a graph (forward under no_grad, or backward a second time).
        """
        self.engine.check_open("backward")
        if loss.numel() != 1 and "gradient" not in kwargs:
            raise ValueError(
                f"the loss must be a scalar, found shape {tuple(loss.shape)}: take its mean, or pass gradient="
            )
        if weight is not None and not 0 <= weight < math.inf:
            raise ValueError(f"the weight of a loss must be a finite number from 0, found {weight}")
        if not loss.requires_grad:
            raise RuntimeError("the loss has no graph: was forward run under no_grad, or are all parameters frozen?")
        with self.scaling.backward(scaler, weight, anew=self.engine.reducer.begins_anew()) as factor:
            self.engine.reducer.expect_backward()
            scaled = loss if factor == 1.0 else loss.float() * factor
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Let the next step scale the gradient so that its global norm is at most `max_norm`. Collective.

        Returns:
            The norm of the mean gradient before clipping, 0-d fp64; 0 without gradients.

        Raises:
            ValueError: a max_norm that is not positive.
            RuntimeError: as `step`; a norm that is not finite, if asked.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, found {max_norm}")
        self._request.notes["clip_grad_norm_(max_norm, norm_type)"] = float(max_norm), float(norm_type)
        control = self._agree(float(norm_type))
        norm = control.norm * self.agreement.mean_factor(control)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm}: cannot clip (error_if_nonfinite)")
        self._request.clip = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        return torch.tensor(norm, dtype=torch.float64)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Let the next step clamp every element of the mean gradient to [-clip_value, clip_value].

        Raises:
            ValueError: a clip_value that is not positive.
        """
        if not clip_value > 0:
            raise ValueError(f"clip_value must be positive, found {clip_value}")
        self._request.clip_value = clip_value

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> StepResult:  # type: ignore[override]
        """Update main and weights from the reduced gradients. Collective. Without any gradient on any rank it does
        nothing, as in torch: the result is not `applied`.

        Args:
            closure: called once, first; it may call `zero_grad` and `backward`, and returns the loss.
            arguments: what else the `step` of the class takes.

        Raises:
            TypeError: arguments that no class takes.
            RuntimeError: gradients on some ranks alone; a second time for the same gradients; after a backward that was
                only accumulated (`no_sync`); a gradient that is not finite, if so chosen, or once too often in a row;
                parameters whose data somebody has replaced. Nothing has been updated then.
        """
        expect_arguments(self.classes, arguments)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # 1. All ranks agree: is everybody ready, what is the norm, who has gradients, has anything overflowed?
        self.engine.expect_in_place()
        if arguments:
            self._request.notes["the arguments of step"] = plain(arguments)
        control = self._agree(arguments=arguments)
        self.engine.pool.rest()
        if control.is_idle:
            self._discard_gradients()
            return StepResult(False, 0.0, control.group_norms, loss=loss)
        self.scaling.expect_scaled()
        mean = self.agreement.mean_factor(control)
        norms = tuple(norm * mean for norm in control.group_norms)
        scale = self.engine.ledger.scale
        skip = self.agreement.is_skipped(control, control.norm * mean)
        if not skip:
            # 2. Gradients go where main is; 3. it is stepped; 4. weights follow while the next forward starts.
            self.engine.reducer.use_idle_buckets()
            self.agreement.half_done = True
            self._update(control, self._request.update(mean), arguments)
            self.agreement.half_done = False
        self.scaling.adjust(not control.finite, self.agreement.overflows(control))
        self._discard_gradients()
        self.agreement.used_up = not any(unit.grads.is_external for unit in self.agreement.units)
        return StepResult(not skip, control.norm * mean, norms, scale, loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this optimizer's parameters."""
        with as_tensors():
            super().zero_grad(set_to_none)
        if self._is_built:
            self.scaling.clear()
            self.agreement.used_up = False
            self.engine.schedule.abandon_backward()
            self._discard_gradients()

    @torch.no_grad()
    def count_zero_gradients(self) -> int:
        """Elements of the reduced gradient (what is frozen has none) that are exactly zero, over all ranks. Collective;
        between backward and step."""
        return self.agreement.count_zero_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. After the start, collective: parameters of the same handle that no group has yet, or, under
        OPTIMIZER_ONLY, that no handle has. Existing state stays."""
        group, of_group = self._classes.completed(param_group)
        lr = group.get("lr", self.defaults.get("lr", 0.0))
        if not 0.0 <= float(lr) < math.inf:
            raise ValueError(f"the learning rate must be a finite number from 0, found {lr}")
        super().add_param_group(group)
        self._classes.of_groups.append(of_group)
        if not self._is_built:
            return
        before = self._state.steppers, self.agreement.units
        try:
            self._refuse_foreign(group["params"])
            with self.engine.claims.claimed(group["params"], self):
                self.engine.take_newcomers(self._groups.parameters())
                self.engine.unfreeze()
                self.rebuild()
        except ValueError:
            self.param_groups.pop(), self._classes.of_groups.pop()
            self._state.steppers, self.agreement.units = before
            raise

    @torch.no_grad()
    def rebuild(self) -> None:
        """Parameters have come: new steppers, existing state stays. Collective."""
        if not self._is_built:
            return  # it is being built
        state = self._state.gather()
        self.adopt(self._groups.newly_trainable())
        self._groups.changed()
        self._state.steppers = build_steppers(self._groups, self.engine)
        self.agreement.units = units_of(self._state.steppers, self.engine)
        self._state.load(state)

    def adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        """Of a handle's parameters, some that no optimizer has: they join the first group, as if they had required grad
        from the start."""
        groups = self._groups.with_adopted(parameters)
        self.engine.claims.claim(groups[0], self)
        self.param_groups[0]["params"][:] = groups[0]

    @property
    def groups(self) -> ParamGroups:
        """The param groups, with the class of each and who may join them."""
        return self._groups

    def _refuse_foreign(self, params: list[nn.Parameter]) -> None:
        for parameter in params:
            if not self.engine.admits(parameter):
                raise ValueError(
                    "add_param_group: a parameter is not of this optimizer's model, or was added to it later"
                )

    # Inside of a join (`join.py`; under OPTIMIZER_ONLY torch's, `uneven_steps.py`) ------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join([ddp, optimizer])`, under OPTIMIZER_ONLY. One step for each forward of DDP.

        Raises:
            ValueError: another plan.
        """
        if not self.engine.plan.external_gradients:
            raise ValueError("Join: this optimizer belongs to a sharded model: use `with handle.join():`")
        self._uneven.divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        return Following(self, self._uneven)

    @property
    def join_device(self) -> torch.device:
        return self.engine.collectives.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.engine.collectives.mesh.world.group

    def what_steps(self) -> dict[str, Any]:
        """What a step depends on beside gradients, state and scales of losses, JSON-able."""
        request = self._request
        return {"groups": self.hyper_parameters(), "clip": request.clip, "clip_value": request.clip_value}

    def hyper_parameters(self) -> list[dict[str, Any]]:
        """Of each param group, JSON-able."""
        return self._groups.hyper_parameters()

    def set_hyper_parameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Those of another rank."""
        self._groups.set_hyper_parameters(groups)

    def agree_as(self, norm_type: float) -> None:
        """As the ranks that have inputs left."""
        with self._following():
            self._agree(norm_type)

    def step_as(self, values: Mapping[str, Any]) -> None:
        """Step with what another rank's `what_steps` has said."""
        self.set_hyper_parameters(values["groups"])
        self._request.clip, self._request.clip_value = values["clip"], values["clip_value"]
        with self._following():
            self.step()

    @contextmanager
    def _following(self) -> Iterator[None]:
        self._follows = True
        try:
            yield
        finally:
            self._follows = False

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
        taking = Taking(rank0_only, device)
        result = self._state_dicts().collect(taking, self.agreement.units)
        if scale := self.scaling.state_dict():
            result["loss_scale"] = scale
        if not taking.is_taken_by(self.engine.collectives.mesh.world.rank):
            return {}
        for after in self._optimizer_state_dict_post_hooks.values():
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
        dicts = self._state_dicts()
        if broadcast_from_rank0:
            source = dicts.from_rank0(state_dict)
            state_dict = source.state_dict
            self.adopt(self._groups.adopted_with(state_dict))
            dicts.receive(source, self.agreement.units)
        else:
            state_dict = dict(state_dict or {})
            dicts.expect_same(state_dict)
            self.adopt(self._groups.adopted_with(state_dict))
            dicts.load(state_dict)
        self.agreement.half_done = False
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})
        self.scaling.load_state_dict(state_dict.get("loss_scale", {}))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _state_dicts(self) -> StateDicts:
        return StateDicts(self._groups, self._state, self.engine)

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """The state of each parameter, gathered when it is read: collective (see `state_view`)."""
        if self._is_built:
            self.engine.check_open("state")
        return StateView([p for group in self.param_groups for p in group["params"]], self._state)

    @state.setter
    def state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        if self._is_built:  # torch's constructor sets an empty one
            values = {parameter: dict(of_one) for parameter, of_one in state.items()}
            self.state.clear()
            self.state.update(values)

    def __getstate__(self) -> NoReturn:
        raise TypeError("a ShardedOptimizer cannot be copied or pickled: save its state_dict()")

    def tensors(self) -> dict[str, list[Tensor]]:
        """What this optimizer holds, by kind."""
        return self._state.tensors()

    @property
    def waiting(self) -> FullState:
        """The state of parameters that nobody steps, as they are frozen, in full on every rank."""
        return self._state.waiting

    @property
    def steppers(self) -> Sequence[Stepper]:
        """Who steps what: the parts of main that this rank updates, and their state."""
        return tuple(self._state.steppers)

    @property
    def scaling(self) -> LossAccount:
        """The losses since the last step, and the scaler of those that name none."""
        return self.agreement.losses

    @property
    def classes(self) -> Sequence[type[torch.optim.Optimizer]]:
        """Of each param group."""
        return tuple(self._classes.of_groups)

    def class_defaults(self, group: int) -> dict[str, Any]:
        """What the class of that param group is built with."""
        return self._classes.options_of(group)

    def __getattr__(self, name: str) -> Any:
        """A method that the class has and this one has not (`train` and `eval` of schedule-free ones): on all of main
        that there is; the weights follow. Collective."""
        steppers: list[Stepper] = self.__dict__["_state"].steppers if "_state" in self.__dict__ else []
        if not name.startswith("_"):
            if any(callable(getattr(type(stepper.optimizer), name, None)) for stepper in steppers):
                return partial(self._call, name)
            if owner := next((type(one.optimizer).__name__ for one in steppers if hasattr(one.optimizer, name)), None):
                raise AttributeError(
                    f"ShardedOptimizer has no attribute {name!r}. {owner} has, and what it means for a part of the "
                    "parameters is not known here: optimizer.steppers hold this rank's instances, each as .optimizer"
                )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @torch.no_grad()
    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What the instances return: None where all do, the result of the only one, else a tuple."""
        self.engine.check_open(name)
        units = self.agreement.units
        self.engine.gatherer.settle()
        together(self.engine.collectives, name, self._expect_none_waiting)  # nobody writes before everybody has read
        having = [stepper for stepper in self._state.steppers if hasattr(stepper.optimizer, name)]
        self.agreement.half_done = True
        results = [stepper.call(name, (args, kwargs), self.param_groups) for stepper in having]
        self.agreement.half_done = False
        for unit in units:
            if unit.plan.main is SHARDED and any(unit in stepper.groups for stepper in having):
                self.engine.gatherer.updated(unit)
        self.engine.gatherer.settle()
        if all(result is None for result in results):
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def _expect_none_waiting(self) -> None:
        if self.engine.has_gradients(self.agreement.units):
            raise ValueError(
                "gradients are waiting for a step: call it between a step (or zero_grad) and the next backward"
            )

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """`torch.amp.GradScaler` asks for this before anything else."""
        raise RuntimeError(
            "torch.amp.GradScaler decides on each rank alone whether to skip a step, by the gradients in p.grad, of "
            "which a rank may hold a part: pass loss_scale='dynamic' to ShardedOptimizer, and call "
            "optimizer.backward(loss) in place of the scaler"
        )

    # Stepping ----------------------------------------------------------------------------------------------------

    @phase("step: agree")
    def _agree(self, norm_type: float | None = None, arguments: Mapping[str, Any] | None = None) -> Control:
        if not self._uneven.follows:
            self.look_for_newcomers()
            if self._join_config.enable:
                self._uneven.tell(self, norm_type, arguments or {})
        settings = None if self._follows else self._settings()
        watched = [*self._groups.parameters(), *self._groups.adoptable()]  # also those that would join if they trained
        return self.agreement.control(watched, self._own_gradients, len(self.param_groups), settings, norm_type)

    def _settings(self) -> Settings:
        """What the step at hand depends on beside the gradients."""
        return Settings(
            self._groups.settings(),
            self._groups.members(),
            (*self.agreement.settings(), *self._request.settings()),
            self.engine.reducer.visible.edited(),
        )

    def look_for_newcomers(self) -> None:
        """Under OPTIMIZER_ONLY, parameters that have begun to require grad. Collective, if there may be some."""
        if self.engine.untaken and any(handle_of(parameter) is None for parameter in self._groups.parameters()):
            self.engine.check_open("use the optimizer")
            if self.engine.take_newcomers(self._groups.parameters()):
                self.rebuild()

    def _own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """The param group of each, and it."""
        for stepper in self._state.steppers:
            yield from stepper.own_gradients()

    @phase("step: update")
    def _update(self, control: Control, update: Update, arguments: Options) -> None:
        units, active = self.agreement.units, self.agreement.active(control)
        steppers_left = {unit: sum(unit in stepper.groups for stepper in self._state.steppers) for unit in units}

        def start(unit: Unit) -> None:
            if unit.weights.state is Residency.GATHERING:
                unit.weights.arrive(stale=True)

        def updated(unit: Unit) -> None:
            steppers_left[unit] -= 1
            slots = {index for index in units[unit] if active[unit][index]}
            if not steppers_left[unit] and unit.plan.main is SHARDED and slots:
                self.engine.gatherer.updated(unit, slots)
                self._consume(unit)  # before the next unit's state is made

        for stepper in self._state.steppers:
            stepper.set_active(active)
            own_arguments = arguments_for(type(stepper.optimizer), arguments)
            stepper.step(self.param_groups, update, start, updated, own_arguments)
        self.engine.gatherer.read()

    def _discard_gradients(self) -> None:
        self.agreement.forget()
        self._request = StepRequest()
        for unit in self.engine.units:
            self._consume(unit)
        self.engine.reducer.forget_losses()
        self.engine.pool.rest("buckets", "scratch")  # a backward may still need the weights

    def _consume(self, unit: Unit) -> None:
        if unit.grads.state is not GradState.EMPTY or self.engine.reducer.visible.shows(unit):
            slots = self.agreement.units.get(unit, set()) | self.engine.claims.unclaimed(unit)
            unit.grads.consume(slots)
            self.engine.reducer.visible.forget(unit, slots)


def _find_handle(
    handle: Handle | None, parameters: Sequence[nn.Parameter], process_group: dist.ProcessGroup | None
) -> Handle:
    if handle is None:
        handles = {id(one): one for one in map(handle_of, parameters)}
        if len(handles) > 1:
            raise ValueError(
                "the parameters belong to different handles (or some to none): build one ShardedOptimizer per handle"
            )
        handle = next(iter(handles.values()), None)
        if handle is None:
            return shard_parameters(parameters, process_group)
    if process_group is not None:
        raise ValueError("process_group is for parameters without a handle; these have the mesh of theirs")
    return handle


def _policy(
    loss_scale: LossScalePolicy | float | Literal["dynamic"] | None, units: Iterable[Unit]
) -> LossScalePolicy | None:
    if loss_scale is None:
        has_fp16 = any(unit.weights.buffer.dtype == torch.float16 for unit in units)
        return DynamicScale() if has_fp16 else None
    if loss_scale == "dynamic":
        return DynamicScale()
    if isinstance(loss_scale, (int, float)):
        return None if loss_scale == 1 else ConstantScale(float(loss_scale))
    if isinstance(loss_scale, (ConstantScale, DynamicScale)):
        return loss_scale
    raise ValueError(f"loss_scale must be a policy, a number, 'dynamic' or None, found {loss_scale!r}")
