"""Steps optimizers that need whole parameters (Muon, LAMB, LARS, Adafactor): an owner rank steps each parameter.

    shards       rank 0 | rank 1 | rank 2        shards cut parameters anywhere
                     \\      |      /
    all-to-all        v     v     v              fragments of the gradient, to the owner
    owner            rank 1: whole parameter, whole state, one step of the user's class, unmodified
                      /     |     \\
    all-to-all       v      v      v             fragments of main, back to their holders

An owner keeps a copy of main of its parameters, which after a step equals the holders'. Main is sent to owners only
before the first step, and after weights have been set by other code than a step. So a step sends main's size twice, and
all ranks together hold main once more. State is stored once.

Owners are balanced by cost, longest processing time first (Graham, 1969). The routes follow from the layouts alone, so
every rank knows them. If main is replicated, every rank holds and owns everything, and the same code sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.ranges import phase, span
from zeroshard.layout.interval import Interval
from zeroshard.step.assignment import Assignment, Options, shows_gradient
from zeroshard.step.inner import Arguments, run_method, tried_step
from zeroshard.step.owner_state import OwnerState, WholeParameter
from zeroshard.step.stepper import Update
from zeroshard.storage.main_weights import follow_weights
from zeroshard.storage.unit import Unit


@dataclass(frozen=True)
class Route:
    """A fragment whose values `holder` has and the owner of `whole` steps. `world`: in the unit's full buffer; `param`:
    in the flattened parameter."""

    whole: WholeParameter
    holder: int
    world: Interval
    param: Interval


class OwnerStep:
    """Steps whole parameters at their owners (see `stepper.Stepper`).

    Attributes:
        state: the owners, and this rank's values and state.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.state = state = OwnerState(assignment)
        self.optimizer = state.inner.optimizer
        self._routes = [route for whole in state.wholes for route in self._routes_of(whole)]
        self._dtypes = sorted({whole.dtype for whole in state.wholes}, key=str)  # one exchange for each
        self._gradients = state.allocate()
        self._edits: dict[Unit, int] = {}  # `Unit.edits` when owners and holders last had the same values
        most = max(
            sum(route.world.numel for route in directed) * dtype.itemsize
            for dtype in self._dtypes
            for directed in (self._outgoing(self._routes_in(dtype)), self._incoming(self._routes_in(dtype)))
        )
        self._sent = torch.empty(most, dtype=torch.uint8, device=state.device)
        self._received = torch.empty(0 if state.replicated else most, dtype=torch.uint8, device=state.device)

    # Stepping ----------------------------------------------------------------------------------------------------

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        for whole in self.state.wholes:
            part = whole.slot.world & whole.unit.own_shard()
            for tensor in whole.unit.grads.views(part) if part else ():
                yield whole.group, tensor

    @torch.no_grad()
    def step(
        self,
        options: Sequence[Options],
        active: dict[Unit, list[bool]],
        update: Update,
        updated: Callable[[Unit], None],
        arguments: Options,
    ) -> Exception | None:
        """Fragments to their owners, one step of the whole parameters, fragments back. Collective."""
        stepped = {whole for whole in self.state.wholes if active[whole.unit][whole.index]}
        with self.state.inner.with_options(options):
            self._fetch_gradients(stepped, update)
            self._fetch_main()
            try:
                for whole, value in self.state.values.items():
                    value.grad = self._gradients[whole] if whole in stepped else None
                with span("step: whole parameters"):
                    raised = tried_step(self.optimizer, arguments)
            finally:
                for value in self.state.values.values():
                    value.grad = None
            self._to_holders(stepped)
            for unit in self.assignment.groups:
                updated(unit)
        return raised

    @torch.no_grad()
    def call(self, name: str, arguments: Arguments, options: Sequence[Options]) -> Any:
        """Call another method of the class on the whole parameters; then set main and weights. Collective."""
        with self.state.inner.with_options(options):
            self._fetch_main()
            values = self.state.values.items()
            with_gradient = [value for whole, value in values if shows_gradient(whole.unit, [whole.index])]
            result = run_method(self.optimizer, name, arguments, with_gradient)
            self._to_holders({*self.state.wholes})
        return result

    @phase("step: gradients to owners")
    def _fetch_gradients(self, stepped: Set[WholeParameter], update: Update) -> None:
        def read(route: Route, out: Tensor) -> None:
            route.whole.unit.grads.read(route.world, out)
            update.apply([out])

        self._to_owners([route for route in self._routes if route.whole in stepped], read, self._gradients)

    @phase("step: main to owners")
    def _fetch_main(self) -> None:
        """Send main of units that other code than a step has changed to the owners. Collective."""
        changed = {unit for unit in self.assignment.groups if self._edits.get(unit) != unit.edits}
        self._to_owners([route for route in self._routes if route.whole.unit in changed], _read_main, self.state.values)
        # Cleared until `_to_holders` has run: if the step raises in between, owners and holders have different values,
        # and the next step must fetch main again.
        self._edits = {}
        for whole, value in self.state.values.items():
            main, buffer = whole.unit.main, whole.unit.weights.buffer
            if buffer.rests_in_full:  # see [Note: written weights]
                follow_weights(value, buffer.views()[whole.index], main.rounded)

    def _to_owners(
        self, routes: Sequence[Route], read: Callable[[Route, Tensor], None], target: dict[WholeParameter, Tensor]
    ) -> None:
        for dtype in self._dtypes:
            of_dtype = [route for route in routes if route.whole.dtype == dtype]
            if not of_dtype:
                continue
            sent = _Cursor(_as(self._sent, dtype))
            for route in self._outgoing(of_dtype):
                read(route, sent.advance(route.world.numel))
            received = _Cursor(self._exchange(of_dtype, dtype, forth=True))
            for route in self._incoming(of_dtype):
                target[route.whole].view(-1)[route.param.slice] = received.advance(route.world.numel)

    @phase("step: main to holders")
    def _to_holders(self, wholes: Set[WholeParameter]) -> None:
        """Send main of `wholes` back and set it: owners and holders then have the same values. Collective."""
        for dtype in self._dtypes:
            routes = [route for route in self._routes_in(dtype) if route.whole in wholes]
            if not routes:
                continue
            sent = _Cursor(_as(self._sent, dtype))
            for route in self._incoming(routes):
                sent.advance(route.world.numel).copy_(self.state.values[route.whole].view(-1)[route.param.slice])
            received = _Cursor(self._exchange(routes, dtype, forth=False))
            for route in self._outgoing(routes):
                route.whole.unit.main.set(route.world, received.advance(route.world.numel), spare=True)
        self._edits = {unit: unit.edits for unit in self.assignment.groups}

    def _exchange(self, routes: Sequence[Route], dtype: torch.dtype, *, forth: bool) -> Tensor:
        if self.state.replicated:
            return _as(self._sent, dtype)
        held, owned = [0] * self.state.num_owners, [0] * self.state.num_owners
        for route in routes:
            if route.holder == self.state.rank:
                held[route.whole.owner] += route.world.numel
            if route.whole.owner == self.state.rank:
                owned[route.holder] += route.world.numel
        sent, received = (held, owned) if forth else (owned, held)
        into, data = _as(self._received, dtype), _as(self._sent, dtype)
        self.assignment.collectives.all_to_all(into, data, received, sent).wait()
        return into

    def _routes_in(self, dtype: torch.dtype) -> list[Route]:
        return [route for route in self._routes if route.whole.dtype == dtype]

    # Routes ------------------------------------------------------------------------------------------------------

    def _routes_of(self, whole: WholeParameter) -> Iterator[Route]:
        layout, slot = whole.unit.layout, whole.slot
        for holder in range(self.state.num_owners):
            held = slot.world if self.state.replicated else slot.world & layout.shard(holder)
            if held:
                yield Route(whole, holder, held, held.relative_to(slot.world.start))

    def _outgoing(self, routes: Iterable[Route]) -> list[Route]:
        """The routes whose fragments this rank holds, in the order of the owners."""
        # Sender and receiver must pack fragments in the same order: the sort is stable, so within one owner and holder
        # both keep the order of `_routes`.
        return sorted(
            (route for route in routes if route.holder == self.state.rank), key=lambda route: route.whole.owner
        )

    def _incoming(self, routes: Iterable[Route]) -> list[Route]:
        """The routes of parameters that this rank owns, in the order of the holders."""
        return sorted(
            (route for route in routes if route.whole.owner == self.state.rank), key=lambda route: route.holder
        )

    # Memory ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors held, by kind: state and main of the parameters that this rank owns, scalars, and scratch (whole
        gradients, and message buffers)."""
        held = {
            "main": [*self.state.values.values()],
            "scratch": [*self._gradients.values(), self._sent, self._received],
        }
        return held | self.state.inner.tensors()


def _as(storage: Tensor, dtype: torch.dtype) -> Tensor:
    return storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


class _Cursor:
    """Returns consecutive parts of a buffer."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._at = buffer, 0

    def advance(self, numel: int) -> Tensor:
        self._at += numel
        return self._buffer[self._at - numel : self._at]


def _read_main(route: Route, out: Tensor) -> None:
    main = route.whole.unit.main
    value = main.read(route.world, out)
    if value is not out:
        out.copy_(value)
