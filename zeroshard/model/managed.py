"""Which parameters and buffers of a model the engine manages: all but those that the user has asked to ignore."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from zeroshard.errors import InvalidType, InvalidValue

Ignored = str | nn.Module | nn.Parameter | Iterable[str | nn.Module | nn.Parameter] | None


@dataclass(frozen=True)
class Managed:
    """See the module's note. `ignored`: all names of ignored parameters and buffers."""

    ignored: frozenset[str] = frozenset()

    @classmethod
    def without(cls, model: nn.Module, ignored: Ignored) -> Managed:
        """`ignored`: parameters, modules (with all parameters and buffers inside), or names of either.

        Raises:
            ValueError: the model does not have one of these.
            TypeError: an item is neither a name nor a module nor a parameter.
        """
        if isinstance(ignored, (str, nn.Module, nn.Parameter)):
            ignored = [ignored]  # one; the letters of a name may be names of other modules
        tensors = {id(tensor) for one in ignored or () for tensor in _tensors_of(one, model)}
        return cls(frozenset(name for name, tensor in _named(model) if id(tensor) in tensors)) if tensors else cls()

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The managed parameters, by the first name of each."""
        return {name: parameter for name, parameter in model.named_parameters() if name not in self.ignored}

    def buffers(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in model.named_buffers() if name not in self.ignored}

    def left_alone(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The ignored parameters, by the first name of each."""
        named = model.named_parameters() if self.ignored else ()
        return {name: parameter for name, parameter in named if name in self.ignored}


EVERYTHING = Managed()


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tensors_of(one: str | nn.Module | nn.Parameter, model: nn.Module) -> list[Tensor]:
    found: object = one
    if isinstance(one, str):
        found = {**dict(_named(model)), **dict(model.named_modules(remove_duplicate=False))}.get(one)
        if found is None:
            raise InvalidValue(f"ignored: the model has no parameter, buffer or module of the name {one!r}")
    if isinstance(found, nn.Module):
        if not any(found is module for module in model.modules()):
            raise InvalidValue(f"ignored: a {type(found).__name__} that is not in the model")
        return [*found.parameters(), *found.buffers()]
    if not isinstance(found, Tensor):
        raise InvalidType(f"ignored takes names, modules and parameters, found {found!r}")
    if not any(found is tensor for _, tensor in _named(model)):
        raise InvalidValue(f"ignored: a tensor of shape {tuple(found.shape)} that is not in the model")
    return [found]
