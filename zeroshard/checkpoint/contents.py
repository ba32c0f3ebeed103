"""Lists what one rank writes into a checkpoint: its intervals of main and of optimizer state, and unsharded values.

model/<parameter>               main (fp32, whether held as weights, as a master or as bf16 and remainder), or frozen
                                weights; written by the ranks of one replica, each its shard
model/<buffer>                  written by rank 0; so are parameters that OPTIMIZER_ONLY has not taken yet
optimizer/..., scalar/..., number/..., value/...   the optimizer's state (`saved_state.py`): written by the rank that
                                holds the elements, or owns the whole parameter; for frozen parameters the ranks take
                                turns
group/<optimizer>/<group>/...   tensors that are hyper-parameters; written by rank 0
rank/<r>/state                  JSON as bytes: the random state of that rank; and its buffers and `extra`, if they
                                differ from rank 0's (then rank 0's has the names of its buffers)
extra/..., rank/<r>/...         tensors inside these
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroshard.checkpoint.rank_state import EncodedState, blob, number, whole
from zeroshard.checkpoint.saved_state import StateKinds, names_of
from zeroshard.checkpoint.writer import Item
from zeroshard.errors import Error, InvalidType, InvalidValue
from zeroshard.io.checked import CheckpointError
from zeroshard.io.tensor_file import DTYPE_NAMES
from zeroshard.io.values import encode, no_tensors, without_numpy
from zeroshard.layout.interval import Interval
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.runtime.engine import Engine
from zeroshard.step.stepper import StateChunk, StateEntry, whole_entry
from zeroshard.storage.unit import Unit

Optimizers = ShardedOptimizer | Sequence[ShardedOptimizer] | None


class Stateful(Protocol):
    """An object that `extra` accepts: a scheduler, loss scaler, data loader, average of weights, ..."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Extra = Mapping[str, Stateful] | None


def as_list(optimizer: Optimizers) -> list[ShardedOptimizer]:
    """Raises:
    TypeError: neither a ShardedOptimizer nor a list of them."""
    if optimizer is not None and not isinstance(optimizer, (torch.optim.Optimizer, Sequence)):
        raise InvalidType(
            f"expected a ShardedOptimizer, or a list of them, found an object of type {type(optimizer).__name__}"
        )
    found = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    for one in found:
        if not isinstance(one, ShardedOptimizer):
            raise InvalidType(
                f"expected a ShardedOptimizer, found an object of type {type(one).__name__}: the optimizer of a "
                "sharded model is built as ShardedOptimizer(handle, torch.optim.AdamW, ...)"
            )
    return found


def expect_of_engine(optimizers: Sequence[ShardedOptimizer], engine: Engine) -> None:
    """Raises:
    ValueError: an optimizer belongs to another model."""
    for one in optimizers:
        if one.engine is not engine:
            raise InvalidValue(f"the optimizer belongs to another handle, {one.handle}: pass these two together")


def expect_stateful(extra: Extra) -> None:
    """Raises:
    ValueError: no dict; or an object has no `state_dict` and `load_state_dict`."""
    if extra is not None and not isinstance(extra, Mapping):
        raise InvalidValue(
            f'extra is a dict from names to objects, found {type(extra).__name__}: extra={{"scheduler": scheduler}}'
        )
    for name, one in (extra or {}).items():
        if isinstance(one, type) or not all(callable(getattr(one, f, None)) for f in ("state_dict", "load_state_dict")):
            raise InvalidValue(
                f"extra {name!r} is of type {type(one).__name__}: extra takes objects with state_dict() and "
                "load_state_dict(), as schedulers have them. Give a number or a dict a small class with these two "
                "methods; a count of steps is step= already, and load returns it as .step"
            )


@contextmanager
def asking(what: str) -> Iterator[None]:
    """The user's code runs inside.

    Raises:
        CheckpointError: it has raised; with `what`."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        raise CheckpointError(f"{what} raised {type(error).__name__}: {error}") from error


# Weights --------------------------------------------------------------------------------------------------------------


def model_items(engine: Engine) -> Iterator[Item]:
    """Main, or frozen weights, of the own shard."""
    mesh = engine.collectives.mesh
    for unit in engine.units:
        dtype = unit.main.dtype
        if mesh.world.rank == 0:  # parameters without elements: in no shard, so rank 0 writes name and shape
            for slot in unit.layout.slots:
                if not slot.world:
                    yield Item(f"model/{slot.name}", slot.shape, dtype, Interval(0, 0), no_values)
        if mesh.replicate.rank == 0:
            for fragment in unit.layout.fragments_in(unit.own_shard()):
                slot = fragment.slot
                read = partial(_read_weights, unit, slot.world.start)
                yield Item(f"model/{slot.name}", slot.shape, dtype, fragment.param, read)
    for name, parameter in engine.untaken.items() if mesh.world.rank == 0 else ():
        yield whole(f"model/{name}", parameter)


def _read_weights(unit: Unit, origin: int, param: Interval) -> Tensor:
    world = Interval(origin + param.start, origin + param.stop)
    return unit.main.read(world)


def no_values(interval: Interval) -> Tensor:
    """For an item without elements, or whose values nobody reads."""
    raise AssertionError("there are no values")


# Optimizer ------------------------------------------------------------------------------------------------------------


def optimizer_items(optimizer: ShardedOptimizer) -> Iterator[Item]:
    """The state that this rank writes: what it holds, if it is in the first replica.

    Raises:
        ValueError: an item is neither a dense tensor nor a plain value.
    """
    mesh = optimizer.engine.collectives.mesh
    for stepper in optimizer.steppers if mesh.replicate.rank == 0 else ():
        yield from map(state_item, stepper.state.entries())
    names, kinds = names_of(optimizer.engine), StateKinds(optimizer)
    for index, parameter in enumerate(optimizer.waiting):
        if index % mesh.world.size == mesh.world.rank:
            for key, value in optimizer.waiting[parameter].items():
                yield state_item(whole_entry(names[id(parameter)], key, value, kinds[parameter].get(key)))


def state_item(entry: StateEntry) -> Item:
    """An entry of the state, with its name in the file."""
    if isinstance(entry, StateChunk):
        name = _state_name("scalar" if entry.is_scalar else "optimizer", entry)
        return Item(name, entry.shape, entry.dtype, entry.interval, entry.read)
    value = without_numpy(entry.value)
    if isinstance(value, (bool, int, float)):
        return number(_state_name("number", entry), value)
    where = f"state {entry.key} of {entry.parameter}"
    return blob(_state_name("value", entry), encode(value, no_tensors, where))


def _state_name(kind: str, entry: StateEntry) -> str:
    """The name of an entry in the file; see `saved_state.py`."""
    if not isinstance(entry.key, str) or "/" in entry.key:
        raise InvalidValue(f"optimizer state {entry.key!r} of {entry.parameter}: its name must be a text without '/'")
    return f"{kind}/{entry.key}/{entry.parameter}"


def optimizer_values(
    optimizer: ShardedOptimizer, names: Mapping[int, str], prefix: str
) -> tuple[dict[str, Any], list[Item]]:
    """The values of an optimizer in the manifest: for each group its class, parameter names and hyper-parameters; and
    the loss scaler's state. And the tensors among the hyper-parameters, under names that begin with `prefix`.

    A tensor of one number is a number in the manifest; `tensors` there has its dtype and shape.

    Raises:
        ValueError: a hyper-parameter is an object that a checkpoint does not hold.
    """
    groups, items, classes = [], list[Item](), optimizer.groups.classes
    for index, (group, of_class) in enumerate(zip(optimizer.param_groups, classes.of_groups, strict=True)):
        options, tensors = {}, {}
        for key, value in group.items():
            if key == "params" or callable(value):
                continue  # whoever builds the optimizer again gives it its functions again
            if is_number := _is_number(value):
                tensors[key] = [DTYPE_NAMES[value.dtype], list(value.shape)]
            plain = value.item() if is_number else value
            try:
                encoded = EncodedState(f"{prefix}/{index}/{key}", plain, f"{key} of param group {index}")
            except InvalidValue:
                if not _is_default(value, classes.defaults_of(index).get(key)):
                    raise
            else:
                options[key] = encoded.values
                items += encoded.items()
        params = [names[id(parameter)] for parameter in group["params"]]
        groups.append({"class": of_class.__name__, "params": params, "options": options, "tensors": tensors})
    return {"groups": groups, "loss_scale": encode(optimizer.scaling.state_dict(), no_tensors, "loss scale")}, items


def _is_number(value: Any) -> bool:
    one = isinstance(value, Tensor) and value.numel() == 1
    return one and value.dtype in DTYPE_NAMES and not value.is_complex()


def _is_default(value: Any, default: Any) -> bool:
    """Whether an object is the class's default, which comes back with the class; or a copy of it, as `load_state_dict`
    makes copies."""
    if value is default or type(value) is not type(default):
        return value is default
    with suppress(Exception):  # not everything can be pickled
        return pickle.dumps(value) == pickle.dumps(default)
    return False
