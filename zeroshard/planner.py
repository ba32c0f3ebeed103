"""Bytes per rank and kind, before anything is allocated: from the same layouts and pool plans that the engine uses.

The model may live on the meta device. The numbers equal `handle.memory()`, at rest and at the peak (a test demands it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.comm.transport import TransportName
from zeroshard.comm.transports import transport_named
from zeroshard.layout.layout import BufferLayout
from zeroshard.layout.owners import balance, cost
from zeroshard.layout.pool_plan import PoolPlan, beyond_turns, kept
from zeroshard.model.casting import Precisions
from zeroshard.model.managed import EVERYTHING, Ignored, Managed
from zeroshard.model.units import DEFAULT_UNIT_BYTES, KeepGathered, UnitPolicy, UnitSpec, choose_units
from zeroshard.placement import REPLICATED, SHARDED, Plan, as_plan
from zeroshard.runtime.reductions import IN_FLIGHT
from zeroshard.step.pieces import BATCH_NUMEL, batches, cut, scratch_bytes


def plan_memory(
    model: nn.Module,
    plan: Plan | str | int,
    world_size: int,
    *,
    units: UnitPolicy = None,
    precision: Precisions = None,
    state_bytes_per_element: int = 8,
    state_scalars: int = 1,
    rank: int = 0,
    num_replicas: int = 1,
    transport: TransportName = "shared",
    device_type: str = "cpu",
    group_of: Callable[[str], Hashable] = lambda name: 0,
    whole_state_bytes: Callable[[str], int | None] = lambda name: None,
    no_sync: bool = False,
    ignored: Ignored = (),
    keep_gathered: KeepGathered = (),
    peak: bool = False,
) -> dict[str, int]:
    """What `handle.memory()` will say on `rank` after a step, one optimizer over all parameters.

    Args:
        world_size: ranks on the shard axis.
        state_bytes_per_element: of the optimizer: 8 for Adam's two fp32 moments, 4 for SGD with momentum.
        state_scalars: fp32 scalars that it keeps for each tensor (Adam: the step count).
        group_of: parameter name -> its param group, where the optimizer has several (they cut the pieces).
        whole_state_bytes: parameter name -> state per element of an optimizer that steps it whole, at an owner (Muon:
            4); None where the optimizer is elementwise.
        transport: "shared" (gloo, all ranks on one host), "pairwise" (gloo, several hosts) or "native" (NCCL).
        ignored, keep_gathered: as for `shard`.
        no_sync: whether gradients are accumulated under `handle.no_sync()`.
        peak: what `handle.memory(peak=True)` will say: of each kind the most that is held at once in a step.
    """
    plan = as_plan(plan)
    specs = choose_units(model, units, precision, Managed.without(model, ignored), keep_gathered)
    layouts = [spec.layout(world_size, num_replicas) for spec in specs]
    kinds = dict.fromkeys(("weights", "grads", "main", "state", "scalars"), 0)
    for spec, layout in zip(specs, layouts, strict=True):
        kinds["weights"] += _held(layout, plan.weights is SHARDED) * spec.weight_dtype.itemsize
        if not spec.trainable:
            continue
        main_numel = _held(layout, plan.main is SHARDED)
        if not plan.external_gradients and (peak or plan.grads is not SHARDED):
            kinds["grads"] += _held(layout, plan.grads is SHARDED) * spec.precision.grad.itemsize
        if spec.precision.main == "remainder":
            kinds["main"] += main_numel * 2
        elif not spec.precision.weights_are_main:
            kinds["main"] += main_numel * spec.precision.main_dtype.itemsize

    def group_in_pieces(name: str) -> Hashable | None:
        return group_of(name) if whole_state_bytes(name) is None else None

    pieces = [numel for numel, *_ in _pieces(specs, layouts, plan, rank, group_in_pieces)]
    kinds["state"] = sum(pieces) * state_bytes_per_element
    kinds["scalars"] = len(pieces) * state_scalars * 4
    pool = _buffers(specs, plan, world_size, num_replicas, transport, no_sync=no_sync)
    if not peak:
        pool = _resting(pool, device_type)
    for kind in ("ring", "buckets", "scratch"):
        kinds[kind] = sum(buffer.num_bytes for buffer in pool if buffer.kind == kind)
    kinds["scratch"] += _step_scratch(specs, layouts, plan, rank, device_type, group_in_pieces)
    _add_owners(kinds, specs, layouts, plan, rank, whole_state_bytes)
    return kinds


@dataclass(frozen=True)
class _Buffer:
    kind: str
    num_bytes: int
    lasting: bool = False
    passing: bool = False  # given back before the end of backward


def _buffers(
    specs: Sequence[UnitSpec],
    plan: Plan,
    num_shards: int,
    num_replicas: int,
    transport: TransportName,
    *,
    no_sync: bool = False,
) -> list[_Buffer]:
    """The buffers of the pool, in the order in which the engine makes them. One shard that is the whole needs none."""
    pairs = [(spec, spec.layout(num_shards, num_replicas)) for spec in specs]
    trainable = [(spec, layout) for spec, layout in pairs if spec.trainable and not plan.external_gradients][::-1]
    weights = pairs if plan.weights is SHARDED and num_shards > 1 else []
    gradients = trainable if plan.grads is SHARDED and num_shards > 1 else []
    ring = PoolPlan.for_weights(spec.weight_request(layout.numel) for spec, layout in weights)
    requests = [spec.bucket_request(layout.numel) for spec, layout in gradients]
    way = transport_named(transport)
    buckets = PoolPlan.for_gradients(requests, reads_peers=way.reads_peers)
    reducing = [
        way.reduce_scratch_bytes(
            layout.numel,
            spec.precision.grad,
            spec.precision.wire,
            num_shards,
            num_replicas,
            in_place=not gradients,
        )
        for spec, layout in trainable
    ]
    buffers = [_Buffer("ring", size) for size in ring.sizes]
    buffers += [_Buffer("buckets", size) for size in buckets.own.values()]
    for count, num_bytes in buckets.shared.values():
        buffers += [_Buffer("buckets", num_bytes, passing=i > 0 and not way.reads_peers) for i in range(count)]
    buffers += [_Buffer("scratch", max(reducing, default=0))] * (1 if gradients else IN_FLIGHT)
    if no_sync:
        more = beyond_turns(requests, {kind: count for kind, (count, _) in buckets.shared.items()})
        buffers += [_Buffer("buckets", request.num_bytes, lasting=way.reads_peers) for request in more]
    return buffers


def _resting(buffers: list[_Buffer], device_type: str) -> list[_Buffer]:
    """Those that stay held between steps (see `Pool.rest`)."""
    spare = sorted((p for p in buffers if not p.lasting and not p.passing), key=lambda buffer: buffer.kind != "buckets")
    keep = kept(buffer.num_bytes for buffer in spare) if device_type == "cpu" else [False] * len(spare)
    return [
        *(buffer for buffer, stays in zip(spare, keep, strict=True) if stays),
        *(buffer for buffer in buffers if buffer.lasting),
    ]


def _step_scratch(
    specs: Sequence[UnitSpec],
    layouts: Sequence[BufferLayout],
    plan: Plan,
    rank: int,
    device_type: str,
    group_of: Callable[[str], Hashable | None] = lambda name: 0,
) -> int:
    """What an elementwise optimizer holds: the gradient in main's dtype, and main where it is joined."""
    pieces = _pieces(specs, layouts, plan, rank, group_of)
    scratch = 0
    for needed in (1, 2):
        sums = [
            sum(pieces[i][needed] for i in batch)
            for batch in batches([piece[0] for piece in pieces], BATCH_NUMEL[device_type])
        ]
        scratch += max(sums, default=0)
    return scratch + max((piece[3] for piece in pieces), default=0)  # one piece of the weights, to compare main with


def _needed(
    specs: Sequence[UnitSpec], plan: Plan, mesh_shape: tuple[int, int], transport: TransportName, device_type: str
) -> int:
    """The most transients at once. (Every rank is planned as rank 0, so that all find the same answer.)"""
    layouts = [spec.layout(*mesh_shape) for spec in specs]
    buffers = _buffers(specs, plan, *mesh_shape, transport)
    return sum(buffer.num_bytes for buffer in buffers) + _step_scratch(specs, layouts, plan, 0, device_type)


def fit_units(
    model: nn.Module,
    precision: Precisions,
    limit: int,
    plan: Plan,
    mesh_shape: tuple[int, int],
    transport: TransportName,
    managed: Managed = EVERYTHING,
    keep_gathered: KeepGathered = (),
) -> list[UnitSpec]:
    """Units by size, as large as `limit` bytes of transients allow.

    Raises:
        ValueError: with the number of bytes that the smallest units need.
    """
    unit_bytes = DEFAULT_UNIT_BYTES
    device_type = next((parameter.device.type for parameter in model.parameters()), "cpu")
    while True:
        specs = choose_units(model, unit_bytes, precision, managed, keep_gathered)
        needed = _needed(specs, plan, mesh_shape, transport, device_type)
        if needed <= limit:
            return specs
        if unit_bytes <= 1:
            raise ValueError(_too_small(limit, needed))
        unit_bytes //= 2


def check_limit(
    specs: Sequence[UnitSpec],
    limit: int,
    plan: Plan,
    mesh_shape: tuple[int, int],
    transport: TransportName,
    device_type: str,
) -> None:
    """Raises:
    ValueError: the transients of these units exceed `limit`, with the number of bytes needed."""
    needed = _needed(specs, plan, mesh_shape, transport, device_type)
    if needed > limit:
        raise ValueError(_too_small(limit, needed))


def _too_small(limit: int, needed: int) -> str:
    return (
        f"max_transient_bytes={limit}: these units need {needed} bytes of full-size buffers, buckets and scratch. "
        "Allow that much, or choose smaller units (the largest parameter sets the least)"
    )


def _held(layout: BufferLayout, sharded: bool) -> int:
    return layout.shard_numel if sharded else layout.numel


def _add_owners(
    kinds: dict[str, int],
    specs: list[UnitSpec],
    layouts: list[BufferLayout],
    plan: Plan,
    rank: int,
    whole_state_bytes: Callable[[str], int | None],
) -> None:
    """Main, state and scratch of the parameters that this rank steps whole."""
    slots = [
        (spec, layout, slot)
        for spec, layout in zip(specs, layouts, strict=True)
        for slot in layout.slots
        if spec.trainable and whole_state_bytes(slot.name) is not None
    ]
    if not slots:
        return
    replicated = plan.main is REPLICATED
    owners = balance([cost(slot.shape) for _, _, slot in slots], 1 if replicated else layouts[0].num_shards)
    owned: Counter[torch.dtype] = Counter()
    held: Counter[torch.dtype] = Counter()
    for (spec, layout, slot), owner in zip(slots, owners, strict=True):
        dtype = spec.precision.main_dtype
        part = slot.world if replicated else slot.world & layout.shard(rank)
        held[dtype] += part.numel * dtype.itemsize
        if replicated or owner == rank:
            owned[dtype] += slot.world.numel * dtype.itemsize
            kinds["state"] += slot.world.numel * (whole_state_bytes(slot.name) or 0)
    kinds["main"] += owned.total()
    message = max([*owned.values(), *held.values()], default=0)  # one dtype after the other
    kinds["scratch"] += owned.total() + message * (1 if replicated else 2)


def _pieces(
    specs: Sequence[UnitSpec],
    layouts: Sequence[BufferLayout],
    plan: Plan,
    rank: int,
    group_of: Callable[[str], Hashable | None],
) -> list[tuple[int, int, int, int]]:
    """(elements, bytes of scratch for the gradient, for main, for the weights) of each piece stepped."""
    result = []
    for spec, layout in zip(specs, layouts, strict=True):
        if not spec.trainable:
            continue
        main = spec.precision.main_dtype
        cast = plan.external_gradients or spec.precision.grad != main
        joined = spec.precision.main == "remainder"
        in_full = plan.weights is REPLICATED or layout.num_shards == 1
        follows = in_full and not joined and not spec.precision.weights_are_main
        for _, world in cut(layout, [group_of(slot.name) for slot in layout.slots]):
            if (plan.main is REPLICATED or world in layout.shard(rank)) and any(layout.fragments_in(world)):
                num_bytes = scratch_bytes(world.numel, main)
                held = follows * scratch_bytes(world.numel, spec.weight_dtype)
                result.append((world.numel, cast * num_bytes, joined * num_bytes, held))
    return result
