"""Which stepper steps which param groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zeroshard.comm.collectives import Collectives
from zeroshard.runtime.engine import Engine
from zeroshard.step.flat_step import FlatStep
from zeroshard.step.inner import OptimizerClass, Options
from zeroshard.step.kinds import Kind, kind_of
from zeroshard.step.owner_step import OwnerStep
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step.stepper import Groups, Stepper
from zeroshard.storage.unit import Unit


class StepperClass(Protocol):
    def __call__(
        self,
        optimizer_class: OptimizerClass,
        options: dict[int, Options],
        defaults: Options,
        groups: Groups,
        collectives: Collectives,
        /,
    ) -> Stepper:
        """
        Args:
            options: the hyper-parameters of each param group that is this stepper's, by its index.
            defaults: what the class is built with.
        """


STEPPERS: dict[Kind, StepperClass] = {Kind.WHOLE: OwnerStep, Kind.ELEMENTWISE: FlatStep}


def build_steppers(groups: ParamGroups, engine: Engine) -> list[Stepper]:
    """One for each optimizer class; those for whole parameters first.

    Raises:
        ValueError: a class that cannot be sharded, or that refuses its parameters.
    """
    steppers: list[Stepper] = []
    classes, options = groups.classes, groups.options()
    for optimizer_class in dict.fromkeys(classes.of_groups):
        mine = [index for index, of_group in enumerate(classes.of_groups) if of_group is optimizer_class]
        by_unit = _by_unit(groups, mine, engine)
        if by_unit:
            defaults = classes.options_of(mine[0])
            elementwise = classes.elementwise if optimizer_class is classes.default else None
            kind = kind_of(optimizer_class, defaults, elementwise)
            of_mine = {index: options[index] for index in mine}
            stepper = STEPPERS[kind](optimizer_class, of_mine, defaults, by_unit, engine.collectives)
            steppers.insert(len(steppers) if kind is Kind.ELEMENTWISE else 0, stepper)
    return steppers


def units_of(steppers: Sequence[Stepper], engine: Engine) -> dict[Unit, set[int]]:
    """Unit -> the slots in it that these step, in the engine's order."""
    mine: dict[Unit, set[int]] = {}
    for unit in engine.units:
        keys = [stepper.groups.get(unit, ()) for stepper in steppers]
        slots = {i for of_unit in keys for i, group in enumerate(of_unit) if group is not None}
        if slots:
            mine[unit] = slots
    return mine


def _by_unit(groups: ParamGroups, indices: Sequence[int], engine: Engine) -> Groups:
    group_of = {id(p): i for i in indices for p in groups.lists[i]["params"]}
    units = {}
    for unit in engine.units:
        of_slots = [group_of.get(id(parameter)) for parameter in unit.parameters]
        if unit.trainable and any(group is not None for group in of_slots):
            units[unit] = of_slots
    return units
