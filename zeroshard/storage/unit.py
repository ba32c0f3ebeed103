"""A unit and its three buffers: weights, gradients, main. (`units.py` decides which parameters form a unit.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from operator import attrgetter

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.messages import labels
from zeroshard.layout.interval import Interval
from zeroshard.model.absent import as_tensors
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.placement import REPLICATED, SHARDED, Placement, Plan
from zeroshard.ranks.common import Common
from zeroshard.storage.buffer import FlatBuffer
from zeroshard.storage.external_gradients import AnyGradients, ExternalGradients, NoGradients
from zeroshard.storage.gradient_buffer import GradientBuffer
from zeroshard.storage.gradients import Gradients, Mean
from zeroshard.storage.kept_memory import KeptMemory
from zeroshard.storage.main_weights import MainWeights
from zeroshard.storage.pool import plain_bytes
from zeroshard.storage.slot_buffer import SlotBuffer
from zeroshard.storage.weights import Weights

_GRAD = attrgetter("grad")


class Unit:
    """Parameters that are gathered, reduced and released together.

    Attributes:
        parameters: in buffer order (the order of `layout.slots`).
        apart: memory for the weights in blocks outside of a forward.
        weights, grads, main: the three buffers. A frozen unit has no gradients, and its weights are main.
        edits: how often main has been set by anything but a step; the same on every rank.
        leaving: full values, while they are given back to the parameters; () when that is done.
    """

    def __init__(
        self,
        index: int,
        spec: UnitSpec,
        parameters: Sequence[nn.Parameter],
        plan: Plan,
        collectives: Collectives,
        common: Common | None,
    ) -> None:
        """`common`: the memory for the shard of the weights, if those of all ranks lie side by side."""
        self.index, self.spec, self.plan = index, spec, plan
        self.edits = 0
        collectives.messages.introduce(*labels(spec.name))
        self.parameters = tuple(parameters)
        mesh = collectives.mesh
        self.layout = spec.layout(mesh.shard.size, mesh.replicate.size)
        allocate = common.hold if common else partial(collectives.transport.allocate, device=self.parameters[0].device)
        rank = mesh.shard.rank
        buffer = FlatBuffer(self.layout, rank, spec.weight_dtype, plan.weights, allocate, lends=True)
        self.weights = Weights(spec.name, self.parameters, buffer, common)
        self.apart = KeptMemory(buffer)
        self.leaving: Sequence[Tensor] | None = None
        self.grads: AnyGradients = NoGradients()
        self.main = MainWeights(self.own_shard(), buffer.shard, None)
        if spec.trainable:
            self._hold_main_and_gradients(collectives)

    def _hold_main_and_gradients(self, collectives: Collectives) -> None:
        buffer, replicated = self.weights.buffer, self.plan.main is REPLICATED
        held = buffer.full if replicated else buffer.shard
        assert held is not None, "a replicated main needs replicated weights"
        interval = Interval(0, self.layout.numel) if replicated else self.own_shard()
        self.main = MainWeights(interval, held, self.spec.precision, exposed=buffer.rests_in_full)
        if self.plan.external_gradients:
            self.grads = ExternalGradients(self.layout, self.parameters)
        else:
            self.grads = self._new_gradients(collectives)

    def _new_gradients(self, collectives: Collectives) -> Gradients:
        mesh, precision, device = collectives.mesh, self.spec.precision, self.weights.own().device
        mean = Mean(precision.wire, mesh.world.size, carries=mesh.replicate.rank == 0, rests=self.plan.mean)
        if self.plan.takes_over_gradients(mesh.world.size, in_place=precision.steps_in_place):
            return Gradients(self.spec.name, SlotBuffer(self.layout, precision.grad, self.plan.grads, device), mean)
        # A full buffer of gradients must lie in memory that peers can map: they read it in a reduction. Peers never
        # read a shard of gradients.
        of_shard = self.plan.grads is SHARDED
        allocate = partial(plain_bytes if of_shard else collectives.transport.allocate, device=device)
        buffer = GradientBuffer(self.layout, mesh.shard.rank, precision.grad, self.plan.grads, allocate)
        return Gradients(self.spec.name, buffer, mean)

    @torch.no_grad()
    def unfreeze(self, collectives: Collectives) -> None:
        """Make a frozen unit trainable. Main starts with the values of the weights."""
        self.spec = replace(self.spec, trainable=True)
        self._hold_main_and_gradients(collectives)
        self.main.set(self.main.interval, self.main.weights)

    def freeze(self) -> None:
        """Undo `unfreeze`, also half of it."""
        self.spec = replace(self.spec, trainable=False)
        self.main, self.grads = MainWeights(self.own_shard(), self.weights.own(), None), NoGradients()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def trainable(self) -> bool:
        return self.spec.trainable

    @torch.no_grad()
    def take_over(self) -> None:
        """Main has the parameters' values (exactly): copy them into the weights (rounded), and show the parameters if
        these rest in full, else hide them."""
        if self.weights.buffer.rests_in_full:
            for view, parameter in zip(self.weights.buffer.views(), self.parameters, strict=True):
                self.main.round_into(view, parameter.detach())
            self.weights.buffer.become(REPLICATED)
            self.weights.show()
        else:
            self.weights.hide()  # last, as the parameters' values are gone then

    @torch.no_grad()
    def write_slot(self, index: int, values: Callable[[Interval], Tensor]) -> None:
        """Set one parameter. `values`: interval of the flattened parameter -> values [its numel]; called only for the
        interval that this rank updates."""
        self.edits += 1
        if world := self.layout.slots[index].world & self.updated:
            self.write(world, values(world.relative_to(self.layout.slots[index].world.start)))

    def write_slots(self, values: Sequence[Tensor | None]) -> None:
        """Set parameters from full values, in buffer order. None: unchanged."""
        for index, value in enumerate(values):
            if value is not None:
                self.write_slot(index, slices_of(value))

    def write(self, world: Interval, value: Tensor) -> None:
        """Set main, and the own weights with it, to `value` [world.numel], any float dtype, in an interval that this
        rank updates. The caller counts `edits`, once per call on every rank."""
        self.main.set(world, value.to(self.main.weights.device))

    @property
    def updated(self) -> Interval:
        """The interval that this rank updates: the own shard, or everything if main is replicated."""
        return self.main.interval

    def follow_full(self, before: Tensor) -> None:
        """Set the own weights and main after a user has written to the full weights. `before`: [updated.numel] the
        weights before the write. Elements that have not changed keep their main, to the last bit."""
        self.edits += 1
        for fragment in self.layout.fragments_in(self.updated):
            written, old = self.weights.full[fragment.world.slice], before[fragment.local.slice]
            changed = written != old
            if not changed.any():
                continue
            value = written.clone()
            # Restore the old weights before main is read: with a remainder, main is joined from them.
            written.copy_(old)
            self.main.weights[fragment.local.slice] = old
            main = self.main.read(fragment.world)
            self.write(fragment.world, torch.where(changed, value.to(main.dtype), main))
            written.copy_(self.main.weights[fragment.local.slice])  # a scope around this one shows them

    def gather_main(self, collectives: Collectives) -> FlatBuffer:
        """Main in full (of a frozen unit: the weights), in a new buffer. Collective."""
        gathered = self.new_buffer(self.main.dtype, self.plan.main if self.trainable else SHARDED)
        assert gathered.full is not None
        self.main.copy_to(gathered.full[self.updated.slice])
        gathered.redistribute(REPLICATED, collectives, unit=self.name, phase="unshard")
        gathered.arrive()
        return gathered

    def free(self) -> None:
        """Free the storages of all three buffers for good. The parameters become absent: give them values at once."""
        self.weights.free()
        self.grads.free()
        self.main.free()

    def new_buffer(
        self, dtype: torch.dtype, placement: Placement, allocate: Callable[..., Tensor] | None = None
    ) -> FlatBuffer:
        """A new full-size buffer of zeros with the placement `placement`, separate from the unit's own buffers.
        `allocate`: number of bytes, device -> uint8 zeros."""
        allocate = allocate or partial(torch.zeros, dtype=torch.uint8)
        device, rank = self.weights.own().device, self.weights.buffer.rank
        buffer = FlatBuffer(self.layout, rank, dtype, REPLICATED, partial(allocate, device=device))
        buffer.become(placement)
        return buffer

    def requiring_grad(self) -> list[int]:
        """Indices of the slots whose parameter requires grad."""
        with as_tensors():
            return [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]

    def user_grads(self) -> list[Tensor | None]:
        """`p.grad` of each parameter."""
        with as_tensors():
            return list(map(_GRAD, self.parameters))

    def have_gradients(self) -> list[bool]:
        """For each slot, whether it got a gradient on this rank since the last step."""
        present = self.grads.present
        return [index in present for index in range(len(self.parameters))]

    def own_shard(self) -> Interval:
        return self.weights.buffer.own_interval

    def tensors(self) -> dict[str, list[Tensor]]:
        """The storages that this unit holds, by kind."""
        return {
            "weights": self.weights.buffer.storages(),
            "grads": self.grads.storages(),
            "main": self.main.storages(),
            "ring": self.apart.held(),
        }


def slices_of(values: Tensor) -> Callable[[Interval], Tensor]:
    """The argument of `Unit.write_slot` for values that are here in full."""
    flat = values.reshape(-1)
    return lambda param: flat[param.slice]


def build_units(
    parameters: dict[str, nn.Parameter],
    specs: Sequence[UnitSpec],
    plan: Plan,
    collectives: Collectives,
    *,
    fill: bool = True,
    first: int = 0,
    commons: Sequence[Common | None] = (),
) -> Iterator[Unit]:
    """Allocate and fill the units, one after the other; the first one gets the index `first`. `commons`: see `Unit`.
    A unit is yielded when its main has the parameters' values, and they have them, too."""
    for index, (spec, common) in enumerate(zip_longest(specs, commons), start=first):
        unit = Unit(index, spec, [parameters[name] for name in reversed(spec.names)], plan, collectives, common)
        if fill:
            with torch.no_grad():
                unit.write_slots(unit.parameters)
        yield unit
        if fill:
            # Frees the storages that the parameters had, before the next unit is allocated: keep no reference to them.
            unit.take_over()
