"""From an open checkpoint into a model and its optimizers: what is sharded, interval by interval, and the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.fit import Pairs, StateName, adopted, groups_of, state_names
from zeroshard.checkpoint.items import Extra, StateKinds, names_of, set_random_state
from zeroshard.checkpoint.manifest import CheckpointError
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.reader import Reader
from zeroshard.engine import Engine
from zeroshard.flat_step import FlatStep
from zeroshard.interval import Interval
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.optimizer_state import Elementwise, load_state
from zeroshard.owner_step import OwnerStep
from zeroshard.precision import precision_for
from zeroshard.state_view import stepped
from zeroshard.unit import Unit
from zeroshard.values import decode

# Before anything is changed -------------------------------------------------------------------------------------------


def rehearse(reader: Reader, engine: Engine, pairs: Pairs, meeting: Meeting) -> None:
    """Read, and so check, all that this rank is going to take."""

    def look(part: Interval, values: Tensor) -> None:
        meeting.beat()

    rank, tensors = engine.collectives.mesh.world.rank, reader.manifest.tensors
    owned = {
        one.slot.name
        for optimizer, _ in pairs
        for stepper in optimizer.steppers
        if isinstance(stepper, OwnerStep)
        for one, _ in stepper.owned()
    }
    for optimizer, saved in pairs:
        names = names_of(engine)
        owned |= {names[id(p)] for p in [*adopted(optimizer, saved), *unstepped(optimizer)]}
    state = state_names(reader.manifest) if pairs else {}
    parts = {
        fragment.slot.name: fragment
        for unit in engine.units
        for fragment in unit.layout.fragments_in(_taken_by_this_rank(unit))
    }
    for name in parts.keys() | owned:
        for tensor in (f"model/{name}", *(one.tensor for one in state.get(name, []))):
            if (entry := tensors.get(tensor)) is not None:
                cut = name in parts and name not in owned and entry.shape == parts[name].slot.shape
                reader.read(tensor, parts[name].param if cut else Interval(0, entry.numel), look)
    unsharded = {f"model/{name}" for name in [*engine.unsharded_state(), *engine.untaken]}
    for tensor, entry in tensors.items():
        if tensor in unsharded or tensor.startswith((f"rank/{rank}/", "extra/")):
            reader.read(tensor, Interval(0, entry.numel), look)


# What is sharded ------------------------------------------------------------------------------------------------------


def take_weights(reader: Reader, engine: Engine, meeting: Meeting) -> None:
    """Main, and frozen weights, of this rank. The weights of the others follow main later."""
    for unit in engine.units:
        for fragment in unit.layout.fragments_in(_taken_by_this_rank(unit)):
            name = f"model/{fragment.slot.name}"
            if name in reader.manifest.tensors:
                reader.read(name, fragment.param, partial(_set_part, unit, fragment.slot.world.start, meeting))


def _taken_by_this_rank(unit: Unit) -> Interval:
    return unit.own_shard() if unit.main is None else unit.main.interval


def _set_part(unit: Unit, origin: int, meeting: Meeting, param: Interval, values: Tensor) -> None:
    unit.set_part(Interval(origin + param.start, origin + param.stop), values)
    meeting.beat()


def unstepped(optimizer: ShardedOptimizer) -> list[nn.Parameter]:
    """Parameters of an optimizer that are frozen: their state waits, in full."""
    done = stepped(optimizer.steppers)
    return [p for group in optimizer.param_groups for p in group["params"] if p not in done]


def take_optimizer(reader: Reader, optimizer: ShardedOptimizer, saved: Any, meeting: Meeting) -> None:
    """State of the pieces that this rank steps, of the parameters that it owns, and of those that are frozen."""
    names, own_names = state_names(reader.manifest), names_of(optimizer.engine)
    optimizer.adopt(adopted(optimizer, saved))
    optimizer.waiting.clear()
    kinds_of = StateKinds(optimizer)
    main_of = {id(p): unit.spec.precision.main_dtype for unit in optimizer.engine.units for p in unit.parameters}
    for parameter in unstepped(optimizer):
        name = own_names[id(parameter)]
        main = main_of.get(id(parameter)) or precision_for(parameter.dtype, None).main_dtype
        into = Into(name, main, parameter.device, kinds_of.options(parameter), kinds_of[parameter])
        if waiting := _state(reader, names, into, whole=True):
            optimizer.waiting[parameter] = waiting
        meeting.beat()
    for stepper in optimizer.steppers:
        if isinstance(stepper, FlatStep):
            state: dict[Tensor, dict[str, Any]] = {}
            for unit, groups in stepper.groups.items():
                for index, group in enumerate(groups):
                    if group is not None:
                        into = _into(unit, index, optimizer.param_groups[group], stepper.elementwise_state(group))
                        state[unit.parameters[index]] = _state(reader, names, into, whole=False)
                        meeting.beat()
            load_state(stepper, state)
        elif isinstance(stepper, OwnerStep):
            for one, _ in list(stepper.owned()):
                options, kinds = optimizer.param_groups[one.group], stepper.elementwise_state(one.group)
                stepper.set_state(one, _state(reader, names, _into(one.unit, one.index, options, kinds), whole=True))
                meeting.beat()


class Into(NamedTuple):
    """Whose state is taken. `main`: the dtype of main; `kinds`: what the class says is elementwise (whoever wrote the
    step may not have known it of a parameter of a single element)."""

    name: str
    main: torch.dtype
    device: torch.device
    options: Mapping[str, Any]
    kinds: Mapping[str, bool]


def _into(unit: Unit, index: int, options: Mapping[str, Any], kinds: Mapping[str, bool]) -> Into:
    assert unit.main is not None
    return Into(unit.layout.slots[index].name, unit.main.dtype, unit.main.weights.device, options, kinds)


def _state(reader: Reader, names: Mapping[str, list[StateName]], into: Into, *, whole: bool) -> dict[str, Any]:
    """The state of one parameter: whole, or with something to read it by in place of what is elementwise."""
    tensors, device, kinds = reader.manifest.tensors, into.device, into.kinds
    main = tensors.get(f"model/{into.name}")
    on_device = bool(into.options.get("capturable") or into.options.get("fused"))  # as torch keeps its counts of steps
    state: dict[str, Any] = {}
    for one in names.get(into.name, []):
        dtype, numel = tensors[one.tensor].dtype, tensors[one.tensor].numel
        if one.kind in ("number", "value"):
            state[one.key] = plain_value(reader, one)
            continue
        elementwise = kinds.get(one.key, one.kind == "optimizer") if numel == 1 else one.kind == "optimizer"
        if main is not None and dtype == main.dtype and elementwise:
            dtype = into.main  # moments are kept as main is
        if elementwise and not whole:
            state[one.key] = Elementwise(dtype, partial(reader.read_into, one.tensor))
        else:
            value = reader.tensor(one.tensor)
            state[one.key] = value.to(device, dtype) if elementwise or on_device else value
    return state


# The rest -------------------------------------------------------------------------------------------------------------


def take_rest(reader: Reader, engine: Engine, pairs: Pairs, extra: Extra) -> None:
    """Buffers, hyper-parameters, loss scales, `extra`, random numbers. Where ranks had their own, and there are as many
    as then, each takes its own, else rank 0's; random numbers go to every rank that there was."""
    world, values = engine.collectives.mesh.world, reader.manifest.values
    own = rank_state(reader, world.rank)
    same = own if values.get("world_size") == world.size else {}
    for name, value in engine.unsharded_state().items():
        if f"model/{name}" in reader.manifest.tensors:
            mine = same.get("buffers", {}).get(name)
            value.copy_(reader.tensor(f"model/{name}") if mine is None else mine)
    for name, parameter in engine.untaken.items():
        if f"model/{name}" in reader.manifest.tensors:
            parameter.copy_(reader.tensor(f"model/{name}"))
    names = names_of(engine)
    for optimizer, saved in pairs:
        for group, saved_group in zip(optimizer.param_groups, groups_of(saved), strict=False):
            if [names[id(parameter)] for parameter in group["params"]] == saved_group["params"]:
                _set_options(group, decode(saved_group["options"], reader.tensor))
        optimizer.agreement.half_done = False
        optimizer.scaling.load_state_dict(decode(saved.get("loss_scale", {}), reader.tensor))
    if extra:
        states = same["extra"] if "extra" in same else decode(values.get("extra", {}), reader.tensor)
        for key, stateful in extra.items():
            if key in states:
                stateful.load_state_dict(states[key])
    if "random" in own:
        set_random_state(own["random"])


def rank_state(reader: Reader, rank: int) -> dict[str, Any]:
    """What is stored for one rank alone; empty where there was no such rank."""
    name = f"rank/{rank}/state"
    if name not in reader.manifest.tensors:
        return {}
    try:
        state = decode(json.loads(bytes(reader.tensor(name).tolist())), reader.tensor)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the state of rank {rank} is damaged: {str(error)[:200]}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"the state of rank {rank} is damaged")
    return state


def plain_value(reader: Reader, one: StateName) -> Any:
    """Of an optimizer's state, what is no tensor.

    Raises:
        CheckpointError: bytes that are no JSON.
    """
    stored = reader.tensor(one.tensor)
    if one.kind == "number":
        return stored.item()
    try:
        return decode(json.loads(bytes(stored.tolist())), reader.tensor)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{one.tensor} is damaged: {str(error)[:200]}") from None


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        now = group.get(key)
        if isinstance(now, (Tensor, int, float)) and not isinstance(value, (int, float, type(None))):
            raise CheckpointError(f"the hyper-parameter {key} is {now!r} here, and {value!r:.100} in the checkpoint")
        # A learning rate that is a tensor stays one; a new one: groups may share theirs.
        group[key] = torch.full_like(now, value) if isinstance(now, Tensor) and value is not None else value
