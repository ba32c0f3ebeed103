"""`ShardedOptimizer`: a `torch.optim.Optimizer` over the user's own parameters that updates main shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.control import Control, Status, exchange_control
from zeroshard.flat_step import FlatStep, Update
from zeroshard.gradients import GradState
from zeroshard.handle import Handle, handle_of
from zeroshard.kinds import Kind, kind_of
from zeroshard.loss_scale import ConstantScale, DynamicScale, LossScalePolicy, LossScaler
from zeroshard.optimizer_state import full_state, load_full_state
from zeroshard.owner_step import OwnerStep
from zeroshard.placement import SHARDED
from zeroshard.scaling import LossScaling
from zeroshard.shard import shard_parameters
from zeroshard.unit import Unit
from zeroshard.weights import Residency

NonFinite = Literal["raise", "skip", "ignore"]


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        applied: False where it was skipped: then weights, state and step counts are as before (a scheduler should
            not step either).
        grad_norm: p-norm (2, or what was clipped by) of the mean gradient, before clipping; NaN where not finite.
        group_norms: the same, per param group.
        loss_scale: what the loss had been multiplied by.
        loss: what the closure returned.
    """

    applied: bool
    grad_norm: float
    group_norms: tuple[float, ...] = ()
    loss_scale: float = 1.0
    loss: Any = None


class Stepper(Protocol):
    """Steps some param groups: on flat pieces (`FlatStep`) or whole parameters at their owners (`OwnerStep`)."""

    groups: dict[Unit, list[int | None]]

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]: ...
    def set_active(self, active: dict[Unit, list[bool]]) -> None: ...
    def step(
        self,
        options: Sequence[dict[str, Any]],
        update: Update,
        start: Callable[[Unit], None],
        updated: Callable[[Unit], None],
    ) -> None: ...
    def tensors(self) -> dict[str, list[Tensor]]: ...


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps any optimizer class on this rank's part of main, and hands the weights round.

    Args:
        handle_or_params: the handle of `shard`; or its parameters, or param groups of them, as for any optimizer. A
            group may name a class of its own under "optimizer_class" (Muon for matrices, AdamW for the rest).
            Parameters that no handle owns are taken under plan OPTIMIZER_ONLY: torch DDP (say) reduces their
            gradients, this optimizer shards its state over `process_group`.
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
    The order of calls is torch's: `zero_grad`, forward, `backward`, perhaps `clip_grad_norm_`, `step`. A step uses the
    gradients up: they do not add to those of the next one.

    Raises:
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
        if isinstance(handle_or_params, Handle):
            handle_or_params.check_open("build an optimizer")
            params: list[Any] = list(handle_or_params.trainable_parameters())
        else:
            params = list(handle_or_params)
        if not params:
            raise ValueError("ShardedOptimizer got no parameters: pass the handle, or parameters that require grad")
        self._class, self._elementwise, self._inner_defaults = optimizer_class, elementwise, defaults
        self._classes: list[type[torch.optim.Optimizer]] = []  # of each param group
        self._steppers: list[Stepper] = []
        self._units: dict[Unit, set[int]] = {}
        super().__init__(params, _defaults_of(optimizer_class, defaults))
        self.handle = self._find_handle(process_group)
        self._steppers = self._build_steppers()
        self._units = self._find_units()
        policy = _policy(loss_scale, self._units)
        self._scaling = LossScaling(LossScaler(policy) if policy is not None else None)
        self._non_finite = _non_finite(non_finite)
        self._skip_norm_above = skip_norm_above
        self._control: tuple[int, Control] | None = None  # and the number of backwards it was made after
        self._clip = 1.0
        self._clip_value: float | None = None
        self.half_done = False  # an update has raised: some of main is new, some is not
        self.handle.claim(self._parameters(), self)  # last: what is refused claims nothing

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
        self.handle.check_open("backward")
        if loss.numel() != 1 and "gradient" not in kwargs:
            raise ValueError(
                f"the loss must be a scalar, found shape {tuple(loss.shape)}: take its mean, or pass gradient="
            )
        if weight is not None and not 0 <= weight < math.inf:
            raise ValueError(f"the weight of a loss must be a finite number from 0, found {weight}")
        if not loss.requires_grad:
            raise RuntimeError("the loss has no graph: was forward run under no_grad, or are all parameters frozen?")
        together = [one._scaling for one in self.handle.owners() if isinstance(one, ShardedOptimizer)]
        with self._scaling.backward(self.handle.reducer, scaler, weight, together) as factor:
            if self.handle.plan.external_gradients:
                self._expect_one_scale(scaler)
                self.handle.reducer.begin_backward()
            scaled = loss if factor == 1.0 else loss.float() * factor
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    def _expect_one_scale(self, scaler: LossScaler | None) -> None:
        scaler = scaler or self._scaling.default
        scale, before = 1.0 if scaler is None else scaler.scale, self.handle.reducer.scale
        if before not in (None, scale):
            raise ValueError(
                f"losses scaled by {before} and by {scale} would be mixed in p.grad, which plan OPTIMIZER_ONLY leaves "
                "to others: use one scaler, or shard(model, plan)"
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Let the next step scale the gradient so that its global norm is at most `max_norm`. Collective.

        Returns:
            The norm of the mean gradient before clipping, 0-d fp64.

        Raises:
            ValueError: a max_norm that is not positive.
            RuntimeError: no gradients; a norm that is not finite, if asked.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, found {max_norm}")
        control = self._agree(float(norm_type))
        norm = control.norm * self._mean_factor(control)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm}: cannot clip (error_if_nonfinite)")
        self._clip = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        return torch.tensor(norm, dtype=torch.float64)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Let the next step clamp every element of the mean gradient to [-clip_value, clip_value].

        Raises:
            ValueError: a clip_value that is not positive.
        """
        if not clip_value > 0:
            raise ValueError(f"clip_value must be positive, found {clip_value}")
        self._clip_value = clip_value

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Update main and weights from the reduced gradients. Collective.

        Raises:
            RuntimeError: before backward; after a backward that was only accumulated (`no_sync`); a gradient that is
                not finite, if so chosen, or once too often in a row; parameters whose data somebody has replaced.
                Nothing has been updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # 1. All ranks agree: is everybody ready, what is the norm, who has gradients, has anything overflowed?
        self._scaling.check_used()
        self.handle.expect_in_place()
        control = self._agree(self._control[1].norm_type if self._control else 2.0)
        mean = self._mean_factor(control)
        norms = tuple(norm * mean for norm in control.group_norms)
        scale = self.handle.reducer.scale or 1.0
        skip = self._decide_to_skip(control, control.norm * mean)
        if not skip:
            # 2. Gradients go where main is; 3. it is stepped; 4. weights follow while the next forward starts.
            self.half_done = True
            self._update(control, Update(mean * self._clip, self._clip_value))
            self.half_done = False
        self._scaling.settle(self.handle.reducer, not control.finite, self._overflows(control))
        self._discard_gradients()
        return StepResult(not skip, control.norm * mean, norms, scale, loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this optimizer's parameters."""
        super().zero_grad(set_to_none)
        if self._steppers:
            self._scaling.reset()
            self.handle.schedule.abandon_backward()
            self._discard_gradients()

    @torch.no_grad()
    def count_zero_gradients(self) -> int:
        """Elements of the reduced gradient that are exactly zero, over all ranks. Collective; between backward and
        step."""
        zeros = sum(int((tensor == 0).sum()) for stepper in self._steppers for _, tensor in stepper.own_gradients())
        mesh = self.handle.collectives.mesh
        padding = sum(self._own_padding(unit) for unit in self._units)
        row = torch.tensor([zeros - padding], dtype=torch.float64, device=self.handle.collectives.device)
        rows = self.handle.collectives.exchange(row)
        return int(sum(rows[mesh.world.ranks.index(rank), 0].item() for rank in mesh.shard.ranks))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. After the start: parameters of the same handle that no group has yet; existing state stays."""
        group = dict(param_group)
        group_class = group.pop("optimizer_class", self._class)
        if group_class is not self._class:
            group = {**_defaults_of(group_class, {}), **group}
        lr = group.get("lr", self.defaults.get("lr", 0.0))
        if not 0.0 <= float(lr) < math.inf:
            raise ValueError(f"the learning rate must be a finite number from 0, found {lr}")
        if self._steppers:
            group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            self._refuse_foreign(group["params"])
        super().add_param_group(group)
        self._classes.append(group_class)
        if self._steppers:
            self.handle.thaw()
            before = self._steppers, self._units
            try:
                self.rebuild()
                self.handle.claim(self._parameters(), self)
            except ValueError:
                self.param_groups.pop(), self._classes.pop()
                self._steppers, self._units = before
                raise

    @torch.no_grad()
    def rebuild(self) -> None:
        """Parameters have come: new steppers, existing state stays. Collective."""
        state = self._full_state()
        self._steppers = self._build_steppers()
        self._units = self._find_units()
        self._load_state(state)

    def _refuse_foreign(self, params: list[nn.Parameter]) -> None:
        for parameter in params:
            if handle_of(parameter) is not self.handle:
                raise ValueError(
                    "add_param_group: a parameter is not of this optimizer's model, or was added to it later"
                )

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's own layout with full tensors, on every rank: a plain optimizer of the class loads it. Collective.

        The loss scaler's state, if there is one, lies beside it under "loss_scale".
        """
        self.handle.check_open("state_dict")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result = self._full_state()
        for after in self._optimizer_state_dict_post_hooks.values():
            result = after(self, result) or result
        return result

    def _full_state(self) -> dict[str, Any]:
        groups, position = [], 0
        for group in self.param_groups:
            indices = list(range(position, position + len(group["params"])))
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": indices})
            position += len(indices)
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for stepper in self._steppers:
            if isinstance(stepper, FlatStep):
                state |= full_state(stepper, self.handle.collectives)
            elif isinstance(stepper, OwnerStep):
                state |= stepper.full_state()
        result = {
            "state": {i: state[p] for i, p in enumerate(self._parameters()) if p in state},
            "param_groups": groups,
        }
        scaling = self._scaling.state_dict()
        return {**result, "loss_scale": scaling} if scaling else result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state that this method's counterpart, or a plain optimizer of the class, has given.

        Raises:
            ValueError: other param groups, or state of another shape.
        """
        self.handle.check_open("load_state_dict")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        sizes = [len(group["params"]) for group in self.param_groups]
        found = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != found:
            raise ValueError(f"the optimizer has param groups of {sizes} parameters, the state_dict of {found}")
        self._load_state(state_dict)
        self.half_done = False
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self._scaling.load_state_dict(state_dict.get("loss_scale", {}))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_state(self, state_dict: dict[str, Any]) -> None:
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        saved = state_dict["state"]
        state = {p: saved[i] for p, i in zip(self._parameters(), indices, strict=False) if i in saved}
        for stepper in self._steppers:
            if isinstance(stepper, FlatStep):
                load_full_state(stepper, state)
            elif isinstance(stepper, OwnerStep):
                stepper.load_full_state(state)

    def tensors(self) -> dict[str, list[Tensor]]:
        """What this optimizer holds, by kind."""
        kinds: dict[str, list[Tensor]] = {}
        for stepper in self._steppers:
            for kind, tensors in stepper.tensors().items():
                kinds.setdefault(kind, []).extend(tensors)
        return kinds

    @property
    def steppers(self) -> Sequence[Stepper]:
        """Who steps what: the parts of main that this rank updates, and their state."""
        return tuple(self._steppers)

    @property
    def scaling(self) -> LossScaling:
        return self._scaling

    @property
    def classes(self) -> Sequence[type[torch.optim.Optimizer]]:
        """Of each param group."""
        return tuple(self._classes)

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """`torch.amp.GradScaler` asks for this before anything else."""
        raise RuntimeError(
            "torch.amp.GradScaler looks for gradients in p.grad, and they are in the sharded buckets: pass "
            "loss_scale='dynamic' to ShardedOptimizer and use optimizer.backward(loss) instead"
        )

    # Building ----------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _find_handle(self, process_group: dist.ProcessGroup | None) -> Handle:
        parameters = self._parameters()
        handles = {id(handle): handle for handle in map(handle_of, parameters)}
        if len(handles) > 1:
            raise ValueError(
                "the parameters belong to different handles (or some to none): build one ShardedOptimizer per handle"
            )
        handle = next(iter(handles.values()))
        if handle is None:
            return shard_parameters(parameters, process_group)
        if process_group is not None:
            raise ValueError("process_group is for parameters without a handle; these have the mesh of theirs")
        return handle

    def _build_steppers(self) -> list[Stepper]:
        """One per optimizer class: those for whole parameters first."""
        steppers: list[Stepper] = []
        for optimizer_class in dict.fromkeys(self._classes):
            mine = [index for index, of_group in enumerate(self._classes) if of_group is optimizer_class]
            groups = self._groups_by_unit(mine)
            if not groups:
                continue
            defaults = self._inner_defaults if optimizer_class is self._class else {}
            elementwise = self._elementwise if optimizer_class is self._class else None
            options = {i: {k: v for k, v in self.param_groups[i].items() if k != "params"} for i in mine}
            if kind_of(optimizer_class, defaults, elementwise) is Kind.ELEMENTWISE:
                steppers.append(FlatStep(optimizer_class, options, defaults, groups))
            else:
                steppers.insert(0, OwnerStep(optimizer_class, options, defaults, groups, self.handle.collectives))
        if not steppers:
            raise ValueError("none of the parameters requires grad: there is nothing to optimize")
        return steppers

    def _groups_by_unit(self, indices: Sequence[int]) -> dict[Unit, list[int | None]]:
        group_of = {id(p): i for i in indices for p in self.param_groups[i]["params"]}
        units = {}
        for unit in self.handle.units:
            groups = [group_of.get(id(parameter)) for parameter in unit.parameters]
            if unit.main is not None and any(group is not None for group in groups):
                units[unit] = groups
        return units

    def _find_units(self) -> dict[Unit, set[int]]:
        """Unit -> the slots in it that are this optimizer's, in the handle's order."""
        mine: dict[Unit, set[int]] = {}
        for unit in self.handle.units:
            keys = [stepper.groups.get(unit, ()) for stepper in self._steppers]
            slots = {i for of_unit in keys for i, group in enumerate(of_unit) if group is not None}
            if slots:
                mine[unit] = slots
        return mine

    def _num_slots(self) -> int:
        return sum(len(unit.parameters) for unit in self._units)

    # Agreeing ----------------------------------------------------------------------------------------------------

    def _agree(self, norm_type: float) -> Control:
        """The control exchange: raises on all ranks alike if one is not ready. Once per step and kind of norm (but for
        gradients in p.grad, which change without our knowing)."""
        self.handle.check_open("use the optimizer")
        now = self.handle.reducer.num_backwards
        known = None if self.handle.plan.external_gradients else self._control
        if known is not None and known[0] == now and known[1].norm_type == norm_type:
            return known[1]
        units = self._units
        status = self._status(units)
        ready = status is Status.READY
        gradients = [pair for stepper in self._steppers for pair in stepper.own_gradients()] if ready else []
        flags = [unit.has_gradient(i) for unit in units for i in range(len(unit.parameters))]
        weight = 1.0 if self._scaling.weight is None else self._scaling.weight
        control = exchange_control(
            self.handle.collectives,
            status,
            weight,
            gradients,
            len(self.param_groups),
            norm_type,
            flags + self._scaling.overflows(),
        )
        for status, message in _NOT_READY.items():
            ranks = [rank for rank, found in enumerate(control.status) if found is status]
            if ranks:
                raise RuntimeError(f"step on rank {', '.join(map(str, ranks))}: {message}")
        if control.weight == 0:
            raise ValueError("the weights of all losses of this step, on all ranks, are 0: there is no mean to take")
        self._control = now, control
        return control

    def _status(self, units: dict[Unit, set[int]]) -> Status:
        if self.half_done:
            return Status.HALF_DONE
        updated = {id(p) for unit in self.handle.units if unit.main is not None for p in unit.parameters}
        if any(p.grad is not None and id(p) not in updated for p in self._parameters()):
            return Status.UNFROZEN
        if any(unit.grads is not None and unit.grads.state is GradState.PARTIAL for unit in units):
            return Status.NOT_REDUCED
        if self.handle.plan.external_gradients:
            has_any = any(p.grad is not None for unit in units for p in unit.parameters)
        else:
            has_any = any(unit.grads is not None and unit.grads.waiting & slots for unit, slots in units.items())
        return Status.READY if has_any else Status.NO_GRADIENTS

    def _mean_factor(self, control: Control) -> float:
        """Buffers hold sums over ranks (torch DDP's gradients are means already) of scaled losses."""
        total = control.weight / (len(control.status) if self.handle.plan.external_gradients else 1)
        return 1.0 / (total * (self.handle.reducer.scale or 1.0))

    def _overflows(self, control: Control) -> list[bool]:
        """For each scaler in use: whether any rank saw its loss overflow."""
        return list(control.present[self._num_slots() :])

    def _decide_to_skip(self, control: Control, norm: float) -> bool:
        policy = self._non_finite or ("skip" if self._scaling.is_scaled else "raise")
        if control.finite or policy == "ignore":
            return self._skip_norm_above is not None and not norm <= self._skip_norm_above
        exhausted = self._scaling.exhausted(self.handle.reducer, self._overflows(control))
        if policy == "raise" or exhausted is not None:
            many = f" {exhausted} times in a row" if exhausted is not None else ""
            hint = ""
            if self.handle.plan.weights is SHARDED:
                hint = (
                    ". If the loss is NaN under this plan alone, a parameter is used while no module of its unit runs "
                    "(a head that reads the embedding's weight, say): name the transformer block in units=, or choose "
                    "units= whose modules contain all uses of what they own"
                )
            raise RuntimeError(
                f"the gradient was not finite{many}: {self._name_nonfinite()}. Nothing has been updated{hint}"
            )
        return True

    def _name_nonfinite(self) -> str:
        """Where, as far as it is known: one more exchange, on the way out."""
        seen = self._scaling.findings()
        reduced = sorted(
            fragment.slot.name
            for unit in self._units
            for fragment in unit.layout.fragments_in(unit.own_shard())
            if not all(torch.isfinite(view).all() for view in unit.gradient_views(fragment.world))
        )
        found = self.handle.collectives.exchange_objects([seen, reduced])
        origins = [f"{', '.join(names)} on rank {rank}" for rank, (names, _) in enumerate(found) if names]
        if origins:
            return "; ".join(origins)
        names = sorted({name for _, names in found for name in names})
        return f"in the sum over ranks of {', '.join(names[:5]) or 'some parameter'}{' and others' * (len(names) > 5)}"

    # Updating ----------------------------------------------------------------------------------------------------

    def _update(self, control: Control, update: Update) -> None:
        units = self._units
        active, position = {}, 0
        for unit in units:
            active[unit] = list(control.present[position : position + len(unit.parameters)])
            position += len(unit.parameters)
        arriving = {}
        for unit in units:
            if unit.grads is not None and unit.plan.main is not SHARDED:
                arriving[unit] = unit.grads.replicate(self.handle.collectives)
        steppers_left = {unit: sum(unit in stepper.groups for stepper in self._steppers) for unit in units}

        def start(unit: Unit) -> None:
            if unit in arriving:
                arriving[unit].release()
            if unit.weights.state is Residency.GATHERING:
                unit.weights.arrive()

        def updated(unit: Unit) -> None:
            steppers_left[unit] -= 1
            if not steppers_left[unit] and unit.plan.main is SHARDED:
                self.handle.gatherer.updated(unit)

        for stepper in self._steppers:
            stepper.set_active(active)
            stepper.step(self.param_groups, update, start, updated)
        if self.handle.plan.external_gradients:
            self.handle.gatherer.settle()

    def _discard_gradients(self) -> None:
        self._control, self._clip, self._clip_value = None, 1.0, None
        for unit in self.handle.units:
            if unit.grads is not None:
                unit.grads.consume(self._units.get(unit, set()) | self.handle.unclaimed(unit))
        self.handle.reducer.forget_scale()

    def _own_padding(self, unit: Unit) -> int:
        """Elements of padding in the pieces of the own shard that hold the unit's last slot (they are zero)."""
        covered = sum(
            piece.world.numel - (piece.world & unit.layout.used).numel
            for stepper in self._steppers
            if isinstance(stepper, FlatStep)
            for piece in stepper.of_unit(unit)
            if piece.world in unit.own_shard()
        )
        return covered if unit.grads is not None else 0


_NOT_READY = {
    Status.HALF_DONE: "an earlier update has raised half way, so that some weights are a step ahead of others. Load "
    "weights and optimizer state again (a checkpoint, or load_full_state_dict and load_state_dict)",
    Status.UNFROZEN: "a parameter has a gradient that was frozen when the model was called last. Let it require grad "
    "before the model (not only a part of it) is called; under OPTIMIZER_ONLY before the optimizer is built",
    Status.NOT_REDUCED: "gradients were accumulated under no_sync() and never reduced. Run the last micro-batch's "
    "backward outside of no_sync()",
    Status.NO_GRADIENTS: "there are no gradients. Call backward before step or clip_grad_norm_",
}


def _defaults_of(optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The class's own defaults with these options; the class checks them."""
    return optimizer_class([torch.zeros(2, 2)], **options).defaults


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


def _non_finite(choice: NonFinite | None) -> NonFinite | None:
    if choice not in ("raise", "skip", "ignore", None):
        raise ValueError(f"non_finite must be 'raise', 'skip' or 'ignore', found {choice!r}")
    return choice
