"""Checks that values which every rank passes in full are the same on all ranks.

Each rank keeps only a part of them: parts of different values would form a mixture that no rank has passed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import SOME_EXCHANGE, Collectives
from zeroshard.errors import InvalidValue
from zeroshard.io.values import encode

SHOWN = 5
"""How many names an error message lists."""
_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16}
_STEP, _MIXED, _MIXED_AGAIN = -7046029254386353131, -4658895280553007687, -7723592293110705685


def expect_same(collectives: Collectives, values: Mapping[str, Any], what: str, instead: str) -> None:
    """Compare one digest of all values by a sum over the ranks, and single values only if the digests differ.
    Collective.

    Args:
        values: name -> tensor, plain value, or tree of them; the same names on every rank. Of other objects only the
            type is compared.
        what: the call, for the message.
        instead: what the user can do if they differ; the end of the message.

    Raises:
        ValueError: on every rank: the names whose values differ, and the ranks that differ from the first one.
    """
    mine = {name: fingerprint(value) for name, value in values.items()}
    if collectives.are_alike(mine, what):
        return
    by_rank = collectives.by_rank(mine, what)
    found = differing(by_rank)
    names = ", ".join(f"{name} (rank {', '.join(map(str, ranks))})" for name, ranks in list(found.items())[:SHOWN])
    raise InvalidValue(
        f"{what}: other values than on rank {collectives.mesh.world.first} in {names}"
        f"{' and others' * (len(found) > SHOWN)}. {instead}"
    )


def expect_same_copies(collectives: Collectives, values: Sequence[Tensor], what: str, *, in_full: bool) -> None:
    """Compare values of which each rank has its own part (`in_full`: all of them) with those of the ranks that have
    the same part. Collective; nothing is exchanged where there are none.

    Raises:
        ValueError: on every rank: ranks with the same part have other values.
    """
    mesh = collectives.mesh
    mates = mesh.world.ranks if in_full else mesh.replicate.ranks
    if (mesh.world if in_full else mesh.replicate).size == 1:
        return
    mine = torch.tensor([digest(value) >> 1 for value in values], dtype=torch.int64, device="cpu")
    rows = collectives.exchange(mine.to(collectives.device), what)
    of_mates = rows[[mesh.world.ranks.index(rank) for rank in mates]]
    if collectives.count(not bool((of_mates == of_mates[0]).all()), what):
        raise InvalidValue(
            f"{what}: ranks that hold the same part of main have been given other values. Nothing has been changed. "
            "Give the same on each of them (seed random numbers alike)"
        )


def expect_same_model(collectives: Collectives, lines: Sequence[str], what: str = SOME_EXCHANGE) -> None:
    """Compare a digest of lines that describe a model. Collective. `what`: the call that every rank must make.

    Raises:
        ValueError: on every rank: they differ; the message has the first difference.
    """
    if collectives.are_alike(lines, what):
        return
    by_rank = collectives.by_rank(lines, what)
    first = collectives.mesh.world.first
    for rank, theirs in by_rank.items():
        if theirs != by_rank[first]:
            pairs = zip([*by_rank[first], "(nothing more)"], [*theirs, "(nothing more)"], strict=False)
            mine, other = next((a, b) for a, b in pairs if a != b)
            raise InvalidValue(
                f"the ranks have different models: rank {first} has {mine!r} where rank {rank} has {other!r}"
            )


def of_buffers(buffers: Mapping[str, Tensor]) -> list[str]:
    """Their names, shapes and dtypes, for `expect_same_model`."""
    return [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in buffers.items()]


def differing(by_rank: Mapping[int, dict[str, str]]) -> dict[str, list[int]]:
    """Name -> the global ranks whose value differs from the first rank's, or is missing on one of the two."""
    first, *_ = by_rank.values()
    names = dict.fromkeys(name for of_rank in by_rank.values() for name in of_rank)
    ranks = {name: [rank for rank, theirs in by_rank.items() if theirs.get(name) != first.get(name)] for name in names}
    return {name: others for name, others in ranks.items() if others}


def fingerprint(value: Any) -> str:
    """A digest of the bytes, shapes and dtypes of the tensors in `value`, and of its plain values. For other objects:
    the name of the type."""
    if isinstance(value, Tensor):
        return _of_tensor(value)
    try:
        return json.dumps(encode(value, _of_tensor, ""))
    except ValueError:
        return type(value).__name__


def _of_tensor(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {digest(tensor)}"


def digest(tensor: Tensor) -> int:
    """A checksum of the bytes and their positions: words of at most 32 bits times odd numbers of 64, one for each
    position. A change of one word always changes it, and others by all but one chance in 2^31. (Words of 64 bits would
    not do: changed signs of two of them are the same number twice, 2^63, whatever they are multiplied by. Nor would
    small numbers: small words, as those of masks and permutations, have many sums in common.) Needs 16 MB temporarily.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    words = dense.view(-1).view(_INTEGERS.get(dense.element_size(), torch.int32))
    odd = _odd_numbers(min(words.numel(), _CHUNK), words.device)
    total = 0
    for piece in torch.split(words, _CHUNK):
        total = (total * _MIXED + int(piece.to(torch.int64).mul_(odd[: piece.numel()]).sum())) % 2**64
    return total


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """int64 [count], the same on every device: the positions, with their bits mixed (as SplitMix64 does)."""
    numbers = torch.arange(1, count + 1, device=device).mul_(_STEP)
    for factor, shift in ((_MIXED, 30), (_MIXED_AGAIN, 27)):
        numbers.bitwise_xor_(numbers >> shift).mul_(factor)
    return numbers.bitwise_xor_(numbers >> 31).bitwise_or_(1)


def expect_writable(buffers: Mapping[str, Tensor]) -> None:
    """
    Raises:
        ValueError: a buffer cannot take the values of another rank.
    """
    for name, buffer in buffers.items():
        if not buffer.is_meta and torch._debug_has_internal_overlap(buffer) == 1:  # as torch asks before it writes
            raise InvalidValue(
                f"buffer {name} is expanded, so its elements share memory and cannot be written to: register a copy "
                "(.clone()), or name it in ignored=, if each rank computes its own"
            )
