"""What an optimizer class keeps of a parameter: found by stepping it once on a tiny one, not from a table."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.planner import Bytes
from zeroshard.step.assignment import OptimizerClass, Options
from zeroshard.step.inner import begin_training, run_step

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
    """A class with the options that it is built with."""

    optimizer_class: OptimizerClass
    options: Options

    @property
    def name(self) -> str:
        return self.optimizer_class.__name__

    @lru_cache(maxsize=64)  # noqa: B019  few kinds, and each lives as long as what it plans
    def entries(self, num_dims: int, dtype: torch.dtype) -> tuple[Entry, ...]:
        """Of a parameter of so many dimensions (a piece has one), whose main is of that dtype.

        Raises:
            ValueError: the class does not step it, or keeps what cannot be planned from shapes.
        """
        if num_dims > len(_SIZES):
            raise ValueError(f"{self.name}: parameters of more than {len(_SIZES)} dimensions are not planned")
        kernels = dict.fromkeys({"foreach", "fused", "capturable", "differentiable"} & self.options.keys(), False)
        # On the CPU also inside of `with torch.device("meta")`: classes read their counts of steps.
        with torch.device("cpu"), torch.random.fork_rng(devices=()), torch.no_grad():
            tiny = torch.zeros(_SIZES[:num_dims], dtype=dtype, requires_grad=True)
            try:
                optimizer = self.optimizer_class([tiny], **(copy.deepcopy(self.options) | kernels))
                begin_training(optimizer)
                tiny.grad = torch.ones_like(tiny)
                run_step(optimizer)
            except Exception as error:
                raise ValueError(
                    f"{self.name}: stepping a tiny parameter of shape {tuple(tiny.shape)} raised {error!r}, so what it "
                    "keeps of a parameter is not known"
                ) from error
        return tuple(self._read(optimizer.state[tiny], tuple(tiny.shape)))

    def _read(self, state: dict[str, Any], shape: tuple[int, ...]) -> Iterator[Entry]:
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.dim():
                yield Entry(key, value, None)
                continue
            lengths, is_made_of_several = tuple(value.shape), bool(is_traceable_wrapper_subclass(value))
            fits = len(lengths) == len(shape) and all(m in (n, 1) for m, n in zip(lengths, shape, strict=True))
            if not fits or is_made_of_several:
                raise ValueError(
                    f"{self.name}: for a parameter of shape {shape} its state {key!r} is a {type(value).__name__} of "
                    f"shape {lengths}, and from that its size for others does not follow"
                )
            follows = tuple(m == n for m, n in zip(lengths, shape, strict=True))
            yield Entry(key, value, follows if value.numel() > 1 else None)
