"""`plan(model, configuration)` forecasts what one rank will hold in each phase, send in a step, and write.

It uses the layouts, pool plans and messages of the engine itself, so it equals `handle.memory()`, `handle.comm_log` and
the files of a checkpoint (tests check it). The model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.index import BLOCK_BYTES
from zeroshard.checkpoint.writer import FilePlan
from zeroshard.errors import InvalidType, InvalidValue
from zeroshard.handle import handle_of
from zeroshard.model.managed import Managed
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.model.units import choose_units
from zeroshard.placement import SHARDED
from zeroshard.planned.parts import Bytes, PlannedBuffer, PlannedUnit
from zeroshard.planned.training import Training, resting
from zeroshard.planning import whole_model
from zeroshard.planning.configuration import Configuration
from zeroshard.planning.disk import Checkpoint
from zeroshard.planning.forecast import Forecast, Phase
from zeroshard.planning.moments import Moment, moments
from zeroshard.planning.once import Known, once, traced_once
from zeroshard.planning.optimizers import Needs, needs_of, num_groups
from zeroshard.planning.traffic import Gathered, StepCounts, step_events
from zeroshard.runtime.plain_model import PlainModel


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
    found = as_configuration("plan", model, configuration)
    with traced_once() as known:
        of = _planned(model, found)
        training, needs, workload = of.training, of.needs, found.workload
        trace = None if workload is None else workload.trace(model, of.specs, found.precision, found.device)
    counts = _counts(training, needs, found)
    calls = None if trace is None else trace.calls
    gathered = Gathered.of(training, found.micro_batches, calls, no_sync=found.accumulates_locally)
    order = () if trace is None else tuple(gradient.name for gradient in trace.gradients)
    training = replace(training, gradients=order, gathered_apart=gathered.apart)
    phases, of_step = of.phases_of(found, training), tuple[Moment, ...]()
    if trace is not None:
        held = {name: phase.held for name, phase in phases.items()}
        of_step = tuple(moments(training, trace, held, accumulates=found.micro_batches > 1))
    ignored = Managed.without(model, found.ignored).left_alone(model).values()
    return Forecast(
        configuration=found,
        num_parameters=of.num_parameters,
        num_units=len(of.specs),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        ignored=sum(one.nbytes * (1 + one.requires_grad) for one in ignored),
        phases=phases,
        state=of.state,
        padding=sum(_padding(unit, training.rank) for unit in training.units),
        padding_of_all=sum(map(_padding_of_all, training.units)),
        events=step_events(training, counts, gathered),
        chosen=of.chosen,
        training=training,
        file=of.file,
        again=partial(_again, model, known),
        checkpoint=of.checkpoint,
        trace=trace,
        moments=of_step,
        looked_up=of.looked_up,
    )


def as_configuration(what: str, model: object, configuration: object) -> Configuration:
    """The configuration; None: the defaults.

    Raises:
        TypeError: `model` is none, or `configuration`. `what`: the call that was given them.
    """
    found = Configuration() if configuration is None else configuration
    for value, kind in ((model, nn.Module), (found, Configuration)):
        if not isinstance(value, kind):
            values = "model, " if what == "plan" else "model, 80 * 10**9, "
            call = f"{what}({values}Configuration(plan='zero3', ranks=8))"
            raise InvalidType(f"{what}: expected a {kind.__name__}, as in {call}, found {value!r:.80}")
    assert isinstance(found, Configuration)
    return found


@dataclass(frozen=True)
class _Planned:
    """What neither a workload nor the micro-batches of a step change. `phases`: whether micro-batches accumulate
    locally, the order of gradients, and the units that are gathered apart -> the phases."""

    chosen: Sequence[UnitSpec]
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
    managed = Managed.without(model, found.ignored)
    parameters = managed.parameters(model)
    if any(handle_of(parameter) is not None for parameter in parameters.values()):
        raise InvalidValue(
            "plan: this model is sharded already, and handle.memory() says what it holds: pass a plain one"
        )
    chosen = choose_units(model, found.units, found.precision, parameters, found.keep_gathered)
    specs = found.topology.units(chosen)
    trainable = (name for name, parameter in parameters.items() if parameter.requires_grad)
    in_parts = found.placements.main is SHARDED and found.num_shards > 1
    needs = once(
        ("needs", in_parts, *trainable),
        (model, found.optimizer, found.group_of),
        lambda: needs_of(found.optimizer, parameters, found.group_of, sharded=in_parts),
    )
    training = Training.of(specs, found.placements, found.topology, needs, found.rank % found.num_shards)
    sharded = {id(parameter) for parameter in parameters.values()}
    state = PlainModel(model, managed).objects().items()  # of extra states a save takes tensors alone
    buffers = {name: one for name, one in state if isinstance(one, Tensor) and id(one) not in sharded}
    checkpoint = Checkpoint(training, needs, buffers)
    return _Planned(
        chosen=chosen,
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


def _looked_up(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The embeddings that are not the head as well. A head is another module's weight with as many rows as the largest
    of them. If there is none, the model may multiply by that one by hand."""
    tables, others = dict[int, int](), dict[int, int]()  # id of a weight -> its rows
    for module in model.modules():
        weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dim()]
        (tables if isinstance(module, nn.Embedding) else others).update({id(one): len(one) for one in weights})
    largest = max(tables.values(), default=0)
    has_head = bool(tables.keys() & others.keys()) or largest in others.values()
    found = {one for one, count in tables.items() if one not in others and (has_head or count < largest)}
    return frozenset(name for name, parameter in parameters.items() if id(parameter) in found)


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


def _counts(training: Training, needs: Needs, configuration: Configuration) -> StepCounts:
    scales = configuration.loss_scales
    if scales is None:
        scales = int(any(unit.spec.weight_dtype == torch.float16 for unit in training.units if unit.spec.trainable))
    reductions = 1 if configuration.accumulates_locally else configuration.micro_batches
    return StepCounts(configuration.micro_batches, reductions, num_groups(needs), scales)


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
