"""Scopes with full weights outside of forward and backward, to read or to write.

Values written inside must be the same on every rank, or are taken from one rank. On leaving the scope they are compared
(a digest for each parameter) or broadcast. If ranks differ, or the code inside raises, the old values are restored:

| weights rest | where the old values are kept                                                      |
|--------------|------------------------------------------------------------------------------------|
| in shards    | in the shard                                                                       |
| in full      | in a copy of what this rank updates (its shard, or all if main is replicated)      |
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.packets import on_device
from zeroshard.comm.same import expect_same
from zeroshard.comm.together import together
from zeroshard.errors import InvalidState, InvalidType, InvalidValue
from zeroshard.failures.positions import in_short
from zeroshard.full_model.kept_weights import keeping
from zeroshard.full_model.replaced import Found, put_back, take_over, uses
from zeroshard.layout.interval import Interval
from zeroshard.model.unit_spec import plain_name
from zeroshard.runtime.engine import Engine
from zeroshard.storage.main_weights import have_same_bits
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency

Part = nn.Module | nn.Parameter | str
_WRITE_THE_SAME = (
    "All are as before. Write the same on every rank, or pass modifier_rank= the rank whose values are to be taken"
)


def units_of(parts: Sequence[Part], engine: Engine, what: str) -> Sequence[Unit]:
    """The units that hold parameters of these parts of the model; all units if none is given.

    Raises:
        ValueError: the model does not have one of the parts.
    """
    if not parts:
        return engine.units
    wanted = {id(parameter) for part in parts for parameter in _parameters_of(part, engine.model, what)}
    return [unit for unit in engine.units if wanted & {id(p) for p in unit.parameters}]


def _parameters_of(part: Part, model: nn.Module, what: str) -> list[nn.Parameter]:
    if isinstance(part, str):
        modules = model.named_modules(remove_duplicate=False)
        named: dict[str, nn.Module | nn.Parameter] = dict([*modules, *model.named_parameters(remove_duplicate=False)])
        plain = {plain_name(name): one for name, one in named.items()}  # as in messages and full state dicts
        if part not in named and part not in plain:
            near = difflib.get_close_matches(part, plain, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidValue(f"{what}: the model has no parameter and no module of the name {part!r}{hint}")
        part = named[part] if part in named else plain[part]
    if not isinstance(part, (nn.Module, Tensor)):
        raise InvalidType(
            f"{what}: a part is a module, a parameter or the name of one, and several are passed one behind the other, "
            f"as a, b or *parts; found an object of type {type(part).__name__}"
        )
    found = list(part.parameters()) if isinstance(part, nn.Module) else [part]
    known = set(map(id, model.parameters()))  # also ignored ones, whose values are always there
    if not all(id(parameter) in known for parameter in found):
        raise InvalidValue(f"{what}: a parameter that is not of this handle's model")
    return found


@contextmanager
def unsharded(units: Sequence[Unit], engine: Engine) -> Iterator[None]:
    """See `Handle.unsharded`: a scope to read. Only entering is collective."""
    with _shown(units, engine):
        before = [(unit.edits, unit.weights.versions.writes()) for unit in units]
        try:
            with keeping(units, engine.units):
                yield
        finally:  # also after an error, which would not be the one that is raised
            replaced = [put_back(unit) if not unit.weights.writers else {} for unit in units]
        if engine.life.is_over:  # abandoned inside
            return
        for unit, of_unit, (edits, writes) in zip(units, replaced, before, strict=True):
            if of_unit or unit.edits == edits:  # else an inner scope has accepted the write
                _expect_not_written(unit, writes, of_unit)
        engine.expect_known_parameters(also_added=False)


def _expect_not_written(unit: Unit, writes: Sequence[int], replaced: Found) -> None:
    """`writes`: `Versions.writes` of the unit when the scope began. `replaced`: slots that were pointed elsewhere."""
    slots = unit.layout.slots
    both = enumerate(zip(slots, writes, unit.weights.versions.writes(), strict=True))
    found = [slot for index, (slot, one, other) in both if one != other or index in replaced]
    weights = unit.weights
    # (A block around this one, which allows writes, may have written before: the shard has its values at the end only.)
    if not found and weights.buffer.borrows and weights.state is Residency.RESIDENT and not weights.writers:
        # Writes through `p.data` leave the version as it is (pytorch/pytorch#7386), and would be lost.
        found = [slot for slot in slots if not _is_of_shard(unit, slot.world & unit.updated)]
    for slot in found:
        now = "this rank has the new values" if weights.buffer.rests_in_full else "this write is lost"
        raise InvalidState(
            f"unsharded: {slot.name} has been written to. Pass write=True if every rank writes the same, "
            f"or modifier_rank= for the values of one rank; {now}"
        )


def _is_of_shard(unit: Unit, interval: Interval) -> bool:
    """Whether full weights have the bits of the own shard there. `interval`: inside of it."""
    own = unit.weights.own()[interval.start - unit.updated.start : interval.stop - unit.updated.start]
    return have_same_bits(unit.weights.full[interval.slice], own)


@contextmanager
def written(units: Sequence[Unit], engine: Engine, modifier_rank: int | None) -> Iterator[None]:
    """See `Handle.unsharded`: a scope to write. Entering and leaving are collective; leaving by an error is not."""
    collectives = engine.collectives
    ranks = collectives.mesh.world.ranks
    if modifier_rank is not None and (isinstance(modifier_rank, bool) or modifier_rank not in ranks):
        some = in_short(tuple(sorted(ranks)))
        raise InvalidValue(f"unsharded: modifier_rank must be one of the ranks {some}, found {modifier_rank!r}")
    with _shown(units, engine):
        # This exchange also keeps every rank from writing before all ranks have read its weights.
        if not collectives.are_alike(modifier_rank, "handle.unsharded()"):
            raise InvalidValue("unsharded: the ranks differ in modifier_rank: pass the same number on all of them")
        before = {unit: _before(unit) for unit in units}
        writes, tensors = [unit.weights.versions.writes() for unit in units], uses(units)

        def take() -> None:
            take_over(units, [put_back(unit) for unit in units], tensors, engine.units)
            engine.expect_known_parameters(also_added=False)

        try:
            with _open_for_writing(units), keeping(units, engine.units):
                yield
            if engine.life.is_over:
                return
            together(collectives, "unsharded", take, errors=(InvalidValue, InvalidState))
            _count_writes(units, writes, collectives)
            if modifier_rank is not None:
                collectives.broadcast([unit.weights.full for unit in units], source=ranks.index(modifier_rank))
            else:
                _expect_same(units, collectives)
        except BaseException:
            with torch.no_grad():
                for unit in units if not engine.life.is_over else ():
                    put_back(unit)
                    _restore(unit, before[unit])
            raise
        with torch.no_grad():
            for unit in units:
                unit.follow_full(before[unit])


@contextmanager
def _shown(units: Sequence[Unit], engine: Engine) -> Iterator[None]:
    gatherer, here = engine.gatherer, engine.schedule.here()
    gatherer.collectives.num_reads += 1
    shown: list[Unit] = []
    try:
        for unit in units:  # memory may run out, which is no reason to keep what has been gathered
            if not unit.weights.in_use:  # else an outer scope has gathered them
                # `apart`: a scope may stay open for long, and show more units than there are pool buffers.
                gatherer.unshard(unit, apart=True)
                unit.weights.show()
            unit.weights.in_use += 1  # keeps a forward inside the scope from hiding them
            unit.weights.scopes += 1
            shown.append(unit)
        yield
    finally:
        for unit in shown:
            unit.weights.in_use -= 1
            unit.weights.scopes -= 1
        for unit in shown:
            if not unit.weights.in_use and not engine.life.is_over:
                unit.weights.rest()
    with torch.no_grad():
        gatherer.enter_backward(here)  # a hook in a backward has opened the scope, and backward goes on with these


@contextmanager
def _open_for_writing(units: Sequence[Unit]) -> Iterator[None]:
    before = [unit.weights.writers for unit in units]
    try:
        for unit in units:
            unit.weights.writers += 1
        yield
    finally:
        for unit, number in zip(units, before, strict=True):
            unit.weights.writers = number


def _count_writes(units: Sequence[Unit], before: Sequence[Sequence[int]], collectives: Collectives) -> None:
    """What one rank has written to is new on all of them: a backward of an older graph, which compares versions, raises
    on every rank or on none. `before`: `Versions.writes` of each unit. Collective."""
    mine = [
        [int(number != old) for number, old in zip(unit.weights.versions.writes(), of_unit, strict=True)]
        for unit, of_unit in zip(units, before, strict=True)
    ]
    of_all = iter(collectives.add_up(on_device([*chain(*mine)], collectives.device), "handle.unsharded()").tolist())
    for unit, of_unit in zip(units, mine, strict=True):
        unit.weights.versions.renew({slot for slot, own in enumerate(of_unit) if next(of_all) and not own})


def expect_no_block(units: Sequence[Unit], what: str) -> None:
    """Raises:
    RuntimeError: a scope is open, and the call would take the weights away that it shows."""
    if any(unit.weights.scopes for unit in units):
        raise InvalidState(
            f"{what} in a block of handle.unsharded(), inside of which the weights are here in full: call it after the "
            "block"
        )


def expect_none_written(units: Sequence[Unit], what: str) -> None:
    """Called before the engine reads main or sets values itself. At the end of a scope that is open for writing, main
    follows the weights: until then it may be the old one, and what is set would be rounded to them, or gone.

    Raises:
        RuntimeError: there is such a scope.
    """
    if not any(unit.weights.writers for unit in units):
        return
    steps = (
        " (Torch's get_state_dict and set_state_dict step an optimizer that has no state: call "
        "get_optimizer_state_dict before the block)"
    )
    raise InvalidState(
        f"{what} in a block of handle.unsharded(write=True), whose values become the weights: call it before or after "
        f"the block.{steps if what == 'a step' else ''}"
    )


def parts_of(units: Sequence[Unit], parts: Sequence[Tensor]) -> list[tuple[Unit, Tensor]]:
    """Each unit with its part of main, before any is written.

    Raises:
        ValueError: they are not of the form of `main_parts`. One element would be copied to all.
    """
    found: list[Any] = [parts] if isinstance(parts, (Tensor, Mapping)) else list(parts)
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in found]
    expected = [(unit.updated.numel,) for unit in units]
    if shapes != expected:
        raise InvalidValue(
            f"set_main_parts: expected {len(expected)} tensors of the shapes {_first(expected)}, found {len(found)}: "
            f"{_first(shapes)}. Pass what main_parts() has returned, under this plan and on this number of ranks. "
            "Values by name are those of handle.load_full_state_dict(state)"
        )
    return list(zip(units, found, strict=True))


def _first(items: Sequence[object]) -> str:
    return ", ".join([str(item) for item in items[:3]] + ["..."] * (len(items) > 3)) or "none"


def _before(unit: Unit) -> Tensor:
    """[unit.updated.numel], the current weights in the interval that this rank updates."""
    return unit.weights.full[unit.updated.slice].clone() if unit.weights.buffer.rests_in_full else unit.weights.own()


def _restore(unit: Unit, before: Tensor) -> None:
    """Restore the old weights of the interval that this rank updates."""
    if unit.weights.buffer.full is None:
        return  # a block inside has done so
    # Not collective, as only one rank may have raised: the rest of the weights is gathered when it is needed next.
    unit.weights.full[unit.updated.slice] = before
    if unit.updated.numel < unit.layout.numel:
        unit.weights.drop()


def _expect_same(units: Sequence[Unit], collectives: Collectives) -> None:
    views = [zip(unit.layout.slots, unit.weights.buffer.views(), strict=True) for unit in units]
    in_layout = [(slot.name, view) for of_unit in views for slot, view in of_unit]
    expect_same(collectives, dict(reversed(in_layout)), "unsharded(write=True)", _WRITE_THE_SAME)
