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

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.collectives import Collectives
from zeroshard.flat_step import Update
from zeroshard.inner import (
    READING,
    Arguments,
    OptimizerClass,
    Options,
    give_options,
    is_elementwise_state,
    run_step,
    take_options,
)
from zeroshard.interval import Interval
from zeroshard.layout import Slot
from zeroshard.main_weights import follow_weights
from zeroshard.owners import balance, cost
from zeroshard.placement import REPLICATED
from zeroshard.tensor_file import DTYPE_NAMES, DTYPES
from zeroshard.unit import Unit
from zeroshard.values import decode, encode


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

    @property
    def dtype(self) -> torch.dtype:
        """Of main."""
        assert self.unit.main is not None
        return self.unit.main.dtype


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
        optimizer_class: OptimizerClass,
        options: dict[int, Options],
        defaults: Options,
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
        self._device = next(iter(groups)).weights.own().device
        self._dtypes = sorted({whole.dtype for whole in self.wholes}, key=str)  # one message for each
        self._class, self._defaults = optimizer_class, defaults
        self._elementwise: dict[int, dict[str, bool]] = {}
        # What the class refuses (Muon: all but matrices), it refuses on every rank, not on the owner alone.
        shapes = [torch.empty(whole.slot.shape, dtype=whole.dtype, device="meta") for whole in self.wholes]
        optimizer_class(shapes, **defaults)
        self._values, self._gradients = self._allocate(), self._allocate()
        self.optimizer = optimizer_class(
            [{**option, "params": self._of_group(index)} for index, option in options.items()], **defaults
        )
        self._inner = dict(zip(options, self.optimizer.param_groups, strict=True))
        self._edits: dict[Unit, int] = {}  # of each unit, when its values at the owners were those of its holders
        most = max(
            sum(route.world.numel for route in directed) * dtype.itemsize
            for dtype in self._dtypes
            for directed in (self._outgoing(self._routes_in(dtype)), self._incoming(self._routes_in(dtype)))
        )
        self._sent = torch.empty(most, dtype=torch.uint8, device=self._device)
        self._received = torch.empty(0 if self.replicated else most, dtype=torch.uint8, device=self._device)

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
        arguments: Options,
    ) -> None:
        """Fragments to their owners, one step of the whole parameters, fragments back. Collective."""
        take_options(self._inner, options)
        for unit in self.groups:
            start(unit)

        def read_gradient(route: Route, out: Tensor) -> None:
            route.whole.unit.read_gradient(route.world, out)
            update.apply(out)

        active = [route for route in self._routes if self._active[route.whole]]
        self._to_owners(active, read_gradient, self._gradients)
        self._fetch_main()
        try:
            for whole, value in self._values.items():
                value.grad = self._gradients[whole] if self._active[whole] else None
            run_step(self.optimizer, arguments)
        finally:
            for value in self._values.values():
                value.grad = None
        self._to_holders([whole for whole, active in self._active.items() if active])
        self._edits = {unit: unit.edits for unit in self.groups}
        for unit in self.groups:
            updated(unit)
        give_options(self._inner, options)

    @torch.no_grad()
    def call(self, name: str, arguments: Arguments, options: Sequence[Options]) -> Any:
        """Another method of the class, on the whole parameters; what it does to them becomes main. Collective."""
        take_options(self._inner, options)
        self._fetch_main()
        result = getattr(self.optimizer, name)(*arguments[0], **arguments[1])
        self._to_holders(self.wholes)
        self._edits = {unit: unit.edits for unit in self.groups}
        give_options(self._inner, options)
        return result

    def _fetch_main(self) -> None:
        """What has been set from outside reaches the owners. Until they give main back, nobody else has theirs."""
        changed = {unit for unit in self.groups if self._edits.get(unit) != unit.edits}
        self._to_owners([route for route in self._routes if route.whole.unit in changed], _read_main, self._values)
        self._edits = {}
        for whole, value in self._values.items():
            main, buffer = whole.unit.main, whole.unit.weights.buffer
            if buffer.owns_full and main is not None:  # see [Note: written weights]
                follow_weights(value, buffer.views()[whole.index], main.rounded)

    def _to_owners(
        self, routes: Sequence[Route], read: Callable[[Route, Tensor], None], target: dict[Whole, Tensor]
    ) -> None:
        for dtype in self._dtypes:
            of_dtype = [route for route in routes if route.whole.dtype == dtype]
            if not of_dtype:
                continue
            sent = _Cursor(_as(self._sent, dtype))
            for route in self._outgoing(of_dtype):
                read(route, sent.take(route.world.numel))
            received = _Cursor(self._exchange(of_dtype, dtype, forth=True))
            for route in self._incoming(of_dtype):
                target[route.whole].view(-1)[route.param.slice] = received.take(route.world.numel)

    def _to_holders(self, wholes: Collection[Whole]) -> None:
        """Main of `wholes` is sent, and set."""
        wanted = set(wholes)
        for dtype in self._dtypes:
            routes = [route for route in self._routes_in(dtype) if route.whole in wanted]
            if not routes:
                continue
            sent = _Cursor(_as(self._sent, dtype))
            for route in self._incoming(routes):
                sent.take(route.world.numel).copy_(self._values[route.whole].view(-1)[route.param.slice])
            received = _Cursor(self._exchange(routes, dtype, forth=False))
            for route in self._outgoing(routes):
                assert route.whole.unit.main is not None
                route.whole.unit.main.set(route.world, received.take(route.world.numel), spare=True)

    def _exchange(self, routes: Sequence[Route], dtype: torch.dtype, *, forth: bool) -> Tensor:
        if self.replicated:
            return _as(self._sent, dtype)
        held, owned = [0] * self._num_owners, [0] * self._num_owners
        for route in routes:
            if route.holder == self._rank:
                held[route.whole.owner] += route.world.numel
            if route.whole.owner == self._rank:
                owned[route.holder] += route.world.numel
        sent, received = (held, owned) if forth else (owned, held)
        into, data = _as(self._received, dtype), _as(self._sent, dtype)
        self._collectives.all_to_all(into, data, received, sent, unit="owners", phase="step").wait()
        return into

    def _routes_in(self, dtype: torch.dtype) -> list[Route]:
        return [route for route in self._routes if route.whole.dtype == dtype]

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
            whole: torch.zeros(whole.slot.shape, dtype=whole.dtype, device=self._device)
            for whole in self.wholes
            if whole.owner == self._rank
        }

    def _of_group(self, index: int) -> list[Tensor]:
        return [value for whole, value in self._values.items() if whole.group == index]

    # State and memory --------------------------------------------------------------------------------------------

    def full_state(self, only: Collection[Tensor] | None = None) -> dict[Tensor, dict[str, Any]]:
        """Parameter -> state, from its owner to every rank; of `only` these parameters. Collective.

        Raises:
            ValueError: on every rank, state that holds something else than values and dense tensors.
        """
        wanted = [one for one in self.wholes if only is None or one.unit.parameters[one.index] in only]
        tensors: dict[Whole, list[Tensor]] = {}
        mine, problem = [], ""
        try:
            for number, whole in enumerate(wanted):
                if whole in self._values and (state := self.optimizer.state.get(self._values[whole])):
                    tensors[whole] = []
                    mine.append([number, *_described(whole, state, tensors[whole])])
        except ValueError as error:
            problem = str(error)
        told = self._collectives.exchange_objects([problem, mine], READING)
        if problem := next((text for text, _ in told if text), ""):
            raise ValueError(problem)
        described = {number: of_state for _, of_rank in told for number, *of_state in of_rank}
        result: dict[Tensor, dict[str, Any]] = {}
        for number, (values, metadata) in sorted(described.items()):
            whole, received = wanted[number], list[Tensor]()
            for position, (shape, dtype, on_cpu) in enumerate(metadata):
                full = torch.zeros(shape, dtype=DTYPES[dtype], device=self._device)
                if whole in self._values:
                    full.copy_(tensors[whole][position])
                if not self.replicated:
                    self._collectives.broadcast([full], self._collectives.mesh.shard, whole.owner)
                received.append(full.cpu() if on_cpu else full)
            result[whole.unit.parameters[whole.index]] = decode(values, partial(_at, received))
        return result

    def load_full_state(
        self, state: Mapping[Tensor, Mapping[str, Any]], only: Collection[Tensor] | None = None
    ) -> None:
        """Every owner takes its own; of `only` these parameters."""
        for whole in self._values:
            if only is None or whole.unit.parameters[whole.index] in only:
                self._take(whole, state.get(whole.unit.parameters[whole.index]) or {})

    def set_full_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """That of one parameter; its owner takes it."""
        for whole in self._values:
            if whole.unit.parameters[whole.index] is parameter:
                self._take(whole, state)

    def elementwise_state(self, group: int) -> dict[str, bool]:
        """What the class's state is made of, whatever the shapes say (see `inner.is_elementwise_state`)."""
        if group not in self._elementwise:
            options = {key: value for key, value in self._inner[group].items() if key != "params"}
            self._elementwise[group] = is_elementwise_state(self._class, options, self._defaults)
        return self._elementwise[group]

    def _take(self, whole: Whole, state: Mapping[str, Any]) -> None:
        copied = {key: item.clone() if isinstance(item, Tensor) else copy.deepcopy(item) for key, item in state.items()}
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


def _described(whole: Whole, state: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, list[Any]]:
    """The state as JSON, and shape, dtype and "on the CPU" of each tensor in it; they are added to `tensors`."""

    def store(tensor: Tensor) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    values = encode(state, store, f"the optimizer's state of {whole.slot.name}")
    return values, [[list(one.shape), DTYPE_NAMES[one.dtype], one.device.type == "cpu"] for one in tensors]


def _as(storage: Tensor, dtype: torch.dtype) -> Tensor:
    return storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _at(tensors: list[Tensor], position: str) -> Tensor:
    return tensors[int(position)]


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
