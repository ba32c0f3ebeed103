"""The state of elementwise optimizers: held per piece of main, gathered to torch's own layout, and cut again.

In a piece, which is 1-D, the shape of an item tells whether it has a value per element or one for all. For a piece or
parameter of a single element it does not: moments and step counts look alike. Then the optimizer class decides.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import InvalidValue
from zeroshard.full_model.full_state import EVERYWHERE, Destination
from zeroshard.io.tensor_file import DTYPE_NAMES, DTYPES
from zeroshard.io.values import decode, encode, no_tensors
from zeroshard.layout.cuts import cut, sizes_for
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import Fragment, Slot
from zeroshard.placement import REPLICATED
from zeroshard.step.assignment import Assignment, shows_gradient
from zeroshard.step.inner import Inner, bring_up_to_date, describe_together, expect_no_reads, where_torch_puts
from zeroshard.step.low_bit import dense, quantise
from zeroshard.step.stepper import (
    FullState,
    Need,
    SavedState,
    SavedTensor,
    StateChunk,
    StateEntry,
    expect_dense,
    whole_entry,
)
from zeroshard.storage.unit import Unit

ELEMENTWISE, SCALAR, PLAIN = "elementwise", "scalar", "plain"
"""The forms of an item of state: a value for every element; a tensor of one number; no tensor."""

Described = dict[str, list[Any]]
"""Key -> [ELEMENTWISE, dtype], [SCALAR, dtype, shape, number] or [PLAIN, value as JSON]."""


@dataclass(eq=False, slots=True)
class Piece:
    """One flat parameter of the inner optimizer.

    Attributes:
        world: its range in the unit's buffers.
        group: index of the param group.
        tensor: [world.numel] in the main dtype; the key of the inner optimizer's state. A view of main; or, if main
            must be joined, pointed to scratch during the step.
        active: whether it takes part in the next step (its parameters have gradients).
    """

    unit: Unit
    world: Interval
    group: int
    tensor: Tensor
    active: bool = True


class FlatState:
    """The pieces that this rank updates, and their state in the inner optimizer.

    Attributes:
        pieces: all pieces, in unit order; another tuple, once some have been cut further.
        inner: the inner optimizer, whose parameters are the pieces.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment, self._groups = assignment, assignment.groups
        self._piece_numel = sizes_for(assignment.collectives.device.type).piece
        self.pieces = tuple(
            Piece(unit, world, group, main_tensor(unit, world))
            for unit, keys in self._groups.items()
            for world, group in self._cut(unit, keys)
        )
        if any(unit.main.needs_scratch for unit in self._groups):  # the pieces are joined in a step
            expect_no_reads(assignment.optimizer_class, assignment.defaults, [torch.empty(4, device="meta")])
        self.inner = Inner(assignment, self.tensors_of)

    # Pieces ------------------------------------------------------------------------------------------------------

    def tensors_of(self, group: int) -> list[Tensor]:
        return [piece.tensor for piece in self.pieces if piece.group == group]

    def of_unit(self, unit: Unit) -> list[Piece]:
        return [piece for piece in self.pieces if piece.unit is unit]

    def with_gradients(self) -> list[Tensor]:
        """The tensors of the pieces for whose parameters there is something in `p.grad`."""
        return [one.tensor for one in self.pieces if shows_gradient(one.unit, one.unit.layout.slots_in(one.world))]

    def refine(self, unit: Unit, marks: Sequence[Hashable]) -> None:
        """Cut the pieces of a unit also where the marks (one per slot) of neighbours differ. Values do not change."""
        old = self.of_unit(unit)
        if not old:
            return
        new: list[Piece] = []
        keys = [None if group is None else (group, mark) for group, mark in zip(self._groups[unit], marks, strict=True)]
        fresh = [world for world, _ in self._cut(unit, keys)]
        for piece in old:
            parts = _split(piece, [world & piece.world for world in fresh if world & piece.world])
            if parts != [piece]:
                self._cut_state(piece, parts)
            new += parts
        position = self.pieces.index(old[0])
        self.pieces = (*self.pieces[:position], *new, *self.pieces[position + len(old) :])
        for index, group in self.inner.groups.items():
            group["params"] = self.tensors_of(index)

    def _cut_state(self, piece: Piece, parts: Sequence[Piece]) -> None:
        """Give the parts of a piece its state."""
        state = self.inner.state_of(piece.tensor)
        self.inner.set_state(piece.tensor, {})
        for part in parts:
            local, of_part = part.world.relative_to(piece.world.start).slice, {}
            for key, value in state.items():
                found = dense(value)[local] if self._form(piece, key, value) == ELEMENTWISE else value
                of_part[key] = self._as_held(part, key, found.clone() if isinstance(found, Tensor) else found)
            self.inner.set_state(part.tensor, of_part)

    def _cut(self, unit: Unit, keys: Sequence[Hashable | None]) -> Iterator[tuple[Interval, int]]:
        """The pieces that this rank updates: their ranges and param groups. Neighbouring slots with different `keys`
        (finer than groups) are cut."""
        assert unit.trainable, f"unit {unit.name} is frozen"
        for world in cut(unit.layout, keys, unit.main.interval, self._piece_numel, by_slot=unit.grads.is_apart):
            slots = unit.layout.slots_in(world)
            group = self._groups[unit][slots[0]] if slots else None
            if group is not None:  # padding alone is not stepped: it stays zero
                yield world, group

    def _form(self, piece: Piece, key: str, value: Any) -> str:
        """The form of an item of a piece's state.

        Raises:
            ValueError: it is a tensor of another shape.
        """
        if not isinstance(value, Tensor):
            return PLAIN
        if value.shape == piece.tensor.shape and (value.numel() != 1 or self.elementwise(piece.group).get(key, True)):
            return ELEMENTWISE
        if value.numel() == 1:
            return SCALAR
        layout = piece.unit.layout
        raise InvalidValue(
            f"the optimizer's state {key!r} of {layout.slots[layout.slots_in(piece.world)[0]].name} has the shape "
            f"{tuple(value.shape)}: neither elementwise nor a single number"
        )

    def _as_held(self, piece: Piece, key: str, value: Any) -> Any:
        """An item of a piece's state in the form that the class expects: torchao's classes quantise moments, by their
        method `_new_buffer`."""
        if not isinstance(value, Tensor):
            return value
        if value.shape != piece.tensor.shape:
            return where_torch_puts(key, value, self.inner.groups[piece.group], piece.tensor.device)
        if not self._quantises:
            return value
        held = self.inner.optimizer._new_buffer(piece.tensor, key == "exp_avg")  # type: ignore[attr-defined]
        return quantise(held, value)

    @property
    def _quantises(self) -> bool:
        """Whether the class quantises moments, and has a method for it (torchao's do)."""
        return hasattr(self.inner.optimizer, "_new_buffer")

    # Storing -----------------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[StateEntry]:
        """The state of the own shard. Single numbers are stored by the rank that has the parameter's first element."""
        for piece in self.pieces:
            state = self.inner.state_of(piece.tensor)
            for fragment in piece.unit.layout.fragments_in(piece.world & piece.unit.own_shard()):
                slot, param = fragment.slot, fragment.param
                for key, value in state.items():
                    if self._form(piece, key, value) == ELEMENTWISE:
                        if not self._quantises:
                            expect_dense(slot.name, key, value)
                        read = partial(_read_fragment, value, fragment)
                        yield StateChunk(slot.name, key, slot.shape, value.dtype, param, False, read)
                    elif param.start == 0:  # one rank per parameter
                        yield whole_entry(slot.name, key, value, False)

    # Loading -----------------------------------------------------------------------------------------------------

    def needs(self) -> Iterator[Need]:
        for member in self._assignment.members():
            world = member.slot.world
            if held := world & member.unit.main.interval:
                yield Need(member.parameter, member.slot, held.relative_to(world.start))

    def fits(self, slot: Slot, shape: tuple[int, ...]) -> bool:
        return shape == slot.shape or torch.Size(shape).numel() == slot.world.numel == 1

    def elementwise(self, group: int) -> Mapping[str, bool]:
        return self.inner.elementwise(group)

    @torch.no_grad()
    def load(self, state: SavedState, only: Collection[Tensor] | None = None) -> None:
        """Pieces are cut where parameters have different single numbers (step counts), or where the state of only some
        parameters is loaded."""
        for unit, groups in self._groups.items():
            slots = list(zip(unit.parameters, groups, strict=True))
            loaded = [group is not None and (only is None or parameter in only) for parameter, group in slots]
            if not any(loaded):
                continue
            of_slot = [state.get(parameter, {}) if loaded[index] else {} for index, (parameter, _) in enumerate(slots)]
            marks = [_same_in_a_piece(values) if loaded[index] else None for index, values in enumerate(of_slot)]
            self.refine(unit, marks)
            for piece in self.of_unit(unit):
                of_piece = [index for index in unit.layout.slots_in(piece.world) if loaded[index]]
                if of_piece:
                    self._load_piece(piece, of_slot, next((of_slot[i] for i in of_piece if of_slot[i]), {}))
        bring_up_to_date(self.inner.optimizer)

    def _load_piece(self, piece: Piece, of_slot: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> None:
        """`first`: the state of a slot in the piece, for its keys."""
        self.inner.set_state(piece.tensor, {})  # free the old state before the new one is allocated
        values = {key: _piece_value(piece, key, of_slot, value) for key, value in first.items()}
        self.inner.set_state(piece.tensor, {key: self._as_held(piece, key, value) for key, value in values.items()})

    # Gathering ---------------------------------------------------------------------------------------------------

    def gather(self, only: Collection[Tensor] | None = None, destination: Destination = EVERYWHERE) -> FullState:
        """Unit by unit and key by key, so that it needs only one full buffer at a time."""
        result: FullState = {}
        keeps = destination.includes(self._assignment.collectives.mesh.world.rank)
        for unit, of_slot in self._described(only).items():
            dtypes: dict[str, torch.dtype] = {}
            for described in of_slot.values():
                for key, (form, *rest) in described.items():
                    if form == ELEMENTWISE:
                        dtypes[key] = torch.promote_types(dtypes.get(key, DTYPES[rest[0]]), DTYPES[rest[0]])
            for index, described in of_slot.items() if keeps else ():
                result[unit.parameters[index]] = {key: _value(item, destination) for key, item in described.items()}
            for key, dtype in dtypes.items():
                full = self._gather_key(unit, key, dtype)
                for index, described in of_slot.items() if keeps else ():
                    if described.get(key, [PLAIN])[0] == ELEMENTWISE:
                        slot, own_dtype = unit.layout.slots[index], DTYPES[described[key][1]]
                        result[unit.parameters[index]][key] = destination.copy(
                            full[slot.world.slice].view(slot.shape), own_dtype
                        )
                del full  # before the next one is gathered
        return result

    def parameters(self) -> list[Tensor]:
        return [unit.parameters[index] for unit, of_slot in self._described(None).items() for index in of_slot]

    def _described(self, only: Collection[Tensor] | None) -> dict[Unit, dict[int, Described]]:
        """Unit -> slot -> description of its state, from the rank that holds the first element. Collective."""
        units = list(self._groups)

        def describe() -> list[Any]:
            pieces = {unit: [p for p in self.of_unit(unit) if self.inner.state_of(p.tensor)] for unit in units}
            mine: list[Any] = []
            for member in self._assignment.members():
                unit, slot = member.unit, member.slot
                first = Interval(slot.world.start, slot.world.start + 1)
                if slot.world and first in unit.own_shard() and (only is None or member.parameter in only):
                    holding = [piece for piece in pieces[unit] if first in piece.world]
                    mine += [[units.index(unit), member.index, self._describe(piece, slot)] for piece in holding]
            return mine

        found = {(number, index): item for number, index, item in describe_together(self._assignment, describe)}
        result: dict[Unit, dict[int, Described]] = {}
        for (number, index), described in sorted(found.items()):  # replicas describe the same
            result.setdefault(units[number], {})[index] = described
        return result

    def _describe(self, piece: Piece, slot: Slot) -> Described:
        result: Described = {}
        for key, value in self.inner.state_of(piece.tensor).items():
            where = f"the optimizer's state {key!r} of {slot.name}"
            if not isinstance(key, str):
                raise InvalidValue(f"{where}: its name must be a text")
            form = self._form(piece, key, value)
            if form == PLAIN:
                result[key] = [PLAIN, encode(value, no_tensors, where)]
            elif form == ELEMENTWISE:
                result[key] = [ELEMENTWISE, DTYPE_NAMES[value.dtype]]
            else:
                result[key] = [SCALAR, DTYPE_NAMES[value.dtype], list(value.shape), value.item()]
        return result

    def _gather_key(self, unit: Unit, key: str, dtype: torch.dtype) -> Tensor:
        """[layout.numel]: one elementwise item of the state, gathered from the pieces of all ranks. Collective."""
        gathered = unit.new_buffer(dtype, unit.plan.main)
        assert gathered.full is not None
        for piece in self.of_unit(unit):
            value = self.inner.state_of(piece.tensor).get(key)
            if self._form(piece, key, value) == ELEMENTWISE:
                gathered.full[piece.world.slice] = dense(value)
        gathered.redistribute(REPLICATED, self._assignment.collectives, unit=unit.name, phase="state")
        gathered.arrive()
        return gathered.full


def main_tensor(unit: Unit, world: Interval) -> Tensor:
    """The tensor of a piece in the inner optimizer: a view of main; or a placeholder, if main must be joined first.
    It requires grad, as the parameter does: some classes leave out what does not."""
    main = unit.main
    if main.needs_scratch:
        return torch.zeros((), dtype=main.dtype, device=main.weights.device).expand(world.numel).requires_grad_()
    return main.read(world).detach().requires_grad_()


def _split(piece: Piece, parts: Sequence[Interval]) -> list[Piece]:
    if len(parts) == 1:
        return [piece]
    return [Piece(piece.unit, part, piece.group, main_tensor(piece.unit, part), piece.active) for part in parts]


def _read_fragment(value: Tensor, fragment: Fragment, param: Interval) -> Tensor:
    """Elements `param` of a parameter's state, from the state of its piece. Quantised state is dequantised."""
    return dense(value)[fragment.local.slice][param.relative_to(fragment.param.start).slice]


def _piece_value(piece: Piece, key: str, of_slot: Sequence[Mapping[str, Any]], example: Any) -> Any:
    if isinstance(example, Tensor):
        return example.clone()
    if not isinstance(example, SavedTensor):
        return example
    value = torch.zeros(piece.world.numel, dtype=example.dtype, device=piece.tensor.device)
    for fragment in piece.unit.layout.fragments_in(piece.world):
        saved = of_slot[fragment.index].get(key)
        if saved is not None:
            saved.read(fragment.param, value[fragment.local.slice])
    return value


def _same_in_a_piece(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What all parameters of one piece must have in common: which items, the dtypes of tensors, and other values."""
    common = {
        key: value.dtype if isinstance(value, SavedTensor) else value.item() if isinstance(value, Tensor) else value
        for key, value in values.items()
    }
    return tuple(sorted((key, repr(value)) for key, value in common.items()))


def _value(item: Sequence[Any], destination: Destination) -> Any:
    """A described item that is not elementwise; None for one that is: its values come later."""
    form, *rest = item
    if form == SCALAR:
        dtype, shape, number = rest
        return destination.copy(torch.tensor(number, dtype=DTYPES[dtype], device="cpu").view(shape))
    return decode(rest[0], _nothing) if form == PLAIN else None


def _nothing(name: str) -> Tensor:
    raise AssertionError("there is no tensor in a plain value")
