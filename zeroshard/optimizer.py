"""`ShardedOptimizer`: a `torch.optim.Optimizer` over the user's own parameters that updates main shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NoReturn, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.comm.ranges import phase
from zeroshard.errors import InvalidState, InvalidType, InvalidValue
from zeroshard.external import shard_parameters
from zeroshard.full_model.unsharded import expect_none_written
from zeroshard.gradients.loss_ledger import LossAccount
from zeroshard.handle import Handle, handle_of
from zeroshard.io.logger import tell
from zeroshard.loss_scale import LossScalePolicy, LossScaler, as_policy
from zeroshard.model.absent import as_tensors
from zeroshard.model.outside_graphs import outside_graphs
from zeroshard.model.right_call import (
    as_limit,
    expect_autograd,
    expect_class,
    expect_handle,
    expect_instance,
    expect_parameters,
)
from zeroshard.model.room import with_room
from zeroshard.step import taken_over
from zeroshard.step.agreement import Agreement, NonFinite
from zeroshard.step.clips import Clips
from zeroshard.step.control import Control
from zeroshard.step.inner import expect_arguments
from zeroshard.step.param_groups import Classes, ParamGroups, expect_rate
from zeroshard.step.stepper import FullState, Stepper, Update
from zeroshard.step.steppers import Steppers
from zeroshard.step.torch_optimizer import TorchOptimizer
from zeroshard.step.uneven_inputs import UnevenInputs
from zeroshard.step_result import StepResult as StepResult
from zeroshard.storage.unit import Unit

P = ParamSpec("P")
R = TypeVar("R")


def _called_in_loops(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a method that does much in a training loop."""
    return outside_graphs(with_room(method))


class ShardedOptimizer(TorchOptimizer):
    """Steps any optimizer class on this rank's part of main, and gathers the updated weights.

    Args:
        handle_or_params: the handle of `shard`: all its trainable parameters, and parameters that require grad later
            (they join the first group, unless `add_param_group` or another optimizer has them by then). Or parameters,
            or param groups, as for any optimizer; a group may name a class of its own under "optimizer_class" (Muon
            for matrices, AdamW for the rest).
            Parameters that no handle owns are taken under plan OPTIMIZER_ONLY: other code (torch DDP for example)
            reduces their gradients, and this optimizer shards its state over `process_group`.
        optimizer_class: for example `torch.optim.AdamW`.
        loss_scale: a policy, a number (1: no scaling), or "dynamic". None: dynamic if weights are fp16, else no
            scaling. Scaled losses must go through `backward`.
        non_finite: what a step does if the gradient is not finite: "raise" (the default if no loss was scaled), "skip"
            (the default if a loss was scaled), or "ignore".
        skip_norm_above: skip steps whose gradient norm is larger; above 0. None: none are.
        elementwise: whether an unknown class updates every element on its own; None: found by a trial (see
            `granularity.py`).
        process_group: only for parameters without a handle.
        **defaults: the class's own arguments, by name.

    `param_groups` contain the user's parameters: schedulers work as usual, and changed hyper-parameters take effect.
    The order of calls is torch's: `zero_grad`, forward, `backward`, optionally `clip_grad_norm_`, `step`. `step` frees
    the gradients: the next backward does not add to them.

    Attributes:
        handle: of the model, or of the parameters.
        engine: the engine of the handle.
        groups: the param groups, with the class of each.
        agreement: the agreement with the other ranks before a step.

    Raises:
        TypeError: an optimizer instance in place of its class; the model in place of its handle.
        ValueError: no parameters; parameters of several handles, or of another optimizer; or the class refuses them.
    """

    def __init__(
        self,
        handle_or_params: Handle | Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: type[torch.optim.Optimizer],
        *positional: NoReturn,
        loss_scale: LossScalePolicy | float | Literal["dynamic"] | None = None,
        non_finite: NonFinite | None = None,
        skip_norm_above: float | None = None,
        elementwise: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        expect_parameters(handle_or_params)
        expect_class(optimizer_class, positional, defaults)
        handle = handle_or_params if isinstance(handle_or_params, Handle) else None
        if handle is not None:
            handle.engine.check_open("build an optimizer")
            handle.engine.unfreeze()
            params: list[Any] = [{"params": handle.trainable_parameters()}]  # may be empty, if all are frozen now
        else:
            params = list(handle_or_params)  # type: ignore[arg-type]
        if not params:
            raise InvalidValue("ShardedOptimizer got an empty parameter list")
        self._classes = Classes(optimizer_class, defaults, elementwise)
        super().__init__(params, self._classes.defaults(params))
        self.handle = _find_handle(handle, [p for group in self.param_groups for p in group["params"]], process_group)
        self.engine = self.handle.engine
        self.groups = ParamGroups(self.param_groups, self._classes, self.engine, takes_all=handle is not None)
        self._steppers = Steppers(self.engine)
        with self.engine.claims.claimed(self.groups.parameters(), self):
            self.engine.unfreeze()
            self._steppers.build(self.groups)
            self.engine.pool.expect_room(0, "the scratch of this optimizer")
            has_fp16 = any(unit.weights.buffer.dtype == torch.float16 for unit in self._steppers.units)
            policy = as_policy(loss_scale, has_fp16=has_fp16)
            scaler = LossScaler(policy) if policy is not None else None
            self.agreement = Agreement(self.engine, self.groups, self._steppers, scaler, non_finite, skip_norm_above)
        self._clips = Clips(self.engine, self.agreement)
        self._uneven_inputs = UnevenInputs(self.engine)
        self._is_built = True

    @classmethod
    def from_optimizer(
        cls,
        handle: Handle,
        optimizer: torch.optim.Optimizer,
        *,
        loss_scale: LossScalePolicy | float | Literal["dynamic"] | None = None,
        non_finite: NonFinite | None = None,
        skip_norm_above: float | None = None,
        elementwise: bool | None = None,
        **arguments: Any,
    ) -> Self:
        """Take over an existing plain optimizer over parameters of the handle's model: its class, param groups with
        their current hyper-parameters, hooks and, if it has stepped, its state. Both optimizers share the param groups,
        so schedulers that were made for the old one keep working. The old one then raises if it is stepped. Collective.

        Args:
            handle: of the model.
            optimizer: a plain optimizer over parameters of the model.
            arguments: constructor arguments of the class that the optimizer does not store.

        Raises:
            TypeError: `optimizer` is not an optimizer instance, or `handle` is not a handle.
            ValueError: parameters of another model; constructor arguments cannot be found; or ranks have different
                state. The old optimizer has not been changed.
        """
        expect_handle(handle, "ShardedOptimizer.from_optimizer(handle, optimizer)")
        expect_instance(optimizer, is_sharded=isinstance(optimizer, ShardedOptimizer))
        for number, group in enumerate(optimizer.param_groups):
            _expect_of_handle(handle, number, group["params"])
        taken_over.expect_to_step_itself(optimizer)
        made = cls(
            taken_over.groups_of(optimizer),
            type(optimizer),
            loss_scale=loss_scale,
            non_finite=non_finite,
            skip_norm_above=skip_norm_above,
            elementwise=elementwise,
            **taken_over.arguments_of(optimizer, arguments),
        )
        made._load(taken_over.state_dict_of(optimizer))
        taken_over.hand_over(optimizer, made)
        return made

    # The loop ----------------------------------------------------------------------------------------------------

    @_called_in_loops
    def backward(
        self, loss: Tensor, *, scaler: LossScaler | None = None, weight: float | None = None, **kwargs: Any
    ) -> None:
        """`loss.backward(**kwargs)` with the loss scaled. If a model has several optimizers, call it on any one.

        Args:
            scaler: a scaler of this loss's own. Several losses with different scalers may use the same parameters.
            weight: of this rank's batch, for example its number of tokens. The step then divides by the sum of the
                weights of all ranks and micro-batches (each loss must be a mean over its own batch). None: all ranks
                count equally, and the caller divides the losses of k micro-batches by k.

        Raises:
            ValueError: the loss is not a scalar (without `gradient=`); the weight is negative or not finite; under plan
                OPTIMIZER_ONLY, the scale differs from that of earlier losses.
            RuntimeError: the loss has no graph (forward under no_grad, or a second backward).
        """
        with scaled_loss(self, loss, scaler, weight, kwargs) as scaled:
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    @outside_graphs
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradient so that its global norm is at most `max_norm`: in the step, or before it is changed or
        read (`step/clips.py`). Clips in a row act as in torch. Collective.

        Returns:
            The norm of the mean gradient before this clip, 0-d fp64; 0 if there is none. On the device if the step goes
            ahead of the host (`step/ahead.py`); then `step` raises errors, and it is NaN if only the host can find it.

        Raises:
            ValueError: `max_norm` or `norm_type` is not positive.
            RuntimeError: as `step`; or `error_if_nonfinite` is set and the norm is not finite.
        """
        numbers = as_limit("max_norm", max_norm), as_limit("norm_type", norm_type)
        clip = partial(self._clips.by_norm, *numbers, self._ask, needs_host=error_if_nonfinite)
        return self._carry_out("clip_grad_norm_", clip)

    @outside_graphs
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of the mean gradient to [-clip_value, clip_value], when `clip_grad_norm_` would scale it.
        All ranks must call it with the same value.

        Raises:
            ValueError: `clip_value` is not positive.
            RuntimeError: gradients set by hand wait for their mean.
        """
        self._clips.by_value(as_limit("clip_value", clip_value))

    @_called_in_loops
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> StepResult:  # type: ignore[override]
        """Update main and weights from the reduced gradients, and free these. Collective. If no rank has any gradient,
        it has no effect, as in torch: `applied` of the result is False.

        Args:
            closure: called once, at the beginning; it may call `zero_grad` and `backward`, and returns the loss.
            arguments: further keyword arguments for the `step` of the class.

        Raises:
            TypeError: no class takes one of the arguments.
            RuntimeError: before anything has been updated: only some ranks have gradients; the gradients have been used
                by an earlier step; they were only accumulated (`no_sync`); the gradient is not finite (see
                `non_finite`), or too many times in a row; the data of a parameter have been replaced.
        """
        expect_arguments(self._classes.of_groups, arguments)
        loss = torch.enable_grad()(closure)() if closure is not None else None
        return self._carry_out("optimizer.step", partial(self._step, loss, arguments))

    def _step(self, loss: Any, arguments: Mapping[str, Any]) -> StepResult:
        # 1. All ranks agree: are all ready, what is the norm, which slots have gradients, did a loss overflow?
        self.engine.expect_parameters_known_since()
        self.engine.expect_in_place()
        expect_none_written(self.engine.units, "a step")
        self._ask(arguments=arguments)
        raised = None
        if verdict := self.agreement.verdict(updates=True):  # 2 goes ahead of the answer
            self.engine.pool.rest()
            raised = self._update(self.agreement.ahead.active, verdict.update(self.agreement.clipping), arguments)
            self.agreement.went_ahead()
        control = self.agreement.answer()
        self.engine.pool.rest()
        if control.is_idle:
            self._discard_gradients(by_step=True)
            return StepResult(False, 0.0, control.group_norms, loss=loss)
        self.scaling.expect_scaled()
        mean = self.agreement.mean_factor(control)
        norms, scale = tuple(norm * mean for norm in control.group_norms), self.engine.ledger.scale
        skip = self.agreement.is_skipped(control, control.norm * mean)
        if not skip:
            # 2. Each stepper reads gradients in main's dtype, updates main, and starts to gather the new weights.
            active = self.agreement.active(control)
            if not self.agreement.is_updated:
                raised = self._update(active, self.agreement.clipping.update(mean), arguments)
            self.agreement.learn(control, active)
        else:
            words = "a step is skipped: gradient norm %s, loss scale %s"
            tell(self.engine.collectives.mesh.world.rank, words, control.norm * mean, scale)
        self.scaling.adjust(not control.finite, self.agreement.overflows(control))
        self._discard_gradients(by_step=True)
        self.agreement.used_up = not any(unit.grads.is_external for unit in self.agreement.units)
        if raised is not None:  # only now: the other ranks, on which nothing has been raised, have gone on
            raise raised
        return StepResult(not skip, control.norm * mean, norms, scale, loss)

    def _carry_out(self, what: str, work: Callable[[], R]) -> R:
        self.engine.check_open(what)
        self.engine.expect_no_backward(what)
        return self.engine.running.carry_out(what, work)

    def _update(self, active: dict[Unit, list[bool]], update: Update, arguments: Mapping[str, Any]) -> Exception | None:
        """Returns what a class has raised on this rank."""
        self.engine.reducer.use_idle_buckets()
        with self.agreement.updating():
            raised = self._steppers.step(self.param_groups, active, update, dict(arguments))
        self.agreement.half_done = raised is not None
        return raised

    @outside_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this optimizer's parameters."""
        self.engine.expect_no_backward("zero_grad")
        self.engine.running.carry_out("zero_grad", partial(self._zero_grad, set_to_none))

    def _zero_grad(self, set_to_none: bool) -> None:
        with as_tensors():
            super().zero_grad(set_to_none or (self._is_built and not self.engine.plan.external_gradients))
        if self._is_built:
            self.scaling.clear()
            self.agreement.used_up = False
            self.engine.schedule.abandon_backward()
            self._discard_gradients()

    def _discard_gradients(self, *, by_step: bool = False) -> None:
        self.agreement.forget()
        self._steppers.discard_gradients(by_step=by_step)

    @torch.no_grad()
    def count_zero_gradients(self) -> int:
        """Elements of the reduced gradient, before `step`, that are exactly zero, over all ranks. Collective."""
        return self._steppers.count_zero_gradients()

    def agree(self, norm_type: float | None = None) -> Control:
        """The control exchange of `clip_grad_norm_` and `step` (`Agreement.answer`). Collective."""
        self._ask(norm_type)
        return self.agreement.answer()

    @phase("step: agree")
    def _ask(self, norm_type: float | None = None, arguments: Mapping[str, Any] | None = None) -> None:
        if not self.agreement.follows:
            self.groups.expect_unchanged()
            self._steppers.expect_as_built(self.param_groups)
            self.look_for_newcomers()
            if self._join_config.enable:
                self._uneven_inputs.announce(self, norm_type, arguments or {})
        self.agreement.ask(dict(arguments or {}), norm_type)

    # Param groups ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch. Its parameters must be in no group yet, and belong to the same handle or,
        under OPTIMIZER_ONLY, to no handle. Existing state is kept. Collective (outside of the constructor)."""
        group, of_group = self._classes.completed(param_group)
        expect_rate(group.get("lr", self.defaults.get("lr")))
        super().add_param_group(group)
        self._classes.of_groups.append(of_group)
        if not self._is_built:
            return
        try:
            if not all(map(self.engine.admits, group["params"])):
                raise InvalidValue(
                    "add_param_group: a parameter is not of this optimizer's model: add it to the model before shard()"
                )
            with self.engine.claims.claimed(group["params"], self._itself()), self._steppers.unless_built():
                self.engine.take_newcomers(self.groups.parameters(), self.handle)
                self.engine.unfreeze()
                self.rebuild()
        except BaseException:
            self.param_groups.pop(), self._classes.of_groups.pop()
            self.groups.changed()
            raise

    @torch.no_grad()
    def rebuild(self) -> None:
        """Make new steppers after parameters have been added; existing state is kept. Collective."""
        if not self._is_built:
            return  # called from the constructor, which makes the steppers itself
        with self.groups.adopting(self._itself()):
            self._steppers.rebuild(self.groups)

    def adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add parameters of the handle that no optimizer has to the first group, in the order of the model."""
        self.groups.adopt(parameters, self._itself())

    def look_for_newcomers(self) -> None:
        """Under OPTIMIZER_ONLY, take parameters that have begun to require grad. Collective, if there may be any."""
        if self.engine.untaken and not all(handle_of(parameter) for parameter in self.groups.parameters()):
            self.engine.take_newcomers(self.groups.parameters(), self.handle)
        if self._steppers.built_for is not self.engine.reducer:  # also where an earlier `rebuild` has raised
            self.rebuild()

    # For checkpoints ---------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that this optimizer holds, by kind."""
        return self._steppers.tensors()

    def let_go(self) -> None:
        """Free all state and every view of main: the handle is being closed."""
        self._steppers.waiting.clear()
        self._steppers.build(None)

    @property
    def waiting(self) -> FullState:
        """The state of frozen parameters, in full on every rank."""
        return self._steppers.waiting

    @property
    def steppers(self) -> Sequence[Stepper]:
        """They have the parts of main that this rank updates, and their state."""
        return self._steppers.all

    @property
    def scaling(self) -> LossAccount:
        """The losses since the last step, and the default scaler."""
        return self.agreement.losses


@contextmanager
def scaled_loss(
    optimizer: ShardedOptimizer,
    loss: Tensor,
    scaler: LossScaler | None = None,
    weight: float | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Iterator[Tensor]:
    """Around a call of the `backward` of the tensor that it yields, with these arguments: see
    `ShardedOptimizer.backward`."""
    engine, arguments = optimizer.engine, arguments or {}
    engine.check_open("backward")
    expect_autograd()  # its first hook is too late where weights are hidden: autograd looks at what it has saved before
    if not isinstance(loss, Tensor):
        raise InvalidType(f"backward takes a loss that is a tensor, found an object of type {type(loss).__name__}")
    if loss.numel() != 1 and "gradient" not in arguments:
        raise InvalidValue(
            f"the loss must be a scalar, found shape {tuple(loss.shape)}: take its mean, or pass gradient="
        )
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise InvalidType(
            f"backward: scaler must be a zeroshard.LossScaler, found an object of type {type(scaler).__name__}: write "
            "scaler=LossScaler('dynamic'), once before the loop, or leave it out and pass loss_scale='dynamic' to "
            "ShardedOptimizer"
        )
    if scaler is not None and (orders := engine.collectives.orders) is not None:
        orders.scalers_used([scaler])
    weight = None if weight is None else float(weight)  # a tensor too: it may be a sum over a mask
    if weight is not None and not 0 <= weight < math.inf:
        raise InvalidValue(f"the weight of a loss must be a finite number from 0, found {weight}")
    if not loss.requires_grad:
        raise InvalidState("the loss has no graph: was forward run under no_grad, or are all parameters frozen?")
    engine.schedule.expect_to_begin()  # before the loss counts: it forgets those of one that raised
    with optimizer.scaling.backward(scaler, weight, anew=engine.begins_anew()) as factor:
        scaled = loss if factor == 1.0 else loss.to(torch.promote_types(loss.dtype, torch.float32)) * factor
        is_plain = not arguments.keys() - {"retain_graph"}
        with engine.reducer.expect_backward(scaled, is_plain=is_plain), _told_of_gone_weights(engine.units):
            yield scaled


@contextmanager
def _told_of_gone_weights(units: Iterable[Unit]) -> Iterator[None]:
    """Around a backward: an error of autograd that compares versions says what it means for weights that are borrowed
    ([Note: versions of weights that are gone] in `storage/versions.py`)."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error) and any(unit.weights.buffer.borrows for unit in units):
            error.add_note(
                "backward: if the loss uses a value from inside of a unit that its modules' forward does not return "
                "(nor leave in attributes or inputs), the weights behind it are not here: return it. A weight that was "
                "used inside `with handle.unsharded():` needs the backward inside the same block"
            )
        raise


def _expect_of_handle(handle: Handle, number: int, parameters: Iterable[nn.Parameter]) -> None:
    """Check that the parameters of param group `number` belong to the handle.

    Raises:
        ValueError: one does not.
    """
    for parameter in parameters:
        other = handle_of(parameter)
        if other is not None and other is not handle:
            raise InvalidValue(
                f"from_optimizer: param group {number} has a parameter of another handle, {other}: pass that one"
            )
        if other is None:
            raise InvalidValue(
                f"from_optimizer: param group {number} has a parameter of shape {tuple(parameter.shape)} that this "
                "handle does not manage: make the optimizer over parameters of the model that shard() has got, where a "
                "parameter beside it has to be registered, as model.x = x (and a plain one, which stays plain, over "
                "those in ignored=)"
            )


def _find_handle(
    handle: Handle | None, parameters: Sequence[nn.Parameter], process_group: dist.ProcessGroup | None
) -> Handle:
    if handle is None:
        handles = {id(one): one for one in map(handle_of, parameters)}
        if len(handles) > 1:
            strangers = ", ".join([str(tuple(p.shape)) for p in parameters if handle_of(p) is None][:3])
            some = f"some to none, of the shapes {strangers}: a plain optimizer steps those of ignored="
            some += "; register others in the model before shard(), as model.x = x"
            raise InvalidValue(
                f"the parameters belong to different handles ({some if strangers else len(handles)}): build one "
                "ShardedOptimizer per handle, or shard the models together, as one nn.ModuleList. "
                "ShardedOptimizer(handle, ...) has all trainable parameters of the handle"
            )
        handle = next(iter(handles.values()), None)
        if handle is None:
            return shard_parameters(parameters, process_group)
    if process_group is not None:
        raise InvalidValue("process_group is for parameters without a handle; these have the mesh of theirs")
    return handle
