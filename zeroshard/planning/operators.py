"""Operators that a trace replaces: torch cannot compute them without values, or a GPU has another kernel for them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zeroshard.io.logger import LOGGER

_DROPOUT = 4
"""The position of the dropout among the arguments of `scaled_dot_product_attention`."""


def product_of_groups(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor of the product's shape: if one of the two is a stack of matrices, the other is divided into groups along
    a dimension that remains; if both are matrices, along the one that is summed."""
    groups = (len(a if offs is None else offs),) if a.dim() == b.dim() else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype)


class AsOnGPUs(TorchFunctionMode):
    """Functions that keep less for backward on a GPU than the operators that a CPU has for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            # GPUs have kernels that draw the dropout of attention anew in backward, so they keep no matrix of scores.
            # On a CPU only attention without dropout does so: it is traced instead.
            args, named = args[:_DROPOUT], dict(zip(("dropout_p", "is_causal"), args[_DROPOUT:], strict=False))
            kwargs = {**named, **kwargs, "dropout_p": 0.0}
        elif func in (torch.rms_norm, torch.nn.functional.rms_norm):
            return _rms_norm(*args, **kwargs)
        elif func in (torch.dropout, torch.nn.functional.dropout):
            return _dropout(func, *args, **kwargs)
        return func(*args, **kwargs)


def _dropout(
    func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **names: Any
) -> Tensor:
    """Of one kernel, which keeps a bool for each number, not a factor."""
    training = names.get("train", training)
    if not training or inplace or not 0 < p < 1:
        result: Tensor = func(input, p, training, *([inplace] if inplace else []))
    else:
        result = torch.native_dropout(input, p, True)[0]
    return result


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Of one kernel, if the dtypes are the same (else torch takes several operators on a GPU, too)."""
    if weight is not None and weight.dtype != input.dtype:
        return torch.rms_norm(input, tuple(normalized_shape), weight, eps)
    normed: Tensor = _RMSNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """The tensors of the kernel: beside its input it keeps a number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        factors = x.new_empty(x.shape[:-dims], dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, factors)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        return torch.empty_like(x) if of_x else None, torch.empty_like(weight) if of_weight else None, None


@contextmanager
def without_autocast(planned_for: str) -> Iterator[None]:
    """A scope in which a warning says that autocast for that type of device is not traced: it casts no tensors of a
    CPU."""
    of_torch: Any = torch.autocast
    own, asked = of_torch.__init__, False

    @functools.wraps(own)
    def begin(scope: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **names: Any) -> None:
        nonlocal asked
        asked = asked or (device_type == planned_for and enabled)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no such device here
            own(scope, device_type, dtype, enabled, *args, **names)

    of_torch.__init__ = begin
    try:
        yield
    finally:
        of_torch.__init__ = own
    if asked:
        LOGGER.warning(
            "activations: the model calls autocast, which is not traced: they are planned in the dtypes of weights and "
            "inputs (precision='bf16' makes these bf16)"
        )


@contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN steps through an LSTM inside one operator, which keeps the gates of all steps in a tensor whose size is
    not known without values. Without it each step keeps its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the flag for Intel GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            yield
