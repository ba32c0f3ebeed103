"""Gives parameters storages of their own again, unit by unit: when a handle is closed, and after a failed `shard`.

Each unit is freed before the next one is read. So a rank holds no more than the rest of the units, the parameters that
were given back before, and one unit in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zeroshard.comm.collectives import Collectives
from zeroshard.errors import InvalidValue
from zeroshard.full_model.full_state import EVERYWHERE, Destination
from zeroshard.model.absent import give
from zeroshard.model.inference import outside_inference
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.life import Life
from zeroshard.storage.unit import Unit


def destination_of(rank0_only: bool, device: torch.device | str | None) -> Destination:
    """Raises:
    ValueError: the meta device."""
    if device is not None and torch.device(device).type == "meta":
        raise InvalidValue("close: the meta device holds no values: name another device, or leave out device=")
    return Destination(rank0_only, device)


@outside_inference
def close(engine: Engine, destination: Destination) -> None:
    """Free everything that the engine and its optimizers hold, and give every parameter main's values, in its dtype
    before `shard`, on the ranks that the destination includes; the rest of the model follows. Collective. After an
    error the engine is abandoned: some units are there no more. Not after an interrupt (Control-C) in one process: then
    another call goes on with the unit that this one was at."""
    if engine.life is Life.OPEN:
        engine.gatherer.finish()
        engine.life = Life.CLOSING
    try:
        for owner in engine.claims.owners():
            owner.let_go()
        engine.pool.empty()
        engine.reducer.visible.remove_used()
        give_back(engine.units, engine.collectives, destination)
    except BaseException as error:
        if isinstance(error, Exception) or engine.collectives.mesh.world.size > 1:
            engine.abandon()
        raise
    engine.release()
    engine.collectives.mesh.release()
    if destination.includes(engine.collectives.mesh.world.rank):
        engine.plain.move(destination.device)
    engine.life = Life.CLOSED


def give_back(units: Sequence[Unit], collectives: Collectives, destination: Destination = EVERYWHERE) -> None:
    """Free these units, and give their parameters main's values in full. On ranks that the destination leaves out, the
    values are lost. Collective."""
    keeps = destination.includes(collectives.mesh.world.rank)
    first = collectives.mesh.world.first
    for unit in units:
        if unit.leaving is None:
            in_place = not unit.trainable and unit.weights.is_resting_in_full
            unit.leaving = (unit.weights.buffer if in_place else unit.gather_main(collectives)).views()
        unit.free()  # before the copies are made: `leaving` keeps its memory alive
        for index, parameter in enumerate(unit.parameters if unit.leaving else ()):
            if keeps:
                give(parameter, destination.copy(unit.leaving[index], unit.spec.dtype))
            else:
                unit.weights.absent.lose(index, parameter, f"they were given back on rank {first} alone")
        unit.leaving = ()  # before the next unit is read


def undo(
    units: Sequence[Unit], specs: Sequence[UnitSpec], parameters: Mapping[str, nn.Parameter], collectives: Collectives
) -> list[str]:
    """Some rank has failed while it was building units: give the parameters of those that are built their values again.
    Collective.

    Args:
        units: those that this rank has filled: the first ones of `specs`. Ranks may have filled different numbers.
        parameters: by name; all ranks had the same values.

    Returns:
        Names of the units whose values could not be restored exactly: main has fewer bits than the parameters had.
    """
    numbers = collectives.exchange_objects(len(units), "shard")
    # The last unit first: it was the one without room.
    for number in reversed(range(min(numbers), max(numbers))):
        of_unit = [parameters[name] for name in specs[number].names]
        if number < len(units):
            units[number].free()
            for parameter in of_unit:
                give(parameter, torch.empty(parameter.shape, dtype=specs[number].dtype, device=collectives.device))
        # A rank that has not filled the unit has its values still.
        source = next(rank for rank, filled in enumerate(numbers) if filled <= number)
        collectives.broadcast([parameter.data for parameter in of_unit], source=source)
    of_all = units[: min(numbers)]
    give_back(of_all[::-1], collectives)
    return [unit.name for unit in of_all if torch.promote_types(unit.main.dtype, unit.spec.dtype) != unit.main.dtype]
