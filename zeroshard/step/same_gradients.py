"""Checks that gradients which every rank has in full are equal on all ranks, by samples of a few parameters per step.

Under plan OPTIMIZER_ONLY they differ if no code has averaged them: every rank would step its part of main with its own
gradients. Under DDP they differ if one rank has changed `p.grad`.
"""

from __future__ import annotations

from collections.abc import Mapping

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.samples import Listing, Samples
from zeroshard.errors import InvalidState
from zeroshard.model.inference import outside_inference
from zeroshard.storage.unit import Unit

_AT_A_TIME = 8
"""How many parameters are sampled in one step; the next step samples the following ones."""


class SameGradients(Samples):
    """The samples of the gradients of one optimizer, on one rank."""

    @outside_inference
    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives.device)
        self._collectives = collectives
        self._external = False

    def look(self, units: dict[Unit, set[int]]) -> None:
        """Sample some of the gradients of these slots, which every rank has in full."""
        slots = [(unit, index) for unit, of_unit in units.items() for index in sorted(of_unit)]
        first = self.turn * _AT_A_TIME
        self._external = any(unit.grads.is_external for unit in units)
        for number in range(first, first + min(_AT_A_TIME, len(slots))):
            unit, index = slots[number % len(slots)]
            gradient = unit.grads.in_full(index)
            if gradient is not None:
                self.take(number, unit.layout.slots[index].name, gradient.detach().reshape(-1))

    def expect_same(self, what: str) -> None:
        """One more exchange, after digests have differed. `what`: its purpose.

        Raises:
            RuntimeError: on every rank, with the first parameter that differs.
        """
        found = self._collectives.by_rank(self.listing(), what)
        first, *others = found
        self.forget()
        for rank in others:
            if difference := _difference(found, first, rank, "parameter number " if self._external else ""):
                raise InvalidState(
                    f"the ranks step with different gradients: {difference}. Nothing has been updated. "
                    f"{_NOBODY_AVERAGES if self._external else _EDITED}"
                )

    def forget(self) -> None:
        super().forget()
        self.compared()


_NOBODY_AVERAGES = (
    "An optimizer that is built from parameters leaves it to others to average their gradients over the ranks: wrap "
    'the model in DistributedDataParallel, or let zeroshard do it: handle = zeroshard.shard(model, "zero1"), and '
    "ShardedOptimizer(handle, ...)"
)
_EDITED = "What is done to p.grad between backward and step must be done on every rank alike"


def _difference(found: Mapping[int, Listing], first: int, rank: int, what: str) -> str:
    of_first, of_other = ({number: (name, words) for number, name, words in found[one]} for one in (first, rank))
    for number in sorted(of_first.keys() | of_other.keys()):
        if number not in of_first or number not in of_other:
            having, missing = (first, rank) if number in of_first else (rank, first)
            name, _ = of_first.get(number) or of_other[number]
            return f"{what}{name} has one on rank {having}, and none on rank {missing}"
        if of_first[number] != of_other[number]:
            return f"that of {what}{of_first[number][0]} has other values on rank {rank} than on rank {first}"
    return ""
