"""Rejects batch norms in 16 bits: buffers are not cast, and torch's batch norm refuses bf16 weights with fp32 buffers.

weights    statistics    torch's forward, in training and evaluation
16 bits    fp32          raises "expected scalar type BFloat16 but found Float"
none       fp32          works
16 bits    none          works
fp32       fp32          works
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeroshard.errors import InvalidValue
from zeroshard.model.casting import Precisions, Rules
from zeroshard.model.managed import Managed
from zeroshard.precision import HALVES

SHOWN = 3


def expect_kept(model: nn.Module, precisions: Precisions, managed: Managed) -> None:
    """Raises:
    ValueError: there are batch norms that cannot compute in their precision; the message says what to write."""
    regions = Rules.of(precisions).regions(model)
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        precision = regions[path].precision
        if precision is not None and precision.param in HALVES and isinstance(module, _BatchNorm):
            weight, statistics = module.weight, module.running_mean
            is_cast = weight is not None and f"{path}.weight".removeprefix(".") not in managed.ignored
            if is_cast and statistics is not None and statistics.dtype != precision.param:
                found[path] = module
    if not found:
        return
    names, dtype = list(found), regions[next(iter(found))].precision
    assert dtype is not None
    classes = sorted({_torch_class(module) for module in found.values()})
    write = f"MixedPrecision(param={dtype.param}, keep=({', '.join(classes)},))"
    if not isinstance(precisions, (str, type(dtype))):
        write = "{" + ", ".join(f'{one}: "fp32"' for one in classes) + ", ...}, in front of the other patterns"
    raise InvalidValue(
        f"precision: torch's batch norm takes no weights in {dtype.param} beside running statistics in "
        f"{found[names[0]].running_mean.dtype}, and buffers stay as they are: keep "
        f"{', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' * (len(names) > SHOWN)} in fp32, with "
        f"precision={write}"
    )


def _torch_class(module: nn.Module) -> str:
    """The name of the torch class that the module is, or extends."""
    name = next(kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch."))
    return f"nn.{name}"
