"""Finds out what state an optimizer class keeps for a parameter: builds it over a tiny one, and steps it once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.errors import InvalidValue
from zeroshard.layout.cuts import SIZES
from zeroshard.planned.parts import Bytes
from zeroshard.step.assignment import OptimizerClass, Options
from zeroshard.step.inner import built_for_trial, for_trial, run_step, trial
from zeroshard.storage.buffer import live_bytes

T = TypeVar("T")

_SIZES = (7, 5, 3, 11, 13, 17)
"""Dimensions of a tiny parameter: all different, so that the shape of an entry shows which dimensions it has."""


@dataclass(frozen=True)
class Entry:
    """One entry of a parameter's state.

    Attributes:
        value: its value for the tiny parameter.
        follows: for each dimension of the entry, which dimension of the parameter it is as long as; -1: it has length
            1. None: the entry has the same size for every parameter.
        is_elementwise: whether it has a value for each element.
    """

    key: str
    value: Any
    follows: tuple[int, ...] | None = None
    is_elementwise: bool = False

    def of(self, shape: tuple[int, ...]) -> Any:
        """The entry of a parameter of that shape; a tensor is on the meta device."""
        if not isinstance(self.value, Tensor):
            return self.value
        lengths = self.value.shape if self.follows is None else _shape(shape, self.follows)
        return torch.empty(lengths, dtype=self.value.dtype, device="meta")

    def bytes_of(self, shape: tuple[int, ...]) -> Bytes:
        """Its bytes as `handle.memory()` counts them: 0-d tensors are scalars, others are state."""
        if not isinstance(self.value, Tensor):
            return Bytes()
        if not self.value.dim():
            return Bytes(scalars=self.value.dtype.itemsize)
        numel = self.value.numel() if self.follows is None else math.prod(_shape(shape, self.follows))
        return Bytes(state=numel * self.value.dtype.itemsize)


def _shape(shape: tuple[int, ...], follows: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if number < 0 else shape[number] for number in follows)


def _kept(method: Callable[..., T]) -> Callable[..., T]:
    """Results are kept in the object itself. (`lru_cache` would keep the object: those of all plans of a process.)"""

    @wraps(method)
    def call(self: Any, *arguments: Any) -> T:
        found, key = vars(self).setdefault("_found", {}), (method.__name__, *arguments)
        if key not in found:
            found[key] = method(self, *arguments)
        result: T = found[key]
        return result

    return call


@dataclass(frozen=True, eq=False)
class OptimizerKind:
    """An optimizer class with its options.

    Attributes:
        pattern: matches the names of the parameters that it may have.
        steps: False: the state is that before the first step (Adagrad makes it when it is built).
    """

    optimizer_class: OptimizerClass
    options: Options
    pattern: str
    steps: bool = True

    @property
    def name(self) -> str:
        return self.optimizer_class.__name__

    def takes(self, name: str, parameter: Tensor) -> bool:
        """Whether the name matches, and the class accepts the parameter (Muon: only matrices)."""
        try:
            self.optimizer_class([torch.empty(parameter.shape, device="meta")], **self.options)
        except (ValueError, RuntimeError):
            return False
        return fnmatchcase(name, self.pattern)

    @_kept
    def piece(self, numel: int, dtype: torch.dtype) -> Mapping[str, Bytes]:
        """Key of the state -> bytes for a piece of `numel` elements with main in that dtype.

        Raises:
            ValueError: as `entries`.
        """
        if self._follows_shapes(dtype):
            return {entry.key: entry.bytes_of((numel,)) for entry in self.entries(1, dtype)}
        return _held(self._state((numel,), dtype))

    @_kept
    def _follows_shapes(self, dtype: torch.dtype) -> bool:
        """Whether the state of a large piece can be computed from that of a tiny one. (Some classes quantise only the
        state of large tensors.)"""
        large = (SIZES["cpu"].piece,)
        expected = {entry.key: entry.bytes_of(large) for entry in self.entries(1, dtype)}
        return _held(self._state(large, dtype)) == expected

    @_kept
    def entries(self, num_dims: int, dtype: torch.dtype) -> tuple[Entry, ...]:
        """The entries for a parameter of `num_dims` dimensions (a piece has one) with main in that dtype.

        Raises:
            ValueError: the class cannot step it, or the size of its state does not follow from the shape.
        """
        if num_dims > len(_SIZES):
            raise InvalidValue(f"{self.name}: parameters of more than {len(_SIZES)} dimensions are not planned")
        shape = _SIZES[:num_dims]
        return tuple(self._read(self._state(shape, dtype), shape))

    def _state(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        """The state of a parameter of that shape after a step, or before it.

        Raises:
            ValueError: the class cannot step it.
        """
        # On the CPU, also inside of `with torch.device("meta")`: classes read their step counts.
        with trial(), torch.no_grad(), _uncompiled(self.optimizer_class):
            parameter = torch.zeros(shape, dtype=dtype, device="cpu", requires_grad=True)
            try:
                optimizer = built_for_trial(self.optimizer_class, for_trial(self.options), [parameter])
                if self.steps:
                    parameter.grad = torch.ones_like(parameter)
                    run_step(optimizer)
            except Exception as error:
                raise InvalidValue(
                    f"{self.name}: stepping a tiny parameter of shape {shape} raised {error!r}, so what it keeps of a "
                    "parameter is not known"
                ) from error
        return dict(optimizer.state[parameter])

    def _read(self, state: dict[str, Any], shape: tuple[int, ...]) -> Iterator[Entry]:
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.dim():
                yield Entry(key, value)
                continue
            lengths, is_made_of_several = tuple(value.shape), bool(is_traceable_wrapper_subclass(value))
            if is_made_of_several or not {1, *shape}.issuperset(lengths):
                raise InvalidValue(
                    f"{self.name}: for a parameter of shape {shape} its state {key!r} is a {type(value).__name__} of "
                    f"shape {lengths}, and from that its size for others does not follow"
                )
            follows = tuple(-1 if length == 1 else shape.index(length) for length in lengths)
            yield Entry(key, value, follows if value.numel() > 1 else None, lengths == shape)


def _held(state: Mapping[str, Any]) -> dict[str, Bytes]:
    """Key -> bytes, as `handle.memory()` counts them."""
    found = {}
    for key, value in state.items():
        num_bytes = live_bytes([value]) if isinstance(value, Tensor) else 0
        is_scalar = isinstance(value, Tensor) and not value.dim()
        found[key] = Bytes(scalars=num_bytes) if is_scalar else Bytes(state=num_bytes)
    return found


def _uncompiled(optimizer_class: OptimizerClass) -> AbstractContextManager[Any]:
    """A scope without torch.compile: classes of other libraries may compile their step, which is slow, and does not
    change their state."""
    if optimizer_class.__module__.startswith("torch."):
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager
