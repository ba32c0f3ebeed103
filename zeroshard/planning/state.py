"""What an optimizer class keeps of a parameter: found by stepping it once on a tiny one, not from a table."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.errors import InvalidValue
from zeroshard.layout.cuts import PIECE_NUMEL
from zeroshard.planner import Bytes
from zeroshard.step.assignment import OptimizerClass, Options
from zeroshard.step.inner import begin_training, run_step
from zeroshard.storage.buffer import live_bytes

_SIZES = (7, 5, 3, 11, 13, 17)
"""Of a tiny parameter: no two dimensions alike, so that a shape says which of them an entry follows."""


@dataclass(frozen=True)
class Entry:
    """One entry of a parameter's state.

    Attributes:
        value: that of the tiny parameter.
        follows: of each dimension of the parameter, whether the entry is as long (else it is 1). None: the entry is of
            the same size for every parameter.
    """

    key: str
    value: Any
    follows: tuple[bool, ...] | None

    @property
    def is_elementwise(self) -> bool:
        """A value for each element."""
        return self.follows is not None and all(self.follows)

    def of(self, shape: tuple[int, ...]) -> Any:
        """The entry of a parameter of that shape; a tensor is on the meta device."""
        if not isinstance(self.value, Tensor):
            return self.value
        lengths = self.value.shape if self.follows is None else _shape(shape, self.follows)
        return torch.empty(lengths, dtype=self.value.dtype, device="meta")

    def bytes_of(self, shape: tuple[int, ...]) -> Bytes:
        """As `handle.memory()` counts them: tensors of one number apart."""
        if not isinstance(self.value, Tensor):
            return Bytes()
        if not self.value.dim():
            return Bytes(scalars=self.value.dtype.itemsize)
        numel = self.value.numel() if self.follows is None else math.prod(_shape(shape, self.follows))
        return Bytes(state=numel * self.value.dtype.itemsize)


def _shape(shape: tuple[int, ...], follows: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple(length if long else 1 for length, long in zip(shape, follows, strict=True))


@dataclass(frozen=True, eq=False)
class OptimizerKind:
    """A class with the options that it is built with. `pattern`: of the names of the parameters that it is for."""

    optimizer_class: OptimizerClass
    options: Options
    pattern: str = "*"

    @property
    def name(self) -> str:
        return self.optimizer_class.__name__

    def takes(self, name: str, parameter: Tensor) -> bool:
        """Whether it is for that parameter, and does not refuse it (Muon: all but matrices)."""
        try:
            self.optimizer_class([torch.empty(parameter.shape, device="meta")], **self.options)
        except (ValueError, RuntimeError):
            return False
        return fnmatchcase(name, self.pattern)

    @lru_cache(maxsize=1 << 14)  # noqa: B019  few kinds, and each lives as long as what it plans
    def piece(self, numel: int, dtype: torch.dtype) -> Mapping[str, Bytes]:
        """Entry of the state -> what is held of it for a piece, whose main is of that dtype.

        Raises:
            ValueError: as `entries`.
        """
        if self._follows_shapes(dtype):
            return {entry.key: entry.bytes_of((numel,)) for entry in self.entries(1, dtype)}
        return _held(self._step((numel,), dtype))

    @lru_cache(maxsize=8)  # noqa: B019
    def _follows_shapes(self, dtype: torch.dtype) -> bool:
        """Whether a large piece is as a tiny one lets expect. Classes quantise the state of large ones alone."""
        expected = {entry.key: entry.bytes_of((PIECE_NUMEL,)) for entry in self.entries(1, dtype)}
        return _held(self._step((PIECE_NUMEL,), dtype)) == expected

    @lru_cache(maxsize=64)  # noqa: B019  few kinds, and each lives as long as what it plans
    def entries(self, num_dims: int, dtype: torch.dtype) -> tuple[Entry, ...]:
        """Of a parameter of so many dimensions (a piece has one), whose main is of that dtype.

        Raises:
            ValueError: the class does not step it, or keeps what cannot be planned from shapes.
        """
        if num_dims > len(_SIZES):
            raise InvalidValue(f"{self.name}: parameters of more than {len(_SIZES)} dimensions are not planned")
        shape = _SIZES[:num_dims]
        return tuple(self._read(self._step(shape, dtype), shape))

    def _step(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        """The state of a parameter of that shape after a step.

        Raises:
            ValueError: the class does not step it.
        """
        kernels = dict.fromkeys({"foreach", "fused", "capturable", "differentiable"} & self.options.keys(), False)
        # On the CPU also inside of `with torch.device("meta")`: classes read their counts of steps.
        with torch.device("cpu"), torch.random.fork_rng(devices=()), torch.no_grad(), _uncompiled(self.optimizer_class):
            parameter = torch.zeros(shape, dtype=dtype, requires_grad=True)
            try:
                optimizer = self.optimizer_class([parameter], **(copy.deepcopy(self.options) | kernels))
                begin_training(optimizer)
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
                yield Entry(key, value, None)
                continue
            lengths, is_made_of_several = tuple(value.shape), bool(is_traceable_wrapper_subclass(value))
            fits = len(lengths) == len(shape) and all(m in (n, 1) for m, n in zip(lengths, shape, strict=True))
            if not fits or is_made_of_several:
                raise InvalidValue(
                    f"{self.name}: for a parameter of shape {shape} its state {key!r} is a {type(value).__name__} of "
                    f"shape {lengths}, and from that its size for others does not follow"
                )
            follows = tuple(m == n for m, n in zip(lengths, shape, strict=True))
            yield Entry(key, value, follows if value.numel() > 1 else None)


def _held(state: Mapping[str, Any]) -> dict[str, Bytes]:
    """What is held of each entry, as `handle.memory()` counts it."""
    found = {}
    for key, value in state.items():
        num_bytes = live_bytes([value]) if isinstance(value, Tensor) else 0
        is_scalar = isinstance(value, Tensor) and not value.dim()
        found[key] = Bytes(scalars=num_bytes) if is_scalar else Bytes(state=num_bytes)
    return found


def _uncompiled(optimizer_class: OptimizerClass) -> AbstractContextManager[Any]:
    """Classes of other libraries may compile their step, which takes long, and changes nothing in what they keep."""
    if optimizer_class.__module__.startswith("torch."):
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager
