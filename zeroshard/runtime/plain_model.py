"""The user's model as a plain module: what its `state_dict()` would list if nothing of it were sharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from zeroshard.errors import InvalidState
from zeroshard.model.managed import Managed, has_only
from zeroshard.model.units import plain_name
from zeroshard.storage.unit import Unit

Undo = Callable[[], None]


class PlainModel:
    """Held weakly: its hooks own what trains it.

    Attributes:
        is_read: its `state_dict()` is being called from here, for the names alone.
    """

    def __init__(self, model: nn.Module | None, managed: Managed) -> None:
        """
        Args:
            model: None where parameters alone are trained, without any names.
            managed: what of it is not left alone.
        """
        self._model, self._managed = None if model is None else weakref.ref(model), managed
        self.is_read = False

    @property
    def module(self) -> nn.Module:
        """
        Raises:
            RuntimeError: there is none.
        """
        module = None if self._model is None else self._model()
        if module is None:
            raise InvalidState("the model of this handle is gone (or it was built from parameters only)")
        return module

    def guard(self, before_saving: Callable[..., None], before_loading: Callable[..., None]) -> list[Undo]:
        """Let these be called before its `state_dict()` and `load_state_dict()`."""
        if self._model is None:
            return []
        return [
            self.module.register_state_dict_pre_hook(before_saving).remove,  # type: ignore[no-untyped-call]
            self.module.register_load_state_dict_pre_hook(before_loading).remove,  # type: ignore[no-untyped-call]
        ]

    def describe(self, words: Callable[[], str]) -> list[Undo]:
        """Let `print(model)` say so, in front of the modules inside."""
        if self._model is None:
            return []
        model, module = self._model, self.module
        own = vars(module).get("extra_repr")  # of this very module

        def extra_repr() -> str:
            alive = model()
            said = own() if own is not None else "" if alive is None else type(alive).extra_repr(alive)
            return "\n".join(filter(None, [said, words()]))

        def undo() -> None:
            if (alive := model()) is not None:
                vars(alive).pop("extra_repr", None)
                vars(alive).update({"extra_repr": own} if own is not None else {})

        # Past `__setattr__`, which a module that torch.compile has made passes on to the one inside.
        vars(module)["extra_repr"] = extra_repr
        return [undo]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are managed."""
        return self._managed.parameters(self.module)

    def newcomers(self, units: Sequence[Unit]) -> list[str]:
        """Names of parameters that are in none of the units and have come into the model."""
        known = {id(parameter) for unit in units for parameter in unit.parameters}
        if has_only(self.module, known):  # before each forward: without a name for anything
            return []
        return [
            name
            for name, parameter in self.parameters().items()
            # What is no Parameter has been put there by a functional_call, for this call alone.
            if id(parameter) not in known and isinstance(parameter, nn.Parameter)
        ]

    def buffers(self) -> dict[str, Tensor]:
        """Those that are managed."""
        return self._managed.buffers(self.module)

    @property
    def ignored(self) -> frozenset[str]:
        """Names in the `state_dict()` of what is left alone."""
        return frozenset(map(plain_name, self._managed.ignored))

    def state(self) -> dict[str, Tensor]:
        """All of it: parameters and buffers themselves."""
        self.is_read = True
        try:
            return {plain_name(name): value for name, value in self.module.state_dict(keep_vars=True).items()}
        finally:
            self.is_read = False

    def unsharded_state(self, units: Sequence[Unit]) -> dict[str, Tensor]:
        """What it lists besides the sharded parameters: buffers, and what is ignored."""
        if self._model is None:
            return {}
        sharded = {id(parameter) for unit in units for parameter in unit.parameters}
        return {name: value for name, value in self.state().items() if id(value) not in sharded}

    def tied(self, units: Sequence[Unit]) -> dict[str, str]:
        """Of parameters that it lists under several names: further name -> the one in `units`."""
        if self._model is None:
            return {}
        first = names_by_id(units)
        return {name: first[id(v)] for name, v in self.state().items() if first.get(id(v), name) != name}


def names_by_id(units: Sequence[Unit]) -> dict[int, str]:
    """id of each sharded parameter -> its name in the `state_dict()`, the first one where it has several."""
    return {id(p): slot.name for unit in units for p, slot in zip(unit.parameters, unit.layout.slots, strict=True)}
