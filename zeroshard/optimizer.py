"""`ShardedOptimizer`: a `torch.optim.Optimizer` over the user's own parameters that updates main shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.control import Control, Status, exchange_control
from zeroshard.flat_step import FlatStep
from zeroshard.gradients import GradState
from zeroshard.optimizer_state import full_state, load_full_state
from zeroshard.placement import SHARDED
from zeroshard.shard import Handle, handle_of, shard_parameters
from zeroshard.unit import Unit
from zeroshard.weights import Residency


@dataclass(frozen=True)
class StepResult:
    """What a step did. `grad_norm`: 2-norm of the mean gradient, before clipping."""

    applied: bool
    grad_norm: float
    loss: Any = None


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps any elementwise optimizer class on this rank's part of main, and hands the weights round.

    Args:
        handle_or_params: the handle of `shard`; or its parameters, or param groups of them, as for any optimizer.
            Parameters that no handle owns are taken under plan OPTIMIZER_ONLY: torch DDP (say) reduces their
            gradients, this optimizer shards its state over `process_group`.
        optimizer_class: for example `torch.optim.AdamW`.
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
        self._flat: FlatStep | None = None
        super().__init__(params, optimizer_class([torch.zeros(1)], **defaults).defaults)
        self._class, self._defaults = optimizer_class, defaults
        self.handle = self._find_handle(process_group)
        groups = self._groups_by_unit()
        self.handle.claim([p for group in self.param_groups for p in group["params"]], self)
        self._flat = FlatStep(optimizer_class, self._options(), defaults, groups)
        self._control: Control | None = None
        self._clip = 1.0

    # The loop ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`loss.backward(**kwargs)`, after a check that the loss can be differentiated.

        Raises:
            ValueError: not a scalar (without `gradient=`).
            RuntimeError: backward a second time on the same graph, or a loss that no parameter has led to.
        """
        self.handle.check_open("backward")
        if loss.numel() != 1 and "gradient" not in kwargs:
            raise ValueError(
                f"the loss must be a scalar, found shape {tuple(loss.shape)}: take its mean, or pass gradient="
            )
        if not loss.requires_grad:
            raise RuntimeError("the loss has no graph: was forward run under no_grad, or are all parameters frozen?")
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

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
        self._control = control = self._agree(float(norm_type))
        norm = control.norm * self._mean_factor(control)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm}: cannot clip (error_if_nonfinite)")
        self._clip = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        return torch.tensor(norm, dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Update main and weights from the reduced gradients. Collective.

        Raises:
            RuntimeError: before backward; after a backward that was only accumulated (`no_sync`); a gradient that is
                not finite (nothing has been updated).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # 1. agree: is everybody ready, what is the norm, who has gradients
        control = self._control or self._agree(2.0)
        factor, clip = self._mean_factor(control), self._clip
        self._control, self._clip = None, 1.0
        if not control.finite:
            raise RuntimeError(self._name_nonfinite())
        flat = self._stepper()
        flat.set_active(self._by_unit(control.present))
        # 2. gradients go where main is
        arriving = {unit: unit.grads.replicate(self.handle.collectives) for unit in flat.groups
                    if unit.grads is not None and unit.plan.main is not SHARDED}  # fmt: skip

        def start(unit: Unit) -> None:
            if unit in arriving:
                arriving[unit].wait()
            if unit.weights.state is Residency.GATHERING:
                unit.weights.arrive()

        # 3. step piece by piece; 4. weights follow, unit by unit, while the rest is stepped and the next forward starts
        flat.step(self.param_groups, factor * clip, start, self._weights_updated)
        if self.handle.plan.external_gradients:
            self.handle.gatherer.settle()
        else:
            self._consume()
        return StepResult(True, control.norm * factor, loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this optimizer's parameters."""
        super().zero_grad(set_to_none)
        if self._flat is not None:
            self._control, self._clip = None, 1.0
            self._consume()

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's own layout with full tensors, on every rank: a plain optimizer of the class loads it. Collective."""
        groups, position = [], 0
        for group in self.param_groups:
            indices = list(range(position, position + len(group["params"])))
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": indices})
            position += len(indices)
        parameters = [p for group in self.param_groups for p in group["params"]]
        state = full_state(self._stepper(), self.handle.collectives)
        return {
            "state": {i: state[p] for i, p in enumerate(parameters) if p in state},
            "param_groups": groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state that this method's counterpart, or a plain optimizer of the class, has given.

        Raises:
            ValueError: other param groups, or state of another shape.
        """
        sizes = [len(group["params"]) for group in self.param_groups]
        found = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != found:
            raise ValueError(f"the optimizer has param groups of {sizes} parameters, the state_dict of {found}")
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        state = {
            parameter: state_dict["state"][index]
            for parameter, index in zip(parameters, indices, strict=True)
            if index in state_dict["state"]
        }
        load_full_state(self._stepper(), state)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    # Inside ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[Tensor]]:
        """What this optimizer holds, by kind."""
        return self._stepper().tensors()

    def _stepper(self) -> FlatStep:
        assert self._flat is not None
        self.handle.check_open("use the optimizer")
        return self._flat

    def _options(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

    def _find_handle(self, process_group: dist.ProcessGroup | None) -> Handle:
        parameters = [p for group in self.param_groups for p in group["params"]]
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

    def _groups_by_unit(self) -> dict[Unit, list[int | None]]:
        group_of = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        units = {}
        for unit in self.handle.units:
            groups = [group_of.get(id(parameter)) for parameter in unit.parameters]
            if unit.main is not None and any(group is not None for group in groups):
                units[unit] = groups
        if not units:
            raise ValueError("none of the parameters requires grad: there is nothing to optimize")
        return units

    def _mine(self, unit: Unit) -> set[int]:
        return {i for i, group in enumerate(self._stepper().groups[unit]) if group is not None}

    def _agree(self, norm_type: float) -> Control:
        """The control exchange: raises on all ranks alike if one is not ready."""
        flat = self._stepper()
        status = self._status()
        gradients = list(flat.own_gradients()) if status is Status.READY else []
        present = [self._has_gradient(unit, i) for unit in flat.groups for i in range(len(unit.parameters))]
        control = exchange_control(
            self.handle.collectives, status, 1.0, gradients, len(self.param_groups), norm_type, present
        )
        for status, message in _NOT_READY.items():
            ranks = [rank for rank, found in enumerate(control.status) if found is status]
            if ranks:
                raise RuntimeError(f"step on rank {', '.join(map(str, ranks))}: {message}")
        return control

    def _status(self) -> Status:
        units = self._stepper().groups
        if any(unit.grads is not None and unit.grads.state is GradState.PARTIAL for unit in units):
            return Status.NOT_REDUCED
        if self.handle.plan.external_gradients:
            has_any = any(p.grad is not None for unit in units for p in unit.parameters)
        else:
            has_any = any(unit.grads is not None and unit.grads.state is GradState.REDUCED for unit in units)
        return Status.READY if has_any else Status.NO_GRADIENTS

    def _has_gradient(self, unit: Unit, index: int) -> bool:
        if unit.grads is None:
            return unit.parameters[index].grad is not None
        return index in unit.grads.present

    def _by_unit(self, flags: tuple[bool, ...]) -> dict[Unit, list[bool]]:
        result, position = {}, 0
        for unit in self._stepper().groups:
            result[unit] = list(flags[position : position + len(unit.parameters)])
            position += len(unit.parameters)
        return result

    def _mean_factor(self, control: Control) -> float:
        """Buffers hold sums over ranks; torch DDP's gradients are means already."""
        return 1.0 if self.handle.plan.external_gradients else 1.0 / control.weight

    def _weights_updated(self, unit: Unit) -> None:
        if unit.plan.main is SHARDED:
            self.handle.gatherer.updated(unit)

    def _consume(self) -> None:
        for unit in self._stepper().groups:
            if unit.grads is not None:
                unit.grads.consume(self._mine(unit))

    def _name_nonfinite(self) -> str:
        """Which parameters, on which rank: one more exchange, on the way out."""
        names = sorted(
            {
                fragment.slot.name
                for piece in self._stepper().pieces
                if piece.unit.grads is not None and piece.world in piece.unit.own_shard()
                for fragment in piece.unit.layout.fragments_in(piece.world)
                if not torch.isfinite(piece.unit.grads.piece(fragment.world)).all()
            }
        )
        by_rank = self.handle.collectives.exchange_objects(names)
        found = "; ".join(f"{', '.join(names)} (shard of rank {rank})" for rank, names in enumerate(by_rank) if names)
        return f"the gradient is not finite in {found or 'some parameter'}. Nothing has been updated"


_NOT_READY = {
    Status.NOT_REDUCED: "gradients were accumulated under no_sync() and never reduced. Run the last micro-batch's "
    "backward outside of no_sync()",
    Status.NO_GRADIENTS: "there are no gradients. Call backward before step or clip_grad_norm_",
}
