"""Optimizer state in torch's own layout, full tensors by parameter: out of the pieces of all ranks, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.collectives import Collectives
from zeroshard.flat_step import FlatStep
from zeroshard.pieces import Piece, slots_in
from zeroshard.placement import SHARDED
from zeroshard.unit import Unit


def full_state(flat: FlatStep, collectives: Collectives) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Parameter -> state, full tensors in the parameter's shape and scalars as 0-d. Collective.

    Unit by unit and key by key: the transient is one full buffer.
    """
    schema = _schema(flat, collectives)
    result: dict[nn.Parameter, dict[str, Tensor]] = {}
    for unit in flat.groups:
        has = _gather(
            flat, collectives, unit, lambda piece: 1 if flat.optimizer.state.get(piece.tensor) else 0, "uint8"
        )
        for key, (dtype, is_scalar) in schema.items():
            full = _gather(flat, collectives, unit, lambda piece, k=key: flat.optimizer.state[piece.tensor][k], dtype)
            for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                if slot.world and has[slot.world.start]:
                    value = full[slot.world.start].cpu() if is_scalar else full[slot.world.slice].view(slot.shape)
                    result.setdefault(parameter, {})[key] = value.clone()
    return result


def load_full_state(flat: FlatStep, state: dict[nn.Parameter, dict[str, Any]]) -> None:
    """Parameter -> state (as `full_state` gives it): every rank takes its own pieces."""
    for unit in flat.groups:
        of_slot = [state.get(parameter, {}) for parameter in unit.parameters]
        for slot, values in zip(unit.layout.slots, of_slot, strict=True):
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != slot.shape:
                    raise ValueError(f"state {key!r} of {slot.name}: expected {slot.shape}, found {tuple(value.shape)}")
        flat.refine(unit, [_scalars(values) for values in of_slot]) if flat.of_unit(unit) else None
        for piece in flat.of_unit(unit):
            first = next((i for i in slots_in(unit, piece.world) if of_slot[i]), None)
            flat.optimizer.state.pop(piece.tensor, None)
            if first is not None:
                flat.optimizer.state[piece.tensor] = {
                    key: _piece_value(piece, key, of_slot, value) for key, value in of_slot[first].items()
                }


def _piece_value(piece: Piece, key: str, of_slot: list[dict[str, Any]], example: Any) -> Any:
    if not isinstance(example, Tensor):
        return example
    if example.dim() == 0:
        return example.clone()
    value = torch.zeros(piece.world.numel, dtype=example.dtype, device=piece.tensor.device)
    unit = piece.unit
    for fragment in unit.layout.fragments_in(piece.world):
        saved = of_slot[unit.slot_index(fragment.slot.name)].get(key)
        if saved is not None:
            value[fragment.local.slice] = saved.reshape(-1)[fragment.param.slice]
    return value


def _scalars(values: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    """What all parameters of one piece must agree in."""
    items = ((key, float(value)) for key, value in values.items() if not isinstance(value, Tensor) or not value.dim())
    return tuple(sorted(items)) if values else (("", 0.0),)


def _schema(flat: FlatStep, collectives: Collectives) -> dict[str, tuple[str, bool]]:
    """State key -> (dtype, is a scalar), over all ranks (one with an empty shard has no state of its own)."""
    mine = {
        key: (str(value.dtype).removeprefix("torch."), value.dim() == 0)
        for state in flat.optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    return {key: tuple(kind) for found in collectives.exchange_objects(mine) for key, kind in found.items()}


def _gather(flat: FlatStep, collectives: Collectives, unit: Unit, value_of: Any, dtype: str) -> Tensor:
    """[layout.numel]: the value of each piece (elementwise, or one scalar) in its place, from all ranks."""
    full = torch.zeros(unit.layout.numel, dtype=getattr(torch, dtype), device=unit.weights.own().device)
    for piece in flat.of_unit(unit):
        if flat.optimizer.state.get(piece.tensor):
            full[piece.world.slice] = value_of(piece)
    if unit.plan.main is SHARDED:
        collectives.all_gather(full, unit=unit.name, phase="state").wait()
    return full
