"""Rejects batch norms in 16 bits: buffers are not cast, and torch's batch norm refuses bf16 weights with fp32 buffers.

weights    statistics    torch's forward, in training and evaluation
16 bits    fp32          raises "expected scalar type BFloat16 but found Float"
none       fp32          works
16 bits    none          works
fp32       fp32          works
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeroshard.errors import NeedsFP32
from zeroshard.model.casting import Precisions, Rules
from zeroshard.model.paths import Modules, first_paths
from zeroshard.precision import HALVES

SHOWN = 3


def expect_kept(modules: Modules, precisions: Precisions, parameters: Iterable[nn.Parameter]) -> None:
    """`parameters`: those that are cast.

    Raises:
        ValueError: there are batch norms that cannot compute in their precision; the message says what to write.
    """
    regions = Rules.of(precisions).regions(modules)
    cast, found = {id(parameter) for parameter in parameters}, dict[str, nn.Module]()
    for module, path in first_paths(modules).items():
        precision = regions[path].precision
        if isinstance(module, _BatchNorm) and precision is not None and precision.param in HALVES:
            statistics = module.running_mean
            if id(module.weight) in cast and statistics is not None and statistics.dtype != precision.param:
                found[path] = module
    if not found:
        return
    names, dtype = list(found), regions[next(iter(found))].precision
    assert dtype is not None
    classes = sorted({_torch_class(module) for module in found.values()})
    write = f"MixedPrecision(param={dtype.param}, keep=({', '.join(classes)},))"
    if not isinstance(precisions, (str, type(dtype))):
        write = "{" + ", ".join(f'{one}: "fp32"' for one in classes) + ", ...}, in front of the other patterns"
    raise NeedsFP32(
        f"precision: torch's batch norm takes no weights in {dtype.param} beside running statistics in "
        f"{found[names[0]].running_mean.dtype}, and buffers stay as they are: keep "
        f"{', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' * (len(names) > SHOWN)} in fp32, with "
        f"precision={write}"
    )


def _torch_class(module: nn.Module) -> str:
    """The name of the torch class that the module is, or extends."""
    name = next(kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch."))
    return f"nn.{name}"
