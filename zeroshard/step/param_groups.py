"""The param groups of one optimizer, with what torch's own lists do not say: the class of each, who may join later, and
which groups there are in a `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.settings import Items, Members, plain
from zeroshard.errors import InvalidValue
from zeroshard.runtime.claims import Owner
from zeroshard.runtime.engine import Engine
from zeroshard.step.assignment import OptimizerClass, Options
from zeroshard.step.stepper import FullState


@dataclass
class Classes:
    """The optimizer class of each param group.

    Attributes:
        default: that of groups that name none.
        options: what it is built with.
        elementwise: what it is declared to be, if it is.
        of_groups: the class of each group.
    """

    default: OptimizerClass
    options: Options
    elementwise: bool | None
    of_groups: list[OptimizerClass] = field(default_factory=list)

    def completed(self, param_group: dict[str, Any]) -> tuple[dict[str, Any], OptimizerClass]:
        """The group with the defaults of the class that it names, and that class."""
        group = dict(param_group)
        of_group = group.pop("optimizer_class", self.default)
        return (group if of_group is self.default else {**defaults_of(of_group, {}), **group}), of_group

    def options_of(self, group: int) -> Options:
        """What the class of that param group is built with."""
        return self.options if self.of_groups[group] is self.default else {}


class ParamGroups:
    """See the module's note. `lists`: torch's own, which the optimizer shows; `takes_all`: what no other optimizer has
    joins the first group when it begins to train."""

    def __init__(self, lists: list[dict[str, Any]], classes: Classes, engine: Engine, *, takes_all: bool) -> None:
        self.lists, self.classes = lists, classes
        self._engine, self._takes_all = engine, takes_all
        self._members: Members | None = None

    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.lists for p in group["params"]]

    # Who may join ------------------------------------------------------------------------------------------------

    def adoptable(self) -> list[nn.Parameter]:
        """Those that would join if they required grad: if the optimizer was built from a handle, what no optimizer
        has."""
        return list(self._unclaimed()) if self._takes_all else []

    def newly_trainable(self) -> list[nn.Parameter]:
        """Of these, those that require grad now."""
        if not self._takes_all:
            return []
        trainable = {id(parameter) for parameter in self._engine.trainable_parameters()}
        return [parameter for parameter in self._unclaimed() if id(parameter) in trainable]

    def with_adopted(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The parameters of each group, once these have joined: the first group is in the order of the model."""
        groups, new = [list(group["params"]) for group in self.lists], list(parameters)
        if new:
            mine = {id(parameter) for parameter in [*groups[0], *new]}
            groups[0] = [parameter for parameter in self._engine.model.parameters() if id(parameter) in mine]
        return groups

    def adopt(self, parameters: Iterable[nn.Parameter], owner: Owner) -> None:
        """These join the first group, as if they had required grad from the start. `owner`: whose groups these are.

        Raises:
            ValueError: a parameter that another optimizer has.
        """
        groups = self.with_adopted(parameters)
        self._engine.claims.claim(groups[0], owner)
        self.lists[0]["params"][:] = groups[0]

    def _unclaimed(self) -> Iterator[nn.Parameter]:
        for unit in self._engine.units:
            yield from (unit.parameters[index] for index in sorted(self._engine.claims.unclaimed(unit)))

    # What a step depends on --------------------------------------------------------------------------------------

    def settings(self) -> tuple[Items, ...]:
        """Of each group, the class and the hyper-parameters."""
        return tuple(
            (
                ("class", f"{of_class.__module__}.{of_class.__qualname__}"),
                *((key, plain(value)) for key, value in group.items() if key != "params"),
            )
            for group, of_class in zip(self.lists, self.classes.of_groups, strict=True)
        )

    def members(self) -> Members:
        """The names of each group's parameters."""
        if self._members is None:
            names = {
                id(p): slot.name
                for unit in self._engine.units
                for p, slot in zip(unit.parameters, unit.layout.slots, strict=True)
            }
            self._members = Members(
                tuple(tuple(names.get(id(p), "one that is frozen") for p in group["params"]) for group in self.lists)
            )
        return self._members

    def changed(self) -> None:
        """Parameters or units have come."""
        self._members = None

    def hyper_parameters(self) -> list[dict[str, Any]]:
        """Of each group, JSON-able."""
        return [{k: _as_number(v) for k, v in options.items()} for options in self.options()]

    def set_hyper_parameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Those of another rank."""
        for group, theirs in zip(self.lists, groups, strict=True):
            for key, value in theirs.items():
                mine = group[key]
                if isinstance(mine, Tensor):
                    mine.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(mine, tuple) else value

    def options(self) -> list[Options]:
        """Of each group, all but the parameters."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self.lists]

    # In a state_dict ---------------------------------------------------------------------------------------------

    def as_saved(self) -> list[dict[str, Any]]:
        """With parameters by number, as torch saves them."""
        saved, start = [], 0
        for group, options in zip(self.lists, self.options(), strict=True):
            stop = start + len(group["params"])
            saved.append({**options, "params": list(range(start, stop))})
            start = stop
        return saved

    def adopted_with(self, state_dict: Mapping[str, Any]) -> list[nn.Parameter]:
        """What is frozen now may have been trained, and so be in the first group there: all of it, or nothing.

        Raises:
            ValueError: other groups.
        """
        found, more = [len(group["params"]) for group in state_dict["param_groups"]], self.adoptable()
        for adopted in ([], more):
            if [len(params) for params in self.with_adopted(adopted)] == found:
                return adopted
        sizes = [len(group["params"]) for group in self.lists]
        frozen = f" (and {len(more)} that are frozen)" if more else ""
        raise InvalidValue(f"the optimizer has param groups of {sizes} parameters{frozen}, the state_dict of {found}")

    def state_by_parameter(self, state_dict: Mapping[str, Any]) -> FullState:
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.with_adopted(self.adopted_with(state_dict)) for p in group]
        saved = state_dict["state"]
        return {p: saved[i] for p, i in zip(params, indices, strict=True) if i in saved}


def defaults_of(optimizer_class: OptimizerClass, options: Options) -> Options:
    """The class's own defaults with these options; the class checks them."""
    return optimizer_class([torch.zeros(2, 2)], **options).defaults


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
