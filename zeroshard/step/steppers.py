"""The steppers of one optimizer: which stepper has which parameters; they step in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.profiling import phase
from zeroshard.placement import SHARDED
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.full_state import Destination
from zeroshard.step.assignment import Assignment, Groups, Options
from zeroshard.step.flat_step import FlatStep
from zeroshard.step.granularity import Granularity, granularity_of
from zeroshard.step.inner import Arguments, arguments_for
from zeroshard.step.owner_step import OwnerStep
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step.stepper import Stepper, Update
from zeroshard.storage.gradients import GradState
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency

STEPPERS: dict[Granularity, Callable[[Assignment], Stepper]] = {
    Granularity.PARAMETER: OwnerStep,
    Granularity.ELEMENT: FlatStep,
}


class Steppers:
    """The steppers of one optimizer. When parameters begin to train, a new object replaces this one.

    Attributes:
        all: one stepper for each optimizer class; steppers of whole parameters first.
        units: unit -> the slots that these steppers have, in the engine's order.
    """

    def __init__(self, engine: Engine, groups: ParamGroups | None = None) -> None:
        """`groups`: None: no parameters.

        Raises:
            ValueError: a class cannot be sharded, or refuses its parameters.
        """
        self._engine = engine
        self.all = tuple(_build(groups, engine)) if groups is not None else ()
        slots: dict[Unit, set[int]] = {unit: set() for unit in engine.units}
        for stepper in self.all:
            for member in stepper.assignment.members():
                slots[member.unit].add(member.index)
        self.units = {unit: of_unit for unit, of_unit in slots.items() if of_unit}

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(param group, gradient) of the own shards, as views."""
        for stepper in self.all:
            yield from stepper.own_gradients()

    def include(self, destination: Destination) -> bool:
        """Whether this rank keeps what goes to that destination."""
        return destination.includes(self._engine.collectives.mesh.world.rank)

    # Stepping ----------------------------------------------------------------------------------------------------

    @phase("step: update")
    def step(
        self, options: Sequence[Options], active: dict[Unit, list[bool]], update: Update, arguments: Options
    ) -> None:
        """Update main unit by unit, and start to gather weights that rest in full. Collective.

        Args:
            options: the user's param groups.
            active: which slots of each unit take part.
            arguments: keyword arguments for the `step` of those classes that take them.
        """
        steppers_left = {unit: sum(unit in one.assignment.groups for one in self.all) for unit in self.units}

        def updated(unit: Unit) -> None:
            steppers_left[unit] -= 1
            # Only after the last stepper of the unit: a gather must not read weights that another one still writes.
            if not steppers_left[unit] and self._gather(unit, active) and update.is_void is None:
                # Free the unit's gradients here, before the next unit's state is allocated: this lowers the peak. (If
                # an update is void, the host may need them again.)
                self._consume(unit)

        with self._engine.reducer.visible.unedited():
            for stepper in self.all:
                stepper.set_active(active)
                of_class = arguments_for(type(stepper.optimizer), arguments)
                stepper.step(options, update, _stop_gathering, updated, of_class)
        self._engine.gatherer.read()

    @torch.no_grad()
    def take_part(self, active: dict[Unit, list[bool]]) -> None:
        """Take part in the gathers of a `step` that other ranks may run. Collective."""
        # In the order in which `step` finishes the units: each with the last stepper that has it.
        last = {unit: stepper for stepper in self.all for unit in stepper.assignment.groups}
        for stepper in self.all:
            for unit in stepper.assignment.groups:
                if last[unit] is stepper:
                    _stop_gathering(unit)
                    self._gather(unit, active)
        self._engine.gatherer.read()

    def _gather(self, unit: Unit, active: dict[Unit, list[bool]]) -> bool:
        """Start to gather what has been updated of a unit. Returns whether there is anything."""
        slots = {index for index in self.units[unit] if active[unit][index]}
        if unit.plan.main is SHARDED and slots:
            self._engine.gatherer.updated(unit, slots)
        else:
            unit.weights.versions.renew(slots)
        return unit.plan.main is SHARDED and bool(slots)

    def discard_gradients(self) -> None:
        """Free the gradients of the parameters of these steppers, and of parameters that no optimizer has."""
        for unit in self._engine.units:
            self._consume(unit)
        self._engine.reducer.forget_losses()
        self._engine.pool.rest("buckets", "scratch")  # not "ring": a backward may still need the weights

    def _consume(self, unit: Unit) -> None:
        visible = self._engine.reducer.visible
        if unit.grads.state is not GradState.EMPTY or visible.shows(unit):
            slots = self.units.get(unit, set()) | self._engine.claims.unclaimed(unit)
            unit.grads.consume(slots)
            visible.forget(unit, slots)

    # Other methods of the classes ------------------------------------------------------------------------------------

    def have_method(self, name: str) -> bool:
        """Whether a class has a method of that name.

        Raises:
            AttributeError: no class has such a method, but an instance has an attribute of that name.
        """
        if any(callable(getattr(type(stepper.optimizer), name, None)) for stepper in self.all):
            return True
        if owner := next((type(one.optimizer).__name__ for one in self.all if hasattr(one.optimizer, name)), None):
            raise AttributeError(
                f"ShardedOptimizer has no attribute {name!r}. {owner} has, and what it means for a part of the "
                "parameters is not known here: optimizer.steppers hold this rank's instances, each as .optimizer"
            )
        return False

    def call(self, name: str, arguments: Arguments, options: Sequence[Options]) -> Any:
        """Call a method of the classes that have it, on all of main; then set the weights from main. Collective.

        Returns:
            None if all instances return None; the result, if there is one instance; else a tuple of the results.
        """
        having = [stepper for stepper in self.all if hasattr(stepper.optimizer, name)]
        results = [stepper.call(name, arguments, options) for stepper in having]
        for unit in self.units:
            if any(unit in stepper.assignment.groups for stepper in having):
                if unit.plan.main is SHARDED:
                    self._engine.gatherer.updated(unit)
                else:
                    unit.weights.versions.renew()
        self._engine.gatherer.settle()
        if all(result is None for result in results):
            return None
        return results[0] if len(results) == 1 else tuple(results)


def _stop_gathering(unit: Unit) -> None:
    # A gather in flight would overwrite the weights that a step is about to write.
    if unit.weights.state is Residency.GATHERING:
        unit.weights.arrive(stale=True)


def _build(groups: ParamGroups, engine: Engine) -> list[Stepper]:
    steppers: list[Stepper] = []
    classes, options = groups.classes, groups.options()
    for optimizer_class in dict.fromkeys(classes.of_groups):
        mine = [index for index, of_group in enumerate(classes.of_groups) if of_group is optimizer_class]
        by_unit = _by_unit(groups, mine, engine)
        if by_unit:
            defaults = classes.options_of(mine[0])
            elementwise = classes.elementwise if optimizer_class is classes.default else None
            sharded = any(unit.updated.numel < unit.layout.numel for unit in by_unit)
            granularity = granularity_of(optimizer_class, defaults, elementwise, sharded=sharded)
            of_mine = {index: options[index] for index in mine}
            stepper = STEPPERS[granularity](Assignment(optimizer_class, defaults, of_mine, by_unit, engine.collectives))
            steppers.insert(len(steppers) if granularity is Granularity.ELEMENT else 0, stepper)
    return steppers


def _by_unit(groups: ParamGroups, indices: Sequence[int], engine: Engine) -> Groups:
    group_of = {id(p): i for i in indices for p in groups.lists[i]["params"]}
    units = {}
    for unit in engine.units:
        of_slots = [group_of.get(id(parameter)) for parameter in unit.parameters]
        if unit.trainable and any(group is not None for group in of_slots):
            units[unit] = of_slots
    return units
