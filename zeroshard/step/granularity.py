"""The granularity of an optimizer class: elements, or whole parameters. It is listed, declared, or found by a trial.

An elementwise optimizer updates each element from that element's own gradient and state (and scalars): it gives the
same result however a parameter is cut. Muon, LAMB, LARS, Adafactor and Shampoo do not.
"""

from __future__ import annotations

import copy
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.errors import InvalidValue
from zeroshard.optim import Lamb, Lars
from zeroshard.step.assignment import OptimizerClass, Options
from zeroshard.step.inner import begin_training, expect_no_closure, run_step


class Granularity(Enum):
    """The least that an optimizer class can step on its own."""

    ELEMENT = "element"
    PARAMETER = "parameter"


_OPTIM = torch.optim
_ELEMENTWISE = (
    _OPTIM.SGD,
    _OPTIM.Adam,
    _OPTIM.AdamW,
    _OPTIM.NAdam,
    _OPTIM.RAdam,
    _OPTIM.Adamax,
    _OPTIM.Adagrad,
    _OPTIM.Adadelta,
    _OPTIM.RMSprop,
    _OPTIM.Rprop,
    _OPTIM.ASGD,
)
_WHOLE = (_OPTIM.Adafactor, Lamb, Lars, *((_OPTIM.Muon,) if hasattr(_OPTIM, "Muon") else ()))
_KNOWN: dict[OptimizerClass, Granularity] = {
    **dict.fromkeys(_ELEMENTWISE, Granularity.ELEMENT),
    **dict.fromkeys(_WHOLE, Granularity.PARAMETER),
}

_REFUSED = {
    _OPTIM.LBFGS: "LBFGS looks at all parameters at once and evaluates the loss many times per step",
    _OPTIM.SparseAdam: "SparseAdam takes sparse gradients, and buckets are dense; use Adam",
}


def granularity_of(
    optimizer_class: OptimizerClass, options: Options, elementwise: bool | None, *, sharded: bool = False
) -> Granularity:
    """The granularity of a class: as declared by `elementwise`; else from the list; else, for torchao's low-bit
    classes, ELEMENT (elementwise in blocks of 256, which shards never cut); else by a trial: two small matrices are
    stepped together, one by one, and cut into pieces, and the results are compared.

    Args:
        sharded: whether no rank steps all parameters.

    Raises:
        ValueError: the class cannot be sharded, or the trial fails.
    """
    if optimizer_class in _REFUSED:
        raise InvalidValue(f"{optimizer_class.__name__} cannot be sharded: {_REFUSED[optimizer_class]}")
    expect_no_closure(optimizer_class)
    if elementwise is not None:
        return Granularity.ELEMENT if elementwise else Granularity.PARAMETER
    if optimizer_class in _KNOWN:
        return _KNOWN[optimizer_class]
    if optimizer_class.__module__.startswith("torchao."):
        return Granularity.ELEMENT
    try:
        together, one_by_one = (_try_out(optimizer_class, options, apart=apart) for apart in (False, True))
    except Exception as error:
        raise InvalidValue(
            f"{optimizer_class.__name__} is unknown, and stepping it on two small matrices raised {error!r}. Pass "
            "elementwise=True if it updates every element on its own, elementwise=False if it needs whole parameters"
        ) from error
    found = together.settings ^ one_by_one.settings
    if sharded and found:
        raise InvalidValue(
            f"{optimizer_class.__name__} cannot be sharded: it computes {min(found)[0]!r} of a param group from all "
            'parameters of the group, and no rank has them all. Use the plan "ddp"'
        )
    if not _close(together, one_by_one):
        raise InvalidValue(
            f"{optimizer_class.__name__} cannot be sharded: what it does to one parameter depends on the others (on a "
            "norm over all of them, perhaps), and no rank has them all"
        )
    try:
        cuts_alike = _close(one_by_one, _try_out(optimizer_class, options, cut=True))
    except Exception:  # the class takes matrices only
        cuts_alike = False
    return Granularity.ELEMENT if cuts_alike else Granularity.PARAMETER


class _Outcome(NamedTuple):
    """After a trial: all elements, and the numbers in the param groups of all optimizers, (name, number)."""

    values: Tensor
    settings: frozenset[tuple[str, float]]


def _try_out(optimizer_class: OptimizerClass, options: Options, *, apart: bool = True, cut: bool = False) -> _Outcome:
    """Two matrices, or pieces of them, after four steps: by one optimizer, or by one optimizer for each tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 6, generator=generator), torch.randn(3, 5, generator=generator) * 10]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if cut:
        tensors = [piece.clone() for piece in torch.split(flat, 7)]
    members = [[tensor.requires_grad_()] for tensor in tensors] if apart else [[t.requires_grad_() for t in tensors]]
    optimizers = [optimizer_class(of_one, **copy.deepcopy(options)) for of_one in members]
    for optimizer in optimizers:
        begin_training(optimizer)
    gradients = torch.Generator().manual_seed(1)
    for _ in range(4):
        gradient = torch.randn(flat.numel(), generator=gradients) * torch.linspace(0.1, 3, flat.numel())
        _set_gradients(tensors, gradient)
        for optimizer in optimizers:
            run_step(optimizer)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings = frozenset((key, float(value)) for group in groups for key, value in group.items() if _is_number(value))
    return _Outcome(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), settings)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _close(a: _Outcome, b: _Outcome) -> bool:
    return torch.allclose(a.values, b.values, rtol=1e-6, atol=1e-7)


def _set_gradients(tensors: list[Tensor], gradient: Tensor) -> None:
    start = 0
    for tensor in tensors:
        tensor.grad = gradient[start : start + tensor.numel()].view_as(tensor).clone()
        start += tensor.numel()
