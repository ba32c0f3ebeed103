"""What the calls of a module need, and the hooks around them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroshard.model.casting import end_calls, running
from zeroshard.model.outside_graphs import between_graphs
from zeroshard.model.room import with_room
from zeroshard.model.unit_spec import HasSpec
from zeroshard.runtime.seen_by_hooks import SeenByHooks
from zeroshard.storage.unit import Unit

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
        if self.running > 1:
            return
        for hooks in self.inside.values():
            hooks.take_off()
        if running is not None:
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
        of_before: torch's ordered dict with the first one, and with hooks of others.
    """

    def __init__(
        self, module: nn.Module, before: Callable[..., None], after: Callable[..., None], *, is_whole: bool = False
    ) -> None:
        """`is_whole`: the module is the whole model."""
        self._before, self._after = before, after
        self.of_before: Any = module._forward_pre_hooks
        self._of_after: Any = module._forward_hooks
        self._handles: list[RemovableHandle] = []
        self._module = weakref.ref(module)  # its hooks own this
        self._call = _call_that_ends(module, after, is_whole=is_whole)

    def attach(self) -> None:
        """Register the hooks. (Apart from `__init__`: if it is interrupted, `remove` removes those that are there.)"""
        module = self._module()
        assert module is not None, "it is being sharded"
        self._handles.append(module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
        # `always_call` (pytorch/pytorch#104278): else an exception in forward leaves the unit shown and in use.
        self._handles.append(module.register_forward_hook(self._after, always_call=True, with_kwargs=True))
        self._first, self._last = (handle.id for handle in self._handles)
        vars(module)[_CALL] = self._call

    def take_off(self) -> None:
        self.of_before.pop(self._first, None)
        self._of_after.pop(self._last, None)
        self._reset_call()

    def put_on(self) -> None:
        """In front of all other hooks, and behind."""
        self.of_before[self._first] = self._before
        self.of_before.move_to_end(self._first, last=False)
        self._of_after[self._last] = self._after
        if (module := self._module()) is not None:
            vars(module)[_CALL] = self._call

    def gather_first(self) -> None:
        """Move the hook that gathers to the front: the user may have registered hooks with `prepend=True` since."""
        # (A list: a signal handler may call the model in between, which ends an iterator.)
        if self._first in [*self.of_before][1:]:
            self.of_before.move_to_end(self._first, last=False)

    def hide_last(self) -> None:
        """Move the hook that hides to the end: hooks that the user has registered since may read the weights."""
        if len(self._of_after) > 1 and self._last in [*self._of_after][:-1]:  # (a list: as above)
            self._of_after.move_to_end(self._last)

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
