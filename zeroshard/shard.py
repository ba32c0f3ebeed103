"""`shard(model, plan)`: choose units, agree with the other ranks, fill, attach; undo all of it if anything fails.

The model keeps its class, its names and its `nn.Parameter` objects; only where their data lie has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.mesh import Mesh
from zeroshard.comm.same import expect_same
from zeroshard.comm.together import together
from zeroshard.handle import Handle, claim_parameters, give_up_parameters, handle_of
from zeroshard.model.absent import give
from zeroshard.model.batch_norms import expect_kept
from zeroshard.model.casting import Precisions, Rules, casts_of
from zeroshard.model.managed import Ignored, Managed
from zeroshard.model.units import KeepGathered, UnitPolicy, UnitSpec, choose_units
from zeroshard.placement import Plan, as_plan
from zeroshard.planner import check_limit, fit_units
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.materialize import META, Source, is_on_meta, move
from zeroshard.runtime.materialize import materialize as give_values
from zeroshard.storage.unit import Unit

_LOAD_THE_SAME = (
    "Load the same weights, or use the same seed, on every rank; or let rank 0's values win with values='broadcast'"
)


def shard(
    model: nn.Module,
    plan: Plan | str | int,
    *,
    units: UnitPolicy = None,
    precision: Precisions = None,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    max_transient_bytes: int | None = None,
    materialize: Source | None = None,
    values: Literal["broadcast", "check"] = "broadcast",
    ignored: Ignored = (),
    keep_gathered: KeepGathered = (),
) -> Handle:
    """Shard a model in place. Collective: every rank passes the same model and arguments.

    Args:
        model: on the device where it is to train, or on the meta device. It is called, and named, as before.
        plan: DDP, ZERO1, ZERO2 or ZERO3, or its name: "zero3", 3, "full_shard".
        units: what is gathered, reduced and freed together: module classes, and groups of modules or names that are one
            unit (`[Block, ("norm", "head")]`); a callable `module -> bool`; or a number of bytes. None groups
            neighbouring modules up to 32 MiB. The rest of the model is the root unit.
        precision: a `MixedPrecision`, "fp32", "bf16" or torch.bfloat16, "bf16-mixed", ..., or None: as the model is.
            Or one for each pattern, in the order in which they count:
            `{nn.LayerNorm: "fp32", "blocks.*.router": "fp32", "*": "bf16"}`.
        mesh: a process group, or a `DeviceMesh` with one axis, or with "replicate" and "shard" (or "dp_replicate" and
            "dp_shard"). None: all ranks. Of a group's backends that of the model's device is used.
        max_transient_bytes: the most that full-size buffers, buckets and scratch may take. With `units=None` units are
            made small enough.
        materialize: where the values of a model on the meta device come from. A function of a module, called as
            `model.apply` would, that fills the module's own parameters and buffers; or a `model.safetensors` file, or a
            folder of them with an index. No rank ever holds the whole model.
        values: "broadcast": all ranks take rank 0's; "check": they must be equal already, and nothing is sent.
        ignored: parameters, modules, or names of either, that are not touched, for example experts of another group.
            Each rank keeps its own values; their gradients stay in `p.grad` and are not reduced; step them with a plain
            optimizer.
        keep_gathered: under ZERO3, units that keep their weights from forward to backward: classes, or names with `*`
            and `?`; True: all. They are gathered once per step, and each needs a full-size buffer of its own.

    Raises:
        ValueError: bad arguments, a model that differs between ranks, a parameter that is sharded already, a limit
            that cannot be kept. On every rank alike; the model is as it was before.
        RuntimeError: `zeroshard.init()` has not been called.
    """
    collectives = Collectives(Mesh.of(mesh, device_of(model.parameters())), CommLog())
    collectives.expect_grid()

    def choose() -> tuple[Plan, Managed, list[UnitSpec]]:
        chosen = as_plan(plan)
        if chosen.external_gradients:
            raise ValueError(
                "OPTIMIZER_ONLY is for parameters whose gradients something else reduces: pass model.parameters() to "
                "ShardedOptimizer, without shard()"
            )
        managed = Managed.without(model, ignored)
        expect_kept(model, precision, managed)
        specs = _choose(model, chosen, units, precision, collectives, max_transient_bytes, managed, keep_gathered)
        _refuse_unready(model, managed, collectives, materialize)
        if values not in ("broadcast", "check"):
            raise ValueError(f"values must be 'broadcast' or 'check', found {values!r}")
        return chosen, managed, specs

    chosen, managed, specs = together(collectives, "shard", choose, words=_in_words)
    parameters, buffers = managed.parameters(model), managed.buffers(model)
    expect_same_model(collectives, parameters, specs, chosen)
    on_meta = is_on_meta([*parameters.values(), *buffers.values()])
    if on_meta:
        move(model, META, collectives.device)
    elif values == "check":
        expect_same(collectives, {**parameters, **buffers}, "shard, values='check'", _LOAD_THE_SAME)
    before = [(parameter, parameter.data) for parameter in parameters.values()]
    made: list[Handle] = []

    def build() -> Handle:
        if not on_meta and values == "broadcast":
            collectives.broadcast([*(data for _, data in before), *buffers.values()])
        built = build_units(parameters, specs, chosen, collectives, fill=not on_meta)
        engine = Engine(chosen, built, collectives, model, managed, max_transient_bytes)
        engine.pool.expect_units = partial(_expect_room, chosen, collectives, max_transient_bytes)
        handle = Handle(engine)
        made.append(handle)
        if on_meta:
            assert materialize is not None
            give_values(model, built, materialize, collectives, managed)
            for unit in built:
                unit.weights.hide()
                engine.gatherer.updated(unit)
            engine.gatherer.settle()
        claim_parameters(handle, parameters.values())
        called = [path for unit in built for path in unit.spec.calls]
        handle.attach(casts_of(model, Rules.of(precision), called))
        return handle

    try:  # files are read by some ranks more slowly than by others
        handle = together(collectives, "shard", build, words=_in_words, patient=True)
    except ValueError:
        for handle in made:
            handle._release()
        for parameter, data in before:
            give(parameter, data)
        give_up_parameters(parameters.values())
        if on_meta:
            move(model, collectives.device, META)
        raise
    collectives.map_peers()
    return handle


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, (ValueError, TypeError, ImportError)) else repr(error)


def _choose(
    model: nn.Module,
    plan: Plan,
    units: UnitPolicy,
    precision: Precisions,
    collectives: Collectives,
    max_transient_bytes: int | None,
    managed: Managed,
    keep_gathered: KeepGathered,
) -> list[UnitSpec]:
    if max_transient_bytes is None:
        return choose_units(model, units, precision, managed, keep_gathered)
    mesh_shape = collectives.mesh.shard.size, collectives.mesh.replicate.size
    if units is None:
        return fit_units(
            model, precision, max_transient_bytes, plan, mesh_shape, collectives.transport.name, managed, keep_gathered
        )
    specs = choose_units(model, units, precision, managed, keep_gathered)
    _expect_room(plan, collectives, max_transient_bytes, specs)
    return specs


def _expect_room(plan: Plan, collectives: Collectives, limit: int | None, specs: Sequence[UnitSpec]) -> None:
    if limit is not None:
        mesh_shape = collectives.mesh.shard.size, collectives.mesh.replicate.size
        check_limit(specs, limit, plan, mesh_shape, collectives.transport.name, collectives.device.type)


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
        of_unit = [parameters[name] for name in reversed(spec.names)]
        unit = Unit(index, spec, of_unit, plan, collectives)
        if fill:
            unit.fill()
        units.append(unit)
    return units


def _refuse_unready(model: nn.Module, managed: Managed, collectives: Collectives, materialize: Source | None) -> None:
    device = collectives.device
    parameters = managed.parameters(model)
    on_meta = [name for name, tensor in {**parameters, **managed.buffers(model)}.items() if tensor.is_meta]
    if on_meta and materialize is None:
        raise ValueError(
            f"{on_meta[0]} is on the meta device: pass materialize= a function that initialises a module, or a "
            "safetensors file"
        )
    if materialize is not None and len(on_meta) < len(parameters):
        raise ValueError("materialize= is for models on the meta device; this one has values already")
    for name, parameter in managed.left_alone(model).items():
        if parameter.is_meta:
            raise ValueError(f"{name} is ignored, and on the meta device: give it values before shard()")
    for name, parameter in parameters.items():
        if taken := _taken(parameter):
            raise ValueError(f"parameter {name} {taken}")
        if parameter.device.type not in (device.type, "meta"):
            raise ValueError(
                f"parameter {name} is on {parameter.device}, and this process group moves {device.type} tensors: "
                f"call model.to({device.type!r}) first, or zeroshard.init with another backend"
            )
        if parameter.device not in (device, META):
            raise ValueError(
                f"parameter {name} is on {parameter.device}, others on {device}: call model.to({str(device)!r}) first. "
                "A rank has the whole model on one device"
            )


def _taken(parameter: nn.Parameter) -> str:
    """By which handle; nothing where by none. (In words: an error that is kept would keep the handle.)"""
    other = handle_of(parameter)
    if other is None:
        return ""
    if other.plan.external_gradients:
        return (
            "belongs to a ShardedOptimizer that was built before shard(): call shard() first, then "
            "ShardedOptimizer(handle, ...)"
        )
    return f"is sharded already, as {other!r}: close() that handle first"


def device_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """Of the first that is on an accelerator, else of the first on any (what is ignored may lie on a CPU)."""
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_meta))
    return next(iter(sorted(devices, key=lambda device: device.type == "cpu")), None)


def expect_same_model(
    collectives: Collectives, parameters: dict[str, nn.Parameter], specs: Sequence[UnitSpec], plan: Plan
) -> None:
    """Ranks compare a digest of what they are about to shard; where it differs, they look for the first difference."""
    lines = [f"plan {plan.name}"]
    lines += [f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in parameters.items()]
    lines += [f"unit {spec.name} of {len(spec.names)} parameters, {spec.precision}" for spec in specs]
    digests = collectives.exchange_objects(hashlib.sha256(json.dumps(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    by_rank = collectives.exchange_objects(lines)
    for rank, theirs in enumerate(by_rank):
        if theirs != by_rank[0]:
            pairs = zip([*by_rank[0], "(nothing more)"], [*theirs, "(nothing more)"], strict=False)
            mine, other = next((a, b) for a, b in pairs if a != b)
            raise ValueError(f"the ranks have different models: rank 0 has {mine!r} where rank {rank} has {other!r}")
