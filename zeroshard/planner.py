"""Bytes per rank and kind, before anything is allocated: from the same layouts and allotments that the engine uses.

The model may live on the meta device. The numbers equal `handle.memory()` (a test demands it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import nn

from zeroshard.buffer import Allotment
from zeroshard.casting import Precisions
from zeroshard.gather import PLACES
from zeroshard.layout import BufferLayout
from zeroshard.managed import EVERYTHING, Ignored, Managed
from zeroshard.owners import balance, cost
from zeroshard.pieces import BATCH_NUMEL, batches, cut, scratch_bytes
from zeroshard.placement import REPLICATED, SHARDED, Plan, as_plan
from zeroshard.reduce import IN_FLIGHT
from zeroshard.sums import reduce_scratch_bytes
from zeroshard.unit import DEFAULT_UNIT_BYTES, KeepGathered, UnitPolicy, UnitSpec, choose_units


def plan_memory(
    model: nn.Module,
    plan: Plan | str,
    world_size: int,
    *,
    units: UnitPolicy = None,
    precision: Precisions = None,
    state_bytes_per_element: int = 8,
    state_scalars: int = 1,
    rank: int = 0,
    num_replicas: int = 1,
    pairwise: bool = True,
    device_type: str = "cpu",
    group_of: Callable[[str], Hashable] = lambda name: 0,
    whole_state_bytes: Callable[[str], int | None] = lambda name: None,
    no_sync: bool = False,
    ignored: Ignored = (),
    keep_gathered: KeepGathered = (),
) -> dict[str, int]:
    """What `handle.memory()` will say on `rank`, in steady state, one optimizer over all parameters.

    Args:
        world_size: ranks on the shard axis.
        state_bytes_per_element: of the optimizer: 8 for Adam's two fp32 moments, 4 for SGD with momentum.
        state_scalars: fp32 scalars that it keeps for each tensor (Adam: the step count).
        group_of: parameter name -> its param group, where the optimizer has several (they cut the pieces).
        whole_state_bytes: parameter name -> state per element of an optimizer that steps it whole, at an owner (Muon:
            4); None where the optimizer is elementwise.
        pairwise: whether reductions go by pairwise exchange (gloo) or natively (NCCL).
        ignored, keep_gathered: as for `shard`.
        no_sync: whether gradients are accumulated under `handle.no_sync()`.
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
        if not plan.external_gradients:
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
    kinds |= plan_transients(specs, plan, world_size, num_replicas, pairwise, device_type, rank, group_in_pieces)
    if no_sync and plan.grads is SHARDED and not plan.external_gradients:  # every unit gets a bucket for good
        trainable = [pair for pair in zip(specs, layouts, strict=True) if pair[0].trainable and not pair[0].outer]
        kinds["buckets"] += sum(spec.bucket_borrower(layout.numel).num_bytes for spec, layout in trainable)
    _add_owners(kinds, specs, layouts, plan, rank, whole_state_bytes)
    return kinds


def plan_transients(
    specs: list[UnitSpec],
    plan: Plan,
    num_shards: int,
    num_replicas: int,
    pairwise: bool,
    device_type: str,
    rank: int = 0,
    group_of: Callable[[str], Hashable | None] = lambda name: 0,
) -> dict[str, int]:
    """The preallocated full-size storages and scratch."""
    layouts = [spec.layout(num_shards, num_replicas) for spec in specs]
    pairs = list(zip(specs, layouts, strict=True))
    trainable = [(spec, layout) for spec, layout in pairs if spec.trainable and not plan.external_gradients]
    ring = Allotment.of(
        (spec.weight_borrower(layout.numel) for spec, layout in pairs if plan.weights is SHARDED), PLACES
    )
    buckets = Allotment.of(
        (spec.bucket_borrower(layout.numel) for spec, layout in trainable if plan.grads is SHARDED), IN_FLIGHT
    )
    reducing = [
        reduce_scratch_bytes(layout.numel, spec.precision.grad, spec.precision.wire, num_shards, num_replicas, pairwise)
        for spec, layout in trainable
    ]
    scratch = IN_FLIGHT * max(reducing, default=0)
    pieces = list(_pieces(specs, layouts, plan, rank, group_of))
    for needed in (1, 2):  # the gradient in main's dtype, and main where it is joined
        sums = [
            sum(pieces[i][needed] for i in batch)
            for batch in batches([piece[0] for piece in pieces], BATCH_NUMEL[device_type])
        ]
        scratch += max(sums, default=0)
    scratch += max((piece[3] for piece in pieces), default=0)  # one piece of the weights, to compare main with
    return {"ring": ring.num_bytes, "buckets": buckets.num_bytes, "scratch": scratch}


def fit_units(
    model: nn.Module,
    precision: Precisions,
    limit: int,
    plan: Plan,
    mesh_shape: tuple[int, int],
    pairwise: bool,
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
        needed = sum(plan_transients(specs, plan, *mesh_shape, pairwise, device_type).values())
        if needed <= limit:
            return specs
        if unit_bytes <= 1:
            raise ValueError(_too_small(limit, needed))
        unit_bytes //= 2


def check_limit(
    specs: list[UnitSpec], limit: int, plan: Plan, mesh_shape: tuple[int, int], pairwise: bool, device_type: str
) -> None:
    """Raises:
    ValueError: the transients of these units exceed `limit`, with the number of bytes needed."""
    needed = sum(plan_transients(specs, plan, *mesh_shape, pairwise, device_type).values())
    if needed > limit:
        raise ValueError(_too_small(limit, needed))


def _too_small(limit: int, needed: int) -> str:
    return (
        f"max_transient_bytes={limit}: these units need {needed} bytes of full-size places, buckets and scratch. Allow "
        "that much, or choose smaller units (the largest parameter sets the least)"
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
    specs: list[UnitSpec],
    layouts: list[BufferLayout],
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
        follows = plan.weights is REPLICATED and not joined and not spec.precision.weights_are_main
        for _, world in cut(layout, [group_of(slot.name) for slot in layout.slots]):
            if (plan.main is REPLICATED or world in layout.shard(rank)) and any(layout.fragments_in(world)):
                num_bytes = scratch_bytes(world.numel, main)
                held = follows * scratch_bytes(world.numel, spec.weight_dtype)
                result.append((world.numel, cast * num_bytes, joined * num_bytes, held))
    return result
