"""Steps flat pieces of main with the user's optimizer class: any elementwise optimizer, unmodified.

for each batch of pieces (a few MB, so that gradient, main and moments stay in a CPU's cache between the four lines)
    gradient -> main's dtype, times one factor (mean over ranks, loss scale and clip in one number)
    main     -> joined, if only a remainder is kept
    inner optimizer steps
    main     -> weights (rounded, or split)

All lines but the optimizer's process a *stretch* at a time, all neighbouring pieces of a unit: on a GPU the number of
operations then depends on the number of units, and not on the number of param groups in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.ranges import phase
from zeroshard.layout.cuts import SCRATCH_ALIGNMENT, batches, sizes_for
from zeroshard.layout.interval import Interval, round_up
from zeroshard.step.assignment import Assignment, Options
from zeroshard.step.flat_state import FlatState, Piece, main_tensor
from zeroshard.step.inner import Arguments, run_method, tried_step
from zeroshard.step.stepper import Update
from zeroshard.storage.main_weights import in_parts
from zeroshard.storage.unit import Unit


@dataclass(frozen=True)
class Stretch:
    """Pieces of one unit that lie side by side, in order."""

    pieces: tuple[Piece, ...]

    @cached_property  # like the next ones read in every step
    def unit(self) -> Unit:
        return self.pieces[0].unit

    @cached_property
    def world(self) -> Interval:
        return Interval(self.pieces[0].world.start, self.pieces[-1].world.stop)

    @property
    def is_cast(self) -> bool:
        """Whether gradients are cast to main's dtype."""
        return self.unit.grads.held_in != self.unit.main.dtype

    @property
    def is_joined(self) -> bool:
        """Whether main is joined from weights and remainder."""
        return self.unit.main.needs_scratch

    def gradients(self) -> Sequence[Tensor]:
        """The gradient of each piece, where it lies."""
        grads = self.unit.grads
        if not grads.is_apart:
            return self.divided(grads.read(self.world))
        of_slots = grads.views(self.world)
        if len(of_slots) == len(self.pieces):
            return of_slots
        both = zip(of_slots, self._sizes_in_slots, strict=True)
        return [part for tensor, sizes in both for part in tensor.split_with_sizes(sizes)]

    def divided(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views of a tensor of the whole stretch, one for each piece."""
        return (tensor,) if len(self.pieces) == 1 else tensor.split_with_sizes(self._sizes)

    @cached_property
    def _sizes(self) -> list[int]:
        return [piece.world.numel for piece in self.pieces]

    @cached_property
    def _sizes_in_slots(self) -> list[list[int]]:
        return [
            [piece.world.numel for piece in self.pieces if piece.world in fragment.world]
            for fragment in self.unit.layout.fragments_in(self.world)
        ]

    @cached_property
    def parts(self) -> tuple[tuple[Interval, slice], ...]:
        """Parts for one operation each (`Sizes.at_once`): in the full buffer, and in a tensor of the whole stretch."""
        start, at_once = self.world.start, sizes_for(self.pieces[0].tensor.device.type).at_once
        return tuple((part, part.relative_to(start).slice) for part in in_parts(self.world, at_once))


@dataclass(frozen=True)
class Batch:
    """Pieces that are stepped together. `finished`: units without pieces in later batches."""

    stretches: tuple[Stretch, ...]
    finished: tuple[Unit, ...]

    @property
    def pieces(self) -> Iterator[Piece]:
        for stretch in self.stretches:
            yield from stretch.pieces

    @cached_property
    def _tensors(self) -> dict[int, list[Tensor]]:
        found: dict[int, list[Tensor]] = {}
        for piece in self.pieces:
            found.setdefault(piece.group, []).append(piece.tensor)
        return found

    def tensors_of(self, group: int) -> list[Tensor]:
        return [*self._tensors.get(group, ())]


def scratch_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that a piece needs in a `Scratch`, rounded up so that the next piece is aligned."""
    return round_up(numel * dtype.itemsize, SCRATCH_ALIGNMENT)


class Scratch:
    """One storage that is divided among the pieces of a batch, and reused by the next batch."""

    def __init__(self, device: torch.device) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8, device=device)
        self._at = 0

    def reserve(self, num_bytes: int) -> None:
        """Make the storage at least this large. A larger one replaces it: its values are lost."""
        if num_bytes > self.storage.numel():
            self.storage = self.storage.new_empty(num_bytes)

    def rewind(self) -> None:
        self._at = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], uninitialised."""
        start, self._at = self._at, self._at + scratch_bytes(numel, dtype)
        return self.storage[start : start + numel * dtype.itemsize].view(dtype)


class FlatStep:
    """Steps the pieces of main that this rank updates, in batches (see `stepper.Stepper`).

    Attributes:
        state: the pieces, and their state in the inner optimizer.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.state = FlatState(assignment)
        self.optimizer = self.state.inner.optimizer
        device = assignment.collectives.device
        self._gradient_scratch, self._main_scratch, self._held_scratch = (Scratch(device) for _ in range(3))
        self._active: dict[Unit, list[bool]] = {}
        self._sizes = sizes_for(device.type)
        self._batches: tuple[Batch, ...] = ()
        # As they were cut at first: norms must not depend on where pieces have been cut since (a resumed run cuts
        # them elsewhere), as sums in another order have other last bits.
        self._own = tuple(_own_parts(self.state.pieces))
        self._planned_for: tuple[Piece, ...] | None = None
        self._plan()

    def _set_active(self, active: dict[Unit, list[bool]]) -> None:
        """Set which slots take part. A piece with slots that take part and others that do not is cut, with its
        state."""
        if active == self._active:
            return
        self._active, self._planned_for = {}, None  # first: if this is interrupted, the next call does it again
        for unit, flags in active.items():
            if any(
                len({flags[i] for i in unit.layout.slots_in(piece.world)}) > 1 for piece in self.state.of_unit(unit)
            ):
                self.state.refine(unit, flags)
        for piece in self.state.pieces:
            piece.active = any(active[piece.unit][i] for i in piece.unit.layout.slots_in(piece.world))
        self._active = active

    # Gradients ---------------------------------------------------------------------------------------------------

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(param group, gradient) of all pieces in the own shard, also if this rank updates more than its shard. Where
        gradients lie apart, whole ones."""
        for unit, group, world in self._own:
            for tensor in unit.grads.views(world):
                yield group, tensor

    # Stepping ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        options: Sequence[Options],
        active: dict[Unit, list[bool]],
        update: Update,
        updated: Callable[[Unit], None],
        arguments: Options,
    ) -> Exception | None:
        """One step of all active pieces, a batch at a time."""
        self._set_active(active)
        self._plan()
        inner, raised = self.state.inner, None
        try:
            for number, batch in enumerate(self._batches):
                raised = self._step_batch(batch, options, update, arguments, is_first=not number) or raised
                for unit in batch.finished:
                    updated(unit)
        finally:
            inner.optimizer.param_groups[:] = inner.groups.values()
            for index, group in inner.groups.items():
                group["params"] = self.state.tensors_of(index)
        inner.write_options(options)
        return raised

    @phase("step: batch")
    def _step_batch(
        self,
        batch: Batch,
        options: Sequence[Options],
        update: Update,
        arguments: Options,
        *,
        is_first: bool,
    ) -> Exception | None:
        inner = self.state.inner
        self._gradient_scratch.rewind()
        self._main_scratch.rewind()
        try:
            joined = [self._load(stretch, update) for stretch in batch.stretches]
            apart = (piece.tensor.grad for piece in batch.pieces if piece.unit.grads.is_apart)
            if update.changes and (gradients := [gradient for gradient in apart if gradient is not None]):
                update.apply(gradients)
            # The first batch steps every group, also groups without pieces on this rank, and every batch starts from
            # the same options. So a class that counts steps in its groups counts one step, on all ranks, however many
            # pieces there are.
            for index, group in inner.groups.items():
                group["params"] = batch.tensors_of(index)
            stepped = {index: group for index, group in inner.groups.items() if group["params"] or is_first}
            inner.read_options(options, stepped)
            inner.optimizer.param_groups[:] = stepped.values()
            raised = tried_step(inner.optimizer, arguments, update.is_void)
        finally:
            # Also after an error: gradients are scratch that the next step overwrites, or views of a bucket that will
            # be given back.
            for piece in batch.pieces:
                piece.tensor.grad = None
        for stretch, main in zip(batch.stretches, joined, strict=True):
            self._store(stretch, main, in_step=True)
        return raised

    @torch.no_grad()
    def call(self, name: str, arguments: Arguments, options: Sequence[Options]) -> Any:
        """Call another method of the class on all pieces; then set the weights from main."""
        with self.state.inner.with_options(options):
            every = _stretches(self.state.pieces)
            new = partial(torch.empty, device=self.assignment.collectives.device)
            joined = [self._bring_main(stretch, new) for stretch in every]
            result = run_method(self.optimizer, name, arguments, self.state.with_gradients())
            for stretch, main in zip(every, joined, strict=True):
                self._store(stretch, main)
                for piece in stretch.pieces if main is not None else ():
                    piece.tensor.data = main_tensor(piece.unit, piece.world)
        return result

    def _load(self, stretch: Stretch, update: Update) -> Tensor | None:
        """Give the pieces their gradients, times the factor, and main. Returns main as `_bring_main`."""
        grads, joined = stretch.unit.grads, self._bring_main(stretch, self._main_scratch.allocate)
        if stretch.is_cast:
            cast = self._gradient_scratch.allocate(stretch.world.numel, stretch.unit.main.dtype)
            for part, place in stretch.parts:
                update.apply([grads.read(part, cast[place])])
            gradients = stretch.divided(cast)
        else:
            gradients = stretch.gradients()
            for part, _ in stretch.parts if update.changes and not grads.is_apart else ():
                update.apply([grads.read(part)])
        for piece, gradient in zip(stretch.pieces, gradients, strict=True):
            piece.tensor.grad = gradient
        return joined

    def _bring_main(self, stretch: Stretch, new: Callable[..., Tensor]) -> Tensor | None:
        """Put the current main into the tensors of the pieces. Returns it if it is joined; None: it is where it rests.
        `new`: (numel, dtype=) -> a tensor."""
        main = stretch.unit.main
        if not stretch.is_joined:  # the tensors are views of main
            if main.follows:
                self._held_scratch.rewind()
                at_once = min(self._sizes.at_once, stretch.world.numel)
                main.follow(stretch.world, self._held_scratch.allocate(at_once, main.weights.dtype))
            return None
        joined = new(stretch.world.numel, dtype=main.dtype)
        for part, place in stretch.parts:
            main.read(part, joined[place])
        for piece, of_piece in zip(stretch.pieces, stretch.divided(joined), strict=True):
            # Set `.data`, so that the tensor object stays: it is the key of its state in the inner optimizer.
            piece.tensor.data = of_piece
        return joined

    def _store(self, stretch: Stretch, joined: Tensor | None, *, in_step: bool = False) -> None:
        stretch.unit.main.write(stretch.world, joined, at_once=self._sizes.at_once, in_step=in_step)

    # Memory ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors held, by kind: state per element, scalars (step counts), and scratch."""
        self._plan()
        scratch = (self._gradient_scratch, self._main_scratch, self._held_scratch)
        return self.state.inner.tensors() | {"scratch": [one.storage for one in scratch]}

    def _plan(self) -> None:
        """Divide the pieces into batches in unit order, and reserve scratch for the largest. No effect if neither the
        pieces have changed, nor which of them are active."""
        if self._planned_for is self.state.pieces:
            return
        # Every unit must be finished exactly once, in the same order on all ranks, also if this rank has no piece of
        # it: `updated` starts a gather.
        units, done = list(self.assignment.groups), 0
        pieces = [piece for piece in self.state.pieces if piece.active]
        is_in_place = all(_is_in_place(unit) for unit in {piece.unit for piece in pieces})
        limit = self._sizes.in_place if is_in_place else self._sizes.batch
        planned = [pieces[one.start : one.stop] for one in batches([piece.world.numel for piece in pieces], limit)]
        found = []
        for of_batch, following in zip(planned, [*planned[1:], []], strict=True):
            end = units.index(following[0].unit) if following else len(units)
            found.append(Batch(tuple(_stretches(of_batch)), tuple(units[done:end])))
            done = end
        self._batches, self._planned_for = tuple(found), self.state.pieces
        self._gradient_scratch.reserve(self._most(lambda stretch: stretch.is_cast))
        self._main_scratch.reserve(self._most(lambda stretch: stretch.is_joined))
        held = (
            scratch_bytes(min(self._sizes.at_once, unit.main.interval.numel), unit.main.weights.dtype)
            for unit in {piece.unit for piece in self.state.pieces if piece.unit.main.follows}
        )
        self._held_scratch.reserve(max(held, default=0))

    def _most(self, needed: Callable[[Stretch], bool]) -> int:
        """The most bytes that the stretches of a batch need."""
        return max(
            sum(scratch_bytes(one.world.numel, one.unit.main.dtype) for one in batch.stretches if needed(one))
            for batch in self._batches
        )


def _is_in_place(unit: Unit) -> bool:
    """Whether a step needs no scratch for the unit, and nothing is gathered after it."""
    main = unit.main
    return unit.grads.held_in == main.dtype and not main.needs_scratch and main.interval.numel == unit.layout.numel


def _own_parts(pieces: Sequence[Piece]) -> Iterator[tuple[Unit, int, Interval]]:
    """(unit, param group, interval) of the pieces in the own shards."""
    own = {unit: unit.own_shard() for unit in {piece.unit for piece in pieces}}
    mine = [piece for piece in pieces if piece.world in own[piece.unit]]
    for stretch in _stretches(mine):
        if stretch.unit.grads.is_apart:
            for group, (first, *others) in groupby(stretch.pieces, attrgetter("group")):
                yield stretch.unit, group, Interval(first.world.start, (others or [first])[-1].world.stop)
        else:
            yield from ((piece.unit, piece.group, piece.world) for piece in stretch.pieces)


def _stretches(pieces: Iterable[Piece]) -> list[Stretch]:
    found: list[list[Piece]] = []
    for piece in pieces:
        last = found[-1][-1] if found else None
        if last is not None and last.unit is piece.unit and last.world.stop == piece.world.start:
            found[-1].append(piece)
        else:
            found.append([piece])
    return [Stretch(tuple(one)) for one in found]
