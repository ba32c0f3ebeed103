"""The result of a step, which also behaves as the closure's loss, as torch's `step(closure)` returns that."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from zeroshard.errors import InvalidType


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a step. Code that expects the loss, as from torch's `step(closure)`, can use it as the loss
    (`float(result)`, `result < best`, `total += result`, `f"{result:.3f}"`, `result.item()`, `torch.isnan(result)`).

    Attributes:
        applied: False if the step was skipped, or there were no gradients: weights, state and step counts have not
            changed (after a skipped step, do not step the scheduler either).
        grad_norm: p-norm of the mean gradient before clipping (p = 2, or that of `clip_grad_norm_`; of several clips,
            before the last one); NaN if it is not finite.
        group_norms: the same per param group.
        loss_scale: the scale of the loss.
        loss: the closure's result; None without a closure.
    """

    applied: bool
    grad_norm: float
    group_norms: tuple[float, ...] = ()
    loss_scale: float = 1.0
    loss: Any = None

    def __float__(self) -> float:
        loss = self._the_loss()
        return float(loss.detach() if isinstance(loss, Tensor) else loss)

    def __int__(self) -> int:
        return int(float(self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)

    def __format__(self, spec: str) -> str:
        return format(self._the_loss(), spec) if spec else str(self)

    def __eq__(self, other: object) -> Any:
        # Not `astuple`, which copies: a loss with a graph cannot be copied.
        return vars(self) == vars(other) if isinstance(other, StepResult) else self.loss == other

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        """Attributes of the loss: `item`, `detach`, `cpu`, ..."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._the_loss(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call torch's functions with the loss in place of the result."""
        args, kwargs = tree_map_only(StepResult, cls._the_loss, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _the_loss(self) -> Any:
        if self.loss is None:
            raise InvalidType("this step has no loss: step() was called without a closure that returns one")
        return self.loss


def _loss_of(value: Any) -> Any:
    return value._the_loss() if isinstance(value, StepResult) else value


def _forward(name: str, function: Callable[..., Any], *, swapped: bool = False) -> None:
    def method(self: StepResult, *others: Any) -> Any:
        values = [self._the_loss(), *map(_loss_of, others)]
        return function(*(reversed(values) if swapped else values))

    setattr(StepResult, name, method)


for _name in ("lt", "le", "gt", "ge", "neg", "pos", "abs"):
    _forward(f"__{_name}__", getattr(operator, _name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _forward(f"__{_name}__", getattr(operator, _name))
    _forward(f"__r{_name}__", getattr(operator, _name), swapped=True)
