"""Who steps which parameter, where an optimizer needs whole ones: balanced by cost, the same answer on every rank."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def cost(shape: Sequence[int]) -> int:
    """Relative time of one step: Newton-Schulz on a matrix takes its elements times the smaller side."""
    return math.prod(shape) * (min(shape) if len(shape) > 1 else 1)


def balance(costs: Sequence[int], num_owners: int) -> list[int]:
    """Owner of each item: the most expensive first, to whoever has least (the lowest rank of those)."""
    loads = [(0, rank) for rank in range(num_owners)]  # a heap
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], owners[index]))
    return owners
