"""The hooks on modules and parameters of the user's model. (While a timeline is recorded, `running.py` adds some.)

| hook                                  | where                              | does                                    |
|---------------------------------------|------------------------------------|-----------------------------------------|
| forward pre-hook, forward hook        | modules that need a unit's weights | gather and show, before any other hook; |
|                                       |                                    | hide, after all others. Taken off while |
|                                       |                                    | a call around gathers the same units    |
| gradient hook on outputs              | the outermost of those calls       | gather and show for backward            |
| hooks around forward                  | the model, units, other precisions | cast inputs and outputs (`casting.py`)  |
| gradient hook on outputs              | the model                          | mark the start of backward              |
| gradient hook                         | trainable parameters               | mark the start of backward              |
| post-accumulate-grad hook, grad_dtype | trainable parameters               | move the gradient into its bucket       |

Module hooks hold a strong reference to the schedule. Parameter hooks hold a weak one: a parameter that outlives the
model must not keep it alive.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree

from zeroshard.errors import InvalidState, InvalidType
from zeroshard.model.absent import NOT_COPIED, NOT_PICKLED, as_tensors
from zeroshard.model.casting import Cast, attach_casts, cast
from zeroshard.model.paths import Modules, parent
from zeroshard.model.readers import looked_at
from zeroshard.model.transforms import given_tensors, outside_transforms, under_transform
from zeroshard.model.trees import tensors_in
from zeroshard.runtime.gather import Gatherer, in_backward
from zeroshard.runtime.reduce import Reducer
from zeroshard.runtime.running import End, Running
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency


class NotCopied:
    """Cannot be copied or pickled, nor can a module that has such an object as a hook: a copy would share buffers and
    process groups."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise InvalidType(NOT_COPIED)

    def __reduce__(self) -> NoReturn:
        raise InvalidType(NOT_PICKLED)


class OutsideGraphs(NotCopied, partial[Any]):
    """A hook that torch.compile calls between two graphs without tracing it: it moves data and communicates.

    A `partial`, because torch.compile would compile a Python `__call__` again for every class of modules.
    """

    def __new__(cls, hook: Callable[..., Any]) -> Self:
        return super().__new__(cls, _outside_graphs()(hook))


@functools.cache
def _outside_graphs() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorator of all hooks, made once: a module has two hooks, and to make it takes longer than to use it."""
    import torch._dynamo  # slow to import, so not at the top; torch's optimizers import it as well

    # Without `disable`, Dynamo compiles the hook once for each class of modules, up to its limit of 8, with many
    # warnings (torch._dynamo.config.recompile_limit).
    return torch._dynamo.disable(wrapping=False)  # type: ignore[no-any-return, no-untyped-call]


_MOST_VISITS = 8
"""At most this many visits of each module that needs units are remembered until a backward."""


@dataclass(eq=False)
class Visit:
    """One forward of a unit that backward will come back to.

    Attributes:
        around: units of the calls around it. Backward comes to them first, by their own outputs. Not so a second one
            through the same graph that begins at an output of this unit, so they are shown again with it.
    """

    unit: Unit
    around: Sequence[Unit] = ()


@dataclass(eq=False)
class Needed:
    """What the calls of a module need.

    Attributes:
        units: the units whose weights stay until the end of the call.
        gathers: those of them that the call gathers when it begins.
        hooks: around the call.
        inside: modules inside the module that need nothing else, and their hooks.
        running: how many calls are running (of several threads, or one inside another).
    """

    units: list[Unit] = field(default_factory=list)
    gathers: list[Unit] = field(default_factory=list)
    hooks: Around | None = None
    inside: dict[nn.Module, Around] = field(default_factory=dict)
    running: int = 0

    def add(self, unit: Unit, path: str) -> None:
        """`path`: of the module."""
        if unit not in self.units:
            self.units.append(unit)
            if not unit.spec.is_part or path in unit.spec.gathered_by:
                self.gathers.append(unit)

    def covers(self, other: Needed) -> bool:
        """Whether these needs include the other ones."""
        return set(other.units) <= set(self.units) and set(other.gathers) <= set(self.gathers)

    def begin(self) -> None:
        """The call begins: take the hooks off the modules inside."""
        # [Note: modules inside a unit]
        # They need no hooks, and torch calls a module without hooks much faster. And torch.compile must not trace these
        # hooks: each of them would break the graph, and a graph break in a pre-hook makes Dynamo skip the forward
        # behind it (pytorch/pytorch#111966, pytorch/pytorch#135410). Without them the call of a unit is one graph.
        self.running += 1
        for hooks in self.inside.values() if self.running == 1 else ():
            hooks.of_before.pop(hooks.first, None)
            hooks.of_after.pop(hooks.last, None)

    def end(self) -> None:
        """The call is over: put them back, in front of all other hooks, and behind."""
        self.running -= 1
        for hooks in self.inside.values() if not self.running else ():
            hooks.of_before[hooks.first] = hooks.before
            hooks.of_before.move_to_end(hooks.first, last=False)
            hooks.of_after[hooks.last] = hooks.after


class Around:
    """The two hooks around the calls of a module: `before` gathers, `after` hides.

    Attributes:
        of_before, of_after: torch's ordered dicts with these hooks of the module, under the keys `first` and `last`.
    """

    def __init__(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self.before, self.after = before, after
        self._handles = (
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            # `always_call` (pytorch/pytorch#104278): else an exception in forward leaves the unit shown and in use.
            module.register_forward_hook(after, always_call=True, with_kwargs=True),
        )
        self.first, self.last = (handle.id for handle in self._handles)
        self.of_before: Any = module._forward_pre_hooks
        self.of_after: Any = module._forward_hooks

    def hide_last(self) -> None:
        """Move the hook that hides to the end: hooks that the user has registered since may read the weights."""
        if next(reversed(self.of_after), self.last) != self.last and self.last in self.of_after:
            self.of_after.move_to_end(self.last)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True, eq=False)
class Entry:
    """The state of the autograd graph when a unit's forward began.

    Attributes:
        next_node: the sequence number of the next node of this thread. Each thread counts for itself, so a forward
            that is recomputed on the thread of a backward may have lower numbers than its inputs.
        given: the nodes that made the inputs of the forward.
    """

    next_node: int
    given: frozenset[Node]

    @classmethod
    def of(cls, inputs: Any) -> Self:
        return cls(torch._C._autograd._get_sequence_nr(), frozenset(_made_by(t) for t in _differentiable(inputs)))

    def has_advanced(self) -> bool:
        """Whether any node has been made since."""
        return torch._C._autograd._get_sequence_nr() > self.next_node

    def has_made(self, output: Tensor) -> bool:
        # [Note: who made an output]
        # A skipped block returns its input. A gather for that output could take over the pool buffer of the unit that
        # made it, just before backward uses it: gradients from another unit's weights, without an error. Sequence
        # numbers alone are not enough: each thread counts for itself (pytorch/pytorch#52180), so a recomputed forward
        # may have lower numbers.
        node = _made_by(output)
        return node not in self.given and node._sequence_nr() >= self.next_node


@dataclass(frozen=True, eq=False)
class Results:
    """What a call of a module has returned, and where else it may have left results."""

    module: nn.Module
    inputs: Any
    output: Any

    def elsewhere(self) -> list[Tensor]:
        """Results in the inputs (a list that they are appended to), and in attributes of the module."""
        attributes = [vars(module) for module in self.module.modules()]
        own = [value for names in attributes for name, value in names.items() if name not in _OF_TORCH]
        leaves = [leaf for leaf in pytree.tree_leaves(own) if isinstance(leaf, Tensor)]  # not into the user's objects
        return [*_differentiable(self.inputs), *_differentiable(leaves)]


_OF_TORCH = vars(nn.Module()).keys()


class Schedule(NotCopied):
    """Decides which hook starts which gather or reduction.

    On every rank, backward visits the units of the previous forwards in reverse order: also units that are not in this
    rank's own graph (a branch that was not taken here), because its peers may need them.
    """

    gatherer: Gatherer
    reducer: Reducer

    def __init__(self) -> None:
        """Call `lead_to` before anything else."""
        self._removers: list[Callable[[], None]] = []
        self._backward: int | None = None  # id of autograd's graph task of the current backward
        self.accumulates = False
        self._needs: dict[nn.Module, Needed] = {}
        self._first: list[Around] = []  # of modules inside the model, whose own hooks already run in `come_first`
        self._casts: dict[nn.Module, Cast] = {}
        self.running = Running()
        self._entered: dict[Unit, Entry] = {}
        self._visits: list[Visit] = []  # forwards since the last backward that it has not visited, in order
        self._trains = False  # whether a unit with trainable parameters has run since
        self._without_graph: dict[Unit, deque[Visit | None]] = _no_marks()  # last visit before forwards without grad
        self._recomputed: Node | None = None  # the reentrant checkpoint that recomputed last
        self._at: dict[Unit, int] = {}  # units that backward is at -> id of the graph task that came there

    # Attaching ---------------------------------------------------------------------------------------------------

    def attach(
        self, modules: Modules, casts: Mapping[nn.Module, Cast], begin: Callable[[nn.Module, Any], None]
    ) -> None:
        """Install all hooks.

        Args:
            modules: of the model.
            casts: see `casting.py`; their hooks run inside the hooks that gather and hide.
            begin: called before each call of the whole model.
        """
        model = modules[""]
        # First, so that copying the model raises before anything else of it is copied (`NotCopied`).
        self._keep(model.register_forward_hook(OutsideGraphs(self._after_model)))
        self._needs[model] = Needed()  # also without units of its own: the hooks around it tell whether it runs
        for unit in self.gatherer.units:
            for path in unit.spec.modules:
                self._needs.setdefault(modules[path], Needed()).add(unit, path)
        self._casts = dict(casts)
        # [Note: order of hooks]
        # From outermost to innermost: gather, casts, the user's hooks, forward; afterwards in reverse. torch runs hooks
        # in the order of registration, except with `prepend=True`. So casts are registered first, gathers are
        # prepended, and the hooks that hide are moved to the end before each call, behind the user's newer hooks.
        self._removers += attach_casts(casts)
        self._removers += [hooks.remove for hooks in _around_lookers(self, modules, self._needs)]
        around = {
            module: Around(module, _before(self, needed), _after(self, needed))
            for module, needed in self._needs.items()
        }
        self._removers += [hooks.remove for hooks in around.values()]
        self._first = [hooks for module, hooks in around.items() if module is not model]
        for path, module in modules.items():
            if module not in around:
                continue
            needed = self._needs[module]
            needed.hooks = around[module]
            for outer in _around(self._needs, modules, path):
                if outer.covers(needed):
                    outer.inside[module] = around[module]
        self.hook_parameters(self.reducer.order)
        # Prepended last, so it runs first. `begin` is not stored here, as its object may own this schedule.
        self._keep(model.register_forward_pre_hook(_begin(self, begin), prepend=True))

    def lead_to(self, gatherer: Gatherer, reducer: Reducer) -> None:
        """Let the hooks call this gatherer and this reducer."""
        self.gatherer, self.reducer = gatherer, reducer
        reducer.gathers_left = partial(_gathers_left, self._visits, self._without_graph)

    def hook_parameters(self, units: Sequence[Unit]) -> None:
        """Install the parameter hooks of units that train."""
        with as_tensors():
            for unit in units:
                for index, parameter in enumerate(unit.parameters):
                    self._removers += _hook_parameter(weakref.ref(self), unit, index, parameter)

    def wrap(self, module: nn.Module, name: str, begin: Callable[[nn.Module, Any], None] | None) -> None:
        """Make a method of a module gather the module's units and cast inputs and outputs, as a call of the module
        does.

        Args:
            begin: called before the method, if the module is the whole model.
        """
        needed, casts = self._needs.get(module, Needed()), self._casts.get(module, Cast())
        method = getattr(module, name)
        before, after = _before(self, needed), _after(self, needed)
        begin = None if begin is None else _begin(self, begin)

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if begin is not None and not self.running:
                begin(module, args)
            before(module, args, kwargs)
            output = None
            try:
                output = cast(method(*cast(args, casts.into), **cast(kwargs, casts.into)), casts.out)
            finally:
                after(module, args, kwargs, output)
            return output

        setattr(module, name, wrapper)
        self._removers.append(partial(delattr, module, name))

    def come_first(self) -> None:
        """Move the hooks that gather to the front: the user may have registered hooks with `prepend=True` since."""
        for hooks in self._first:
            if next(iter(hooks.of_before), hooks.first) != hooks.first and hooks.first in hooks.of_before:
                hooks.of_before.move_to_end(hooks.first, last=False)

    def detach(self) -> None:
        """Remove all hooks."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        self._first.clear()
        for needed in self._needs.values():  # a call may be running, and would put them back
            needed.inside.clear()
        self._needs.clear()

    def _keep(self, handle: Any) -> None:
        self._removers.append(handle.remove)

    # Forward -----------------------------------------------------------------------------------------------------

    def _after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not under_transform():
            for leaf in _differentiable(output):
                # On the output, as the loss is not known here. A backward that does not pass the output (of a loss on
                # an intermediate value) begins at its first gradient: `before_gradient`.
                leaf.register_hook(lambda grad: self.begin_backward())  # type: ignore[no-untyped-call]

    def expect_no_transform(self, units: Sequence[Unit]) -> None:
        """Raises:
        RuntimeError: `torch.func` would differentiate through weights that are gathered only during the call."""
        if not torch.is_grad_enabled() or not under_transform():
            return
        for unit in units:
            if unit.weights.is_passing:
                raise InvalidState(
                    f"unit {unit.name} is called inside a torch.func transform (grad, vmap, jvp, ...), and under this "
                    "plan its weights are here for the time of the call only: transform inside `with "
                    "handle.unsharded():`, or use a plan with replicated weights (zero2); vmap and jvp alone also work "
                    "under torch.no_grad()"
                )

    def before_module(self, module: nn.Module, needed: Needed, inputs: Any) -> None:
        if self._backward is not None and self.abandon_backward():
            raise InvalidState(
                "a backward has raised, and with its gradients those of earlier micro-batches are discarded: they are "
                "in one sum. Call optimizer.zero_grad() after such an error, and begin with the first micro-batch again"
            )
        units, makes_graph = needed.units, torch.is_grad_enabled()
        given = given_tensors((module, *needed.inside))
        for unit in units if given else ():
            unit.weights.expect_present(given)
        begins = [unit for unit in units if unit.weights.is_between_forwards] if makes_graph else []
        if begins:
            self._entered.update(dict.fromkeys(begins, Entry.of(inputs)))
        self._trains = self._trains or any(unit.requiring_grad() for unit in units)
        self.running.begin(units, inputs)
        needed.begin()
        if makes_graph and in_backward():
            self._return_to(units)
        self.gatherer.enter(units, needed.gathers)

    def after_module(self, needed: Needed, results: Results, *, transformed: bool = False) -> None:
        """Hide units that no forward needs any more, and hook the outputs that they have made: backward gathers the
        units again when it reaches these. See [Note: who made an output]. `transformed`: a transform is active, which
        runs its own backward at once."""
        units = needed.units
        if (end := self.running.end(units)) is End.NOT_BEGUN:  # these units were never entered
            return
        needed.end()
        self.running.returned(units, results.output)
        free = self.gatherer.leave(units, waits=end is End.RETURNED)
        in_scope = [] if transformed else [u for u in units if u.weights.scopes and u.weights.is_between_forwards]
        if not free and not in_scope:
            return
        entries = {unit: self._entered.pop(unit, None) for unit in (*free, *in_scope)}
        if not torch.is_grad_enabled():
            if not self._visits:  # else the casts are those of a forward that backward will come to
                _forget_autocasts(self.gatherer.collectives.device)
            for unit in free:
                self._without_graph[unit].append(self._visits[-1] if self._visits else None)
            return
        if not in_backward():
            for unit in free:
                self._without_graph.pop(unit, None)  # earlier forwards without grad were an evaluation
        around = self.running.around()
        visits = [Visit(unit, around) for unit in free]
        if self._trains:
            self._visits += [visit for visit in visits if not in_backward() or self._is_first_seen(visit.unit)]
            if len(self._visits) > _MOST_VISITS * len(self._needs):  # forwards without a backward
                self._visits.clear()
        # A rank may run the model alone in a scope, so these are no visits. But a backward may come after the scope.
        visits = [*visits, *(Visit(unit, around) for unit in in_scope)]
        hooked = self._hook(_differentiable(results.output), visits, entries)
        if any(v not in hooked and (entry := entries[v.unit]) is not None and entry.has_advanced() for v in visits):
            self._hook(results.elsewhere(), [visit for visit in visits if visit not in hooked], entries)

    def _hook(
        self, leaves: Iterable[Tensor], visits: Sequence[Visit], entries: Mapping[Unit, Entry | None]
    ) -> set[Visit]:
        """Hook those of these tensors that the units have made. Returns the visits with such a tensor."""
        hooked: set[Visit] = set()
        for leaf in leaves:
            made = [v for v in visits if (entry := entries[v.unit]) is None or entry.has_made(leaf)]
            if made:
                hooked.update(made)
                leaf.register_hook(lambda grad, made=made: self._on_output_grad(made))  # type: ignore[no-untyped-call]
        return hooked

    def _is_first_seen(self, unit: Unit) -> bool:
        """Whether a forward inside of a backward (a recomputation) needs a visit. In a reentrant checkpoint the first
        forward ran without grad and left none, and an inner backward follows. Any other forward has left a visit."""
        return unit not in self._at and all(visit.unit is not unit for visit in self._visits)

    # Backward ----------------------------------------------------------------------------------------------------

    def _on_output_grad(self, visits: Sequence[Visit]) -> None:
        self.begin_backward()
        units, around = [visit.unit for visit in visits], visits[0].around
        if torch.is_grad_enabled():  # create_graph
            # The second backward reads weights through views that the first has left in the graph. No hook could gather
            # them again, so they must stay.
            self.gatherer.expect_to_stay([unit for unit in units if not unit.weights.scopes])
        with torch.no_grad():
            waiting = [index for index, visit in enumerate(self._visits) if visit in visits]
            if not waiting:
                self.gatherer.enter_backward([*around, *units])
                return
            self._visit_from(waiting[-1] + 1)
            del self._visits[waiting[0] :]
            self._come_to(units, around)

    def _return_to(self, units: Sequence[Unit]) -> None:
        """A reentrant checkpoint is about to recompute these. Its first forward ran without grad and left no visit.
        Backward is done with the units that ran after it: visit them first."""
        marks = [self._without_graph[unit].pop() for unit in units if self._without_graph.get(unit)]
        checkpoint = torch._C._current_autograd_node()
        if not marks or self._backward is None or checkpoint is self._recomputed:
            return  # later visits belong to this checkpoint
        self._recomputed = checkpoint
        with torch.no_grad():
            self._visit_from(max(0 if mark is None else self._place_behind(mark) for mark in marks))
            self._come_to([])

    def _place_behind(self, visit: Visit) -> int:
        return self._visits.index(visit) + 1 if visit in self._visits else len(self._visits)

    def _visit_from(self, first: int) -> None:
        """Visit the units of the visits from number `first` on, the last one first."""
        while len(self._visits) > first:
            visit = self._visits.pop()
            self._come_to([visit.unit], visit.around)

    def _come_to(self, units: Sequence[Unit], around: Sequence[Unit] = ()) -> None:
        """Backward has reached these units. It runs the graph in reverse, so it is done with the units visited before:
        they are reduced here, also if this rank has no gradient of them, as its peers may have some."""
        # Gather before any reduction: a peer may wait for this gather before it reads what a reduction below waits for.
        self.gatherer.gather_for_backward([*around, *units])
        task = torch._C._current_graph_task_id()
        # An inner backward (of a reentrant checkpoint) has a higher id. While it runs, it is unknown whether the outer
        # backward has more gradients for the units that it was at: they stay in `_at` until the outer one goes on.
        unfinished = {unit: of for unit, of in self._at.items() if of < task or not self._leave(unit, units)}
        self._at = dict.fromkeys(units, task) | unfinished
        self.gatherer.enter_backward([*around, *units])

    def _leave(self, unit: Unit, next_units: Sequence[Unit]) -> bool:
        """Backward goes on to `next_units`. Reduce `unit` if backward will not return to it. False if the graph still
        has gradients for it: then ask again later."""
        # Backward comes to the root first. A reentrant checkpoint may have a gradient for it that the graph has not.
        if unit in next_units or unit.spec.of_root or any(visit.unit is unit for visit in self._visits):
            return True
        return not self.accumulates or self.reducer.complete(unit, at_end=self._backward is None)

    def before_gradient(self, parameter: Tensor) -> None:
        """Autograd is about to add to `p.grad`, or to return a gradient from `torch.autograd.grad`."""
        if not self.accumulates and _is_accumulated(parameter):
            self.begin_backward(accumulates=True)
        self.reducer.single_uses.expect_one_graph(parameter)

    def begin_backward(self, *, accumulates: bool | None = None) -> None:
        """Called by every hook of a backward; the first call queues a callback for its end.

        Args:
            accumulates: True: it leaves gradients in parameters; None: look at the graph. (In a reentrant checkpoint,
                parameters are not in the graph until an inner backward reaches them.)
        """
        if self._backward is None:
            self._backward = torch._C._current_graph_task_id()
            # torch has no public hook for the end of a backward (pytorch/pytorch#66199); DDP and FSDP2 use this one,
            # too. The callback belongs to the current graph task (pytorch/pytorch#24965): queued by the inner backward
            # of a reentrant checkpoint, it would run at the end of that one, in the middle of the outer backward
            # (facebookresearch/fairscale#753).
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if accumulates is None:
                accumulates = any(_is_accumulated(p) for unit in self.reducer.order for p in unit.parameters)
                if not accumulates:
                    self.gatherer.guard()
        if accumulates and not self.accumulates:
            self.accumulates = True
            self.reducer.begin_backward()

    def abandon_backward(self) -> bool:
        """If the last backward raised and never ended: wait for its collectives, and discard its gradients. Returns
        whether it had added to gradients of earlier ones, which are discarded, too."""
        if self._backward is None or in_backward():
            return False
        self._backward, self.accumulates = None, False
        self.running.end_backward()
        self._forget()
        with torch.no_grad():
            adds = self.reducer.abandon_backward()
        self.gatherer.end_backward()
        return adds

    def _forget(self) -> None:
        """Drop the records of forwards and of this backward."""
        self._visits.clear()
        self._without_graph.clear()
        self._recomputed, self._trains = None, False
        self._at.clear()

    def _end_backward(self) -> None:
        self._backward = None
        self.running.end_backward()
        _forget_autocasts(self.gatherer.collectives.device)
        try:
            with torch.no_grad():
                self._visit_from(0)  # before the last reductions: peers wait for these gathers before they reduce
        finally:
            accumulates, self.accumulates = self.accumulates, False
            self._forget()
        if accumulates:
            self.reducer.end_backward()
        self.gatherer.end_backward()


def _forget_autocasts(device: torch.device) -> None:
    """Let autocast cast weights anew."""
    # Until its block ends, autocast keeps the cast of a weight together with the cast's node. A later forward would use
    # that node, which is older than all nodes of that forward, so backward comes to it last: its unit would not be here
    # any more. (After a step, the cast would also have the values from before, as in plain torch.)
    if torch.is_autocast_enabled(device.type):
        torch.clear_autocast_cache()


def _gathers_left(visits: Sequence[Visit], without_graph: Mapping[Unit, deque[Visit | None]]) -> bool:
    """Whether backward will come to a unit whose gather has not begun."""
    ahead = {visit.unit for visit in visits} | {unit for unit, marks in without_graph.items() if marks}
    return any(unit.weights.state is Residency.SHARDED for unit in ahead)


def _no_marks() -> dict[Unit, deque[Visit | None]]:
    return defaultdict(partial(deque, maxlen=_MOST_VISITS))


def _reset_grad_dtype(parameter: nn.Parameter) -> None:
    parameter.grad_dtype = parameter.dtype


def _begin(schedule: Schedule, begin: Callable[[nn.Module, Any], None]) -> Callable[[nn.Module, Any], None]:
    """The pre-hook of the model."""

    @OutsideGraphs
    def hook(module: nn.Module, args: Any) -> None:
        schedule.running.expect_alone(schedule.gatherer.units)
        with schedule.running.lock:
            begin(module, args)

    return hook


def _before(schedule: Schedule, needed: Needed) -> Callable[[nn.Module, Any, Any], None]:
    """The pre-hook that gathers."""

    @OutsideGraphs
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if needed.hooks is not None:
            needed.hooks.hide_last()
        if not under_transform():
            with schedule.running.lock:
                schedule.before_module(module, needed, (args, kwargs))
            return
        schedule.expect_no_transform(needed.units)
        with schedule.running.lock, outside_transforms():
            schedule.before_module(module, needed, (args, kwargs))

    return hook


def _after(schedule: Schedule, needed: Needed) -> Callable[[nn.Module, Any, Any, Any], None]:
    @OutsideGraphs
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        results = Results(module, (args, kwargs), output)
        if not under_transform():
            with schedule.running.lock:
                schedule.after_module(needed, results)
            return
        with schedule.running.lock, outside_transforms():
            schedule.after_module(needed, results, transformed=True)

    return hook


def _around(needs: Mapping[nn.Module, Needed], modules: Modules, path: str) -> Iterator[Needed]:
    """What the modules around the one at `path` need."""
    while path:
        path = parent(path)
        if modules[path] in needs:
            yield needs[modules[path]]


def _around_lookers(schedule: Schedule, modules: Modules, needs: Mapping[nn.Module, Needed]) -> Iterator[Around]:
    """Hooks around modules that look at the parameters of a submodule (`looked_at`), unless a call around has gathered
    them."""
    for path, module in modules.items():
        looked = looked_at(module)
        if looked is None:
            continue
        first = f"{path}.{looked}".lstrip(".")
        inside = [needs[one] for name, one in modules.items() if f"{name}.".startswith(f"{first}.") and one in needs]
        units = list(dict.fromkeys(unit for needed in inside for unit in needed.gathers))
        if not any(set(units) <= set(outer.gathers) for outer in _around(needs, modules, first)):
            yield Around(module, _show_ahead(schedule, modules[first], units), _put_away(schedule, units))


def _show_ahead(schedule: Schedule, first: nn.Module, units: Sequence[Unit]) -> Callable[[nn.Module, Any, Any], None]:
    @OutsideGraphs
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not first.training:
            with schedule.running.lock, outside_transforms():
                schedule.gatherer.show_ahead(units)

    return hook


def _put_away(schedule: Schedule, units: Sequence[Unit]) -> Callable[[nn.Module, Any, Any, Any], None]:
    @OutsideGraphs
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # They are still shown if the module has raised before it called the submodule.
        with schedule.running.lock, outside_transforms():
            schedule.gatherer.put_away(units)

    return hook


def _is_accumulated(parameter: Tensor) -> bool:
    """Whether the current backward reaches the parameter and adds to its `grad`."""
    with as_tensors():
        if not parameter.requires_grad:
            return False
        try:
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
        except RuntimeError:  # torch raises for the inputs of `torch.autograd.grad`
            return False


def _hook_parameter(
    schedule: weakref.ref[Schedule], unit: Unit, index: int, parameter: nn.Parameter
) -> Iterator[Callable[[], None]]:
    """Both hooks hold weak references: else a parameter would keep the model alive after `del`."""
    if frozen := not parameter.requires_grad:  # torch then refuses hooks, and it may train later
        parameter.requires_grad_(True)
    yield parameter.register_post_accumulate_grad_hook(_on_gradient(schedule, unit, index)).remove  # type: ignore[no-untyped-call]
    yield parameter.register_hook(_before_gradient(schedule, unit, parameter)).remove  # type: ignore[no-untyped-call]
    if frozen:
        parameter.requires_grad_(False)
    # Autograd then also sums several uses of a parameter in it. See [Note: sums within one backward].
    if unit.spec.widens_gradients:
        parameter.grad_dtype = unit.spec.precision.grad
        yield partial(_reset_grad_dtype, parameter)


def _before_gradient(schedule: weakref.ref[Schedule], unit: Unit, parameter: Tensor) -> Callable[[Tensor], None]:
    """The gradient hook of a parameter. Its argument is the gradient."""
    of_parameter, of_unit = weakref.ref(parameter), weakref.ref(unit)

    def hook(grad: Tensor) -> None:
        alive, its_unit = schedule(), of_unit()
        if alive is None or its_unit is None:
            return
        # Usually there is nothing to do, and this runs for every gradient.
        is_shown = its_unit.weights.shown
        if is_shown and alive.accumulates and not alive.reducer.single_uses.uncast:
            return
        target = of_parameter()
        if target is not None:
            if not is_shown:
                its_unit.weights.expect_shown(target)
            alive.before_gradient(target)

    return hook


def _on_gradient(schedule: weakref.ref[Schedule], unit: Unit, index: int) -> Callable[[nn.Parameter], None]:
    """The post-accumulate-grad hook of a parameter. Its argument is the parameter, not the gradient: code that confuses
    the two averages weights."""
    unit_ref = weakref.ref(unit)

    def hook(parameter: nn.Parameter) -> None:
        alive, of_unit = schedule(), unit_ref()
        if alive is not None and of_unit is not None:
            if not alive.accumulates:
                alive.begin_backward(accumulates=True)
            alive.reducer.accumulate(of_unit, index, parameter)

    return hook


def _made_by(tensor: Tensor) -> Node:
    assert tensor.grad_fn is not None
    return tensor.grad_fn


def _differentiable(output: Any) -> list[Tensor]:
    """The tensors in an output that have a `grad_fn`."""
    return [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
