"""Reads and loads the full model under the plain model's names, one unit at a time.

No rank holds more than one unit in full on the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.ranges import phase
from zeroshard.comm.same import expect_same, expect_same_model, of_buffers
from zeroshard.comm.together import together
from zeroshard.errors import InvalidValue
from zeroshard.full_model.from_rank0 import FromRank0
from zeroshard.full_model.unsharded import expect_none_written
from zeroshard.io.values import encode
from zeroshard.model.unit_spec import plain_name
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.gather import Gatherer
from zeroshard.storage.buffer import Cut
from zeroshard.storage.unit import Unit


class IncompatibleKeys(NamedTuple):
    """The result of `load_full_state_dict`, as `nn.Module.load_state_dict` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


PASS_THE_SAME = (
    "Nothing has been changed. Pass the same state dict on every rank, or the one of rank 0 alone with "
    "broadcast_from_rank0=True (the other ranks pass None)"
)


class Destination(NamedTuple):
    """Where full values go. `rank0_only`: the other ranks only take part. `device`: None: the device of the model."""

    rank0_only: bool = False
    device: torch.device | str | None = None

    def includes(self, rank: int) -> bool:
        return not self.rank0_only or rank == 0

    def copy(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        """A copy in a storage of its own. `dtype`: None: the value's. An extra state that is no tensor stays."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(self.device or value.device, dtype or value.dtype, copy=True)


EVERYWHERE = Destination()


@phase("full state")
def full_state(engine: Engine, destination: Destination, *, main: bool) -> dict[str, Tensor]:
    """See `Handle.full_state_dict`."""
    if main:
        expect_none_written(engine.units, "full_state_dict(main=True)")
    engine.plain.expect_ignored_here()
    keeps, names = destination.includes(engine.collectives.mesh.world.rank), engine.plain.state()
    values: dict[int, Tensor] = {}
    engine.collectives.num_reads += 1
    here = engine.schedule.here()
    for unit in engine.units:
        # Every rank must read every unit, also ranks that keep nothing: `read_in_full` is collective.
        full = engine.gatherer.read_in_full(unit, main=main)
        if keeps:
            values |= {id(p): destination.copy(value) for p, value in zip(unit.parameters, full, strict=True)}
        del full  # before the next unit is read: views keep all of this one
    engine.gatherer.settle()
    engine.gatherer.enter_backward(here)  # a hook in a backward has called this, and backward goes on with these

    def make() -> dict[str, Any]:
        if not keeps:
            return {}
        if names is None:
            return _own_state(engine, values, destination)
        return {name: values[id(v)] if id(v) in values else destination.copy(v) for name, v in names.items()}

    return together(engine.collectives, "full_state_dict", make) if engine.plain.extra_states() else make()


def _own_state(engine: Engine, values: dict[int, Tensor], destination: Destination) -> dict[str, Any]:
    """What the model's own `state_dict()` makes of the full values."""
    copied = {value.untyped_storage().data_ptr() for value in values.values()}

    def copy(value: Any) -> Any:
        is_copied = isinstance(value, Tensor) and value.untyped_storage().data_ptr() in copied
        return value.detach() if is_copied else destination.copy(value)

    return {name: pytree.tree_map(copy, value) for name, value in engine.plain.state_of(values).items()}


@phase("load full state")
def load_full_state(engine: Engine, state: object, *, strict: bool, from_rank0: bool) -> IncompatibleKeys:
    """See `Handle.load_full_state_dict`."""
    units, gatherer, extra_states = engine.units, engine.gatherer, engine.plain.extra_states()
    collectives, names = engine.collectives, dict[str, Any]()
    has_state = not from_rank0 or collectives.mesh.world.rank == 0

    expect_none_written(units, "load_full_state_dict")

    def look() -> tuple[dict[str, Tensor], IncompatibleKeys]:
        names.update(engine.plain.objects())
        engine.plain.expect_loadable()
        engine.plain.expect_ignored_here()
        if not has_state:
            return {}, IncompatibleKeys([], [])
        if not isinstance(state, (Mapping, type(None))):
            raise InvalidValue(f"expected a dict of tensors, found a {type(state).__name__}{_hint_for(state)}")
        given = {plain_name(str(name)): value for name, value in (state or {}).items()}
        keys, problem = _compare(engine, names, given, strict=strict)
        if problem and not given and not from_rank0:
            problem = "found an empty state dict. Where rank 0 alone has one, pass broadcast_from_rank0=True"
        if problem:
            raise InvalidValue(problem)
        for name in extra_states if from_rank0 else ():
            encode(given.get(name), lambda tensor: "", name)  # raises for what cannot be sent
        return given, keys

    given, keys = together(collectives, "load_full_state_dict", look)
    found = [IncompatibleKeys(*of_rank) for of_rank in collectives.exchange_objects(list(keys))]
    if not from_rank0 and found.count(found[0]) < len(found):
        raise InvalidValue(f"load_full_state_dict: the ranks have different state dicts. {PASS_THE_SAME}")
    keys = found[0]
    missing = set(keys.missing_keys)
    sharded = {id(parameter) for unit in units for parameter in unit.parameters}
    if not from_rank0:  # each rank takes its part of these values, so all must have the same
        shared = {name: given[name] for name, v in names.items() if id(v) in sharded and name not in missing}
        expect_same(collectives, shared, "load_full_state_dict", PASS_THE_SAME)
    rest = {name: v for name, v in names.items() if id(v) not in sharded and name not in missing}
    if from_rank0:
        not_sent = {*extra_states, *engine.plain.ignored}
        sent = {name: v for name, v in rest.items() if name not in not_sent and isinstance(v, Tensor)}
        expect_same_model(collectives, of_buffers(sent), "load_full_state_dict")
    name_of = {id(value): name for name, value in names.items() if name not in missing}
    for unit in units:
        of_unit = [name_of.get(id(parameter)) for parameter in unit.parameters]
        _load_unit(unit, of_unit, given, gatherer, from_rank0=from_rank0)
    set_extra = _SetExtraStates(extra_states)
    for name, value in rest.items():
        if name in extra_states:
            set_extra(name, _from_rank0(collectives, given.get(name)) if from_rank0 else given[name])
            continue
        if not isinstance(value, Tensor):
            continue
        if has_state:
            value.detach().copy_(given[name])
        if from_rank0 and name not in engine.plain.ignored:
            collectives.broadcast([value.detach()])
    gatherer.settle()
    if extra_states:
        together(collectives, "load_full_state_dict", set_extra.expect)
    return keys


class _SetExtraStates:
    """Sets the extra states of modules. What a module raises is raised by `expect`: other values wait for all ranks."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules, self._raised = modules, list[tuple[str, Exception]]()

    def __call__(self, name: str, state: Any) -> None:
        try:
            self._modules[name].set_extra_state(state)
        except Exception as error:
            self._raised.append((name, error))

    def expect(self) -> None:
        """Raises:
        ValueError: the first that has raised."""
        for name, error in self._raised:
            raise InvalidValue(
                f"set_extra_state() for {name} raised {type(error).__name__}: {error}. The other values are loaded"
            ) from error


def _compare(
    engine: Engine, names: Mapping[str, Any], given: Mapping[str, Any], *, strict: bool
) -> tuple[IncompatibleKeys, str]:
    """The names that only one side has, and the problems in words ("" for none)."""
    module, extra_states = engine.plain.module, engine.plain.extra_states()
    places = {id(one) for one in (*module.parameters(), *module.buffers())}
    missing = [name for name in names if name not in given]
    unexpected = [name for name in given if name not in names]
    problems = [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in unexpected]
    problems = problems if strict else []
    for name, value in given.items():
        if name not in names or name in extra_states:
            continue
        if not isinstance(names[name], Tensor):  # a number, say
            if isinstance(value, Tensor) or value != names[name]:
                problems.append(_made_by_hook(name))
        elif not isinstance(value, Tensor) or value.layout is not torch.strided:
            problems.append(f"{name}: expected a dense tensor, found a {type(value).__name__}")
        elif value.is_meta:
            problems.append(f"{name} is on the meta device, and has no values")
        elif names[name].shape != value.shape:
            problems.append(f"{name}: expected {tuple(names[name].shape)}, found {tuple(value.shape)}")
        elif id(names[name]) not in places and not torch.equal(names[name], value.to(names[name])):
            problems.append(_made_by_hook(name))
    return IncompatibleKeys(missing, unexpected), "; ".join(problems[:10])


def _made_by_hook(name: str) -> str:
    return (
        f"{name} is made by a hook of state_dict(), and cannot be set: call model.load_state_dict(), which runs the "
        "model's own hooks, inside `with handle.unsharded(write=True):`"
    )


def _from_rank0(collectives: Collectives, value: Any) -> Any:
    """Rank 0's extra state of a module, on the model's device. On the other ranks `value` is ignored."""
    source = FromRank0(collectives, {"": value}, lambda state: None)
    received = source.receive(source.state_dict[""])
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(collectives.device), received)


def _load_unit(
    unit: Unit, of_unit: Sequence[str | None], given: Mapping[str, Tensor], gatherer: Gatherer, *, from_rank0: bool
) -> None:
    """`of_unit`: the name of each slot's value in `given`; None: it stays, and graphs that have saved it stay valid."""
    slots = {index for index, name in enumerate(of_unit) if name is not None}
    if slots:
        values = _broadcast(unit, of_unit, given, gatherer) if from_rank0 else [given.get(n or "") for n in of_unit]
        unit.write_slots(values)
        gatherer.updated(unit, slots)


def _broadcast(
    unit: Unit, of_unit: Sequence[str | None], given: Mapping[str, Tensor], gatherer: Gatherer
) -> list[Tensor | None]:
    """Rank 0's values of one unit, in main's dtype."""
    dtype = unit.main.dtype
    full = torch.zeros(unit.layout.numel, dtype=dtype, device=unit.weights.own().device)
    views = Cut.of(full, unit.layout).slots
    for name, view in zip(of_unit, views, strict=True):
        if name is not None and name in given:
            view.copy_(given[name])
    gatherer.collectives.broadcast([full])
    return [None if name is None else view for name, view in zip(of_unit, views, strict=True)]


def _hint_for(state: object) -> str:
    """What to write for something that is no state dict: the end of a message."""
    is_path = isinstance(state, (str, os.PathLike))
    return ". A folder that zeroshard.save has written is for zeroshard.load(directory, handle)" if is_path else ""
