"""The steppers of one optimizer, which step in the same order on all ranks, and the state of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.ranges import phase
from zeroshard.comm.together import together
from zeroshard.errors import InvalidState, InvalidType, InvalidValue
from zeroshard.full_model.full_state import EVERYWHERE, Destination
from zeroshard.model.inference import outside_inference
from zeroshard.placement import SHARDED
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.reduce import Reducer
from zeroshard.step.assignment import Assignment, Groups, Options
from zeroshard.step.flat_step import FlatStep
from zeroshard.step.granularity import Granularity, Watched, expect_empty_taken, granularity_of, kinds_of
from zeroshard.step.inner import Arguments, arguments_for, expect_no_overrides, step_raises
from zeroshard.step.owner_step import OwnerStep
from zeroshard.step.param_groups import ParamGroups
from zeroshard.step.stepper import FullState, Stepper, Update, as_saved, stepped
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency

STEPPERS: dict[Granularity, Callable[[Assignment], Stepper]] = {
    Granularity.PARAMETER: OwnerStep,
    Granularity.ELEMENT: FlatStep,
}


class Steppers:
    """The steppers of one optimizer, of no parameters before `build`. The state of its parameters is in the steppers
    and, of parameters that no stepper has, in full here.

    Attributes:
        all: one stepper for each optimizer class; steppers of whole parameters first.
        units: unit -> the slots that these steppers have, in the engine's order.
        num_builds: how often they have been built.
        built_for: the reducer of the units that they were built for. Another one, if a build has raised since.
        waiting: the state of frozen parameters, in full on every rank, until they begin to train.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.all: tuple[Stepper, ...] = ()
        self.units: dict[Unit, set[int]] = {}
        self.num_builds = 0
        self.built_for: Reducer | None = None
        self.waiting: FullState = {}
        self._watched: list[Watched] = []

    @outside_inference
    def build(self, groups: ParamGroups | None) -> None:
        """Replace them by new ones, without state. `groups`: None: no parameters.

        Raises:
            ValueError: a class cannot be sharded, or refuses its parameters.
        """
        new = tuple(_build(groups, self._engine)) if groups is not None else ()
        slots: dict[Unit, set[int]] = {unit: set() for unit in self._engine.units}
        for stepper in new:
            for member in stepper.assignment.members():
                slots[member.unit].add(member.index)
        self.all, self.units = new, {unit: of_unit for unit, of_unit in slots.items() if of_unit}
        self.num_builds += 1
        in_pieces = [stepper.assignment for stepper in new if isinstance(stepper, FlatStep)]
        self._watched = [Watched(one, groups.classes.declared(one.optimizer_class)) for one in in_pieces if groups]
        self.built_for = self._engine.reducer

    def rebuild(self, groups: ParamGroups) -> None:
        """Like `build`, with the state that there is. Collective.

        Raises:
            ValueError, RuntimeError: on every rank: as `build`, or there was no memory on one of them.
        """
        state = self.gather()

        def build() -> None:
            self.build(groups)
            self.load(state)

        with self.unless_built():
            errors = (InvalidState, InvalidValue, InvalidType)
            together(self._engine.collectives, "taking parameters over", build, errors=errors)

    @contextmanager
    def unless_built(self) -> Iterator[None]:
        """If the body raises, the steppers and their state are those of before, and a step builds anew."""
        before = self.all, self.units, self._watched, self.waiting.copy()
        try:
            yield
        except BaseException:
            self.all, self.units, self._watched, self.waiting = before
            self.built_for = None
            raise

    def expect_as_built(self, options: Sequence[Options]) -> None:
        """Before a step. `options`: the user's param groups.

        Raises:
            ValueError: one that is stepped in pieces needs whole parameters now, or parameters have options elsewhere.
        """
        for stepper in self.all:
            expect_no_overrides(stepper.optimizer, stepper.assignment.members())
        for watched in self._watched:
            watched.expect_elementwise(options)

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(param group, gradient) of the own shards, as views."""
        for stepper in self.all:
            yield from stepper.own_gradients()

    def count_zero_gradients(self) -> int:
        """Elements of the reduced gradient that are exactly zero, over all ranks. Collective."""
        zeros = sum(
            int((tensor == 0).sum())
            for unit, slots in self.units.items()
            for index in slots & unit.grads.waiting
            if (world := unit.layout.slots[index].world & unit.own_shard())
            for tensor in unit.grads.views(world)
        )
        collectives = self._engine.collectives
        own = 0 if collectives.mesh.replicate.rank else zeros  # count each shard once
        return collectives.count(own, "optimizer.count_zero_gradients()")

    # Stepping ----------------------------------------------------------------------------------------------------

    @phase("step: update")
    def step(
        self, options: Sequence[Options], active: dict[Unit, list[bool]], update: Update, arguments: Options
    ) -> Exception | None:
        """Update main unit by unit, and start to gather weights that rest in full. Collective. Returns what a class has
        raised on this rank.

        Args:
            options: the user's param groups.
            active: which slots of each unit take part.
            arguments: keyword arguments for the `step` of those classes that take them.
        """
        last = self._last()

        def updated(unit: Unit) -> None:
            if last[unit] is stepper and self._gather(unit, active[unit]) and update.is_void is None:
                # Free the unit's gradients here, before the next unit's state is allocated: this lowers the peak. (If
                # an update is void, the host may need them again.)
                self._consume(unit, by_step=True)

        self._stop_gathering()
        raised = None
        with self._engine.reducer.visible.unedited():
            for stepper in self.all:
                of_class = arguments_for(type(stepper.optimizer), arguments)
                raised = stepper.step(options, active, update, updated, of_class) or raised
        for watched in self._watched:
            watched.note(options)
        self._engine.gatherer.read()
        return raised

    @torch.no_grad()
    def take_part(self, active: dict[Unit, list[bool]]) -> None:
        """Take part in the gathers of a `step` that other ranks may run. Collective."""
        last = self._last()
        self._stop_gathering()
        for stepper in self.all:  # the order in which `step` finishes the units
            for unit in stepper.assignment.groups:
                if last[unit] is stepper:
                    self._gather(unit, active[unit])
        self._engine.gatherer.read()

    def _last(self) -> dict[Unit, Stepper]:
        """The last stepper of each unit. Only after it a gather may read the weights."""
        return {unit: stepper for stepper in self.all for unit in stepper.assignment.groups}

    def _stop_gathering(self) -> None:
        # A gather in flight would overwrite the weights that a step is about to write.
        for unit in self.units:
            if unit.weights.state is Residency.GATHERING:
                unit.weights.arrive(stale=True)

    def _gather(self, unit: Unit, active: Sequence[bool] | None = None) -> bool:
        """Start to gather what has been updated of a unit (None: all slots). Returns whether there is anything."""
        slots = {index for index in self.units[unit] if active is None or active[index]}
        gathers = unit.plan.main is SHARDED and bool(slots)
        if gathers:
            self._engine.gatherer.updated(unit, slots)
        else:
            unit.weights.versions.renew(slots)
        return gathers

    def discard_gradients(self, *, by_step: bool = False) -> None:
        """Free the gradients of the parameters of these steppers, and of parameters that no optimizer has. `by_step`:
        a step has used them."""
        for unit in self._engine.units:
            self._consume(unit, by_step=by_step)
        self._engine.reducer.forget_losses()
        self._engine.pool.rest("buckets", "scratch")  # not "ring": a backward may still need the weights

    def _consume(self, unit: Unit, *, by_step: bool) -> None:
        visible = self._engine.reducer.visible
        if isinstance(unit.grads, Gradients) and (unit.grads.state is not GradState.EMPTY or visible.shows(unit)):
            of_nobody = self._engine.claims.unclaimed(unit)
            mine = self.units.get(unit, set())
            slots = mine | of_nobody
            self._engine.ledger.discarded |= {id(unit.parameters[slot]) for slot in of_nobody & unit.grads.waiting}
            unit.grads.consume(slots)
            visible.forget(unit, slots, used=mine if by_step else ())

    # State -------------------------------------------------------------------------------------------------------

    def gather(self, only: Collection[Tensor] | None = None, destination: Destination = EVERYWHERE) -> FullState:
        """Parameter -> full state (`only`: of these parameters) on the ranks that the destination includes. Collective.

        Raises:
            ValueError: on every rank: state that cannot be gathered.
        """
        state: FullState = {}
        keeps = destination.includes(self._engine.collectives.mesh.world.rank)
        for parameter, items in self.waiting.items():
            if keeps and (only is None or parameter in only):
                state[parameter] = {key: _copied(item, destination) for key, item in items.items()}
        for stepper in self.all:
            state |= stepper.state.gather(only, destination)
        return state

    @outside_inference
    def load(
        self,
        state: Mapping[Tensor, Mapping[str, Any]],
        only: Collection[Tensor] | None = None,
        *,
        as_main: bool = False,
    ) -> None:
        """Replace the state by `state`, in the form of `gather`, the same on every rank. Parameters that are not in it
        have no state afterwards. `only`: keep the state of all other parameters. `as_main`: see `as_saved`.

        Raises:
            ValueError: an item has another shape; nothing has been changed.
        """
        saved = [as_saved(stepper, state, as_main=as_main) for stepper in self.all]
        done = stepped(self.all)
        for stepper, of_one in zip(self.all, saved, strict=True):
            stepper.state.load(of_one, only)
        for parameter in [*self.waiting] if only is None else only:
            self.waiting.pop(parameter, None)
        for parameter, items in state.items():
            if parameter not in done and (only is None or parameter in only):
                self.waiting[parameter] = copy.deepcopy(dict(items))

    def expect_fitting(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Raises:
        ValueError: `load` would raise."""
        for stepper in self.all:
            as_saved(stepper, state)

    def parameters(self) -> set[Tensor]:
        """The parameters that have state. Collective."""
        return {*self.waiting}.union(*(stepper.state.parameters() for stepper in self.all))

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors held, by kind."""
        kinds: dict[str, list[Tensor]] = {}
        for stepper in self.all:
            for kind, tensors in stepper.tensors().items():
                kinds.setdefault(kind, []).extend(tensors)
        return kinds

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
                self._gather(unit)
        self._engine.gatherer.settle()
        if all(result is None for result in results):
            return None
        return results[0] if len(results) == 1 else tuple(results)


def expect_to_step(
    steppers: Iterable[Stepper],
    state: Mapping[Tensor, Mapping[str, Any]],
    options: Sequence[Options],
    saved: Sequence[Options],
) -> None:
    """`options`: of the param groups, as they are now; `saved`: the ones that are loaded with the state.

    Raises:
        ValueError: a step with them would raise, on the ranks that have a part of the parameter.
    """
    tried = set[tuple[Any, ...]]()
    kinds = [str([*map(kinds_of, of_group)]) for of_group in zip(options, saved, strict=True)]
    for stepper in steppers:
        for member in stepper.assignment.members():
            items, group, shape = dict(state.get(member.parameter) or {}), member.group, member.slot.shape
            form = stepper, kinds[group], frozenset(items), tuple(min(size, 3) for size in shape)
            if form in tried:
                continue
            tried.add(form)
            if raised := step_raises(stepper.assignment, options[group], saved[group], items, shape):
                name, has = stepper.assignment.optimizer_class.__name__, ", ".join(map(str, items)) or "nothing"
                raise InvalidValue(
                    f"this is not the state of {name}, whose step would raise {raised}; of "
                    f"{member.slot.name} it has {has}. Load it into an optimizer of the class and the options that "
                    "it is of (amsgrad=, momentum=), or leave it out. Nothing has been loaded"
                )


def _copied(item: Any, destination: Destination) -> Any:
    """An item of state that this rank holds in full, at its destination."""
    return destination.copy(item) if isinstance(item, Tensor) and destination != EVERYWHERE else item


def _build(groups: ParamGroups, engine: Engine) -> list[Stepper]:
    steppers: list[Stepper] = []
    classes, options = groups.classes, groups.options()
    for optimizer_class in dict.fromkeys(classes.of_groups):
        mine = [index for index, of_group in enumerate(classes.of_groups) if of_group is optimizer_class]
        by_unit = _by_unit(groups, mine, engine)
        if not by_unit:
            continue
        defaults, of_mine = classes.options_of(mine[0]), {index: options[index] for index in mine}
        parameters = [parameter for index in mine for parameter in groups.lists[index]["params"]]
        places = {id(one): place for index in mine for place, one in enumerate(groups.lists[index]["params"])}
        assignment = Assignment(optimizer_class, defaults, of_mine, by_unit, places, engine.collectives)
        granularity = granularity_of(
            optimizer_class,
            defaults,
            classes.declared(optimizer_class),
            sharded=any(unit.updated.numel < unit.layout.numel for unit in by_unit),
            groups=[*of_mine.values()],
            parameters=parameters,
        )
        if granularity is Granularity.PARAMETER:
            for slot in [member.slot for member in assignment.members() if not member.slot.world]:
                expect_empty_taken(optimizer_class, defaults, slot.name, slot.shape)
        steppers.insert(len(steppers) if granularity is Granularity.ELEMENT else 0, STEPPERS[granularity](assignment))
    return steppers


def _by_unit(groups: ParamGroups, indices: Sequence[int], engine: Engine) -> Groups:
    group_of = {id(p): i for i in indices for p in groups.lists[i]["params"]}
    units = {}
    for unit in engine.units:
        of_slots = [group_of.get(id(parameter)) for parameter in unit.parameters]
        if unit.trainable and any(group is not None for group in of_slots):
            units[unit] = of_slots
    return units
