"""`shard(model, plan)`: chooses units, agrees with the other ranks, fills buffers, attaches hooks; undoes it on errors.

The model keeps its class, its names and its `nn.Parameter` objects; only their data are moved.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.same import expect_same, expect_same_model, expect_writable, of_buffers
from zeroshard.comm.side_by_side import lay_side_by_side
from zeroshard.comm.together import together
from zeroshard.errors import Error, InvalidValue
from zeroshard.full_model.give_back import undo
from zeroshard.full_model.materialize import META, Source, move
from zeroshard.full_model.materialize import materialize as give_values
from zeroshard.handle import Handle
from zeroshard.io.logger import tell
from zeroshard.model.absent import give
from zeroshard.model.casting import Precisions, Rules, casts_of
from zeroshard.model.inference import outside_inference
from zeroshard.model.managed import Ignored, Managed
from zeroshard.model.paths import Modules, modules_of, parameters_in
from zeroshard.model.right_call import expect_module, expect_unwrapped
from zeroshard.model.unit_policy import UnitPolicy, boundaries
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.model.units import KeepGathered, choose_units
from zeroshard.placement import SHARDED, Plan, as_plan
from zeroshard.planned.parts import Topology
from zeroshard.planner import expect_within, fit_units
from zeroshard.ranks.common import Common
from zeroshard.ranks.mesh import Mesh
from zeroshard.ranks.shared_memory import many_files
from zeroshard.ready import (
    device_of,
    expect_apart,
    expect_dense,
    expect_no_views,
    expect_ready,
    expect_registered,
    give_own_versions,
    in_lines,
)
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.life import Life
from zeroshard.runtime.summary import in_one_line
from zeroshard.storage.unit import Unit, build_units

_LOAD_THE_SAME = (
    "Load the same weights, or use the same seed, on every rank; or let rank 0's values win with values='broadcast'"
)


@outside_inference
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
        model: on the device on which it is to train, or on the meta device. You keep calling it as before.
        plan: DDP, ZERO1, ZERO2 or ZERO3, or its name: "zero3", 3, "full_shard"; "hybrid" for ZERO3 over two axes.
        units: which parameters are gathered, reduced and released together: module classes or their names ("Block"),
            and groups of modules or names that form one unit (`[Block, ("norm", "head")]`); a callable
            `module -> bool`; or a number of bytes. None: neighbouring modules are grouped up to 32 MiB. The remaining
            parameters form the root unit.
        precision: a `MixedPrecision`, "fp32", "bf16" or torch.bfloat16, "bf16-mixed", ...; None: the model's own
            dtypes. Or a dict with one for each pattern, in order of priority:
            `{nn.LayerNorm: "fp32", "blocks.*.router": "fp32", "*": "bf16"}`.
        mesh: a process group, or a `DeviceMesh` with one axis, or with "replicate" and "shard" (or "dp_replicate" and
            "dp_shard"). None: all ranks. If a group has several backends, the one for the model's device is used.
        max_transient_bytes: the most bytes that full-size weight buffers, buckets and scratch may take. With
            `units=None`, units are made small enough.
        materialize: gives a model on the meta device its values: a function that is called with each module, like that
            of `model.apply`, and fills the module's own parameters and buffers; or a `model.safetensors` file, or a
            folder of several with an index. No rank holds the whole model at any time.
        values: "broadcast": all ranks take rank 0's values; "check": they must be equal already, and only digests are
            compared.
        ignored: parameters, modules, or names of either, that are not sharded, for example experts of another group.
            Each rank keeps its own values; their gradients stay in `p.grad` and are not reduced; step them with a plain
            optimizer.
        keep_gathered: under ZERO3, units that keep their weights from forward to backward: classes, or names with `*`
            and `?`; True: all. They are gathered once per step, and each needs a full-size buffer of its own.

    Returns:
        The handle of the sharded model.

    Raises:
        TypeError: `model` is not a module.
        ValueError: on every rank, and the model has not been changed: bad arguments; a model that differs between
            ranks; a parameter that is sharded already; a model inside torch DDP; a limit that is too small.
        RuntimeError: `zeroshard.init()` has not been called.
    """
    expect_module(model)
    modules = modules_of(model)
    collectives = Collectives(Mesh.of(mesh, device_of(parameters_in(modules))), CommLog())
    collectives.mesh.expect_grid(collectives.exchange_objects)
    options = _Options(units, precision, max_transient_bytes, materialize, values, ignored, keep_gathered)
    chosen = together(collectives, "shard", partial(_choose, modules, plan, options, collectives), words=_in_words)
    _expect_same(chosen, options, collectives)
    give_own_versions([*chosen.parameters.values()])
    with many_files():
        handle = _build_or_undo(chosen, options, collectives, boundaries(options.units, modules))
        collectives.map_peers()
    name, way = type(model).__name__, collectives.transport.name
    tell(collectives.mesh.world.rank, "%s is sharded: %r, %s transport", name, handle, way)
    return handle


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, (Error, ValueError, TypeError, ImportError)) else repr(error)


@dataclass(frozen=True)
class _Options:
    """The arguments of `shard` except model, plan and mesh."""

    units: UnitPolicy
    precision: Precisions
    max_transient_bytes: int | None
    materialize: Source | None
    values: str
    ignored: Ignored
    keep_gathered: KeepGathered


@dataclass(frozen=True)
class _Chosen:
    """The choices of this rank, checked before anything is changed.

    Attributes:
        parameters, buffers: the managed ones. A model that leaves the meta device gets other buffers.
    """

    model: nn.Module
    plan: Plan
    managed: Managed
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    specs: list[UnitSpec]
    on_meta: bool


def _choose(modules: Modules, plan: Plan | str | int, options: _Options, collectives: Collectives) -> _Chosen:
    """Check the arguments, and choose the units.

    Raises:
        ValueError, TypeError: an argument is wrong, or does not fit the model.
    """
    plan = as_plan(plan, has_replicas=collectives.mesh.has_replicas)
    if plan.external_gradients:
        raise InvalidValue(
            "OPTIMIZER_ONLY is for parameters whose gradients something else reduces: pass model.parameters() to "
            "ShardedOptimizer, without shard()"
        )
    model = modules[""]
    expect_registered(modules)
    managed = Managed.without(model, options.ignored)
    parameters, buffers = managed.parameters(model), managed.buffers(model)
    expect_unwrapped(modules, parameters.values())
    specs = _choose_units(model, plan, parameters, options, Topology.of(collectives))
    expect_ready(parameters, buffers, managed.left_alone(model), collectives.device, options.materialize)
    if collectives.mesh.world.size > 1:
        expect_dense(buffers)
        if options.values == "broadcast":
            expect_writable(buffers)
    expect_apart(parameters, buffers)
    expect_no_views(modules, parameters)
    if options.values not in ("broadcast", "check"):
        raise InvalidValue(f"values must be 'broadcast' or 'check', found {options.values!r}")
    on_meta = any(tensor.is_meta for tensor in (*parameters.values(), *buffers.values()))
    return _Chosen(model, plan, managed, parameters, buffers, specs, on_meta)


def _choose_units(
    model: nn.Module, plan: Plan, parameters: dict[str, nn.Parameter], options: _Options, topology: Topology
) -> list[UnitSpec]:
    """The units, within `max_transient_bytes` if it is given."""
    limit = options.max_transient_bytes

    def choose(units: UnitPolicy) -> list[UnitSpec]:
        return topology.units(choose_units(model, units, options.precision, parameters, options.keep_gathered))

    if options.units is None and limit is not None:
        return fit_units(choose, limit, plan, topology)
    specs = choose(options.units)
    if limit is not None:
        expect_within(limit, plan, topology, specs)
    return specs


def _expect_same(chosen: _Chosen, options: _Options, collectives: Collectives) -> None:
    """Raises:
    ValueError: the ranks have different models or arguments; or, with values="check", different values."""
    values = f"values={options.values!r}", "no values, on the meta device" if chosen.on_meta else "its values"
    lines = in_lines(chosen.parameters, chosen.specs, chosen.plan)
    expect_same_model(collectives, [*lines, *values, *of_buffers(chosen.buffers)])
    if options.values == "check" and not chosen.on_meta:
        tensors = {**chosen.parameters, **chosen.buffers}
        expect_same(collectives, tensors, "shard, values='check'", _LOAD_THE_SAME)


@dataclass
class _Built:
    """What exists so far on this rank. `units`: allocated, and filled unless the model is on the meta device."""

    units: list[Unit] = field(default_factory=list)
    engine: Engine | None = None


def _build_or_undo(chosen: _Chosen, options: _Options, collectives: Collectives, asked: Hashable) -> Handle:
    """Build the engine and its handle (`asked`: its boundaries). If any rank fails, all ranks raise, and all models are
    restored."""
    commons = _lay_side_by_side(chosen, collectives)
    if chosen.on_meta:
        move(chosen.model, META, collectives.device)
    # No other reference to the parameters' data: they must die one by one while the units are filled.
    placeholders = [(p, p.data) for p in chosen.parameters.values()] if chosen.on_meta else []
    built = _Built()
    build = partial(_build, chosen, options, collectives, built, commons)
    try:  # `patient`, as some ranks may read files much more slowly than others
        together(collectives, "shard", build, words=_in_words, patient=True)
        assert built.engine is not None
        return Handle(built.engine, asked)
    except BaseException as error:
        # An interrupt, in a notebook: its model is sharded again. (Nobody would tell peers of it.)
        is_interrupt = not isinstance(error, Exception) and collectives.mesh.world.size == 1
        if not isinstance(error, ValueError) and not is_interrupt:
            raise
        if built.engine is not None:
            built.engine.release()
            built.engine.life = Life.CLOSED
        for parameter, data in placeholders:
            give(parameter, data)
        if chosen.on_meta:
            move(chosen.model, collectives.device, META)
        elif rounded := undo(built.units, chosen.specs, chosen.parameters, collectives):
            error.add_note(
                f"The parameters of these units have their values again, but rounded to the dtype of main: {rounded}"
            )
        raise


def _lay_side_by_side(chosen: _Chosen, collectives: Collectives) -> list[Common | None]:
    """Memory for the shards of each unit's weights, where those of all ranks lie side by side. Called before any
    unit is built: if a rank fails here, there is nothing to undo."""
    if chosen.plan.weights is not SHARDED:
        return []
    shape = collectives.mesh.shard.size, collectives.mesh.replicate.size
    sizes = [spec.layout(*shape).numel * spec.weight_dtype.itemsize for spec in chosen.specs]
    return lay_side_by_side(collectives, sizes, _in_words)


def _build(
    chosen: _Chosen,
    options: _Options,
    collectives: Collectives,
    built: _Built,
    commons: Sequence[Common | None],
) -> None:
    """Broadcast values, build units and engine, attach hooks. Units and engine are put into `built` as soon as they
    exist, so that the caller can undo everything if a later line fails."""
    parameters, units = chosen.parameters, built.units
    if not chosen.on_meta and options.values == "broadcast":
        collectives.broadcast([*(parameter.data for parameter in parameters.values()), *chosen.buffers.values()])
    fill = not chosen.on_meta
    for unit in build_units(parameters, chosen.specs, chosen.plan, collectives, fill=fill, commons=commons):
        units.append(unit)
    limit = options.max_transient_bytes
    engine = Engine(chosen.plan, units, collectives, chosen.model, chosen.managed, limit)
    built.engine = engine
    if limit is not None:
        engine.pool.expect_units = partial(expect_within, limit, chosen.plan, Topology.of(collectives))
    if chosen.on_meta:
        assert options.materialize is not None
        give_values(chosen.model, units, options.materialize, collectives, chosen.managed)
        for unit in units:
            unit.weights.hide()
            engine.gatherer.updated(unit)
        engine.gatherer.settle()
    modules, calls = modules_of(chosen.model), [path for unit in units for path in unit.spec.calls]
    engine.hooks.attach(modules, casts_of(modules, Rules.of(options.precision), calls), engine.before_forward)
    engine.hooks.describe(chosen.model, lambda: f"sharded by zeroshard: {in_one_line(engine)}")
