"""The granularity of an optimizer class: elements, or whole parameters. It is listed, declared, or found by a trial.

An elementwise optimizer updates each element from that element's own gradient and state (and scalars): it gives the
same result however a parameter is cut. Muon, LAMB, LARS, Adafactor and Shampoo do not.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard.errors import InvalidValue
from zeroshard.gradients.settings import plain
from zeroshard.model.absent import kind_of
from zeroshard.model.trees import tensors_in
from zeroshard.optim import Lamb, Lars
from zeroshard.step.assignment import Assignment, OptimizerClass, Options, options_in
from zeroshard.step.inner import (
    built_for_trial,
    expect_no_closure,
    expect_state_of_tensors,
    run_step,
    stepped_for_trial,
    trial,
)


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
_WHOLE = (_OPTIM.Adafactor, _OPTIM.Muon, Lamb, Lars)
_KNOWN: dict[OptimizerClass, Granularity] = {
    **dict.fromkeys(_ELEMENTWISE, Granularity.ELEMENT),
    **dict.fromkeys(_WHOLE, Granularity.PARAMETER),
}

_REFUSED = {
    _OPTIM.LBFGS: "LBFGS looks at all parameters at once and evaluates the loss many times per step",
    _OPTIM.SparseAdam: "SparseAdam takes sparse gradients, and buckets are dense; use Adam",
}


def granularity_of(
    optimizer_class: OptimizerClass,
    options: Options,
    elementwise: bool | None,
    *,
    sharded: bool = False,
    groups: Sequence[Options] = (),
    parameters: Sequence[Tensor] = (),
) -> Granularity:
    """The granularity of a class: as declared by `elementwise`; else from the list; else, for torchao's low-bit
    classes, ELEMENT (elementwise in blocks of 256, which shards never cut); else by a trial: two small matrices are
    stepped together, one by one, and cut into pieces, and the results are compared. A class is taken to be elementwise
    only if none of its operations combines elements either, and if it sees nothing of these parameters that their
    pieces have not: a class of their own (geoopt's points on manifolds), or attributes that it asks for.

    Args:
        sharded: whether no rank steps all parameters.
        groups: the hyper-parameters of the param groups, which may make a class another one (GaLore's `rank`): each
            group has a trial, unless it differs from one before only in numbers.
        parameters: what it steps.

    Raises:
        ValueError: the class cannot be sharded, or the trial fails.
    """
    if optimizer_class in _REFUSED:
        raise InvalidValue(f"{optimizer_class.__name__} cannot be sharded: {_REFUSED[optimizer_class]}")
    expect_no_closure(optimizer_class)
    declared = None if elementwise is None else Granularity.ELEMENT if elementwise else Granularity.PARAMETER
    if (listed := _listed(optimizer_class)) is not None:
        return declared or listed
    tried = _Tried(optimizer_class, options)
    with trial():
        kinds = _of_kinds(tried, groups)
        if any(_communicates(one) for one in kinds):
            if sharded:
                _refuse_communicating(tried, "each rank steps other parameters")
            if any(_shares_out(one) for one in kinds):
                _refuse_communicating(tried, "keeps the state of a parameter on one rank, where no checkpoint finds it")
            return declared or Granularity.PARAMETER  # a trial could fail on one rank, and others would wait for it
        if declared is not Granularity.PARAMETER:
            _expect_all_in_state(kinds)
        asked = _asked_for(_attributes_of(parameters), kinds, parameters)
        if declared is None:
            found = {_by_trial(tried, sharded=sharded), *(_of_group(one, sharded=sharded) for one in kinds[1:])}
            if asked or any(kind_of(parameter) is not nn.Parameter for parameter in parameters):
                return Granularity.PARAMETER
            return Granularity.PARAMETER if Granularity.PARAMETER in found else Granularity.ELEMENT
        if asked and declared is Granularity.ELEMENT:
            raise InvalidValue(
                f"elementwise=True, and {tried.name} looks at attributes of parameters ({', '.join(asked[:5])}), which "
                "pieces of parameters have not: leave elementwise= out"
            )
        try:
            tried.stepped([_ones(4, 6)])
        except Exception as error:  # of a class that steps on a GPU only, or in matrices of another shape
            _expect_nothing_missing(tried, error)
        return declared


def _listed(optimizer_class: OptimizerClass) -> Granularity | None:
    """None: a trial is needed."""
    is_low_bit = optimizer_class.__module__.startswith("torchao.")
    return _KNOWN.get(optimizer_class, Granularity.ELEMENT if is_low_bit else None)


class Watched:
    """The options of param groups that were stepped as elements, because a trial has found that: the user may change
    one so that the class needs whole parameters. So it does if parameters get attributes that it looks at."""

    def __init__(self, assignment: Assignment, elementwise: bool | None) -> None:
        """`elementwise`: as declared by the user. What needs no trial needs not be watched."""
        self._tried = _Tried(assignment.optimizer_class, assignment.defaults)
        is_listed = _listed(assignment.optimizer_class) is not None
        is_tried = elementwise is None and not is_listed
        self._kinds = {i: kinds_of(group) for i, group in assignment.options.items()} if is_tried else {}
        self._groups = [*assignment.options]
        self._parameters = () if is_listed else tuple([member.parameter for member in assignment.members()])
        self._unasked = _attributes_of(self._parameters)

    def note(self, groups: Sequence[Options]) -> None:
        """After a step: what the class has changed itself needs no trial."""
        for index in self._kinds:
            self._kinds[index] = kinds_of(groups[index])

    def expect_elementwise(self, groups: Sequence[Options]) -> None:
        """Before a step.

        Raises:
            ValueError: with an option or an attribute that has changed since the last step the class needs whole
                parameters.
        """
        for index, before in self._kinds.items():
            if (kinds := kinds_of(groups[index])) == before:
                continue
            with trial():
                found = _of_group(replace(self._tried, of_group=options_in(groups[index])), sharded=False)
            if found is Granularity.PARAMETER:
                changed = ", ".join(key for key, kind in kinds.items() if before.get(key, ...) != kind)
                raise InvalidValue(
                    f"param group {index}: with the new value of {changed} {self._tried.name} may need whole "
                    "parameters, and is stepped in pieces. Pass elementwise=False (or True, if it does not) to the "
                    "optimizer, or set the option before you build it"
                )
            self._kinds[index] = kinds
            self._unasked.clear()  # with this option it may ask for others
        if names := _attributes_of(self._parameters) - self._unasked:
            with trial():
                kinds_of_all = _of_kinds(self._tried, [options_in(groups[index]) for index in self._groups])
                asked = _asked_for(names, kinds_of_all, self._parameters, once_built=True)
            if asked:
                raise InvalidValue(
                    f"{self._tried.name} looks at attributes of parameters ({', '.join(asked[:5])}) and steps "
                    "them in pieces, which have none: set them (or the option with which it looks there) before you "
                    "build the optimizer, or pass elementwise=False"
                )
            self._unasked |= names


def expect_empty_taken(optimizer_class: OptimizerClass, options: Options, name: str, shape: Sequence[int]) -> None:
    """Step a parameter without elements. The rank that owns it would raise alone.

    Raises:
        ValueError: the class cannot, as torch's Adafactor, which divides by the number of elements.
    """
    try:
        with trial():
            _Tried(optimizer_class, options).stepped([_ones(*shape)])
    except ArithmeticError as error:
        raise InvalidValue(
            f"{optimizer_class.__name__} cannot step {name}, which has no elements ({error!r}, as in plain torch): "
            "leave it out of the optimizer's parameters, or let it not require grad before shard()"
        ) from error


@dataclass(frozen=True)
class _Tried:
    """A class that is tried out, with its arguments and the options of a param group (None: its defaults)."""

    optimizer_class: OptimizerClass
    arguments: Options
    of_group: Options | None = None

    @property
    def name(self) -> str:
        return self.optimizer_class.__name__

    def over(self, tensors: list[Tensor]) -> torch.optim.Optimizer:
        """An instance over these tensors that can step."""
        return built_for_trial(self.optimizer_class, self.arguments, tensors, self.of_group)

    def stepped(self, tensors: list[Tensor], steps: int = 1) -> torch.optim.Optimizer:
        """An instance over these tensors that has stepped."""
        return stepped_for_trial(self.over(tensors), tensors, steps)


def _by_trial(tried: _Tried, *, sharded: bool) -> Granularity:
    watching = _Watching()
    try:
        together = _try_out(tried, apart=False)
        one_by_one = _try_out(tried, watching)
    except InvalidValue:
        raise
    except Exception as error:
        _expect_nothing_missing(tried, error)
        raise InvalidValue(
            f"{tried.name} is unknown, and stepping it on two small matrices raised {error!r}. Pass elementwise=True "
            "if it updates every element on its own, elementwise=False if it needs whole parameters"
        ) from error
    if sharded and watching.communicates:
        _refuse_communicating(tried, "each rank steps other parameters")
    found = together.settings ^ one_by_one.settings
    if sharded and found:
        raise InvalidValue(
            f"{tried.name} cannot be sharded: it computes {min(found)[0]!r} of a param group from all parameters of "
            'the group, and no rank has them all. Use the plan "ddp"'
        )
    if not _close(together, one_by_one):
        return _of_all_parameters(tried, together, sharded=sharded)
    try:
        cuts_alike = _close(one_by_one, _try_out(tried, cut=True))
        # Equal numbers alone do not show it: AdamP, for example, projects only gradients orthogonal to the weights. And
        # some classes treat small matrices as single elements: they factor a second moment from 128 rows on, or
        # quantise state of more than 4,096 elements.
        if cuts_alike and not watching.combines:
            _try_out(tried, watching, shapes=((130, 131),))
        is_elementwise = cuts_alike and not watching.combines
    except Exception:  # the class takes matrices only
        is_elementwise = False
    return Granularity.ELEMENT if is_elementwise else Granularity.PARAMETER


def _of_all_parameters(tried: _Tried, together: _Outcome, *, sharded: bool) -> Granularity:
    """Of a class that does something else to one parameter where there are others. `together`: a trial with others."""
    if not _close(together, _try_out(tried, apart=False)):
        raise InvalidValue(f"{tried.name} cannot be sharded: it draws random numbers, and each rank would draw others")
    if sharded:
        raise InvalidValue(
            f"{tried.name} cannot be sharded: what it does to one parameter depends on the others (on a norm over all "
            'of them, perhaps), and no rank has them all. Use the plan "ddp"'
        )
    return Granularity.PARAMETER


def _of_group(tried: _Tried, *, sharded: bool) -> Granularity:
    """As `_by_trial`; where the group's options do not fit the matrices of a trial, the parameters are left whole."""
    try:
        tried.stepped([_ones(4, 6)])
    except Exception:
        return Granularity.PARAMETER
    return _by_trial(tried, sharded=sharded)


def _of_kinds(tried: _Tried, groups: Sequence[Options]) -> list[_Tried]:
    """The class with its defaults; and with the options of each of the groups that differ from those of the class, and
    of the groups before, not only in numbers."""
    first = tried.optimizer_class([torch.ones(4, 6, device="cpu")], **copy.deepcopy(tried.arguments)).param_groups[0]
    seen, found = [kinds_of(first)], [tried]
    for group in groups:
        if (kinds := kinds_of(group)) not in seen:
            seen.append(kinds)
            found.append(replace(tried, of_group=group))
    return found


def _communicates(tried: _Tried) -> bool:
    """Whether the first step does, also if it fails there."""
    watching = _Watching()
    with suppress(Exception), watching:  # other trials tell of it
        tried.stepped([_ones(4, 6)])
    return watching.communicates


def _shares_out(tried: _Tried) -> bool:
    """Whether the first step leaves the state of some of many parameters on this rank, and of others elsewhere."""
    tensors = [_ones(4, 6) for _ in range(128)]
    with suppress(Exception):  # other trials tell of it
        optimizer = tried.stepped(tensors)
        return 0 < sum(bool(optimizer.state.get(tensor)) for tensor in tensors) < len(tensors)
    return False


def _expect_all_in_state(kinds: Iterable[_Tried]) -> None:
    """
    Raises:
        ValueError: the class keeps tensors of the size of a parameter elsewhere than in `optimizer.state`. Each step
            gives it some of the pieces, and pieces are cut anew where parameters are frozen; so it would use them for
            other elements, or begin anew."""
    for tried in kinds:
        if kept := _kept_beside_state(tried):
            raise InvalidValue(
                f"{tried.name} keeps tensors of the size of a parameter in {min(kept)!r}, and is stepped over other "
                "pieces of parameters from step to step. Let it keep them in self.state[p]; or pass elementwise=False: "
                "then it steps whole parameters, and trains, but checkpoints and state_dict() do not have these tensors"
            )


def _kept_beside_state(tried: _Tried) -> set[str]:
    """The attributes of an instance with tensors of the size of a parameter."""
    tensor = _ones(11, 13)  # a size that no constant of a class has
    with suppress(Exception):  # other trials tell of it
        optimizer = tried.stepped([tensor], 2)
        own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
        known = {one.untyped_storage()._cdata for one in (tensor, tensor.grad) if one is not None}
        held = [(name, one) for name, value in own.items() for one in tree_leaves(value) if isinstance(one, Tensor)]
        return {
            name for name, one in held if one.numel() == tensor.numel() and one.untyped_storage()._cdata not in known
        }
    return set()


def _refuse_communicating(tried: _Tried, why: str) -> NoReturn:
    raise InvalidValue(
        f"{tried.name} cannot be sharded: its step() communicates with other ranks by itself, and {why}. Use its "
        "variant for one process, as zeroshard divides the parameters among the ranks (torch.optim.Muon, "
        "SingleDeviceMuon of muon); "
        'or the plan "ddp", if all ranks keep the same state'
    )


def kinds_of(group: Options) -> dict[str, object]:
    """The options without the values of numbers; but 0, which may switch something off, is a value."""
    kinds = {key: _kind_of(plain(value)) for key, value in group.items() if key not in ("params", "initial_lr")}
    return {key: kind for key, kind in kinds.items() if kind is not None}


def _kind_of(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return [_kind_of(one) for one in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) and value else value


class _Outcome(NamedTuple):
    """After a trial: all elements, and the numbers in the param groups of all optimizers, (name, number)."""

    values: Tensor
    settings: frozenset[tuple[str, float]]


_STEPS = 24
"""Of a trial: some classes do for ten steps, or until gradients become smaller, what an elementwise one does."""


def _try_out(
    tried: _Tried,
    watching: AbstractContextManager[Any] | None = None,
    *,
    apart: bool = True,
    cut: bool = False,
    shapes: Sequence[tuple[int, int]] = ((4, 6), (3, 5)),
) -> _Outcome:
    """Matrices, or pieces of them, after the steps: by one optimizer, or by one optimizer for each tensor. `watching`:
    around each step."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator, device="cpu") for shape in shapes]
    for tensor in tensors[1:]:
        tensor *= 10
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if cut:
        tensors = [piece.clone() for piece in torch.split(flat, 7)]
    for tensor in tensors:
        tensor.requires_grad_()
    optimizers = [tried.over(members) for members in ([[tensor] for tensor in tensors] if apart else [tensors])]
    for gradient in _gradients(flat.numel()):
        for tensor, part in zip(tensors, torch.split(gradient, [one.numel() for one in tensors]), strict=True):
            tensor.grad = part.view_as(tensor).clone()
        for optimizer in optimizers:
            with watching or nullcontext():
                run_step(optimizer)
    for optimizer in optimizers:
        expect_state_of_tensors(optimizer)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings = frozenset((key, float(value)) for group in groups for key, value in group.items() if _is_number(value))
    return _Outcome(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), settings)


def _expect_nothing_missing(tried: _Tried, error: Exception) -> None:
    """
    Raises:
        ValueError: a step raises `error` because it gets no closure, or gradients without graphs: with a closure, which
            it calls, or with graphs it does not."""
    if _steps_with_a_closure(tried):
        raise InvalidValue(
            f"{tried.name} cannot be sharded: its step() calls a closure by itself, and without one it raises "
            f"{error!r}. One that evaluates the loss while it steps would do so on a part of the weights"
        ) from None
    if _steps_with_graphs(tried):
        raise InvalidValue(
            f"{tried.name} cannot be sharded: its step() differentiates the gradients (it needs "
            f"loss.backward(create_graph=True)), and those that zeroshard keeps have no graphs: it raises {error!r}"
        ) from None


def _steps_with_a_closure(tried: _Tried) -> bool:
    """Whether the class steps with a closure, and calls it."""
    tensor, is_called = _ones(4, 6), False

    def closure() -> float:
        nonlocal is_called
        is_called, tensor.grad = True, torch.ones_like(tensor)
        return 1.0

    tensor.grad = torch.ones_like(tensor)
    with suppress(Exception):
        tried.over([tensor]).step(closure)
        return is_called
    return False


def _steps_with_graphs(tried: _Tried) -> bool:
    """Whether the class steps with gradients that can be differentiated."""
    tensor = _ones(4, 6)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # torch warns of the cycle that `grad = None` below ends
            optimizer = tried.over([tensor])
            torch.autograd.backward(tensor.pow(3).sum(), create_graph=True)
            run_step(optimizer)
    except Exception:
        return False
    finally:
        tensor.grad = None
    return True


def _ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cpu", requires_grad=True)


def _asked_for(
    names: Collection[str], kinds: Sequence[_Tried], parameters: Sequence[Tensor], *, once_built: bool = False
) -> list[str]:
    """Those of the names for which the class looks as an attribute of tensors that it steps (which have none here), of
    as many dimensions as the parameters. `once_built`: for which its steps look."""
    asked, dims = set[str](), {parameter.ndim for parameter in parameters} if names else ()

    class Asked(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            raise AttributeError(f"no attribute {name!r}")

        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            return _Noting(asked)

    for one in kinds:
        for dim in dims:
            tensor = torch.ones({1: (6,), 2: (4, 6)}.get(dim, (2,) * dim), device="cpu", requires_grad=True)
            tensor.__class__ = Asked
            with suppress(Exception):  # other trials tell of it
                before = set(asked)
                optimizer = one.over([tensor])
                if once_built:
                    asked &= before
                for gradient in _gradients(tensor.numel()):
                    tensor.grad = gradient.view(tensor.shape)
                    run_step(optimizer)
    return sorted(asked.intersection(names))


class _Noting(dict[str, Any]):
    """Empty; notes what it is asked for."""

    def __init__(self, asked: set[str]) -> None:
        super().__init__()
        self._asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return default

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return False

    def __missing__(self, key: str) -> Any:
        self._asked.add(key)
        raise KeyError(key)


def _attributes_of(parameters: Iterable[Tensor]) -> set[str]:
    return {name for parameter in parameters for name in parameter.__dict__}


def _gradients(numel: int) -> Iterator[Tensor]:
    """One gradient for each step of a trial, some larger and some smaller than those before."""
    generator = torch.Generator().manual_seed(1)
    scales = (1.0, 1.0, 3.0, 0.3, 10.0, 0.1)
    for step in range(_STEPS):
        gradient = torch.randn(numel, generator=generator, device="cpu") * torch.linspace(0.1, 3, numel, device="cpu")
        yield gradient * scales[step % len(scales)]


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations inside it that step one tensor at a time.

    Attributes:
        combines: whether one of them has a result with another number of elements than its inputs: a norm, a mean over
            rows, a product of matrices. An operation that is not torch's own counts as one.
        communicates: whether one of them is a collective.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.combines = self.communicates = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.communicates |= "c10d" in func.namespace  # before the call, which may fail
        result = func(*args, **(kwargs or {}))
        inputs = max((tensor.numel() for tensor in tensors_in((args, kwargs))), default=0)
        if "c10d" in func.namespace or func.namespace == "profiler":  # torch's classes have a label around each step
            pass
        elif func.namespace != "aten":
            self.combines = True
        elif inputs > 1 and not func.is_view and not func.overloadpacket.__name__.startswith("new_"):
            # A number (`torch.equal`) is one element; operations in place on lists return nothing.
            outputs = [
                leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in tree_leaves(result) if leaf is not None
            ]
            self.combines |= any(numel != inputs for numel in outputs)
        return result


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _close(a: _Outcome, b: _Outcome) -> bool:
    return torch.allclose(a.values, b.values, rtol=1e-6, atol=1e-7)
