"""A slow, simple single-process implementation, with which the engine's results are compared.

One process plays all ranks, one after the other, on one plain model:

    for each rank, each micro-batch     total[rank] += p.grad after loss.backward()         in the gradient dtype
    sum over ranks                      gradient = ((total[0] + total[1]) + total[2]) ...   in the wire's dtype
    mean                                gradient / num_ranks                                in the gradient dtype
    one multiplication, if clipped      main.grad = gradient * clip                         in main's dtype
    a plain torch optimizer on main     weights = main, rounded to the compute dtype

It uses no flat buffers, layouts or shards: a parameter is a tensor with a main beside it. The engine's results are
bit-equal to this if the arithmetic is the same: one reduction per step, an optimizer whose result does not depend on
how a vector is cut (not `fused`), and no clipping (the norm is summed in another order here).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import InvalidValue
from zeroshard.model.casting import Precisions, Rules, attach_casts, casts_of
from zeroshard.model.paths import modules_of
from zeroshard.model.unit_policy import UnitPolicy
from zeroshard.model.units import choose_units
from zeroshard.precision import MixedPrecision, precision_for

LossOf = Callable[[nn.Module, int, int], Tensor]
"""(model, rank, micro-batch) -> the loss. The function must divide it by the number of micro-batches itself."""


@dataclass(frozen=True)
class ReferenceStep:
    """`losses[rank][micro_batch]`, and the 2-norm of the mean gradient before clipping."""

    losses: tuple[tuple[float, ...], ...]
    grad_norm: float


class Reference:
    """Trains a plain model as `num_ranks` ranks would.

    Args:
        model: changed in place: it holds the weights, in the compute dtype.
        optimizer_class: any class of torch.optim; `defaults` are its arguments.
        num_ranks: how many ranks to simulate.
        params: param groups over the model's parameters, as for the optimizer; None: all that require grad.
        precision, units: as for `shard` (inputs of units are cast).

    Raises:
        ValueError: the wire dtype is narrower than the gradient's. (The engine does not round the owner's own term, so
            its sum depends on which rank owns which element; here there are no owners.)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        num_ranks: int,
        precision: Precisions = None,
        units: UnitPolicy = None,
        params: Iterable[dict[str, Any]] | None = None,
        **defaults: Any,
    ) -> None:
        self.model, self.num_ranks = model, num_ranks
        self.precisions: dict[nn.Parameter, MixedPrecision] = {}
        self.main: dict[nn.Parameter, nn.Parameter] = {}
        rules, modules = Rules.of(precision), modules_of(model)
        regions = rules.parameters(modules)
        called = [path for spec in choose_units(model, units, precision) for path in spec.calls]
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            record = regions[id(parameter)].precision
            of_parameter = precision_for(parameter.dtype, record)
            if parameter.requires_grad:
                self._adopt(parameter, of_parameter)
            elif record is not None:
                parameter.data = parameter.data.to(of_parameter.param)
        groups = params if params is not None else [{"params": list(self.main)}]
        main_groups = [{**group, "params": [self.main[p] for p in group["params"]]} for group in groups]
        self.optimizer = optimizer_class(main_groups, **defaults)
        list(attach_casts(casts_of(modules, rules, called)))

    def _adopt(self, parameter: nn.Parameter, precision: MixedPrecision) -> None:
        if precision.wire.itemsize < precision.grad.itemsize:
            raise InvalidValue(f"reference: the wire {precision.wire} is narrower than the gradient {precision.grad}")
        self.precisions[parameter] = precision
        if precision.grad.itemsize > precision.param.itemsize:
            parameter.grad_dtype = precision.grad  # autograd also sums several uses in one backward in it
        parameter.data = parameter.data.contiguous()  # as in a flat buffer: a transposed weight would use other kernels
        if precision.weights_are_main:
            parameter.data = parameter.data.to(precision.param)
            self.main[parameter] = parameter
        else:
            self.main[parameter] = nn.Parameter(parameter.detach().to(precision.main_dtype, copy=True))
            parameter.data = self._rounded(parameter)

    def step(
        self,
        loss_of: LossOf,
        *,
        micro_batches: int = 1,
        reduce_every_micro_batch: bool = False,
        max_norm: float | None = None,
    ) -> ReferenceStep:
        """One step of all ranks.

        Args:
            reduce_every_micro_batch: True: reduce after each micro-batch instead of once. The mean so far, times the
                number of ranks, is then part of rank 0's term. (In the engine it is part of the term of the element's
                owner: the results are bit-equal if sums are exact.)
            max_norm: clip the mean gradient to this 2-norm.
        """
        losses: list[list[float]] = [[] for _ in range(self.num_ranks)]
        means: dict[nn.Parameter, Tensor] = {}
        rounds = [[m] for m in range(micro_batches)] if reduce_every_micro_batch else [list(range(micro_batches))]
        for members in rounds:
            totals = [self._accumulate(loss_of, rank, members, losses[rank]) for rank in range(self.num_ranks)]
            for parameter in self.main:
                terms = [total[parameter] for total in totals if parameter in total]
                if terms:
                    means[parameter] = self._mean(parameter, terms, means.get(parameter))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in means.values()))
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        self._update(means, clip)
        return ReferenceStep(tuple(map(tuple, losses)), norm)

    def _accumulate(
        self, loss_of: LossOf, rank: int, micro_batches: Sequence[int], losses: list[float]
    ) -> dict[nn.Parameter, Tensor]:
        """Parameter -> sum of one rank's gradients over the micro-batches; without parameters that got no gradient."""
        total: dict[nn.Parameter, Tensor] = {}
        for micro_batch in micro_batches:
            loss = loss_of(self.model, rank, micro_batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            for parameter, precision in self.precisions.items():
                if parameter.grad is not None:
                    so_far, grad = total.get(parameter), parameter.grad.to_dense()  # only changes sparse gradients
                    added = grad if so_far is None else so_far + grad
                    total[parameter] = added.to(precision.grad)
                    parameter.grad = None
        return total

    def _mean(self, parameter: nn.Parameter, terms: Sequence[Tensor], so_far: Tensor | None) -> Tensor:
        precision = self.precisions[parameter]
        first = terms[0] if so_far is None else terms[0] + so_far * self.num_ranks
        total = first.to(precision.wire)
        for term in terms[1:]:
            total = total + term.to(precision.wire)
        mean = total.to(precision.grad)
        return mean / torch.full_like(mean, self.num_ranks)  # by a number, a GPU would multiply by its reciprocal

    @torch.no_grad()
    def _update(self, means: dict[nn.Parameter, Tensor], factor: float) -> None:
        for parameter, main in self.main.items():
            main.grad = means[parameter].to(main.dtype) * factor if parameter in means else None
        self.optimizer.step()
        for parameter, main in self.main.items():
            main.grad = None
            parameter.data = self._rounded(parameter)

    def _rounded(self, parameter: nn.Parameter) -> Tensor:
        """The weights: main, rounded to the compute dtype."""
        precision, main = self.precisions[parameter], self.main[parameter].detach()
        if precision.main == "remainder":
            return nearest_bf16_ties_away(main)
        return main.to(precision.param)

    def state_dict(self) -> dict[str, Tensor]:
        """Names and values of the model's `state_dict()`, copied."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def nearest_bf16_ties_away(master: Tensor) -> Tensor:
    """The rounding of a 16-bit remainder, see [Note: remainder] in `main_weights`; torch's own takes ties to even."""
    half = 0x8000
    return (master.view(torch.int32) + half >> 16).to(torch.int16).view(torch.bfloat16)
