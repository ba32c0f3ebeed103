"""The modules of a model by path. They are listed once, and passed to all that look at them: the walk through a model
takes longer than what is done with a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

Modules = Mapping[str, nn.Module]
"""Every path of every module, parents before their children; the model itself is at "". A shared module has several."""


def modules_of(model: nn.Module) -> Modules:
    return dict(model.named_modules(remove_duplicate=False))


def parameters_in(modules: Modules) -> Iterator[nn.Parameter]:
    """The parameters that the modules hold. A shared one comes several times."""
    for module in modules.values():
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


def first_paths(modules: Modules) -> dict[nn.Module, str]:
    """Each module -> its first path, in the same order."""
    found: dict[nn.Module, str] = {}
    for path, module in modules.items():
        found.setdefault(module, path)
    return found


def parent(path: str) -> str:
    """The path of the module around that of `path`, which is not the model."""
    return path.rpartition(".")[0]
