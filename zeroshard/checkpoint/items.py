"""What one rank has to write: its intervals of main and of the optimizer's state, and what is not sharded.

model/<parameter>               main where there is one (fp32, whether held as weights, as a master or as bf16 and
                                remainder), else the frozen weights; by the ranks of one replica, each its shard
model/<buffer>                  rank 0's; so are parameters that OPTIMIZER_ONLY has not taken yet
optimizer/<state>/<parameter>   by whoever holds the elements, or steps the whole parameter; where nobody does (it is
                                frozen), the ranks take turns
scalar/<state>/<parameter>      a tensor of one number for a parameter (counts of steps)
number/<state>/<parameter>      the same, as a plain Python number
value/<state>/<parameter>       None, a text, a list, ...: JSON as bytes
rank/<r>/state                  JSON as bytes: random numbers of that rank, and buffers and `extra` where that rank
                                has others than rank 0
extra/..., rank/<r>/...         tensors inside these
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.checkpoint.writer import Item
from zeroshard.engine import Engine
from zeroshard.flat_step import FlatStep
from zeroshard.inner import is_elementwise_state
from zeroshard.interval import Interval
from zeroshard.layout import Fragment
from zeroshard.low_bit import dense
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.owner_step import OwnerStep
from zeroshard.tensor_file import bytes_of
from zeroshard.unit import Unit
from zeroshard.values import encode, no_tensors

Optimizers = ShardedOptimizer | Sequence[ShardedOptimizer] | None


class Stateful(Protocol):
    """Schedulers, loss scalers, data loaders, averages of weights, ..."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Extra = Mapping[str, Stateful] | None


def as_list(optimizer: Optimizers) -> list[ShardedOptimizer]:
    """Raises:
    TypeError: something else."""
    if optimizer is not None and not isinstance(optimizer, (torch.optim.Optimizer, Sequence)):
        raise TypeError(
            f"expected a ShardedOptimizer, or a list of them, found an object of type {type(optimizer).__name__}"
        )
    found = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    for one in found:
        if not isinstance(one, ShardedOptimizer):
            raise TypeError(
                f"expected a ShardedOptimizer, found an object of type {type(one).__name__}: the optimizer of a "
                "sharded model is built as ShardedOptimizer(handle, torch.optim.AdamW, ...)"
            )
    return found


def expect_stateful(extra: Extra) -> None:
    """Raises:
    ValueError: something without `state_dict` and `load_state_dict`."""
    for name, one in (extra or {}).items():
        if isinstance(one, type) or not all(callable(getattr(one, f, None)) for f in ("state_dict", "load_state_dict")):
            raise ValueError(
                f"extra {name!r} is of type {type(one).__name__}: extra takes objects with state_dict() and "
                "load_state_dict(), as schedulers have them. Give a number or a dict a small class with these two "
                "methods; a count of steps is step= already, and load returns it as .step"
            )


def names_of(engine: Engine) -> dict[int, str]:
    """id of each parameter of the model or its optimizer -> its name."""
    names = {id(parameter): name for name, parameter in engine.untaken.items()}
    return names | {
        id(parameter): slot.name
        for unit in engine.units
        for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True)
    }


# Weights --------------------------------------------------------------------------------------------------------------


def model_items(engine: Engine) -> Iterator[Item]:
    """Main, or frozen weights, of the own shard."""
    mesh = engine.collectives.mesh
    for unit in engine.units:
        dtype = unit.main.dtype if unit.main is not None else unit.weights.buffer.dtype
        if mesh.world.rank == 0:  # names and shapes of what has no elements
            for slot in unit.layout.slots:
                if not slot.world:
                    yield Item(f"model/{slot.name}", slot.shape, dtype, Interval(0, 0), _nothing)
        if mesh.replicate.rank == 0:
            for fragment in unit.layout.fragments_in(unit.own_shard()):
                slot = fragment.slot
                read = partial(_read_weights, unit, slot.world.start)
                yield Item(f"model/{slot.name}", slot.shape, dtype, fragment.param, read)
    for name, parameter in engine.untaken.items() if mesh.world.rank == 0 else ():
        yield whole(f"model/{name}", parameter)


def _read_weights(unit: Unit, origin: int, param: Interval) -> Tensor:
    world = Interval(origin + param.start, origin + param.stop)
    if unit.main is None:
        return unit.weights.own()[world.relative_to(unit.own_shard().start).slice]
    scratch = None
    if unit.main.needs_scratch:
        scratch = torch.empty(world.numel, dtype=unit.main.dtype, device=unit.main.weights.device)
    return unit.main.read(world, scratch)


def _nothing(interval: Interval) -> Tensor:
    raise AssertionError("there are no elements")


def whole(name: str, value: Tensor) -> Item:
    """A tensor that this rank writes all of."""
    flat = value.detach().reshape(-1)
    return Item(name, tuple(value.shape), value.dtype, Interval(0, value.numel()), lambda part: flat[part.slice])


# Optimizer ------------------------------------------------------------------------------------------------------------


def optimizer_items(optimizer: ShardedOptimizer) -> Iterator[Item]:
    """The state that this rank holds, without what its replicas write.

    Raises:
        ValueError: state that is neither a dense tensor nor a plain value.
    """
    mesh = optimizer.engine.collectives.mesh
    for stepper in optimizer.steppers if mesh.replicate.rank == 0 else ():
        if isinstance(stepper, FlatStep):
            yield from _flat_items(stepper)
        elif isinstance(stepper, OwnerStep):
            for number, (one, state) in enumerate(stepper.owned()):
                # Where main is replicated, every rank owns everything: they take turns.
                if not stepper.replicated or number % mesh.shard.size == mesh.shard.rank:
                    kinds = stepper.elementwise_state(one.group)
                    for key, value in state.items():
                        yield _state_item(key, one.slot.name, value, kinds.get(key))
    names, kinds_of = names_of(optimizer.engine), StateKinds(optimizer)
    for number, parameter in enumerate(optimizer.waiting):
        if number % mesh.world.size == mesh.world.rank:
            for key, value in optimizer.waiting[parameter].items():
                yield _state_item(key, names[id(parameter)], value, kinds_of[parameter].get(key))


class StateKinds:
    """What the state of a parameter is made of (see `inner.is_elementwise_state`), whether or not somebody steps it."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._known: dict[int, dict[str, bool]] = {}

    def options(self, parameter: Tensor) -> dict[str, Any]:
        group: dict[str, Any] = self._optimizer.param_groups[self._groups[id(parameter)]]
        return {key: value for key, value in group.items() if key != "params"}

    def __getitem__(self, parameter: Tensor) -> dict[str, bool]:
        group = self._groups[id(parameter)]
        if group not in self._known:
            optimizer_class, defaults = self._optimizer.classes[group], self._optimizer.class_defaults(group)
            self._known[group] = is_elementwise_state(optimizer_class, self.options(parameter), defaults)
        return self._known[group]


def _flat_items(flat: FlatStep) -> Iterator[Item]:
    for piece in flat.pieces:
        state = flat.optimizer.state.get(piece.tensor) or {}
        for fragment in piece.unit.layout.fragments_in(piece.world & piece.unit.own_shard()):
            for key, value in state.items():
                if isinstance(value, Tensor) and flat.is_elementwise(piece, key, value):
                    if not flat.quantises:
                        _expect_plain(key, fragment.slot.name, value)
                    read = partial(_read_state, value, fragment)
                    name = _state_name("optimizer", key, fragment.slot.name)
                    yield Item(name, fragment.slot.shape, value.dtype, fragment.param, read)
                elif fragment.param.start == 0:  # once for each parameter
                    if isinstance(value, Tensor) and value.numel() != 1:
                        raise ValueError(f"state {key} of {fragment.slot.name} has the shape {tuple(value.shape)}")
                    yield _state_item(key, fragment.slot.name, value, False)


def _read_state(value: Tensor, fragment: Fragment, param: Interval) -> Tensor:
    """Elements `param` of a parameter's state, out of that of the piece. What is quantised is stored by its values."""
    return dense(value)[fragment.local.slice][param.relative_to(fragment.param.start).slice]


def _state_item(key: str, of: str, value: Any, elementwise: bool | None) -> Item:
    """A whole tensor of any shape, or a plain value. `of`: the parameter; `elementwise`: whether each element has its
    own value (None: the class does not tell)."""
    if isinstance(value, (bool, int, float)):
        return number(_state_name("number", key, of), value)
    if not isinstance(value, Tensor):
        return blob(_state_name("value", key, of), encode(value, no_tensors, f"state {key} of {of}"))
    _expect_plain(key, of, value)
    is_scalar = value.numel() == 1 and not (value.dim() if elementwise is None else elementwise)
    return whole(_state_name("scalar" if is_scalar else "optimizer", key, of), value)


def number(name: str, value: bool | int | float) -> Item:
    """A Python number as a tensor."""
    dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name} is {value}, which needs more than 64 bits")
    return whole(name, torch.tensor(value, dtype=dtype))


def _expect_plain(key: str, of: str, value: Any) -> None:
    if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided:
        raise ValueError(
            f"state {key} of {of} is a {type(value).__name__}, made of several tensors (quantised, perhaps): "
            "checkpoints hold dense tensors. Save optimizer.state_dict() yourself"
        )


def _state_name(kind: str, key: str, of: str) -> str:
    if not isinstance(key, str) or "/" in key:
        raise ValueError(f"optimizer state {key!r} of {of}: its name must be a text without '/'")
    return f"{kind}/{key}/{of}"


def optimizer_values(optimizer: ShardedOptimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Hyper-parameters of each group (those that are plain values), by the names of the parameters; loss scale."""
    groups = []
    for group, of_class in zip(optimizer.param_groups, optimizer.classes, strict=True):
        options = {}
        for key, value in group.items():
            plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            try:
                options[key] = encode(plain, no_tensors, key) if key != "params" else None
            except ValueError:
                continue  # a function, say: it is configuration
        options.pop("params")
        params = [names[id(parameter)] for parameter in group["params"]]
        groups.append({"class": of_class.__name__, "params": params, "options": options})
    return {"groups": groups, "loss_scale": encode(optimizer.scaling.state_dict(), no_tensors, "loss scale")}


# What is not sharded --------------------------------------------------------------------------------------------------


class Bag:
    """Values and the tensors inside them, under names that begin with `prefix`."""

    def __init__(self, prefix: str, value: Any, where: str) -> None:
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self.values = encode(value, self._store, where)

    def _store(self, tensor: Tensor) -> str:
        name = f"{self._prefix}/{len(self.tensors)}"
        self.tensors[name] = tensor
        return name

    def items(self) -> Iterator[Item]:
        for name, tensor in self.tensors.items():
            yield whole(name, tensor)

    def digest(self) -> str:
        """Of the values, wherever they are stored."""
        total = hashlib.sha256(json.dumps(self.values).replace(self._prefix, "").encode())
        for tensor in self.tensors.values():
            total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(bytes_of(tensor.cpu().contiguous()))
        return total.hexdigest()


def random_state() -> dict[str, Any]:
    """Of Python, numpy (if it has been imported) and torch, on the CPU and on this rank's GPU."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def blob(name: str, value: Any) -> Item:
    """JSON as a tensor of bytes."""
    return whole(name, torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8))
