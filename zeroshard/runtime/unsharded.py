"""Full weights for a while, outside of forward and backward: to look at, or to write to.

What may be written is known to be the same on every rank, or it is taken from one. So it is compared (a digest for each
parameter) or broadcast, once, on the way out. Where ranks differ, or the code inside raises, the values are as before:

| weights rest | what is kept of the old values meanwhile                                           |
|--------------|------------------------------------------------------------------------------------|
| in shards    | nothing: the shard itself holds them                                               |
| in full      | a copy of what this rank updates (its shard; all of it where main is replicated)   |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.same import expect_same
from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.runtime.gather import Gatherer
from zeroshard.storage.unit import Unit

Part = nn.Module | nn.Parameter | str
_WRITE_THE_SAME = (
    "All are as before. Write the same on every rank, or pass modifier_rank= the rank whose values are to be taken"
)


def units_of(parts: Sequence[Part], model: nn.Module, units: Sequence[Unit], what: str) -> list[Unit]:
    """The units that hold parameters of these parts of the model.

    Raises:
        ValueError: a part that the model does not have.
    """
    wanted = {id(parameter) for part in parts for parameter in _parameters_of(part, model, what)}
    return [unit for unit in units if wanted & {id(p) for p in unit.parameters}]


def _parameters_of(part: Part, model: nn.Module, what: str) -> list[nn.Parameter]:
    if isinstance(part, str):
        named: dict[str, nn.Module | nn.Parameter] = {**dict(model.named_modules()), **dict(model.named_parameters())}
        if part not in named:
            raise InvalidValue(f"{what}: the model has no parameter and no module of the name {part!r}")
        part = named[part]
    found = list(part.parameters()) if isinstance(part, nn.Module) else [part]
    known = set(map(id, model.parameters()))  # those that are left alone, too: they are always here
    if not all(id(parameter) in known for parameter in found):
        raise InvalidValue(f"{what}: a parameter that is not of this handle's model")
    return found


@contextmanager
def unsharded(units: Sequence[Unit], gatherer: Gatherer) -> Iterator[None]:
    """Inside, these units have their full values, to look at. Entering is collective.

    Raises:
        RuntimeError: a parameter has been written to.
    """
    with _shown(units, gatherer):
        before = [(unit.edits, [parameter._version for parameter in unit.parameters]) for unit in units]
        yield
        for unit, (edits, versions) in zip(units, before, strict=True):
            for parameter, slot, version in zip(unit.parameters, unit.layout.slots, versions, strict=True):
                # Writes through `p.data` are not seen: they leave the version as it is (pytorch/pytorch#7386).
                if parameter._version != version and unit.edits == edits:  # else a scope inside has taken it
                    raise InvalidState(
                        f"unsharded: {slot.name} has been written to. Pass write=True if every rank writes the same, "
                        "or modifier_rank= for the values of one rank; this write is lost, or on this rank alone"
                    )


@contextmanager
def written(units: Sequence[Unit], gatherer: Gatherer, modifier_rank: int | None) -> Iterator[None]:
    """Inside, these units have their full values, and what is written there becomes the new weights, and main.
    Collective, also on leaving, but not where the code inside raises.

    Args:
        modifier_rank: whose values are taken; None: they must be the same on every rank.

    Raises:
        ValueError: on every rank: not a rank; ranks that differ in `modifier_rank`, or in what they have written. The
            values are as before.
    """
    collectives = gatherer.collectives
    size = collectives.mesh.world.size
    if modifier_rank is not None and (isinstance(modifier_rank, bool) or modifier_rank not in range(size)):
        raise InvalidValue(f"unsharded: modifier_rank must be a rank from 0 to {size - 1}, found {modifier_rank!r}")
    with _shown(units, gatherer):
        # Nobody writes before everybody has read.
        if not collectives.are_alike(modifier_rank, "handle.unsharded()"):
            raise InvalidValue("unsharded: the ranks differ in modifier_rank: pass the same number on all of them")
        before = {unit: _before(unit) for unit in units}
        try:
            with _open_for_writing(units):
                yield
            if modifier_rank is not None:
                collectives.broadcast([unit.weights.full for unit in units], source=modifier_rank)
            else:
                _expect_same(units, collectives)
        except BaseException:
            with torch.no_grad():
                for unit in units:
                    _restore(unit, before[unit])
            raise
        with torch.no_grad():
            for unit in units:
                unit.follow_full(before[unit])


@contextmanager
def _shown(units: Sequence[Unit], gatherer: Gatherer) -> Iterator[None]:
    for unit in units:
        if not unit.weights.in_use:  # else they are here: a scope around this one has gathered them
            # Apart: a scope may stay open for long, and show more units than there are pool buffers.
            gatherer.unshard(unit, apart=True)
            unit.weights.show()
        unit.weights.in_use += 1  # a forward inside leaves them as they are
    try:
        yield
    finally:
        for unit in units:
            unit.weights.in_use -= 1
            if not unit.weights.in_use:
                unit.weights.rest()


@contextmanager
def _open_for_writing(units: Sequence[Unit]) -> Iterator[None]:
    for unit in units:
        unit.weights.writers += 1
    try:
        yield
    finally:
        for unit in units:
            unit.weights.writers -= 1


def _before(unit: Unit) -> Tensor:
    """[unit.updated.numel] the weights that this rank updates, as they are now."""
    return unit.weights.full[unit.updated.slice].clone() if unit.weights.buffer.rests_in_full else unit.weights.own()


def _restore(unit: Unit, before: Tensor) -> None:
    """Not collective: what this rank does not update is gathered when it is needed next."""
    unit.weights.full[unit.updated.slice] = before
    if unit.updated.numel < unit.layout.numel:
        unit.weights.drop()


def _expect_same(units: Sequence[Unit], collectives: Collectives) -> None:
    views = [zip(unit.layout.slots, unit.weights.buffer.views(), strict=True) for unit in units]
    in_layout = [(slot.name, view) for of_unit in views for slot, view in of_unit]
    expect_same(collectives, dict(reversed(in_layout)), "unsharded(write=True)", _WRITE_THE_SAME)
