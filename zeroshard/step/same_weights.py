"""Checks that weights which every rank has in full are equal on all ranks.

The control exchange compares samples (`comm/samples.py`): of a few elements of one unit in each step, and of which
units have been written to on this rank since the last one. If these differ, the ranks compare all values of the units
that only some of them have written to. (They are equal if a rank writes, and sends the values to the others.) A write
on one rank alone would be lost in the next gather, but for the own shard of that rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from zeroshard.comm.same import differing, fingerprint
from zeroshard.comm.samples import first_difference
from zeroshard.errors import InvalidState
from zeroshard.ranks.backends import kernels
from zeroshard.runtime.engine import Engine


class SameWeights:
    """The weights of one handle, on one rank."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def look(self) -> None:
        """Before a control exchange."""
        samples, units = self._engine.collectives.samples, self._engine.units
        if not units or self._engine.collectives.mesh.world.size == 1:
            return
        unit, number = units[samples.turn % len(units)], samples.next_number()  # the same on every rank
        if unit.weights.is_resting_in_full:  # if only some ranks skip it here, the comparison skips it
            samples.take(number, unit.name, unit.weights.full)
        samples.written |= {
            unit.name for unit in units if unit.weights.is_resting_in_full and unit.weights.versions.has_new_writes()
        }

    def expect_same(self, what: str) -> None:
        """One more exchange, or two, after digests have differed. `what`: their purpose.

        Raises:
            RuntimeError: on every rank, with the first unit that differs.
        """
        collectives = self._engine.collectives
        samples = collectives.samples
        mine = samples.listing(), sorted(samples.written), kernels(collectives.device)
        found = collectives.by_rank(mine, what)
        listings, written, of_ranks = ({rank: of_rank[part] for rank, of_rank in found.items()} for part in range(3))
        samples.forget()
        if (place := first_difference(listings)) is not None:
            raise InvalidState(_diverged(*place, of_ranks))
        if some := set[str]().union(*written.values()) - set.intersection(*map(set, written.values())):
            values = {
                unit.name: fingerprint(unit.weights.full)
                for unit in self._engine.units
                if unit.name in some and unit.weights.is_resting_in_full
            }
            for unit, ranks in differing(collectives.by_rank(values, what)).items():
                raise InvalidState(_diverged(ranks[0], unit, of_ranks))


def _diverged(rank: int, unit: str, of_ranks: Mapping[int, str]) -> str:
    """In words. `of_ranks`: the kernels with which each rank computes."""
    first = next(iter(of_ranks))
    others = (
        f"rank {first} computes with {of_ranks[first]}, and rank {rank} with {of_ranks[rank]}, which may round "
        "differently: use a plan in which one rank updates each weight (zero1, in one dimension)"
        if of_ranks[first] != of_ranks[rank]
        else "data are damaged on their way between ranks"
    )
    return (
        f"the ranks have diverged: unit {unit} has other values on rank {rank} than on rank {first}, and they must "
        "be equal. Nothing has been updated by this step. Have weights been written on one rank alone (outside of "
        "`with handle.unsharded(write=True):`), or by a module in its first forward, from the batch of each rank "
        "(call the model once before shard())? Are they statistics, as in Keras (shard(..., ignored=))? Does the "
        f"optimizer draw random numbers? If none of it, {others}. Continue from a checkpoint"
    )
