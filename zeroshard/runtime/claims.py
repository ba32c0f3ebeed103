"""Records which optimizer has which parameters of a model: each parameter has at most one.

Optimizers are referenced weakly.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from zeroshard.errors import InvalidValue
from zeroshard.storage.buffer import live_bytes
from zeroshard.storage.unit import Unit


class Owner(Protocol):
    """An optimizer, as the engine sees it. The methods for a join: see `TorchOptimizer`."""

    agreement: Any
    engine: Any
    groups: Any

    def rebuild(self) -> None:
        """Plan anew: more parameters need updates than before."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that it holds, by kind."""

    def let_go(self) -> None:
        """Free all of them: the handle is being closed."""

    def look_for_newcomers(self) -> None: ...
    def step_values(self) -> dict[str, Any]: ...
    def _step_as(self, values: Mapping[str, Any]) -> None: ...
    def _agree_as(self, norm_type: float) -> None: ...
    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any: ...
    def register_step_post_hook(self, hook: Callable[..., None]) -> Any: ...


class Claims:
    """The claims of all optimizers of one model."""

    def __init__(self) -> None:
        # Weak references, and ids as keys: a strong reference would keep the optimizer's state and the model alive
        # after `del optimizer`.
        self._owner_of: dict[int, weakref.ref[Owner]] = {}
        self._owners: list[weakref.ref[Owner]] = []  # also optimizers that have no parameter yet

    def claim(self, parameters: Iterable[nn.Parameter], owner: Owner) -> None:
        """Assign these parameters to the owner.

        Raises:
            ValueError: another living optimizer has one of them.
        """
        parameters = list(parameters)
        if any(self.owner_of(parameter) not in (None, owner) for parameter in parameters):
            gc.collect()  # an optimizer that the program has deleted may still be in a cycle of references
        for parameter in parameters:
            if self.owner_of(parameter) not in (None, owner):
                raise InvalidValue(
                    f"parameter {owner.engine.name_of(parameter)} belongs to another ShardedOptimizer: "
                    "give each its own parameters, or delete the other one first, with what holds it: `del optimizer, "
                    "scheduler`"
                )
        self._owner_of.update({id(parameter): weakref.ref(owner) for parameter in parameters})
        if all(known is not owner for known in self.owners()):
            self._owners = [weakref.ref(known) for known in [*self.owners(), owner]]

    @contextmanager
    def claimed(self, parameters: Iterable[nn.Parameter], owner: Owner) -> Iterator[None]:
        """Like `claim`; if the body raises, the claim is undone."""
        new, before = [p for p in parameters if self.owner_of(p) is not owner], list(self._owners)
        self.claim(new, owner)
        try:
            yield
        except BaseException:
            for parameter in new:
                self._owner_of.pop(id(parameter), None)
            self._owners = before
            raise

    def release(self, owner: Owner) -> None:
        """End the claims of an optimizer."""
        self._owner_of = {key: known for key, known in self._owner_of.items() if known() is not owner}
        self._owners = [known for known in self._owners if known() is not owner]

    def unclaimed(self, unit: Unit) -> set[int]:
        """Slots whose parameter no living optimizer has."""
        found, last, lives = set[int](), None, False
        for index, owner in enumerate(map(self._owner_of.get, map(id, unit.parameters))):
            if owner is not last:  # most have the same one
                last, lives = owner, owner is not None and owner() is not None
            if not lives:
                found.add(index)
        return found

    def owner_of(self, parameter: nn.Parameter) -> Owner | None:
        """The living optimizer that has the parameter, if any."""
        return self._owner_of.get(id(parameter), lambda: None)()

    def owners(self) -> list[Any]:
        """The living optimizers of this model."""
        return [owner for reference in self._owners if (owner := reference()) is not None]

    def has_any(self) -> bool:
        """Whether a living optimizer has any parameter."""
        return any(reference() is not None for reference in self._owner_of.values())

    def scratch_bytes(self) -> int:
        """Bytes of the optimizers' scratch, which they hold only during a step."""
        return live_bytes([tensor for owner in self.owners() for tensor in owner.tensors().get("scratch", [])])
