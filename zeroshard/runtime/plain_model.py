"""The user's model as a plain module: the names and tensors that its `state_dict()` would list without sharding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.model.absent import is_absent
from zeroshard.model.managed import Managed
from zeroshard.model.right_call import expect_no_ddp_inside
from zeroshard.model.transforms import given_tensors, in_functional_call
from zeroshard.model.unit_spec import plain_name
from zeroshard.storage.unit import Unit

Undo = Callable[[], None]


class PlainModel:
    """The model, held weakly, as its hooks own the engine.

    Attributes:
        is_read: whether this class is calling the model's `state_dict()`, for the names only.
        is_known: whether a forward since the last step has found no newcomers.
    """

    def __init__(self, model: nn.Module | None, managed: Managed) -> None:
        """
        Args:
            model: None if an optimizer was built over parameters without a model.
            managed: which parameters and buffers are managed.
        """
        self._model, self._managed = None if model is None else weakref.ref(model), managed
        self.is_read = self.is_known = False
        self._structure: _Structure | None = None  # of a model without newcomers

    @property
    def module(self) -> nn.Module:
        """
        Raises:
            RuntimeError: there is no model, or it no longer exists.
        """
        module = None if self._model is None else self._model()
        if module is None:
            raise InvalidState("the model of this handle is gone (or it was built from parameters only)")
        return module

    def guard(self, before_saving: Callable[..., None], before_loading: Callable[..., None]) -> list[Undo]:
        """Have these called before the model's `state_dict()` and `load_state_dict()`. Returns what undoes it."""
        if self._model is None:
            return []
        return [
            self.module.register_state_dict_pre_hook(before_saving).remove,  # type: ignore[no-untyped-call]
            self.module.register_load_state_dict_pre_hook(before_loading).remove,  # type: ignore[no-untyped-call]
        ]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The managed parameters, by name."""
        return self._managed.parameters(self.module)

    def move(self, device: torch.device | str | None) -> None:
        """Move all of the model, if there is one: buffers and ignored parameters, too. None: it stays."""
        if self._model is not None and device is not None:
            self.module.to(device)

    def newcomers(self, units: Sequence[Unit], *, also_added: bool) -> list[str]:
        """Names of parameters of the model that are in none of the units. `also_added`: False: only if others have left
        the model for them, and not for the time of a `functional_call`.

        Raises:
            RuntimeError: the model, or a part of it, has come into torch DDP since.
        """
        module = None if self._model is None else self._model()
        if module is None:
            return []
        if self._structure is not None and self._structure.is_that_of(module):  # this runs before each forward
            return []
        known = {id(parameter) for unit in units for parameter in unit.parameters}
        expect_no_ddp_inside(module.modules(), known)
        found = [
            name
            for name, parameter in self.parameters().items()
            # Plain tensors there come from a functional_call, and are gone after it.
            if id(parameter) not in known and isinstance(parameter, nn.Parameter)
        ]
        if not found and not given_tensors(module.modules()):
            self._structure = _Structure(module)
        if found and not also_added and (known <= set(map(id, module.parameters())) or in_functional_call()):
            return []
        return found

    def buffers(self) -> dict[str, Tensor]:
        """The managed buffers, by name."""
        return self._managed.buffers(self.module)

    @property
    def ignored(self) -> frozenset[str]:
        """Names, as in the `state_dict()`, of ignored parameters and buffers."""
        return frozenset(map(plain_name, self._managed.ignored))

    def expect_ignored_here(self) -> None:
        """Raises:
        RuntimeError: an ignored parameter belongs to another handle, and its values are not here."""
        ignored = {} if self._model is None else self._managed.left_alone(self.module)
        for name, parameter in ignored.items():
            if is_absent(parameter):
                raise InvalidState(
                    f"parameter {plain_name(name)} is ignored by this handle and sharded by another one, and its "
                    "values are not here. Call this inside of `with other.unsharded():`, where `other` is that handle "
                    "(to load: `with other.unsharded(write=True):`)"
                )

    def state(self) -> dict[str, Any] | None:
        """Name -> parameter or buffer (the object itself) of everything in the `state_dict()`, and what modules return
        from `get_extra_state()`. None: a `state_dict()` of the model's own, or a hook, has other values (copies,
        dicts), or cannot be asked for these."""
        if (found := self._asked()) is None:
            return None
        known, extra_states = {id(one) for one in self._named().values()}, self.extra_states()
        are_known = all(id(value) in known or name in extra_states for name, value in found.items())
        return found if are_known else None

    def _asked(self) -> dict[str, Any] | None:
        """What the model's `state_dict()` lists. None: one of the model's own raises (for values that are not here, or
        `keep_vars`)."""
        try:
            return self._listed(partial(self.module.state_dict, keep_vars=True))
        except Exception:
            return None

    def state_of(self, values: Mapping[int, Tensor]) -> dict[str, Any]:
        """The model's own `state_dict()` while its parameters have these values, by the id of the parameter."""
        made: dict[int, nn.Parameter] = {}
        places = [
            (module._parameters, name, parameter)
            for module in self.module.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in values
        ]
        try:
            for owner, name, one in places:
                if id(one) not in made:
                    made[id(one)] = nn.Parameter(values[id(one)], requires_grad=one.requires_grad)
                owner[name] = made[id(one)]
            return self._listed(self.module.state_dict)
        finally:
            for owner, name, one in places:
                owner[name] = one

    def _listed(self, state_dict: Callable[[], Any]) -> dict[str, Any]:
        self.is_read = True
        try:
            return {plain_name(name): value for name, value in state_dict().items()}
        except Exception as error:
            self._expect_extra_states(error)
            raise
        finally:
            self.is_read = False

    def _expect_extra_states(self, raised: Exception) -> None:
        """Raises:
        ValueError: a `get_extra_state()` raises; with the name of its module."""
        for name, module in self.extra_states().items():
            try:
                module.get_extra_state()
            except type(raised) as error:
                raise InvalidValue(f"get_extra_state() for {name} raised {type(error).__name__}: {error}") from error

    def _named(self) -> dict[str, Tensor]:
        module = self.module
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return {plain_name(name): value for name, value in named}

    def objects(self) -> dict[str, Any]:
        """The `state`, also of a model for which that is None. Where a `state_dict()` of the model's own or a hook has
        a copy, it is the parameter or buffer itself; where that cannot be called, or puts dicts into each other, the
        names are those of `nn.Module`."""
        found, extra_states, named = self._asked(), self.extra_states(), self._named()
        if found is None or any(isinstance(v, Mapping) and name not in extra_states for name, v in found.items()):
            found = self._listed(self._names_of_torch)
        return {name: named.get(name, value) for name, value in found.items()}

    def expect_loadable(self) -> None:
        """Raises:
        ValueError: the model has a `state_dict()` and a `load_state_dict()` of its own: only they know the values."""
        module = self.module
        if type(module).load_state_dict is not nn.Module.load_state_dict and self.state() is None:
            raise InvalidValue(
                f"{type(module).__name__} has a load_state_dict() of its own, for other values than parameters and "
                "buffers: call model.load_state_dict() inside `with handle.unsharded(write=True):`"
            )

    def _names_of_torch(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, module in self.module.named_modules(remove_duplicate=False):
            module._save_to_state_dict(found, f"{path}." if path else "", True)
        return found

    def extra_states(self) -> dict[str, nn.Module]:
        """Name in the `state_dict()` -> module, for modules that have a `get_extra_state()`. Their values go back by
        `set_extra_state()`: what `get_extra_state()` returns is often made for the call."""
        if self._model is None:
            return {}
        return {
            plain_name(f"{path}.{_EXTRA_STATE_KEY_SUFFIX}".lstrip(".")): module
            for path, module in self.module.named_modules(remove_duplicate=False)
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def unsharded_state(self, units: Sequence[Unit]) -> dict[str, Tensor]:
        """The entries of `objects` that are not sharded parameters: buffers, ignored parameters, extra states.

        Raises:
            ValueError: an extra state is neither a tensor nor None.
            RuntimeError: as `expect_ignored_here`.
        """
        if self._model is None:
            return {}
        self.expect_ignored_here()
        sharded = {id(parameter) for unit in units for parameter in unit.parameters}
        found = {name: one for name, one in self.objects().items() if id(one) not in sharded and one is not None}
        for name, value in found.items():
            if not isinstance(value, Tensor):
                raise InvalidValue(
                    f"{name} is a {type(value).__name__}, and a checkpoint holds what a module returns from "
                    "get_extra_state() as a tensor only: return a tensor there (or None, for nothing), and save other "
                    "objects by extra="
                )
        return found

    def tied(self, units: Sequence[Unit]) -> dict[str, str]:
        """For parameters with several names in the `state_dict()`: further name -> the name in `units`."""
        if self._model is None:
            return {}
        first = names_by_id(units)
        return {name: first[id(v)] for name, v in self.objects().items() if first.get(id(v), name) != name}


class _Structure:
    """The modules and parameters that a model has at one moment, and the classes of the modules, which torch's
    `replicate()` changes."""

    def __init__(self, model: nn.Module) -> None:
        # They are held, so that no later module has the id of one of them. The model itself is not.
        self._inside = [module for module in model.modules() if module is not model]
        self._ids = self._ids_in(model)

    def is_that_of(self, model: nn.Module) -> bool:
        """Whether the model still has the same ones, at the same places. (`named_parameters` takes a hundred times as
        long.)"""
        return self._ids_in(model) == self._ids

    def _ids_in(self, model: nn.Module) -> list[int]:
        modules = [model, *self._inside]
        held = [one.values() for of_each in (_PARAMETERS, _MODULES) for one in map(of_each, modules)]
        return [*map(id, chain(chain.from_iterable(held), map(type, modules)))]


_PARAMETERS, _MODULES = attrgetter("_parameters"), attrgetter("_modules")


def names_by_id(units: Sequence[Unit]) -> dict[int, str]:
    """id of each sharded parameter -> its (first) name in the `state_dict()`."""
    return {id(p): slot.name for unit in units for p, slot in zip(unit.parameters, unit.layout.slots, strict=True)}
