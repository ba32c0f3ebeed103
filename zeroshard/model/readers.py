"""Which module reads a parameter. Mostly the one that holds it; its own call gives it the values.

Two kinds of modules hold parameters that another one reads:

- A container without a forward of its own (`nn.ParameterList`, a table with methods only) is never called. What it
  holds is read by the module around it.
- Some modules of torch hand the parameters of their parts to one function, and never call these parts
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
"""Classes of torch that use their parts by calling them, if at all. All others are taken to be whole, with what is
derived from them: whether they call their parts depends on the version of torch, on the data and on the mode."""


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_whole(module: nn.Module) -> bool:
    """Whether the module reads parameters of its parts without calling these."""
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
