"""`shard(model, plan)`: choose units, agree with the other ranks, fill, attach; undo all of it if anything fails.

The model keeps its class, its names and its `nn.Parameter` objects; only where their data lie has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.mesh import Mesh
from zeroshard.comm.same import expect_same
from zeroshard.comm.together import together
from zeroshard.errors import InvalidValue
from zeroshard.handle import Handle
from zeroshard.io.logger import tell
from zeroshard.model.absent import give
from zeroshard.model.batch_norms import expect_kept
from zeroshard.model.casting import Precisions, Rules, casts_of
from zeroshard.model.managed import Ignored, Managed
from zeroshard.model.right_call import expect_module, expect_unwrapped
from zeroshard.model.units import KeepGathered, UnitPolicy, UnitSpec, choose_units
from zeroshard.placement import Plan, as_plan
from zeroshard.planner import Topology, expect_within, fit_units
from zeroshard.ready import device_of, expect_ready, expect_same_model
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.materialize import META, Source, is_on_meta, move
from zeroshard.runtime.materialize import materialize as give_values
from zeroshard.storage.unit import build_units

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
        units: what is gathered, reduced and freed together: module classes or their names ("Block"), and groups of
            modules or names that are one unit (`[Block, ("norm", "head")]`); a callable `module -> bool`; or a number
            of bytes. None groups neighbouring modules up to 32 MiB. The rest of the model is the root unit.
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
        TypeError: something else in place of the model.
        ValueError: bad arguments, a model that differs between ranks, a parameter that is sharded already, a model that
            torch DDP wraps, a limit that cannot be kept. On every rank alike; the model is as it was before.
        RuntimeError: `zeroshard.init()` has not been called.
    """
    expect_module(model)
    collectives = Collectives(Mesh.of(mesh, device_of(model.parameters())), CommLog())
    collectives.expect_grid()
    options = _Options(units, precision, max_transient_bytes, materialize, values, ignored, keep_gathered)
    chosen = together(collectives, "shard", partial(_choose, model, plan, options, collectives), words=_in_words)
    _expect_same(chosen, options, collectives)
    handle = Handle(_build_or_undo(chosen, options, collectives))
    collectives.map_peers()
    name, way = type(model).__name__, collectives.transport.name
    tell(collectives.mesh.world.rank, "%s is sharded: %r, %s transport", name, handle, way)
    return handle


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, (ValueError, TypeError, ImportError)) else repr(error)


@dataclass(frozen=True)
class _Options:
    """The arguments of `shard` beside model, plan and mesh."""

    units: UnitPolicy
    precision: Precisions
    max_transient_bytes: int | None
    materialize: Source | None
    values: str
    ignored: Ignored
    keep_gathered: KeepGathered


@dataclass(frozen=True)
class _Chosen:
    """What every rank has found possible, before anything is changed."""

    model: nn.Module
    plan: Plan
    managed: Managed
    specs: list[UnitSpec]
    on_meta: bool

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.managed.parameters(self.model)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """As they are now: a model that leaves the meta device gets others."""
        return self.managed.buffers(self.model)


def _choose(model: nn.Module, plan: Plan | str | int, options: _Options, collectives: Collectives) -> _Chosen:
    """Raises:
    ValueError, TypeError: arguments that are wrong, or do not fit the model."""
    plan = as_plan(plan)
    if plan.external_gradients:
        raise InvalidValue(
            "OPTIMIZER_ONLY is for parameters whose gradients something else reduces: pass model.parameters() to "
            "ShardedOptimizer, without shard()"
        )
    managed = Managed.without(model, options.ignored)
    expect_unwrapped(model, managed.parameters(model).values())
    expect_kept(model, options.precision, managed)
    specs = _choose_units(model, plan, managed, options, Topology.of(collectives))
    expect_ready(model, managed, collectives.device, options.materialize)
    if options.values not in ("broadcast", "check"):
        raise InvalidValue(f"values must be 'broadcast' or 'check', found {options.values!r}")
    on_meta = is_on_meta([*managed.parameters(model).values(), *managed.buffers(model).values()])
    return _Chosen(model, plan, managed, specs, on_meta)


def _choose_units(
    model: nn.Module, plan: Plan, managed: Managed, options: _Options, topology: Topology
) -> list[UnitSpec]:
    """Within the limit, if there is one."""
    limit = options.max_transient_bytes
    choose = partial(
        choose_units, model, precision=options.precision, managed=managed, keep_gathered=options.keep_gathered
    )
    if options.units is None and limit is not None:
        return fit_units(choose, limit, plan, topology)
    specs = choose(options.units)
    if limit is not None:
        expect_within(limit, plan, topology, specs)
    return specs


def _expect_same(chosen: _Chosen, options: _Options, collectives: Collectives) -> None:
    """Raises:
    ValueError: the ranks have different models; or different values, where those must be the same already."""
    expect_same_model(collectives, chosen.parameters, chosen.specs, chosen.plan)
    if options.values == "check" and not chosen.on_meta:
        tensors = {**chosen.parameters, **chosen.buffers}
        expect_same(collectives, tensors, "shard, values='check'", _LOAD_THE_SAME)


def _build_or_undo(chosen: _Chosen, options: _Options, collectives: Collectives) -> Engine:
    """An engine that trains the model. If a rank fails, all raise, and each model is as it was before."""
    if chosen.on_meta:
        move(chosen.model, META, collectives.device)
    before = [(parameter, parameter.data) for parameter in chosen.parameters.values()]
    engines: list[Engine] = []
    build = partial(_build, chosen, options, collectives, engines)
    try:  # files are read by some ranks more slowly than by others
        together(collectives, "shard", build, words=_in_words, patient=True)
    except ValueError:
        while engines:
            engines.pop().release()
        for parameter, data in before:
            give(parameter, data)
        if chosen.on_meta:
            move(chosen.model, collectives.device, META)
        raise
    return engines[0]


def _build(chosen: _Chosen, options: _Options, collectives: Collectives, engines: list[Engine]) -> None:
    """Values, units, engine (which `engines` gets, as what follows may fail), hooks."""
    parameters = chosen.parameters
    if not chosen.on_meta and options.values == "broadcast":
        collectives.broadcast([*(parameter.data for parameter in parameters.values()), *chosen.buffers.values()])
    units = build_units(parameters, chosen.specs, chosen.plan, collectives, fill=not chosen.on_meta)
    limit = options.max_transient_bytes
    engine = Engine(chosen.plan, units, collectives, chosen.model, chosen.managed, limit)
    engines.append(engine)
    if limit is not None:
        engine.pool.expect_units = partial(expect_within, limit, chosen.plan, Topology.of(collectives))
    if chosen.on_meta:
        assert options.materialize is not None
        give_values(chosen.model, units, options.materialize, collectives, chosen.managed)
        for unit in units:
            unit.weights.hide()
            engine.gatherer.updated(unit)
        engine.gatherer.settle()
    calls = [path for unit in units for path in unit.spec.calls]
    engine.attach(casts_of(chosen.model, Rules.of(options.precision), calls))
