"""Optimizer state in torch's own layout, full tensors by parameter: out of the pieces of all ranks, and back.

In a piece, which is 1-D, shapes say what an item is: as many values as elements, or one for all of them. In torch's
layout they do not: of a parameter of a single element, moments and counts of steps look alike. There the class says it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.collectives import Collectives
from zeroshard.flat_step import FlatStep
from zeroshard.inner import READING
from zeroshard.interval import Interval
from zeroshard.layout import Slot
from zeroshard.low_bit import dense
from zeroshard.pieces import Piece, slots_in
from zeroshard.placement import SHARDED
from zeroshard.tensor_file import DTYPE_NAMES, DTYPES
from zeroshard.unit import Unit
from zeroshard.values import decode, encode, no_tensors

FullState = dict[Tensor, dict[str, Any]]
"""Parameter -> key -> item, elementwise ones in the parameter's shape."""

ELEMENTWISE, SCALAR, PLAIN = "elementwise", "scalar", "plain"
"""What an item of a parameter's state is: a value for every element; a tensor of one number; no tensor."""

Described = dict[str, list[Any]]
"""Key -> [ELEMENTWISE, dtype], [SCALAR, dtype, shape, number] or [PLAIN, value as JSON]."""


def full_state(flat: FlatStep, collectives: Collectives, only: Collection[Tensor] | None = None) -> FullState:
    """Parameter -> state, elementwise items in the parameter's shape; of `only` these parameters. Collective.

    Unit by unit and key by key: the transient is one full buffer.

    Raises:
        ValueError: on every rank, an item that is none of the three.
    """
    result: FullState = {}
    for unit, of_slot in _told(flat, collectives, only).items():
        dtypes: dict[str, torch.dtype] = {}
        for described in of_slot.values():
            for key, (kind, *rest) in described.items():
                if kind == ELEMENTWISE:
                    dtypes[key] = torch.promote_types(dtypes.get(key, DTYPES[rest[0]]), DTYPES[rest[0]])
        for index, described in of_slot.items():
            result[unit.parameters[index]] = {key: _value(*item) for key, item in described.items()}
        for key, dtype in dtypes.items():
            full = _gather(flat, collectives, unit, key, dtype)
            for index, described in of_slot.items():
                if described.get(key, [PLAIN])[0] == ELEMENTWISE:
                    slot, own_dtype = unit.layout.slots[index], DTYPES[described[key][1]]
                    result[unit.parameters[index]][key] = (
                        full[slot.world.slice].view(slot.shape).to(own_dtype, copy=True)
                    )
    return result


def parameters_with_state(flat: FlatStep, collectives: Collectives) -> list[Tensor]:
    """Collective."""
    return [unit.parameters[index] for unit, of_slot in _told(flat, collectives, None).items() for index in of_slot]


@dataclass(frozen=True)
class Elementwise:
    """Saved state with a value for every element. `read(param, out)`: elements `param` of it, flattened, into `out`."""

    dtype: torch.dtype
    read: Callable[[Interval, Tensor], None]


def load_full_state(
    flat: FlatStep, state: Mapping[Tensor, Mapping[str, Any]], only: Collection[Tensor] | None = None
) -> None:
    """Parameter -> state (as `full_state` gives it): every rank takes its own pieces; of `only` the units of these
    parameters.

    Raises:
        ValueError: state of another shape.
    """
    units = [unit for unit in flat.groups if only is None or any(p in only for p in unit.parameters)]
    load_state(flat, recognised(flat, state), units)


def set_full_state(flat: FlatStep, parameter: Tensor, state: Mapping[str, Any]) -> None:
    """The state of one parameter, as `full_state` gives it; that of the others stays. Empty: it has none.

    Raises:
        ValueError: state of another shape.
    """
    taken = recognised(flat, {parameter: state}).get(parameter, {})
    for unit in flat.groups:
        for index, one in enumerate(unit.parameters):
            if one is parameter:
                flat.refine(unit, [i == index for i in range(len(unit.parameters))])
                of_slot = [taken if i == index else {} for i in range(len(unit.parameters))]
                for piece in flat.of_unit(unit):
                    if piece.world & unit.layout.slots[index].world:
                        _take(flat, piece, of_slot, index)


def load_state(
    flat: FlatStep, state: Mapping[Tensor, Mapping[str, Any]], units: Collection[Unit] | None = None
) -> None:
    """Parameter -> state, `Elementwise` in place of what has a value for every element; anything else as it is. Of an
    `Elementwise`, only what this rank's pieces hold is read. `units`: None for all."""
    for unit in flat.groups if units is None else units:
        of_slot = [state.get(parameter, {}) for parameter in unit.parameters]
        flat.refine(unit, [_same_in_a_piece(values) for values in of_slot])
        for piece in flat.of_unit(unit):
            first = next((i for i in slots_in(unit, piece.world) if of_slot[i]), None)
            _take(flat, piece, of_slot, first)


def _take(flat: FlatStep, piece: Piece, of_slot: Sequence[Mapping[str, Any]], first: int | None) -> None:
    """A piece takes its part of the state of its slots, of which `first` has all the keys."""
    flat.optimizer.state.pop(piece.tensor, None)
    if first is not None and of_slot[first]:
        flat.optimizer.state[piece.tensor] = {
            key: flat.as_held(piece, key, _piece_value(piece, key, of_slot, value))
            for key, value in of_slot[first].items()
        }


def recognised(flat: FlatStep, state: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """With `Elementwise` in place of what has a value for every element.

    Raises:
        ValueError: state of another shape.
    """
    members = [
        (parameter, slot, group)
        for unit, groups in flat.groups.items()
        for parameter, slot, group in zip(unit.parameters, unit.layout.slots, groups, strict=True)
        if group is not None and state.get(parameter)
    ]
    seen: dict[str, bool] = {}  # of keys that the class does not tell: what they are for parameters of many elements
    for parameter, slot, _ in members:
        for key, value in state[parameter].items():
            if isinstance(value, Tensor) and slot.world.numel > 1:
                seen.setdefault(key, value.numel() > 1)
    result: dict[Tensor, dict[str, Any]] = {}
    for parameter, slot, group in members:
        of_class, taken = flat.elementwise_state(group), result.setdefault(parameter, {})
        for key, value in state[parameter].items():
            taken[key] = value
            if isinstance(value, Tensor):
                is_scalar = value.numel() == 1 and not of_class.get(key, seen.get(key, value.dim() > 0))
                taken[key] = value if is_scalar else _elementwise(key, value, slot)
    return result


def _elementwise(key: str, value: Tensor, slot: Slot) -> Elementwise:
    if tuple(value.shape) != slot.shape and not value.numel() == slot.world.numel == 1:
        raise ValueError(f"state {key!r} of {slot.name}: expected {slot.shape}, found {tuple(value.shape)}")

    def read(param: Interval, out: Tensor) -> None:
        out.copy_(value.reshape(-1)[param.slice])

    return Elementwise(value.dtype, read)


def _piece_value(piece: Piece, key: str, of_slot: Sequence[Mapping[str, Any]], example: Any) -> Any:
    if isinstance(example, Tensor):
        return example.clone()
    if not isinstance(example, Elementwise):
        return example
    value = torch.zeros(piece.world.numel, dtype=example.dtype, device=piece.tensor.device)
    unit = piece.unit
    for fragment in unit.layout.fragments_in(piece.world):
        saved = of_slot[unit.slot_index(fragment.slot.name)].get(key)
        if saved is not None:
            saved.read(fragment.param, value[fragment.local.slice])
    return value


def _same_in_a_piece(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What all parameters of one piece must agree in."""
    numbers = {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()
               if not isinstance(value, Elementwise)}  # fmt: skip
    return tuple(sorted((key, repr(value)) for key, value in numbers.items())) if values else (("", "none"),)


def _told(
    flat: FlatStep, collectives: Collectives, only: Collection[Tensor] | None
) -> dict[Unit, dict[int, Described]]:
    """Unit -> slot -> its state, as the rank has it that holds the first element. Collective."""
    units, mine, problem = list(flat.groups), list[Any](), ""
    try:
        for number, unit in enumerate(units):
            pieces = [piece for piece in flat.of_unit(unit) if flat.optimizer.state.get(piece.tensor)]
            for index, (parameter, slot) in enumerate(zip(unit.parameters, unit.layout.slots, strict=True)):
                first = Interval(slot.world.start, slot.world.start + 1)
                if not slot.world or first not in unit.own_shard() or (only is not None and parameter not in only):
                    continue
                holding = [piece for piece in pieces if first in piece.world and flat.groups[unit][index] is not None]
                mine += [[number, index, _describe(flat, piece, slot)] for piece in holding]
    except ValueError as error:
        problem = str(error)
    told = collectives.exchange_objects([problem, mine], READING)
    if problem := next((text for text, _ in told if text), ""):
        raise ValueError(problem)
    found = {(number, index): described for _, of_rank in told for number, index, described in of_rank}
    result: dict[Unit, dict[int, Described]] = {}
    for (number, index), described in sorted(found.items()):
        result.setdefault(units[number], {})[index] = described
    return result


def _describe(flat: FlatStep, piece: Piece, slot: Slot) -> Described:
    result: Described = {}
    for key, value in flat.optimizer.state[piece.tensor].items():
        where = f"the optimizer's state {key!r} of {slot.name}"
        if not isinstance(key, str):
            raise ValueError(f"{where}: its name must be a text")
        if not isinstance(value, Tensor):
            result[key] = [PLAIN, encode(value, no_tensors, where)]
        elif flat.is_elementwise(piece, key, value):
            result[key] = [ELEMENTWISE, DTYPE_NAMES[value.dtype]]
        elif value.numel() == 1:
            result[key] = [SCALAR, DTYPE_NAMES[value.dtype], list(value.shape), value.item()]
        else:
            raise ValueError(f"{where} has the shape {tuple(value.shape)}: neither elementwise nor a single number")
    return result


def _value(kind: str, *rest: Any) -> Any:
    if kind == SCALAR:
        dtype, shape, number = rest
        return torch.tensor(number, dtype=DTYPES[dtype]).view(shape)
    return decode(rest[0], _nothing) if kind == PLAIN else None


def _nothing(name: str) -> Tensor:
    raise AssertionError("there is no tensor in a plain value")


def _gather(flat: FlatStep, collectives: Collectives, unit: Unit, key: str, dtype: torch.dtype) -> Tensor:
    """[layout.numel]: an elementwise item of each piece's state in its place, from all ranks."""
    full = torch.zeros(unit.layout.numel, dtype=dtype, device=unit.weights.own().device)
    for piece in flat.of_unit(unit):
        value = (flat.optimizer.state.get(piece.tensor) or {}).get(key)
        if isinstance(value, Tensor) and flat.is_elementwise(piece, key, value):
            full[piece.world.slice] = dense(value)
    if unit.plan.main is SHARDED:
        collectives.all_gather(full, unit=unit.name, phase="state").wait()
    return full
