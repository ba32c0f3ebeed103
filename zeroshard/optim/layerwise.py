"""The common part of the layer-wise optimizers: the loop over parameters, the norm, the trust ratio."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from zeroshard.errors import InvalidValue
from zeroshard.layout.norms import ROW_NUMEL, norms_of_rows


def norm(tensor: Tensor) -> Tensor:
    """2-norm of the whole tensor, 0-d, by rows (see `norms.py`)."""
    flat = tensor.reshape(-1)
    while flat.numel() > ROW_NUMEL:
        flat = norms_of_rows(flat)
    total: Tensor = vector_norm(flat)
    return total


def trust_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 1 if either is zero (else a parameter that starts at zero could never change)."""
    defined = (numerator > 0) & (denominator > 0)
    return torch.where(defined, numerator / denominator, torch.ones_like(numerator))


def expect(name: str, value: float | Tensor, *, below: float = math.inf) -> None:
    """Check that `0 <= value < below` (so NaN is refused, too).

    Raises:
        ValueError: it is not; the message has the name, the range and the value.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise InvalidValue(f"{name} must be one number, found a tensor of shape {tuple(value.shape)}")
    if not 0.0 <= value < below:
        limit = "finite" if math.isinf(below) else f"below {below:g}"
        raise InvalidValue(f"{name} must be at least 0 and {limit}, found {value}")


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Calls `update` for each parameter with a gradient. Arithmetic is in fp32 (fp64 for fp64 parameters).

    The state has the parameter's dtype, as in torch: 16-bit parameters want an fp32 master (`zeroshard.shard` keeps
    one) rather than 16-bit moments.
    """

    def check(self, group: dict[str, Any]) -> None:
        """Raise for hyper-parameters that are out of range."""
        raise NotImplementedError

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step one parameter: update `weight` and `state` in place, all in the dtype of `weight`. `grad` must not be
        changed."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like torch's, after checking the hyper-parameters."""
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns the result of `closure`, which recomputes the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse or parameter.is_complex():
            kind = "sparse gradients" if grad.is_sparse else "complex parameters"
            raise InvalidValue(f"{type(self).__name__} does not support {kind}; use torch.optim.SGD for these")
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        weight = parameter.to(dtype)  # itself, unless it has 16 bits
        grad = grad.to(dtype)
        state = {key: value if key == "step" else value.to(dtype) for key, value in self.state[parameter].items()}
        self.update(weight, -grad if group["maximize"] else grad, state, group)
        parameter.copy_(weight)
        for key, value in state.items():
            self.state[parameter][key] = value if key == "step" else value.to(parameter.dtype)


def learning_rate(group: dict[str, Any]) -> float | Tensor:
    """A number, or the 0-d tensor behind it (schedulers may fill one in place)."""
    lr: float | Tensor = group["lr"]
    return lr.reshape(()) if isinstance(lr, Tensor) else lr
