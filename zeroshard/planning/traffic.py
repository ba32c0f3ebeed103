"""Plans the collectives of a step on one rank: the events that `handle.comm_log` will have.

Under ZERO3, the pool buffers in which units take turns decide which units are gathered twice (see `runtime/gather.py`).
With a batch, units run as its trace has recorded. Else it is assumed that they run once each, in the order of
registration, and backward in reverse (`assumed_calls`). Both are replayed (`replay.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from zeroshard.comm.comm_log import CommEvent
from zeroshard.comm.packets import packet_sizes
from zeroshard.model.paths import parent
from zeroshard.placement import REPLICATED, SHARDED
from zeroshard.planned.parts import PlannedUnit, PlannedWhole
from zeroshard.planned.training import Training, resting
from zeroshard.planning.calls import Calls, Event
from zeroshard.planning.once import once
from zeroshard.planning.replay import Replay
from zeroshard.step.control import row_numbers

STEPS_REPLAYED = 8
"""At most. In some models, whose units are parts of two blocks, two numbers of gathers take turns from step to step."""


@dataclass(frozen=True)
class StepCounts:
    """The numbers of a step.

    Attributes:
        micro_batches: forward and backward passes.
        reductions: how many of them reduce gradients.
        num_groups: param groups of the optimizer.
        num_scalers: loss scales in use.
    """

    micro_batches: int
    reductions: int
    num_groups: int
    num_scalers: int


def step_events(training: Training, counts: StepCounts, gathered: Gathered) -> Counter[CommEvent]:
    """How often each event occurs in a step, from the second step on."""
    events = Counter[CommEvent]()
    for unit in training.units:
        if unit.is_reduced:
            for event in _reduction(training, unit):
                events[event] += counts.reductions
        if unit.spec.trainable and training.plan.weights is REPLICATED and training.plan.main is SHARDED:
            events[_gather(unit, "step", unit.spec.weight_dtype)] += 1
    events.update(gathered.events)
    events.update(_to_owners_and_back(training))
    events.update(_control(training, counts))
    return Counter({event: number for event, number in events.items() if event.bytes or event.op == "all_to_all"})


def _reduction(training: Training, unit: PlannedUnit) -> Iterator[CommEvent]:
    precision, replicas, shard = unit.spec.precision, training.topology.num_replicas, unit.layout.shard_numel
    yield CommEvent("reduce_scatter", unit.spec.name, "backward", _foreign(unit) * precision.wire.itemsize)
    of_replicas = 2 * (shard - shard // replicas)  # reduced among them, and gathered
    yield CommEvent("reduce_replicas", unit.spec.name, "backward", of_replicas * precision.wire.itemsize)
    if training.plan.mean is REPLICATED:
        yield _gather(unit, "backward", precision.grad)


def _gather(unit: PlannedUnit, phase: str, dtype: torch.dtype) -> CommEvent:
    return CommEvent("all_gather", unit.spec.name, phase, _foreign(unit) * dtype.itemsize)


def _foreign(unit: PlannedUnit) -> int:
    """Elements of a full buffer that are in the shards of other ranks."""
    return unit.layout.numel - unit.layout.shard_numel


# ZERO3 ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gathered:
    """The gathers of a step in which units take turns. `apart`: the units that get a buffer of their own when they are
    gathered, though they are to take turns."""

    events: Counter[CommEvent]
    apart: frozenset[str]

    @classmethod
    def of(cls, training: Training, micro_batches: int, calls: Calls | None, *, no_sync: bool) -> Self:
        """`calls`: as recorded; None: as assumed."""
        if training.plan.weights is not SHARDED or training.topology.num_shards == 1:
            return cls(Counter(), frozenset())
        units, stay = training.units, _places_that_stay(training, no_sync=no_sync)
        calls = assumed_calls(units) if calls is None else calls
        key = "gathers", _alike(units), frozenset(stay), micro_batches, calls.events
        found, apart = once(key, (), lambda: _replayed(units, calls, micro_batches, stay))
        events = Counter[CommEvent]()
        for number, phase, times in found:
            events[_gather(units[number], phase, units[number].spec.weight_dtype)] += times
        return cls(events, apart)


def _alike(units: Sequence[PlannedUnit]) -> Hashable:
    """Equal for units that are gathered at the same times (those of two precisions, in most models)."""
    requests = [unit.spec.weight_request(unit.layout.numel) for unit in units]
    queues = list(dict.fromkeys(request.queue for request in requests))
    specs = [unit.spec for unit in units]
    return tuple(
        (spec.name, spec.modules, spec.gathered_by, spec.trainable, spec.outer, one.alone, queues.index(one.queue))
        for spec, one in zip(specs, requests, strict=True)
    )


def _replayed(
    units: Sequence[PlannedUnit], calls: Calls, micro_batches: int, stay: Collection[int]
) -> tuple[list[tuple[int, str, int]], frozenset[str]]:
    """The gathers of a step, each with the number of its unit, phase, and how many; and `Gathered.apart`."""
    replay, number_of = Replay(units, calls), {unit.spec.name: number for number, unit in enumerate(units)}
    found, before = Counter[tuple[int, str]](), None
    for _ in range(STEPS_REPLAYED):  # what is gathered ahead depends on what has followed in the steps before
        found, before = Counter(), found
        for unit, phase, times in _gathered_in_a_step(replay, micro_batches):
            found[number_of[unit.spec.name], phase] += times
        replay.step(stay)
        if found == before:
            break
    return [(*key, times) for key, times in found.items()], frozenset(replay.apart())


def _gathered_in_a_step(replay: Replay, micro_batches: int) -> Iterator[tuple[PlannedUnit, str, int]]:
    """Unit, phase, how many gathers. A micro-batch that begins as the one before it gathers the same."""
    for number in range(micro_batches):
        begun = replay.state
        replay.micro_batch()
        times = micro_batches - number if replay.state == begun else 1
        yield from ((unit, phase, times * gathers) for unit, phase, gathers in replay.gathered())
        if times > 1:
            return


def assumed_calls(units: Sequence[PlannedUnit]) -> Calls:
    """Each module that forms a unit, or reads the parameters of a unit that is a part of it, is called once, in the
    order of registration, inside of the model's call; then backward comes to them in reverse, down to the first one
    that trains."""
    formed, paths = dict[str, list[PlannedUnit]](), {""}
    for unit in units:
        path, *_ = unit.spec.gathered_by or unit.spec.calls or unit.spec.modules
        formed.setdefault(path, []).append(unit)
        for path in unit.spec.modules:
            while path not in paths:
                paths.add(path)
                path = parent(path)
    number_of = {path: number for number, path in enumerate(sorted(paths))}
    events, grads, trains = [Event("begin", 0, 0, -1)], list[Event](), False
    for call, (path, of_path) in enumerate(formed.items(), 1):
        trains = trains or any(unit.spec.trainable for unit in of_path)
        if path:  # else the call of the model
            events += [Event("begin", number_of[path], call, -1), Event("end", number_of[path], call, -1)]
            grads += [Event("grad", number_of[path], call, 0)] if trains else []
    return Calls((*events, Event("end", 0, 0, -1), *reversed(grads)), number_of)


def _places_that_stay(training: Training, *, no_sync: bool) -> set[int]:
    """The numbers of the pool buffers of weights that stay held through a step (on a CPU, if they are small): what a
    frozen unit has gathered there stays valid."""
    if training.topology.device_type != "cpu":
        return set()
    buffers = training.pool(no_sync=no_sync)
    rests = {id(buffer) for buffer in resting(buffers, training.topology.device_type)}
    of_weights = [buffer for buffer in buffers if buffer.kind == "ring"]
    return {number for number, buffer in enumerate(of_weights) if id(buffer) in rests}


# The step -------------------------------------------------------------------------------------------------------------


def _to_owners_and_back(training: Training) -> Counter[CommEvent]:
    """Gradients to the owners of whole parameters, and main back: one exchange for each stepper and dtype."""
    events, rank = Counter[CommEvent](), training.rank
    if training.plan.main is REPLICATED:
        return events
    messages: dict[tuple[Hashable, torch.dtype], list[PlannedWhole]] = {}
    for whole in training.wholes():
        messages.setdefault((whole.stepper, whole.unit.main_dtype), []).append(whole)
    for (_, dtype), wholes in messages.items():
        forth = back = 0
        for whole in wholes:
            held = (whole.slot.world & whole.unit.main_part(rank)).numel
            forth += held * (whole.owner != rank)
            back += (whole.slot.world.numel - held) * (whole.owner == rank)
        for numel in (forth, back):
            events[CommEvent("all_to_all", "owners", "step", numel * dtype.itemsize)] += 1
    return events


def _control(training: Training, counts: StepCounts) -> Counter[CommEvent]:
    num_flags = sum(len(unit.layout.slots) for unit in training.units if unit.spec.trainable) + counts.num_scalers
    topology = training.topology
    num_ranks, transport = topology.num_shards * topology.num_replicas, topology.transport
    sent = [
        transport.sent_to_add_up(size, num_ranks)
        for size in packet_sizes(row_numbers(counts.num_groups, num_flags, num_ranks))
    ]
    return Counter(CommEvent("exchange", "control", "step", num_bytes) for num_bytes in sent)
