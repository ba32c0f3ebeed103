"""Sums over ranks, in an order that is the same whoever owns what, and the scratch that they need."""

from __future__ import annotations

import torch
from torch import Tensor

_CACHED_NUMEL = 1 << 16
"""Elements that a sum on CPU takes at a time: what is cast, and what is divided, stays in cache."""


def reduce_scratch_bytes(
    numel: int, grad: torch.dtype, wire: torch.dtype, num_shards: int, num_replicas: int, pairwise: bool
) -> int:
    """Scratch that one `reduce_scatter` of `numel` elements needs: received terms, and what is cast to be sent."""
    shard = numel // num_shards
    if num_shards == num_replicas == 1:
        return 0
    if pairwise:
        foreign = max(numel - shard, shard - shard // num_replicas)
        return foreign * wire.itemsize * (1 if wire == grad else 2)
    return 0 if wire == grad else 2 * numel * wire.itemsize


def sum_in_rank_order(
    own: Tensor, received: list[Tensor], rank: int, total: Tensor, out: Tensor, divisor: int = 1
) -> None:
    """out = (((g0 + g1) + g2) + ...) / divisor, the own term in its place; `out` may be `own`.

    `total` holds the sum so far, in the wider of the two dtypes, and may be `received[0]`: that one is always among
    the first two terms.
    """
    terms = [*received[:rank], own, *received[rank:]]
    numel = _CACHED_NUMEL if out.device.type == "cpu" else max(out.numel(), 1)
    pieces = [tensor.split(numel) for tensor in (total, out, *terms)]  # type: ignore[no-untyped-call]
    for total_piece, out_piece, so_far, *others in zip(*pieces, strict=True):
        for index, term in enumerate(others, start=1):
            target = out_piece if index == len(others) else total_piece
            add(so_far, term, out=target)
            so_far = target
        divide(out_piece, divisor)


def divide(tensor: Tensor, divisor: int) -> None:
    """In place, and rounded correctly: the quotient times the divisor is the number again, for 2, 3, 4, 5, 6, 8, ..."""
    if divisor != 1:
        tensor.div_(divisor)


def add(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a + b for 1-D tensors, without the full-size temporary that a CPU makes of each operand it has to cast."""
    if a.dtype == b.dtype and a.dtype.itemsize < out.dtype.itemsize:
        a = out.copy_(a)  # else torch adds in the narrow dtype, and widens what is left
    if a.device.type != "cpu" or a.dtype == b.dtype == out.dtype:
        torch.add(a, b, out=out)
        return
    for piece in zip(out.split(_CACHED_NUMEL), a.split(_CACHED_NUMEL), b.split(_CACHED_NUMEL), strict=True):  # type: ignore[no-untyped-call]
        torch.add(piece[1], piece[2], out=piece[0])


def in_shards(full: Tensor, size: int) -> tuple[Tensor, ...]:
    return full.view(size, -1).unbind(0)


def carve(scratch: Tensor, count: int, numel: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """`count` tensors of `numel` elements from the front of a byte buffer, and what is left of it."""
    end = count * numel * dtype.itemsize
    return list(scratch[:end].view(dtype).view(count, numel).unbind(0)) if count else [], scratch[end:]
