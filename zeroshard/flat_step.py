"""The user's optimizer class, on flat pieces of main: any elementwise optimizer, unmodified.

for each batch of pieces (a few MB: gradient, main and moments stay in cache between the four lines)
    gradient -> main's dtype, times one factor (mean over ranks, loss scale, clip: folded)
    main     -> joined, where only a remainder is kept
    inner optimizer steps
    main     -> weights (rounded, or split)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.inner import (
    Arguments,
    OptimizerClass,
    Options,
    give_options,
    is_elementwise_state,
    run_step,
    take_options,
)
from zeroshard.interval import Interval
from zeroshard.low_bit import dense, quantise
from zeroshard.pieces import BATCH_NUMEL, Piece, Scratch, batches, cut, scratch_bytes, slots_in
from zeroshard.unit import Unit


@dataclass(frozen=True)
class Batch:
    """Pieces stepped together; `finished`: units of which no piece comes later."""

    pieces: tuple[Piece, ...]
    finished: tuple[Unit, ...]


@dataclass(frozen=True)
class Update:
    """What is done to the summed gradient on its way into a step: one multiply, and perhaps a clamp.

    Attributes:
        factor: mean over ranks (or tokens), loss scale and norm clip in one number.
        clip_value: bound on the absolute value after that.
    """

    factor: float
    clip_value: float | None = None

    def apply(self, gradient: Tensor) -> Tensor:
        """In place."""
        if self.factor != 1.0:
            gradient.mul_(self.factor)
        return gradient if self.clip_value is None else gradient.clamp_(-self.clip_value, self.clip_value)


class FlatStep:
    """Owns the inner optimizer, whose parameters are the pieces that this rank updates.

    Attributes:
        optimizer: an instance of the user's class.
        pieces: all of them, in unit order.
        groups: unit -> index of the param group of each slot (None: not this optimizer's).
    """

    def __init__(
        self,
        optimizer_class: OptimizerClass,
        options: dict[int, Options],
        defaults: Options,
        groups: dict[Unit, list[int | None]],
    ) -> None:
        """`options`: the hyper-parameters of each param group that is this stepper's, by its index."""
        self.groups = groups
        self.pieces = [piece for unit, keys in groups.items() for piece in _pieces(unit, keys, keys)]
        inner_groups = [{**option, "params": self._tensors_of(index)} for index, option in options.items()]
        self.optimizer = optimizer_class(inner_groups, **defaults)
        self._inner = dict(zip(options, self.optimizer.param_groups, strict=True))
        self._class, self._defaults = optimizer_class, defaults
        self._elementwise: dict[int, dict[str, bool]] = {}
        self._gradient_scratch, self._main_scratch, self._held_scratch = Scratch(), Scratch(), Scratch()
        self._batches: tuple[Batch, ...] = ()
        self._active: dict[Unit, list[bool]] = {}
        self._plan_batches()

    # Cutting -----------------------------------------------------------------------------------------------------

    def set_active(self, active: dict[Unit, list[bool]]) -> None:
        """Which slots take part from now on. Where one piece holds both kinds it is cut, and its state with it."""
        if active == self._active:
            return
        self._active, changed = active, False
        for unit, flags in active.items():
            if any(len({flags[i] for i in slots_in(unit, piece.world)}) > 1 for piece in self.of_unit(unit)):
                self.refine(unit, flags)
                changed = True
        for piece in self.pieces:
            flags = active[piece.unit]
            is_active = any(flags[i] for i in slots_in(piece.unit, piece.world))
            changed |= is_active != piece.active
            piece.active = is_active
        if changed:
            self._plan_batches()

    def refine(self, unit: Unit, marks: Sequence[Hashable]) -> None:
        """Cut the pieces of a unit also where the marks (one per slot) of neighbours differ. Values do not change."""
        old = self.of_unit(unit)
        if not old:
            return
        new: list[Piece] = []
        keys = [None if group is None else (group, mark) for group, mark in zip(self.groups[unit], marks, strict=True)]
        fresh = list(_pieces(unit, self.groups[unit], keys))
        for piece in old:
            new += _split(piece, [part.world & piece.world for part in fresh if part.world & piece.world])
        for piece in set(old) - set(new):
            state = self.optimizer.state.pop(piece.tensor, None)
            for part in new if state else ():
                if part.world in piece.world:
                    local = part.world.relative_to(piece.world.start).slice
                    self.optimizer.state[part.tensor] = {
                        key: self.as_held(part, key, _part_of_state(key, value, local, piece.tensor.numel()))
                        for key, value in state.items()
                    }
        position = self.pieces.index(old[0])
        self.pieces[position : position + len(old)] = new
        for index, group in self._inner.items():
            group["params"] = self._tensors_of(index)
        self._plan_batches()

    def is_elementwise(self, piece: Piece, key: str, value: Tensor) -> bool:
        """Whether an item of a piece's state has a value for every element of it."""
        if value.shape != piece.tensor.shape:
            return False
        return value.numel() != 1 or self.elementwise_state(piece.group).get(key, True)

    def elementwise_state(self, group: int) -> dict[str, bool]:
        """What the class's state is made of, whatever the shapes say (see `inner.is_elementwise_state`)."""
        if group not in self._elementwise:
            options = {key: value for key, value in self._inner[group].items() if key != "params"}
            self._elementwise[group] = is_elementwise_state(self._class, options, self._defaults)
        return self._elementwise[group]

    def as_held(self, piece: Piece, key: str, value: Any) -> Any:
        """An item of a piece's state as the class holds it: torchao's classes quantise moments, by this method; fused
        and capturable kernels want step counts on the device."""
        if not isinstance(value, Tensor):
            return value
        options = self._inner[piece.group]
        if value.shape != piece.tensor.shape:
            return value.to(piece.tensor.device) if options.get("fused") or options.get("capturable") else value
        if not self.quantises:
            return value
        return quantise(self.optimizer._new_buffer(piece.tensor, key == "exp_avg"), value)  # type: ignore[attr-defined]

    @property
    def quantises(self) -> bool:
        """Whether the class holds moments in fewer bits, and says how (torchao's do)."""
        return hasattr(self.optimizer, "_new_buffer")

    def _tensors_of(self, group: int) -> list[Tensor]:
        return [piece.tensor for piece in self.pieces if piece.group == group]

    def of_unit(self, unit: Unit) -> list[Piece]:
        return [piece for piece in self.pieces if piece.unit is unit]

    # Gradients ---------------------------------------------------------------------------------------------------

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(param group, tensor) over the own shard, whatever this rank updates; nothing is copied."""
        for piece in self.pieces:
            own = piece.unit.own_shard()
            if piece.world in own:
                for tensor in piece.unit.gradient_views(piece.world):
                    yield piece.group, tensor

    # Stepping ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        options: Sequence[dict[str, Any]],
        update: Update,
        start: Callable[[Unit], None],
        updated: Callable[[Unit], None],
        arguments: Options,
    ) -> None:
        """One step of all active pieces.

        Args:
            options: the user's param groups; their hyper-parameters take effect (and changes by the class go back).
            start: called before the first piece of a unit is read; updated: after its last one is written.
            arguments: of the class's own `step`.
        """
        started: set[Unit] = set()
        try:
            for number, batch in enumerate(self._batches):
                for piece in batch.pieces:
                    if piece.unit not in started:
                        started.add(piece.unit)
                        start(piece.unit)
                self._load(batch.pieces, update)
                # Every group is stepped, and every batch starts from the same options: a class that counts steps in
                # its groups counts one, on all ranks, however many pieces there are.
                for index, group in self._inner.items():
                    group["params"] = [piece.tensor for piece in batch.pieces if piece.group == index]
                stepped = {index: group for index, group in self._inner.items() if group["params"] or not number}
                take_options(stepped, options)
                self.optimizer.param_groups = list(stepped.values())
                run_step(self.optimizer, arguments)
                self._store(batch.pieces)
                for unit in batch.finished:
                    updated(unit)
        finally:
            self.optimizer.param_groups = list(self._inner.values())
            for index, group in self._inner.items():
                group["params"] = self._tensors_of(index)
            for piece in self.pieces:
                piece.tensor.grad = None
        give_options(self._inner, options)

    @torch.no_grad()
    def call(self, name: str, arguments: Arguments, options: Sequence[Options]) -> Any:
        """Another method of the class, on all pieces; what it does to main reaches the weights."""
        take_options(self._inner, options)
        for piece in self.pieces:
            self._bring_main(piece, partial(torch.empty, dtype=piece.tensor.dtype, device=piece.tensor.device))
        result = getattr(self.optimizer, name)(*arguments[0], **arguments[1])
        for piece in self.pieces:
            assert piece.unit.main is not None
            piece.unit.main.write(piece.world, piece.tensor)
            if piece.unit.main.needs_scratch:
                piece.tensor.data = _main_tensor(piece.unit, piece.world)
        give_options(self._inner, options)
        return result

    def _load(self, pieces: Sequence[Piece], update: Update) -> None:
        for scratch in (self._gradient_scratch, self._main_scratch):
            scratch.rewind()
        for piece in pieces:
            numel, main = piece.world.numel, piece.unit.main
            assert main is not None
            self._bring_main(piece, partial(self._main_scratch.take, dtype=main.dtype))
            if _needs_gradient_scratch(piece):
                gradient = self._gradient_scratch.take(numel, main.dtype)
                piece.unit.read_gradient(piece.world, gradient)
            else:
                assert piece.unit.grads is not None
                gradient = piece.unit.grads.piece(piece.world)
            piece.tensor.grad = update.apply(gradient)

    def _bring_main(self, piece: Piece, scratch: Callable[[int], Tensor]) -> None:
        """Main of a piece, as it is now, in its tensor."""
        main = piece.unit.main
        assert main is not None
        if main.needs_scratch:
            piece.tensor.data = main.read(piece.world, scratch(piece.world.numel))
        elif main.follows:  # the tensor is a view of main
            self._held_scratch.rewind()
            main.follow(piece.world, self._held_scratch.take(piece.world.numel, main.weights.dtype))

    def _store(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            assert piece.unit.main is not None
            piece.tensor.grad = None
            piece.unit.main.write(piece.world, piece.tensor)

    # Memory ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[Tensor]]:
        """Optimizer state as large as main, the scalars beside it (step counts), and scratch."""
        kinds: dict[str, list[Tensor]] = {"state": [], "scalars": [], "scratch": []}
        for tensor, state in self.optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor):
                    kinds["state" if value.shape == tensor.shape else "scalars"].append(value)
        scratch = (self._gradient_scratch, self._main_scratch, self._held_scratch)
        kinds["scratch"] = [one.storage for one in scratch]
        return kinds

    def _plan_batches(self) -> None:
        """Fill batches in unit order, and hold as much scratch as the largest one needs."""
        active = [piece for piece in self.pieces if piece.active]
        limit = BATCH_NUMEL["cuda" if active and active[0].tensor.is_cuda else "cpu"]
        ranges = batches([piece.world.numel for piece in active], limit)
        # Every unit is finished once, in one order, on all ranks: also where this one has no piece of it.
        units, done = list(self.groups), 0
        planned = []
        for of_batch in ranges:
            end = units.index(active[of_batch.stop].unit) if of_batch.stop < len(active) else len(units)
            planned.append(Batch(tuple(active[i] for i in of_batch), tuple(units[done:end])))
            done = end
        self._batches = tuple(planned)
        self._reserve(self._gradient_scratch, _needs_gradient_scratch)
        self._reserve(self._main_scratch, lambda piece: piece.unit.main is not None and piece.unit.main.needs_scratch)

        held = [
            scratch_bytes(piece.world.numel, piece.unit.main.weights.dtype)
            for piece in self.pieces
            if piece.unit.main is not None and piece.unit.main.follows
        ]
        if held:
            self._held_scratch.reserve(max(held), self.pieces[0].tensor.device)

    def _reserve(self, scratch: Scratch, needed: Callable[[Piece], bool]) -> None:
        sizes = [
            sum(scratch_bytes(piece.world.numel, piece.tensor.dtype) for piece in batch.pieces if needed(piece))
            for batch in self._batches
        ]
        if any(sizes):
            scratch.reserve(max(sizes), self.pieces[0].tensor.device)


def _pieces(unit: Unit, groups: Sequence[int | None], keys: Sequence[Hashable | None]) -> Iterator[Piece]:
    """The pieces of what this rank updates; `keys` (finer than `groups`) say where neighbours are cut."""
    assert unit.main is not None, f"unit {unit.name} is frozen"
    for _, world in cut(unit.layout, keys):
        if world in unit.main.interval:
            slots = slots_in(unit, world)
            group = groups[slots[0]] if slots else None
            if group is not None:  # what is only padding stays zero by itself
                yield Piece(unit, world, group, _main_tensor(unit, world))


def _split(piece: Piece, parts: Sequence[Interval]) -> list[Piece]:
    if len(parts) == 1:
        return [piece]
    return [Piece(piece.unit, part, piece.group, _main_tensor(piece.unit, part), piece.active) for part in parts]


def _main_tensor(unit: Unit, world: Interval) -> Tensor:
    """What stands for a piece in the inner optimizer: a view of main, or a placeholder until it is joined."""
    main = unit.main
    assert main is not None
    if main.needs_scratch:
        return torch.zeros((), dtype=main.dtype, device=main.weights.device).expand(world.numel)
    return main.read(world).detach()


def _needs_gradient_scratch(piece: Piece) -> bool:
    grads, main = piece.unit.grads, piece.unit.main
    return grads is None or main is None or grads.buffer.dtype != main.dtype


def _part_of_state(key: str, value: Any, local: slice, numel: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == (numel,):
        return dense(value)[local].clone()
    if value.numel() == 1:
        return value.clone()
    raise RuntimeError(f"optimizer state {key!r} of shape {tuple(value.shape)} is neither elementwise nor a scalar")
