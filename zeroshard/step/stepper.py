"""What steps some param groups of an optimizer, and the one way in which its state is read and written.

A `Stepper` updates parts of main with an inner optimizer. Its `state` gives what this rank holds as *entries*, each an
interval of one tensor, or a plain value; and takes *saved* entries, of which it reads what this rank needs.
`optimizer.state`, `state_dict` and checkpoints know no more of it. A new stepper is a class with these two protocols,
built from an `Assignment`, and a line in `steppers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.errors import InvalidValue
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import Slot
from zeroshard.step.assignment import Assignment, Options
from zeroshard.step.inner import Arguments
from zeroshard.storage.unit import Unit

FullState = dict[Tensor, dict[str, Any]]
"""Parameter -> key -> value in full: tensors of many elements in the shape that the class gives them."""


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


# Entries of a parameter's state ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateChunk:
    """Elements `interval` of one tensor in the state of a parameter.

    Attributes:
        parameter: its name.
        key: of the tensor in the parameter's state.
        shape: of the whole tensor.
        interval: in the flattened tensor.
        is_scalar: one number for all of the parameter. (A parameter of one element may have a value for that element.)
        read: interval inside `interval` -> its values now, [numel].
    """

    parameter: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    interval: Interval
    is_scalar: bool
    read: Callable[[Interval], Tensor]


@dataclass(frozen=True)
class StateValue:
    """What is no tensor in the state of a parameter: a number, a text, None, a list, ..."""

    parameter: str
    key: str
    value: Any


StateEntry = StateChunk | StateValue


def whole_entry(parameter: str, key: str, value: Any, elementwise: bool | None) -> StateEntry:
    """An entry that one rank has all of. `elementwise`: whether each element has its own value (None: the class does
    not tell).

    Raises:
        ValueError: a tensor that is not dense.
    """
    if not isinstance(value, Tensor):
        return StateValue(parameter, key, value)
    expect_dense(parameter, key, value)
    is_scalar = value.numel() == 1 and not (value.dim() if elementwise is None else elementwise)
    flat, everything = value.detach().reshape(-1), Interval(0, value.numel())
    return StateChunk(
        parameter, key, tuple(value.shape), value.dtype, everything, is_scalar, lambda part: flat[part.slice]
    )


def expect_dense(parameter: str, key: str, value: Any) -> None:
    """Raises:
    ValueError: a tensor made of several, or a sparse one."""
    if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided:
        raise InvalidValue(
            f"state {key} of {parameter} is a {type(value).__name__}, made of several tensors (quantised, perhaps): "
            "checkpoints hold dense tensors. Save optimizer.state_dict() yourself"
        )


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor of many elements (or a value for the only element), wherever it lies. `read(interval, out)`:
    elements `interval` of it, flattened, into `out`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Interval, Tensor], None]

    @classmethod
    def of(cls, value: Tensor) -> SavedTensor:
        def read(interval: Interval, out: Tensor) -> None:
            out.copy_(value.reshape(-1)[interval.slice])

        return cls(tuple(value.shape), value.dtype, read)

    def whole(self, device: torch.device) -> Tensor:
        flat = torch.empty(math.prod(self.shape), dtype=self.dtype, device=device)
        self.read(Interval(0, flat.numel()), flat)
        return flat.view(self.shape)


class Need(NamedTuple):
    """The state of a parameter, of which a rank loads something: elements `interval` of tensors in the parameter's
    shape, all of any other."""

    parameter: Tensor
    slot: Slot
    interval: Interval


SavedState = Mapping[Tensor, Mapping[str, Any]]
"""Parameter -> key -> `SavedTensor`, a tensor of one number, or a plain value."""


# The protocols --------------------------------------------------------------------------------------------------------


class StepperState(Protocol):
    """The state of a stepper's parameters, over all ranks."""

    def entries(self) -> Iterator[StateEntry]:
        """What this rank has to store. The ranks of one replica together: every element of every parameter's state
        once."""

    def needs(self) -> Iterator[Need]:
        """What `load` reads on this rank."""

    def fits(self, slot: Slot, shape: tuple[int, ...]) -> bool:
        """Whether a saved tensor of many elements may have that shape."""

    def elementwise(self, group: int) -> Mapping[str, bool]:
        """What the class's state is made of, whatever the shapes say (see `inner.is_elementwise_state`)."""

    def load(self, state: SavedState, only: Collection[Tensor] | None = None) -> None:
        """Replace the state by what this rank needs of the saved one; a parameter that is not in it has none then.
        `only`: that of other parameters stays."""

    def gather(self, only: Collection[Tensor] | None = None) -> FullState:
        """The state in full on every rank, of `only` these parameters. Collective.

        Raises:
            ValueError: on every rank, state that cannot be put together.
        """

    def parameters(self) -> Collection[Tensor]:
        """Those that have state, on whichever rank. Collective."""

    def clear(self) -> None:
        """As if no step had been taken."""


class Stepper(Protocol):
    """Updates the parts of main of some param groups; weights follow in `Unit`."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """An instance of the user's class."""

    @property
    def assignment(self) -> Assignment: ...

    @property
    def state(self) -> StepperState: ...

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(param group, tensor) over the own shard; nothing is copied."""

    def set_active(self, active: dict[Unit, list[bool]]) -> None:
        """Which slots take part from now on."""

    def step(
        self,
        options: Sequence[Options],
        update: Update,
        start: Callable[[Unit], None],
        updated: Callable[[Unit], None],
        arguments: Options,
    ) -> None:
        """One step of what is active. Collective.

        Args:
            options: the user's param groups; their hyper-parameters take effect (and changes by the class go back).
            start: called before anything of a unit is read; updated: after all of it is written, on all ranks in one
                order.
            arguments: of the class's own `step`.
        """

    def call(self, name: str, arguments: Arguments, options: Sequence[Options]) -> Any:
        """Another method of the class, on all of main; what it does to main reaches the weights. Collective."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """What is held, by kind: "state", "scalars", "scratch", "main"."""


def stepped(steppers: Collection[Stepper]) -> set[Tensor]:
    """The parameters of these steppers."""
    return {member.parameter for stepper in steppers for member in stepper.assignment.members()}


def as_saved(stepper: Stepper, state: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Full state of a stepper's parameters (as `gather` gives it, or a plain optimizer has it), to be loaded.

    Of a parameter of a single element, moments and counts of steps look alike: the class says what they are, or else
    what they are for parameters of many elements.

    Raises:
        ValueError: a tensor of another shape.
    """
    members = [member for member in stepper.assignment.members() if state.get(member.parameter)]
    seen: dict[str, bool] = {}  # of keys that the class does not tell
    for member in members:
        for key, value in state[member.parameter].items():
            if isinstance(value, Tensor) and member.slot.world.numel > 1:
                seen.setdefault(key, value.numel() > 1)
    saved: dict[Tensor, dict[str, Any]] = {}
    for member in members:
        of_class, items, slot = stepper.state.elementwise(member.group), dict[str, Any](), member.slot
        saved[member.parameter] = items
        for key, value in state[member.parameter].items():
            items[key] = value
            if isinstance(value, Tensor):
                if value.numel() == 1 and not of_class.get(key, seen.get(key, value.dim() > 0)):
                    continue
                if not stepper.state.fits(slot, tuple(value.shape)):
                    raise InvalidValue(
                        f"state {key!r} of {slot.name}: expected {slot.shape}, found {tuple(value.shape)}"
                    )
                items[key] = SavedTensor.of(value)
    return saved
