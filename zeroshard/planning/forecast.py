"""`plan(model, configuration)` forecasts what one rank will hold in each phase, send in a step, and write.

It uses the layouts, pool plans and messages of the engine itself, so it equals `handle.memory()`, `handle.comm_log` and
the files of a checkpoint (tests check it). The model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from zeroshard.checkpoint.index import BLOCK_BYTES
from zeroshard.checkpoint.writer import FilePlan
from zeroshard.comm.comm_log import CommEvent
from zeroshard.errors import InvalidType, InvalidValue
from zeroshard.handle import handle_of
from zeroshard.model.managed import Managed
from zeroshard.model.units import UnitSpec, choose_units, plain_name
from zeroshard.placement import SHARDED
from zeroshard.planner import Bytes, PlannedBuffer, PlannedUnit, Training, fullest_rank, resting
from zeroshard.planning import whole_model
from zeroshard.planning.activations import Trace
from zeroshard.planning.configuration import Configuration
from zeroshard.planning.disk import Checkpoint
from zeroshard.planning.hints import MACHINE, WORTH_IT, Gathers, Hint, shards_to_use
from zeroshard.planning.moments import Moment, moments
from zeroshard.planning.once import Known, once, traced_once
from zeroshard.planning.optimizers import Needs, needs_of, num_groups
from zeroshard.planning.time_model import Machine, Span, StepTime, machine_named, message_seconds, step_time, timeline
from zeroshard.planning.traffic import Gathered, Schedule, step_events

T = TypeVar("T")


@dataclass(frozen=True)
class Phase:
    """The most that one rank holds in a phase.

    Attributes:
        held: by the engine, as `handle.memory()` counts it.
        copies: further bytes. full_state_dict: the returned values. save in the background: the copied values. save,
            load: one block. init, state_dict, close: how much more is there than `held` when most is there (see
            `whole_model.py`); none in "init" if the model is on the meta device.
    """

    held: Bytes
    copies: int = 0

    @property
    def num_bytes(self) -> int:
        return self.held.sum + self.copies


@dataclass(frozen=True)
class Forecast:
    """The forecast for one rank. Activations and inputs are included if the configuration has a workload. Memory that
    kernels allocate internally is not.

    Attributes:
        configuration: what was planned.
        num_parameters: elements of all parameters.
        num_units: number of units.
        buffers: bytes of the model's buffers (statistics, masks), which each rank holds beside all that is planned.
        ignored: bytes of the ignored parameters, and of their gradients where they train, which each rank holds beside
            all that is planned. (The state of the user's own optimizer of them comes in addition.)
        phases: by name: "init" (model sharded, optimizer built), "load" (into a model that has not been trained),
            "forward", "backward", "step", "between steps" (from the second step on), "full_state_dict", "state_dict",
            "close", each of these three "elsewhere" (with `device=` another device, or `rank0_only` on other ranks),
            "save", "save in the background".
        state: key ("exp_avg", ...) -> bytes of optimizer state, including scalars.
        padding, padding_of_all: bytes of weights, gradients and main between steps that belong to no parameter: on the
            rank, and on all ranks together.
        events: what the rank sends in a step, from the second step on: event, as in `handle.comm_log` -> how often.
        file: the rank's file in a checkpoint.
        checkpoint: the checkpoint that a save would write.
        training: the units and their layouts.
        again: plans the same model in another configuration.
        trace: of one micro-batch, if there is a workload.
        moments: of a step, if there is a workload.
        looked_up: names of the embeddings, whose rows are not multiplied with each token.
    """

    configuration: Configuration
    num_parameters: int
    num_units: int
    buffers: int
    ignored: int
    phases: Mapping[str, Phase]
    state: Mapping[str, int]
    padding: int
    padding_of_all: int
    events: Mapping[CommEvent, int]
    training: Training = field(repr=False)
    file: FilePlan = field(repr=False)
    checkpoint: Checkpoint = field(repr=False)
    again: Callable[[Configuration], Forecast] = field(repr=False)
    trace: Trace | None = None
    moments: tuple[Moment, ...] = ()
    looked_up: frozenset[str] = frozenset()

    @property
    def file_bytes(self) -> int:
        """Of the rank's file in a checkpoint."""
        return self.file.num_bytes

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Of all files of a checkpoint and their indices, without the manifest. (Takes as long as planning them.)"""
        return self.checkpoint.num_bytes(self.configuration.rank)

    @property
    def index_bytes(self) -> int:
        """Of the index of the rank's file in a checkpoint."""
        return self.file.index_bytes

    @property
    def manifest_bytes(self) -> int:
        """Of a checkpoint's manifest, without hyper-parameters, `extra` and versions. (Takes as long as writing it.)"""
        return self.checkpoint.manifest_bytes(self.configuration.rank)

    @property
    def padding_share(self) -> float:
        """The share of padding in the full buffers of all units: what an exchange moves for nothing."""
        numel = sum(unit.layout.numel for unit in self.training.units)
        return sum(one.numel for unit in self.training.units for one in unit.layout.padding) / max(numel, 1)

    @property
    def at_rest(self) -> Bytes:
        """The bytes held between steps."""
        return self.phases["between steps"].held

    @property
    def busiest(self) -> str:
        """The phase of a step in which the engine holds most."""
        return max(("forward", "backward", "step"), key=lambda name: self.phases[name].num_bytes)

    @property
    def peak(self) -> int:
        """The most bytes that the engine holds in a step."""
        return self.phases[self.busiest].num_bytes

    @property
    def whole_peak(self) -> int:
        """The most bytes in a step, with the activations and inputs of the workload, if there is one."""
        return max((moment.num_bytes for moment in self.moments), default=self.peak)

    def time(self, machine: Machine | str, tokens: int | None = None) -> StepTime:
        """An estimate of the time of a step, by a model (see `time_model.py`), not by a measurement.

        Args:
            machine: rates, or the name of a preset.
            tokens: in one micro-batch of this rank; None: those of the workload.

        Raises:
            ValueError: an unknown preset; the number of tokens is not known.
        """
        return self._by_the_model(step_time, machine, tokens)

    def timeline(self, machine: Machine | str, tokens: int | None = None) -> tuple[Span, ...]:
        """The same step in time, by the same model: computations and messages with their begin and end."""
        return self._by_the_model(timeline, machine, tokens)

    def _by_the_model(self, model: Callable[..., T], machine: Machine | str, tokens: int | None) -> T:
        workload = self.configuration.workload
        tokens = tokens or (workload.num_tokens if workload is not None else 0)
        if not tokens:
            raise InvalidValue("the time of a step depends on the tokens of a micro-batch: pass tokens=...")
        return model(
            self.training,
            self.events,
            machine_named(machine) if isinstance(machine, str) else machine,
            tokens=tokens,
            micro_batches=self.configuration.micro_batches,
            recompute=workload is not None and workload.recompute,
            looked_up=self.looked_up,
        )

    def hints(self, machine: Machine | str = MACHINE) -> tuple[Hint, ...]:
        """Advice: a 2-D mesh, if gathers over all ranks are mostly latency (see `hints.py`); usually none.

        Raises:
            ValueError: an unknown preset.
        """
        machine = machine_named(machine) if isinstance(machine, str) else machine
        gathers = Gathers.of(self.training, self.events)
        shards = shards_to_use(self.training, gathers, machine)
        if shards is None:
            return ()
        replicas = self.configuration.ranks // shards
        there = self.again(replace(self.configuration, replicas=replicas, workload=None))
        seconds, seconds_there = (message_seconds(one.training, one.events, machine) for one in (self, there))
        if seconds_there > WORTH_IT * seconds:
            return ()
        message, share = round(gathers.message(gathers.ranks)), gathers.latency_share(machine, gathers.ranks)
        return (Hint(replicas, shards, message, share, seconds, seconds_there, self.peak, there.peak),)

    @cached_property
    def fullest(self) -> Forecast:
        """The same on the rank that holds most, which may own more whole parameters than the others (see
        `fullest_rank`); this one if the ranks differ only by padding and scalars."""
        rank = self.configuration.rank - self.training.rank + fullest_rank(self.training)
        return self if rank == self.configuration.rank else self.again(replace(self.configuration, rank=rank))

    @property
    def sent(self) -> int:
        """Bytes sent in a step."""
        return sum(event.bytes * times for event, times in self.events.items())

    @property
    def largest_message(self) -> int:
        """The most bytes that one collective sends."""
        return max((event.bytes for event in self.events), default=0)


def plan(model: nn.Module, configuration: Configuration | None = None) -> Forecast:
    """Forecast what one rank will hold in each phase, send in a step and write into a checkpoint.

    Args:
        model: a plain model on any device; on the meta device nothing is allocated.
        configuration: None: the defaults.

    Raises:
        ValueError: as `shard` for units and precision; the optimizer is unknown, or refuses a parameter; the model is
            sharded already.
        TypeError: not a model, or not a Configuration.
    """
    found = Configuration() if configuration is None else configuration
    for value, kind in ((model, nn.Module), (found, Configuration)):
        if not isinstance(value, kind):
            call = "plan(model, Configuration(plan='zero3', ranks=8))"
            raise InvalidType(f"plan: expected a {kind.__name__}, as in {call}, found {value!r:.80}")
    with traced_once() as known:
        of = _planned(model, found)
        training, needs, workload = of.training, of.needs, found.workload
        trace = None if workload is None else workload.trace(model, of.specs, found.precision, found.device)
    schedule = _schedule(training, needs, found)
    gathered = Gathered.of(training, schedule, None if trace is None else trace.calls)
    order = () if trace is None else tuple(gradient.name for gradient in trace.gradients)
    training = replace(training, gradients=order, gathered_apart=gathered.apart)
    phases = of.phases_of(found, training)
    return Forecast(
        configuration=found,
        num_parameters=of.num_parameters,
        num_units=len(of.specs),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        ignored=sum(one.nbytes * (1 + one.requires_grad) for one in _left_alone(model, found)),
        phases=phases,
        state=of.state,
        padding=sum(_padding(unit, training.rank) for unit in training.units),
        padding_of_all=sum(map(_padding_of_all, training.units)),
        events=step_events(training, schedule, gathered),
        training=training,
        file=of.file,
        again=partial(_again, model, known),
        checkpoint=of.checkpoint,
        trace=trace,
        moments=() if trace is None else tuple(_moments(training, trace, phases, found)),
        looked_up=of.looked_up,
    )


@dataclass(frozen=True)
class _Planned:
    """What neither a workload nor the micro-batches of a step change. `phases`: whether micro-batches accumulate
    locally, the order of gradients, and the units that are gathered apart -> the phases."""

    specs: Sequence[UnitSpec]
    needs: Needs
    training: Training
    checkpoint: Checkpoint
    file: FilePlan
    num_parameters: int
    num_bytes_in_full: int
    state: Mapping[str, int]
    looked_up: frozenset[str]
    phases: dict[tuple[bool, tuple[str, ...], frozenset[str]], dict[str, Phase]] = field(default_factory=dict)

    def phases_of(self, configuration: Configuration, training: Training) -> dict[str, Phase]:
        key = configuration.accumulates_locally, training.gradients, training.gathered_apart
        if key not in self.phases:
            copies = Copies(self.num_bytes_in_full, sum(item.num_bytes for item in self.file.items))
            self.phases[key] = _phases(training, self.needs, configuration, copies)
        return self.phases[key]


def _planned(model: nn.Module, configuration: Configuration) -> _Planned:
    """In `traced_once` it is computed once for all workloads and micro-batches."""
    names = {"workload", "micro_batches", "reduce_every_micro_batch", "loss_scales"}
    values = [getattr(configuration, one.name) for one in fields(configuration) if one.name not in names]
    key = tuple(value if isinstance(value, (str, int)) else None for value in values)
    objects = [value for value in values if not isinstance(value, (str, int))]
    return once(("planned", *key), (model, *objects), lambda: _plan_engine(model, configuration))


def _plan_engine(model: nn.Module, found: Configuration) -> _Planned:
    parameters = Managed.without(model, found.ignored).parameters(model)
    if any(handle_of(parameter) is not None for parameter in parameters.values()):
        raise InvalidValue(
            "plan: this model is sharded already, and handle.memory() says what it holds: pass a plain one"
        )
    chosen = choose_units(model, found.units, found.precision, parameters, found.keep_gathered)
    specs = found.topology.units(chosen)
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    needs = once(
        ("needs", *trainable),
        (model, found.optimizer, found.group_of),
        lambda: needs_of(found.optimizer, trainable, found.group_of),
    )
    training = Training.of(specs, found.placements, found.topology, needs, found.rank % found.num_shards)
    sharded = {id(parameter) for parameter in parameters.values()}
    state = model.state_dict(keep_vars=True).items()
    buffers = {plain_name(name): value for name, value in state if id(value) not in sharded}
    checkpoint = Checkpoint(training, needs, buffers)
    return _Planned(
        specs=specs,
        needs=needs,
        training=training,
        checkpoint=checkpoint,
        file=checkpoint.file(found.rank),
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        num_bytes_in_full=sum(map(_bytes_in_full, training.units)) + sum(value.nbytes for value in buffers.values()),
        state=_state_by_entry(training, needs),
        looked_up=_looked_up(model, parameters),
    )


def _again(model: nn.Module, known: Known, configuration: Configuration) -> Forecast:
    with traced_once(known):
        return plan(model, configuration)


def _left_alone(model: nn.Module, configuration: Configuration) -> Iterator[nn.Parameter]:
    yield from Managed.without(model, configuration.ignored).left_alone(model).values()


def _looked_up(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The embeddings that are not the head as well: a head is another module's weight with as many rows."""
    tables, others = dict[int, int](), dict[int, int]()  # id of a weight -> its rows
    for module in model.modules():
        weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dim()]
        (tables if isinstance(module, nn.Embedding) else others).update({id(one): len(one) for one in weights})
    rows = set(others.values())
    found = {one for one, count in tables.items() if one not in others and count in rows}
    return frozenset(name for name, parameter in parameters.items() if id(parameter) in found)


def _moments(
    training: Training, trace: Trace, phases: Mapping[str, Phase], configuration: Configuration
) -> Iterator[Moment]:
    held = {name: phase.held for name, phase in phases.items()}
    return moments(training, trace, held, accumulates=configuration.micro_batches > 1)


class Copies(NamedTuple):
    """Bytes. `full`: of a full state dict; `written`: of this rank's values in a checkpoint."""

    full: int
    written: int


def _phases(training: Training, needs: Needs, configuration: Configuration, copies: Copies) -> dict[str, Phase]:
    pool = training.pool(no_sync=configuration.accumulates_locally)
    rests = resting(pool, training.topology.device_type)
    ring = [buffer for buffer in pool if buffer.kind == "ring"]
    others = [buffer for buffer in rests if buffer.kind != "ring"]
    stepped, units = training.stepped(), Bytes.total([Bytes(), *(unit.held(peak=False) for unit in training.units)])
    at_most = Bytes.total([Bytes(), *(unit.held(peak=True) for unit in training.units)])

    def together(of_units: Bytes, of_optimizer: Bytes, buffers: list[PlannedBuffer]) -> Bytes:
        pooled = (Bytes(**{buffer.kind: buffer.num_bytes}) for buffer in buffers)
        return Bytes.total([of_units, of_optimizer, *pooled])

    gathered = together(units, stepped, [*ring, *others])
    rest, block = together(units, stepped, rests), min(BLOCK_BYTES, copies.written)
    first = replace(training, optimizer=needs.before_a_step()).stepped()
    built = together(units, replace(stepped, state=first.state, scalars=first.scalars), [])
    return {
        "init": Phase(built, max(0, whole_model.sharding(training) - built.sum)),
        "load": Phase(together(units, stepped, []), block),
        "forward": Phase(gathered),
        "backward": Phase(together(at_most, stepped, pool)),
        "step": Phase(together(at_most, replace(stepped, scratch=stepped.scratch + training.temporaries()), rests)),
        "between steps": Phase(rest),
        "full_state_dict": Phase(gathered, copies.full),
        "full_state_dict elsewhere": Phase(gathered),
        "state_dict": Phase(rest, whole_model.state_dict(training, needs, elsewhere=False)),
        "state_dict elsewhere": Phase(rest, whole_model.state_dict(training, needs, elsewhere=True)),
        "close": Phase(rest, max(0, whole_model.closing(training, elsewhere=False) - rest.sum)),
        "close elsewhere": Phase(rest, max(0, whole_model.closing(training, elsewhere=True) - rest.sum)),
        "save": Phase(rest, block),
        "save in the background": Phase(rest, copies.written),
    }


def _schedule(training: Training, needs: Needs, configuration: Configuration) -> Schedule:
    scales = configuration.loss_scales
    if scales is None:
        scales = int(any(unit.spec.weight_dtype == torch.float16 for unit in training.units if unit.spec.trainable))
    reductions = 1 if configuration.accumulates_locally else configuration.micro_batches
    return Schedule(configuration.micro_batches, reductions, num_groups(needs), scales)


def _state_by_entry(training: Training, needs: Needs) -> dict[str, int]:
    found = {key: replace(training, optimizer=needs.only(key)).stepped() for key in needs.keys(training.units)}
    return {key: held.state + held.scalars for key, held in found.items() if held.state + held.scalars}


def _bytes_in_full(unit: PlannedUnit) -> int:
    """Bytes of the full weights, without padding."""
    return unit.layout.slots_numel * unit.spec.weight_dtype.itemsize


def _padding(unit: PlannedUnit, rank: int) -> int:
    layout = unit.layout
    in_full = layout.numel - layout.slots_numel
    in_shard = layout.shard_numel - sum(fragment.world.numel for fragment in layout.fragments(rank))
    return _bytes_of_empty(unit, in_full, in_shard)


def _padding_of_all(unit: PlannedUnit) -> int:
    """Of all ranks: the shards of a replica have the padding of one full buffer together."""
    in_full = unit.layout.numel - unit.layout.slots_numel
    return _bytes_of_empty(unit, unit.num_ranks * in_full, unit.num_ranks // unit.layout.num_shards * in_full)


def _bytes_of_empty(unit: PlannedUnit, in_full: int, in_shard: int) -> int:
    """Between steps, of so many elements in a full buffer or in a shard, whichever each kind is."""
    layout, held = unit.layout, unit.held(peak=False)
    total = 0
    for kind in ("weights", "grads", "main"):
        is_shard = getattr(unit.plan, kind) is SHARDED
        numel, empty = (layout.shard_numel, in_shard) if is_shard else (layout.numel, in_full)
        total += getattr(held, kind) // numel * empty if numel else 0
    return total
