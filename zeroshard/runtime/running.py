"""Tracks the running calls of modules that need units, and the call of the user's that is being carried out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch

from zeroshard.comm.ranges import Range
from zeroshard.errors import InvalidState
from zeroshard.runtime.gather import in_backward
from zeroshard.runtime.stretches import Stretches, close, opened
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
        stretches: of backward, for timelines.
        lock: held while a hook begins or ends a call, and during a step; not during the call, as a forward may start
            threads itself.
    """

    def __init__(self) -> None:
        self.amid: tuple[str, int] | None = None
        self.lock = threading.RLock()
        self._of_thread = threading.local()
        self._runner: int | None = None  # the thread that has begun to run the model, until it has no running call
        self._trainer: int | None = None  # the thread of the last forward with gradients, or of a backward (on a CPU)
        self.stretches = Stretches()

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
            with self.lock:  # the hooks of other threads, which evaluate, wait until weights are there again
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

    def note_backward(self, device: torch.device) -> None:
        """A backward begins: a hook of it makes this call. (On an accelerator it runs on a thread of torch, and the
        thread of the last forward with gradients is taken for the one that waits.)"""
        if device.type == "cpu":
            self._trainer = threading.get_ident()

    @property
    def is_trainer(self) -> bool:
        """Whether this thread has run the last backward, or has waited for it."""
        return self._trainer == threading.get_ident()

    def expect_evaluation(self, units: Sequence[Unit]) -> None:
        """Another thread runs a backward.

        Raises:
            RuntimeError: this call is no evaluation with weights that are there."""
        if torch.is_grad_enabled() or any(u.weights.buffer.borrows and not u.weights.scopes for u in units):
            raise InvalidState(
                "another thread runs a backward of this model, and gathers and reductions have one order on all ranks: "
                "let the threads take turns (a threading.Lock around each step of the training, and around this call). "
                "Under torch.no_grad() and a plan with replicated weights (zero2), or inside `with "
                "handle.unsharded():`, this call needs no turn"
            )

    def begin(self, units: Sequence[Unit], inputs: Any) -> None:
        """A call of a module that needs these units begins."""
        self.expect_alone(units)
        if self._runner is None:
            self._runner = threading.get_ident()
        calls = self._calls
        if not calls and torch.is_grad_enabled() and not in_backward():
            self._trainer = threading.get_ident()
        self.stretches.begin(units, calls[-1][0] if calls else (), inputs)
        calls.append((units, opened("forward", units), sys.exception()))
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
                close(forward)
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
