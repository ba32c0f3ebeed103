"""Optimizer state in torch's own layout, full tensors by parameter: out of the pieces of all ranks, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.collectives import Collectives
from zeroshard.flat_step import FlatStep
from zeroshard.interval import Interval
from zeroshard.pieces import Piece, slots_in
from zeroshard.placement import SHARDED
from zeroshard.unit import Unit


def full_state(flat: FlatStep, collectives: Collectives) -> dict[nn.Parameter, dict[str, Any]]:
    """Parameter -> state, full tensors in the parameter's shape, scalars as 0-d, numbers as numbers. Collective.

    Unit by unit and key by key: the transient is one full buffer.
    """
    schema = _schema(flat, collectives)
    result: dict[nn.Parameter, dict[str, Any]] = {}
    for unit in flat.groups:
        for key, (dtype, kind) in schema.items():
            has = _gather(flat, collectives, unit, key, lambda value: 1, "uint8")
            full = _gather(flat, collectives, unit, key, lambda value: value, dtype)
            for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                if slot.world and has[slot.world.start]:
                    value: Any = full[slot.world.slice].view(slot.shape).clone()
                    if kind != "elementwise":
                        value = full[slot.world.start].cpu().clone()
                    result.setdefault(parameter, {})[key] = value.item() if kind == "number" else value
    return result


@dataclass(frozen=True)
class Elementwise:
    """Saved state in a parameter's shape. `read(param, out)`: elements `param` of it, flattened, into `out`."""

    dtype: torch.dtype
    read: Callable[[Interval, Tensor], None]


def load_full_state(flat: FlatStep, state: dict[nn.Parameter, dict[str, Any]]) -> None:
    """Parameter -> state (as `full_state` gives it): every rank takes its own pieces.

    Raises:
        ValueError: state of another shape.
    """
    for unit in flat.groups:
        for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
            for key, value in state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != slot.shape:
                    raise ValueError(f"state {key!r} of {slot.name}: expected {slot.shape}, found {tuple(value.shape)}")
    load_state(flat, {p: {key: _elementwise(value) for key, value in of_p.items()} for p, of_p in state.items()})


def load_state(flat: FlatStep, state: dict[nn.Parameter, dict[str, Any]]) -> None:
    """Parameter -> state, `Elementwise` in place of tensors in the parameter's shape; 0-d tensors and numbers as they
    are. Of an `Elementwise`, only what this rank's pieces hold is read."""
    for unit in flat.groups:
        of_slot = [state.get(parameter, {}) for parameter in unit.parameters]
        if flat.of_unit(unit):
            flat.refine(unit, [_scalars(values) for values in of_slot])
        for piece in flat.of_unit(unit):
            first = next((i for i in slots_in(unit, piece.world) if of_slot[i]), None)
            flat.optimizer.state.pop(piece.tensor, None)
            if first is not None:
                flat.optimizer.state[piece.tensor] = {
                    key: flat.as_held(piece, key, _piece_value(piece, key, of_slot, value))
                    for key, value in of_slot[first].items()
                }


def _elementwise(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value

    def read(param: Interval, out: Tensor) -> None:
        out.copy_(value.reshape(-1)[param.slice])

    return Elementwise(value.dtype, read)


def _piece_value(piece: Piece, key: str, of_slot: list[dict[str, Any]], example: Any) -> Any:
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


def _scalars(values: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    """What all parameters of one piece must agree in."""
    numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
    numbers |= {key: value.item() for key, value in values.items() if isinstance(value, Tensor) and not value.dim()}
    items = ((key, float(value)) for key, value in numbers.items())
    return tuple(sorted(items)) if values else (("", 0.0),)


def _schema(flat: FlatStep, collectives: Collectives) -> dict[str, tuple[str, str]]:
    """State key -> (dtype to gather in, kind), over all ranks (one with an empty shard has no state of its own)."""
    mine = {
        key: _kind(value)
        for state in flat.optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, (Tensor, int, float))
    }
    return {key: tuple(kind) for found in collectives.exchange_objects(mine) for key, kind in found.items()}


def _kind(value: Any) -> tuple[str, str]:
    if isinstance(value, Tensor):
        return str(value.dtype).removeprefix("torch."), "elementwise" if value.dim() else "scalar"
    return "uint8" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float64", "number"


def _gather(
    flat: FlatStep, collectives: Collectives, unit: Unit, key: str, value_of: Callable[[Any], Any], dtype: str
) -> Tensor:
    """[layout.numel]: something of each piece's state (elementwise, or one number) in its place, from all ranks."""
    full = torch.zeros(unit.layout.numel, dtype=getattr(torch, dtype), device=unit.weights.own().device)
    for piece in flat.of_unit(unit):
        state = flat.optimizer.state.get(piece.tensor, {})
        if state.get(key) is not None:
            full[piece.world.slice] = value_of(state[key])
    if unit.plan.main is SHARDED:
        collectives.all_gather(full, unit=unit.name, phase="state").wait()
    return full
