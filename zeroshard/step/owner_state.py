"""The state of optimizers that need whole parameters: the owner of a parameter holds its state."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.full_model.full_state import EVERYWHERE, Destination
from zeroshard.io.tensor_file import DTYPE_NAMES, DTYPES
from zeroshard.io.values import decode, encode
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import Slot
from zeroshard.layout.owners import balance, cost
from zeroshard.placement import REPLICATED
from zeroshard.step.assignment import NAMES, Assignment, Member, Options
from zeroshard.step.inner import Inner, bring_up_to_date, describe_together, expect_no_reads, where_torch_puts
from zeroshard.step.stepper import FullState, Need, SavedState, SavedTensor, StateEntry, whole_entry


@dataclass(frozen=True, eq=False)
class WholeParameter(Member):
    """One parameter that is stepped whole. `owner`: rank on the shard axis."""

    owner: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of main."""
        return self.unit.main.dtype


class OwnerState:
    """The owners of all parameters; and values and state (in the inner optimizer) of those that this rank owns.

    Attributes:
        wholes: all parameters, the same on every rank.
        values: main of each parameter that this rank owns: the parameters of `inner`.
        inner: the inner optimizer over these values.
        num_owners: number of owner ranks; 1 if main is replicated, as every rank then owns everything.
        rank: of this rank among the owners.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment, self._axis = assignment, assignment.collectives.mesh.shard
        first, members = next(iter(assignment.groups)), list(assignment.members())
        self.device, self.replicated = first.weights.own().device, first.plan.main is REPLICATED
        self.num_owners, self.rank = (1, 0) if self.replicated else (self._axis.size, self._axis.rank)
        owners = balance([cost(one.slot.shape) for one in members], self.num_owners)
        self.wholes = [
            WholeParameter(one.unit, one.index, one.group, owner) for one, owner in zip(members, owners, strict=True)
        ]
        # Build the class once over all shapes, so that a refusal (Muon: all but matrices) raises on every rank, not
        # only on the owner: the other ranks would hang in their next collective.
        shapes = [
            whole.stand_in(torch.empty(whole.slot.shape, dtype=whole.dtype, device="meta")) for whole in self.wholes
        ]
        expect_no_reads(assignment.optimizer_class, assignment.defaults, shapes, self._names())
        self.values = {whole: whole.stand_in(value) for whole, value in self.allocate().items()}
        self.inner = Inner(assignment, self._tensors_of, self._places_of)

    def allocate(self) -> dict[WholeParameter, Tensor]:
        """A tensor of zeros for each parameter that this rank owns."""
        return {
            whole: torch.zeros(whole.slot.shape, dtype=whole.dtype, device=self.device)
            for whole in self.wholes
            if whole.owner == self.rank
        }

    def _tensors_of(self, group: int) -> list[Tensor]:
        return [self.values[whole] for whole in self._mine(group)]

    def _places_of(self, group: int) -> list[int]:
        return [self._place(whole) for whole in self._mine(group)]

    def _mine(self, group: int) -> list[WholeParameter]:
        """In the user's order: some classes go by the place in the group, or add up over it."""
        return sorted((whole for whole in self.values if whole.group == group), key=self._place)

    def _place(self, whole: WholeParameter) -> int:
        return self._assignment.places[id(whole.parameter)]

    def _names(self) -> list[str]:
        """Of all parameters; empty, if the user has given none."""
        options = self._assignment.options
        return [options[one.group][NAMES][self._place(one)] for one in self.wholes if NAMES in options[one.group]]

    def _state_of(self, whole: WholeParameter) -> dict[str, Any]:
        return self.inner.state_of(self.values[whole])

    # Storing and loading -----------------------------------------------------------------------------------------

    def entries(self) -> Iterator[StateEntry]:
        """The state of the parameters that this rank owns; if every rank owns everything, ranks take turns."""
        for number, whole in enumerate(self.values):
            if not self.replicated or number % self._axis.size == self._axis.rank:
                of_class = self.elementwise(whole.group)
                for key, value in self._state_of(whole).items():
                    yield whole_entry(whole.slot.name, key, value, of_class.get(key))

    def needs(self) -> Iterator[Need]:
        for whole in self.values:
            yield Need(whole.parameter, whole.slot, Interval(0, whole.slot.world.numel))

    def fits(self, slot: Slot, shape: tuple[int, ...]) -> bool:
        return True  # only the class knows: Adafactor keeps rows and columns

    def elementwise(self, group: int) -> Mapping[str, bool]:
        return self.inner.elementwise(group)

    @torch.no_grad()
    def load(self, state: SavedState, only: Collection[Tensor] | None = None) -> None:
        for whole, value in self.values.items():
            if only is None or whole.parameter in only:
                items = state.get(whole.parameter) or {}
                options = self.inner.groups[whole.group]
                self.inner.set_state(value, {key: self._loaded(key, item, options) for key, item in items.items()})
        bring_up_to_date(self.inner.optimizer)

    def _loaded(self, key: str, item: Any, options: Options) -> Any:
        if isinstance(item, SavedTensor):
            return item.whole(self.device)
        if isinstance(item, Tensor):
            return where_torch_puts(key, item.clone(), options, self.device)
        return copy.deepcopy(item)

    # Gathering ---------------------------------------------------------------------------------------------------

    def gather(self, only: Collection[Tensor] | None = None, destination: Destination = EVERYWHERE) -> FullState:
        """Parameter by parameter, broadcast by its owner."""
        keeps = destination.includes(self._assignment.collectives.mesh.world.rank)
        tensors: dict[WholeParameter, list[Tensor]] = {}
        result: FullState = {}
        for number, (values, metadata) in sorted(self._described(only, tensors).items()):
            whole, received = self.wholes[number], list[Tensor]()
            for position, (shape, dtype, on_cpu) in enumerate(metadata):
                full = torch.zeros(shape, dtype=DTYPES[dtype], device=self.device)
                if whole in self.values:
                    full.copy_(tensors[whole][position])
                if not self.replicated:
                    self._assignment.collectives.broadcast([full], self._axis, whole.owner)
                if keeps:
                    value = full.cpu() if on_cpu else full
                    received.append(value if destination == EVERYWHERE else destination.copy(value))
                    del value
                del full  # before the next one is received
            if keeps:
                result[whole.parameter] = decode(values, partial(_at, received))
        return result

    def parameters(self) -> Collection[Tensor]:
        return [self.wholes[number].parameter for number in sorted(self._described(None, {}))]

    def _described(
        self, only: Collection[Tensor] | None, tensors: dict[WholeParameter, list[Tensor]]
    ) -> dict[int, list[Any]]:
        """Number among `wholes` -> description of its state, from its owner. The tensors of those that this rank owns
        are put into `tensors`. Collective."""

        def describe() -> list[Any]:
            mine = []
            for number, whole in enumerate(self.wholes):
                is_wanted = whole in self.values and (only is None or whole.parameter in only)
                if is_wanted and (state := self._state_of(whole)):
                    tensors[whole] = []
                    mine.append([number, *_described(whole, state, tensors[whole])])
            return mine

        return {number: of_state for number, *of_state in describe_together(self._assignment, describe)}


def _described(whole: WholeParameter, state: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, list[Any]]:
    """The state as JSON; and shape, dtype and "on the CPU" of each tensor in it. The tensors are appended to
    `tensors`."""

    def store(tensor: Tensor) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    values = encode(state, store, f"the optimizer's state of {whole.slot.name}")
    return values, [[list(one.shape), DTYPE_NAMES[one.dtype], one.device.type == "cpu"] for one in tensors]


def _at(tensors: list[Tensor], position: str) -> Tensor:
    return tensors[int(position)]
