"""A model under a plan, from the view of one rank: what it holds at rest, at the peak and in the optimizer's step.

Each figure is in `Bytes`, from the layouts and pool plans that the engine uses. The time that this takes depends on the
number of parameters and units, and not on their sizes or on the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from zeroshard.layout.cuts import most_in_a_batch, sizes_for
from zeroshard.layout.layout import Slot
from zeroshard.layout.owners import balance, cost
from zeroshard.layout.pool_plan import PoolPlan, Request, as_backward_comes, beyond_turns, kept
from zeroshard.model.unit_spec import UnitSpec, in_order_of_reduction
from zeroshard.placement import REPLICATED, SHARDED, Plan
from zeroshard.planned.parts import (
    ADAM,
    Bytes,
    OptimizerNeeds,
    Pieces,
    PlannedBuffer,
    PlannedUnit,
    PlannedWhole,
    Topology,
)
from zeroshard.runtime.reductions import IN_FLIGHT

RANKS_COMPARED = 8
"""Of this many ranks, those with most by the layouts, `fullest_rank` plans each."""


@dataclass(frozen=True)
class Training:
    """What is planned: the units of a model under a plan, from the view of one rank.

    Attributes:
        gradients: names of parameters in the order in which backward comes to them; none: as if units ran in the order
            of registration.
        gathered_apart: names of the units that are gathered into a buffer of their own, though they are to take turns.
    """

    units: tuple[PlannedUnit, ...]
    plan: Plan
    topology: Topology
    optimizer: OptimizerNeeds = ADAM
    rank: int = 0
    gradients: tuple[str, ...] = ()
    gathered_apart: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        specs: Iterable[UnitSpec],
        plan: Plan,
        topology: Topology,
        optimizer: OptimizerNeeds = ADAM,
        rank: int = 0,
    ) -> Training:
        shape = topology.num_shards, topology.num_replicas
        num_ranks = topology.num_shards * topology.num_replicas
        units = tuple(PlannedUnit(spec, spec.layout(*shape), plan, num_ranks) for spec in specs)
        return cls(units, plan, topology, optimizer, rank)

    def held(self, *, peak: bool = False, no_sync: bool = False) -> Bytes:
        """Bytes at rest, after a step; or, with `peak`, the most bytes of each kind held at once."""
        buffers = self.pool(no_sync=no_sync)
        pooled = Counter[str]()
        for buffer in buffers if peak else resting(buffers, self.topology.device_type):
            pooled[buffer.kind] += buffer.num_bytes
        of_units = (unit.held(peak=peak) for unit in self.units)
        return Bytes.total([*of_units, self.stepped(), Bytes(**pooled)])

    def most(self, *, no_sync: bool = False) -> int:
        """The most bytes of a step: in backward, or in the optimizer's step with its temporaries, when all reduced
        gradients are there and the pool buffers are given back."""
        given = self.held(no_sync=no_sync).sum - sum(unit.held(peak=False).sum for unit in self.units)
        in_step = given + sum(unit.held(peak=True).sum for unit in self.units) + self.temporaries()
        return max(self.held(peak=True, no_sync=no_sync).sum, in_step)

    # Pool ----------------------------------------------------------------------------------------------------------

    def pool(self, *, no_sync: bool = False) -> list[PlannedBuffer]:
        """The pool buffers, in the order in which the engine makes them. With one shard, none is needed for weights and
        gradients."""
        reads_peers, has_peers = self.topology.transport.reads_peers, self.topology.num_shards > 1
        borrowing, buckets = self.buckets()
        requests = [request for request in borrowing if request.key not in buckets.own]
        weights = self._weight_requests() if has_peers else []
        buffers = [PlannedBuffer("ring", size) for size in PoolPlan.for_weights(weights).sizes]
        buffers += [PlannedBuffer("buckets", size) for size in buckets.own.values()]
        at_once = {one.key for one in self._at_once(requests, buckets)}
        opened = as_backward_comes(self._as_opened(requests))
        for queue, (number, num_bytes) in buckets.shared.items():
            reduced, first = ([one.key for one in of if one.queue == queue] for of in (requests, opened))
            idle = number - (reduced[-1] not in at_once)
            if no_sync:  # the first units have these buckets, and the others buckets of their own
                idle = max(number - 1, sum(key not in reduced[-2:] for key in first[:number]))
            # `Reductions.start` gives back those that the last two units do not need, and `end` all but one.
            idle = 0 if reads_peers or (no_sync and number == 1) else idle
            buffers += [PlannedBuffer("buckets", num_bytes, passing=i < idle) for i in range(number)]
        way = self.topology.transport, self.topology.num_shards, self.topology.num_replicas
        in_place = not borrowing
        scratch = [unit.spec.reduce_scratch(*way, in_place=in_place) for unit in self._reduced()] or [(0, 0)]
        of_shards, of_replicas = map(max, zip(*scratch, strict=True))
        buffers += [PlannedBuffer("scratch", of_shards)] * (1 if borrowing else min(IN_FLIGHT, len(scratch)))
        buffers += [PlannedBuffer("scratch", of_replicas)]
        buffers += [PlannedBuffer("ring", one.num_bytes) for one in weights if one.key in self.gathered_apart]
        numbers = {queue: number for queue, (number, _) in buckets.shared.items()}
        more = [one for one in requests if one.key in at_once]
        if no_sync:
            more = beyond_turns(opened, numbers)  # in the order in which they are made
        buffers += [PlannedBuffer("buckets", request.num_bytes, lasting=reads_peers) for request in more]
        return buffers

    def buckets(self) -> tuple[list[Request], PoolPlan]:
        """The requests of the units that borrow buckets, in the order of reduction, and the plan for them."""
        borrows = self.plan.grads is SHARDED and self.topology.num_shards > 1
        requests = [unit.spec.bucket_request(unit.layout.numel) for unit in self._reduced() if borrows]
        return requests, PoolPlan.for_gradients(requests, reads_peers=self.topology.transport.reads_peers)

    def at_once(self) -> set[Hashable]:
        """The units that get a bucket of their own when backward comes to them, though they are to take turns."""
        return {one.key for one in self._at_once(*self.buckets())}

    def _as_opened(self, requests: Sequence[Request]) -> list[Request]:
        """The requests, with the places at which backward comes to their units."""
        unit_of = {slot.name: unit.spec.name for unit in self.units for slot in unit.layout.slots}
        gradients = [(number, name) for number, name in enumerate(self.gradients) if name in unit_of]  # none is ignored
        first = {unit_of[name]: number for number, name in reversed(gradients)}
        return [replace(one, places=(0, -first[one.key])) if one.key in first else one for one in requests]

    def _at_once(self, requests: Sequence[Request], buckets: PoolPlan) -> list[Request]:
        """Of the requests that take turns, those that find all buckets of their queue in use: of units that wait for
        gradients, or for the reduction of a unit that does."""
        if not self.gradients:
            return []
        request_of = {request.key: request for request in requests if request.key not in buckets.own}
        unit_of = {slot.name: unit for unit in self._reduced() for slot in unit.layout.slots}
        missing = Counter(unit.spec.name for unit in unit_of.values())
        waiting = [unit.spec.name for unit in self._reduced()]
        more, in_use = dict[Hashable, Request](), list[Request]()
        opened = set[str]()
        for name in (name for name in self.gradients if name in unit_of):
            key = unit_of[name].spec.name
            if key not in opened and key in request_of:
                one = request_of[key]
                is_free = sum(other.queue == one.queue for other in in_use) < buckets.shared[one.queue][0]
                (in_use.append(one) if is_free else more.update({key: one}))
            opened.add(key)
            missing[key] -= 1
            while waiting and not missing[waiting[0]]:
                gone = waiting.pop(0)
                in_use = [other for other in in_use if other.key != gone]
        return list(more.values())

    def _reduced(self) -> list[PlannedUnit]:
        """The units that are reduced, in this order."""
        return [unit for unit in in_order_of_reduction(self.units) if unit.is_reduced]

    def _weight_requests(self) -> list[Request]:
        """Of the units that are gathered."""
        gathered = self.units if self.plan.weights is SHARDED else ()
        topology = self.topology
        in_common = topology.transport.has_common_shards(topology.num_shards, topology.device_type)
        return [unit.spec.weight_request(unit.layout.numel, in_common=in_common) for unit in gathered]

    # Step ----------------------------------------------------------------------------------------------------------

    def stepped(self, wholes: Sequence[PlannedWhole] | None = None) -> Bytes:
        """The bytes of the optimizer: state, scratch, and main of whole parameters. `wholes`: if they are known."""
        wholes = self.wholes() if wholes is None else wholes
        in_pieces = (self._stepped_in_pieces(one) for one, steps_whole in self._steppers().items() if not steps_whole)
        whole = (self._stepped_whole(of_one) for of_one in by_stepper(wholes).values())
        return Bytes.total([Bytes(), *in_pieces, *whole])

    def temporaries(self) -> int:
        """Bytes that a GPU creates and frees in a step beside the optimizer's class: where main is joined or compared,
        a bool and a number of main for each element."""
        if self.topology.device_type == "cpu":
            return 0
        units = [one for one in self.units if one.spec.trainable and (one.joins_main or one.follows_weights)]
        at_once = sizes_for(self.topology.device_type).at_once
        found = (min(at_once, one.main_part(self.rank).numel) * (1 + one.main_dtype.itemsize) for one in units)
        return max(found, default=0)

    def _steppers(self) -> dict[Hashable, bool]:
        """Stepper -> whether it steps whole parameters."""
        optimizer, names = self.optimizer, [slot.name for _, slot in self._trainable_slots()]
        return {optimizer.stepper_of(name): optimizer.key_of(name) is None for name in names}

    def _trainable_slots(self) -> Iterator[tuple[PlannedUnit, Slot]]:
        for unit in self.units:
            if unit.spec.trainable:
                yield from ((unit, slot) for slot in unit.layout.slots)

    def _stepped_in_pieces(self, stepper: Hashable) -> Bytes:
        """State and scratch of an elementwise class; scratch: gradients in main's dtype, joined main, and a part of
        the weights."""

        def key_of(name: str) -> Hashable | None:
            return self.optimizer.key_of(name) if self.optimizer.stepper_of(name) == stepper else None

        trainable = [unit for unit in self.units if unit.spec.trainable]
        sizes = sizes_for(self.topology.device_type)
        pieces = [Pieces.of(unit, self.rank, key_of, sizes) for unit in trainable]
        cast = most_in_a_batch(((pattern, of.cast) for of in pieces for pattern in of.patterns), sizes.batch)
        joined = most_in_a_batch(((pattern, of.joined) for of in pieces for pattern in of.patterns), sizes.batch)
        states = [
            self.optimizer.piece_state(stepper, run.numel, unit.main_dtype).times(run.count * pattern.times)
            for unit, of in zip(trainable, pieces, strict=True)
            for pattern in of.patterns
            for run in pattern.runs
        ]
        compared = max((of.compared for of in pieces), default=0)
        return Bytes.total([*states, Bytes(scratch=cast + joined + compared)])

    def _stepped_whole(self, wholes: Sequence[PlannedWhole]) -> Bytes:
        """Main, state and scratch of the parameters that this rank owns."""
        replicated = self.plan.main is REPLICATED
        states: list[Bytes] = []
        owned: Counter[torch.dtype] = Counter()
        held: Counter[torch.dtype] = Counter()
        for whole in wholes:
            dtype, slot = whole.unit.main_dtype, whole.slot
            held[dtype] += (slot.world & whole.unit.main_part(self.rank)).numel * dtype.itemsize
            if replicated or whole.owner == self.rank:
                owned[dtype] += slot.world.numel * dtype.itemsize
                states.append(whole.state)
        message = max([*owned.values(), *held.values()], default=0)  # one dtype after the other
        scratch = owned.total() + message * (1 if replicated else 2)
        return Bytes.total([*states, Bytes(main=owned.total(), scratch=scratch)])

    def wholes(self) -> list[PlannedWhole]:
        """The parameters of all ranks that are stepped as a whole, by stepper, in the order of the buffers."""
        num_owners = 1 if self.plan.main is REPLICATED else self.topology.num_shards
        found: dict[Hashable, list[tuple[PlannedUnit, Slot, Bytes]]] = {}
        for unit, slot in self._trainable_slots():
            if (state := self.optimizer.whole_state(slot, unit.main_dtype)) is not None:
                found.setdefault(self.optimizer.stepper_of(slot.name), []).append((unit, slot, state))
        owned = []
        for stepper, of_one in found.items():
            owners = balance([cost(slot.shape) for _, slot, _ in of_one], num_owners)
            owned += [PlannedWhole(stepper, *one, owner) for one, owner in zip(of_one, owners, strict=True)]
        return owned


def fullest_rank(training: Training) -> int:
    """The rank on the shard axis that holds most; `training.rank` if the ranks differ only by padding and by scalars.

    If parameters are stepped as a whole, their owners hold different amounts. How many bytes each rank holds of them,
    and of state in pieces, follows from the layouts up to scratch and scalars; the ranks with most are planned.
    """
    wholes, num_ranks = training.wholes(), training.topology.num_shards
    if not wholes or training.plan.main is REPLICATED or num_ranks == 1:
        return training.rank
    held = torch.zeros(num_ranks, dtype=torch.float64, device="cpu")
    for whole in wholes:
        main = whole.slot.world.numel * whole.unit.main_dtype.itemsize
        held[whole.owner] += whole.state.sum + 2 * main  # main, and scratch for it
    names = {whole.slot.name for whole in wholes}
    for unit in training.units:
        for slot in unit.layout.slots if unit.spec.trainable else ():
            if slot.name not in names and slot.world:
                stepper, numel = training.optimizer.stepper_of(slot.name), slot.world.numel
                each = training.optimizer.piece_state(stepper, numel, unit.main_dtype).sum / numel
                shard = unit.layout.shard_numel
                first, last = (n // shard for n in (slot.world.start, slot.world.stop - 1))
                held[first + 1 : last] += each * shard  # an embedding may lie on thousands of ranks
                for rank in {first, last}:
                    held[rank] += each * (slot.world & unit.layout.shard(rank)).numel
    of_ranks = held.tolist()
    most = sorted(range(num_ranks), key=lambda rank: (-of_ranks[rank], rank))[:RANKS_COMPARED]
    return max(most, key=lambda rank: (replace(training, rank=rank).stepped(wholes).sum, -rank))


def by_stepper(wholes: Iterable[PlannedWhole]) -> dict[Hashable, list[PlannedWhole]]:
    """Stepper -> its parameters."""
    found: dict[Hashable, list[PlannedWhole]] = {}
    for whole in wholes:
        found.setdefault(whole.stepper, []).append(whole)
    return found


def resting(buffers: Iterable[PlannedBuffer], device_type: str) -> list[PlannedBuffer]:
    """The buffers that stay held between steps (see `Pool.rest`)."""
    buffers = list(buffers)
    spare = sorted((p for p in buffers if not p.lasting and not p.passing), key=lambda buffer: buffer.kind != "buckets")
    keep = kept(buffer.num_bytes for buffer in spare) if device_type == "cpu" else [False] * len(spare)
    return [
        *(buffer for buffer, stays in zip(spare, keep, strict=True) if stays),
        *(buffer for buffer in buffers if buffer.lasting),
    ]
