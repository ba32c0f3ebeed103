"""Steps flat pieces of main with the user's optimizer class: any elementwise optimizer, unmodified.

for each batch of pieces (a few MB, so that gradient, main and moments stay in cache between the four lines)
    gradient -> main's dtype, times one factor (mean over ranks, loss scale and clip in one number)
    main     -> joined, if only a remainder is kept
    inner optimizer steps
    main     -> weights (rounded, or split)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.profiling import phase
from zeroshard.layout.cuts import BATCH_NUMEL, batches
from zeroshard.step.assignment import Assignment, Options
from zeroshard.step.flat_state import FlatState, main_tensor
from zeroshard.step.inner import Arguments, run_step
from zeroshard.step.pieces import Piece, Scratch, scratch_bytes, slots_in
from zeroshard.step.stepper import Update
from zeroshard.storage.unit import Unit


@dataclass(frozen=True)
class Batch:
    """Pieces that are stepped together. `finished`: units without pieces in later batches."""

    pieces: tuple[Piece, ...]
    finished: tuple[Unit, ...]


class FlatStep:
    """Steps the pieces of main that this rank updates, in batches (see `stepper.Stepper`).

    Attributes:
        state: the pieces, and their state in the inner optimizer.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.state = FlatState(assignment)
        self.optimizer = self.state.inner.optimizer
        self._gradient_scratch, self._main_scratch, self._held_scratch = Scratch(), Scratch(), Scratch()
        self._active: dict[Unit, list[bool]] = {}
        self._batches: tuple[Batch, ...] = ()
        self._planned_at = 0  # `num_cuts` when batches were planned
        self._plan_batches()

    def set_active(self, active: dict[Unit, list[bool]]) -> None:
        """Set which slots take part. A piece with slots that take part and others that do not is cut, with its
        state."""
        if active == self._active:
            return
        self._active = active
        for unit, flags in active.items():
            if any(len({flags[i] for i in slots_in(unit, piece.world)}) > 1 for piece in self.state.of_unit(unit)):
                self.state.refine(unit, flags)
        changed = False
        for piece in self.state.pieces:
            flags = active[piece.unit]
            is_active = any(flags[i] for i in slots_in(piece.unit, piece.world))
            changed |= is_active != piece.active
            piece.active = is_active
        if changed:
            self._plan_batches()

    # Gradients ---------------------------------------------------------------------------------------------------

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(param group, gradient) of all pieces in the own shard, also if this rank updates more than its shard."""
        for piece in self.state.pieces:
            own = piece.unit.own_shard()
            if piece.world in own:
                for tensor in piece.unit.grads.views(piece.world):
                    yield piece.group, tensor

    # Stepping ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        options: Sequence[Options],
        update: Update,
        start: Callable[[Unit], None],
        updated: Callable[[Unit], None],
        arguments: Options,
    ) -> None:
        """One step of all active pieces, a batch at a time."""
        if self._planned_at != self.state.num_cuts:
            self._plan_batches()
        inner, started = self.state.inner, set[Unit]()
        try:
            for number, batch in enumerate(self._batches):
                for piece in batch.pieces:
                    if piece.unit not in started:
                        started.add(piece.unit)
                        start(piece.unit)
                self._step_batch(batch.pieces, options, update, arguments, is_first=not number)
                for unit in batch.finished:
                    updated(unit)
        finally:
            inner.optimizer.param_groups = list(inner.groups.values())
            for index, group in inner.groups.items():
                group["params"] = self.state.tensors_of(index)
            # Also after an error: gradients are scratch that the next step overwrites, or views of a bucket that will
            # be given back.
            for piece in self.state.pieces:
                piece.tensor.grad = None
        inner.write_options(options)

    @phase("step: batch")
    def _step_batch(
        self,
        pieces: Sequence[Piece],
        options: Sequence[Options],
        update: Update,
        arguments: Options,
        *,
        is_first: bool,
    ) -> None:
        inner = self.state.inner
        self._load(pieces, update)
        # The first batch steps every group, also groups without pieces on this rank, and every batch starts from the
        # same options. So a class that counts steps in its groups counts one step, on all ranks, however many pieces
        # there are.
        for index, group in inner.groups.items():
            group["params"] = [piece.tensor for piece in pieces if piece.group == index]
        stepped = {index: group for index, group in inner.groups.items() if group["params"] or is_first}
        inner.read_options(options, stepped)
        inner.optimizer.param_groups = list(stepped.values())
        run_step(inner.optimizer, arguments)
        self._store(pieces)

    @torch.no_grad()
    def call(self, name: str, arguments: Arguments, options: Sequence[Options]) -> Any:
        """Call another method of the class on all pieces; then set the weights from main."""
        with self.state.inner.with_options(options):
            for piece in self.state.pieces:
                self._bring_main(piece, partial(torch.empty, dtype=piece.tensor.dtype, device=piece.tensor.device))
            result = getattr(self.optimizer, name)(*arguments[0], **arguments[1])
            for piece in self.state.pieces:
                piece.unit.main.write(piece.world, piece.tensor)
                if piece.unit.main.needs_scratch:
                    piece.tensor.data = main_tensor(piece.unit, piece.world)
        return result

    def _load(self, pieces: Sequence[Piece], update: Update) -> None:
        for scratch in (self._gradient_scratch, self._main_scratch):
            scratch.rewind()
        for piece in pieces:
            numel, main = piece.world.numel, piece.unit.main
            self._bring_main(piece, partial(self._main_scratch.allocate, dtype=main.dtype))
            cast = self._gradient_scratch.allocate(numel, main.dtype) if _needs_gradient_scratch(piece) else None
            piece.tensor.grad = update.apply(piece.unit.grads.read(piece.world, cast))

    def _bring_main(self, piece: Piece, scratch: Callable[[int], Tensor]) -> None:
        """Put the current main into the tensor of a piece."""
        main = piece.unit.main
        if main.needs_scratch:
            # Set `.data`, so that the tensor object stays: it is the key of its state in the inner optimizer.
            piece.tensor.data = main.read(piece.world, scratch(piece.world.numel))
        elif main.follows:  # the tensor is a view of main
            self._held_scratch.rewind()
            main.follow(piece.world, self._held_scratch.allocate(piece.world.numel, main.weights.dtype))

    def _store(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.tensor.grad = None
            piece.unit.main.write(piece.world, piece.tensor)

    # Memory ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors held, by kind: state per element, scalars (step counts), and scratch."""
        if self._planned_at != self.state.num_cuts:
            self._plan_batches()
        scratch = (self._gradient_scratch, self._main_scratch, self._held_scratch)
        return self.state.inner.tensors() | {"scratch": [one.storage for one in scratch]}

    def _plan_batches(self) -> None:
        """Divide the pieces into batches in unit order, and reserve scratch for the largest."""
        active = [piece for piece in self.state.pieces if piece.active]
        limit = BATCH_NUMEL["cuda" if active and active[0].tensor.is_cuda else "cpu"]
        ranges = batches([piece.world.numel for piece in active], limit)
        # Every unit must be finished exactly once, in the same order on all ranks, also if this rank has no piece of
        # it: `updated` starts a gather.
        units, done = list(self.assignment.groups), 0
        planned = []
        for of_batch in ranges:
            end = units.index(active[of_batch.stop].unit) if of_batch.stop < len(active) else len(units)
            planned.append(Batch(tuple(active[i] for i in of_batch), tuple(units[done:end])))
            done = end
        self._batches, self._planned_at = tuple(planned), self.state.num_cuts
        self._reserve(self._gradient_scratch, _needs_gradient_scratch)
        self._reserve(self._main_scratch, lambda piece: piece.unit.main.needs_scratch)

        held = [
            scratch_bytes(piece.world.numel, piece.unit.main.weights.dtype)
            for piece in self.state.pieces
            if piece.unit.main.follows
        ]
        if held:
            self._held_scratch.reserve(max(held), self.state.pieces[0].tensor.device)

    def _reserve(self, scratch: Scratch, needed: Callable[[Piece], bool]) -> None:
        sizes = [
            sum(scratch_bytes(piece.world.numel, piece.tensor.dtype) for piece in batch.pieces if needed(piece))
            for batch in self._batches
        ]
        if any(sizes):
            scratch.reserve(max(sizes), self.state.pieces[0].tensor.device)


def _needs_gradient_scratch(piece: Piece) -> bool:
    return piece.unit.grads.held_in != piece.unit.main.dtype
