"""Assigns whole parameters to owner ranks, balanced by cost; every rank computes the same assignment."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def cost(shape: Sequence[int]) -> int:
    """The relative time of one step: for a matrix (Newton-Schulz), its number of elements times the smaller side."""
    return math.prod(shape) * (min(shape) if len(shape) > 1 else 1)


def balance(costs: Sequence[int], num_owners: int) -> list[int]:
    """The owner of each item: items go in order of falling cost to the rank with the least load (ties: the lowest
    rank)."""
    loads = [(0, rank) for rank in range(min(num_owners, len(costs)))]  # a heap; the others remain without load
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], owners[index]))
    return owners
