"""What is cast on the way into the model, and into and out of the modules that stay in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zeroshard.precision import MixedPrecision
from zeroshard.trees import map_tensors

Remover = Callable[[], None]


def kept_modules(model: nn.Module, precision: MixedPrecision | None) -> dict[str, nn.Module]:
    """Path -> module, of the outermost modules that `precision.keep` names."""
    kept: dict[str, nn.Module] = {}
    classes = precision.keep if precision is not None else ()
    for path, module in model.named_modules() if classes else ():
        if isinstance(module, classes) and not any(_is_inside(path, other) for other in kept):
            kept[path] = module
    return kept


def kept_parameters(model: nn.Module, precision: MixedPrecision | None) -> set[int]:
    """The ids of their parameters."""
    return {id(p) for module in kept_modules(model, precision).values() for p in module.parameters()}


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> Remover:
    """Every floating-point tensor that the model is called with becomes `dtype`."""
    return model.register_forward_pre_hook(_cast_call(dtype), prepend=True, with_kwargs=True).remove


def cast_around_kept(model: nn.Module, precision: MixedPrecision) -> Iterator[Remover]:
    """fp32 into each kept module, `precision.param` out of it."""
    for module in kept_modules(model, precision).values():
        yield module.register_forward_pre_hook(_cast_call(torch.float32), prepend=True, with_kwargs=True).remove
        yield module.register_forward_hook(lambda _, args, output: cast(output, precision.param)).remove


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """The same tree, its floating-point tensors in `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def _cast_call(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
    return lambda module, args, kwargs: (cast(args, dtype), cast(kwargs, dtype))


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")
