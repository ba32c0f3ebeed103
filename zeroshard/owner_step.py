"""Optimizers that look at whole parameters (Muon, LAMB, LARS, Adafactor): an owner rank steps each one.

    shards       rank 0 | rank 1 | rank 2        a parameter lies where it lies, cut anywhere
                     \\      |      /
    all-to-all        v     v     v              fragments of the gradient, to the owner
    owner            rank 1: whole parameter, whole state, one step of the user's class, unmodified
                      /     |     \\
    all-to-all       v      v      v             fragments of main, back where they lie

An owner keeps main of what it owns: after a step it has what the holders have. Main travels to it only before the first
step, and after weights have been set from outside. So a step sends main's size twice, and holds it once more, divided
among the ranks. State is stored once.

Owners are balanced by cost, longest processing time first (Graham, 1969). The routes follow from the layouts alone, so
every rank knows them. Where main is replicated every rank has everything and owns everything: the routes are empty, the
code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.collectives import Collectives
from zeroshard.flat_step import Update, give_options, take_options
from zeroshard.interval import Interval
from zeroshard.layout import Slot
from zeroshard.owners import balance, cost
from zeroshard.placement import REPLICATED
from zeroshard.unit import Unit


@dataclass(frozen=True, eq=False)
class Whole:
    """One parameter that is stepped whole. `owner`: rank on the shard axis."""

    unit: Unit
    index: int
    group: int
    owner: int

    @property
    def slot(self) -> Slot:
        return self.unit.layout.slots[self.index]


@dataclass(frozen=True)
class Route:
    """A fragment that `holder` has and `owner` steps; `world` in the unit, `param` in the flattened parameter."""

    whole: Whole
    holder: int
    world: Interval
    param: Interval


class OwnerStep:
    """Owns the inner optimizer, whose parameters are the whole parameters that this rank owns.

    Attributes:
        optimizer: an instance of the user's class.
        groups: unit -> index of the param group of each slot (None: not this stepper's).
        wholes: all parameters, on every rank alike.
        replicated: whether every rank has, and owns, everything.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        options: dict[int, dict[str, Any]],
        defaults: dict[str, Any],
        groups: dict[Unit, list[int | None]],
        collectives: Collectives,
    ) -> None:
        self.groups = groups
        self._collectives = collectives
        axis = collectives.mesh.shard
        self.replicated = next(iter(groups)).plan.main is REPLICATED
        self._rank = 0 if self.replicated else axis.rank
        self._num_owners = 1 if self.replicated else axis.size
        slots = [(unit, i, group) for unit, keys in groups.items() for i, group in enumerate(keys) if group is not None]
        owners = balance([cost(unit.layout.slots[i].shape) for unit, i, _ in slots], self._num_owners)
        self.wholes = [Whole(*slot, owner) for slot, owner in zip(slots, owners, strict=True)]
        self._active = dict.fromkeys(self.wholes, True)
        self._routes = [route for whole in self.wholes for route in self._routes_of(whole)]
        main = next(iter(groups)).main
        assert main is not None
        self._dtype, self._device = main.dtype, main.weights.device
        # What the class refuses (Muon: all but matrices), it refuses on every rank, not on the owner alone.
        shapes = [torch.empty(whole.slot.shape, dtype=self._dtype, device="meta") for whole in self.wholes]
        optimizer_class(shapes, **defaults)
        self._values, self._gradients = self._allocate(), self._allocate()
        self.optimizer = optimizer_class(
            [{**option, "params": self._of_group(index)} for index, option in options.items()], **defaults
        )
        self._inner = dict(zip(options, self.optimizer.param_groups, strict=True))
        self._edits: dict[Unit, int] = {}  # of each unit, when its values at the owners were those of its holders
        most = max(
            sum(route.world.numel for route in self._outgoing(self._routes)),
            sum(route.world.numel for route in self._incoming(self._routes)),
        )
        self._sent = torch.empty(most, dtype=self._dtype, device=self._device)
        self._received = torch.empty(0 if self.replicated else most, dtype=self._dtype, device=self._device)

    # Stepping ----------------------------------------------------------------------------------------------------

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(param group, tensor) over the own shard; nothing is copied."""
        for whole in self.wholes:
            part = whole.slot.world & whole.unit.own_shard()
            for tensor in whole.unit.gradient_views(part) if part else ():
                yield whole.group, tensor

    def set_active(self, active: dict[Unit, list[bool]]) -> None:
        """Which slots take part from now on."""
        self._active = {whole: active[whole.unit][whole.index] for whole in self.wholes}

    @torch.no_grad()
    def step(
        self,
        options: Sequence[dict[str, Any]],
        update: Update,
        start: Callable[[Unit], None],
        updated: Callable[[Unit], None],
    ) -> None:
        """Fragments to their owners, one step of the whole parameters, fragments back. Collective."""
        take_options(self._inner, options)
        for unit in self.groups:
            start(unit)

        def read_gradient(route: Route, out: Tensor) -> None:
            route.whole.unit.read_gradient(route.world, out)
            update.apply(out)

        self._to_owners(self._routes, read_gradient, self._gradients)
        changed = {unit for unit in self.groups if self._edits.get(unit) != unit.edits}
        self._to_owners([route for route in self._routes if route.whole.unit in changed], _read_main, self._values)
        self._edits = {}  # a step that fails half way leaves owners with values that nobody else has
        try:
            for whole, value in self._values.items():
                value.grad = self._gradients[whole] if self._active[whole] else None
            self.optimizer.step()
        finally:
            for value in self._values.values():
                value.grad = None
        self._to_holders()
        self._edits = {unit: unit.edits for unit in self.groups}
        for unit in self.groups:
            updated(unit)
        give_options(self._inner, options)

    def _to_owners(
        self, routes: Sequence[Route], read: Callable[[Route, Tensor], None], target: dict[Whole, Tensor]
    ) -> None:
        if not routes:
            return
        sent = _Cursor(self._sent)
        for route in self._outgoing(routes):
            read(route, sent.take(route.world.numel))
        received = _Cursor(self._exchange(routes, forth=True))
        for route in self._incoming(routes):
            target[route.whole].view(-1)[route.param.slice] = received.take(route.world.numel)

    def _to_holders(self) -> None:
        sent = _Cursor(self._sent)
        for route in self._incoming(self._routes):
            sent.take(route.world.numel).copy_(self._values[route.whole].view(-1)[route.param.slice])
        received = _Cursor(self._exchange(self._routes, forth=False))
        for route in self._outgoing(self._routes):
            value = received.take(route.world.numel)
            if self._active[route.whole]:
                assert route.whole.unit.main is not None
                route.whole.unit.main.set(route.world, value, spare=True)

    def _exchange(self, routes: Sequence[Route], *, forth: bool) -> Tensor:
        if self.replicated:
            return self._sent
        held, owned = [0] * self._num_owners, [0] * self._num_owners
        for route in routes:
            if route.holder == self._rank:
                held[route.whole.owner] += route.world.numel
            if route.whole.owner == self._rank:
                owned[route.holder] += route.world.numel
        sent, received = (held, owned) if forth else (owned, held)
        self._collectives.all_to_all(self._received, self._sent, received, sent, unit="owners", phase="step").wait()
        return self._received

    # Routes ------------------------------------------------------------------------------------------------------

    def _routes_of(self, whole: Whole) -> Iterator[Route]:
        layout, slot = whole.unit.layout, whole.slot
        for holder in range(self._num_owners):
            held = slot.world if self.replicated else slot.world & layout.shard(holder)
            if held:
                yield Route(whole, holder, held, held.relative_to(slot.world.start))

    def _outgoing(self, routes: Iterable[Route]) -> list[Route]:
        """What this rank holds, in the order of the owners."""
        return sorted((route for route in routes if route.holder == self._rank), key=lambda route: route.whole.owner)

    def _incoming(self, routes: Iterable[Route]) -> list[Route]:
        """What this rank owns, in the order of the holders."""
        return sorted((route for route in routes if route.whole.owner == self._rank), key=lambda route: route.holder)

    def _allocate(self) -> dict[Whole, Tensor]:
        return {
            whole: torch.zeros(whole.slot.shape, dtype=self._dtype, device=self._device)
            for whole in self.wholes
            if whole.owner == self._rank
        }

    def _of_group(self, index: int) -> list[Tensor]:
        return [value for whole, value in self._values.items() if whole.group == index]

    # State and memory --------------------------------------------------------------------------------------------

    def full_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Parameter -> state, from its owner to every rank. Collective."""
        axis = self._collectives.mesh.shard
        schemas = {
            f"{whole.unit.index} {whole.index}": {
                key: [list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type == "cpu"]
                for key, value in self.optimizer.state.get(value_of, {}).items()
                if isinstance(value, Tensor)
            }
            for whole, value_of in self._values.items()
        }
        known = {key: schema for found in self._collectives.exchange_objects(schemas) for key, schema in found.items()}
        result: dict[nn.Parameter, dict[str, Any]] = {}
        for whole in self.wholes:
            for key, (shape, dtype, on_cpu) in known[f"{whole.unit.index} {whole.index}"].items():
                full = torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)
                if whole in self._values:
                    full.copy_(self.optimizer.state[self._values[whole]][key])
                if not self.replicated:
                    self._collectives.broadcast([full], axis, whole.owner)
                parameter = whole.unit.parameters[whole.index]
                result.setdefault(parameter, {})[key] = full.cpu() if on_cpu else full
        return result

    def load_full_state(self, state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Every owner takes its own."""
        for whole in self._values:
            saved = state.get(whole.unit.parameters[whole.index]) or {}
            copied = {key: item.clone() if isinstance(item, Tensor) else item for key, item in saved.items()}
            self.set_state(whole, copied)

    def owned(self) -> Iterator[tuple[Whole, dict[str, Any]]]:
        """What this rank owns, with its state (empty before the first step)."""
        for whole, value in self._values.items():
            yield whole, self.optimizer.state.get(value) or {}

    def set_state(self, whole: Whole, state: dict[str, Any]) -> None:
        """The state of a parameter that this rank owns; it is taken, not copied."""
        self.optimizer.state.pop(self._values[whole], None)
        if state:
            self.optimizer.state[self._values[whole]] = state

    def tensors(self) -> dict[str, list[Tensor]]:
        """State and main of what this rank owns, scalars, and scratch (whole gradients, and the messages)."""
        kinds: dict[str, list[Tensor]] = {"main": [*self._values.values()], "state": [], "scalars": [], "scratch": []}
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    kinds["state" if value.dim() else "scalars"].append(value)
        kinds["scratch"] = [*self._gradients.values(), self._sent, self._received]
        return kinds


class _Cursor:
    """Takes pieces off the front of a buffer."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._at = buffer, 0

    def take(self, numel: int) -> Tensor:
        self._at += numel
        return self._buffer[self._at - numel : self._at]


def _read_main(route: Route, out: Tensor) -> None:
    main = route.whole.unit.main
    assert main is not None
    value = main.read(route.world, out)
    if value is not out:
        out.copy_(value)
