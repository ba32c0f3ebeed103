"""Decides which gather or reduction starts when: what happens around forwards, and in backwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zeroshard.errors import InvalidState
from zeroshard.model.absent import NotCopied
from zeroshard.model.outside_graphs import called_by_torch
from zeroshard.model.right_call import expect_autograd
from zeroshard.model.transforms import given_tensors, in_functional_call, under_transform, with_tangents
from zeroshard.model.trees import differentiable
from zeroshard.runtime import one_backward
from zeroshard.runtime.calls import MOST_VISITS, Entry, Graph, Trail, Trails, Visit, newest
from zeroshard.runtime.gather import Gatherer, in_backward
from zeroshard.runtime.needs import Needed
from zeroshard.runtime.reach import is_accumulated, is_reduced
from zeroshard.runtime.reduce import Reducer
from zeroshard.runtime.running import End, Running
from zeroshard.runtime.walk import Walk
from zeroshard.runtime.weight_views import left_beside, without_views
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency


class Schedule(NotCopied):
    """Decides which hook starts which gather or reduction.

    [Note: the trail of a backward] On every rank, backward visits the units of the forwards since the last backward in
    reverse order: also units that are not in this rank's own graph (a branch that was not taken here), because its
    peers may need them. If there are several forwards (two losses, and then their backwards), it visits all units of
    those that the ranks agree may still come (`Trails.find_living`), also of older ones, until a step. A unit is
    reduced behind the last of these visits, even if this rank has all its gradients before: a peer whose graph differs
    cannot reduce it earlier, and would wait for a gather of this rank, which waits for that reduction.

    Attributes:
        accumulates: whether a backward runs that adds to gradients.
        num_modules: how many modules need units.
        running: the running calls of modules.
        task: id of autograd's graph task of the current backward; None: there is none.
    """

    gatherer: Gatherer
    reducer: Reducer

    def __init__(self) -> None:
        """Call `lead_to` before anything else."""
        self.task: int | None = None
        self._end: weakref.ref[Callable[[], None]] | None = None  # what autograd calls when the current backward ends
        self.accumulates, self.num_modules = False, 0
        self.running = Running()
        self._entered: dict[Unit, Entry] = {}
        self.walk = Walk(torch._C._current_graph_task_id, self._leave)  # through the listed trails
        self._trails = Trails()
        self._evaluates = False  # whether a call of the model runs that began without grad, so no backward comes to it
        self._trains = False  # whether a unit with trainable parameters has run since
        self._read_again: dict[Unit, int] = {}  # units that a second backward reads -> the number of their gather

    def lead_to(self, gatherer: Gatherer, reducer: Reducer) -> None:
        """Let the hooks call this gatherer and this reducer."""
        self.gatherer, self.reducer = gatherer, reducer
        self.walk.gatherer, gatherer.lock = gatherer, self.running.lock
        reducer.to_come, gatherer.before_wait = self.walk.to_come, reducer.read_peers

    # Forward -----------------------------------------------------------------------------------------------------

    def after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not under_transform():
            hook = partial(self._on_grad_of_model, newest(), not in_functional_call())
            for leaf in differentiable(output):
                # A backward that does not pass the output (of a feature) begins at a gradient: `before_gradient`.
                _hook_first(leaf, hook, self)

    def begin_trail(self) -> None:
        """A call of the model begins. In a scope a rank may run it alone, which leaves no visits."""
        if self.running or in_backward() or self._is_in_backward_elsewhere():
            return
        self._evaluates = not torch.is_grad_enabled()
        if not any(unit.weights.scopes for unit in self.gatherer.units):
            self._trails.begin_call()

    def before_module(self, module: nn.Module, needed: Needed, inputs: Any) -> None:
        self.gatherer.collectives.come()
        self.expect_to_begin()
        units, makes_graph = needed.units, torch.is_grad_enabled()
        if self._is_in_backward_elsewhere():
            self.running.expect_evaluation(self.gatherer.units)
        given = given_tensors((module, *needed.inside))
        for unit in units if given else ():
            unit.weights.absent.expect_present(given)
        begins = [unit for unit in units if unit.weights.is_between_forwards] if makes_graph else []
        if begins:
            self._entered.update(dict.fromkeys(begins, Entry.of(inputs)))
        self._trains = self._trains or any(unit.requiring_grad() for unit in units)
        self.running.begin(units, inputs)
        needed.begin(self.running.units if begins else None)
        if in_backward():
            self._return_to(units)
        self.gatherer.enter(units, needed.gathers)

    def after_module(self, module: nn.Module, needed: Needed, inputs: Any, output: Any, *, transformed: bool) -> Any:
        """Hide units that no forward needs any more, and hook the outputs that they have made: backward gathers the
        units again when it reaches these. See [Note: who made an output]. Returns the output, without views of their
        weights. `transformed`: a transform is active, which runs its own backward at once."""
        self.gatherer.collectives.come()
        units = needed.units
        if (end := self.running.end(units)) is End.NOT_BEGUN:  # these units were never entered
            return output
        evaluates, self._evaluates = self._evaluates, self._evaluates and bool(self.running)
        seen = needed.end()
        free = self.gatherer.leave(units, waits=end is End.RETURNED)
        self._show_what_is_read_again()
        if not transformed:
            output = without_views(output, free)
        self.running.stretches.end(units, output)
        in_scope = [] if transformed else [u for u in units if u.weights.scopes and u.weights.is_between_forwards]
        if not free and not in_scope:
            return output
        entries = {unit: self._entered.pop(unit, None) for unit in (*free, *in_scope)}
        # What a module leaves elsewhere (the loss of a router): backward may come to that before the output, and views
        # of weights there are replaced, with or without gradients.
        kept_longer = (*in_scope, *(around := self.running.around()))
        left = left_beside(inputs, needed.reached, () if transformed else free, kept_longer)
        if not torch.is_grad_enabled():
            if not self.walk.to_come.visits:  # else the casts are those of a forward that backward will come to
                _forget_autocasts(self.gatherer.collectives.device)
            inside = self.running.units() | self.walk.at.keys()
            for unit in () if evaluates else free:
                self.walk.to_come.ran_without_grad(unit, inside)
            return output
        if not in_backward():
            for unit in free:
                self.walk.to_come.without_graph.pop(unit, None)  # earlier forwards without grad were an evaluation
        call, trail = object(), self._trails.last  # also if it raised: perhaps here alone
        visits = [Visit(unit, around, trail, call) for unit in free]
        if self._trains:
            self._list(visits)
        # A rank may run the model alone in a scope, so these are no visits. But a backward may come after the scope.
        visits = [*visits, *(Visit(unit, around, None, call) for unit in in_scope)]
        hooked = self._hook(with_tangents([*differentiable(output), *left, *seen]), visits, entries)
        if any(v not in hooked and (entry := entries[v.unit]) is not None and entry.has_advanced() for v in visits):
            left = left_beside(inputs, [*module.modules()])
            self._hook(left, [visit for visit in visits if visit not in hooked], entries)
        return output

    def _hook(
        self, leaves: Iterable[Tensor], visits: Sequence[Visit], entries: Mapping[Unit, Entry | None]
    ) -> set[Visit]:
        """Hook those of these tensors that the units have made. Returns the visits with such a tensor."""
        hooked, trail, graphs = set[Visit](), self._trails.last, list[Graph]()  # the hooks keep the graphs alive
        for leaf, is_base in _with_bases(leaves):
            made = [v for v in visits if (entry.has_made(leaf) if (entry := entries[v.unit]) else not is_base)]
            if made:
                hooked.update(made)
                graphs.append(graph := Graph())
                _hook_first(leaf, partial(self._on_output_grad, made, trail, graph), self)
        if any(visit.trail is trail for visit in hooked):
            trail.graphs.update(graphs)
        return hooked

    def _list(self, visits: Sequence[Visit]) -> None:
        """Backward will come to these."""
        if in_backward():
            self.walk.list_recomputed(visits)
            return
        self.walk.to_come.add(visits)
        self._trails.last.visits += visits
        if len(self.walk.to_come.visits) > MOST_VISITS * self.num_modules:  # forwards without a backward
            self._begin_anew()

    # Backward ----------------------------------------------------------------------------------------------------

    @called_by_torch
    def _on_grad_of_model(self, number: int, is_own: bool, grad: Tensor) -> None:
        self.expect_to_begin()
        one_backward.come_to(self, number)
        self.begin_backward(is_own=is_own)

    @called_by_torch
    def _on_output_grad(self, visits: Sequence[Visit], trail: Trail, graph: Graph, grad: Tensor) -> None:
        """Backward has the gradient of an output. `graph` lives as long as the output's graph."""
        self.expect_to_begin()
        one_backward.come_to(self, visits[-1].number)
        self.begin_backward()
        if self.accumulates and not torch._C._autograd._get_current_graph_task_keep_graph():
            trail.graphs.discard(graph)  # no other backward comes here
        if torch.is_grad_enabled():  # create_graph
            # The second backward reads weights through views that the first has left in the graph, and parameters that
            # it has left there as they are. No hook could gather them again, so they must stay, and be shown.
            staying = [visit.unit for visit in visits if not visit.unit.weights.scopes]
            self.gatherer.expect_to_stay(staying)
            self._read_again.update({unit: self.gatherer.number_of.get(unit, 0) for unit in staying})
        with torch.no_grad():
            if trail not in self._trails.listed and any(visit.trail is trail for visit in visits):
                self.walk.to_come.add(self._trails.list_again(trail.retained_with), in_front=True)
            self.walk.reach(visits)

    def _return_to(self, units: Sequence[Unit]) -> None:
        """A reentrant checkpoint is about to recompute these. Its first forward ran without grad and left no visit."""
        first = self.walk.to_come.run_again(units)
        if first and self.task is not None and self.walk.begins(torch._C._current_autograd_node()):
            one_backward.come_to(self, max(forward.number for forward in first))
            with torch.no_grad():
                self.walk.return_to(first)

    def _show_what_is_read_again(self) -> None:
        """Show weights that a second backward will read, in the buffers where they have stayed. Others may come before
        it, so only new weights (a step) end this."""
        for unit, number in self._read_again.items():
            if unit.weights.state is Residency.RESIDENT and self.gatherer.number_of.get(unit, 0) == number:
                unit.weights.show()

    def visit_newer(self, number: int) -> None:
        """Backward is done with what is newer. See [Note: several models in one backward] in `one_backward.py`."""
        with torch.no_grad():
            self.walk.visit_from(self.walk.to_come.behind(number))
            if self.walk.to_come.reached > number:
                self.walk.come_to(())
            if self.accumulates and not self.walk.to_come.has_any():
                self.reducer.leave_turn(of_visits=self.walk.to_come.reached > number)

    def _leave(self, unit: Unit, next_units: Sequence[Unit]) -> bool:
        """Backward goes on to `next_units`. Reduce `unit` if backward will not return to it. False if the graph still
        has gradients for it: then ask again later."""
        # Backward comes to the root first. A reentrant checkpoint may have a gradient for it that the graph has not.
        if unit in next_units or unit.spec.of_root or self.walk.to_come.has(unit):
            return True
        return not self.accumulates or self.reducer.complete(unit, at_end=self.task is None)

    def before_gradient(self, parameter: Tensor) -> None:
        """Autograd is about to add to `p.grad`, or to return a gradient from `torch.autograd.grad`."""
        self.expect_to_begin()
        if not self.accumulates and is_accumulated(parameter):
            self.begin_backward(accumulates=True)
        self.reducer.single_uses.expect_one_graph(parameter)

    def begin_backward(self, *, accumulates: bool | None = None, is_own: bool = True) -> None:
        """Called by every hook of a backward; the first call queues a callback for its end. `accumulates`: True: it
        leaves gradients in parameters; None: look at the graph. (In a reentrant checkpoint, parameters are not in the
        graph until an inner backward reaches them.) `is_own`: the model ran with its own parameters, and not by
        `functional_call` with others in their place."""
        self.gatherer.collectives.come()
        if self.task is None:
            self.running.expect_whole("backward")
            expect_autograd()
            self._end = _at_end(self._end_backward)
            self.running.note_backward(self.gatherer.collectives.device)
            self.task = torch._C._current_graph_task_id()  # last, for other threads (`_is_in_backward_elsewhere`)
            one_backward.begin(self, self.task)
            if not any(unit.weights.scopes for unit in self.gatherer.units):  # else a rank may run a backward alone
                living = self._trails.find_living(self.gatherer.units, self.gatherer.collectives)
                self.walk.to_come.add(living, in_front=True)
            if accumulates is None:
                accumulates = is_reduced(self.reducer.order, is_own=is_own)
                if not accumulates:
                    self.gatherer.let_differentiate()
        if accumulates and not self.accumulates:
            self.accumulates = True
            one_backward.note_order(self)
            self.reducer.begin_backward()

    @property
    def has_raised(self) -> bool:
        """Whether the last backward has raised, after it had begun to leave gradients in parameters."""
        return self.accumulates and self.task is not None and not in_backward()

    @property
    def is_in_backward(self) -> bool:
        """Whether a hook of the user's makes this call, inside of a backward of this model."""
        return (self.task is not None or self.accumulates) and in_backward()

    def _is_held(self) -> bool:
        """Whether autograd holds the end of the current backward: it has not raised."""
        return self._end is not None and self._end() is not None

    def _is_in_backward_elsewhere(self) -> bool:
        """Whether a backward of this model runs in another thread of the user's."""
        return self.task is not None and not in_backward() and self._is_held() and not self.running.is_trainer

    def here(self) -> list[Unit]:
        """The units that this backward is at."""
        return [unit for unit in self.walk.at if unit.weights.shown] if in_backward() else []

    def expect_to_begin(self) -> None:
        """If the last backward raised, discard its gradients.

        Raises:
            RuntimeError: gradients of earlier backwards, which had ended, are discarded with them.
        """
        if self.task is not None and self.abandon_backward():
            raise InvalidState(
                "a backward has raised, and with its gradients those of earlier micro-batches are discarded: they are "
                "in one sum. Call optimizer.zero_grad() after such an error, and begin with the first micro-batch again"
            )

    def abandon_backward(self) -> bool:
        """If the last backward raised and never ended (autograd has let go of `_end`): wait for its collectives, and
        discard its gradients. Returns whether it had added to gradients of earlier ones, which are discarded, too."""
        task, held = self.task, self._is_held()
        # A backward of another thread may be ending: it forgets its task, and then autograd lets go of `_end`.
        if task is None or self.task != task or (held and (in_backward() or not self.running.is_trainer)):
            return False
        self.running.stretches.end_backward()
        self._forget()
        with torch.no_grad():
            adds = self.accumulates and self.reducer.abandon_backward()  # else gradients of earlier ones stay
        self._read_again.clear()
        self.gatherer.end_backward(has_raised=True)
        self.task, self.accumulates = None, False  # last: if this is interrupted, the next call does it again
        return adds

    def _forget(self) -> None:
        """Drop the records of forwards and of this backward."""
        self._begin_anew()
        self.walk.end()
        self._trains = False

    def begin_alike(self) -> None:
        """Forget the forwards so far: the ranks have run different ones (in a join), and go on with the same ones."""
        self._forget()
        self.gatherer.forget_order()

    def _begin_anew(self) -> None:
        self.walk.to_come.drop(0)
        self._trails.begin_anew()

    @called_by_torch
    def _end_backward(self) -> None:
        self.gatherer.collectives.come()
        try:
            task, self.task = self.task, None
            self.running.stretches.end_backward()
            _forget_autocasts(self.gatherer.collectives.device)
            with torch.no_grad():
                one_backward.visit_rest(self, task)  # first: peers wait for these gathers before they reduce
            self._trails.note_retained()
            self._forget()
            if self.accumulates:
                self.reducer.end_backward()
            # Before `show`, which may raise on one rank alone: it, too, keeps these weights for the next forward.
            self.gatherer.end_backward()
            if self.accumulates:
                self.reducer.show()
            self.accumulates = False
            self._show_what_is_read_again()
        except BaseException:
            self.task = task  # as one that has raised before its end: it is abandoned
            raise


def _at_end(call: Callable[[], None]) -> weakref.ref[Callable[[], None]]:
    """Let autograd make this call when the current backward ends. Autograd alone keeps what is returned here, so it is
    gone if the backward raises."""
    # torch has no public hook for the end of a backward (pytorch/pytorch#66199); DDP and FSDP2 use this one, too. The
    # callback belongs to the current graph task (pytorch/pytorch#24965): queued by the inner backward of a reentrant
    # checkpoint, it would run at the end of that one (facebookresearch/fairscale#753).
    end = partial(call)
    torch.autograd.Variable._execution_engine.queue_callback(end)
    return weakref.ref(end)


def expect_no_transform(units: Sequence[Unit]) -> None:
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


def refuse_inside_of_backward(what: str) -> NoReturn:
    """Raises:
    RuntimeError: a hook makes a call inside of a backward."""
    raise InvalidState(
        f"{what} inside of a backward (in a hook of a gradient or of a module): the gradients of a part of the "
        "model are on their way, and the rest has not been computed. Call it when loss.backward() has returned"
    )


def _with_bases(leaves: Iterable[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """These, and the tensors of which they are views; and whether it is one of the latter. If a view is changed in
    place later (`y = linear(x); y += x`: of three dimensions, the output of a linear layer is a view), autograd
    replaces the node that made it, and no hook on the view is called. The node of its base stays."""
    bases = dict[int, Tensor]()
    for leaf in {id(leaf): leaf for leaf in leaves}.values():
        yield leaf, False
        base = leaf._base
        if base is not None and base.grad_fn is not None:
            bases[id(base)] = base
    yield from ((base, True) for base in bases.values())


def _hook_first(leaf: Tensor, hook: partial[None], schedule: Schedule) -> None:
    """Hook what a model returns, in front of the hooks of others: a model that leaves out its last layer returns what
    another one has made. Backward comes to that one first elsewhere, where it has made an output of its own."""
    leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks: Any = leaf._backward_hooks
    for number, one in [*hooks.items()] if len(hooks) > 1 else ():
        owner = getattr(getattr(one, "func", None), "__self__", None)
        if isinstance(owner, Schedule) and owner is not schedule:
            hooks[number] = hooks.pop(number)  # (torch does not see what `move_to_end` does)


def _forget_autocasts(device: torch.device) -> None:
    """Let autocast cast weights anew."""
    # Until its block ends, autocast keeps the cast of a weight together with the cast's node. A later forward would use
    # that node, which is older than all nodes of that forward, so backward comes to it last: its unit would not be here
    # any more. (After a step, the cast would also have the values from before, as in plain torch.)
    if torch.is_autocast_enabled(device.type):
        torch.clear_autocast_cache()
