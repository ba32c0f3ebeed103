"""Tracks running calls of modules that need units, and the unit that backward is at.

A call inside a call that has gathered the same units does not gather them again.

While a timeline is recorded, each call is a range. So is each stretch of backward that belongs to one unit: from the
gradient of an output of its module to the gradient of an input, which is where backward returns to the call around it.

    forward    root [ embed | u0 [ ..... ] | u1 [ ..... ] | head ]
    backward        [ root  | u1 ......... | u0 ......... | root ]
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from zeroshard.comm.ranges import Kind, Range, Recording, open_range
from zeroshard.errors import InvalidState
from zeroshard.model.outside_graphs import called_by_torch
from zeroshard.model.trees import tensors_in
from zeroshard.runtime.gather import in_backward
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency

T = TypeVar("T")


class End(Enum):
    """How a call has ended: it has returned, it has raised, or it has not begun, because an earlier hook has raised."""

    RETURNED = "returned"
    RAISED = "raised"
    NOT_BEGUN = "not begun"


Calls = list[tuple[Sequence[Unit], Range | None, BaseException | None]]


class Running:
    """The running calls of each thread that have gathered units, the innermost last.

    Attributes:
        amid: the call of the user's (a step, for example) that is being carried out, and its thread.
        lock: held while a hook begins or ends a call; not during the call, as a forward may start threads itself.
    """

    def __init__(self) -> None:
        self.amid: tuple[str, int] | None = None
        self.lock = threading.RLock()
        self._of_thread = threading.local()
        self._runner: int | None = None  # the thread that has begun to run the model, until it has no running call
        self._at: tuple[Sequence[Unit], Range | None] = (), None  # the units that backward is at
        self._returned: set[tuple[int, int]] = set()  # thread and number of the graph nodes of recorded outputs
        self._on_leaves: list[RemovableHandle] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def _calls(self) -> Calls:
        """Of this thread."""
        calls: Calls = self._of_thread.__dict__.setdefault("calls", [])
        return calls

    # Calls of the optimizer and the handle --------------------------------------------------------------------------

    def carry_out(self, what: str, work: Callable[[], T]) -> T:
        """Do the work of a call of the user's, after `expect_whole`. Until it is done, this thread can make no other
        one."""
        now = what, threading.get_ident()
        try:
            self.amid = now
            return work()
        finally:
            self.amid = None  # by an assignment: a call could be interrupted, and every later one would raise

    def expect_whole(self, what: str) -> None:
        """Raises:
        RuntimeError: a signal handler, say, makes this call in the middle of another one."""
        amid = self.amid
        if amid is not None and amid[1] == threading.get_ident():
            raise InvalidState(
                f"{what} in the middle of {amid[0]} (in a signal handler, a __del__ or another callback of Python): "
                "what that call changes is half done. Set a flag there, and look at it in the training loop, between "
                "two steps"
            )

    # Forward -----------------------------------------------------------------------------------------------------

    def expect_alone(self, units: Sequence[Unit]) -> None:
        """Raises:
        RuntimeError: another thread runs the model, and units are gathered for one forward at a time (a recomputation
            inside of a backward belongs to the forward that has begun it)."""
        if self._runner in (None, threading.get_ident()) or in_backward():
            return
        for unit in units:
            if unit.weights.buffer.borrows and not unit.weights.scopes:
                raise InvalidState(
                    f"another thread runs this model, and under this plan the weights of unit {unit.name} are gathered "
                    "for one forward at a time: let the threads take turns (a threading.Lock around each call), or "
                    "run them inside `with handle.unsharded():`, or use a plan with replicated weights (zero2)"
                )

    def begin(self, units: Sequence[Unit], inputs: Any) -> None:
        """A call of a module that needs these units begins."""
        self.expect_alone(units)
        if self._runner is None:
            self._runner = threading.get_ident()
        if Recording.now is not None:
            around = self._calls[-1][0] if self._calls else ()
            for tensor in _requiring_grad(inputs):
                hook = tensor.register_hook(partial(self._go_on, units, around))  # type: ignore[no-untyped-call]
                if tensor.is_leaf:  # it may outlive the graph
                    self._on_leaves.append(hook)
        self._calls.append((units, _open("forward", units), sys.exception()))
        if self._tracked_views() is None and any(unit.weights.buffer.borrows for unit in units):
            self._of_thread.tracked_views = torch._C._is_view_replay_enabled()
            torch._C._set_view_replay_enabled(True)

    def end(self, units: Sequence[Unit]) -> End:
        """The innermost call that needs these units is over."""
        calls = self._calls
        for index in range(len(calls) - 1, -1, -1):
            running, forward, handled = calls[index]
            if running is units:  # not `==`: several modules may need the same units
                del calls[index]
                if not calls:
                    self._restore_views()
                    if self._runner == threading.get_ident():
                        self._runner = None
                _close(forward)
                # The model may be called where another error is being handled (`except: model(x)`).
                return End.RETURNED if sys.exception() is handled else End.RAISED
        return End.NOT_BEGUN

    def _tracked_views(self) -> bool | None:
        """While units are borrowed on this thread: whether torch tracked views before.

        [Note: views of borrowed weights] A view of a weight may be used when its weight is hidden, whose version is
        another one then. Autograd makes the view's node anew, and would do so from the strides of what is there in
        place of the weight: the gradient came to other elements. So it is told to remember the view's operations."""
        return getattr(self._of_thread, "tracked_views", None)

    def _restore_views(self) -> None:
        if (before := self._tracked_views()) is not None:
            torch._C._set_view_replay_enabled(before)
            self._of_thread.tracked_views = None

    def units(self) -> frozenset[Unit]:
        """Those of the running calls."""
        return frozenset(unit for units, _, _ in self._calls for unit in units)

    def around(self) -> tuple[Unit, ...]:
        """The units of the running calls that are gathered for them, the outermost first. Not root parts that no call
        has reached yet: what has run does not depend on them."""
        borrowing = [unit for units, _, _ in self._calls for unit in units if unit.weights.buffer.borrows]
        return tuple(unit for unit in dict.fromkeys(borrowing) if unit.weights.state is not Residency.SHARDED)

    # Backward, for timelines -------------------------------------------------------------------------------------

    def returned(self, units: Sequence[Unit], output: Any) -> None:
        """A module that needs these units has returned."""
        for tensor in _requiring_grad(output) if Recording.now is not None else ():
            if tensor.grad_fn is None:
                continue
            node = threading.get_ident(), tensor.grad_fn._sequence_nr()
            if node not in self._returned:  # a module that is skipped returns its input: another one has made it
                self._returned.add(node)
                tensor.register_hook(partial(self._go_to, units))  # type: ignore[no-untyped-call]

    @called_by_torch
    def _go_to(self, units: Sequence[Unit], grad: Tensor | None = None) -> None:
        """Backward has the gradient of an output of these units."""
        before, backward = self._at
        if backward is None or list(before) != list(units):
            _close(backward)
            self._at = units, _open("backward", units)

    @called_by_torch
    def _go_on(self, units: Sequence[Unit], around: Sequence[Unit], grad: Tensor) -> None:
        """Backward has the gradient of an input of these units; `around`: of the call around theirs."""
        if list(self._at[0]) == list(units):  # else that input is an output of the next units, and they are reached
            self._go_to(around)

    def end_backward(self) -> None:
        """Backward is over."""
        _close(self._at[1])
        self._at = (), None
        self._returned.clear()
        while self._on_leaves:
            self._on_leaves.pop().remove()


def _requiring_grad(values: Any) -> list[Tensor]:
    """The activations in inputs or outputs that get a gradient. Not those that torch.func has wrapped."""
    tensors = tensors_in(values) if torch.is_grad_enabled() else ()
    return [
        tensor
        for tensor in tensors
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter) and not is_functorch_wrapped_tensor(tensor)
    ]


def _open(kind: Kind, units: Sequence[Unit]) -> Range | None:
    if Recording.now is None or not units:
        return None
    named = [unit for unit in units if not unit.spec.is_part] or units  # not those that the call only keeps
    return open_range(kind, kind, ", ".join(unit.name for unit in named))


def _close(opened: Range | None) -> None:
    if opened is not None:
        opened.close()
