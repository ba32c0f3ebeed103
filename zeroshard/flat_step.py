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
from typing import Any

import torch
from torch import Tensor

from zeroshard.interval import Interval
from zeroshard.low_bit import dense, quantise
from zeroshard.pieces import BATCH_NUMEL, Piece, batches, cut, slots_in
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


def take_options(inner: dict[int, dict[str, Any]], options: Sequence[dict[str, Any]]) -> None:
    """Hyper-parameters of the user's param groups -> those of the inner optimizer, by index."""
    for index, group in inner.items():
        for key, value in options[index].items():
            if isinstance(group.get(key), Tensor) and isinstance(value, (int, float)):
                group[key].fill_(value)  # a class that made a tensor of its learning rate wants to keep it
            elif key != "params":
                group[key] = value


def give_options(inner: dict[int, dict[str, Any]], options: Sequence[dict[str, Any]]) -> None:
    """Back again: some classes keep counts in their groups."""
    for index, group in inner.items():
        options[index].update({key: value for key, value in group.items() if key != "params"})


class FlatStep:
    """Owns the inner optimizer, whose parameters are the pieces that this rank updates.

    Attributes:
        optimizer: an instance of the user's class.
        pieces: all of them, in unit order.
        groups: unit -> index of the param group of each slot (None: not this optimizer's).
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        options: dict[int, dict[str, Any]],
        defaults: dict[str, Any],
        groups: dict[Unit, list[int | None]],
    ) -> None:
        """`options`: the hyper-parameters of each param group that is this stepper's, by its index."""
        self.groups = groups
        self.pieces = [piece for unit, keys in groups.items() for piece in _pieces(unit, keys, keys)]
        inner_groups = [{**option, "params": self._tensors_of(index)} for index, option in options.items()]
        self.optimizer = optimizer_class(inner_groups, **defaults)
        self._inner = dict(zip(options, self.optimizer.param_groups, strict=True))
        self._gradient_scratch = torch.empty(0)
        self._main_scratch = torch.empty(0)
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

    def as_held(self, piece: Piece, key: str, value: Any) -> Any:
        """An item of a piece's state as the class holds it: torchao's classes quantise moments, by this method; fused
        and capturable kernels want step counts on the device."""
        if not isinstance(value, Tensor):
            return value
        options = self._inner[piece.group]
        if not value.dim():
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
    ) -> None:
        """One step of all active pieces.

        Args:
            options: the user's param groups; their hyper-parameters take effect (and changes by the class go back).
            start: called before the first piece of a unit is read; updated: after its last one is written.
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
                self.optimizer.step()
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

    def _load(self, pieces: Sequence[Piece], update: Update) -> None:
        gradient_at = main_at = 0
        for piece in pieces:
            numel, main = piece.world.numel, piece.unit.main
            assert main is not None
            if main.needs_scratch:
                piece.tensor.data = main.read(piece.world, self._main_scratch[main_at : main_at + numel])
                main_at += numel
            if _needs_gradient_scratch(piece):
                gradient = self._gradient_scratch[gradient_at : gradient_at + numel]
                gradient_at += numel
                piece.unit.read_gradient(piece.world, gradient)
            else:
                assert piece.unit.grads is not None
                gradient = piece.unit.grads.piece(piece.world)
            piece.tensor.grad = update.apply(gradient)

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
        kinds["scratch"] = [self._gradient_scratch, self._main_scratch]
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
        self._gradient_scratch = self._scratch(self._gradient_scratch, _needs_gradient_scratch)
        self._main_scratch = self._scratch(
            self._main_scratch, lambda piece: piece.unit.main is not None and piece.unit.main.needs_scratch
        )

    def _scratch(self, current: Tensor, needed: Callable[[Piece], bool]) -> Tensor:
        numel = max((sum(p.world.numel for p in batch.pieces if needed(p)) for batch in self._batches), default=0)
        if numel <= current.numel():
            return current
        main = self.pieces[0].unit.main
        assert main is not None
        return torch.empty(numel, dtype=main.dtype, device=main.weights.device)


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
    if value.numel() == numel and value.dim() == 1:
        return dense(value)[local].clone()
    if value.dim() == 0:
        return value.clone()
    raise RuntimeError(f"optimizer state {key!r} of shape {tuple(value.shape)} is neither elementwise nor a scalar")
