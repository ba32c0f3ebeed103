"""A unit, and its three buffers: weights, gradients, main. (Which parameters it has: `units.py`.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.messages import labels
from zeroshard.layout.interval import Interval
from zeroshard.model.absent import as_tensors
from zeroshard.model.units import UnitSpec
from zeroshard.placement import REPLICATED, SHARDED, Placement, Plan
from zeroshard.storage.buffer import FlatBuffer
from zeroshard.storage.external_gradients import AnyGradients, ExternalGradients, NoGradients
from zeroshard.storage.gradients import Gradients, Mean
from zeroshard.storage.main_weights import MainWeights
from zeroshard.storage.pool import plain_bytes
from zeroshard.storage.weights import Weights


class Unit:
    """See the module's note.

    Attributes:
        parameters: in buffer order (the order of `layout.slots`).
        weights, grads, main: the three buffers. A frozen unit has no gradients, and its weights are main.
        edits: how often main has been set by something else than a step; the same on every rank.
    """

    def __init__(
        self, index: int, spec: UnitSpec, parameters: Sequence[nn.Parameter], plan: Plan, collectives: Collectives
    ) -> None:
        self.index, self.spec, self.plan = index, spec, plan
        self.edits = 0
        collectives.messages.introduce(*labels(spec.name))
        self.parameters = tuple(parameters)
        mesh = collectives.mesh
        self.layout = spec.layout(mesh.shard.size, mesh.replicate.size)
        self._indices = {slot.name: index for index, slot in enumerate(self.layout.slots)}
        allocate = partial(collectives.allocate, device=self.parameters[0].device)
        rank = mesh.shard.rank
        buffer = FlatBuffer(self.layout, rank, spec.weight_dtype, plan.weights, allocate)
        self.weights = Weights(spec.name, self.parameters, buffer)
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
        # A shard of gradients is read by no peer, and by nobody between a step and the next backward.
        lasting = self.plan.grads is not SHARDED
        # What peers read in a reduction must lie where they can map it.
        allocate = partial(collectives.allocate if lasting else plain_bytes, device=device)
        buffer = FlatBuffer(self.layout, mesh.shard.rank, precision.grad, self.plan.grads, allocate, lasting=lasting)
        mean = Mean(precision.wire, mesh.world.size, carries=mesh.replicate.rank == 0, rests=self.plan.mean)
        return Gradients(self.spec.name, buffer, mean)

    @torch.no_grad()
    def unfreeze(self, collectives: Collectives) -> None:
        """From now on a trainable unit. Main begins with the values that the weights have."""
        self.spec = replace(self.spec, trainable=True)
        self._hold_main_and_gradients(collectives)
        self.main.set(self.main.interval, self.main.weights.clone())

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def trainable(self) -> bool:
        return self.spec.trainable

    @torch.no_grad()
    def fill(self) -> None:
        """Take the parameters' values into main (exactly) and weights (rounded), and hide or show the parameters."""
        for fragment in self.layout.fragments_in(self.updated):
            parameter = self.parameters[self.slot_index(fragment.slot.name)]
            self.write(fragment.world, parameter.detach().reshape(-1)[fragment.param.slice])
        self.weights.fill(self.main.rounded)

    @torch.no_grad()
    def write_slot(self, index: int, values: Callable[[Interval], Tensor]) -> None:
        """One parameter's new values. `values`: interval of the flattened parameter -> [its numel], for what this rank
        updates."""
        self.edits += 1
        if world := self.layout.slots[index].world & self.updated:
            self.write(world, values(world.relative_to(self.layout.slots[index].world.start)))

    def write_slots(self, values: Sequence[Tensor | None]) -> None:
        """New full values, in buffer order. None: as before."""
        self.edits += 1
        for fragment in self.layout.fragments_in(self.updated):
            value = values[self.slot_index(fragment.slot.name)]
            if value is not None:
                self.write(fragment.world, value.reshape(-1)[fragment.param.slice])

    def write(self, world: Interval, value: Tensor) -> None:
        """`value` [world.numel], any float dtype: new values for a part of what this rank updates. Main takes them, and
        the own weights follow. `edits` is left to the caller, who counts once on every rank."""
        self.main.set(world, value.to(self.main.weights.device))

    @property
    def updated(self) -> Interval:
        """What this rank updates: the own shard, or everything where main is replicated."""
        return self.main.interval

    def follow_full(self, before: Tensor) -> None:
        """The full weights have been written to: the own interval, and main, follow. `before`: [updated.numel] the
        weights until then; what has not changed keeps its main, to the last bit."""
        self.edits += 1
        for fragment in self.layout.fragments_in(self.updated):
            written, old = self.weights.full[fragment.world.slice], before[fragment.local.slice]
            changed = written != old
            if not changed.any():
                continue
            value = written.clone()
            written.copy_(old)  # a remainder completes the weights that it was made of
            self.main.weights[fragment.local.slice] = old
            main = self.main.read(fragment.world)
            self.write(fragment.world, torch.where(changed, value.to(main.dtype), main))

    def gather_main(self, collectives: Collectives) -> Tensor:
        """[layout.numel] main of all ranks in a new tensor. Collective."""
        assert self.trainable, f"unit {self.name} is frozen"
        gathered = self.new_buffer(self.main.dtype, self.plan.main)
        assert gathered.full is not None
        own = gathered.full[self.updated.slice]
        own.copy_(self.main.read(self.updated, own))
        gathered.redistribute(REPLICATED, collectives, unit=self.name, phase="unshard")
        gathered.arrive()
        return gathered.full

    def new_buffer(
        self, dtype: torch.dtype, placement: Placement, allocate: Callable[..., Tensor] | None = None
    ) -> FlatBuffer:
        """Zeros of full size beside the unit's own buffers, for values that are `placement` now. `allocate`: number of
        bytes, device -> uint8 zeros."""
        allocate = allocate or partial(torch.zeros, dtype=torch.uint8)
        device, rank = self.weights.own().device, self.weights.buffer.rank
        buffer = FlatBuffer(self.layout, rank, dtype, REPLICATED, partial(allocate, device=device))
        buffer.become(placement)
        return buffer

    def requiring_grad(self) -> list[int]:
        """Slots whose parameter does."""
        with as_tensors():
            return [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]

    def user_grads(self) -> list[Tensor | None]:
        """What lies in `p.grad` of each parameter."""
        with as_tensors():
            return [parameter.grad for parameter in self.parameters]

    def have_gradients(self) -> list[bool]:
        """Of each slot, whether it got a gradient on this rank since the last step."""
        present = self.grads.present
        return [index in present for index in range(len(self.parameters))]

    def slot_index(self, name: str) -> int:
        return self._indices[name]

    def own_shard(self) -> Interval:
        return self.layout.shard(self.weights.buffer.rank)

    def tensors(self) -> dict[str, list[Tensor]]:
        """What this unit holds, by kind."""
        return {
            "weights": self.weights.buffer.storages(),
            "grads": self.grads.storages(),
            "main": self.main.storages(),
        }


def build_units(
    parameters: dict[str, nn.Parameter],
    specs: Sequence[UnitSpec],
    plan: Plan,
    collectives: Collectives,
    *,
    fill: bool = True,
    first: int = 0,
) -> list[Unit]:
    """Allocate, and fill, one unit after the other; the first one gets the number `first`."""
    units = []
    for index, spec in enumerate(specs, start=first):
        unit = Unit(index, spec, [parameters[name] for name in reversed(spec.names)], plan, collectives)
        if fill:
            unit.fill()
        units.append(unit)
    return units
