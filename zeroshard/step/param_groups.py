"""The param groups of one optimizer: their classes, parameters that may join later, their form in a `state_dict`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import InvalidKey, InvalidState, InvalidType, InvalidValue
from zeroshard.gradients.settings import Items, Members, plain
from zeroshard.io.values import without_numpy
from zeroshard.model.trees import tensors_in
from zeroshard.runtime.claims import Owner
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.plain_model import names_by_id
from zeroshard.step.assignment import NAMES, OptimizerClass, Options, options_in
from zeroshard.step.by_group import class_of_kind, filled_up
from zeroshard.step.granularity import kinds_of
from zeroshard.step.stepper import FullState


@dataclass
class Classes:
    """The optimizer class of each param group.

    Attributes:
        default: the class of groups that name none.
        options: the keyword arguments of the default class.
        elementwise: the user's declaration for the default class, if any.
        of_groups: the class of each group.
    """

    default: OptimizerClass
    options: Options
    elementwise: bool | None
    of_groups: list[OptimizerClass] = field(default_factory=list)
    _by_group: bool = False  # whether the default class is built over param groups only (`by_group.py`)
    _of_kinds: list[tuple[dict[str, object], OptimizerClass]] = field(default_factory=list)

    def defaults(self, params: Sequence[Any]) -> Options:
        """The defaults of the default class. `params`: what the optimizer is built over.

        Raises:
            ValueError: there are parameters in an option; or as `defaults_of`.
        """
        _expect_no_parameters(self.default, self.options)
        try:
            return defaults_of(self.default, self.options)
        except InvalidValue:
            if not isinstance(params[0], Mapping):
                raise
            with suppress(Exception):
                filled_up(self.default, self.options, params[0])
                self._by_group = True
            if not self._by_group:
                raise
            return {}

    def completed(self, param_group: dict[str, Any]) -> tuple[dict[str, Any], OptimizerClass]:
        """The group, completed with the defaults of its class; and the class.

        Raises:
            TypeError: it is no dict.
            KeyError: it has no parameters.
            ValueError: the group asks for steps that autograd can follow; or has a parameter twice, or in an option.
        """
        _expect_group(param_group)
        group = dict(param_group)
        if not isinstance(params := group["params"], (Tensor, set)):  # torch refuses sets
            group["params"] = list(params)
            _expect_once(group["params"])
        if group.get("differentiable", self.options.get("differentiable", False)):
            raise InvalidValue(
                "differentiable=True: a ShardedOptimizer changes weights in place, and no gradient passes through its "
                "steps: leave differentiable out"
            )
        of_group, filled = group.pop("optimizer_class", self.default), Options()
        _expect_no_parameters(of_group, options_in(group))
        if of_group is not self.default:
            filled = defaults_of(of_group, {})
        elif self._by_group:
            filled = self._filled_up(group)
            of_group = self._of_kind(filled)
        return {**filled, **group}, of_group

    def _filled_up(self, group: Options) -> Options:
        try:
            return filled_up(self.default, self.options, group)
        except Exception as error:
            options = ", ".join(f"{key}={value!r:.80}" for key, value in options_in(group).items())
            raise InvalidValue(
                f"{self.default.__name__} refuses a param group with the options ({options}): {error!r}. Give it the "
                "options that the class asks for, as in plain torch"
            ) from error

    def _of_kind(self, options: Options) -> OptimizerClass:
        kind = kinds_of(options)
        for known, of_kind in self._of_kinds:
            if known == kind:
                return of_kind
        self._of_kinds.append((kind, class_of_kind(self.default, self.options, options)))
        return self._of_kinds[-1][1]

    def declared(self, optimizer_class: OptimizerClass) -> bool | None:
        """The user's declaration for a class, if any."""
        mine = (self.default, *(of_kind for _, of_kind in self._of_kinds))
        return self.elementwise if optimizer_class in mine else None

    def options_of(self, group: int) -> Options:
        """The keyword arguments that the class of that param group is built with."""
        return self.options if self.of_groups[group] is self.default else {}

    def defaults_of(self, group: int) -> Options:
        """The defaults that the class fills that param group up with."""
        return defaults_of(self.of_groups[group], self.options_of(group))


class ParamGroups:
    """See the module's note. `lists`: the optimizer's `param_groups`. `takes_all`: parameters that no optimizer has
    join the first group when they begin to train."""

    def __init__(self, lists: list[dict[str, Any]], classes: Classes, engine: Engine, *, takes_all: bool) -> None:
        self.lists, self.classes = lists, classes
        self._engine, self._takes_all = engine, takes_all
        self._members: Members | None = None
        self._parameters: list[list[nn.Parameter]] = []
        self.changed()

    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.lists for p in group["params"]]

    # Who may join ------------------------------------------------------------------------------------------------

    def adoptable(self) -> list[nn.Parameter]:
        """The parameters that would join once they require grad: those that no optimizer has, if this optimizer was
        built from a handle. (Parameters of integers never do.)"""
        units, unclaimed = self._engine.units if self._takes_all else (), self._engine.claims.unclaimed
        found = [unit.parameters[index] for unit in units for index in sorted(unclaimed(unit))]
        return [parameter for parameter in found if parameter.dtype.is_floating_point]

    def lists_with(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The parameters of each group after these have joined the first group, which is in the order of the model."""
        groups, new = [list(group["params"]) for group in self.lists], list(parameters)
        if new:
            mine = {id(parameter) for parameter in [*groups[0], *new]}
            groups[0] = [parameter for parameter in self._engine.model.parameters() if id(parameter) in mine]
        return groups

    def adopt(self, parameters: Iterable[nn.Parameter], owner: Owner) -> None:
        """Add these to the first group, at the place that they would have had from the start. `owner`: the optimizer.

        Raises:
            ValueError: a parameter that another optimizer has.
        """
        groups = self.lists_with(parameters)
        self._engine.claims.claim(groups[0], owner)
        self.lists[0]["params"][:] = groups[0]
        self.changed()

    @contextmanager
    def adopting(self, owner: Owner) -> Iterator[None]:
        """Adopt the parameters that require grad now; if the body raises, it is undone."""
        before, adoptable = list(self.lists[0]["params"]), self.adoptable()
        trainable = {id(parameter) for parameter in self._engine.trainable_parameters()} if adoptable else ()
        new = [parameter for parameter in adoptable if id(parameter) in trainable]
        with self._engine.claims.claimed(new, owner):
            self.adopt(new, owner)
            try:
                yield
            except BaseException:
                self.lists[0]["params"][:] = before
                self.changed()
                raise

    # What a step depends on --------------------------------------------------------------------------------------

    def settings(self) -> tuple[Items, ...]:
        """The class and the hyper-parameters of each group, for the comparison between ranks."""
        return tuple(
            (
                ("class", f"{of_class.__module__}.{of_class.__qualname__}"),
                *((key, plain(value)) for key, value in options_in(group).items()),
            )
            for group, of_class in zip(self.lists, self.classes.of_groups, strict=True)
        )

    def members(self) -> Members:
        """The names of each group's parameters."""
        if self._members is None:
            names = names_by_id(self._engine.units)
            self._members = Members(
                tuple(tuple(names.get(id(p), "one that is frozen") for p in group["params"]) for group in self.lists)
            )
        return self._members

    def changed(self) -> None:
        """Parameters, groups or units have been added."""
        self._members = None
        self._parameters = [list(group["params"]) for group in self.lists]

    def expect_unchanged(self) -> None:
        """Raises:
        RuntimeError: somebody has edited the lists of parameters, which the update does not see."""
        self._expect([group["params"] for group in self.lists])

    def expect_to_begin(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises:
        RuntimeError: these param groups do not begin with the ones that are there."""
        self._expect([list(group["params"]) for group in groups[: len(self._parameters)]])

    def _expect(self, found: list[list[nn.Parameter]]) -> None:
        pairs = zip_longest(found, self._parameters, fillvalue=(None,))
        same = [len(one) == len(other) and all(map(is_, one, other)) for one, other in pairs]
        if not all(same):
            raise InvalidState(
                f"the parameters of param group {same.index(False)} have been edited, and the optimizer updates those "
                "that it had: to add some call add_param_group, to stop the training of one call requires_grad_(False) "
                "on it, and for other groups build the optimizer anew. Nothing has been updated"
            )

    def hyper_parameters(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each group, JSON-able."""
        return [{k: _as_number(v) for k, v in options.items()} for options in self.options()]

    def set_hyper_parameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the hyper-parameters to those of another rank."""
        for group, theirs in zip(self.lists, groups, strict=True):
            for key, value in theirs.items():
                mine = group[key]
                if isinstance(mine, Tensor):
                    group[key] = torch.full_like(mine, value)  # not `fill_`: see `Inner.read_options`
                else:
                    group[key] = tuple(value) if isinstance(mine, tuple) else value

    def options(self) -> list[Options]:
        """Each group without its parameters."""
        return [options_in(group) for group in self.lists]

    # In a state_dict ---------------------------------------------------------------------------------------------

    def to_adopt_for(self, state_dict: Mapping[str, Any]) -> list[nn.Parameter]:
        """The adoptable parameters that the first group of `state_dict` contains (they may have been trained when it
        was saved): all of them or none, decided by the sizes of the groups.

        Raises:
            ValueError: the groups have other sizes.
        """
        found, more = [len(group["params"]) for group in state_dict["param_groups"]], self.adoptable()
        for adopted in ([], more):
            if [len(params) for params in self.lists_with(adopted)] == found:
                return adopted
        sizes = [len(group["params"]) for group in self.lists]
        frozen = f" (and {len(more)} that are frozen)" if more else ""
        remedy = (
            ". Let the parameters require grad that did when the optimizer was built, and freeze them after the load; "
            "or name them, in place of the handle: ShardedOptimizer(model.parameters(), ...)"
        )
        raise InvalidValue(
            f"the optimizer has param groups of {sizes} parameters{frozen}, the state_dict of {found}"
            f"{remedy if more else ''}"
        )

    def state_by_parameter(self, state_dict: Mapping[str, Any]) -> FullState:
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.lists_with(self.to_adopt_for(state_dict)) for p in group]
        saved = state_dict["state"]
        return {p: saved[i] for p, i in zip(params, indices, strict=True) if i in saved}


def expect_rate(rate: object) -> None:
    """`rate`: the learning rate of a param group. None: it has none, or the class finds its own (Adafactor).

    Raises:
        ValueError: it is not one number that a step can take.
    """
    number = math.nan
    if rate is not None and not isinstance(rate, str):  # a text of digits is one of a configuration
        with suppress(TypeError, ValueError, RuntimeError):  # of a tensor of several elements
            number = float(rate)  # type: ignore[arg-type]
    if rate is not None and not 0.0 <= number < math.inf:
        raise InvalidValue(f"the learning rate must be a finite number from 0, found {rate!r:.80}")


def _expect_group(found: object) -> None:
    """Before anything looks into it: a parameter, which may be absent, is a sequence as well."""
    form = 'write {"params": [p, ...], "lr": 1e-3}'
    if not isinstance(found, Mapping):
        kind = "a tensor" if isinstance(found, Tensor) else f"an object of type {type(found).__name__}"
        raise InvalidType(f"a param group must be a dict, found {kind}: {form}")
    if "params" not in found:
        raise InvalidKey(f"a param group has its parameters under 'params', found {[*found]}: {form}")


def _expect_once(params: Sequence[Any]) -> None:
    """`params`: parameters, or pairs with their names."""
    numbers: dict[int, int] = {}
    for number, one in enumerate(params):
        parameter = one[-1] if isinstance(one, tuple) else one
        if isinstance(parameter, Tensor) and (first := numbers.setdefault(id(parameter), number)) != number:
            raise InvalidValue(
                f"a param group has the same parameter twice, as numbers {first} and {number} (of shape "
                f"{tuple(parameter.shape)}), which plain torch would update twice in each step: pass it once. "
                "list(dict.fromkeys(parameters)) leaves out what comes again; model.parameters() has a tied weight once"
            )


def _expect_no_parameters(optimizer_class: OptimizerClass, options: Options) -> None:
    """Raises:
    ValueError: there are parameters in an option."""
    for key, value in options.items():
        inside = tensors_in([*value, *value.values()] if isinstance(value, Mapping) else value)
        if any(isinstance(tensor, nn.Parameter) for tensor in inside):
            raise InvalidValue(
                f"{optimizer_class.__name__}: there are parameters in {key}=, and the class would not find them, as "
                "other tensors are stepped in their place. Give them a param group with an option that the class looks "
                'at, {"params": [...], "lr": 1e-3}, or with a class, {"params": [...], "optimizer_class": ...}'
            )


def defaults_of(optimizer_class: OptimizerClass, options: Options) -> Options:
    """The defaults of the class, with these options, which the class checks.

    Raises:
        TypeError: the class has not what an optimizer of torch has.
        ValueError: it cannot be made over a list of parameters.
    """
    try:
        optimizer = _over_one(optimizer_class, options)
    except (AssertionError, AttributeError, LookupError, RuntimeError) as error:  # not what checks of options raise
        raise InvalidValue(
            f"{optimizer_class.__name__} cannot be sharded: over a list of parameters it raised {error!r}. A class "
            "that takes the model in place of parameters cannot be. If its param groups must have options that say how "
            "they are stepped (use_muon), give each group a class instead: "
            '[{"params": matrices, "optimizer_class": torch.optim.Muon}, {"params": others}]'
        ) from error
    if missing := [name for name in ("defaults", "param_groups", "state") if not hasattr(optimizer, name)]:
        raise InvalidType(
            f"{optimizer_class.__name__} cannot be sharded: it has no attribute {missing[0]!r}, as every "
            "torch.optim.Optimizer has. A wrapper around another optimizer is not one: pass a class that derives from "
            "torch.optim.Optimizer and does all of the work in its own step()"
        )
    return optimizer.defaults


def _over_one(optimizer_class: OptimizerClass, options: Options) -> torch.optim.Optimizer:
    tensor: Any = torch.zeros(2, 2, device="cpu")
    try:
        return optimizer_class([tensor], **options)
    except KeyError as error:
        if error.args != (NAMES,):
            raise
        return optimizer_class([("weight", tensor)], **options)


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else without_numpy(value)
