"""The granularity of an optimizer class: elements, or whole parameters. It is listed, declared, or found by a trial.

An elementwise optimizer updates each element from that element's own gradient and state (and scalars): it gives the
same result however a parameter is cut. Muon, LAMB, LARS, Adafactor and Shampoo do not. (The experiments of a trial:
`trials.py`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from itertools import chain, islice
from typing import NoReturn

import torch
from torch import Tensor, nn

from zeroshard.errors import InvalidValue
from zeroshard.gradients.settings import plain
from zeroshard.model.absent import kind_of
from zeroshard.optim import Lamb, Lars
from zeroshard.step.assignment import NAMES, Assignment, OptimizerClass, Options, common_options_in
from zeroshard.step.inner import expect_no_closure, trial
from zeroshard.step.trials import (
    Outcome,
    Tried,
    Watching,
    are_close,
    asked_for,
    communicates,
    goes_by_shapes,
    kept_beside_state,
    ones,
    shares_out,
    stacks,
    steps_with_a_closure,
    steps_with_graphs,
    try_out,
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
    classes, ELEMENT (elementwise in blocks of 256, which shards never cut); else by a trial: two small matrices (of one
    shape, and of two) are stepped together, one by one, and cut into pieces, and the results are compared. A class is
    taken to be elementwise only if none of its operations combines elements either, if it does not look at shapes, and
    if it sees nothing of these parameters that their pieces have not: a class of their own (geoopt's points on
    manifolds), or attributes that it asks for.

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
    tried = Tried(optimizer_class, options, names=_names_in(groups))
    with trial():
        kinds = _of_kinds(tried, groups)
        if any(communicates(one) for one in kinds):
            if sharded:
                _refuse_communicating(tried, "each rank steps other parameters")
            if any(shares_out(one) for one in kinds):
                _refuse_communicating(tried, "keeps the state of a parameter on one rank, where no checkpoint finds it")
            return declared or Granularity.PARAMETER  # a trial could fail on one rank, and others would wait for it
        if declared is not Granularity.PARAMETER:
            _expect_all_in_state(kinds)
        asked = asked_for(_attributes_of(parameters) | ({NAMES} if tried.names else set()), kinds, parameters)
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
            tried.stepped([ones(4, 6)])
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
        names = _names_in(assignment.options.values())
        self._tried = Tried(assignment.optimizer_class, assignment.defaults, names=names)
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
                found = _of_group(replace(self._tried, of_group=common_options_in(groups[index])), sharded=False)
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
                kinds_of_all = _of_kinds(self._tried, [groups[index] for index in self._groups])
                asked = asked_for(names, kinds_of_all, self._parameters, once_built=True)
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
            Tried(optimizer_class, options).stepped([ones(*shape)])
    except ArithmeticError as error:
        raise InvalidValue(
            f"{optimizer_class.__name__} cannot step {name}, which has no elements ({error!r}, as in plain torch): "
            "leave it out of the optimizer's parameters, or let it not require grad before shard()"
        ) from error


def _by_trial(tried: Tried, *, sharded: bool) -> Granularity:
    watching = Watching()
    try:
        together = try_out(tried, apart=False)
        one_by_one = try_out(tried, watching)
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
    if not are_close(together, one_by_one) or stacks(tried):
        return _of_all_parameters(tried, together, sharded=sharded)
    try:
        cuts_alike = are_close(one_by_one, try_out(tried, cut=True))
        # Equal numbers alone do not show it: AdamP, for example, projects only gradients orthogonal to the weights. And
        # some classes treat small matrices as single elements: they factor a second moment from 128 rows on, or
        # quantise state of more than 4,096 elements.
        if cuts_alike and not watching.combines:
            try_out(tried, watching, shapes=((130, 131),))
        is_elementwise = cuts_alike and not watching.combines and not goes_by_shapes(tried)
    except Exception:  # the class takes matrices only
        is_elementwise = False
    return Granularity.ELEMENT if is_elementwise else Granularity.PARAMETER


def _of_all_parameters(tried: Tried, together: Outcome, *, sharded: bool) -> Granularity:
    """Of a class that does something else to one parameter where there are others. `together`: a trial with others."""
    if not are_close(together, try_out(tried, apart=False)):
        raise InvalidValue(f"{tried.name} cannot be sharded: it draws random numbers, and each rank would draw others")
    if sharded:
        raise InvalidValue(
            f"{tried.name} cannot be sharded: what it does to one parameter depends on the others (on a norm over all "
            'of them, perhaps), and no rank has them all. Use the plan "ddp"'
        )
    return Granularity.PARAMETER


def _of_group(tried: Tried, *, sharded: bool) -> Granularity:
    """As `_by_trial`; where the group's options do not fit the matrices of a trial, the parameters are left whole."""
    try:
        tried.stepped([ones(4, 6)])
    except Exception:
        return Granularity.PARAMETER
    return _by_trial(tried, sharded=sharded)


def _of_kinds(tried: Tried, groups: Sequence[Options]) -> list[Tried]:
    """The class with its defaults; and with the options of each of the groups that differ from those of the class, and
    of the groups before, not only in numbers."""
    first = tried.over([ones(4, 6)]).param_groups[0]
    seen, found = [kinds_of(first)], [tried]
    for group in groups:
        if (kinds := kinds_of(group)) not in seen:
            seen.append(kinds)
            found.append(replace(tried, of_group=common_options_in(group)))
    return found


def _expect_all_in_state(kinds: Iterable[Tried]) -> None:
    """
    Raises:
        ValueError: the class keeps tensors of the size of a parameter elsewhere than in `optimizer.state`. Each step
            gives it some of the pieces, and pieces are cut anew where parameters are frozen; so it would use them for
            other elements, or begin anew."""
    for tried in kinds:
        if kept := kept_beside_state(tried):
            raise InvalidValue(
                f"{tried.name} keeps tensors of the size of a parameter in {min(kept)!r}, and is stepped over other "
                "pieces of parameters from step to step. Let it keep them in self.state[p]; or pass elementwise=False: "
                "then it steps whole parameters, and trains, but checkpoints and state_dict() do not have these tensors"
            )


def _refuse_communicating(tried: Tried, why: str) -> NoReturn:
    raise InvalidValue(
        f"{tried.name} cannot be sharded: its step() communicates with other ranks by itself, and {why}. Use its "
        "variant for one process, as zeroshard divides the parameters among the ranks (torch.optim.Muon, "
        "SingleDeviceMuon of muon); "
        'or the plan "ddp", if all ranks keep the same state'
    )


def kinds_of(group: Options) -> dict[str, object]:
    """The options without the values of numbers; but 0, which may switch something off, is a value."""
    kinds = {key: _kind_of(plain(value)) for key, value in group.items() if key not in ("params", NAMES, "initial_lr")}
    return {key: kind for key, kind in kinds.items() if kind is not None}


def _kind_of(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return [_kind_of(one) for one in value], len({*map(str, value)}) > 1  # perhaps one for each parameter
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) and value else value


def _expect_nothing_missing(tried: Tried, error: Exception) -> None:
    """
    Raises:
        ValueError: a step raises `error` because it gets no closure, or gradients without graphs: with a closure, which
            it calls, or with graphs it does not."""
    with suppress(Exception):
        tried.stepped([ones(4, 6)])
        return  # it lacks nothing: a later step has raised, or one of other tensors
    if steps_with_a_closure(tried):
        raise InvalidValue(
            f"{tried.name} cannot be sharded: its step() calls a closure by itself, and without one it raises "
            f"{error!r}. One that evaluates the loss while it steps would do so on a part of the weights"
        ) from error
    if steps_with_graphs(tried):
        raise InvalidValue(
            f"{tried.name} cannot be sharded: its step() differentiates the gradients (it needs "
            f"loss.backward(create_graph=True)), and those that zeroshard keeps have no graphs: it raises {error!r}"
        ) from error


def _names_in(groups: Iterable[Options]) -> tuple[str, ...]:
    """Of the first of their parameters; none, if they have no names."""
    return tuple(islice(chain.from_iterable(group.get(NAMES, ()) for group in groups), 128))


def _attributes_of(parameters: Iterable[Tensor]) -> set[str]:
    return {name for parameter in parameters for name in parameter.__dict__}
