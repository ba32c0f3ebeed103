"""Finds the module that reads a parameter: usually the module that holds it, so that its call needs the weights.

Two kinds of modules hold parameters that another module reads:

- A container without a forward of its own (`nn.ParameterList`, a table with methods only) is never called. The module
  around it reads its parameters.
- Some modules of torch pass the parameters of their submodules to one function, and never call these submodules
  (`nn.MultiheadAttention`; `nn.TransformerEncoderLayer` in evaluation). They are *whole*: no unit begins inside them.
"""

from __future__ import annotations

from torch import nn

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


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_whole(module: nn.Module) -> bool:
    """Whether the module may read parameters of its submodules without calling them."""
    of_torch = [cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.modules.")]
    return any(cls not in DIVISIBLE for cls in of_torch)


def readers(model: nn.Module) -> dict[str, str]:
    """Path of each module -> path of the module whose forward reads the parameters that it holds."""
    found: dict[str, str] = {}
    inside_whole: dict[str, bool] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parent = path.rpartition(".")[0]
        if path and (inside_whole[parent] or not has_forward(module)):
            found[path] = found[parent]
        else:
            found[path] = path
        inside_whole[path] = is_whole(module) or bool(path and inside_whole[parent])
    return found
