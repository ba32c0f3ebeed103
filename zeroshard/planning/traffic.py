"""Plans the collectives of a step on one rank: the events that `handle.comm_log` will have.

Under ZERO3, the pool buffers in which units take turns decide which units are gathered twice (see `runtime/gather.py`).
With a batch, units run as its trace has recorded (`replay.py`). Else it is assumed that they run once each, in the
order of registration, and backward in reverse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from zeroshard.comm.comm_log import CommEvent
from zeroshard.comm.packets import packet_sizes
from zeroshard.layout.pool_plan import PoolPlan
from zeroshard.placement import REPLICATED, SHARDED
from zeroshard.planner import PlannedUnit, PlannedWhole, Training, resting
from zeroshard.planning.activations import once
from zeroshard.planning.calls import Calls
from zeroshard.planning.replay import Replay
from zeroshard.step.control import row_numbers

STEPS_REPLAYED = 8
"""At most. In some models, whose units are parts of two blocks, two numbers of gathers take turns from step to step."""


@dataclass(frozen=True)
class Schedule:
    """The numbers of a step.

    Attributes:
        micro_batches: forward and backward passes.
        reductions: how many of them reduce gradients.
        num_groups: param groups of the optimizer.
        num_scalers: loss scales in use.
    """

    micro_batches: int = 1
    reductions: int = 1
    num_groups: int = 1
    num_scalers: int = 0


def step_events(training: Training, schedule: Schedule, gathers: Gathered | None = None) -> Counter[CommEvent]:
    """How often each event occurs in a step, from the second step on. `gathers`: if they are known from a trace."""
    events = Counter[CommEvent]()
    for unit in training.units:
        if unit.is_reduced:
            for event in _reduction(training, unit):
                events[event] += schedule.reductions
        if unit.spec.trainable and training.plan.weights is REPLICATED and training.plan.main is SHARDED:
            events[_gather(unit, "step", unit.spec.weight_dtype)] += 1
    if _gathers_weights(training):
        events.update(_gathers(training, schedule) if gathers is None else gathers.events)
    events.update(_to_owners_and_back(training))
    events.update(_control(training, schedule))
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


def _gathers(training: Training, schedule: Schedule) -> Counter[CommEvent]:
    """The gathers of a step in which units take turns: a unit is gathered if another one has its buffer."""
    place_of = _places(training.units)
    needs_backward = _reached_by_backward(training.units)
    stay = _places_that_stay(training, schedule)
    held: dict[Hashable, PlannedUnit] = {}
    events = Counter[CommEvent]()
    for _ in range(2):  # the result is the second step, which starts with the buffers as the first leaves them
        events = Counter()
        for _ in range(schedule.micro_batches):
            forward = [(unit, "forward") for unit in training.units]
            backward = [(unit, "backward") for unit in reversed(training.units) if needs_backward[unit.spec.name]]
            for unit, phase in [*forward, *backward]:
                place = place_of[unit.spec.name]
                if held.get(place) is not unit:
                    held[place] = unit
                    events[_gather(unit, phase, unit.spec.weight_dtype)] += 1
        held = {place: unit for place, unit in held.items() if place in stay and not unit.spec.trainable}
    return events


@dataclass(frozen=True)
class Gathered:
    """The gathers of a step in which modules are called as recorded. `apart`: the units that get a buffer of their own
    when they are gathered, though they are to take turns."""

    events: Counter[CommEvent]
    apart: frozenset[str]

    @classmethod
    def of(cls, training: Training, schedule: Schedule, calls: Calls) -> Self:
        if not _gathers_weights(training):
            return cls(Counter(), frozenset())
        units, stay = training.units, _places_that_stay(training, schedule)
        key = "gathers", _alike(units), frozenset(map(repr, stay)), schedule.micro_batches, calls.events
        found, apart = once(key, (), lambda: _replayed(units, calls, schedule.micro_batches, stay))
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
    units: Sequence[PlannedUnit], calls: Calls, micro_batches: int, stay: Collection[Hashable]
) -> tuple[list[tuple[int, str, int]], frozenset[str]]:
    """The gathers of a step, each with the number of its unit, phase, and how many; and `Gathered.apart`."""
    replay, number_of = Replay(units, calls), {unit.spec.name: number for number, unit in enumerate(units)}
    found, before = Counter[tuple[int, str]](), None
    for _ in range(STEPS_REPLAYED):  # what is gathered ahead depends on what has followed in the steps before
        found, before = Counter(), found
        for unit, phase, times in _gathered_in_a_step(replay, micro_batches):
            found[number_of[unit.spec.name], phase] += times
        replay.step(stay.__contains__)
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


def _gathers_weights(training: Training) -> bool:
    return training.plan.weights is SHARDED and training.topology.num_shards > 1


def _buffers_of(units: tuple[PlannedUnit, ...]) -> PoolPlan:
    return PoolPlan.for_weights(unit.spec.weight_request(unit.layout.numel) for unit in units)


def _places(units: tuple[PlannedUnit, ...]) -> dict[str, Hashable]:
    """Unit -> its pool buffer, its own or one that it shares: assigned in turn, in the order of first use."""
    shared = _buffers_of(units).shared
    asked = Counter[Hashable]()
    places: dict[str, Hashable] = {}
    for unit in units:
        request = unit.spec.weight_request(unit.layout.numel)
        places[unit.spec.name] = request.key
        if not request.alone:
            places[unit.spec.name] = request.queue, asked[request.queue] % shared[request.queue][0]
            asked[request.queue] += 1
    return places


def _places_that_stay(training: Training, schedule: Schedule) -> set[Hashable]:
    """The pool buffers of weights that stay held through a step (on a CPU, if they are small): what a frozen unit has
    gathered there stays valid."""
    if training.topology.device_type != "cpu":
        return set()
    plan = _buffers_of(training.units)
    places = [*plan.own, *((queue, n) for queue, (count, _) in plan.shared.items() for n in range(count))]
    buffers = training.pool(no_sync=schedule.micro_batches > schedule.reductions)
    rests = {id(buffer) for buffer in resting(buffers, training.topology.device_type)}
    of_weights = [buffer for buffer in buffers if buffer.kind == "ring"]
    return {place for place, buffer in zip(places, of_weights, strict=True) if id(buffer) in rests}


def _reached_by_backward(units: tuple[PlannedUnit, ...]) -> dict[str, bool]:
    """Unit -> whether backward reaches it: units that run before the first trainable one get no gradient. Units that
    the same modules form (the frozen and the trainable part of a block) are reached together."""
    trains = {unit.spec.calls for unit in units if unit.spec.trainable}
    reached, result = False, {}
    for unit in units:
        reached |= unit.spec.calls in trains
        result[unit.spec.name] = reached
    return result


# The step -------------------------------------------------------------------------------------------------------------


def _to_owners_and_back(training: Training) -> Counter[CommEvent]:
    """Gradients to the owners of whole parameters, and main back: one exchange for each stepper and dtype."""
    events, rank = Counter[CommEvent](), training.rank
    if training.plan.main is REPLICATED:
        return events
    messages: dict[tuple[Hashable, torch.dtype], list[PlannedWhole]] = {}
    for whole in training.wholes():
        messages.setdefault((whole.stepper, whole.unit.spec.precision.main_dtype), []).append(whole)
    for (_, dtype), wholes in messages.items():
        forth = back = 0
        for whole in wholes:
            held = (whole.slot.world & whole.unit.main_part(rank)).numel
            forth += held * (whole.owner != rank)
            back += (whole.slot.world.numel - held) * (whole.owner == rank)
        for numel in (forth, back):
            events[CommEvent("all_to_all", "owners", "step", numel * dtype.itemsize)] += 1
    return events


def _control(training: Training, schedule: Schedule) -> Counter[CommEvent]:
    num_flags = sum(len(unit.layout.slots) for unit in training.units if unit.spec.trainable) + schedule.num_scalers
    topology = training.topology
    num_ranks, transport = topology.num_shards * topology.num_replicas, topology.transport
    sent = [
        transport.sent_to_add_up(size, num_ranks)
        for size in packet_sizes(row_numbers(schedule.num_groups, num_flags, num_ranks))
    ]
    return Counter(CommEvent("exchange", "control", "step", num_bytes) for num_bytes in sent)
