"""Data of parameters that the user replaces (`p.data = values`) inside of `handle.unsharded(write=True)`.

Until the end of the block such a parameter stays as the user has left it. Then it gets its place in the full buffer
back, and the values are written there.

[Note: views that were kept] In plain torch `old = p.data; p.data = values` leaves the old values in `old`, and code
that swaps weights (a moving average, for an evaluation) puts them back later. Here `old` lies in the buffer, where the
new values come. Nothing tells who has such a view, but a storage counts its tensors: there must be no more at the end
than at the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.model.absent import as_tensors
from zeroshard.model.places import has_place, overlaps
from zeroshard.storage.unit import Unit

Found = dict[int, Tensor]
"""Slot -> the data that its parameter had."""


def uses(units: Iterable[Unit]) -> list[int]:
    """How many tensors lie in the memory of each unit's full weights, which must be shown, if all parameters do."""
    found = []
    for unit in units:
        full = unit.weights.full.untyped_storage().data_ptr()
        with as_tensors():  # a block around may have replaced some
            elsewhere = [p for p in unit.parameters if p.numel() and p.untyped_storage().data_ptr() != full]
        found.append(unit.weights.buffer.num_uses() + len(elsewhere))
    return found


def put_back(unit: Unit) -> Found:
    """Point the parameters whose data the user has replaced at their values in the buffer again. Returns what they
    had."""
    found: Found = {}
    if not unit.weights.shown:  # closed, or parked
        return found
    with as_tensors():
        for index, (parameter, view) in enumerate(zip(unit.parameters, unit.weights.buffer.views(), strict=True)):
            if not _is_same(parameter, view):
                found[index] = parameter.data
                parameter.data = view
    return found


def take_over(units: Sequence[Unit], found: Sequence[Found], before: Sequence[int], every: Iterable[Unit]) -> None:
    """Write the data that parameters of these units had, to the parameters.

    Args:
        found: of each unit, as `put_back` has returned it.
        before: the `uses` when the block began.
        every: all units of the model.

    Raises:
        ValueError: data of another shape, dtype or device; or in the memory of another parameter.
        RuntimeError: a view of the old values was kept.
    """
    for unit, of_unit in zip(units, found, strict=True):
        for index, data in of_unit.items():
            _expect_fit(unit, index, data)
    _expect_apart(units, found, every)
    for unit, of_unit, num_before, now in zip(units, found, before, uses(units), strict=True):
        full = unit.weights.full.untyped_storage().data_ptr()
        mine = sum(data.untyped_storage().data_ptr() == full for data in of_unit.values())
        if of_unit and now - mine > num_before:
            raise InvalidState(
                f"unsharded: the data of {_names(unit, of_unit)} have been replaced, and a tensor that shares the "
                "memory of the old ones is kept (by old = p.data, state_dict(), or the graph of a forward): it would "
                "get the new values. Keep a copy (old = p.data.clone()), del the tensor, run the backward of that "
                "forward inside the block, or put the old data back before the block ends"
            )
    with torch.no_grad():
        for unit, of_unit in zip(units, found, strict=True):
            for index, data in of_unit.items():
                # A clone, as the data may be a view of the same memory (`p.data = p.data.t()`).
                unit.parameters[index].copy_(data.clone())


def _is_same(parameter: Tensor, view: Tensor) -> bool:
    return (
        parameter.data_ptr() == view.data_ptr()
        and parameter.shape == view.shape
        and parameter.stride() == view.stride()
        and parameter.dtype == view.dtype
    )


def _expect_fit(unit: Unit, index: int, data: Tensor) -> None:
    view, name = unit.weights.buffer.views()[index], unit.layout.slots[index].name
    if data.shape != view.shape or data.dtype != view.dtype or data.device != view.device:
        raise InvalidValue(
            f"unsharded: the data of {name} have been replaced by a tensor of shape {tuple(data.shape)}, {data.dtype} "
            f"on {data.device}; expected {tuple(view.shape)}, {view.dtype} on {view.device}, as before. All are as "
            "before. Write p.data = values.to(p), of the same shape; to change dtypes or shapes, close() the handle, "
            "and shard() the changed model"
        )


def _expect_apart(units: Sequence[Unit], found: Sequence[Found], every: Iterable[Unit]) -> None:
    """Parameters that share memory would be trained apart here, and together in plain torch."""
    replaced = [
        (unit.layout.slots[index].name, data, unit.weights.buffer.views()[index])
        for unit, of_unit in zip(units, found, strict=True)
        for index, data in of_unit.items()
        if has_place(data)
    ]
    if not replaced:
        return
    weights = [unit.weights for unit in every if unit.weights.buffer.full is not None]
    for name, data, view in replaced:
        if data.data_ptr() != view.data_ptr() and any(one.holds(data) for one in weights):
            _refuse(name, "another parameter")
    for name, other in overlaps((name, data) for name, data, _ in replaced):
        _refuse(name, other)


def _refuse(name: str, other: str) -> None:
    raise InvalidValue(
        f"unsharded: p.data = ... has given {name} the memory of {other}, and they would be trained apart. All are as "
        "before. Give it a copy (p.data = q.data.clone()), or tie weights by one parameter in both places, before "
        "shard()"
    )


def _names(unit: Unit, found: Mapping[int, Tensor]) -> str:
    names = [unit.layout.slots[index].name for index in found]
    return ", ".join(names[:3]) + " and others" * (len(names) > 3)
