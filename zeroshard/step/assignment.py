"""The input of one stepper: param groups of one optimizer class, and the units and slots of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.layout.layout import Slot
from zeroshard.model.absent import as_tensors, kind_of
from zeroshard.storage.unit import Unit

Options = dict[str, Any]
OptimizerClass = type[torch.optim.Optimizer]
Groups = dict[Unit, list[int | None]]
"""Unit -> the param group of each slot (None: the slot belongs to another stepper, or to none)."""


NAMES = "param_names"
"""Where a param group has the names of its parameters, in their order, if they were passed with names."""


def options_in(group: Mapping[str, Any]) -> Options:
    """The options of a param group: everything but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def common_options_in(group: Mapping[str, Any]) -> Options:
    """The options that hold for all parameters of a param group: without these, and without their names."""
    return {key: value for key, value in group.items() if key not in ("params", NAMES)}


def numbered(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Param groups with their parameters by number, as torch saves them."""
    numbers = count()
    return [{**options_in(group), "params": [next(numbers) for _ in group["params"]]} for group in groups]


def shows_gradient(unit: Unit, indices: Iterable[int]) -> bool:
    """Whether there is something in `p.grad` of one of these slots' parameters."""
    with as_tensors():
        return any(unit.parameters[index].grad is not None for index in indices)


@dataclass(frozen=True, eq=False)
class Member:
    """One parameter that a stepper steps: slot number `index` of a unit, in param group number `group`."""

    unit: Unit
    index: int
    group: int

    @property
    def parameter(self) -> nn.Parameter:
        return self.unit.parameters[self.index]

    @property
    def slot(self) -> Slot:
        return self.unit.layout.slots[self.index]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The tensor, with the class and the attributes of the parameter: an optimizer may go by either. It requires
        grad: some classes leave out what does not."""
        if (kind := kind_of(self.parameter)) is not nn.Parameter:
            tensor.__class__ = kind
        tensor.__dict__ = self.parameter.__dict__  # not a copy: they may change
        return tensor.requires_grad_()


@dataclass(frozen=True, eq=False)
class Assignment:
    """See the module's note.

    Attributes:
        optimizer_class: the user's class.
        defaults: the keyword arguments that it is built with.
        options: index among all param groups of the optimizer -> hyper-parameters of the group.
        groups: the units and slots of the parameters; at least one.
        places: id of a parameter -> its place in the user's param group.
        collectives: of the ranks that step together.
    """

    optimizer_class: OptimizerClass
    defaults: Options
    options: dict[int, Options]
    groups: Groups
    places: dict[int, int]
    collectives: Collectives

    def members(self) -> Iterator[Member]:
        """The parameters, in the order of the buffers."""
        for unit, groups in self.groups.items():
            for index, group in enumerate(groups):
                if group is not None:
                    yield Member(unit, index, group)
