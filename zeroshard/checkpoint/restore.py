"""Restores an open checkpoint into a model and its optimizers: sharded values by intervals, then the unsharded ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from zeroshard.checkpoint.compatibility import Pairs, adopted
from zeroshard.checkpoint.contents import Extra, asking
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.rank_state import rank_state, set_random_state
from zeroshard.checkpoint.reader import Reader
from zeroshard.checkpoint.saved_state import (
    SavedOptimizer,
    names_of,
    option_here,
    saved_entries,
    saved_groups,
    saved_options,
)
from zeroshard.comm.ranges import phase
from zeroshard.io.values import decode
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import Fragment
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.runtime.engine import Engine
from zeroshard.step.stepper import SavedTensor, stepped
from zeroshard.storage.unit import Unit

# Before anything is changed -------------------------------------------------------------------------------------------


@phase("load: preflight")
def preflight(reader: Reader, engine: Engine, pairs: Pairs, meeting: Meeting) -> None:
    """The first reading: read and check everything that this rank is going to restore.

    Raises:
        CheckpointError: a file is damaged.
        Stopped: another rank has found damage.
    """
    rank, tensors = engine.collectives.mesh.world.rank, reader.manifest.tensors

    def check(name: str, interval: Interval | None = None) -> None:
        reader.read(name, interval or Interval(0, tensors[name].numel), lambda part, values: meeting.beat())

    for name, _, fragment in _weights_of_this_rank(reader, engine):
        check(name, fragment.param)
    entries, names = saved_entries(reader.manifest) if pairs else {}, names_of(engine)
    for optimizer, saved in pairs:
        for need in chain.from_iterable(stepper.state.needs() for stepper in optimizer.steppers):
            for entry in entries.get(need.slot.name, []):
                check(entry.tensor, need.interval if tensors[entry.tensor].shape == need.slot.shape else None)
        for parameter in [*adopted(optimizer, saved), *_unstepped(optimizer)]:
            for entry in entries.get(names[id(parameter)], []):
                check(entry.tensor)
    unsharded = {f"model/{name}" for name in [*engine.unsharded_state(), *engine.untaken]}
    for name in tensors:
        if name in unsharded or name.startswith((f"rank/{rank}/", "extra/", "group/")):
            check(name)


# What is sharded ------------------------------------------------------------------------------------------------------


def restore_weights(reader: Reader, engine: Engine, meeting: Meeting) -> None:
    """Restore main and frozen weights of this rank. Weights that rest in full are gathered later."""
    # Count on every rank, also ranks that restore nothing of a unit: `edits` must stay the same on all ranks.
    for unit in engine.units:
        unit.edits += 1
    for name, unit, fragment in _weights_of_this_rank(reader, engine):
        reader.read(name, fragment.param, partial(_set_part, unit, fragment.slot.world.start, meeting))


def _weights_of_this_rank(reader: Reader, engine: Engine) -> Iterator[tuple[str, Unit, Fragment]]:
    for unit in engine.units:
        for fragment in unit.layout.fragments_in(unit.updated):
            if (name := f"model/{fragment.slot.name}") in reader.manifest.tensors:
                yield name, unit, fragment


def _set_part(unit: Unit, origin: int, meeting: Meeting, param: Interval, values: Tensor) -> None:
    unit.write(Interval(origin + param.start, origin + param.stop), values)
    meeting.beat()


def restore_optimizer(reader: Reader, optimizer: ShardedOptimizer, saved: Any, meeting: Meeting) -> None:
    """Restore the state of parameters that this rank steps, and of all frozen ones."""
    optimizer.adopt(adopted(optimizer, saved))
    found = SavedOptimizer(reader, optimizer, meeting.beat)
    optimizer.waiting.clear()
    for parameter in _unstepped(optimizer):
        if state := found.state_of(parameter):
            optimizer.waiting[parameter] = {
                key: item.whole(parameter.device) if isinstance(item, SavedTensor) else item
                for key, item in state.items()
            }
    for stepper in optimizer.steppers:
        stepper.state.load({need.parameter: found.state_of(need.parameter) for need in stepper.state.needs()})


def _unstepped(optimizer: ShardedOptimizer) -> list[nn.Parameter]:
    """The frozen parameters of an optimizer, whose state is kept in full until they train."""
    done = stepped(optimizer.steppers)
    return [p for group in optimizer.param_groups for p in group["params"] if p not in done]


# The rest -------------------------------------------------------------------------------------------------------------


def restore_rest(reader: Reader, engine: Engine, pairs: Pairs, extra: Extra) -> None:
    """Restore buffers (each rank's own are in the manifest already, see `under_names_here`), extra states,
    hyper-parameters, loss scales, `extra` and random state. If `extra` differed between ranks, each rank takes its own
    if the number of ranks is the same, else rank 0's. A rank takes the random state of the same rank, if there was
    one."""
    world, values = engine.collectives.mesh.world, reader.manifest.values
    own = rank_state(reader, world.rank)
    same = own if values.get("world_size") == world.size else {}
    with_extra_state = engine.plain.extra_states()
    for name, value in engine.unsharded_state().items():
        if f"model/{name}" in reader.manifest.tensors:
            found = reader.tensor(f"model/{name}")
            if name in with_extra_state:
                with asking(f"set_extra_state() for {name}"):
                    with_extra_state[name].set_extra_state(found)
            else:
                value.copy_(found)
    for name, parameter in engine.untaken.items():
        if f"model/{name}" in reader.manifest.tensors:
            parameter.copy_(reader.tensor(f"model/{name}"))
    names, device = names_of(engine), engine.collectives.device
    for optimizer, saved in pairs:
        classes = optimizer.groups.classes.of_groups
        for group, of_class, saved_group in zip(optimizer.param_groups, classes, saved_groups(saved), strict=False):
            if [names[id(parameter)] for parameter in group["params"]] == saved_group["params"]:
                options = saved_options(saved_group, of_class, reader.tensor)
                group.update({key: option_here(group.get(key), value, device) for key, value in options.items()})
        # A failed update may have left main partly updated (`Agreement.updating`): now all of it has been replaced.
        optimizer.agreement.half_done = False
        optimizer.scaling.load_state_dict(decode(saved.get("loss_scale", {}), reader.tensor))
    if extra:
        states = same["extra"] if "extra" in same else decode(values.get("extra", {}), reader.tensor)
        for key, stateful in extra.items():
            if key in states:
                with asking(f"load_state_dict() of extra {key!r}"):
                    stateful.load_state_dict(states[key])
    if "random" in own:
        set_random_state(own["random"])
