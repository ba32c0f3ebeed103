"""Finds the module that reads a parameter: usually the module that holds it, so that its call needs the weights.

Three kinds of modules hold parameters that another module reads:

- A container without a forward of its own (`nn.ParameterList`, a table with methods only) is never called. The module
  around it reads its parameters.
- Some modules of torch pass the parameters of their submodules to one function, and never call these submodules
  (`nn.MultiheadAttention`; `nn.TransformerEncoderLayer` in evaluation). They are *whole*: no unit begins inside them.
- A module that `torch.jit.script` has made is whole, too, and torch runs no hooks around its calls: the module around
  it reads its parameters.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from zeroshard.model.paths import Modules, parent

DIVISIBLE = (
    nn.Module,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
"""Classes of torch that use their submodules only by calling them. All others, and subclasses of them, count as whole:
whether they call their submodules depends on the version of torch, on the data and on the mode."""


def takes_hooks(module: nn.Module) -> bool:
    """Whether torch runs hooks around calls of the module: not if `torch.jit.script` has made it."""
    return not isinstance(module, torch.jit._script.RecursiveScriptModule)


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called, and hooks run around the call."""
    if isinstance(module, torch.jit.ScriptModule):  # its class does not show its forward
        return takes_hooks(module)
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_whole(module: nn.Module) -> bool:
    """Whether the module may read parameters of its submodules without calling them."""
    return _is_whole(type(module).__mro__)


@lru_cache(maxsize=256)  # a model has many modules of few classes
def _is_whole(classes: tuple[type, ...]) -> bool:
    if torch.jit.ScriptModule in classes:
        return True
    of_torch = [cls for cls in classes if cls.__module__.startswith("torch.nn.modules.")]
    return any(cls not in DIVISIBLE for cls in of_torch)


def looked_at(module: nn.Module) -> str | None:
    """The submodule whose parameters the module looks at before it calls it, in evaluation; None: there is none.

    `nn.TransformerEncoder` chooses between two computations, with other results at padded places, by the class of its
    first layer's parameters (`has_torch_function`)."""
    return "layers.0" if isinstance(module, nn.TransformerEncoder) else None


def readers(modules: Modules) -> dict[str, str]:
    """Path of each module -> path of the module whose forward reads the parameters that it holds."""
    found = {"": ""}
    inside_whole = {"": is_whole(modules[""])}
    for path, module in modules.items():
        if path:
            around = parent(path)
            found[path] = found[around] if inside_whole[around] or not has_forward(module) else path
            inside_whole[path] = inside_whole[around] or is_whole(module)
    return found
