"""The parts of a planned model, each in bytes of one rank: units, pieces that it steps, pool buffers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.transport import Transport
from zeroshard.layout.cuts import Pattern, Sizes, count
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import BufferLayout, Slot, numel_multiple
from zeroshard.model.small_units import with_small_ones_merged
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.placement import REPLICATED, SHARDED, Placement, Plan


@dataclass(frozen=True)
class Bytes:
    """Bytes on one rank, by the kinds of `handle.memory()`."""

    weights: int = 0
    grads: int = 0
    main: int = 0
    state: int = 0
    scalars: int = 0
    ring: int = 0
    buckets: int = 0
    scratch: int = 0

    @classmethod
    def total(cls, parts: Iterable[Bytes]) -> Bytes:
        """The sum of several parts."""
        return cls(*map(sum, zip(*(vars(part).values() for part in parts), strict=True)))

    def times(self, number: int) -> Bytes:
        """The bytes of `number` equal parts."""
        return Bytes(*(number * num_bytes for num_bytes in vars(self).values()))

    @property
    def sum(self) -> int:
        """The bytes of all kinds together."""
        return sum(vars(self).values())

    @property
    def transient(self) -> int:
        """The bytes that `max_transient_bytes` limits."""
        return self.ring + self.buckets + self.scratch


@dataclass(frozen=True)
class Topology:
    """The mesh, transport and type of device of a model. See `plan_memory`."""

    num_shards: int
    num_replicas: int
    transport: type[Transport]
    device_type: str

    @classmethod
    def of(cls, collectives: Collectives) -> Topology:
        mesh = collectives.mesh
        return cls(mesh.shard.size, mesh.replicate.size, type(collectives.transport), collectives.device.type)

    def units(self, specs: Sequence[UnitSpec]) -> list[UnitSpec]:
        """The units on so many ranks: see `small_units.py`."""
        return with_small_ones_merged(specs, numel_multiple(self.num_shards, self.num_replicas))


@dataclass(frozen=True)
class OptimizerNeeds:
    """The memory needs of an optimizer. See `plan_memory`."""

    state_bytes_per_element: int = 8
    state_scalars: int = 1
    group_of: Callable[[str], Hashable] = lambda name: 0
    whole_state_bytes: Callable[[str], int | None] = lambda name: None

    def stepper_of(self, name: str) -> Hashable:
        """A key for the stepper that has the parameter."""
        return self.whole_state_bytes(name) is None

    def key_of(self, name: str) -> Hashable | None:
        """The key of the parameter for `cuts.cut`. None: it is stepped as a whole."""
        return self.group_of(name) if self.whole_state_bytes(name) is None else None

    def piece_state(self, stepper: Hashable, numel: int, main: torch.dtype) -> Bytes:
        """The state of a piece of `numel` elements."""
        return Bytes(state=numel * self.state_bytes_per_element, scalars=self.state_scalars * 4)

    def whole_state(self, slot: Slot, main: torch.dtype) -> Bytes | None:
        """The state of a parameter that is stepped as a whole; None: it is stepped in pieces."""
        itemsize = self.whole_state_bytes(slot.name)
        return None if itemsize is None else Bytes(state=slot.world.numel * itemsize)


ADAM = OptimizerNeeds()
"""Adam over one param group."""


@dataclass(frozen=True)
class PlannedUnit:
    """A unit under a plan, with its layout. `num_ranks`: of all axes."""

    spec: UnitSpec
    layout: BufferLayout
    plan: Plan
    num_ranks: int

    @property
    def is_reduced(self) -> bool:
        """Whether the engine reduces its gradients."""
        return self.spec.trainable and not self.plan.external_gradients

    @property
    def takes_over_gradients(self) -> bool:
        """See `Plan.takes_over_gradients`."""
        return self.plan.takes_over_gradients(self.num_ranks, in_place=self.spec.precision.steps_in_place)

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of main; in a frozen unit the weights are main."""
        return self.spec.precision.main_dtype if self.spec.trainable else self.spec.weight_dtype

    @property
    def itemsizes(self) -> tuple[int, int, int]:
        """Bytes of an element of weights, gradients and main; 0: there is no such buffer."""
        precision = self.spec.precision
        has_main = self.spec.trainable and not precision.weights_are_main
        main = 2 if self.joins_main else self.main_dtype.itemsize
        return self.spec.weight_dtype.itemsize, self.is_reduced * precision.grad.itemsize, has_main * main

    @property
    def joins_main(self) -> bool:
        """Whether main is joined from weights and remainder."""
        return self.spec.precision.main == "remainder"

    @property
    def follows_weights(self) -> bool:
        """Whether main is compared with the weights, which users may write to."""
        in_full = self.plan.weights is REPLICATED or self.layout.num_shards == 1
        return in_full and not self.joins_main and not self.spec.precision.weights_are_main

    def held(self, *, peak: bool) -> Bytes:
        """The bytes of its three buffers. Gradients that are sharded, or taken over, are only held at the peak."""
        is_passing = self.plan.grads is SHARDED or self.takes_over_gradients
        numel = self.layout.slots_numel if self.takes_over_gradients else self._numel(self.plan.grads)
        weights, grads, main = self.itemsizes
        return Bytes(
            weights=self._numel(self.plan.weights) * weights,
            grads=(peak or not is_passing) * numel * grads,
            main=self._numel(self.plan.main) * main,
        )

    def _numel(self, placement: Placement) -> int:
        return self.layout.shard_numel if placement is SHARDED else self.layout.numel

    def main_part(self, rank: int) -> Interval:
        """The interval that the rank updates."""
        return Interval(0, self.layout.numel) if self.plan.main is REPLICATED else self.layout.shard(rank)


@dataclass(frozen=True)
class PlannedWhole:
    """A parameter that is stepped as a whole. `state`: at its `owner`, a rank on the shard axis."""

    stepper: Hashable
    unit: PlannedUnit
    slot: Slot
    state: Bytes
    owner: int


@dataclass(frozen=True)
class Pieces:
    """The pieces of one unit that one rank steps.

    Attributes:
        cast, joined: bytes of scratch for each element: for the gradient cast to main's dtype; for main joined from
            weights and remainder.
        compared: bytes of scratch to compare main with written weights.
    """

    patterns: tuple[Pattern, ...]
    cast: int
    joined: int
    compared: int

    @classmethod
    def of(cls, unit: PlannedUnit, rank: int, key_of: Callable[[str], Hashable | None], sizes: Sizes) -> Pieces:
        plan, precision, layout = unit.plan, unit.spec.precision, unit.layout
        main = unit.main_dtype
        part = unit.main_part(rank)
        keys = [key_of(slot.name) for slot in layout.slots]
        patterns = tuple(count(layout, keys, part, sizes.piece, by_slot=unit.takes_over_gradients))
        at_once = min(sizes.at_once, part.numel) if unit.follows_weights and patterns else 0
        return cls(
            patterns,
            cast=(plan.external_gradients or precision.grad != main) * main.itemsize,
            joined=unit.joins_main * main.itemsize,
            compared=at_once * unit.spec.weight_dtype.itemsize,
        )


@dataclass(frozen=True)
class PlannedBuffer:
    """A planned pool buffer.

    Attributes:
        kind: "ring", "buckets" or "scratch".
        lasting: held between steps, whatever its size.
        passing: given back before the end of backward.
    """

    kind: str
    num_bytes: int
    lasting: bool = False
    passing: bool = False
