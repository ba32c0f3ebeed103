"""What a page shows of plans, as plain records: collected from the planner, and kept in plan files.

A page draws these records and computes no bytes of its own, so its numbers are the planner's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zeroshard.errors import InvalidValue
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import BufferLayout, Slot
from zeroshard.placement import PLANS, Placement, Plan
from zeroshard.planned.parts import Bytes, PlannedUnit, Topology
from zeroshard.planned.training import Training
from zeroshard.planning.forecast import Forecast
from zeroshard.planning.moments import PHASES, Moment
from zeroshard.planning.once import traced_once
from zeroshard.planning.time_model import Span, StepTime

SWEPT = 64
"""Bytes per rank are planned up to that many shards, and up to those of the configuration."""


@dataclass(frozen=True)
class UnitMap:
    """Units of equal layout.

    Attributes:
        names: of the units.
        layout: the slots have the names of the first unit's parameters, relative to the unit.
        itemsizes: bytes of an element of weights, gradients and main; 0: there is no such buffer.
    """

    names: tuple[str, ...]
    layout: BufferLayout
    itemsizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.names or len(self.itemsizes) != 3:
            raise InvalidValue(f"expected units and three sizes, found {len(self.names)} and {len(self.itemsizes)}")

    @property
    def title(self) -> str:
        first, last, number = self.names[0], self.names[-1], len(self.names)
        return first if number == 1 else f"{first} … {last} ({number} units)"


@dataclass(frozen=True)
class Held:
    """What one rank holds in a phase. `copies`: bytes beside the engine's."""

    phase: str
    engine: Bytes
    copies: int


@dataclass(frozen=True)
class Message:
    """A collective of a step: `times` messages in which the rank sends `num_bytes` each."""

    op: str
    unit: str
    phase: str
    num_bytes: int
    times: int


@dataclass(frozen=True)
class Timeline:
    """A step in time on a machine, by the model of `planning/time_model.py`."""

    machine: str
    time: StepTime
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Planned:
    """One configuration and its forecast, for one rank.

    Attributes:
        weights, grads, main: the placements of the plan ("replicated", "sharded" or "partial").
        external_gradients: as in `Plan`.
        units: how many.
        sent: bytes of a step.
        peak: the most bytes of the engine.
        whole_peak: with activations and inputs, if they are planned.
        inputs, activations: bytes; None: not planned.
        moments: of a step, if activations are planned.
    """

    plan: str
    precision: str
    optimizer: str
    ranks: int
    replicas: int
    device: str
    micro_batches: int
    rank: int
    weights: str
    grads: str
    main: str
    external_gradients: bool
    units: int
    held: tuple[Held, ...]
    padding: int
    sent: int
    largest_message: int
    checkpoint_bytes: int
    peak: int
    whole_peak: int
    inputs: int | None
    activations: int | None
    maps: tuple[UnitMap, ...]
    messages: tuple[Message, ...]
    moments: tuple[Moment, ...]
    timeline: Timeline | None

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.ranks < 1 or self.ranks % self.replicas:
            raise InvalidValue(f"{self.ranks} ranks do not divide into {self.replicas} replicas")
        placements = {placement.value for placement in Placement}
        if unknown := {self.weights, self.grads, self.main} - placements:
            raise InvalidValue(f"expected placements of {sorted(placements)}, found {min(unknown)[:60]!r}")
        if missing := set(PHASES) - {held.phase for held in self.held}:
            raise InvalidValue(f"expected what is held in each phase, found none for {min(missing)!r}")

    @property
    def num_shards(self) -> int:
        return self.ranks // self.replicas

    @property
    def title(self) -> str:
        mesh = f"{self.replicas} x {self.num_shards}" if self.replicas > 1 else f"{self.ranks}"
        return f"{self.plan}, {self.precision}, {mesh} ranks, {self.optimizer}"

    def in_phase(self, phase: str) -> Bytes:
        """What the engine holds in that phase."""
        return next(held.engine for held in self.held if held.phase == phase)

    @property
    def at_rest(self) -> Bytes:
        return self.in_phase("between steps")

    @property
    def transient(self) -> int:
        """The most bytes of full-size buffers, buckets and scratch."""
        return max(held.engine.transient for held in self.held)


@dataclass(frozen=True)
class Point:
    """Bytes on one rank of `ranks`: between steps, and the most in a step. Without activations."""

    ranks: int
    at_rest: int
    at_most: int


@dataclass(frozen=True)
class Curve:
    """Bytes per rank of one plan against the number of ranks."""

    plan: str
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise InvalidValue("expected points of the curve, found none")


@dataclass(frozen=True)
class Facts:
    """Everything that a page shows of plans. `model`: what the user called it; `curves`: of all plans."""

    model: str
    num_parameters: int
    planned: tuple[Planned, ...]
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        ranks = {tuple(point.ranks for point in curve.points) for curve in self.curves}
        if len(ranks) > 1:
            raise InvalidValue("expected curves over the same numbers of ranks, found different ones")


def facts_of(model: str, forecasts: Sequence[Forecast], machine: str | None = None) -> Facts:
    """Collect the facts of some forecasts of one model. The curves are those of the first one's configuration.

    Args:
        machine: a preset of the time model; used where a batch is planned.
    """
    first = forecasts[0]
    planned = tuple(_planned(forecast, machine) for forecast in forecasts)
    return Facts(model, first.num_parameters, planned, _curves(first))


def _planned(forecast: Forecast, machine: str | None) -> Planned:
    chosen, plan, trace = forecast.configuration, forecast.configuration.placements, forecast.trace
    timeline = None
    if machine is not None and trace is not None:
        timeline = Timeline(machine, forecast.time(machine), forecast.timeline(machine))
    return Planned(
        plan=plan.name,
        precision=str(chosen.precision or "as the model"),
        optimizer=str(chosen.optimizer),
        ranks=chosen.ranks,
        replicas=chosen.replicas,
        device=chosen.device,
        micro_batches=chosen.micro_batches,
        rank=chosen.rank,
        weights=plan.weights.value,
        grads=plan.grads.value,
        main=plan.main.value,
        external_gradients=plan.external_gradients,
        units=forecast.num_units,
        held=tuple(Held(name, phase.held, phase.copies) for name, phase in forecast.phases.items()),
        padding=forecast.padding,
        sent=forecast.sent,
        largest_message=forecast.largest_message,
        checkpoint_bytes=forecast.checkpoint_bytes,
        peak=forecast.peak,
        whole_peak=forecast.whole_peak,
        inputs=None if trace is None else trace.inputs,
        activations=None if trace is None else trace.peak,
        maps=tuple(_maps(forecast.training)),
        messages=tuple(Message(*event, times) for event, times in forecast.events.items()),
        moments=forecast.moments,
        timeline=timeline,
    )


def _maps(training: Training) -> Iterator[UnitMap]:
    """The layouts of the units, each once. (One of empty parameters alone has nothing to draw.)"""
    names: dict[tuple[BufferLayout, tuple[int, ...]], list[str]] = {}
    for unit in (one for one in training.units if one.layout.numel):
        names.setdefault((_relative(unit), unit.itemsizes), []).append(unit.spec.name)
    for (layout, itemsizes), of_units in names.items():
        yield UnitMap(tuple(of_units), layout, itemsizes)


def _relative(unit: PlannedUnit) -> BufferLayout:
    """The layout, with the names of slots relative to the unit."""
    path = unit.spec.name.partition(" ")[0] + "."
    is_inside = all(slot.name.startswith(path) for slot in unit.layout.slots)
    cut = len(path) if is_inside else 0
    slots = tuple(Slot(s.name[cut:], s.shape, Interval(s.world.start, s.world.stop)) for s in unit.layout.slots)
    return BufferLayout(slots, unit.layout.numel, unit.layout.num_shards)


def _curves(forecast: Forecast) -> tuple[Curve, ...]:
    """Bytes per rank of each plan, against the number of ranks, with as many replicas as are planned."""
    own = forecast.training.topology
    topologies = [replace(own, num_shards=number) for number in _numbers_of_shards(own.num_shards)]
    with traced_once():
        return tuple(
            Curve(name, tuple(_point(forecast, plan, one) for one in topologies)) for name, plan in PLANS.items()
        )


def _point(forecast: Forecast, plan: Plan, topology: Topology) -> Point:
    there, no_sync = forecast.elsewhere(plan, topology), forecast.configuration.accumulates_locally
    ranks = topology.num_shards * topology.num_replicas
    return Point(ranks, there.held(no_sync=no_sync).sum, there.most(no_sync=no_sync))


def _numbers_of_shards(shards: int) -> list[int]:
    """Powers of two up to SWEPT, then of four up to `shards`, and `shards` itself."""
    found, number = {shards}, 1
    while number <= max(SWEPT, shards):
        found.add(number)
        number *= 2 if number < SWEPT else 4
    return sorted(found)
