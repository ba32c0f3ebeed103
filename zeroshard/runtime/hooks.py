"""What is attached to the user's model: hooks on modules and parameters, and nothing else.

| hook                                  | where                              | does                                    |
|---------------------------------------|------------------------------------|-----------------------------------------|
| forward pre-hook, forward hook        | modules that need a unit's weights | gather and show, before any other hook; |
|                                       |                                    | hide, after all others. Inside a call   |
|                                       |                                    | that has done so: nothing               |
| gradient hook on outputs              | the outermost of those calls       | gather and show for backward            |
| hooks around forward                  | the model, units, other precisions | cast inputs and outputs (`casting.py`)  |
| gradient hook on outputs              | the model                          | mark the start of backward              |
| gradient hook                         | trainable parameters               | the same, and empty `p.grad`            |
| post-accumulate-grad hook, grad_dtype | trainable parameters               | move the gradient into its bucket       |

Module hooks keep the schedule alive; parameter hooks refer to it weakly (a parameter must not own its owner).
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zeroshard.errors import InvalidState, InvalidType
from zeroshard.model.absent import as_tensors
from zeroshard.model.casting import Cast, attach_casts, cast
from zeroshard.model.transforms import given_tensors, outside_transforms, under_transform
from zeroshard.model.trees import tensors_in
from zeroshard.runtime.gather import Gatherer, in_backward
from zeroshard.runtime.reduce import Reducer
from zeroshard.runtime.running import Inside, Running
from zeroshard.storage.unit import Unit


class NotCopied:
    """Refuses to be copied and pickled; through it, what it hangs on. A copy would share buffers and process groups."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise InvalidType(
            "a sharded model cannot be copied: copy it before shard(), or build a new one and load "
            "handle.full_state_dict() into it"
        )

    def __reduce__(self) -> NoReturn:
        raise InvalidType("a sharded model cannot be pickled: save handle.full_state_dict() instead")


class OutsideGraphs(NotCopied, partial[Any]):
    """A hook that torch.compile calls between two graphs, and does not look into: it moves data and communicates.

    A partial, because a `__call__` in Python would be compiled anew for every class of modules.
    """

    def __new__(cls, hook: Callable[..., Any]) -> Self:
        import torch._dynamo  # slow to import; every optimizer does it too

        # Looked into, a hook is compiled once for each class of modules, up to Dynamo's limit of 8, with a page of
        # warnings (torch._dynamo.config.recompile_limit).
        return super().__new__(cls, torch._dynamo.disable(hook))  # type: ignore[no-untyped-call]


_MOST_VISITS = 8
"""Times the number of units: forwards to remember until a backward."""


@dataclass(eq=False)
class Visit:
    """One forward of a unit that backward will come back to."""

    unit: Unit


@dataclass(frozen=True, eq=False)
class Entry:
    """How the graph stood when a unit's forward began.

    Attributes:
        next_node: the number of the next node that this thread would make. Each thread counts for itself: a forward
            that is recomputed by the thread of a backward begins anew, below the numbers of what it is given.
        given: the nodes that made what the forward was called with.
    """

    next_node: int
    given: frozenset[Node]

    @classmethod
    def of(cls, inputs: Any) -> Self:
        return cls(torch._C._autograd._get_sequence_nr(), frozenset(_made_by(t) for t in _differentiable(inputs)))

    def has_made(self, output: Tensor) -> bool:
        # [Note: who made an output]
        # A skipped block returns its input. To gather for that output would take the place of the unit that made it,
        # just when backward is about to use it: gradients from another unit's weights, without an error. The number of
        # a node alone does not tell: each thread counts for itself (pytorch/pytorch#52180), and a recomputed forward
        # counts anew.
        node = _made_by(output)
        return node not in self.given and node._sequence_nr() >= self.next_node


class Schedule(NotCopied):
    """Ties one training step together: which hook leads to which gather or reduction.

    Backward comes to the units of the forwards before it in reverse, on every rank: also to those that a rank's own
    graph leaves out (a branch that was not taken there), because its peers may need them.
    """

    gatherer: Gatherer
    reducer: Reducer

    def __init__(self) -> None:
        """Before anything else: `lead_to`."""
        self._removers: list[Callable[[], None]] = []
        self._backward: int | None = None  # the graph task under way
        self._accumulates = False  # whether it leaves gradients in parameters (`torch.autograd.grad` does not)
        self._needs: dict[nn.Module, list[Unit]] = {}
        self._casts: dict[nn.Module, Cast] = {}
        self._first: list[RemovableHandle] = []  # those that gather
        self._running = Running()
        self._entered: dict[Unit, Entry] = {}
        self._visits: list[Visit] = []  # of the forwards since the last backward, in order; those not come to
        self._trains = False  # whether a unit with trainable parameters has run in it
        self._without_graph: dict[Unit, deque[Visit | None]] = _no_marks()  # the visit before each such forward
        self._recomputed: Node | None = None  # the reentrant checkpoint that has run its forward again last
        self._at: dict[Unit, int] = {}  # where backward is -> the number of the backward that came there

    # Attaching ---------------------------------------------------------------------------------------------------

    def attach(
        self, model: nn.Module, casts: Mapping[nn.Module, Cast], begin: Callable[[nn.Module, Any], None]
    ) -> None:
        """Install all hooks. The first are not copied: a copy of the model is refused before it begins.

        Args:
            casts: see `casting.py`; inside those hooks that gather and hide.
            begin: what comes before a call of the whole model.
        """
        self._keep(model.register_forward_hook(OutsideGraphs(self._after_model)))
        units = self.gatherer.units
        for unit in units:
            for path in unit.spec.modules:
                of_module = self._needs.setdefault(model.get_submodule(path), [])
                if unit not in of_module:
                    of_module.append(unit)
        self._casts = dict(casts)
        # [Note: order of hooks]
        # Outermost to innermost: gather, casts, the user's hooks, forward; and back in reverse. torch runs hooks in the
        # order of registration, but for `prepend=True`. So casts come first here, gathers are put before them, and the
        # hooks that hide move to the end before each call, behind what the user has registered since.
        self._removers += attach_casts(casts)
        inner = _inside_another(model, self._needs)
        for module, needed in self._needs.items():
            asked = Inside() if module in inner else None
            # `always_call`: without it an exception in forward leaves the unit shown, and in use, for good
            # (pytorch/pytorch#104278 added it for hooks that clean up).
            after_call = _after(self, needed)
            after = module.register_forward_hook(
                after_call if asked is None else _after_asking(asked, after_call), always_call=True
            )
            before = _before(self, needed, partial(_move_to_end, after))
            if asked is not None:
                before = self._unless_inside(needed, asked, before)
            gather = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            self._keep(gather)
            if module is not model:  # whose hooks are under way when the model is called
                self._first.append(gather)
            self._keep(after)
        self.hook_parameters(self.reducer.order)
        # The last to come is the first to run. Not kept here: who owns this schedule may own what begins, too.
        self._keep(model.register_forward_pre_hook(OutsideGraphs(begin), prepend=True))

    def _unless_inside(
        self, units: Sequence[Unit], asked: Inside, before: Callable[[nn.Module, Any, Any], None]
    ) -> Callable[[nn.Module, Any, Any], None]:
        """`before`, but for calls inside of another that has asked for the same units already. `asked`: whether a call
        of this module has asked itself."""
        inside = tuple(self._running.inside[unit] for unit in units)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            # [Note: modules inside a unit]
            # torch.compile traces through this hook: it guards the attributes, and the call of a whole unit stays one
            # graph. What it must not look into (`before`) would end the graph at each layer, and a graph break in a
            # pre-hook makes Dynamo skip the forward behind it (pytorch/pytorch#111966, pytorch/pytorch#135410).
            for of_unit in inside:
                if not of_unit.now:
                    asked.begin()
                    return before(module, args, kwargs)
            if asked.now:  # it calls itself
                asked.begin()
            if not torch.compiler.is_compiling():
                self._expect_present(module, units)
            return None

        return hook

    def lead_to(self, gatherer: Gatherer, reducer: Reducer) -> None:
        """From now on hooks lead to these."""
        self.gatherer, self.reducer = gatherer, reducer

    def hook_parameters(self, units: Sequence[Unit]) -> None:
        """Of units that train."""
        for unit in units:
            for index, parameter in enumerate(unit.parameters):
                hook = _on_gradient(weakref.ref(self), unit, index)
                frozen = not parameter.requires_grad  # in a unit of which others train; it takes a hook only while not
                parameter.requires_grad_(True)
                self._keep(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                # Both hooks hold weak references: a parameter that owns its owner keeps the model alive after `del`.
                self._keep(parameter.register_hook(_before_gradient(weakref.ref(self), parameter)))  # type: ignore[no-untyped-call]
                parameter.requires_grad_(not frozen)
                if unit.spec.precision.grad.itemsize > parameter.element_size():  # uses in one backward add up, too
                    parameter.grad_dtype = unit.spec.precision.grad
                    self._removers.append(partial(_reset_grad_dtype, parameter))

    def wrap(self, module: nn.Module, name: str, begin: Callable[[nn.Module, Any], None] | None) -> None:
        """Let a method of a module do what calling the module does: its own parameters have their values inside, inputs
        and outputs are cast.

        Args:
            begin: what comes before a call of the whole model, if it is that.
        """
        method, needed, casts = getattr(module, name), self._needs.get(module, []), self._casts.get(module, Cast())
        before, after = _before(self, needed, lambda: None), _after(self, needed)
        begin = None if begin is None else OutsideGraphs(begin)

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if begin is not None and not self._running:
                begin(module, args)
            before(module, args, kwargs)
            output = None
            try:
                output = cast(method(*cast(args, casts.into), **cast(kwargs, casts.into)), casts.out)
            finally:
                after(module, args, output)
            return output

        setattr(module, name, wrapper)
        self._removers.append(partial(delattr, module, name))

    def come_first(self) -> None:
        """Before any module inside the model is called: the user may have registered hooks with `prepend=True`."""
        for hook in self._first:
            _move_to_front(hook)

    def detach(self) -> None:
        """Remove all hooks."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        self._first.clear()
        self._needs.clear()

    def _keep(self, handle: Any) -> None:
        self._removers.append(handle.remove)

    # Forward -----------------------------------------------------------------------------------------------------

    def _after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not under_transform():
            for leaf in _differentiable(output):
                # On the output, as the loss is not known here. A backward that does not come by the output (of a loss
                # on something in between) begins at its first gradient: `before_gradient`.
                leaf.register_hook(lambda grad: self.begin_backward())  # type: ignore[no-untyped-call]

    def expect_no_transform(self, units: Sequence[Unit]) -> None:
        """Raises:
        RuntimeError: `torch.func` would differentiate through weights that are only here for the time of the call."""
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

    def _expect_present(self, module: nn.Module, units: Sequence[Unit]) -> None:
        given = given_tensors(module)
        for unit in units if given else ():
            unit.weights.expect_present(given)

    def before_module(self, module: nn.Module, units: Sequence[Unit], inputs: Any) -> None:
        if self._backward is not None:
            self.abandon_backward()
        self._expect_present(module, units)
        makes_graph = torch.is_grad_enabled()
        begins = [unit for unit in units if unit.weights.is_passing] if makes_graph else []
        if begins:
            self._entered.update(dict.fromkeys(begins, Entry.of(inputs)))
        self._trains = self._trains or any(unit.requiring_grad() for unit in units)
        self._running.begin(units)
        if makes_graph and in_backward():
            self._return_to(units)
        self.gatherer.enter(units)

    def after_module(self, units: Sequence[Unit], output: Any) -> None:
        """Backward needs a unit again when it reaches what the unit has made. An output that is older (a block that is
        skipped returns its input) was made by another, and to gather for it would take that other's pool buffer."""
        if not self._running.end(units):  # something raised before they had been entered
            return
        free = self.gatherer.leave(units)
        if not free:
            return
        entries = {unit: self._entered.pop(unit, None) for unit in free}
        if not torch.is_grad_enabled():
            for unit in free:
                self._without_graph[unit].append(self._visits[-1] if self._visits else None)
            return
        if not in_backward():
            for unit in free:
                self._without_graph.pop(unit, None)  # that was an evaluation
        visits = [Visit(unit) for unit in free]
        if self._trains:
            self._visits += [visit for visit in visits if not in_backward() or self._is_first_seen(visit.unit)]
            if len(self._visits) > _MOST_VISITS * len(self.gatherer.units):  # forwards that no backward follows
                self._visits.clear()
        for leaf in _differentiable(output):
            made = [v for v in visits if (entry := entries[v.unit]) is None or entry.has_made(leaf)]
            if made:
                leaf.register_hook(lambda grad, made=made: self._on_output_grad(made))  # type: ignore[no-untyped-call]

    def _is_first_seen(self, unit: Unit) -> bool:
        """A forward inside of a backward recomputes. In a reentrant checkpoint the first forward made no graph and left
        no visit, and a backward of its own follows; any other left one, which backward has come to or will come to."""
        return unit not in self._at and all(visit.unit is not unit for visit in self._visits)

    # Backward ----------------------------------------------------------------------------------------------------

    def _on_output_grad(self, visits: Sequence[Visit]) -> None:
        self.begin_backward()
        units = [visit.unit for visit in visits]
        if torch.is_grad_enabled():  # create_graph
            # The second backward reads weights through views that the first has left in the graph: there is no hook
            # that could gather them again.
            self.gatherer.expect_to_stay(units)
        with torch.no_grad():
            waiting = [index for index, visit in enumerate(self._visits) if visit in visits]
            if not waiting:
                self.gatherer.enter_backward(units)
                return
            self._visit_from(waiting[-1] + 1)
            del self._visits[waiting[0] :]
            self._come_to(units)

    def _return_to(self, units: Sequence[Unit]) -> None:
        """A reentrant checkpoint is about to run these again. Its forward made no graph and left no visit; backward is
        done with what came after it."""
        marks = [self._without_graph[unit].pop() for unit in units if self._without_graph.get(unit)]
        checkpoint = torch._C._current_autograd_node()
        if not marks or self._backward is None or checkpoint is self._recomputed:
            return  # the visits since are its own
        self._recomputed = checkpoint
        with torch.no_grad():
            self._visit_from(max(0 if mark is None else self._place_behind(mark) for mark in marks))
            self._come_to([])

    def _place_behind(self, visit: Visit) -> int:
        return self._visits.index(visit) + 1 if visit in self._visits else len(self._visits)

    def _visit_from(self, first: int) -> None:
        """Come to the units of the visits from `first` on, the last one first."""
        while len(self._visits) > first:
            self._come_to([self._visits.pop().unit])

    def _come_to(self, units: Sequence[Unit]) -> None:
        """Backward runs the graph in the reverse of the order in which forward made it: it is done with the units that
        it came to before. (If peers have gradients of a unit, and this rank has not, they wait for its reduction here
        before they gather the next.)"""
        # First: peers may wait for this before they read what a reduction below waits for.
        self.gatherer.gather_for_backward(units)
        task = torch._C._current_graph_task_id()
        # A backward inside of this one (a reentrant checkpoint's) has a later number. While it runs nobody can tell
        # whether the outer one has more for a unit that it had come to: that is asked when it goes on.
        unfinished = {unit: of for unit, of in self._at.items() if of < task or not self._leave(unit, units)}
        self._at = dict.fromkeys(units, task) | unfinished
        self.gatherer.enter_backward(units)

    def _leave(self, unit: Unit, next_units: Sequence[Unit]) -> bool:
        """Backward goes on to the next units. Has it come here for the last time, the unit is reduced. False where the
        graph has more for it, which an outer backward will be asked about again."""
        if unit in next_units or any(visit.unit is unit for visit in self._visits):
            return True
        return not self._accumulates or self.reducer.complete(unit, at_end=self._backward is None)

    def before_gradient(self, parameter: Tensor) -> None:
        """Autograd is about to add to `p.grad`, or to give a gradient to `torch.autograd.grad`."""
        if not self._accumulates and _is_accumulated(parameter):
            self.begin_backward(accumulates=True)

    def on_gradient(self, unit: Unit, index: int, parameter: nn.Parameter) -> None:
        if not self._accumulates:
            self.begin_backward(accumulates=True)
        self.reducer.accumulate(unit, index, parameter)

    def begin_backward(self, *, accumulates: bool | None = None) -> None:
        """The first hook of a backward asks for a call at its end (whatever the graph of this rank contains).

        Args:
            accumulates: whether it is known to leave gradients in parameters; None: look at the graph. (A reentrant
                checkpoint hides its parameters from it until a backward of its own comes to them.)
        """
        if self._backward is None:
            self._backward = torch._C._current_graph_task_id()
            # torch has no public hook for the end of a backward (pytorch/pytorch#66199); DDP and FSDP2 queue this one
            # as well. It belongs to the graph task that runs now (pytorch/pytorch#24965): queued by the inner backward
            # of a reentrant checkpoint it would run at the end of that one, in the middle of the outer
            # (facebookresearch/fairscale#753).
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if accumulates is None:
                accumulates = any(_is_accumulated(p) for unit in self.reducer.order for p in unit.parameters)
        if accumulates and not self._accumulates:
            self._accumulates = True
            self.reducer.begin_backward()

    def abandon_backward(self) -> None:
        """If the last backward raised, and so never came to its end: what is under way arrives, to be discarded."""
        if self._backward is not None and not in_backward():
            self._backward, self._accumulates = None, False
            self._forget()
            with torch.no_grad():
                self.reducer.abandon_backward()
            self.gatherer.end_backward()

    def _forget(self) -> None:
        """What forwards and this backward have left here."""
        self._visits.clear()
        self._without_graph.clear()
        self._recomputed, self._trains = None, False
        self._at.clear()

    def _end_backward(self) -> None:
        self._backward = None
        try:
            with torch.no_grad():
                self._visit_from(0)  # before the reductions: peers that wait for these have not reduced theirs
        finally:
            accumulates, self._accumulates = self._accumulates, False
            self._forget()
        if accumulates:
            self.reducer.end_backward()
        self.gatherer.end_backward()


def _no_marks() -> dict[Unit, deque[Visit | None]]:
    return defaultdict(partial(deque, maxlen=_MOST_VISITS))


def _reset_grad_dtype(parameter: nn.Parameter) -> None:
    parameter.grad_dtype = parameter.dtype


def _before(
    schedule: Schedule, units: list[Unit], leave_last: Callable[[], None]
) -> Callable[[nn.Module, Any, Any], None]:
    """`leave_last`: called first; the user may have registered hooks that read the weights after forward."""

    @OutsideGraphs
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        leave_last()
        if not under_transform():
            schedule.before_module(module, units, (args, kwargs))
            return
        schedule.expect_no_transform(units)
        with outside_transforms():
            schedule.before_module(module, units, (args, kwargs))

    return hook


def _after(schedule: Schedule, units: list[Unit]) -> Callable[[nn.Module, Any, Any], None]:
    @OutsideGraphs
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not under_transform():
            schedule.after_module(units, output)
            return
        with outside_transforms():
            schedule.after_module(units, output)

    return hook


def _after_asking(asked: Inside, after: Callable[[nn.Module, Any, Any], None]) -> Callable[[nn.Module, Any, Any], None]:
    """`after`, for calls that have asked (see `Schedule._unless_inside`)."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if asked.now and asked.end():
            after(module, args, output)

    return hook


def _inside_another(model: nn.Module, needs: Mapping[nn.Module, Sequence[Unit]]) -> set[nn.Module]:
    """Modules that lie inside one that needs the same units."""
    inner = set()
    for path, module in model.named_modules():
        names = path.split(".") if path else []
        around = [model.get_submodule(".".join(names[:count])) for count in range(len(names))]
        if module in needs and any(set(needs[module]) <= set(needs.get(one, ())) for one in around):
            inner.add(module)
    return inner


def _is_accumulated(parameter: Tensor) -> bool:
    """Whether the backward under way comes to the parameter, and adds to its `grad`."""
    with as_tensors():
        if not parameter.requires_grad:
            return False
        try:
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
        except RuntimeError:  # it is one of those that torch.autograd.grad was asked for
            return False


def _before_gradient(schedule: weakref.ref[Schedule], parameter: Tensor) -> Callable[[Tensor], None]:
    """The hook's argument is the gradient."""
    of_parameter = weakref.ref(parameter)

    def hook(grad: Tensor) -> None:
        alive, target = schedule(), of_parameter()
        if alive is not None and target is not None:
            alive.before_gradient(target)

    return hook


def _on_gradient(schedule: weakref.ref[Schedule], unit: Unit, index: int) -> Callable[[Tensor], None]:
    """The hook's argument is the parameter, not its gradient. (Taken for one, the ranks average their weights.)"""
    unit_ref = weakref.ref(unit)

    def hook(parameter: Tensor) -> None:
        alive, of_unit = schedule(), unit_ref()
        if alive is not None and of_unit is not None:
            alive.on_gradient(of_unit, index, parameter)  # type: ignore[arg-type]

    return hook


def _move_to_end(hook: RemovableHandle) -> None:
    """Among the hooks of its kind on its module."""
    hooks = hook.hooks_dict_ref()
    if hooks is not None and hook.id in hooks and next(reversed(hooks)) != hook.id:
        hooks.move_to_end(hook.id)


def _move_to_front(hook: RemovableHandle) -> None:
    hooks = hook.hooks_dict_ref()
    if hooks is not None and hook.id in hooks and next(iter(hooks)) != hook.id:
        hooks.move_to_end(hook.id, last=False)


def _made_by(tensor: Tensor) -> Node:
    assert tensor.grad_fn is not None
    return tensor.grad_fn


def _differentiable(output: Any) -> list[Tensor]:
    """The tensors in an output that have been computed from something with a gradient."""
    return [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
