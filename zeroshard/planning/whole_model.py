"""Plans the phases in which the whole model passes through a rank, unit by unit: `shard`, `state_dict`, `close`.

Each function returns the bytes at the peak, by walking through the units as the engine does. *Elsewhere* means that a
rank keeps nothing on the device of the model: full values go to another device, or to rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch

from zeroshard.placement import SHARDED
from zeroshard.planned.parts import PlannedUnit
from zeroshard.planned.training import Training, by_stepper
from zeroshard.planning.optimizers import Needs


def sharding(training: Training) -> int:
    """The peak of `shard`, for a model that is not on the meta device: the units that are filled, and the parameters of
    those that are not. While a unit is filled, both are there."""
    held, plain = 0, sum(map(_plain_bytes, training.units))
    peak = plain
    for unit in training.units:
        held += unit.held(peak=False).sum
        peak = max(peak, held + plain)
        plain -= _plain_bytes(unit)
    return peak


def closing(training: Training, *, elsewhere: bool) -> int:
    """The peak of `close`, once the optimizers' state and all transients are freed."""
    held, given = sum(unit.held(peak=False).sum for unit in training.units), 0
    peak = held
    for unit in training.units:
        of_unit, full = unit.held(peak=False), _gathered(unit, training)
        peak = max(peak, held + given + full)
        held -= of_unit.sum
        given += 0 if elsewhere else _plain_bytes(unit)
        peak = max(peak, held + given + (full or of_unit.weights))
    return peak


def state_dict(training: Training, needs: Needs, *, elsewhere: bool) -> int:
    """The most bytes of full state at once in `optimizer.state_dict()`."""
    peak = given = 0
    for full, copied in (*_whole_items(training, needs, elsewhere), *_items_in_pieces(training, needs)):
        given += 0 if elsewhere else copied
        peak = max(peak, given + full)
    return peak


def _whole_items(training: Training, needs: Needs, elsewhere: bool) -> Iterator[tuple[int, int]]:
    """Of each item of state of the parameters that are stepped as a whole: bytes in which it is received, and of its
    copy. If it stays on the device, it is not copied."""
    for of_stepper in by_stepper(training.wholes()).values():
        for one in of_stepper:
            for entry in needs.entries(one.slot.name, len(one.slot.shape), one.unit.main_dtype):
                num_bytes = entry.bytes_of(one.slot.shape).sum
                yield (num_bytes if elsewhere else 0), num_bytes


def _items_in_pieces(training: Training, needs: Needs) -> Iterator[tuple[int, int]]:
    """For each stepper, unit and key: bytes of the full buffer, and of the values that are copied from it. Numbers that
    a parameter has once are not gathered."""
    for stepper in sorted(set(needs.kind_of.values())):
        for unit in training.units if not needs.steps_whole[stepper] else ():
            mine = [slot for slot in unit.layout.slots if needs.kind_of.get(slot.name) == stepper]
            entries = [(slot, entry) for slot in mine for entry in needs.entries(slot.name, 1, unit.main_dtype)]
            yield 0, sum(entry.bytes_of(()).sum for _, entry in entries if not entry.is_elementwise)
            for key in dict.fromkeys(entry.key for _, entry in entries if entry.is_elementwise):
                items = [(slot.world.numel, entry.value.dtype) for slot, entry in entries if entry.key == key]
                dtype = reduce(torch.promote_types, (dtype for _, dtype in items))
                copied = sum(numel * dtype.itemsize for numel, dtype in items)
                yield unit.layout.numel * dtype.itemsize, copied


def _plain_bytes(unit: PlannedUnit) -> int:
    """Bytes of the parameters before `shard`."""
    return unit.layout.slots_numel * unit.spec.dtype.itemsize


def _gathered(unit: PlannedUnit, training: Training) -> int:
    """Bytes of the tensor into which `close` gathers a unit; 0 if its weights are there in full, and are main."""
    rests_in_full = training.plan.weights is not SHARDED or training.topology.num_shards == 1
    return 0 if rests_in_full and not unit.spec.trainable else unit.layout.numel * unit.main_dtype.itemsize
