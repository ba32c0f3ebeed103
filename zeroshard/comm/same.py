"""Values that every rank passes in full, and of which each keeps a part: they must be the same on all ranks, or the
whole would be a mixture that nobody has passed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zeroshard.comm.collectives import Collectives
from zeroshard.errors import InvalidValue
from zeroshard.io.values import encode
from zeroshard.layout.digest import digest

SHOWN = 5
"""Names in a message."""


def expect_same(collectives: Collectives, values: Mapping[str, Any], what: str, instead: str) -> None:
    """Ranks compare one digest of the digests of all values, by a sum over the ranks; more only if something differs.
    Collective.

    Args:
        values: name -> tensor, plain value, or tree of them; the same names on every rank. Other objects are not
            compared.
        instead: what to do where they differ; the end of the message.

    Raises:
        ValueError: on every rank: names that differ, and the ranks that have other values there than rank 0.
    """
    mine = {name: fingerprint(value) for name, value in values.items()}
    if collectives.are_alike(mine, what):
        return
    by_rank = collectives.exchange_objects(mine, what)
    found = differing(by_rank)
    names = ", ".join(f"{name} (rank {', '.join(map(str, ranks))})" for name, ranks in list(found.items())[:SHOWN])
    raise InvalidValue(
        f"{what}: other values than on rank 0 in {names}{' and others' * (len(found) > SHOWN)}. {instead}"
    )


def differing(by_rank: list[dict[str, str]]) -> dict[str, list[int]]:
    """Name -> the ranks that have it otherwise than rank 0, or only one of the two has it."""
    names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
    ranks = {
        name: [rank for rank, theirs in enumerate(by_rank) if theirs.get(name) != by_rank[0].get(name)]
        for name in names
    }
    return {name: others for name, others in ranks.items() if others}


def fingerprint(value: Any) -> str:
    """Of bytes, shape and dtype of the tensors in it, and of what is plain; of anything else the type alone."""
    if isinstance(value, Tensor):
        return _of_tensor(value)
    try:
        return json.dumps(encode(value, _of_tensor, ""))
    except ValueError:
        return type(value).__name__


def _of_tensor(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {digest(tensor)}"
