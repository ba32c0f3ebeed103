"""`optimizer.state`: the full state of each parameter, gathered when it is read.

Reading is collective: `state[p]`, `p in state`, `len(state)`, iteration. (Only ranks that have a part of a parameter
know its state.) Writing is not collective, but every rank must do it: `state[p] = {...}`, `state[p]["step"] = ...`,
`del state[p]`, `state.clear()`. Values that have been read are copies. An in-place write to their tensors would have no
effect on the optimizer, so it raises (`Gathered`).
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zeroshard.errors import InvalidKey, InvalidState
from zeroshard.step.stepper import FullState
from zeroshard.step.steppers import Steppers


class StateView(MutableMapping[Tensor, Any]):
    """See the module's note. `params`: the optimizer's parameters; no other tensor can have a state."""

    def __init__(self, params: Sequence[Tensor], steppers: Steppers) -> None:
        self._params, self._steppers = params, steppers

    def __getitem__(self, parameter: Tensor) -> ParameterState:
        self._expect_mine(parameter)
        return ParameterState(self, parameter, self._gather({parameter}).get(parameter, {}))

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: an item has another shape than the parameter.
        """
        self._expect_mine(parameter)
        self._steppers.load({parameter: state} if state else {}, {parameter})

    def __delitem__(self, parameter: Tensor) -> None:
        self[parameter] = {}

    def __iter__(self) -> Iterator[Tensor]:
        found = self._steppers.parameters()
        return iter([parameter for parameter in self._params if parameter in found])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is one for one in self)

    def items(self) -> ItemsView[Tensor, Any]:
        """The full state, gathered at once: unit by unit instead of parameter by parameter."""
        full = self._gather(None)
        return {p: ParameterState(self, p, full[p]) for p in self._params if p in full}.items()

    def values(self) -> ValuesView[Any]:
        return dict(self.items()).values()

    def clear(self) -> None:
        """Remove all state, as before the first step."""
        self._steppers.load({})

    def __repr__(self) -> str:
        return f"<the state of {len(self._params)} parameters, gathered when it is read: optimizer.state[parameter]>"

    def _gather(self, only: Collection[Tensor] | None) -> FullState:
        full = self._steppers.gather(only)
        with torch.inference_mode(False):  # an inference tensor has no version
            for state in full.values():
                state.update({key: Gathered.of(v, key) for key, v in state.items() if isinstance(v, Tensor)})
        return full

    def _expect_mine(self, parameter: Tensor) -> None:
        if not any(parameter is one for one in self._params):
            is_tensor = isinstance(parameter, Tensor)
            found = f"a tensor of shape {tuple(parameter.shape)}" if is_tensor else f"{parameter!r:.80}"
            raise InvalidKey(
                f"optimizer.state: {found} is no parameter of this optimizer. Keep values that belong to no parameter "
                "in a param group, optimizer.param_groups[0]['name'] = value: state_dict() and checkpoints have them"
            )


class Gathered(Tensor):
    """A tensor of a state, or a view of one, that raises when it is written to. A copy (also by `copy` and `pickle`) is
    an ordinary tensor.

    Attributes:
        key: of the state.
    """

    key: str

    @classmethod
    def of(cls, values: Tensor, key: str) -> Gathered:
        """A copy of these values."""
        return cls._named(values.detach().clone(), key)

    @classmethod
    def _named(cls, tensor: Tensor, key: str) -> Gathered:
        found = tensor.as_subclass(cls)
        found.key = key
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mine = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Gathered)]
        with torch._C.DisableTorchFunctionSubclass():
            before = [(tensor._version, tensor.data_ptr()) for tensor in mine]
            result = func(*args, **kwargs)
            for tensor, (version, address) in zip(mine, before, strict=True):
                if (tensor._version, tensor.data_ptr()) != (version, address):
                    raise InvalidState(
                        f"optimizer.state: {tensor.key!r} is a copy, gathered when it was read, and a write to it "
                        f"changes nothing. Assign new values on every rank: optimizer.state[p][{tensor.key!r}] = values"
                    )
            keys = {tensor.untyped_storage()._cdata: tensor.key for tensor in mine}
            return pytree.tree_map_only(Tensor, lambda found: cls._viewed(found, keys), result)

    @classmethod
    def _viewed(cls, found: Tensor, keys: Mapping[int, str]) -> Tensor:
        """What an operation has returned: if it lies in the memory of such a tensor, it is one."""
        key = keys.get(found.untyped_storage()._cdata)
        return found if key is None or isinstance(found, Gathered) else cls._named(found, key)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), self._plain().clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


class ParameterState(UserDict[str, Any]):
    """The state of one parameter, a copy. Setting or deleting an item also does so in the optimizer."""

    def __init__(self, view: StateView, parameter: Tensor, state: Mapping[str, Any]) -> None:
        self._view, self._parameter = view, parameter
        self.data = dict(state)

    def __setitem__(self, key: str, value: Any) -> None:
        self._replace({**self.data, key: value})

    def __delitem__(self, key: str) -> None:
        if key not in self.data:
            raise InvalidKey(key)
        self._replace({name: value for name, value in self.data.items() if name != key})

    def clear(self) -> None:
        self._replace({})

    def _replace(self, state: dict[str, Any]) -> None:
        self._view[self._parameter] = state
        self.data = state
