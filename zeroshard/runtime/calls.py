"""The calls of modules: which units they need, the hooks around them, what they have made."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.packets import on_device
from zeroshard.model.casting import end_calls, running
from zeroshard.model.outside_graphs import between_graphs
from zeroshard.model.room import with_room
from zeroshard.model.trees import differentiable
from zeroshard.model.units import HasSpec
from zeroshard.runtime.seen_by_hooks import SeenByHooks
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency

T = TypeVar("T", bound=HasSpec)


@dataclass(eq=False)
class NeededUnits(Generic[T]):
    """The units that the calls of a module need: in the engine, and where the planner replays calls.

    Attributes:
        units: the units whose weights stay until the end of the call.
        gathers: those of them that the call gathers when it begins.
        running: how many calls are running (of several threads, or one inside another).
    """

    units: list[T] = field(default_factory=list)
    gathers: list[T] = field(default_factory=list)
    running: int = 0

    def add(self, unit: T, path: str) -> None:
        """`path`: of the module."""
        if unit not in self.units:
            self.units.append(unit)
            if not unit.spec.is_part or path in unit.spec.gathered_by:
                self.gathers.append(unit)

    def covers(self, other: Self) -> bool:
        """Whether these needs include the other ones."""
        return set(other.units) <= set(self.units) and set(other.gathers) <= set(self.gathers)


@dataclass(eq=False)
class Needed(NeededUnits[Unit]):
    """What the calls of a module need, and what is around them.

    Attributes:
        hooks: around the call.
        inside: modules inside the module that need nothing else, and their hooks.
        reached: modules that may leave results in attributes: the module and all inside of it, but for those that need
            something else, and those of torch.
        seen: by the user's hooks on modules inside.
    """

    hooks: Around | None = None
    inside: dict[nn.Module, Around] = field(default_factory=dict)
    reached: list[nn.Module] = field(default_factory=list)
    seen: SeenByHooks = field(default_factory=SeenByHooks)

    def begin(self, running: Callable[[], Iterable[Unit]] | None) -> None:
        """The call begins: take the hooks off the modules inside. `running`: the units of the running calls, if a
        backward may come to what they make."""
        # [Note: modules inside a unit]
        # They need no hooks, and torch calls a module without hooks much faster. And torch.compile must not trace these
        # hooks: each of them would break the graph, and a graph break in a pre-hook makes Dynamo skip the forward
        # behind it (pytorch/pytorch#111966, pytorch/pytorch#135410). Without them the call of a unit is one graph.
        self.running += 1
        for hooks in self.inside.values() if self.running == 1 else ():
            hooks.take_off()
        if running is not None and self.running == 1:
            self.seen.begin(running)

    def end(self) -> list[Tensor]:
        """The call is over: put them back, in front of all other hooks, and behind. What other hooks have seen."""
        self.running -= 1
        if self.running:
            return []
        seen = self.seen.end()
        for hooks in self.inside.values():
            hooks.put_on()
        return seen


class Around:
    """The two hooks around the calls of a module: `before` gathers, `after` hides.

    Attributes:
        of_before, of_after: torch's ordered dicts with these hooks of the module, under the keys `first` and `last`.
    """

    def __init__(
        self, module: nn.Module, before: Callable[..., None], after: Callable[..., None], *, is_whole: bool = False
    ) -> None:
        """`is_whole`: the module is the whole model."""
        self.before, self.after = before, after
        self.of_before: Any = module._forward_pre_hooks
        self.of_after: Any = module._forward_hooks
        self._handles: list[RemovableHandle] = []
        self._module = weakref.ref(module)  # its hooks own this
        self._call = _call_that_ends(module, after, is_whole=is_whole)

    def attach(self) -> None:
        """Register the hooks. (Apart from `__init__`: if it is interrupted, `remove` removes those that are there.)"""
        module = self._module()
        assert module is not None, "it is being sharded"
        self._handles.append(module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True))
        # `always_call` (pytorch/pytorch#104278): else an exception in forward leaves the unit shown and in use.
        self._handles.append(module.register_forward_hook(self.after, always_call=True, with_kwargs=True))
        self.first, self.last = (handle.id for handle in self._handles)
        vars(module)[_CALL] = self._call

    def take_off(self) -> None:
        self.of_before.pop(self.first, None)
        self.of_after.pop(self.last, None)
        self._reset_call()

    def put_on(self) -> None:
        """In front of all other hooks, and behind."""
        self.of_before[self.first] = self.before
        self.of_before.move_to_end(self.first, last=False)
        self.of_after[self.last] = self.after
        if (module := self._module()) is not None:
            vars(module)[_CALL] = self._call

    def hide_last(self) -> None:
        """Move the hook that hides to the end: hooks that the user has registered since may read the weights."""
        if len(self.of_after) > 1 and self.last in [*self.of_after][:-1]:  # (as in `Hooks.come_first`)
            self.of_after.move_to_end(self.last)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._reset_call()

    def _reset_call(self) -> None:
        if (module := self._module()) is not None:
            vars(module).pop(_CALL, None)


_CALL = "_call_impl"
"""What torch's `nn.Module.__call__` calls."""

_CALLER = nn.Module._wrapped_call_impl.__code__
"""Calls it."""


def _call_that_ends(module: nn.Module, after: Callable[..., None], *, is_whole: bool) -> Callable[..., Any]:
    """A call of the module that runs the hook `after`, and gives inputs back, also if it is interrupted: for
    KeyboardInterrupt and others that are no `Exception`, torch does not call hooks with `always_call`. `is_whole`: make
    room for the calls inside."""
    of_module = weakref.ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive: Any = of_module()
        if torch.compiler.is_compiling():
            return type(alive)._call_impl(alive, *args, **kwargs)
        caller = sys._getframe(1)
        called = caller.f_locals["self"] if caller.f_code is _CALLER else alive
        del caller  # a frame keeps what is in it
        if called is not alive:  # a copy of the module has this attribute, too (`copy.copy`, higher)
            return type(called)._call_impl(called, *args, **kwargs)
        cast, with_grad = len(running()), torch.is_grad_enabled()
        try:
            return type(alive)._call_impl(alive, *args, **kwargs)
        except BaseException as error:
            # The handler of a signal may have raised where one of the engine's `no_grad` begins or ends.
            torch._C._set_grad_enabled(with_grad)
            if not isinstance(error, Exception):
                with suppress(Exception):  # the interrupt is the error
                    end_calls(cast)
                    after(alive, args, kwargs, None)
            raise

    vars(call)["__func__"] = _call_of_class
    return between_graphs(with_room(call) if is_whole else call)


def _call_of_class(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The function of the bound method that is there in other modules: nncf wraps it."""
    return type(module)._call_impl(module, *args, **kwargs)


class Graph:
    """Held by the hooks in a graph of autograd, so that a weak reference tells whether the graph is gone."""


MOST_VISITS = 8
"""At most this many visits of each module that needs units are remembered until a backward."""


_numbers = itertools.count()


def newest() -> int:
    """A number for what is newer than all visits so far, and older than those to come."""
    return next(_numbers)


@dataclass(eq=False)
class Visit:
    """One forward of a unit that backward will come back to.

    Attributes:
        around: units of the calls around it. Backward comes to them first, by their own outputs. Not so a second one
            through the same graph that begins at an output of this unit, so they are shown again with it.
        trail: that it is in; None for a forward in a scope.
        call: the call of a module that the forward is a part of, with those of its other units. Backward comes to all
            of them at once, by the outputs of the call.
        number: of the visits of this process, in the order of the forwards.
    """

    unit: Unit
    around: Sequence[Unit]
    trail: Trail | None
    call: object
    number: int = field(default_factory=_numbers.__next__)

    @property
    def may_come(self) -> bool:
        """Whether a backward may come to it."""
        return self.trail is not None and not self.trail.is_gone


class Trail:
    """The visits of one call of the model, and of calls of its parts until the next one, in order. See [Note: the trail
    of a backward] in `schedule.py`.

    Attributes:
        graphs: of its outputs, those that are not gone on this rank, and that a backward may come to.
        is_gone: whether the graphs are gone on every rank: forwards without a backward.
        retained_with: if a backward has retained its graph: the trails that this one had listed, the oldest first. The
            next one may come to all of them.
    """

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self.graphs = weakref.WeakSet[Graph]()
        self.is_gone = False
        self.retained_with: Sequence[Trail] = (self,)


_SEVERAL = "a backward after several forwards"
_RETAINED = "a backward after one with retain_graph=True, which all ranks must give"


class Trails:
    """The trails of a model.

    Attributes:
        last: of the last call of the model.
        listed: those of forwards since the last backward, and those that this one may come to.
    """

    def __init__(self) -> None:
        self._older: Sequence[Trail] = ()  # of several forwards, those that were not gone when the last backward began
        self._why = _SEVERAL  # these are asked for
        self._renewals = 0  # of weights, before them
        self.begin_anew()

    def begin_anew(self) -> None:
        self.last = Trail()
        self.listed = [self.last]

    def begin_call(self) -> None:
        """A call of the model begins."""
        if self.last.visits:
            self.last = Trail()
            self.listed.append(self.last)

    def find_living(self, units: Sequence[Unit], collectives: Collectives) -> list[Visit]:
        """At the beginning of a backward: list what may come of several forwards, on any rank. Returns the visits of
        those that were not listed."""
        renewals = sum(unit.weights.versions.num_renewals for unit in units)
        if self._renewals != renewals:
            self._older = ()  # the graphs of older weights raise
        self._renewals = renewals
        why = self._why if self._older else _SEVERAL
        asked = [*self._older, *(trail for trail in self.listed if trail.visits)]
        # One rank may have kept a loss that the others have dropped (a log on rank 0, an error on one rank). If each
        # looked at its own graphs, they would reduce at different places between the gathers, and wait for each other.
        # Followers of a join have none to ask: there, all may come.
        if len(asked) < 2 or collectives.orders is not None:
            self._older = ()
            return []
        alive = on_device([len(trail.graphs) for trail in asked], collectives.device)
        for trail, count in zip(asked, collectives.add_up(alive, why), strict=True):
            trail.is_gone = not count
        living = [trail for trail in asked if not trail.is_gone]
        self._older, self._why = living if len(living) > 1 else (), _SEVERAL
        return self.list_again(living)

    def list_again(self, trails: Sequence[Trail]) -> list[Visit]:
        """Backward may come to these trails, of earlier forwards. Returns the visits of those that were not listed."""
        added = [one for one in trails if one not in self.listed]
        for one in added:
            one.is_gone = False
        self.listed += added
        return [visit for one in added for visit in one.visits]

    def note_retained(self) -> None:
        """At the end of a backward for which these were listed."""
        if torch._C._autograd._get_current_graph_task_keep_graph():
            retained = [trail for trail in self.listed if trail.visits and not trail.is_gone]
            for trail in retained:
                trail.retained_with = sorted(retained, key=lambda one: one.visits[0].number)
            if retained and not self._older:  # the next backward may be of a new forward, and of these
                self._older, self._why = retained, _RETAINED


@dataclass(frozen=True, eq=False)
class Unrecorded:
    """A forward of a unit without grad, which a reentrant checkpoint may run again.

    Attributes:
        behind: the last visit before it.
        inside: units whose calls are around it; their visits come after it.
        number: as of visits.
    """

    behind: Visit | None
    inside: frozenset[Unit]
    number: int = field(default_factory=_numbers.__next__)


class ToCome:
    """What backward has not come to.

    Attributes:
        visits: in the order of the forwards.
        without_graph: forwards without grad; the last `MOST_VISITS` of each unit.
        left: trained units that this backward is done with.
        reached: the number of the last visit.
        again: unit -> the number of the forward that runs again.
    """

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self._visits_of = Counter[Unit]()  # how many of the listed visits are of the unit
        self.without_graph: dict[Unit, deque[Unrecorded]] = defaultdict(partial(deque, maxlen=MOST_VISITS))
        self.left: set[Unit] = set()
        self.reached = -1
        self.again: dict[Unit, int] = {}

    @property
    def newest(self) -> int:
        """The number of the newest visit; -1 if there is none."""
        return self.visits[-1].number if self.visits else -1

    def add(self, visits: Sequence[Visit], *, in_front: bool = False) -> None:
        """List these. `in_front`: they are older than all that is listed."""
        place = 0 if in_front else len(self.visits)
        self.visits[place:place] = visits
        self._visits_of.update(visit.unit for visit in visits)

    def drop(self, first: int) -> list[Visit]:
        """Remove the visits from number `first` on, and return them."""
        dropped, self.visits[first:] = self.visits[first:], []
        self._visits_of.subtract(visit.unit for visit in dropped)
        if not self.visits:
            self._visits_of.clear()
        return dropped

    def where(self, of_call: Sequence[Visit]) -> range:
        """The numbers of those of these visits that are listed. Visits of one call lie side by side, mostly at the
        end."""
        visits = self.visits
        stop = next((n for n in range(len(visits), 0, -1) if visits[n - 1] in of_call), 0)
        begin = stop
        while begin and visits[begin - 1] in of_call:
            begin -= 1
        return range(begin, stop)

    def ran_without_grad(self, unit: Unit, inside: frozenset[Unit]) -> None:
        self.without_graph[unit].append(Unrecorded(self.visits[-1] if self.visits else None, inside))

    def run_again(self, units: Sequence[Unit]) -> list[Unrecorded]:
        """The last forward without grad of each of these units, if there was one: a checkpoint runs it again."""
        first = {unit: self.without_graph[unit].pop() for unit in units if self.without_graph.get(unit)}
        self.again.update((unit, forward.number) for unit, forward in first.items())
        return [*first.values()]

    def numbered(self, visits: Sequence[Visit]) -> Sequence[Visit]:
        """Visits of a recomputation, with the numbers of the forwards that run again."""
        for visit in visits:
            visit.number = self.again.pop(visit.unit, visit.number)
        return visits

    def begin_of(self, unrecorded: Unrecorded) -> int:
        """The number of the first visit after this forward."""
        behind = unrecorded.behind
        if behind is None:
            return 0
        return self.visits.index(behind) + 1 if behind in self.visits else len(self.visits)

    def behind(self, number: int) -> int:
        """The first visit that is newer than this number."""
        return next((index for index, visit in enumerate(self.visits) if visit.number > number), len(self.visits))

    def take(self, first: int) -> list[Visit]:
        """Remove the visits of the last call, from number `first` on, and return them in order."""
        visits, begin = self.visits, len(self.visits) - 1
        while begin > first and visits[begin - 1].call is visits[-1].call:
            begin -= 1
        self.reached = visits[begin].number
        return self.drop(begin)

    def end_backward(self) -> None:
        self.without_graph.clear()
        self.left.clear()
        self.again.clear()

    def has_any(self) -> bool:
        """Whether backward will come to any unit."""
        return bool(self.visits) or any(self.without_graph.values())

    def has_gathers(self) -> bool:
        """Whether backward will come to a unit whose gather has not begun."""
        units = {visit.unit for visit in self.visits} | {unit for unit, marks in self.without_graph.items() if marks}
        return any(unit.weights.state is Residency.SHARDED for unit in units)

    def has(self, unit: Unit) -> bool:
        """Whether backward will come to the unit (again)."""
        return self.is_listed(unit) and any(visit.unit is unit and visit.may_come for visit in self.visits)

    def is_listed(self, unit: Unit) -> bool:
        """Whether a visit of the unit is listed, also one that may not come."""
        return self._visits_of[unit] > 0


@dataclass(frozen=True, eq=False)
class Entry:
    """The state of the autograd graph when a unit's forward began.

    Attributes:
        next_node: the sequence number of the next node of this thread. Each thread counts for itself, so a forward
            that is recomputed on the thread of a backward may have lower numbers than its inputs.
        given: the nodes that made the inputs of the forward.
    """

    next_node: int
    given: frozenset[Node | None]

    @classmethod
    def of(cls, inputs: Any) -> Self:
        return cls(torch._C._autograd._get_sequence_nr(), frozenset([one.grad_fn for one in differentiable(inputs)]))

    def has_advanced(self) -> bool:
        """Whether any node has been made since."""
        return torch._C._autograd._get_sequence_nr() > self.next_node

    def has_made(self, output: Tensor) -> bool:
        # [Note: who made an output]
        # A skipped block returns its input. A gather for that output could take over the pool buffer of the unit that
        # made it, just before backward uses it: gradients from another unit's weights, without an error. Sequence
        # numbers alone are not enough: each thread counts for itself (pytorch/pytorch#52180), so a recomputed forward
        # may have lower numbers.
        node = output.grad_fn
        return node is not None and node not in self.given and node._sequence_nr() >= self.next_node
