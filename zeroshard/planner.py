"""Plans bytes per rank and kind before anything is allocated, and chooses units that fit into a limit.

The model may be on the meta device. The numbers equal `handle.memory()`, at rest and at the peak (tests check it).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict

from torch import nn

from zeroshard.comm.collectives import transport_named
from zeroshard.comm.transport import TransportName
from zeroshard.errors import InvalidValue
from zeroshard.layout.cuts import SIZES
from zeroshard.model.casting import Precisions
from zeroshard.model.managed import Ignored, Managed
from zeroshard.model.unit_policy import DEFAULT_UNIT_BYTES, UnitPolicy
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.model.units import KeepGathered, choose_units
from zeroshard.placement import Plan, as_plan
from zeroshard.planned.parts import OptimizerNeeds, Topology
from zeroshard.planned.training import Training

MOST_RANKS = 1 << 20


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
    """The bytes that `handle.memory()` will return on `rank` after a step, with one optimizer over all parameters.

    Args:
        world_size: number of ranks on the shard axis.
        units, precision, ignored, keep_gathered: as for `shard`.
        state_bytes_per_element: of the optimizer's state: 8 for Adam's two fp32 moments, 4 for SGD with momentum.
        state_scalars: how many fp32 scalars the optimizer keeps for each tensor (Adam: the step count).
        group_of: parameter name -> its param group, if the optimizer has several (pieces are cut between groups).
        whole_state_bytes: parameter name -> state bytes per element, if the optimizer steps the parameter as a whole at
            an owner (Muon: 4); None if it is elementwise.
        transport: "shared" (gloo, all ranks on one host), "pairwise" (gloo, several hosts) or "native" (NCCL).
        no_sync: whether gradients are accumulated under `handle.no_sync()`.
        peak: True: the bytes of `handle.memory(peak=True)`: for each kind the most that is held at once in a step.

    Raises:
        ValueError: numbers out of range; an unknown plan, device or transport; or as `shard`.
    """
    for name, number, least in (
        ("world_size", world_size, 1),
        ("num_replicas", num_replicas, 1),
        ("state_bytes_per_element", state_bytes_per_element, 0),
        ("state_scalars", state_scalars, 0),
    ):
        expect_number(name, number, least)
    expect_device("device_type", device_type)
    plan = as_plan(plan, has_replicas=num_replicas > 1)
    topology = Topology(world_size, num_replicas, transport_named(transport), device_type)
    parameters = Managed.without(model, ignored).parameters(model)
    specs = topology.units(choose_units(model, units, precision, parameters, keep_gathered))
    optimizer = OptimizerNeeds(state_bytes_per_element, state_scalars, group_of, whole_state_bytes)
    training = Training.of(specs, plan, topology, optimizer, rank)
    return asdict(training.held(peak=peak, no_sync=no_sync))


def expect_number(name: str, value: object, least: int) -> None:
    """Raises:
    ValueError: not an integer from `least` to MOST_RANKS."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_RANKS:
        raise InvalidValue(f"{name} must be a whole number from {least} to {MOST_RANKS}, found {value!r}")


def expect_mesh(ranks: int, replicas: int, rank: int) -> None:
    """Raises:
    ValueError: the numbers do not form a mesh, or `rank` is not a rank of it."""
    for name, value, least in (("ranks", ranks, 1), ("replicas", replicas, 1), ("rank", rank, 0)):
        expect_number(name, value, least)
    if ranks % replicas:
        raise InvalidValue(f"{ranks} ranks do not divide into {replicas} replicas")
    if rank >= ranks:
        raise InvalidValue(f"rank must be below the number of ranks, {ranks}, found {rank}")


def expect_device(name: str, value: object) -> None:
    """Raises:
    ValueError: not a type of device for which is planned."""
    if value not in SIZES:
        raise InvalidValue(f"{name} must be one of {', '.join(SIZES)}, found {value!r}")


# A limit --------------------------------------------------------------------------------------------------------------


def fit_units(choose: Callable[[int], list[UnitSpec]], limit: int, plan: Plan, topology: Topology) -> list[UnitSpec]:
    """Units by size, as large as `limit` bytes of transient memory allow. `choose`: bytes of a unit -> the units.

    Raises:
        ValueError: the smallest units need more; the message has the number of bytes.
    """
    unit_bytes = DEFAULT_UNIT_BYTES
    while unit_bytes > 1:
        specs = choose(unit_bytes)
        if transient_bytes(specs, plan, topology) <= limit:
            return specs
        unit_bytes //= 2
    specs = choose(1)
    expect_within(limit, plan, topology, specs)
    return specs


def expect_within(limit: int, plan: Plan, topology: Topology, specs: Sequence[UnitSpec]) -> None:
    """Raises:
    ValueError: the transient memory of these units exceeds `limit`; the message has the number of bytes."""
    needed = transient_bytes(specs, plan, topology)
    if needed > limit:
        raise InvalidValue(
            f"max_transient_bytes={limit}: these units need {needed} bytes of full-size buffers, buckets and scratch. "
            "Allow that much, or choose smaller units (the largest parameter sets the least)"
        )


def transient_bytes(specs: Iterable[UnitSpec], plan: Plan, topology: Topology) -> int:
    """The most transient bytes held at once. (Planned for rank 0 on every rank, so that all find the same answer.)"""
    return Training.of(specs, plan, topology).held(peak=True).transient
