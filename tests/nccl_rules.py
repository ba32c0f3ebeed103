"""What NCCL demands of collectives, as torch calls it, for ranks on CPUs (`tests/timed_backend.py`).

- A dtype that NCCL has, and no sums of 8-bit floats: torch raises for int16, say.
- Dense tensors; inputs and outputs have one dtype and one device, and sizes that fit.
- In place only at the own part of the full tensor: NCCL knows no other overlap, and checks none.
- The same collectives in the same order on all ranks of a group: operation, dtype, size, root. NCCL compares nothing:
  values are wrong, or a kernel never ends.
- All groups that span the same ranks have one order, too: each has a communicator of its own, and on the device an
  operation of one may wait for one of another. (Gathers and reductions: [Note: one order] in
  `zeroshard/runtime/reduce.py`.)
- The first one of a kind waits for all ranks of the group: connections are made when they are first needed
  (NCCL_RUNTIME_CONNECT), and the host waits for that, even if the collective is asynchronous.

The last one is no mistake by itself. But a rank that has to come there may wait for a collective of another group that
the first one has not begun: a deadlock, in the first step only.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from tests.patience import HANG

GATHERED = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16}
GATHERED |= {torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
SUMMED = GATHERED - {torch.float8_e4m3fn, torch.float8_e5m2, torch.bool}
_CONNECTIONS = {"all_reduce": "tree", "all_to_all": "pairs"}
"""Operation -> what it connects; a ring serves all others."""
_ISSUED = Counter[tuple[int, ...]]()
"""Global ranks -> how many collectives this process has issued in groups that span these, since the last one was made:
these ranks may have failed before, at different places."""
PATIENCE = HANG
"""Seconds after which ranks that have not met in a first collective are taken for a deadlock."""


class BrokenRule(RuntimeError):
    pass


class Rules:
    """The rules of one group, on one rank.

    Args:
        ranks: the global ranks that it spans; none: it is the default group.

    Attributes:
        connected: the connections that exist.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, ranks: Sequence[int]) -> None:
        self.connected: set[str] = set()
        self._ranks = tuple(sorted(ranks)) or tuple(range(size))
        _ISSUED[self._ranks] = 0
        self._store, self._rank, self._size = PrefixStore("rules", store), rank, size
        self._names = dist.ProcessGroupGloo(PrefixStore("names", store), rank, size, timeout)  # type: ignore[call-arg]
        self._number = 0

    def check(self, operation: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], root: int | None) -> str:
        """Check one collective when it is issued, and connect the ranks if it is the first of its kind. Returns its
        name, which must be the same on all ranks.

        Raises:
            BrokenRule: NCCL would refuse it, hang, or compute something else.
        """
        every = [*inputs, *outputs]
        dtypes, devices = {tensor.dtype for tensor in every}, {tensor.device for tensor in every}
        if len(dtypes) > 1 or len(devices) > 1:
            raise BrokenRule(f"{operation}: {dtypes} on {devices}: NCCL takes one dtype and one device")
        (dtype,) = dtypes
        if dtype not in (SUMMED if "reduce" in operation else GATHERED):
            raise BrokenRule(f"{operation}: NCCL does not take {dtype}")
        if not all(tensor.is_contiguous() for tensor in every):
            raise BrokenRule(f"{operation}: tensors must be contiguous")
        if operation in ("all_gather", "reduce_scatter"):
            self._expect_own_part(operation, *(inputs + outputs if operation == "reduce_scatter" else outputs + inputs))
        elif operation == "all_to_all" and overlap(inputs[0], outputs[0]):
            raise BrokenRule("all_to_all: NCCL has none in place")
        self._connect(_CONNECTIONS.get(operation, "ring"))
        self._number += 1
        _ISSUED[self._ranks] += 1
        size = 0 if operation == "all_to_all" else inputs[0].numel()
        place = f"{self._number}, {_ISSUED[self._ranks]} of all groups"
        return f"{place}: {operation} of {size} {dtype}{'' if root is None else f', root {root}'}"

    def _expect_own_part(self, operation: str, full: Tensor, part: Tensor) -> None:
        if full.numel() != part.numel() * self._size:
            raise BrokenRule(f"{operation}: {full.numel()} elements are not {self._size} times {part.numel()}")
        own = full.data_ptr() + self._rank * part.nbytes
        if overlap(full, part) and part.data_ptr() != own:
            raise BrokenRule(f"{operation}: in place, but not at the own part of the full tensor")

    def _connect(self, kind: str) -> None:
        if kind in self.connected or self._size == 1:
            return
        if self._store.add(f"{kind} comes", 1) == self._size:
            self._store.set(f"{kind} is here", "")
        end = time.monotonic() + PATIENCE
        while not self._store.check([f"{kind} is here"]):
            if time.monotonic() > end:
                raise BrokenRule(f"rank {self._rank} of the group waits for its first {kind}, and others do not come")
            time.sleep(0.001)
        self.connected.add(kind)

    def tell(self, name: str) -> Told:
        """Start to compare the name of a collective with those of the peers. In the order of issue."""
        return Told(self._names, self._rank, self._size, name)


class Told:
    """The names of one collective on all ranks."""

    def __init__(self, group: Any, rank: int, size: int, name: str) -> None:
        self._name = name
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        mine = torch.tensor([number], dtype=torch.int64, device="cpu")
        self._all = [torch.zeros_like(mine) for _ in range(size)]
        self._mine, self._work = mine, group.allgather([self._all], [mine])

    def compare(self) -> None:
        """Wait for the names.

        Raises:
            BrokenRule: they differ.
        """
        work, self._work = self._work, None
        if work is None:
            return
        work.wait()
        if any(not torch.equal(other, self._mine) for other in self._all):
            raise BrokenRule(f"the ranks of a group are in different collectives: here {self._name}")


def overlap(one: Tensor, other: Tensor) -> bool:
    begin, end = one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()
    start, stop = other.data_ptr(), other.data_ptr() + other.numel() * other.element_size()
    return begin < stop and start < end
