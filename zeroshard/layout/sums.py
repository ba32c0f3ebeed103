"""Sums over ranks in a fixed order, independent of which rank owns which elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from zeroshard.layout.interval import Interval

CACHED_NUMEL = 1 << 16
"""Elements that a sum on a CPU processes at a time, so that casts and divisions stay in cache."""


def sum_in_rank_order(
    own: Tensor,
    received: list[Tensor],
    rank: int,
    total: Tensor,
    out: Tensor,
    divisor: int = 1,
    doubt: Callable[[], None] | None = None,
) -> None:
    """out = (((g0 + g1) + g2) + ...) / divisor, with the own term g[rank] at its place; `out` may be `own`.

    Args:
        total: memory for the running sum, in the wider of the two dtypes. It may be `received[0]` (always one of the
            first two terms), `out` if that is not `own`, or scratch of `CACHED_NUMEL` elements (on a GPU: of all
            elements).
        doubt: on a CPU: called if a part of `out` does not add up to a finite number, so that a term may not be finite.
    """
    terms = [*received[:rank], own, *received[rank:]]
    at_a_time = CACHED_NUMEL if out.device.type == "cpu" else max(out.numel(), 1)
    results, *of_terms = [tensor.split(at_a_time) for tensor in (out, *terms)]  # type: ignore[no-untyped-call]
    pieces = zip(*of_terms, strict=True)
    totals = total.split(at_a_time) if total.numel() >= out.numel() else [total] * len(results)  # type: ignore[no-untyped-call]
    for result, running, (so_far, *others) in zip(results, totals, pieces, strict=False):
        for term in others[:-1]:
            so_far = add(so_far, term, out=running[: result.numel()])
        add(so_far, others[-1], out=result)
        divide(result, divisor)
        if doubt is not None:
            wide = torch.promote_types(result.dtype, torch.float32)  # many 16-bit numbers overflow
            if not math.isfinite(result.sum(dtype=wide).item()):
                doubt()


def divide(tensor: Tensor, divisor: int) -> None:
    """Divide in place, correctly rounded. (Not a multiplication by 1 / divisor: with the division, the quotient times
    the divisor is the number again, for divisors 2, 3, 4, 5, 6, 8, ... The reciprocal of a power of two is exact, and
    both have the same bits; on a CPU a multiplication takes half the time.)"""
    if divisor == 1:
        return
    if tensor.device.type == "cpu" and divisor.bit_count() == 1:
        tensor.mul_(1 / divisor)
    else:
        tensor.div_(divisor if tensor.device.type == "cpu" else as_operand(divisor, tensor.dtype, tensor.device))


@lru_cache(maxsize=64)
def as_operand(divisor: int, dtype: torch.dtype, device: torch.device) -> Tensor | int:
    """The divisor in the form in which an accelerator divides by it: a 0-d tensor there."""
    # torch multiplies CUDA tensors by the reciprocal of a number, which rounds twice (BinaryDivTrueKernel.cu). The
    # reciprocal of a power of two is exact. A large number may not be exact in a 16-bit dtype.
    if divisor.bit_count() == 1 or torch.tensor(divisor, dtype=dtype, device="cpu").item() != divisor:
        return divisor
    with torch.inference_mode(False):
        operand = torch.full((), divisor, dtype=dtype, device=device)
    if device.type != "cpu":  # another stream may use it next
        torch.accelerator.synchronize(device)
    return operand


def add(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """out = a + b for 1-D tensors, without the full-size temporary that torch allocates on a CPU for each operand that
    it has to cast. Returns `out`."""
    if a.dtype == b.dtype and a.dtype.itemsize < out.dtype.itemsize:
        a = out.copy_(a)  # else torch adds in the narrow dtype and casts the rounded sum
    if a.device.type != "cpu" or a.dtype == b.dtype == out.dtype:
        return torch.add(a, b, out=out)
    for piece in zip(out.split(CACHED_NUMEL), a.split(CACHED_NUMEL), b.split(CACHED_NUMEL), strict=True):  # type: ignore[no-untyped-call]
        torch.add(piece[1], piece[2], out=piece[0])
    return out


def in_shards(full: Tensor, size: int) -> tuple[Tensor, ...]:
    return full.view(size, -1).unbind(0)


def parts(full: Tensor, intervals: Iterable[Interval]) -> list[Tensor]:
    return [full[interval.slice] for interval in intervals]


def split_like(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive views of `flat` with the sizes of `parts`."""
    return list(torch.split(flat, [part.numel() for part in parts]))


def carve(scratch: Tensor, count: int, numel: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """`count` tensors of `numel` elements from the front of a byte buffer, and the rest of it."""
    end = count * numel * dtype.itemsize
    return list(scratch[:end].view(dtype).view(count, numel).unbind(0)) if count else [], scratch[end:]
