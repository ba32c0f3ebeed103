"""Plans a step over time: bytes of the engine and of activations, from gradient to gradient.

forward       weights, main, state, gathered units      + inputs and tensors saved by autograd, increasing
backward      the same, buckets and reduced gradients   + the saved tensors that are still needed, decreasing
step          no full gathered gradients any more       + inputs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from zeroshard.errors import InvalidValue
from zeroshard.placement import SHARDED
from zeroshard.planned.parts import Bytes, PlannedUnit
from zeroshard.planned.training import Training
from zeroshard.planning.activations import Trace

PHASES = ("forward", "backward", "step", "between steps")
"""The phases of a step, and what is held after it."""


@dataclass(frozen=True)
class Moment:
    """A part of a step, and the most that one rank holds in it.

    Attributes:
        phase: one of `PHASES`.
        until: the parameter whose gradient ends it, in backward twice: before the engine has that gradient, and when it
            has it; "": the end of the phase.
        engine: bytes as `handle.memory()` counts them.
        activations: bytes of the model's own tensors, including inputs.

    Raises:
        ValueError: another phase (in a plan file).
    """

    phase: str
    until: str
    engine: Bytes
    activations: int

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise InvalidValue(f"expected a moment of one of {', '.join(PHASES)}, found {self.phase[:60]!r}")

    @property
    def num_bytes(self) -> int:
        return self.engine.sum + self.activations


def moments(training: Training, trace: Trace, held: Mapping[str, Bytes], *, accumulates: bool) -> Iterator[Moment]:
    """The moments of a step, in order.

    Args:
        held: the engine's bytes in each phase of a step.
        accumulates: whether there are several micro-batches. The last one is planned, when gradients of the earlier
            ones exist.
    """
    engine = held["backward"] if accumulates else held["forward"]
    yield Moment("forward", "", engine, trace.forward)
    growing = _Backward(training, engine, held["backward"])
    for gradient in trace.gradients:
        yield Moment("backward", gradient.name, engine, gradient.until)
        engine = growing.after(gradient.name)
        taken = gradient.own if growing.takes_over(gradient.name) and not accumulates else 0
        yield Moment("backward", gradient.name, engine, gradient.there - taken)
    yield Moment("backward", "", engine, trace.rest)
    yield Moment("step", "", held["step"], trace.inputs)


class _Backward:
    """The engine's bytes after each gradient. `most`: at the end of backward."""

    def __init__(self, training: Training, engine: Bytes, most: Bytes) -> None:
        self._engine, self._most = engine, most
        self._unit_of = {slot.name: unit for unit in training.units for slot in unit.layout.slots if unit.is_reduced}
        self._slot_of = {slot.name: n for unit in training.units for n, slot in enumerate(unit.layout.slots)}
        self._missing = Counter[int](id(unit) for unit in self._unit_of.values())
        self._takes_shards = training.plan.grads is SHARDED and engine.grads < most.grads
        requests, self._buckets = training.buckets()
        self._borrows = bool(requests)
        self._at_once = training.at_once()
        self._opened = Counter[Hashable]()
        self._own = 0

    def takes_over(self, name: str) -> bool:
        """Whether the gradient that autograd has made is the engine's from then on, and is not copied."""
        unit = self._unit_of.get(name)
        return unit is not None and unit.takes_over_gradients

    def after(self, name: str) -> Bytes:
        unit = self._unit_of.get(name)
        if unit is None:  # not reduced by the engine
            return self._engine
        is_first = self._missing[id(unit)] == len(unit.layout.slots)
        self._missing[id(unit)] -= 1
        is_last = not self._missing[id(unit)]
        if is_first and self._borrows:
            self._open(unit)
        numel = 0
        if unit.takes_over_gradients:
            numel = unit.layout.slots[self._slot_of[name]].world.numel
        elif self._takes_shards and (is_last if self._borrows else is_first):
            numel = unit.layout.shard_numel
        if numel:
            grads = self._engine.grads + numel * unit.spec.precision.grad.itemsize
            self._engine = replace(self._engine, grads=min(grads, self._most.grads))
        if is_last:
            self._engine = replace(self._engine, scratch=self._most.scratch)
        return self._engine

    def _open(self, unit: PlannedUnit) -> None:
        request = unit.spec.bucket_request(unit.layout.numel)
        if request.key in self._buckets.own or request.key in self._at_once:
            self._own += request.num_bytes
        else:
            self._opened[request.queue] += 1
        in_turns = sum(
            min(number, self._opened[queue]) * num_bytes for queue, (number, num_bytes) in self._buckets.shared.items()
        )
        buckets = min(max(self._engine.buckets, self._own + in_turns), self._most.buckets)
        self._engine = replace(self._engine, buckets=buckets)
