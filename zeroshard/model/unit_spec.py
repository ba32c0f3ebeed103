"""One unit of a model before anything is allocated: names, shapes and dtypes of its parameters, and what they need.

A unit is parameters that are gathered, reduced and released together. (Which ones: `units.py`. Its memory:
`storage/unit.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch

from zeroshard.comm.transport import Transport
from zeroshard.layout.layout import BufferLayout
from zeroshard.layout.pool_plan import Request
from zeroshard.precision import FLOATS, MixedPrecision


@dataclass(frozen=True)
class UnitSpec:
    """One unit, before anything is allocated. All its parameters have one dtype and are all trainable or all frozen.

    Attributes:
        names: parameter names in registration order, as the model has them now (slots have plain names).
        modules: dotted paths of the modules whose forward needs the weights.
        calls: those of `modules` that form the unit; their inputs are cast.
        stays: whether the weights are kept from forward to backward; then the unit has a pool buffer of its own.
        outer: whether other units run while this one is in use (the root unit, a unit around units, a group of modules
            around modules of other units); then it has a pool buffer of its own, while the others take turns.
        gathered_by: of a root part: the calls of `modules` that gather the weights. The call of the model only keeps
            them, from then on until it ends.
        places: numbers of its first and last parameter, in registration order. Backward comes to the last one first.
    """

    name: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    precision: MixedPrecision
    trainable: bool
    modules: tuple[str, ...]
    outer: bool
    calls: tuple[str, ...] = ()
    stays: bool = False
    gathered_by: tuple[str, ...] = ()
    places: tuple[int, int] = (0, 0)

    @property
    def is_part(self) -> bool:
        """Whether it is a root part: a large module that the policy leaves to the root unit, as a unit of its own."""
        return bool(self.gathered_by)

    @property
    def of_root(self) -> bool:
        """Whether the call of the whole model keeps the weights: the root unit, and root parts."""
        return "" in self.modules

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the weights. Frozen weights are cast like others (a forward computes in one dtype), except
        quantised ones."""
        return self.precision.param if self.trainable or self.dtype in FLOATS else self.dtype

    @property
    def widens_gradients(self) -> bool:
        """Whether gradients are accumulated in a wider dtype than that of the weights, in which autograd makes them."""
        return self.precision.grad.itemsize > self.weight_dtype.itemsize

    def weight_request(self, numel: int, *, in_common: bool = False) -> Request:
        """The request for a full-size buffer to gather into. Units that differ in dtype, trainability or precision may
        be needed at the same time (several units of one module), so they have different queues.

        Args:
            in_common: whether the shards lie side by side: the buffer then needs no memory. The unit still takes turns,
                so that the same units are gathered at the same times under every transport.
        """
        queue = (self.weight_dtype, self.trainable, self.precision)
        num_bytes = 0 if in_common else numel * self.weight_dtype.itemsize
        return Request(self.name, queue, num_bytes, self.outer or self.stays)

    def bucket_request(self, numel: int) -> Request:
        """The request for a full-size bucket to accumulate into."""
        precision = self.precision.grad
        return Request(self.name, precision, numel * precision.itemsize, self.outer, self.places)

    def reduce_scratch(
        self, transport: type[Transport], num_shards: int, num_replicas: int, *, in_place: bool
    ) -> tuple[int, int]:
        """Scratch bytes of a reduction: of the sum over shards, and of the sum over replicas. `in_place`: no unit
        borrows its bucket."""
        numel, sizes = self.layout(num_shards, num_replicas).numel, (num_shards, num_replicas)
        return transport.scratch_of_each(numel, self.precision.grad, self.precision.wire, *sizes, in_place=in_place)

    def layout(self, num_shards: int, num_replicas: int = 1) -> BufferLayout:
        """The layout of the full buffer: parameters in reverse registration order, so that backward fills the buffer
        from the front."""
        found = self._layouts.get((num_shards, num_replicas))
        if found is None:
            shapes = [(plain_name(name), shape) for name, shape in zip(self.names, self.shapes, strict=True)][::-1]
            found = BufferLayout.pack(shapes, num_shards, num_replicas=num_replicas)
            self._layouts[num_shards, num_replicas] = found
        return found

    @cached_property
    def _layouts(self) -> dict[tuple[int, int], BufferLayout]:
        return {}


class HasSpec(Protocol):
    @property
    def spec(self) -> UnitSpec: ...


T = TypeVar("T", bound=HasSpec)


def in_order_of_reduction(units: Sequence[T]) -> list[T]:
    """The units in the order in which they are reduced: the last one first; but modules of the root that come behind
    other units (a head) only before the last of these. So they are reduced while the first block computes."""
    # [Note: the root in the order of reduction]
    # A rank may leave out a module of the root, and then holds up the reductions behind that of the module until the
    # end of its backward. Its peers must not wait for these while it waits for a gather that they have not begun. So
    # inside of a backward a rank starts the reductions of the root, and those behind the first of them, only when it
    # has begun all gathers, and if it need not wait for one of them (`Reducer._may_start`). Only one unit that takes
    # turns is behind them, so that no bucket is waited for. (docs/design.md: "The root unit and its parts")
    first = next((number for number, unit in enumerate(units) if not unit.spec.of_root), len(units) - 1)
    early = [unit for unit in units[:first:-1] if unit.spec.of_root]
    others = [unit for unit in units[:first:-1] if not unit.spec.of_root]
    return [*others, *early, *units[first::-1]] if units else []


def plain_name(name: str) -> str:
    """The name of a parameter in the original model, without the prefixes of torch.compile and of torch's checkpoint
    wrapper."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
