"""The protocols of a stepper, which steps some param groups of an optimizer, and of its state.

A `Stepper` updates parts of main with an inner optimizer. Its `state` lists what this rank holds as *entries*, each an
interval of one tensor, or a plain value. It loads *saved* state, of which it reads what this rank needs.
`optimizer.state`, `state_dict` and checkpoints use only these protocols. To add a stepper, write a class that
implements both, is built from an `Assignment`, and has a line in `steppers.py`.
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
from zeroshard.full_model.full_state import EVERYWHERE, Destination
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import Slot
from zeroshard.step.assignment import Assignment, Member, Options
from zeroshard.step.inner import Arguments
from zeroshard.storage.unit import Unit

FullState = dict[Tensor, dict[str, Any]]
"""Parameter -> key -> value in full: tensors of many elements in the shape that the class gives them."""


@dataclass(frozen=True)
class Update:
    """What a step does to the gradient before it uses it: one multiplication, and possibly a clamp.

    Attributes:
        factor: mean over ranks (or tokens), loss scale and norm clip in one number: on the host, or 0-d float32.
        clip_value: bound on the absolute value, applied after the factor: on the host, or 0-d float32.
        is_void: 0-d float32 on the device, 1 if the update must change nothing (`ahead.py`); None: it is not void.
    """

    factor: float | Tensor
    clip_value: float | Tensor | None = None
    is_void: Tensor | None = None

    @property
    def changes(self) -> bool:
        """Whether `apply` may change a gradient."""
        return self._multiplies or self.clip_value is not None

    @property
    def _multiplies(self) -> bool:
        return isinstance(self.factor, Tensor) or self.factor != 1.0

    def apply(self, gradients: list[Tensor]) -> None:
        """Apply it in place to gradients of one dtype."""
        if self._multiplies:
            torch._foreach_mul_(gradients, self.factor)
        if isinstance(self.clip_value, Tensor):
            for gradient in gradients:
                gradient.clamp_(-self.clip_value, self.clip_value)
        elif self.clip_value is not None:
            torch._foreach_clamp_min_(gradients, -self.clip_value)
            torch._foreach_clamp_max_(gradients, self.clip_value)


# Entries of a parameter's state ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateChunk:
    """Elements `interval` of one tensor in the state of a parameter.

    Attributes:
        parameter: its name.
        key: of the tensor in the parameter's state.
        shape: of the whole tensor.
        interval: in the flattened tensor.
        is_scalar: whether it is one number for the whole parameter, and not a value for its only element.
        read: interval inside `interval` -> its current values, [numel].
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
    """A value in the state of a parameter that is no tensor: a number, a string, None, a list, ..."""

    parameter: str
    key: str
    value: Any


StateEntry = StateChunk | StateValue


def whole_entry(parameter: str, key: str, value: Any, elementwise: bool | None) -> StateEntry:
    """An entry that one rank holds completely. `elementwise`: whether each element has its own value (None: not known
    from the class).

    Raises:
        ValueError: the tensor is not dense.
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
    ValueError: the tensor is a wrapper subclass (quantised), or sparse."""
    if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided:
        raise InvalidValue(
            f"state {key} of {parameter} is a {type(value).__name__}, made of several tensors (quantised, perhaps): "
            "checkpoints hold dense tensors. Save optimizer.state_dict() yourself"
        )


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor with a value per element, in memory or in a file. `read(interval, out)` copies elements `interval`
    of the flattened tensor into `out`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Interval, Tensor], None]

    @classmethod
    def of(cls, value: Tensor, dtype: torch.dtype) -> SavedTensor:
        def read(interval: Interval, out: Tensor) -> None:
            out.copy_(value.reshape(-1)[interval.slice])

        return cls(tuple(value.shape), dtype, read)

    def whole(self, device: torch.device) -> Tensor:
        flat = torch.empty(math.prod(self.shape), dtype=self.dtype, device=device)
        self.read(Interval(0, flat.numel()), flat)
        return flat.view(self.shape)


class Need(NamedTuple):
    """What a rank loads of a parameter's state: elements `interval` of tensors in the parameter's shape, and all of
    other tensors."""

    parameter: Tensor
    slot: Slot
    interval: Interval


SavedState = Mapping[Tensor, Mapping[str, Any]]
"""Parameter -> key -> `SavedTensor`, a tensor of one number, or a plain value."""


# The protocols --------------------------------------------------------------------------------------------------------


class StepperState(Protocol):
    """The state of a stepper's parameters, over all ranks."""

    def entries(self) -> Iterator[StateEntry]:
        """The entries that this rank stores. Together, the ranks of one replica store every element of every
        parameter's state exactly once."""

    def needs(self) -> Iterator[Need]:
        """What `load` reads on this rank."""

    def fits(self, slot: Slot, shape: tuple[int, ...]) -> bool:
        """Whether a saved tensor of many elements may have that shape."""

    def elementwise(self, group: int) -> Mapping[str, bool]:
        """Which items of the class's state are elementwise (see `inner.is_elementwise_state`)."""

    def load(self, state: SavedState, only: Collection[Tensor] | None = None) -> None:
        """Replace the state by this rank's part of the saved state. Parameters that are not in it have no state
        afterwards. `only`: keep the state of all other parameters."""

    def gather(self, only: Collection[Tensor] | None = None, destination: Destination = EVERYWHERE) -> FullState:
        """The full state (`only`: of these parameters), copied to the destination. Collective. What a rank gathers that
        the destination leaves out is dropped at once, and may be left out of its result.

        Raises:
            ValueError: on every rank: state that cannot be gathered.
        """

    def parameters(self) -> Collection[Tensor]:
        """The parameters that have state on any rank. Collective."""


class Stepper(Protocol):
    """Updates this rank's parts of main, of some param groups, and the own weights with them."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """An instance of the user's class."""

    @property
    def assignment(self) -> Assignment: ...

    @property
    def state(self) -> StepperState: ...

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(param group, gradient) of the own shard, as views."""

    def step(
        self,
        options: Sequence[Options],
        active: dict[Unit, list[bool]],
        update: Update,
        updated: Callable[[Unit], None],
        arguments: Options,
    ) -> Exception | None:
        """One step of the active slots. Collective.

        Args:
            options: the user's param groups: their hyper-parameters are used, and changes by the class are copied back.
            active: which slots of each unit take part.
            updated: called with a unit after all of it is written; in the same order on all ranks.
            arguments: for the class's own `step`.

        Returns:
            What the class has raised (see `inner.tried_step`).
        """

    def call(self, name: str, arguments: Arguments, options: Sequence[Options]) -> Any:
        """Call another method of the class on all of main; then set the weights from main. Collective."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors held, by kind: "state", "scalars", "scratch", "main"."""


def stepped(steppers: Collection[Stepper]) -> set[Tensor]:
    """The parameters of these steppers."""
    return {member.parameter for stepper in steppers for member in stepper.assignment.members()}


def as_saved(
    stepper: Stepper, state: Mapping[Tensor, Mapping[str, Any]], *, as_main: bool = False
) -> dict[Tensor, dict[str, Any]]:
    """Full state of a stepper's parameters (from `gather`, or of a plain optimizer), in the form that `load` takes.
    `as_main`: give state the dtype in which it is loaded, see `_loaded_dtype`.

    For a parameter of one element, moments and step counts look alike. The class decides; or, if it does not know the
    key (with the options of before a load), the shape that the item has for parameters of many elements. If there are
    none, it is a moment of a 0-d parameter: options add moments (`amsgrad`, `centered`) rather than counts.

    Raises:
        ValueError: an item has another shape.
    """
    members = [member for member in stepper.assignment.members() if state.get(member.parameter)]
    seen: dict[str, bool] = {}  # for keys that the class does not know
    for member in members:
        for key, value in state[member.parameter].items():
            if isinstance(value, Tensor) and member.slot.world.numel > 1:
                seen.setdefault(key, value.numel() > 1)
    saved: dict[Tensor, dict[str, Any]] = {}
    for member in members:
        of_class, items, slot = stepper.state.elementwise(member.group), dict[str, Any](), member.slot
        is_moment = bool(of_class) and not slot.shape
        saved[member.parameter] = items
        for key, value in state[member.parameter].items():
            items[key] = value
            if isinstance(value, Tensor):
                if value.numel() == 1 and not of_class.get(key, seen.get(key, is_moment or value.dim() > 0)):
                    continue
                if not stepper.state.fits(slot, tuple(value.shape)):
                    raise InvalidValue(
                        f"state {key!r} of {slot.name}: expected {slot.shape}, found {tuple(value.shape)}"
                    )
                items[key] = SavedTensor.of(value, _loaded_dtype(stepper, member, value) if as_main else value.dtype)
    return saved


def _loaded_dtype(stepper: Stepper, member: Member, value: Tensor) -> torch.dtype:
    """The dtype in which the state of a `state_dict` is loaded: torch gives it that of the parameter, here main's.
    Classes of others may have moments in a dtype of their own: these keep it, unless it is that of the weights."""
    of_torch = stepper.assignment.optimizer_class.__module__.startswith("torch.optim.") and value.is_floating_point()
    return member.unit.main.dtype if of_torch or value.dtype == member.unit.weights.buffer.dtype else value.dtype
